#include "calibrate/baseline_filters.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/float_types.h"
#include "calibrate/upper_choice.h"

namespace nfp {
namespace {

constexpr int64_t kBlock = 128;

class BlockReader final : public MatrixReader {
 public:
  explicit BlockReader(std::unique_ptr<MatrixReader> inner) : inner_(std::move(inner)) {}
  int64_t rows() const override { return inner_->rows(); }
  int64_t cols() const override { return inner_->cols(); }
  Storage storage() const override { return Storage::kDenseF16; }
  const std::string& name() const override { return inner_->name(); }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    const int64_t cols = inner_->cols();
    std::vector<uint16_t> block;
    for (int64_t begin = first / kBlock * kBlock; begin < first + count; begin += kBlock) {
      const int64_t size = std::min(kBlock, inner_->rows() - begin);
      block.resize(static_cast<size_t>(size * cols));
      NFP_RETURN_IF_ERROR(inner_->read_fp16(begin, size, block.data()));
      for (int64_t c = 0; c < cols; c += kBlock) round_block(block, size, c, std::min(kBlock, cols - c));
      const int64_t from = std::max(begin, first), to = std::min(begin + size, first + count);
      std::copy(block.begin() + (from - begin) * cols, block.begin() + (to - begin) * cols,
                out + (from - first) * cols);
    }
    return ok_status();
  }

  Status read_nested(int64_t, int64_t, uint8_t*, uint8_t*, int8_t*) const override {
    return error(ErrorCode::kUnsupported, "{}: has no nested form here", name());
  }

 private:
  void round_block(std::vector<uint16_t>& block, int64_t rows, int64_t first, int64_t width) const {
    const int64_t cols = inner_->cols();
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

  std::unique_ptr<MatrixReader> inner_;
};

}  // namespace

MatrixFilter nearest_filter() {
  return [](const std::string& tensor, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    auto nearest = std::make_shared<UpperChoice>();
    nearest->name = tensor;
    nearest->rows = reader->rows();
    nearest->cols = reader->cols();
    nearest->rule = UpperRule::kRestricted;
    nearest->bits.assign(static_cast<size_t>(nearest->rows * choice_row_bytes(nearest->cols)), 0);
    return make_chosen_reader(std::move(reader), std::move(nearest));
  };
}

MatrixFilter block_fp8_filter() {
  return [](const std::string& tensor, std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    const bool other = tensor.find("embed") != std::string::npos || tensor.find("lm_head") != std::string::npos;
    if (other || reader->storage() != Storage::kNested) return reader;
    return std::unique_ptr<MatrixReader>(std::make_unique<BlockReader>(std::move(reader)));
  };
}

}  // namespace nfp
