#include "backend/cuda/fused/round_rows.h"

#include <algorithm>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/fused/round_rows_kernel.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/row_peaks.h"

namespace nfp::cuda {

Status round_rows(const RoundRowsCall& c, CUstream_st* stream) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "round_rows: {} {}", field, rule);
  };
  const auto aligned = [](const void* p) { return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (c.m <= 0 || c.m > RowPeaks::kRows) return bad("m", "must be 1 to 8");
  if (c.k <= 0 || c.k > kMaxColumns || c.k % 8 != 0) return bad("k", "must be a multiple of 8, 8 to 32768");
  if (!aligned(c.x) || c.ldx % 8 != 0 || c.ldx < c.k) {
    return bad("x", "must be 16-byte aligned and not null, ldx a multiple of 8 and at least k");
  }
  if (c.peaks == nullptr || c.scales == nullptr) return bad("peaks and scales", "must not be null");
  const int64_t width = PlaneShape{0, c.k}.padded_k();
  if (!aligned(c.y) || c.ldy % 16 != 0 || c.ldy < width) {
    return bad("y", "must be 16-byte aligned and not null, ldy a multiple of 16 and at least padded_k()");
  }
  RoundRowsParams p{};
  p.x = static_cast<const uint16_t*>(c.x);
  p.peaks = c.peaks;
  p.y = c.y;
  p.scales = c.scales;
  p.ldx = c.ldx;
  p.ldy = c.ldy;
  p.k = static_cast<int>(c.k);
  p.chunks = static_cast<int>(width / 16);
  p.blocks = (p.chunks + kRoundRowsThreads - 1) / kRoundRowsThreads;  // 8 at most
  p.rehearses = c.dependent_launch;
  LaunchShape shape;
  shape.grid = static_cast<int>(c.m) * p.blocks;
  shape.cluster = p.blocks;
  shape.block = ((p.chunks + p.blocks - 1) / p.blocks + 31) / 32 * 32;
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("round_rows", round_rows_function(), shape, arguments, stream);
}

}  // namespace nfp::cuda
