// For tests.
#pragma once

#include "backend/cuda/gemm/plan/config.h"

namespace nfp::cuda {

inline const DeviceShape kH200;  // what a DeviceShape is by default

}  // namespace nfp::cuda
