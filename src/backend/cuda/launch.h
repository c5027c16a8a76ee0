// One kernel launch with the attributes that a step's kernels use. Only enqueues. (What a kernel is allowed is of a
// device, and another may be current than the last time.)
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/result.h"

namespace nfp::cuda {

struct LaunchShape {
  int grid = 1;
  int cluster = 1;  // blocks
  int block = 1;    // threads
  size_t shared = 0;
  bool dependent = false;  // programmatic dependent launch
  int grid_y = 1;
};

// `what` begins the error message.
inline Status launch(std::string_view what, const void* function, const LaunchShape& shape, void** arguments,
                     cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.grid), static_cast<unsigned>(shape.grid_y));
  config.blockDim = dim3(static_cast<unsigned>(shape.block));
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.dependent) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaError_t status = cudaSuccess;
  constexpr size_t kUnasked = size_t{40} * 1024;  // 48 KB, of which a kernel's own variables are a part
  if (shape.shared > kUnasked) {
    status =
        cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared));
  }
  constexpr int kPortable = 8;  // blocks
  if (status == cudaSuccess && shape.cluster > kPortable)
    status = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status == cudaSuccess) status = cudaLaunchKernelExC(&config, function, arguments);
  if (status == cudaSuccess) return ok_status();
  return error(ErrorCode::kResource, "{}: launching: {}", what, cudaGetErrorString(status));
}

}  // namespace nfp::cuda
