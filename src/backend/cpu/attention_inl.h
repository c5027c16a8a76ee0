// Attention of a few query rows over one sequence's keys and values (FlashAttention's online softmax, arXiv 2205.14135,
// over tiles at absolute boundaries). A row's arithmetic depends on its own keys only: tiles that it may not see are
// skipped, scores that it may not see are -infinity, values that it may not see are not touched.
#pragma once

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/linear_inl.h"
#include "backend/cpu/math_inl.h"
#include "backend/cpu/vector_ops_inl.h"

// Of the checks that are off here, one does not see that an unnamed namespace gives each source file its own
// definitions, and the other that indices of a tile and its row sizes are small: no product of two ints gets near 2^31.
// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
namespace nfp {
namespace {

using cpu::AttentionTask;
using cpu::group_of;
using cpu::kPartitionTiles;
using cpu::kTileGroups;
using cpu::kTileKeys;
using cpu::KvLayer;
using cpu::QueryRow;

using AttentionSteps = Fp32Steps<Source::kDense>;

struct RowState {
  float* maximum;  // [rows], 16 floats apart
  float* sums;     // [rows, 16]
  float* outputs;  // [rows, dim]
};

inline RowState state_at(float* p, int64_t rows) { return {p, p + rows * 16, p + rows * 32}; }

// A group of lanes: which keys it holds.
struct Lanes {
  int32_t first_key;
  int32_t count;
};

inline Lanes lanes_of(const KvLayer& layer, int32_t group) {
  const int32_t part = group % layer.lane_groups;
  const int32_t left = layer.block_size - part * 16;
  return {group / layer.lane_groups * layer.block_size + part * 16, left < 16 ? left : 16};
}

inline void widen_row(const KvLayer& layer, const void* base, int64_t offset, int64_t count, float* out, int64_t step) {
  // `count` vectors of sixteen; out moves by `step` floats a vector.
  if (layer.dtype == DType::kF16) {
    const auto* p = static_cast<const uint16_t*>(base) + offset;
    for (int64_t i = 0; i < count; ++i) store(out + i * step, load_f16(p + 16 * i));
  } else if (layer.dtype == DType::kF8E4M3) {
    const auto* p = static_cast<const uint8_t*>(base) + offset;
    for (int64_t i = 0; i < count; ++i) store(out + i * step, load_e4m3(p + 16 * i));
  } else {
    const auto* p = static_cast<const float*>(base) + offset;
    for (int64_t i = 0; i < count; ++i) store(out + i * step, load(p + 16 * i));
  }
}

// What the groups of a tile hold, worked out once for all rows.
struct TileLanes {
  Lanes groups[kTileGroups];
  int count;
  bool full;  // sixteen keys in every group
};

inline TileLanes tile_lanes(const KvLayer& layer, int32_t first_group, int count) {
  TileLanes tile{};
  tile.count = count;
  tile.full = true;
  for (int j = 0; j < count; ++j) {
    tile.groups[j] = lanes_of(layer, first_group + j);
    tile.full = tile.full && tile.groups[j].count == 16;
  }
  return tile;
}

// Keys of the tile as [dim, 64 lanes] and values as [64 lanes, dim] in FP32.
inline void unpack_tile(const AttentionTask& task, int32_t first_group, const TileLanes& tile, float* keys,
                        float* values) {
  const KvLayer& layer = task.layer;
  for (int j = 0; j < tile.count; ++j) {
    const int32_t group = first_group + j;
    const int64_t block = task.blocks[group / layer.lane_groups] * layer.block_stride;
    const int64_t part = group % layer.lane_groups;
    const int64_t head = task.kv_head;
    widen_row(layer, layer.keys, block + (head * layer.lane_groups + part) * layer.dim * 16, layer.dim, keys + j * 16,
              kTileKeys);
    const int count = tile.groups[j].count;
    widen_row(layer, layer.values, block + (head * layer.block_size + part * 16) * layer.dim,
              int64_t{count} * layer.dim / 16, values + static_cast<int64_t>(j) * 16 * layer.dim, 16);
    for (int64_t i = int64_t{count} * layer.dim; i < 16 * int64_t{layer.dim}; i += 16) {
      store(values + static_cast<int64_t>(j) * 16 * layer.dim + i, zero());
    }
  }
}

// Places of the tile, begin <= place < end, that row may see.
struct Places {
  int32_t begin, end;
};

inline Places visible(const TileLanes& tile, const QueryRow& row) {
  Places places{tile.count * 16, 0};
  for (int j = 0; j < tile.count; ++j) {
    const Lanes lanes = tile.groups[j];
    const int32_t begin = row.begin > lanes.first_key ? row.begin - lanes.first_key : 0;
    const int32_t last = row.end - lanes.first_key;
    const int32_t end = last < lanes.count ? last : lanes.count;
    if (begin >= end) continue;
    if (j * 16 + begin < places.begin) places.begin = j * 16 + begin;
    if (j * 16 + end > places.end) places.end = j * 16 + end;
  }
  return places;
}

// Scores become weights e^(score - maximum); sums and outputs are rescaled where the maximum grew. False where the row
// takes nothing from this tile. `all`: the row sees every lane.
inline bool softmax_row(const AttentionTask& task, const QueryRow& row, const TileLanes& tile, bool all, float* scores,
                        float* maximum, float* sums, float* outputs) {
  Vec s[kTileGroups];
  Vec most = splat(kMinusInfinity);
  for (int j = 0; j < tile.count; ++j) {
    Vec v = mul(load(scores + j * 16), splat(task.scale));
    if (task.soft_cap > 0.0f) v = mul(tanh_of(div(v, splat(task.soft_cap))), splat(task.soft_cap));
    if (!all) {
      const Lanes lanes = tile.groups[j];
      const int32_t last = row.end - lanes.first_key;
      v = keep_lanes(v, row.begin - lanes.first_key, last < lanes.count ? last : lanes.count, splat(kMinusInfinity));
    }
    s[j] = v;
    most = max(most, v);
  }
  const float here = max_lanes(most);
  const float before = *maximum;
  const float now = before > here ? before : here;
  if (now == kMinusInfinity) return false;
  Vec sum = load(sums);
  if (now != before) {
    const Vec factor = exp_of(splat(before - now));
    sum = mul(sum, factor);
    for (int64_t d = 0; d < task.layer.dim; d += 16) store(outputs + d, mul(load(outputs + d), factor));
    *maximum = now;
  }
  for (int j = 0; j < tile.count; ++j) {
    const Vec p = exp_of(sub(s[j], splat(now)));
    sum = add(sum, p);
    store(scores + j * 16, p);
  }
  store(sums, sum);
  return true;
}

inline void add_values(int rows, const float* weights, Places places, const float* values, int64_t dim,
                       float* outputs) {
  if (places.begin >= places.end) return;
  Ahead nothing;
  multiply_block<AttentionSteps>(weights + places.begin, kTileKeys, rows, FloatBlock{values + places.begin * dim, dim},
                                 static_cast<int>(dim / 16), places.end - places.begin, outputs, dim, false, nothing);
}

// Rows see different keys of a tile only at its edges: the middle is done together, the rest row by row, each row's
// keys in order.
inline void add_tile_values(const Places* places, int rows, const float* weights, const float* values, int64_t dim,
                            float* outputs) {
  for (int first = 0; first < rows; first += kTileRows) {
    const int count = rows - first < kTileRows ? rows - first : kTileRows;
    Places common{0, kTileKeys};
    for (int r = first; r < first + count; ++r) {
      if (places[r].begin > common.begin) common.begin = places[r].begin;
      if (places[r].end < common.end) common.end = places[r].end;
    }
    const bool any = common.begin < common.end;
    for (int r = first; r < first + count; ++r) {
      const Places head{places[r].begin, any ? common.begin : places[r].end};
      add_values(1, weights + r * kTileKeys, head, values, dim, outputs + r * dim);
    }
    if (!any) continue;
    add_values(count, weights + first * kTileKeys, common, values, dim, outputs + first * dim);
    for (int r = first; r < first + count; ++r) {
      add_values(1, weights + r * kTileKeys, {common.end, places[r].end}, values, dim, outputs + r * dim);
    }
  }
}

struct AttentionScratch {
  float* keys;
  float* values;
  float* queries;
  float* scores;
  float* partition;
  float* total;
};

inline AttentionScratch carve(const AttentionTask& task) {
  const int64_t dim = task.layer.dim;
  AttentionScratch s{};
  s.keys = task.scratch;
  s.values = s.keys + kTileKeys * dim;
  s.queries = s.values + kTileKeys * dim;
  s.scores = s.queries + cpu::kMaxQueryRows * dim;
  s.partition = s.scores + cpu::kMaxQueryRows * kTileKeys;
  s.total = s.partition + cpu::attention_state_floats(cpu::kMaxQueryRows, dim);
  return s;
}

void attention_partition(const AttentionTask& task, int32_t partition, float* state) {
  const AttentionScratch scratch = carve(task);
  const int64_t dim = task.layer.dim;
  const int rows = task.row_count;
  const RowState out = state_at(state, rows);
  int32_t begin = task.rows[0].begin, end = 0;
  for (int r = 0; r < rows; ++r) {
    out.maximum[r * 16] = kMinusInfinity;
    store(out.sums + r * 16, zero());
    for (int64_t d = 0; d < dim; d += 16) {
      store(out.outputs + r * dim + d, zero());
      store(scratch.queries + r * dim + d,
            d < task.head_dim ? load_tail(task.rows[r].q + d, task.head_dim - d) : zero());
    }
    if (task.rows[r].begin < begin) begin = task.rows[r].begin;
    if (task.rows[r].end > end) end = task.rows[r].end;
  }
  if (begin >= end) return;
  constexpr int32_t kGroups = kPartitionTiles * kTileGroups;
  const int32_t begin_group = group_of(task.layer, begin) / kTileGroups * kTileGroups;
  const int32_t end_group = group_of(task.layer, end - 1) + 1;
  const int32_t first = begin_group > partition * kGroups ? begin_group : partition * kGroups;
  const int32_t last = end_group < (partition + 1) * kGroups ? end_group : (partition + 1) * kGroups;
  for (int32_t group = first; group < last; group += kTileGroups) {
    const int groups = last - group < kTileGroups ? last - group : kTileGroups;
    const TileLanes tile = tile_lanes(task.layer, group, groups);
    unpack_tile(task, group, tile, scratch.keys, scratch.values);
    Ahead nothing;
    multiply_block<AttentionSteps>(scratch.queries, dim, rows, FloatBlock{scratch.keys, kTileKeys}, groups,
                                   task.head_dim, scratch.scores, kTileKeys, true, nothing);
    Places places[cpu::kMaxQueryRows];
    for (int r = 0; r < rows; ++r) {
      places[r] = visible(tile, task.rows[r]);
      const bool all = tile.full && places[r].begin == 0 && places[r].end == groups * 16;
      if (places[r].begin < places[r].end &&
          !softmax_row(task, task.rows[r], tile, all, scratch.scores + r * kTileKeys, out.maximum + r * 16,
                       out.sums + r * 16, out.outputs + r * dim)) {
        places[r] = {0, 0};
      }
    }
    add_tile_values(places, rows, scratch.scores, scratch.values, dim, out.outputs);
  }
}

// total += partition, for rows that have seen anything in it.
inline void merge(const AttentionTask& task, const RowState& total, const RowState& partition) {
  const int64_t dim = task.layer.dim;
  for (int r = 0; r < task.row_count; ++r) {
    const float a = total.maximum[r * 16], b = partition.maximum[r * 16];
    if (b == kMinusInfinity) continue;
    const float now = a > b ? a : b;
    const Vec from_total = exp_of(splat(a - now)), from_partition = exp_of(splat(b - now));
    const auto combine = [&](float* t, const float* p) {
      store(t, fma(load(t), from_total, mul(load(p), from_partition)));
    };
    combine(total.sums + r * 16, partition.sums + r * 16);
    for (int64_t d = 0; d < dim; d += 16) combine(total.outputs + r * dim + d, partition.outputs + r * dim + d);
    total.maximum[r * 16] = now;
  }
}

inline void finish_rows(const AttentionTask& task, const RowState& state) {
  const int64_t dim = task.layer.dim;
  for (int r = 0; r < task.row_count; ++r) {
    const float sum = sum_lanes(load(state.sums + r * 16));
    for (int64_t d = 0; d < task.head_dim; d += 16) {
      const Vec v = sum > 0.0f ? div(load(state.outputs + r * dim + d), splat(sum)) : zero();
      store_tail(task.rows[r].out + d, v, task.head_dim - d);
    }
  }
}

inline void clear(const AttentionTask& task, const RowState& state) {
  for (int r = 0; r < task.row_count; ++r) {
    state.maximum[r * 16] = kMinusInfinity;
    store(state.sums + r * 16, zero());
    for (int64_t d = 0; d < task.layer.dim; d += 16) store(state.outputs + r * task.layer.dim + d, zero());
  }
}

void attention(const AttentionTask& task) {
  const AttentionScratch scratch = carve(task);
  const RowState total = state_at(scratch.total, task.row_count);
  clear(task, total);
  int32_t begin = task.rows[0].begin, end = 0;
  for (int r = 0; r < task.row_count; ++r) {
    if (task.rows[r].begin < begin) begin = task.rows[r].begin;
    if (task.rows[r].end > end) end = task.rows[r].end;
  }
  if (begin < end) {
    const int32_t last = cpu::partition_of(task.layer, end - 1);
    for (int32_t p = cpu::partition_of(task.layer, begin); p <= last; ++p) {
      attention_partition(task, p, scratch.partition);
      merge(task, total, state_at(scratch.partition, task.row_count));
    }
  }
  finish_rows(task, total);
}

void attention_merge(const AttentionTask& task, const float* const* states, int32_t count) {
  const RowState total = state_at(carve(task).total, task.row_count);
  clear(task, total);
  for (int32_t i = 0; i < count; ++i) merge(task, total, state_at(const_cast<float*>(states[i]), task.row_count));
  finish_rows(task, total);
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
