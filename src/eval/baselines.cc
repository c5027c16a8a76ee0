#include "eval/baselines.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/float_types.h"
#include "eval/fp8_channel.h"
#include "io/family.h"

namespace nfp {
namespace {

// Passes everything on to the matrix it wraps; its storage is what a subclass says.
class WrappedReader : public MatrixReader {
 public:
  explicit WrappedReader(std::unique_ptr<MatrixReader> source) : source_(std::move(source)) {}
  int64_t rows() const override { return source_->rows(); }
  int64_t cols() const override { return source_->cols(); }
  const std::string& name() const override { return source_->name(); }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    return source_->read_fp16(first, count, out);
  }
  Status read_nested(int64_t, int64_t, uint8_t*, uint8_t*, int8_t*) const override {
    return error(ErrorCode::kUnsupported, "{}: is held in a baseline's form, which is not nested", name());
  }

 protected:
  std::unique_ptr<MatrixReader> source_;
};

class DenseReader final : public WrappedReader {
 public:
  using WrappedReader::WrappedReader;
  Storage storage() const override { return Storage::kDenseF16; }
};

// Codes as upper bytes, and their scales as the rows' factors.
class Fp8ChannelReader final : public WrappedReader {
 public:
  using WrappedReader::WrappedReader;
  Storage storage() const override { return Storage::kNested; }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    std::vector<float> scale(static_cast<size_t>(count));
    NFP_RETURN_IF_ERROR(quantise(first, count, upper, scale.data()));
    std::fill_n(exponent, count, int8_t{0});
    // With these lower bytes the FP16 form is the same number.
    for (int64_t i = 0; i < count * cols(); ++i) lower[i] = static_cast<uint8_t>((upper[i] & 1u) << 7);
    return ok_status();
  }
  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    std::vector<uint8_t> codes(static_cast<size_t>(count * cols()));
    NFP_RETURN_IF_ERROR(quantise(first, count, codes.data(), factor));
    for (int64_t i = 0; i < count; ++i) factor[i] *= 256.0f;  // an upper byte stands for E4M3 * 2^-8
    return ok_status();
  }

 private:
  Status quantise(int64_t first, int64_t count, uint8_t* codes, float* scale) const {
    std::vector<uint16_t> row(static_cast<size_t>(cols()));
    for (int64_t i = 0; i < count; ++i) {
      NFP_RETURN_IF_ERROR(read_fp16(first + i, 1, row.data()));
      scale[i] = quantise_fp8_channel(row, codes + i * cols());
    }
    return ok_status();
  }
};

constexpr int64_t kBlock = 128;

class BlockReader final : public WrappedReader {
 public:
  using WrappedReader::WrappedReader;
  Storage storage() const override { return Storage::kDenseF16; }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    const int64_t cols = source_->cols();
    std::vector<uint16_t> block;
    for (int64_t begin = first / kBlock * kBlock; begin < first + count; begin += kBlock) {
      const int64_t size = std::min(kBlock, source_->rows() - begin);
      block.resize(static_cast<size_t>(size * cols));
      NFP_RETURN_IF_ERROR(source_->read_fp16(begin, size, block.data()));
      for (int64_t c = 0; c < cols; c += kBlock) round_block(block, size, c, std::min(kBlock, cols - c));
      const int64_t from = std::max(begin, first), to = std::min(begin + size, first + count);
      std::copy(block.begin() + (from - begin) * cols, block.begin() + (to - begin) * cols,
                out + (from - first) * cols);
    }
    return ok_status();
  }

 private:
  void round_block(std::vector<uint16_t>& block, int64_t rows, int64_t first, int64_t width) const {
    const int64_t cols = source_->cols();
    const auto each = [&](auto&& visit) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = first; c < first + width; ++c) visit(block[static_cast<size_t>(r * cols + c)]);
      }
    };
    float largest = 0;
    each([&](uint16_t w) { largest = std::max(largest, std::abs(fp16_to_fp32(w))); });
    if (largest == 0) return;
    const float scale = largest / 448.0f;
    each([&](uint16_t& w) { w = fp32_to_fp16(e4m3_to_fp32(fp32_to_e4m3(fp16_to_fp32(w) / scale)) * scale); });
  }
};

// Whether `tensor` is the embedding's matrix or the head's.
bool is_head(const std::string& tensor) { return tensor.starts_with(kEmbeddingName) || tensor.starts_with(kHeadName); }

template <typename Reader>
std::unique_ptr<MatrixReader> wrap(std::unique_ptr<MatrixReader> source) {
  return std::make_unique<Reader>(std::move(source));
}

}  // namespace

MatrixFilter fp8_channel_filter(bool head) {
  return
      [head](const std::string& tensor, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
        if (is_head(tensor) && !head) return reader;
        return wrap<Fp8ChannelReader>(std::move(reader));
      };
}

MatrixFilter block_fp8_filter() {
  return [](const std::string& tensor, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    if (is_head(tensor) || reader->storage() != Storage::kNested) return reader;
    return wrap<BlockReader>(std::move(reader));
  };
}

MatrixFilter dense_filter() {
  return [](const std::string&, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    return wrap<DenseReader>(std::move(reader));
  };
}

}  // namespace nfp
