#include "backend/cuda/experts/experts.h"

#include <algorithm>

#include "backend/cuda/experts/experts_kernels.h"
#include "backend/cuda/experts/grouped.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/launch.h"

namespace nfp::cuda {
namespace {

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status bad(std::string_view what, std::string_view field, std::string_view rule) {
  return error(ErrorCode::kUsage, "{}: {} {}", what, field, rule);
}

Status check_routes(std::string_view what, const ExpertRoutes& routes, int64_t rows) {
  if (routes.experts < 1 || routes.experts > kMaxExperts) return bad(what, "experts", "must be 1 to 512");
  if (routes.top < 1 || routes.top > kMaxTopExperts) return bad(what, "top", "must be 1 to 32");
  if (rows < 1 || rows * routes.top > INT32_MAX) return bad(what, "rows", "must be 1 to 2^31 - 1 assignments");
  if (routes.start == nullptr || routes.row == nullptr || routes.place == nullptr || routes.weight == nullptr) {
    return bad(what, "start, row, place and weight", "must not be null");
  }
  return ok_status();
}

template <int kMost>
Status launch_experts(const ExpertLinearCall& c, const ExpertParams& shape, const LaunchShape& at,
                      CUstream_st* stream) {
  ExpertLinearParams<kMost> p{};
  p.shape = shape;
  std::copy_n(c.matrices, c.routes.experts, p.matrices);
  void* arguments[] = {&p};
  return launch("expert_linear", expert_linear_function(kMost == kFewExperts, c.bf16, c.epilogue), at, arguments,
                stream);
}

int logits_of(const RouteArgs& c) { return c.routes.experts + (c.shared_gate != nullptr ? 1 : 0); }
bool by_cluster(const RouteArgs& c) {
  return c.rows >= kRouteClusterLeast && c.rows <= kRouteClusterMost && !c.batch_invariant &&
         route_cluster_fits(c.hidden, logits_of(c));
}

}  // namespace

bool route_gathers(const RouteArgs& c) {
  const int64_t assignments = int64_t{c.rows} * c.routes.top;
  // (More rows an expert are rounded on their way, where they are.)
  return c.gathered != nullptr && (by_cluster(c) || c.rows > kRouteFewRows) && assignments <= kPlacedAtOnce &&
         assignments < kRoundedRows * c.routes.experts;
}

Status run_route(const RouteArgs& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check_routes("route", c.routes, c.rows));
  if (c.routes.top > c.routes.experts) return bad("route", "top", "must not be more than there are experts");
  if (c.hidden <= 0 || c.hidden % 8 != 0) return bad("route", "hidden", "must be a positive multiple of 8");
  if (c.x == nullptr || c.router == nullptr || c.logits == nullptr || !aligned(c.x) || !aligned(c.router) ||
      !aligned(c.shared_gate)) {
    return bad("route", "x, router, shared_gate and logits", "must be there, 16-byte aligned");
  }
  if (c.shared_gate != nullptr && c.shared_weight == nullptr) return bad("route", "shared_weight", "is null");
  RouteArgs p = c;
  void* arguments[] = {&p};
  LaunchShape shape;
  shape.dependent = true;
  const int logits = logits_of(c);
  const auto assign = [&] {
    AssignArgs chosen;
    chosen.ids = reinterpret_cast<const int32_t*>(c.logits);
    chosen.id_stride = c.routes.experts;
    chosen.rows = c.rows;
    chosen.routes = c.routes;
    if (route_gathers(c)) {
      chosen.x = c.x;
      chosen.gathered = c.gathered;
      chosen.row_bytes = int64_t{c.hidden} * 2;
    }
    return run_assign(chosen, stream);
  };
  if (by_cluster(c)) {
    const int tiles = route_cluster_tiles(logits), rows = route_cluster_rows(c.rows);
    shape.grid = (c.rows + rows - 1) / rows * kRouteClusterBlocks;
    shape.cluster = kRouteClusterBlocks;
    shape.block = kRouteClusterWarps * 32;
    shape.shared = static_cast<size_t>(route_cluster_shared_bytes(c.hidden, tiles));
    NFP_RETURN_IF_ERROR(launch("route", route_cluster_function(tiles, rows), shape, arguments, stream));
    return assign();
  }
  if (c.rows >= kRouteManyLeast && !c.batch_invariant) {
    const int experts = route_many_experts(c.rows);
    shape.grid = static_cast<int>((c.rows + kRouteManyRows - 1) / kRouteManyRows);
    shape.grid_y = (logits + experts - 1) / experts;
    shape.block = kRouteManyWarps * 32;
    shape.shared = static_cast<size_t>(route_many_shared_bytes(experts));
    NFP_RETURN_IF_ERROR(launch("route", route_logits_many_function(experts), shape, arguments, stream));
  } else {
    // Few rows are spread over more blocks, each of which reads the router again.
    const int rows = c.rows <= kRouteFewRows ? 1 : c.rows <= 64 ? 2 : kMostRouteRows;
    shape.grid = static_cast<int>((c.rows + rows - 1) / rows);
    shape.grid_y = (c.routes.experts + 1 + kRouteWarps - 1) / kRouteWarps;
    shape.block = kRouteWarps * 32;
    if (rows == 1) shape.shared = kRouteSharedBytes;
    NFP_RETURN_IF_ERROR(launch("route", rows == 1 ? route_logits_row_function() : route_logits_function(rows), shape,
                               arguments, stream));
  }
  shape.shared = 0;
  shape.grid_y = 1;
  if (c.rows <= kRouteFewRows) {
    shape.grid = 1;
    shape.block = kRouteFewThreads;
    return launch("route", route_few_function(), shape, arguments, stream);
  }
  shape.grid = static_cast<int>((c.rows + kChooseWarps - 1) / kChooseWarps);
  shape.block = kChooseWarps * 32;
  NFP_RETURN_IF_ERROR(launch("route", choose_experts_function(), shape, arguments, stream));
  return assign();
}

Status run_assign(const AssignArgs& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check_routes("assign", c.routes, c.rows));
  if (c.ids == nullptr) return bad("assign", "ids", "must not be null");
  if (c.id_stride < c.routes.top) return bad("assign", "id_stride", "is smaller than a row of ids");
  if (c.map != nullptr && c.map_size < 1) return bad("assign", "map_size", "must be positive");
  if (c.gathered != nullptr && (c.x == nullptr || !aligned(c.x) || !aligned(c.gathered) || c.row_bytes % 16 != 0)) {
    return bad("assign", "x and gathered", "must be there, 16-byte aligned, with rows of a multiple of 16 bytes");
  }
  const bool few = c.rows * c.routes.top <= kPlacedAtOnce;
  if (c.gathered != nullptr && !few) return bad("assign", "gathered", "is of 1024 assignments at most");
  const bool vectors = !few && aligned(c.ids) && c.id_stride % 4 == 0 && c.routes.top % 4 == 0;
  const auto pieces = static_cast<uint64_t>(vectors ? c.routes.top / 4 : c.routes.top);
  AssignParams p{{c}, ((uint64_t{1} << kInverseBits) + pieces - 1) / pieces};
  void* arguments[] = {&p};
  LaunchShape shape;
  shape.dependent = true;
  if (few) {
    shape.grid = static_cast<int>(c.rows * c.routes.top) + 1;
    shape.block = kPlaceThreads;
    return launch("assign", place_function(c.map != nullptr), shape, arguments, stream);
  }
  shape.grid = c.routes.experts;
  shape.block = kAssignThreads;
  return launch("assign", assign_function(vectors, c.map != nullptr), shape, arguments, stream);
}

Status run_expert_linear(const ExpertLinearCall& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check_routes("expert_linear", c.routes, c.rows));
  const bool gated = c.epilogue != ExpertEpilogue::kStore;
  if (c.n <= 0 || c.n > INT32_MAX || (gated && c.n % 16 != 0)) {
    return bad("expert_linear", "n", "must be positive, with a gate a multiple of 16");
  }
  if (c.k <= 0 || c.k > INT32_MAX || c.k % 8 != 0) return bad("expert_linear", "k", "must be a positive multiple of 8");
  if (c.x == nullptr || c.y == nullptr || !aligned(c.x) || c.matrices == nullptr) {
    return bad("expert_linear", "x, y and matrices", "must be there, x 16-byte aligned");
  }
  for (int32_t e = 0; e < c.routes.experts; ++e) {
    const ExpertMatrix& matrix = c.matrices[e];
    if (matrix.upper == nullptr || !aligned(matrix.upper) || !aligned(matrix.lower)) {
      return error(ErrorCode::kUsage, "expert_linear: matrix {} is null or not 16-byte aligned", e);
    }
  }
  if (can_group(c)) return run_grouped(c, stream);
  if (c.tile_tokens != 0 && c.tile_tokens != -1) {
    return error(ErrorCode::kUsage, "expert_linear: tile_tokens {} is of the grouped product, which cannot do these",
                 c.tile_tokens);
  }
  if (c.e4m3) {
    return bad("expert_linear", "matrices",
               "must all be nested, x sorted and y in 16-byte pieces, for E4M3 activations");
  }
  const PlaneShape plane{c.n, c.k};
  ExpertParams p{};
  p.start = c.routes.start;
  p.row = c.sorted ? nullptr : c.routes.row;
  p.x = static_cast<const uint16_t*>(c.x);
  p.y = static_cast<uint16_t*>(c.y);
  p.slab_bytes = static_cast<int64_t>(plane.slab_bytes());
  p.n = static_cast<int32_t>(c.n);
  p.k = static_cast<int32_t>(c.k);
  p.blocks_k = static_cast<int32_t>((c.k + kBlockK - 1) / kBlockK);
  p.columns = static_cast<int32_t>(gated ? c.n / 2 : c.n);
  p.experts = c.routes.experts;
  LaunchShape shape;
  shape.grid = static_cast<int>(plane.row_blocks());
  shape.grid_y = static_cast<int>(std::min<int64_t>(c.routes.experts, c.rows * c.routes.top));
  shape.block = kExpertThreads;
  shape.dependent = true;
  return c.routes.experts <= kFewExperts && !c.bf16 ? launch_experts<kFewExperts>(c, p, shape, stream)
                                                    : launch_experts<kMaxExperts>(c, p, shape, stream);
}

Status run_combine(const CombineExpertsArgs& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check_routes("combine", c.routes, c.rows));
  if (c.hidden <= 0 || c.hidden % 8 != 0) return bad("combine", "hidden", "must be a positive multiple of 8");
  if (c.x == nullptr || c.out == nullptr || !aligned(c.x) || !aligned(c.out) || !aligned(c.shared)) {
    return bad("combine", "x, shared and out", "must be there, 16-byte aligned");
  }
  CombineExpertsArgs p = c;
  LaunchShape shape;
  shape.grid = static_cast<int>(c.rows);
  shape.grid_y = (c.hidden + kCombineThreads * 8 - 1) / (kCombineThreads * 8);
  shape.block = kCombineThreads;
  shape.dependent = true;
  void* arguments[] = {&p};
  return launch("combine", combine_function(), shape, arguments, stream);
}

}  // namespace nfp::cuda
