// The paged KV cache in the layout that the attention kernel reads: keys of a block transposed, so that vector lanes
// are keys.
#pragma once

#include <algorithm>
#include <memory>

#include "backend/backend.h"
#include "backend/cpu/huge_pages.h"
#include "backend/cpu/kernel_table.h"

namespace nfp::cpu {

class CpuKvCache final : public KvCache {
 public:
  static Result<std::unique_ptr<CpuKvCache>> create(const KvCacheSpec& spec) {
    assert(spec.dtype == DType::kF16 || spec.dtype == DType::kF8E4M3 || spec.dtype == DType::kF32);
    assert(spec.block_size > 0 && spec.kv_heads > 0 && spec.head_dim > 0);
    std::unique_ptr<CpuKvCache> cache(new CpuKvCache(spec));
    NFP_ASSIGN_OR_RETURN(cache->memory_, Mapping::create(bytes_per_block(spec) * static_cast<size_t>(spec.blocks)));
    return cache;
  }

  static size_t bytes_per_block(const KvCacheSpec& spec) {
    return static_cast<size_t>(spec.layers) * (key_floats(spec) + value_floats(spec)) * size_of(spec.dtype);
  }

  const KvCacheSpec& spec() const override { return spec_; }
  size_t bytes() const override { return bytes_per_block(spec_) * static_cast<size_t>(spec_.blocks); }

  KvLayer layer(int index) const {
    // All layers of a block lie together: memory is taken from the system as blocks come into use, a huge page at a
    // time, and not a page for each layer in one step.
    const size_t numbers = key_floats(spec_) + value_floats(spec_);
    char* base = memory_.as<char>() + numbers * static_cast<size_t>(index) * size_of(spec_.dtype);
    KvLayer layer;
    layer.keys = base;
    layer.values = base + key_floats(spec_) * size_of(spec_.dtype);
    layer.block_stride = static_cast<int64_t>(numbers) * spec_.layers;
    layer.dtype = spec_.dtype;
    layer.block_size = spec_.block_size;
    layer.lane_groups = (spec_.block_size + 15) / 16;
    layer.dim = (spec_.head_dim + 15) / 16 * 16;
    return layer;
  }

 private:
  explicit CpuKvCache(const KvCacheSpec& spec) : spec_(spec) {}
  static size_t padded(int value) { return (static_cast<size_t>(value) + 15) / 16 * 16; }
  static size_t key_floats(const KvCacheSpec& spec) {  // of a block
    return static_cast<size_t>(spec.kv_heads) * padded(spec.block_size) * padded(spec.head_dim);
  }
  static size_t value_floats(const KvCacheSpec& spec) {
    return static_cast<size_t>(spec.kv_heads) * static_cast<size_t>(spec.block_size) * padded(spec.head_dim);
  }

  KvCacheSpec spec_;
  Mapping memory_;
};

}  // namespace nfp::cpu
