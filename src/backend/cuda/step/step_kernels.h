// Between step.cc (checks, launch) and the kernels.
#pragma once

#include <cstdint>

#include "backend/cuda/step/step_calls.h"

namespace nfp::cuda {

struct EmbedParams {
  EmbeddingTable table;
  TokenSource tokens;
  int64_t slab_bytes;
  float scale;
  void* out;
};
inline constexpr int kEmbedThreads = 256;
const void* embed_function(bool nested, bool out_is_f32);

struct RopeParams {
  RopeCall call;  // rotary_dim is not 0
  int64_t items;  // tokens * (heads + 2 * kv_heads)
};
inline constexpr int kRopeThreads = 128;
enum class RopeStore : uint8_t { kF16, kE4m3, kBf16 };
// Features a lane moves at a time, and the lanes that share a head: a power of two up to 32.
const void* rope_function(RopeStore store, int vector, int lanes);

struct CopyParams {
  const void* x;
  const int32_t* rows;
  void* out;
  int64_t vectors;  // groups of 16 bytes: of a row (gather), of all (add)
};
inline constexpr int kCopyThreads = 256;
const void* gather_function();
// (CopyCall), a grid of blocks of kCopyThreads by pieces.
const void* copy_function();
const void* add_function();

struct SoftCapParams {
  float* x;
  int64_t count;
  float cap;
};
const void* soft_cap_function();
const void* take_mark_function();

}  // namespace nfp::cuda
