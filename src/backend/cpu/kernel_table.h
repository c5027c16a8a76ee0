// The table of kernels that one instruction set provides. A kernel works on one thread's share of an operation.
//
// Every result is the same, bit for bit, in every table: vectors have 16 lanes whatever the machine's width, sums run
// in one fixed order, every multiply-add is fused. The one exception is documented at PairArithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cpu/panel.h"
#include "backend/race.h"
#include "base/instruction_set.h"

namespace nfp::cpu {

// On what nested panels are multiplied in FP8 steps, and on tiles in FP16 steps too: two steps of k at a time, in
// numbers of 16 bits, in which E4M3 weights and E4M3 activations are exact.
enum class PairArithmetic : uint8_t {
  // None: FP32.
  kNone,
  // BF16 dot products: activations are rounded to BF16 (to nearest even), subnormal inputs and results count as zero;
  // sums still run over k in order. Only Precision::kFp8 differs from a table without it.
  kBf16,
  // FP16 multiply-adds. A row of activations is scaled by the power of two that brings its largest magnitude into
  // [128, 256) and rounded to FP16 (to nearest even). A chunk of kHalfChunk steps has two sums, of its even and of its
  // odd steps in order, each rounded to FP16 after each multiply-add; an output is the FP32 sum of (even + odd) over
  // the chunks in order. Nothing overflows: 128 products of at most 256 * 1.875 are 61440, and 128 roundings by at most
  // 2^-11 make that 65402 of FP16's 65504. The roundings of a chunk's sums are at most 128 * 2^-11 = 6.3 % of the sum
  // of
  // its products' magnitudes, and at most 2^-11 / sqrt(3) * sqrt(128 / 2) = 0.23 % of the sum's own size on average
  // where products have random signs; rounding the weights to E4M3, which FP8 does in any case, changes such sums by
  // about 2.6 %.
  // Precision::kFp8 and kFp8W8A8 both differ from a table without it.
  kFp16,
  // Tiles of BF16 (TDPBF16PS, Intel SDM volume 2). A row of activations is scaled by the power of two that brings its
  // largest magnitude into [2^98, 2^99) (2^127 at most), and weights by 2^-98, so that neither is subnormal; a product
  // of a chunk of kTileSteps steps has two FP32 sums that begin at zero, of its even and of its odd steps in order,
  // fused; it adds (even + odd), in FP32, to the output, chunk by chunk. Subnormal inputs and results count as zero.
  // FP8: activations x are rounded to BF16 (to nearest even), and a chunk is one product. Precision::kFp8 and kFp8W8A8
  // both differ from a table without it.
  // FP16: an activation is x1, x rounded to BF16, and x2, x - x1 rounded to BF16. A weight, nested or dense, is w1, w
  // rounded to BF16 (to nearest, halves away from zero), and w2 = w - w1: both are BF16 numbers, so weights are exact.
  // A chunk is three products, x1 w1, x2 w1 and x1 w2. Their sum is off by at most 2^-16 |x w| (the rounding of x2) and
  // 2^-16 |x w| (x2 w2, which is left out: each at most 2^-8 of the whole), where FP16 activations, as GPUs have them,
  // are off by 2^-11. Precision::kFp16 differs from the other tables, which compute in FP32.
  kBf16Tiles,
};
inline constexpr int64_t kHalfChunk = 256;
inline constexpr int64_t kTileSteps = 32;
inline constexpr int64_t kTileHeight = 16;  // of x that one instruction multiplies

constexpr int64_t tile_chunks(int64_t k) { return (k + kTileSteps - 1) / kTileSteps; }

// Words of 32 bits that a row of k takes whose numbers are so many numbers of BF16 each: all first ones, then all
// second ones, in whole chunks, and a line of 64 bytes more, so that the rows of a tile lie in different sets of a
// cache.
constexpr int64_t tile_row_words(int parts, int64_t k) { return parts * tile_chunks(k) * (kTileSteps / 2) + 16; }

// What to_pairs makes of a row of k.
constexpr int64_t pair_words(PairArithmetic pairs, int64_t k) {
  return pairs == PairArithmetic::kBf16Tiles ? tile_row_words(1, k) : (k + 1) / 2;
}
// What to_split makes of it.
constexpr int64_t split_words(int64_t k) { return tile_row_words(2, k); }

// y = x W^T for the panels [first, last) and all rows of x.
struct LinearTask {
  const Panel* panels = nullptr;
  int64_t first = 0;  // even where the epilogue pairs panels
  int64_t last = 0;
  int64_t k = 0;
  const float* x = nullptr;  // [rows, x_stride]
  int64_t x_stride = 0;
  bool upper_only = false;             // nested panels: E4M3 instead of FP16; the next then are for these only
  const float* x_codes = nullptr;      //   [rows, k] what they multiply instead of x, or null
  const float* token_scale = nullptr;  //   [rows] factors of the result, or null
  const uint32_t* x_pairs = nullptr;   //   [rows, ...] the same x as to_pairs gives it, or to_split where both bytes
                                       //   are read; null = FP32
  bool cheap_subnormals = false;       // CpuFeatures': a matter of speed alone
  int32_t rows = 0;
  Epilogue epilogue = Epilogue::kStore;
  Activation activation = Activation::kSilu;
  float soft_cap = 0.0f;  // as in LinearArgs
  float* y = nullptr;     // [rows, y_stride]
  int64_t y_stride = 0;
  void* scratch = nullptr;  // linear_scratch_bytes(pairs, rows, k), 64-byte aligned
  // The scratch is as the last task left it, which had the same rows of x and differed in panels alone.
  bool same_x = false;
  // The panels of the task after this one, where that is known: their first bytes are asked for early.
  const Panel* next = nullptr;
  int64_t next_count = 0;
};

inline constexpr int64_t kMaxLinearRows = 512;  // a task's rows; callers chunk
inline constexpr int kGroupPanels = 4;          // panels that the kernel works on together
inline constexpr int64_t kBlockSteps = 128;     // of k that are unpacked at a time: 64 columns of FP32 = 32 KB, in L1

// Which rows of x lie at the scratch's end in an order of the kernel's own, by parts; null: none.
struct PackedRows {
  const void* source[2] = {};
};
inline constexpr size_t kPackedRowsBytes = 64;  // at the scratch's beginning

inline constexpr int64_t kMaxDirectRows = 24;  // up to which a kernel may keep x in an order of its own; of pairs 48

// What tiles are computed with: weights of two panels as kTileBlockWords numbers of BF16, and sums of kTilePanels
// panels.
inline constexpr int kTilePanels = 16;
inline constexpr int64_t kTileBlockWords = 8192;
constexpr int64_t round_to_tiles(int64_t rows) { return (rows + kTileHeight - 1) / kTileHeight * kTileHeight; }

// Where what tiles need begins.
constexpr size_t tile_scratch_offset(int64_t rows, int64_t k) {
  const int64_t sums = (kBlockSteps + rows) * kGroupPanels * kPanelRows;
  const int64_t floats = sums + (rows < kMaxDirectRows ? rows : kMaxDirectRows) * (k + 1);
  return kPackedRowsBytes + (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
}
// For tasks of up to `rows` rows.
constexpr size_t linear_scratch_bytes(PairArithmetic pairs, int64_t rows, int64_t k) {
  const size_t offset = tile_scratch_offset(rows, k);
  if (pairs != PairArithmetic::kBf16Tiles) return offset;
  return offset +
         static_cast<size_t>(2 * kTileBlockWords + int64_t{kTilePanels} * kPanelRows * round_to_tiles(rows) * 4);
}

// One kv head of one sequence, and query rows that share its keys. Keys are visited in groups of 16 lanes, tiles of
// kTileGroups groups and partitions of kPartitionTiles tiles, all at absolute boundaries; a partition's softmax starts
// afresh and partitions are merged in order, so that they may be computed apart.
inline constexpr int kTileGroups = 4;
inline constexpr int kTileKeys = 64;
inline constexpr int kPartitionTiles = 8;
inline constexpr int kMaxQueryRows = 48;

struct KvLayer {
  const void* keys = nullptr;    // of a block: [kv_heads, lane_groups, dim, 16]
  const void* values = nullptr;  // of a block: [kv_heads, block_size, dim]
  int64_t block_stride = 0;      // numbers from a block's to the next one's
  DType dtype = DType::kF16;     // kF16, kF8E4M3 or kF32
  int32_t block_size = 0;
  int32_t lane_groups = 0;  // a block: block_size / 16 rounded up
  int32_t dim = 0;          // head_dim rounded up to 16; what is added is zero
};

struct QueryRow {
  const float* q = nullptr;  // [head_dim]
  float* out = nullptr;      // [head_dim]
  int32_t begin = 0;         // keys [begin, end)
  int32_t end = 0;
};

// Softmax state of a row over the keys so far: running maximum, 16 partial sums, dim unnormalised outputs.
// Laid out [maximum x rows][sums x rows][outputs x rows] by attention_state_floats.
constexpr size_t attention_state_floats(int64_t rows, int64_t dim) {
  return static_cast<size_t>(rows * (16 + 16 + dim));
}

struct AttentionTask {
  KvLayer layer;
  const int32_t* blocks = nullptr;  // the sequence's row of the block table
  int32_t kv_head = 0;
  int32_t head_dim = 0;
  float scale = 1.0f;
  float soft_cap = 0.0f;
  const QueryRow* rows = nullptr;
  int32_t row_count = 0;  // <= kMaxQueryRows
  float* scratch = nullptr;
};

constexpr size_t attention_scratch_floats(int64_t dim) {
  return static_cast<size_t>(int64_t{2} * kTileKeys * dim + kMaxQueryRows * (dim + kTileKeys)) +
         2 * attention_state_floats(kMaxQueryRows, dim);
}

// The group that holds `key`, and the partition that holds the group: a block may begin in one and end in the next.
constexpr int32_t group_of(const KvLayer& layer, int32_t key) {
  return key / layer.block_size * layer.lane_groups + key % layer.block_size / 16;
}
constexpr int32_t partition_of(const KvLayer& layer, int32_t key) {
  return group_of(layer, key) / (kPartitionTiles * kTileGroups);
}

struct RopeHead {
  const float* in = nullptr;    // [head_dim]
  const float* cos = nullptr;   // [rotary_dim / 2]
  const float* sin = nullptr;   // [rotary_dim / 2]
  const float* norm = nullptr;  // [head_dim] or null
  float norm_eps = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;  // leading features that rotate
  float* out = nullptr;    // [head_dim], may be `in`
};

struct Candidate {
  float logit;
  int32_t id;
};

// Tokens first .. end - 1 of a row in the race of race.h; first is a multiple of 32.
struct RacePass {
  const float* logits = nullptr;  // of the row, from token 0 on
  int32_t first = 0;
  int32_t end = 0;
  RaceKey key = {};
  float maximum = 0.0f;  // finite
  float factor = 0.0f;
  float latest = 0.0f;  // logarithm to base 2 of the time after which nobody can win
};

struct KernelTable {
  const char* name;
  PairArithmetic pairs;

  void (*linear)(const LinearTask& task);
  // Rounds x [k] to [pair_words(pairs, k)] for `pairs`; returns the factor of the result. Null where there is none.
  float (*to_pairs)(const float* x, int64_t k, uint32_t* pairs);
  // The same for FP16 steps, to [split_words(k)]. Null where they are computed in FP32.
  float (*to_split)(const float* x, int64_t k, uint32_t* split);
  // out[i] = x[i] / scale rounded to E4M3, as FP32; returns scale = max |x| / 448, at least 2^-126 unless it is 0.
  float (*quantize_e4m3)(const float* x, int64_t k, float* out);
  // out = residual + x; out may be either.
  void (*residual_add)(const float* x, const float* residual, int64_t n, float* out);
  // out[r * stride + c] = x[r] w[c], of x [rows, n] and w [columns, n]: the same bits whatever else is asked for.
  void (*dots)(const float* x, int64_t rows, const float* w, int64_t columns, int64_t n, float* out, int64_t stride);
  // out = sum over i of weight[i] rows[i], in the order of i.
  void (*weighted_sum)(const float* const* rows, const float* weight, int32_t count, int64_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*rope)(const RopeHead& head);
  void (*to_f16)(const float* x, int64_t n, uint16_t* out);
  void (*to_e4m3)(const float* x, int64_t n, uint8_t* out);  // magnitudes over 448 become 448
  // Whole attention of the rows.
  void (*attention)(const AttentionTask& task);
  // Partition `partition` of it into `state`; merging partitions 0.. in order and finishing gives what attention gives.
  void (*attention_partition)(const AttentionTask& task, int32_t partition, float* state);
  void (*attention_merge)(const AttentionTask& task, const float* const* states, int32_t count);

  // Sampling. NaN counts as -infinity.
  int32_t (*argmax)(const float* x, int32_t n);  // lowest id among equals; 0 if nothing is > -inf
  double (*sum_exp)(const float* x, int32_t n, float maximum, float factor);  // sum of exp((x - maximum) * factor)
  // Ids with x >= threshold into out (at most `capacity`), in order; returns how many there are.
  int32_t (*at_least)(const float* x, int32_t n, float threshold, Candidate* out, int32_t capacity);
  // out[i] = exp((x[i] - maximum) * factor).
  void (*exps)(const float* x, int32_t n, float maximum, float factor, float* out);
  // Those that may arrive by `latest`, in order of id, and few others: those of which coarse bits do not tell. `out`
  // has room for end - first; returns how many there are.
  int32_t (*racers)(const RacePass& pass, Candidate* out);

  // Ceilings (machine.h).
  double (*fma_loop)(int64_t iterations);
  double (*dot_loop)(int64_t iterations);
  void (*read_loop)(const void* data, size_t bytes);
};

const KernelTable& scalar_kernels();
const KernelTable& scalar_bf16_kernels();  // emulates the BF16 arithmetic; for tests
const KernelTable& scalar_fp16_kernels();  // likewise
const KernelTable& scalar_tile_kernels();  // likewise
// The table of an instruction set that this machine has.
const KernelTable& kernels_of(InstructionSet set);
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_gfni_kernels();
const KernelTable& avx512_bf16_kernels();
const KernelTable& avx512_fp16_kernels();
const KernelTable& amx_kernels();
#endif

}  // namespace nfp::cpu
