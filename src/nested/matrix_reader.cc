#include "nested/matrix_reader.h"

#include <algorithm>
#include <utility>

#include "nested/format.h"
#include "nested/matrix_analysis.h"

namespace nfp {
namespace {

constexpr int64_t kChunkBytes = 256 << 10;

class AnalysedReader final : public MatrixReader {
 public:
  AnalysedReader(MatrixSource source, MatrixAnalysis analysis)
      : source_(std::move(source)), storage_(analysis.storage), exponents_(std::move(analysis.exponents)) {}
  ~AnalysedReader() override {
    if (source_.done) source_.done();
  }

  int64_t rows() const override { return source_.rows; }
  int64_t cols() const override { return source_.cols; }
  Storage storage() const override { return storage_; }
  const std::string& name() const override { return source_.name; }

  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    NFP_RETURN_IF_ERROR(source_.read(first, count, out));
    if (source_.type == WeightType::kF16) return ok_status();
    const auto all = std::span(out, static_cast<size_t>(count * source_.cols));
    shift_row(all, WeightType::kBF16, 0, out);
    // Only a nested row with a large exponent can hold a BF16 number beyond FP16's range.
    if (std::any_of(all.begin(), all.end(), [](uint16_t w) { return (w & 0x7fffu) >= 0x7c00u; })) {
      return error(ErrorCode::kUnsupported, "{}: a weight in rows {} to {} is beyond FP16; read the matrix nested",
                   source_.name, first, first + count - 1);
    }
    return ok_status();
  }

  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    if (storage_ != Storage::kNested) {
      return error(ErrorCode::kUnsupported, "{}: is not nested; read it as FP16", source_.name);
    }
    const int64_t cols = source_.cols;
    const int64_t chunk =
        std::clamp<int64_t>(kChunkBytes / (2 * std::max<int64_t>(cols, 1)), 1, std::max<int64_t>(count, 1));
    std::vector<uint16_t> buffer(chunk * cols);
    for (int64_t done = 0; done < count; done += chunk) {
      const int64_t now = std::min(chunk, count - done);
      NFP_RETURN_IF_ERROR(source_.read(first + done, now, buffer.data()));
      for (int64_t i = 0; i < now; ++i) {
        const auto row = std::span(buffer).subspan(i * cols, cols);
        exponent[done + i] = exponents_[first + done + i];
        shift_row(row, source_.type, exponent[done + i], row.data());
        split(row, upper + (done + i) * cols, lower + (done + i) * cols);
      }
    }
    return ok_status();
  }

 private:
  const MatrixSource source_;
  const Storage storage_;
  const std::vector<int8_t> exponents_;
};

}  // namespace

std::unique_ptr<MatrixReader> make_matrix_reader(MatrixSource source, MatrixAnalysis analysis) {
  return std::make_unique<AnalysedReader>(std::move(source), std::move(analysis));
}

}  // namespace nfp
