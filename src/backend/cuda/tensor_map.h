// The driver's function that describes a tensor to the copy engine.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "base/result.h"

namespace nfp::cuda {

using EncodeTiled = decltype(cuTensorMapEncodeTiled);

// As an EncodeTiled*. Looked up once; there is no link to the driver's library.
inline Result<void*> tensor_map_encoder() {
  static void* encode = nullptr;
  static const cudaError_t status = [] {
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t looked =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found);
    return looked == cudaSuccess && found != cudaDriverEntryPointSuccess ? cudaErrorNotSupported : looked;
  }();
  if (status == cudaSuccess) return encode;
  return error(ErrorCode::kUnsupported,
               "the CUDA driver has no cuTensorMapEncodeTiled ({}); install driver 525 or later",
               cudaGetErrorString(status));
}

}  // namespace nfp::cuda
