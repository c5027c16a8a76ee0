#include "model/baseline.h"

#include <utility>
#include <vector>

#include "nested/fp8_channel.h"

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

 private:
  std::unique_ptr<MatrixReader> source_;
};

class DenseReader final : public WrappedReader {
 public:
  using WrappedReader::WrappedReader;
  Storage storage() const override { return Storage::kDenseF16; }
};

class Fp8ChannelReader final : public WrappedReader {
 public:
  using WrappedReader::WrappedReader;
  Storage storage() const override { return Storage::kFp8Channel; }
  Status read_fp8_channel(int64_t first, int64_t count, uint8_t* codes, float* scale) const override {
    const auto width = static_cast<size_t>(cols());
    std::vector<uint16_t> row(width);
    for (int64_t i = 0; i < count; ++i) {
      NFP_RETURN_IF_ERROR(read_fp16(first + i, 1, row.data()));
      scale[i] = quantise_fp8_channel(row, codes + static_cast<size_t>(i) * width);
    }
    return ok_status();
  }
};

}  // namespace

std::unique_ptr<MatrixReader> make_fp8_channel_reader(std::unique_ptr<MatrixReader> source) {
  return std::make_unique<Fp8ChannelReader>(std::move(source));
}

std::unique_ptr<MatrixReader> make_dense_reader(std::unique_ptr<MatrixReader> source) {
  return std::make_unique<DenseReader>(std::move(source));
}

}  // namespace nfp
