// Attention over a paged KV cache, for a ragged batch. Two kernels: decode, of sequences with one query token each, and
// prefill, of sequences with any number. A batch is planned on the device from its arrays, so a captured graph replays
// with other contents.
//
// Queries and outputs are 16-bit numbers: BF16 over a BF16 cache, else FP16. Accumulation and softmax are FP32; the
// probabilities are rounded to that type for the product with the values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/attention/kv_type.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

// One layer's cache. Keys and values are each [blocks, kv_heads, block_size, head_dim], blocks apart by block_stride.
struct PagedKv {
  const void* keys = nullptr;  // device, 16-byte aligned
  const void* values = nullptr;
  KvType type = KvType::kF16;
  float key_scale = 1.0f;  // kE4m3
  float value_scale = 1.0f;
  int64_t blocks = 0;   // prefill's tensor maps end there
  int block_size = 16;  // 16, 32 or 64
  // Numbers from a block to the next, a multiple of block_size * head_dim; 0 = kv_heads * block_size * head_dim.
  int64_t block_stride = 0;
};

// What decode cuts its work into spans for: thread blocks, whose warps share a row, or single warps. kAuto: the faster.
enum class DecodeCut : uint8_t { kAuto, kBlocks, kWarps };

struct AttentionCall {
  int heads = 0;
  int kv_heads = 0;  // heads / kv_heads is 1 to 16
  int head_dim = 0;  // a multiple of 16 up to 256; 64, 128 and 256 waste nothing
  float scale = 0.0f;
  float soft_cap = 0.0f;  // scores become soft_cap * tanh(score / soft_cap); 0 = as they are
  int window = 0;         // a query at position p sees keys from p - window + 1 on; 0 = from 0
  PagedKv cache;
  const void* q = nullptr;  // [tokens, q_stride], query heads first; 16-byte aligned
  int64_t q_stride = 0;     // elements, a multiple of 8
  void* out = nullptr;      // [tokens, heads * head_dim]; 4-byte aligned

  // The batch, device arrays over all its sequences. A sequence's query tokens are the last ones of its context:
  // token query_start[s] + i stands at position context[s] - (query_start[s + 1] - query_start[s]) + i.
  const int32_t* query_start = nullptr;  // [sequences + 1]
  const int32_t* context = nullptr;      // tokens in the cache, this step's included
  const int32_t* block_table = nullptr;  // [sequences, table_width]
  int table_width = 0;
  // This call's part of it.
  int first_sequence = 0;
  int sequences = 0;
  int tokens = 0;  // prefill: query tokens of these sequences, or more (sizes the grid)

  // Decode: the longest context, where known, else what the table holds, sizes the launch of few sequences. Longer ones
  // work as well.
  int likely_context = 0;
  // Decode, where q and the token's key and value, which follow all q heads of its row, are as the product left them:
  // the kernel norms and rotates q and k as RopeCall (step.h) does with rotary_dim = head_dim, and appends k and v to
  // the cache. Only where can_rotate().
  struct Rotation {
    const float* cos_sin = nullptr;  // device [positions, head_dim]; null = all of it is done
    const float* q_norm = nullptr;   // device [head_dim], or null; 8-byte aligned, like the next
    const float* k_norm = nullptr;
    float norm_eps = 1e-6f;
    // Device: where a kernel writes `layer` when a query, key or value of a sequence with keys is beyond FP16; null =
    // nowhere.
    int32_t* overflowed_layer = nullptr;
    int32_t layer = 0;
  };
  Rotation rotation;
  // Decode: the order of every sum depends on the sequence's context alone, not on its neighbours in the batch.
  // (Prefill's always does.)
  bool deterministic = false;
  DecodeCut cut = DecodeCut::kAuto;  // not deterministic; for tests and measurements
  // Decode: what plan_decode() left of a call that differs in layers' pointers and the rotation alone, and was complete
  // before the kernel ahead of this one could start; null = each thread block finds its part of the batch itself.
  const void* plan = nullptr;
  // At least what decode_needs() says, or for prefill kPrefillWorkspaceBytes; 16-byte aligned, zeroed before the first
  // call that uses it; each call leaves it fit for the next, of either kind.
  void* workspace = nullptr;
  size_t workspace_bytes = 0;

  bool dependent_launch = true;
  // With dependent_launch: the batch's arrays and all keys and values but those of each sequence's last 16-token tile
  // were complete before the kernel ahead of this one could start, so that reading may begin before that one ends.
  bool early_cache_reads = false;
};

inline constexpr int kMaxAttentionRows = 65536;  // sequences * kv_heads of a decode call
inline constexpr int kMaxAttentionHeadDim = 256;
inline constexpr int kMaxAttentionGroup = 16;  // heads that share a KV head

inline constexpr size_t kPrefillWorkspaceBytes = 16;

// Whether decode calls of this shape and cache can have a rotation: heads of 64 or 128 that rotate whole, scales 1, no
// BF16.
bool can_rotate(const AttentionCall& call);

// Of a decode call like this one, or any with fewer sequences.
struct DecodeNeeds {
  size_t workspace_bytes = 0;
  // Up to so many sequences a rotation is quicker than a kernel of its own before: not where warps have spans of their
  // own, whose rows are so short that they wait for the new token. 0 where it cannot be.
  int most_rotated = 0;
  size_t plan_bytes = 0;
};
Result<DecodeNeeds> decode_needs(const AttentionCall& call);

// A likely_context for which decode calls like this one, of whose arrays only table_width counts, are launched as is
// best for contexts up to `longest`: the same for all with one launch, 0 where that is also the launch for what the
// table holds.
Result<int> launch_context(const AttentionCall& call, int longest);

// For decode calls over one batch, as a step's layers are: finds the parts of the batch once for all of them, into
// `plan` (device, 16-byte aligned, DecodeNeeds::plan_bytes), by one kernel that is no programmatic dependent. False:
// such calls gain nothing by it, and nothing is enqueued.
Result<bool> plan_decode(const AttentionCall& call, void* plan, CUstream_st* stream);

// Each enqueues one kernel: no allocation, no synchronisation. kUsage for shapes and pointers that do not fit, which
// check_decode() and check_prefill() tell before.
Status check_decode(const AttentionCall& call);
Status check_prefill(const AttentionCall& call);
Status run_decode(const AttentionCall& call, CUstream_st* stream);
Status run_prefill(const AttentionCall& call, CUstream_st* stream);

}  // namespace nfp::cuda
