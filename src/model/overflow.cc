#include "model/overflow.h"

namespace nfp {

Error overflow_error(const Model& model, std::string_view results) {
  const int32_t last = model.config().layers - 1;
  if (model.backend().activation_dtype() == DType::kF16) {
    return error(
        ErrorCode::kUnsupported,
        "the {} are not finite: in layer {}, the last, behind its keys and values, or in the final norm a number "
        "is beyond FP16's range (65504); run the model with --device cpu, which computes in FP32",
        results, last);
  }
  return error(
      ErrorCode::kUnsupported,
      "the {} are not finite: in layer {}, the last, behind its keys and values, or in the final norm a number "
      "is beyond FP32's range; its weights may be damaged: compare the model's files with where they came from",
      results, last);
}

}  // namespace nfp
