// What the functions of step.h take. Apart from them because nvcc does not compile result.h's fmt.
#pragma once

#include <cstdint>

#include "backend/cuda/gemm/plan/layout.h"
#include "backend/sampling.h"

namespace nfp::cuda {

// The token of row r: ids[r], or the one that the step before sampled for its row source[r] where that is not below 0.
struct TokenSource {
  const int32_t* ids = nullptr;          // device [rows]
  const int32_t* source = nullptr;       // device [rows]; null = all from ids
  const SampledRow* previous = nullptr;  // device
};

// A table [vocab, hidden]: two byte planes in the device's layout (layout.h), or dense FP16.
struct EmbeddingTable {
  const uint8_t* upper = nullptr;  // PlaneShape{vocab, hidden}.bytes(); both null = dense
  const uint8_t* lower = nullptr;
  Join join = Join::kBiased;
  const float* row_scale = nullptr;  // device [vocab], 2^e; null = all 1
  const uint16_t* dense = nullptr;   // row-major
  int64_t vocab = 0;
  int64_t hidden = 0;  // a multiple of 8
};

struct EmbedCall {
  EmbeddingTable table;
  TokenSource tokens;  // each in [0, vocab)
  int64_t rows = 0;
  float scale = 1.0f;
  void* out = nullptr;           // [rows, hidden]: the table's numbers (both bytes, so exact) times scale
  bool out_is_f32 = false;       // else FP16
  bool dependent_launch = true;  // programmatic: the kernel may start while the one before it still runs
};

// Rotates q and k by position (rotate-half: feature i with i + rotary_dim / 2) and writes k and v to the cache. q is
// rotated in place, k in the cache only. cos_sin and what says where tokens are is read before the kernel ahead has
// ended: it must be complete when that one starts (a step's embedding begins only when its plan is there).
struct RopeCall {
  void* qkv = nullptr;  // [tokens, (heads + 2 * kv_heads) * head_dim]: q heads, k heads, v heads
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;                // a multiple of 8 up to 256
  int32_t rotary_dim = 0;              // likewise, up to head_dim: leading features that rotate; 0 = all
  const float* cos_sin = nullptr;      // device [positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines
  const int32_t* positions = nullptr;  // device [tokens]
  const int32_t* slots = nullptr;      // device [tokens]: token slot % block_size of block slot / block_size; below 0 =
                                       //   not written
  // Instead of these two: what attention is given of the batch (attention.h), of which the call's tokens are those of
  // sequences [first_sequence, first_sequence + sequences), or with more of them than there are, all of these.
  const int32_t* query_start = nullptr;
  const int32_t* context = nullptr;
  const int32_t* block_table = nullptr;
  int32_t table_width = 0;
  int32_t first_sequence = 0;
  int32_t sequences = 0;
  bool one_token_each = false;  // of these sequences; context 0 = none, as what pads a step
  const float* q_norm =
      nullptr;  // device [head_dim] weights of an RMSNorm of each head before the rotation; null = none
  const float* k_norm = nullptr;
  float norm_eps = 1e-6f;
  // One layer's cache: [blocks, kv_heads, block_size, head_dim] FP16, E4M3 or, like qkv, BF16.
  void* keys = nullptr;
  void* values = nullptr;
  int64_t block_stride = 0;  // numbers from a block to the next; 0 = kv_heads * block_size * head_dim
  bool bf16 = false;
  bool e4m3_cache = false;  // codes of the numbers themselves (scale 1); magnitudes over 448 become 448
  int32_t block_size = 16;
  // Device: where the kernel writes `layer` when a query, key or value of a token with a slot is beyond FP16; null =
  // nowhere.
  int32_t* overflowed_layer = nullptr;
  int32_t layer = 0;
  bool dependent_launch = true;
};

// out[i] = x[rows[i]].
struct GatherCall {
  const void* x = nullptr;
  const int32_t* rows = nullptr;  // device [count]
  int64_t count = 0;
  int64_t hidden = 0;   // a multiple of 8
  void* out = nullptr;  // [count, hidden]
  bool is_f32 = false;  // x and out, else FP16
  bool dependent_launch = true;
};

// x = cap * tanh(x / cap), in place.
struct SoftCapCall {
  float* x = nullptr;
  int64_t count = 0;
  float cap = 0.0f;
  bool dependent_launch = true;
};

// Copies of rows, of which none touches what another writes. Pointers are of the device or page-locked; these and all
// sizes are whole words of 4 bytes. A full stop: it begins when all before it has ended.
struct CopyCall {
  struct Piece {
    const void* src = nullptr;
    void* dst = nullptr;
    int64_t bytes = 0;  // of a row
    int64_t rows = 1;
    int64_t src_pitch = 0;  // bytes from row to row, with more than one
    int64_t dst_pitch = 0;
  };
  static constexpr int kMostPieces = 4;
  static constexpr int64_t kMostBytes = int64_t{512} << 10;  // of a piece; the copy engine is for more
  Piece piece[kMostPieces];
  int pieces = 0;
};

// *host = *device; *device = -1.
struct TakeMarkCall {
  int32_t* device = nullptr;
  int32_t* host = nullptr;  // page-locked
};

// residual += x, rounded as GemmInputCall's residual (fused/gemm_input.h), for where no norm follows.
struct AddCall {
  const void* x = nullptr;
  void* residual = nullptr;
  int64_t count = 0;  // elements, a multiple of 8
  bool dependent_launch = true;
};

}  // namespace nfp::cuda
