// A tensor of a dtype that base/dtype.h does not have. Files may hold such beside what layers need: it is one row of
// U8, the bytes of the file, and its `stored` names the dtype.
#pragma once

#include "base/dtype.h"
#include "io/model_source.h"

namespace nfp {

inline bool is_opaque(const TensorInfo& tensor) {
  return tensor.dtype == DType::kU8 && tensor.stored != info(DType::kU8).safetensors_name;
}

}  // namespace nfp
