#include "backend/cuda/fused/arrange_codes.h"

#include <algorithm>

#include "backend/cuda/fused/arrange_codes_kernel.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/launch.h"

namespace nfp::cuda {

Status arrange_codes(const ArrangeCodesCall& c, CUstream_st* stream) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "arrange_codes: {} {}", field, rule);
  };
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (c.m <= 0 || c.m > INT32_MAX) return bad("m", "must be 1 to 2^31 - 1");
  if (c.k <= 0 || c.k > kMaxArrangedColumns) return bad("k", "must be 1 to 2^27");
  if (c.codes == nullptr || c.ld < c.k) return bad("codes", "is null, or ld smaller than a row");
  const int64_t width = PlaneShape{0, c.k}.padded_k();
  if (c.y == nullptr || !aligned(c.y) || c.ldy % 16 != 0 || c.ldy < width) {
    return bad("y", "must be 16-byte aligned and not null, ldy a multiple of 16 and at least padded_k()");
  }
  if (c.y_scales != nullptr && c.scales == nullptr) return bad("scales", "is null, and y_scales is not");
  ArrangeCodesParams p{};
  p.codes = c.codes;
  p.scales = c.scales;
  p.y = c.y;
  p.y_scales = c.y_scales;
  p.ld = c.ld;
  p.ldy = c.ldy;
  p.k = static_cast<int>(c.k);
  p.chunks = static_cast<int>(width / 16);
  p.one_scale = c.one_scale;
  LaunchShape shape;
  shape.grid = static_cast<int>(c.m);
  shape.grid_y = (p.chunks + kArrangeThreads - 1) / kArrangeThreads;
  shape.block = std::min(kArrangeThreads, (p.chunks + 31) / 32 * 32);
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  const bool is_aligned = aligned(c.codes) && c.ld % 16 == 0 && c.k % 16 == 0;
  return launch("arrange_codes", arrange_codes_function(is_aligned), shape, arguments, stream);
}

}  // namespace nfp::cuda
