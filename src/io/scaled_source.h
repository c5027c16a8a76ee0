// A model whose rows and columns are multiplied by powers of two as they are read: what smoothing (docs/quality.md)
// makes of a model without writing it anew.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/model_source.h"

namespace nfp {

// Element [r, c] of a tensor is multiplied by 2^(rows[r] + columns[c]); an empty list is all zeros. A vector (a norm's
// weight, a bias) has rows only.
struct TensorScaling {
  std::vector<int8_t> rows;     // [TensorInfo::rows()]
  std::vector<int8_t> columns;  // [TensorInfo::row_elements()]

  bool operator==(const TensorScaling&) const = default;
};

using TensorScalings = std::map<std::string, TensorScaling, std::less<>>;  // by tensor

// `inner` with `scalings` applied; tensors that are not named are inner's own. A scaled matrix of FP32 is one of FP16,
// rounded before it is scaled, so that its products stay what they were. Nothing is ever rounded by the scaling:
// reading a value that its dtype cannot hold times the power of two is an error. Errors: a tensor that is absent, not
// of a float type, or not of the scaling's size (scalings of another model).
Result<std::unique_ptr<ModelSource>> scale_source(std::shared_ptr<const ModelSource> inner, TensorScalings scalings);

}  // namespace nfp
