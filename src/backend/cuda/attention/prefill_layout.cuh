// What the producers and the consumers of prefill.cuh share: shared memory and barriers.
#pragma once

#include <cstdint>

#include "backend/cuda/attention/attention_kernel.h"

namespace nfp::cuda {

template <int kDim, KvType kKv = KvType::kF16>
struct PrefillLayout {
  static constexpr int kKeys = kDim <= 128 ? 128 : 64;  // of a tile
  static constexpr int kStages = 2;
  static constexpr int kBands = kDim / 64;  // of 64 columns, the width of the 128-byte swizzle
  static constexpr int kGroupRows = kPrefillRows / 2;
  static constexpr int kGroupQBytes = kGroupRows * kDim * 2;
  static constexpr int kBandBytes = kKeys * 128;
  static constexpr int kTileBytes = kBands * kBandBytes;
  static constexpr int kAlignment = 1024;                                     // the swizzle's period
  static constexpr int kCodeTiles = !is_e4m3(kKv) ? 0 : kDim <= 128 ? 3 : 2;  // of keys or values before they are FP16
  static constexpr int kCodeTileBytes = kKeys * kDim;
  static constexpr int kSharedBytes =
      kAlignment + 2 * kGroupQBytes + 2 * kStages * kTileBytes + kCodeTiles * kCodeTileBytes;
  static constexpr int kThreads = 384;
  // Of the 168 that each thread starts with, and no more in all: who claims what nobody released waits for ever.
  static constexpr int kProducerRegisters = is_e4m3(kKv) ? 56 : 40;
  static constexpr int kConsumerRegisters = is_e4m3(kKv) ? 224 : 232;
};

struct PrefillBarriers {
  static constexpr int kPlaces = 4;               // for what is known of a tile: prefill_tile.cuh
  static constexpr int kCount = 8 + 2 * kPlaces;  // barriers, of 8 bytes
  uint32_t base;                                  // shared address
  __device__ __forceinline__ uint32_t keys_full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t keys_empty(int stage) const { return base + 16 + stage * 8; }
  __device__ __forceinline__ uint32_t values_full(int stage) const { return base + 32 + stage * 8; }
  __device__ __forceinline__ uint32_t values_empty(int stage) const { return base + 48 + stage * 8; }
  __device__ __forceinline__ uint32_t tile_full(int place) const { return base + 64 + place * 8; }
  __device__ __forceinline__ uint32_t tile_empty(int place) const { return base + 64 + (kPlaces + place) * 8; }
};

}  // namespace nfp::cuda
