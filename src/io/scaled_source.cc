#include "io/scaled_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/float_types.h"
#include "base/power_of_two.h"

namespace nfp {
namespace {

constexpr int kMostExponent = 60;  // of a row or a column: 2^e of both is a normal FP32 number

class ScaledSource final : public ModelSource {
 public:
  ScaledSource(std::shared_ptr<const ModelSource> inner, TensorScalings scalings)
      : ModelSource(inner->kind(), inner->path()), inner_(std::move(inner)), scalings_(std::move(scalings)) {}

  Status open() {
    describe_as(*inner_);
    for (const auto& [name, scaling] : scalings_) {
      NFP_ASSIGN_OR_RETURN(const TensorInfo* tensor, inner_need(name));
      const auto fits = [](const std::vector<int8_t>& exponents, int64_t size) {
        return exponents.empty() || static_cast<int64_t>(exponents.size()) == size;
      };
      if (!fits(scaling.rows, tensor->rows()) || !fits(scaling.columns, tensor->row_elements())) {
        return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is not of the size that it was smoothed for", path_,
                     name);
      }
      for (const auto* exponents : {&scaling.rows, &scaling.columns}) {
        if (std::any_of(exponents->begin(), exponents->end(), [](int8_t e) { return std::abs(e) > kMostExponent; })) {
          return error(ErrorCode::kInvalidInput, "{}: tensor '{}' was smoothed by more than 2^{}", path_, name,
                       kMostExponent);
        }
      }
    }
    for (TensorInfo tensor : inner_->tensors()) {
      if (tensor.dtype == DType::kF32 && tensor.shape.rank() == 2 && scalings_.contains(tensor.name)) {
        tensor.dtype = DType::kF16;
      }
      add_tensor(std::move(tensor));
    }
    return ok_status();
  }

  std::optional<std::string> tokenizer_gguf() const override { return inner_->tokenizer_gguf(); }

  Result<std::unique_ptr<MatrixReader>> matrix(std::string_view name, ThreadPool& threads,
                                               MatrixAnalysis* analysis) const override {
    if (!scalings_.contains(name)) return inner_->matrix(name, threads, analysis);
    return ModelSource::matrix(name, threads, analysis);
  }

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const TensorInfo& original = *inner_->find(tensor.name);
    const auto place = scalings_.find(tensor.name);
    if (place == scalings_.end()) return inner_->read_rows(original, first, count, out);
    if (original.dtype == tensor.dtype) {
      NFP_RETURN_IF_ERROR(inner_->read_rows(original, first, count, out));
    } else {
      NFP_RETURN_IF_ERROR(inner_->read_fp16_rows(tensor.name, first, count, reinterpret_cast<uint16_t*>(out)));
    }
    const auto cols = static_cast<size_t>(tensor.row_elements());
    for (int64_t r = first; r < first + count; ++r, out += cols * size_of(tensor.dtype)) {
      if (scale_row(place->second, r, tensor.dtype, cols, out)) continue;
      return error(ErrorCode::kInvalidInput,
                   "{}: tensor '{}', row {}: a value times its power of two is not {} any more (smoothed for another "
                   "model?)",
                   path_, tensor.name, r, name_of(tensor.dtype));
    }
    return ok_status();
  }
  void release(const TensorInfo& tensor) const override { inner_->release(*inner_->find(tensor.name)); }

 private:
  Result<const TensorInfo*> inner_need(const std::string& name) const {
    const TensorInfo* tensor = inner_->find(name);
    if (tensor != nullptr && is_weight_float(tensor->dtype)) return tensor;
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}', which was smoothed, is {}", path_, name,
                 tensor == nullptr ? "missing" : "no float tensor");
  }

  // False where a product is not exact.
  static bool scale_row(const TensorScaling& scaling, int64_t r, DType dtype, size_t cols, std::byte* row) {
    const int by_row = scaling.rows.empty() ? 0 : scaling.rows[static_cast<size_t>(r)];
    bool exact = true;
    for (size_t c = 0; c < cols; ++c) {
      const int exponent = by_row + (scaling.columns.empty() ? 0 : scaling.columns[c]);
      if (exponent == 0) continue;
      if (dtype == DType::kF32) {
        float value;
        std::memcpy(&value, row + 4 * c, 4);
        const float scaled = value * power_of_two(exponent);
        exact &= scaled * power_of_two(-exponent) == value;
        std::memcpy(row + 4 * c, &scaled, 4);
        continue;
      }
      uint16_t bits;
      std::memcpy(&bits, row + 2 * c, 2);
      const float scaled = (dtype == DType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits)) * power_of_two(exponent);
      bits = dtype == DType::kF16 ? fp32_to_fp16(scaled) : fp32_to_bf16(scaled);
      exact &= (dtype == DType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits)) == scaled && std::isfinite(scaled);
      std::memcpy(row + 2 * c, &bits, 2);
    }
    return exact;
  }

  std::shared_ptr<const ModelSource> inner_;
  TensorScalings scalings_;
};

}  // namespace

Result<std::unique_ptr<ModelSource>> scale_source(std::shared_ptr<const ModelSource> inner, TensorScalings scalings) {
  auto source = std::make_unique<ScaledSource>(std::move(inner), std::move(scalings));
  NFP_RETURN_IF_ERROR(source->open());
  return std::unique_ptr<ModelSource>(std::move(source));
}

}  // namespace nfp
