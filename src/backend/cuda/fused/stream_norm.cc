#include "backend/cuda/fused/stream_norm.h"

#include <algorithm>

#include "backend/cuda/fused/stream_norm_kernel.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/launch.h"

namespace nfp::cuda {

Status run_stream_norm(const StreamNormCall& c, CUstream_st* stream) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "stream_norm: {} {}", field, rule);
  };
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (c.rows <= 0 || c.rows > INT32_MAX) return bad("rows", "must be 1 to 2^31 - 1");
  if (c.columns <= 0 || c.columns % 4 != 0 || c.columns > (1 << 20)) {
    return bad("columns", "must be a multiple of 4 up to 2^20");
  }
  const int outputs = (c.y_f32 != nullptr) + (c.y_f16 != nullptr) + (c.y_e4m3 != nullptr);
  if (outputs > 1) return bad("y_f32, y_f16 and y_e4m3", "are more than one");
  if (c.x == nullptr || (outputs == 0 && c.residual == nullptr)) return bad("x", "is null, or nothing is to be made");
  if (outputs > 0 && c.weight == nullptr) return bad("weight", "is null");
  if (c.y_e4m3 != nullptr && c.scales == nullptr) return bad("scales", "is null");
  for (const void* p :
       {static_cast<const void*>(c.x), static_cast<const void*>(c.residual), static_cast<const void*>(c.weight),
        static_cast<const void*>(c.y_f32), static_cast<const void*>(c.y_f16), static_cast<const void*>(c.y_e4m3)}) {
    if (!aligned(p)) return bad("x, residual, weight and y", "must be 16-byte aligned");
  }
  StreamNormParams p{};
  p.x = c.x;
  p.residual = c.residual;
  p.weight = outputs > 0 ? c.weight : nullptr;
  p.y_f32 = c.y_f32;
  p.y_f16 = c.y_f16;
  p.y_e4m3 = c.y_e4m3;
  p.scales = c.scales;
  p.columns = static_cast<int>(c.columns);
  p.padded_columns = static_cast<int>(PlaneShape{0, c.columns}.padded_k());
  p.epsilon = c.epsilon;
  LaunchShape shape;
  shape.grid = static_cast<int>(c.rows);
  shape.block = static_cast<int>(std::min<int64_t>(kStreamNormThreads, (c.columns / 4 + 31) / 32 * 32));
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("stream_norm", stream_norm_function(), shape, arguments, stream);
}

}  // namespace nfp::cuda
