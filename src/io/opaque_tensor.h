// A tensor of a dtype that base/dtype.h does not have. Files may hold such beside what layers need: it is one row of
// U8, the bytes of the file, and its `stored` names the dtype.
#pragma once

#include <string>
#include <string_view>

#include "base/dtype.h"
#include "base/result.h"
#include "io/model_source.h"

namespace nfp {

inline bool is_opaque(const TensorInfo& tensor) {
  return tensor.dtype == DType::kU8 && tensor.stored != info(DType::kU8).safetensors_name;
}

// Of one that a layer needs, and that no weight can be read from.
inline Error no_weight(const std::string& path, const TensorInfo& tensor) {
  return error(ErrorCode::kUnsupported, "{}: tensor '{}' has dtype {}; weights must be F16, BF16 or F32", path,
               tensor.name, is_opaque(tensor) ? std::string_view(tensor.stored) : name_of(tensor.dtype));
}

}  // namespace nfp
