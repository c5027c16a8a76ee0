#include "backend/cuda/fused/gemm_input.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "backend/cuda/fused/gemm_input_kernel.h"
#include "backend/cuda/fused/quantise_rows.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/launch.h"

namespace nfp::cuda {
namespace {

bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

Status check_experts(const GemmInputCall& c) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "gemm_input: {} {}", field, rule);
  };
  if (c.bf16 || !c.weight_f32) return bad("bf16 and weight_f32", "must be false and true with kExperts");
  if (c.k % 8 != 0 || c.k > kMaxExpertColumns) return bad("k", "must be a multiple of 8 up to 8192 with kExperts");
  if (c.residual == nullptr) return bad("residual", "is null");
  const CombineExpertsArgs& sum = *c.experts;
  if (sum.rows != c.m || sum.hidden != c.k || sum.bf16) {
    return bad("experts", "must be of m rows and k features in FP16");
  }
  if (sum.routes.top < 1 || sum.routes.top > kMaxTopExperts || sum.routes.place == nullptr ||
      sum.routes.weight == nullptr) {
    return bad("experts", "must have 1 to 32 places and weights a row");
  }
  if (sum.x == nullptr || !aligned(sum.x, 16) || !aligned(sum.shared, 16)) {
    return bad("experts", "must have x and shared 16-byte aligned, x not null");
  }
  return ok_status();
}

Status check_call(const GemmInputCall& c) {
  const auto bad = [](std::string_view field, std::string_view rule) {
    return error(ErrorCode::kUsage, "gemm_input: {} {}", field, rule);
  };
  if (c.m <= 0 || c.m > INT32_MAX) return bad("m", "must be 1 to 2^31 - 1");
  if (c.k <= 0 || c.k > kMaxColumns) return bad("k", "must be 1 to 32768");
  const bool gated = c.source == GemmInputCall::Source::kSwiglu || c.source == GemmInputCall::Source::kGeglu;
  const bool experts = c.source == GemmInputCall::Source::kExperts,
             norm = c.source == GemmInputCall::Source::kNorm || experts;
  if (experts != (c.experts != nullptr)) return bad("experts", "belongs to kExperts, and is needed there");
  if (!experts && (c.x == nullptr || c.ldx < (gated ? 2 * c.k : c.k)))
    return bad("x", "is null, or ldx smaller than a row");
  if (norm && c.weight == nullptr) return bad("weight", "is null");
  if (c.weight_offset != 0.0f && !c.weight_f32) return bad("weight_offset", "needs weight_f32");
  if (gated && c.k % 8 != 0) return bad("k", "must be a multiple of 8 with a gate (blocks of 8 alternate)");
  if (c.source == GemmInputCall::Source::kGeglu && c.bf16) return bad("bf16", "does not go with kGeglu");
  if (c.residual != nullptr && (!norm || c.ldr < c.k)) return bad("residual", "belongs to kNorm, with ldr >= k");
  if (c.h != nullptr && c.residual == nullptr) return bad("h", "belongs to a norm with a residual");
  if (c.all_reduce != nullptr) {
    if (c.source != GemmInputCall::Source::kNorm || c.residual == nullptr || c.weight_f32) {
      return bad("all_reduce", "belongs to kNorm with a residual and weights of 16 bits");
    }
    if (c.batch_invariant) return bad("batch_invariant", "does not go with all_reduce");
    if (c.m > max_reduced_rows(c.k)) return bad("m", "must be at most max_reduced_rows(k) with all_reduce");
    NFP_RETURN_IF_ERROR(c.all_reduce->check());
    if (static_cast<size_t>(c.m * c.k) * sizeof(uint16_t) > c.all_reduce->most_bytes()) {
      return bad("all_reduce", "has buffers for fewer rows");
    }
  }
  if (c.y_f16 == nullptr && c.y_e4m3 == nullptr) return bad("y_f16 and y_e4m3", "are both null");
  if (c.y_f16 != nullptr && c.ldy < c.k) return bad("ldy", "is smaller than a row");
  if (c.y_e4m3 != nullptr) {
    const int64_t width = PlaneShape{0, c.k}.padded_k();
    if (!aligned(c.y_e4m3, 16) || c.ldy_e4m3 % 16 != 0 || c.ldy_e4m3 < width) {
      return bad("y_e4m3", "must be 16-byte aligned, ldy_e4m3 a multiple of 16 and at least padded_k()");
    }
    if (c.scales == nullptr) return bad("scales", "is null");
  }
  if (c.place != nullptr &&
      (c.source != GemmInputCall::Source::kPlain || c.y_f16 != nullptr || c.copies < 1 || c.copies > 32)) {
    return bad("place", "belongs to kPlain, with 1 to 32 copies and without y_f16");
  }
  return experts ? check_experts(c) : ok_status();
}

// Whether a sum of so many bytes is quicker in two exchanges, in which a GPU stores 2 (ranks - 1) / ranks of them and
// not ranks - 1: where the bytes that are saved take longer than one more exchange, which takes as long as kExchange.
bool goes_by_owner(int64_t bytes, int64_t ranks) {
  constexpr int64_t kExchange = 160 << 10;  // measured with four H200
  return bytes * (ranks - 1) * (ranks - 2) > kExchange * ranks;
}

AllReduceParams params_of(const AllReduce& c, int64_t bytes) {
  AllReduceParams p{};
  for (int i = 0; i < c.ranks; ++i) p.buffers[i] = static_cast<uint8_t*>(c.buffers[static_cast<size_t>(i)]);
  p.part_bytes = static_cast<int64_t>(c.most_bytes());
  p.rank = c.rank;
  p.ranks = c.ranks;
  p.by_owner = goes_by_owner(bytes, c.ranks);
  return p;
}

Status quantise_rows(const GemmInputCall& c, CUstream_st* stream) {
  QuantiseRowsParams p{};
  p.x = static_cast<const uint16_t*>(c.x);
  p.codes = c.y_e4m3;
  p.scales = c.scales;
  p.place = c.place;
  p.m = c.m;
  p.ldx = c.ldx;
  p.ld_codes = c.ldy_e4m3;
  p.k = static_cast<int>(c.k);
  p.padded_k = static_cast<int>(PlaneShape{0, c.k}.padded_k());
  p.copies = c.place != nullptr ? c.copies : 1;
  const bool is_short = p.padded_k <= kQuantiseColumns;
  const int warps = is_short ? kQuantiseWarps : (p.padded_k + kQuantiseColumns - 1) / kQuantiseColumns;
  LaunchShape shape;
  shape.grid = static_cast<int>(is_short ? (c.m + warps - 1) / warps : c.m);
  shape.block = warps * 32;
  shape.shared = static_cast<size_t>(is_short ? warps * p.padded_k : p.padded_k);
  shape.dependent = c.dependent_launch;
  void* arguments[] = {&p};
  return launch("gemm_input", quantise_rows_function(c.bf16, p.padded_k), shape, arguments, stream);
}

}  // namespace

Status prepare_gemm_input(const GemmInputCall& c, CUstream_st* stream) {
  NFP_RETURN_IF_ERROR(check_call(c));
  ExpertsNormParams p{};
  const bool experts = c.source == GemmInputCall::Source::kExperts;
  if (experts) p.experts = *c.experts;
  p.x = c.x;
  p.weight = c.weight;
  p.residual = c.residual;
  p.h = c.h != nullptr ? c.h : c.residual;
  p.y_f16 = c.y_f16;
  p.y_e4m3 = c.y_e4m3;
  p.ldx = c.ldx;
  p.ldr = c.ldr;
  p.ldy = c.ldy;
  p.ldy_e4m3 = c.ldy_e4m3;
  p.k = c.k;
  p.padded_k = static_cast<int>(PlaneShape{0, c.k}.padded_k());
  p.epsilon = c.epsilon;
  p.weight_offset = c.weight_offset;
  const bool is_aligned = c.k % 8 == 0 && aligned(c.x, 16) && c.ldx % 8 == 0 &&
                          (c.weight == nullptr || aligned(c.weight, 16)) &&
                          (c.residual == nullptr || (aligned(c.residual, 16) && aligned(p.h, 16) && c.ldr % 8 == 0)) &&
                          (c.y_f16 == nullptr || (aligned(c.y_f16, 16) && c.ldy % 8 == 0));
  constexpr int64_t kManyRows = 2048, kManyNormRows = 288;
  if (experts && !is_aligned) {
    return error(ErrorCode::kUsage, "gemm_input: experts needs weight and rows that are 16-byte aligned");
  }
  const bool reduced = c.all_reduce != nullptr;
  if (reduced && !is_aligned) {
    return error(ErrorCode::kUsage, "gemm_input: all_reduce needs rows that are 16-byte aligned, k a multiple of 8");
  }
  const bool plain = c.source == GemmInputCall::Source::kPlain;
  if (c.place != nullptr && !is_aligned) {
    return error(ErrorCode::kUsage,
                 "gemm_input: place needs rows of x that are 16-byte aligned, and k a multiple of 8");
  }
  if (c.place != nullptr ||
      (plain && is_aligned && c.y_f16 == nullptr && c.m >= kManyRows && p.padded_k <= kQuantiseColumns)) {
    return quantise_rows(c, stream);
  }
  p.scales = c.scales;
  // Few rows are a decode step's, which waits for every cycle; of many, most blocks start when the inputs are there.
  constexpr int64_t kRehearsedRows = 64, kRehearsedRowsOfCodes = 128;  // measured in 8B steps on an H200
  p.rehearses = c.dependent_launch && c.m <= (c.y_e4m3 != nullptr ? kRehearsedRowsOfCodes : kRehearsedRows);

  // Groups of eight columns stay in registers: two a thread where several blocks can share a row (few rows leave most
  // of the GPU idle), at most eight where they cannot.
  constexpr int64_t kFewRows = 64;
  p.blocks = 1;
  const bool shared_rows = c.m <= kFewRows && !c.batch_invariant;
  // A sum over GPUs travels faster from more SMs, a group of columns a thread.
  constexpr int kFewColumns = 1024;
  while (reduced && p.blocks < kMaxRowBlocks && c.m * p.blocks * 2 <= kMaxReducedBlocks &&
         p.padded_k / p.blocks > kFewColumns) {
    p.blocks *= 2;
  }
  while (shared_rows && p.blocks < kMaxRowBlocks && p.padded_k / p.blocks > 8192) p.blocks *= 2;
  p.block_columns = (p.padded_k + p.blocks * 128 - 1) / (p.blocks * 128) * 128;
  const int groups = p.block_columns / 8;
  int vectors = is_aligned ? 1 : kMaxVectors;
  // Many plain rows go faster in small blocks, with more of them on an SM.
  const bool small_blocks = plain && c.m >= kManyRows;
  while (vectors * 512 < groups || (small_blocks && vectors < kMaxVectors && vectors * 128 < groups)) vectors *= 2;
  int threads = (groups + vectors * 32 - 1) / (vectors * 32) * 32;
  const void* function =
      gemm_input_function(reduced ? GemmInputSource::kReducedNorm : static_cast<GemmInputSource>(c.source), c.bf16,
                          c.weight_f32, is_aligned, vectors);
  // Many norms do too, which add in the order of the larger blocks.
  if (c.source == GemmInputCall::Source::kNorm && !reduced && is_aligned && vectors <= 2 && c.m >= kManyNormRows &&
      threads > 256 && threads % 64 == 0) {
    threads /= 2;
    function = halved_norm_function(c.bf16, c.weight_f32, 2 * vectors);
  }
  const auto shared = static_cast<size_t>(c.y_e4m3 != nullptr ? p.block_columns : 0);
  const LaunchShape shape{static_cast<int>(c.m) * p.blocks, p.blocks, threads, shared, c.dependent_launch};
  ReducedNormParams with_reduce{p, {}};
  if (reduced) with_reduce.reduce = params_of(*c.all_reduce, c.m * c.k * int64_t{sizeof(uint16_t)});
  void* arguments[] = {reduced ? static_cast<void*>(&with_reduce) : &p};
  return launch("gemm_input", function, shape, arguments, stream);
}

}  // namespace nfp::cuda
