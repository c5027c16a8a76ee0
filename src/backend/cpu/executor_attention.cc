// Rotary embedding with what it writes into the KV cache, and attention over it.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "backend/cpu/executor.h"
#include "backend/cpu/executor_parts.h"
#include "backend/cpu/kv_cache.h"

namespace nfp::cpu {

// Few items with long contexts keep few threads busy, so partitions of their keys become the pieces of work, and their
// results are merged afterwards: in the same order as in one piece, hence with the same bits.
struct AttentionSplit {
  int32_t items = 0;
  int32_t partitions = 0;  // of the longest context; 0 = not worth it
  size_t state_floats = 0;
  explicit operator bool() const { return partitions > 1; }
  size_t bytes() const { return static_cast<size_t>(items) * static_cast<size_t>(partitions) * state_floats * 4; }
};

namespace {

// Into how many tiles the rows of a chunk are cut, at least `least`: each thread takes every so many-th item, a tile of
// a kv head, and where there are few items one more or less decides how long all wait. 16 tokens of three kv heads on
// two threads are two items against one, or three against three of half the size.
int32_t balanced_tiles(int32_t tokens, int32_t group, int32_t least, int32_t kv_heads, int threads) {
  constexpr int32_t kWideningRows = 12;  // a tile's keys and values are widened in the time of about so many rows
  constexpr int32_t kManyItems = 16;     // a thread: one more hardly matters
  int32_t best = least, best_cost = std::numeric_limits<int32_t>::max();
  if (threads == 1 || least * kv_heads > kManyItems * threads) return best;
  for (int32_t tiles = least; tiles <= std::min(2 * least, tokens); ++tiles) {
    const int32_t items = (tiles * kv_heads + threads - 1) / threads;  // of the thread that has most
    const int32_t cost = items * (kWideningRows + (tokens + tiles - 1) / tiles * group);
    if (cost < best_cost) best = tiles, best_cost = cost;
  }
  return best;
}

// Calls f(sequence, kv head, first row, row count) for each piece of attention work. A row is a (token, query head of
// the kv head) pair, token-major.
template <typename F>
void for_each_attention_item(const AttentionArgs& args, int threads, F f) {
  const int32_t group = args.heads / args.kv_heads;
  for (int32_t s = 0; s < args.batch.sequences; ++s) {
    const int32_t tokens = args.batch.query_start[s + 1] - args.batch.query_start[s], rows = tokens * group;
    const int32_t most = std::max(kMaxQueryRows / group * group, std::min(group, kMaxQueryRows));
    const int32_t least = (rows + most - 1) / most;
    const int32_t tiles = tokens > least ? balanced_tiles(tokens, group, least, args.kv_heads, threads) : least;
    for (int32_t tile = 0; tile < tiles; ++tile) {
      // Whole tokens, as nearly as many in each; a token with more heads than a tile has rows is cut.
      const auto bound = [&](int32_t t) {
        return tiles > tokens ? std::min(rows, t * most) : static_cast<int32_t>(int64_t{tokens} * t / tiles) * group;
      };
      const int32_t first = bound(tile), end = bound(tile + 1);
      for (int32_t head = 0; head < args.kv_heads; ++head) f(s, head, first, end - first);
    }
  }
}

// Points `task` at an item, whose rows, keys and results lie where the batch says.
void set_item(const AttentionArgs& args, int32_t s, int32_t head, int32_t first, int32_t count, QueryRow* rows,
              AttentionTask& task) {
  const int64_t dim = args.head_dim;
  const int64_t q_stride = (args.heads + 2 * args.kv_heads) * dim;
  const int32_t group = args.heads / args.kv_heads;
  for (int32_t r = 0; r < count; ++r) {
    const int64_t token = args.batch.query_start[s] + (first + r) / group;
    const int64_t q_head = head * group + (first + r) % group;
    const int32_t position = args.batch.positions[token];
    rows[r] = {static_cast<const float*>(args.qkv) + token * q_stride + q_head * dim,
               static_cast<float*>(args.out) + (token * args.heads + q_head) * dim,
               args.window > 0 ? std::max(0, position - args.window + 1) : 0, position + 1};
  }
  task.blocks = args.batch.block_table + static_cast<int64_t>(s) * args.batch.table_width;
  task.kv_head = head;
  task.rows = rows;
  task.row_count = count;
}

AttentionTask attention_task(const AttentionArgs& args, float* scratch) {
  AttentionTask task;
  task.layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  task.head_dim = args.head_dim;
  task.scale = args.scale;
  task.soft_cap = args.soft_cap;
  task.scratch = scratch;
  return task;
}

constexpr int32_t kMaxSplitRows = 8;  // an item's: a decode step's
constexpr int32_t kMaxSplitPartitions = 1024;

AttentionSplit split_of(const AttentionArgs& args, int threads) {
  AttentionSplit split;
  int32_t rows = 0, longest = 0;
  for_each_attention_item(args, threads, [&](int32_t s, int32_t, int32_t, int32_t count) {
    ++split.items;
    rows = std::max(rows, count);
    longest = std::max(longest, args.batch.positions[args.batch.query_start[s + 1] - 1] + 1);
  });
  const KvLayer layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  const int32_t partitions = longest > 0 ? partition_of(layer, longest - 1) + 1 : 0;
  if (threads > 1 && rows <= kMaxSplitRows && split.items < 4 * threads && partitions <= kMaxSplitPartitions) {
    split.partitions = partitions;
    split.state_floats = attention_state_floats(kMaxSplitRows, layer.dim);
  }
  return split;
}

bool all_finite(const uint16_t* halves, int64_t count) {
  constexpr uint16_t kInfinity = 0x7c00;
  uint32_t beyond = 0;
  for (int64_t i = 0; i < count; ++i) beyond |= (halves[i] & kInfinity) == kInfinity ? 1u : 0u;
  return beyond == 0;
}

bool all_finite(const float* values, int64_t count) {
  constexpr uint32_t kInfinity = 0x7f800000;
  uint32_t beyond = 0;
  for (int64_t i = 0; i < count; ++i) {
    beyond |= (std::bit_cast<uint32_t>(values[i]) & kInfinity) == kInfinity ? 1u : 0u;
  }
  return beyond == 0;
}

}  // namespace

size_t most_split_bytes(const AttentionArgs& args, int threads) {
  if (threads <= 1) return 0;
  const KvLayer layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  const int64_t keys = int64_t{args.batch.table_width} * layer.block_size;
  const auto last = static_cast<int32_t>(std::min<int64_t>(keys, INT32_MAX) - 1);
  AttentionSplit split;
  split.items = 4 * threads - 1;
  split.partitions = std::min(partition_of(layer, last) + 1, kMaxSplitPartitions);
  split.state_floats = attention_state_floats(kMaxSplitRows, layer.dim);
  return split.bytes();
}

void Executor::execute(const RopeArgs& args, int thread) {
  const KvLayer layer = static_cast<const CpuKvCache&>(*args.cache).layer(args.layer);
  const int64_t all_heads = args.heads + 2 * args.kv_heads;
  const int64_t dim = args.head_dim;
  auto* rotated = scratch_[static_cast<size_t>(thread)].as<float>();
  auto* narrow = reinterpret_cast<uint8_t*>(rotated + dim + 16);  // the head as the cache holds it
  if (args.norm_spans_heads) {
    const Range tokens = partition(args.batch.tokens, thread, threads_.size());
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      float* q = static_cast<float*>(args.qkv) + t * all_heads * dim;
      float* k = q + args.heads * dim;
      if (args.q_norm != nullptr) kernels_.rms_norm(q, args.q_norm, args.norm_eps, args.heads * dim, q);
      if (args.k_norm != nullptr) kernels_.rms_norm(k, args.k_norm, args.norm_eps, args.kv_heads * dim, k);
    }
    threads_.barrier();
  }
  const float* q_norm = args.norm_spans_heads ? nullptr : args.q_norm;
  const float* k_norm = args.norm_spans_heads ? nullptr : args.k_norm;
  const Range items = partition(args.batch.tokens * all_heads, thread, threads_.size());
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t token = item / all_heads;
    const auto head = static_cast<int32_t>(item % all_heads);
    float* x = static_cast<float*>(args.qkv) + item * dim;
    const bool is_query = head < args.heads;
    const bool is_value = head >= args.heads + args.kv_heads;
    if (!is_value) {
      const float* cos = args.cos_sin + int64_t{args.batch.positions[token]} * args.rotary_dim;
      kernels_.rope({x, cos, cos + args.rotary_dim / 2, is_query ? q_norm : k_norm, args.norm_eps, args.head_dim,
                     args.rotary_dim, is_query ? x : rotated});
      if (is_query) continue;
    }
    const int64_t slot = args.batch.slots[token];
    const int64_t block = slot / layer.block_size * layer.block_stride, place = slot % layer.block_size;
    const int64_t kv_head = head - args.heads - (is_value ? args.kv_heads : 0);
    const float* source = is_value ? x : rotated;
    const auto write = [&](auto* cache, const auto* row) {
      if (is_value) {
        std::memcpy(cache + block + (kv_head * layer.block_size + place) * layer.dim, row,
                    static_cast<size_t>(dim) * sizeof(*row));
      } else {
        auto* column = cache + block + (kv_head * layer.lane_groups + place / 16) * layer.dim * 16 + place % 16;
        for (int64_t d = 0; d < dim; ++d) column[d * 16] = row[d];
      }
    };
    void* cache = const_cast<void*>(is_value ? layer.values : layer.keys);
    if (layer.dtype != DType::kF16 && !all_finite(source, dim)) {
      infinite_layer_.store(args.layer, std::memory_order_relaxed);
    }
    if (layer.dtype == DType::kF16) {
      auto* halves = reinterpret_cast<uint16_t*>(narrow);
      kernels_.to_f16(source, dim, halves);
      if (!all_finite(halves, dim)) overflowed_layer_.store(args.layer, std::memory_order_relaxed);
      write(static_cast<uint16_t*>(cache), halves);
    } else if (layer.dtype == DType::kF8E4M3) {
      kernels_.to_e4m3(source, dim, narrow);
      write(static_cast<uint8_t*>(cache), narrow);
    } else {
      write(static_cast<float*>(cache), source);
    }
  }
}

void Executor::execute(const AttentionArgs& args, int thread) {
  if (const AttentionSplit split = split_of(args, threads_.size())) return split_attention(args, split, thread);
  AttentionTask task = attention_task(args, scratch_[static_cast<size_t>(thread)].as<float>());
  std::array<QueryRow, kMaxQueryRows> rows;
  int64_t item = 0;
  for_each_attention_item(args, threads_.size(), [&](int32_t s, int32_t head, int32_t first, int32_t count) {
    if (item++ % threads_.size() != thread) return;
    set_item(args, s, head, first, count, rows.data(), task);
    kernels_.attention(task);
  });
}

void Executor::split_attention(const AttentionArgs& args, const AttentionSplit& split, int thread) {
  AttentionTask task = attention_task(args, scratch_[static_cast<size_t>(thread)].as<float>());
  std::array<QueryRow, kMaxQueryRows> rows;
  const auto state = [&](int64_t item, int32_t partition) {
    return shared_.as<float>() + (item * split.partitions + partition) * static_cast<int64_t>(split.state_floats);
  };
  // Calls f(item, its first partition, the one after its last) with `task` set to the item.
  const auto for_each_item = [&](auto f) {
    int64_t item = 0;
    for_each_attention_item(args, threads_.size(), [&](int32_t s, int32_t head, int32_t first, int32_t count) {
      set_item(args, s, head, first, count, rows.data(), task);
      const int32_t begin = rows[0].begin;  // later rows begin and end later
      const int32_t end = rows[static_cast<size_t>(count) - 1].end;
      f(item++, partition_of(task.layer, begin), partition_of(task.layer, end - 1) + 1);
    });
  };
  int64_t piece = 0;
  for_each_item([&](int64_t item, int32_t begin, int32_t end) {
    for (int32_t p = begin; p < end; ++p) {
      if (piece++ % threads_.size() == thread) kernels_.attention_partition(task, p, state(item, p));
    }
  });
  threads_.barrier();
  std::array<const float*, kMaxSplitPartitions> states;
  for_each_item([&](int64_t item, int32_t begin, int32_t end) {
    if (item % threads_.size() != thread) return;
    for (int32_t p = begin; p < end; ++p) states[static_cast<size_t>(p - begin)] = state(item, p);
    kernels_.attention_merge(task, states.data(), end - begin);
  });
}

}  // namespace nfp::cpu
