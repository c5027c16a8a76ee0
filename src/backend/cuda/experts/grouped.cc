#include "backend/cuda/experts/grouped.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <span>

#include "backend/cuda/experts/grouped_kernels.h"
#include "backend/cuda/experts/grouped_plan.h"
#include "backend/cuda/experts/grouped_unit.h"
#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/tensor_map.h"

namespace nfp::cuda {
namespace {

int multiprocessors() {
  static const int count = [] {
    int device = 0, sms = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      return 132;
    }
    return sms;
  }();
  return count;
}

bool exact(const ExpertLinearCall& c) { return c.matrices[0].lower != nullptr; }

Mode mode_of(const ExpertLinearCall& c) {
  if (c.e4m3) return Mode::kE4M3;
  if (!exact(c)) return Mode::kW8A16;
  return c.bf16 ? Mode::kBF16 : Mode::kF16;
}

std::span<const GroupedEntry> entries(const ExpertLinearCall& c) {
  switch (mode_of(c)) {
    case Mode::kE4M3:
      return grouped_e4m3();
    case Mode::kF16:
      return grouped_f16();
    case Mode::kBF16:
      return grouped_bf16();
    default:
      return c.bf16 ? grouped_w8abf16() : grouped_w8a16();
  }
}

Result<const GroupedEntry*> entry_for(const ExpertLinearCall& c) {
  const auto all = entries(c);
  std::array<int, 16> tiles{};
  std::transform(all.begin(), all.end(), tiles.begin(), [](const GroupedEntry& entry) { return entry.tokens; });
  NFP_ASSIGN_OR_RETURN(
      const int tile, choose_grouped_tile({mode_of(c), c.rows, c.routes.experts, c.routes.top, c.n, c.k}, c.tile_tokens,
                                          std::span(tiles).first(all.size())));
  return &*std::find_if(all.begin(), all.end(), [&](const GroupedEntry& e) { return e.tokens == tile; });
}

template <int kMost>
Status launch_grouped(const ExpertLinearCall& c, const GroupedShape& shape, const GroupedEntry& entry, int grid,
                      CUstream_st* stream) {
  GroupedParams<kMost> p{};
  p.shape = shape;
  std::copy_n(c.matrices, c.routes.experts, p.matrices);
  void* arguments[] = {&p};
  LaunchShape at;
  at.grid = grid;
  at.block = entry.threads;
  at.shared = static_cast<size_t>(entry.shared_bytes);
  at.dependent = true;
  return launch("grouped experts", entry.function[kMost == kSomeExperts ? 0 : 1], at, arguments, stream);
}

Status gather(const ExpertLinearCall& c, CUstream_st* stream) {
  GatherParams p{};
  p.x = static_cast<const uint4*>(c.x);
  p.out = static_cast<uint4*>(c.gathered);
  p.place = c.routes.place;
  p.top = c.routes.top;
  p.pieces = static_cast<int32_t>(c.k / 8);
  constexpr int64_t kFewRows = 128;  // a block for each assignment
  LaunchShape at;
  at.grid = static_cast<int>(c.rows);
  at.grid_y = c.rows <= kFewRows ? c.routes.top : 1;
  at.block = kGatherThreads;
  at.dependent = true;
  void* arguments[] = {&p};
  return launch("gathering experts' tokens", gather_tokens_function(), at, arguments, stream);
}

}  // namespace

bool can_group(const ExpertLinearCall& c) {
  if (c.tile_tokens < 0 || (!c.sorted && (c.gathered == nullptr || c.e4m3))) return false;
  const int64_t columns = c.epilogue == ExpertEpilogue::kStore ? c.n : c.n / 2;
  if (columns % 8 != 0 || reinterpret_cast<uintptr_t>(c.y) % 16 != 0) return false;
  return std::all_of(c.matrices, c.matrices + c.routes.experts, [&](const ExpertMatrix& matrix) {
    return !matrix.dense && !(c.e4m3 && exact(c)) && (matrix.lower != nullptr) == exact(c) &&
           (matrix.biased || !exact(c));
  });
}

Status run_grouped(const ExpertLinearCall& c, CUstream_st* stream) {
  NFP_ASSIGN_OR_RETURN(void* const function, tensor_map_encoder());
  const auto encode = reinterpret_cast<EncodeTiled*>(function);
  const PlaneShape plane{c.n, c.k};
  const int64_t assignments = c.rows * c.routes.top;
  const int64_t width = c.e4m3 ? plane.padded_k() : c.k;  // elements of a row of x
  const size_t row_bytes = static_cast<size_t>(width) * (c.e4m3 ? 1 : 2);
  const bool one_row = c.rows == 1 && c.distinct && !c.sorted;
  const bool gathers = !c.sorted && !one_row;
  NFP_ASSIGN_OR_RETURN(const GroupedEntry* const found, entry_for(c));
  const GroupedEntry& entry = *found;
  if (gathers) NFP_RETURN_IF_ERROR(gather(c, stream));
  const Mode mode = mode_of(c);
  GroupedShape p{};
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(one_row ? 1 : assignments)};
  const cuuint64_t pitch[1] = {row_bytes};
  constexpr cuuint32_t kSteps[2] = {1, 1};
  const auto encode_boxes = [&](CUtensorMap& map, int tokens) {
    const cuuint32_t box[2] = {c.e4m3 ? 128u : 64u, static_cast<cuuint32_t>(tokens)};
    return encode(&map,
                  c.e4m3   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                  : c.bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                           : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  2, gathers ? c.gathered : const_cast<void*>(c.x), dims, pitch, box, kSteps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode_boxes(p.x, entry.tokens);
  // (Small tiles are one unit, and always copied whole.)
  const int unit = grouped_unit(entry.tokens);
  if (status == CUDA_SUCCESS && unit < entry.tokens) status = encode_boxes(p.x_unit, unit);
  if (status != CUDA_SUCCESS) {
    return error(ErrorCode::kUsage, "expert_linear: cuTensorMapEncodeTiled refused x ({} rows of {}): error {}",
                 assignments, width, static_cast<int>(status));
  }
  const bool gated = c.epilogue != ExpertEpilogue::kStore;
  p.start = c.routes.start;
  p.token_scale = c.token_scale;
  p.y = static_cast<uint16_t*>(c.y);
  p.slab_bytes = static_cast<int64_t>(plane.slab_bytes());
  p.weight_scale = reads_lower(mode) ? 1.0f : 0x1p-8f;
  p.one = 1;
  p.experts = c.routes.experts;
  p.n = static_cast<int32_t>(c.n);
  p.columns = static_cast<int32_t>(gated ? c.n / 2 : c.n);
  p.row_blocks = static_cast<int32_t>(plane.row_blocks());
  p.row_tiles = (p.row_blocks + 1) / 2;
  p.k_iterations = static_cast<int32_t>((c.k + step_k(mode) - 1) / step_k(mode));
  p.gated = gated;
  p.bf16 = c.bf16;
  p.gelu = c.epilogue == ExpertEpilogue::kGeglu;
  p.one_row = one_row;
  p.follows = c.follows && c.sorted;
  // As many tiles as there can be at most, and no more blocks than run at once.
  const int64_t tiles =
      std::min<int64_t>(assignments, c.routes.experts + (assignments + entry.tokens - 1) / entry.tokens);
  const int grid = static_cast<int>(std::min<int64_t>(multiprocessors(), tiles * p.row_tiles));
  return c.routes.experts <= kSomeExperts ? launch_grouped<kSomeExperts>(c, p, entry, grid, stream)
                                          : launch_grouped<kMaxExperts>(c, p, entry, grid, stream);
}

}  // namespace nfp::cuda
