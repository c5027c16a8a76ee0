#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/executor.h"
#include "backend/cpu/kv_cache.h"
#include "backend/cpu/testing/reference.h"

namespace nfp::cpu {
namespace {

struct Shape {
  int heads = 6, kv_heads = 2, head_dim = 32, block_size = 16;
  DType dtype = DType::kF16;
  int window = 0;
  float soft_cap = 0;
  bool qk_norm = false;
  int rotary_dim = 0;  // 0 = all of head_dim
};

// Sequences whose tokens are fed in chunks of the caller's choice; attention outputs are collected by token.
class Model {
 public:
  Model(const Shape& shape, const KernelTable& table, int threads, std::vector<int> lengths, uint32_t seed)
      : shape_(shape), table_(table), threads_(threads), executor_(table, threads_), lengths_(std::move(lengths)) {
    const int width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    longest_ = *std::max_element(lengths_.begin(), lengths_.end());
    table_width_ = (longest_ + shape.block_size - 1) / shape.block_size;
    const int64_t blocks = static_cast<int64_t>(lengths_.size()) * table_width_;
    cache_ = CpuKvCache::create({2, shape.kv_heads, shape.head_dim, shape.block_size, blocks, shape.dtype}).value();
    Random random(seed);
    for (const int length : lengths_)
      inputs.push_back(random.normals(static_cast<size_t>(length) * static_cast<size_t>(width)));
    norm_ = random.normals(static_cast<size_t>(shape.head_dim));
    for (int p = 0; p < longest_; ++p) {
      for (const bool sine : {false, true}) {
        for (int i = 0; i < rotary_dim() / 2; ++i) {
          const double angle = p * std::pow(10000.0, -2.0 * i / rotary_dim());
          cos_sin_.push_back(static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
        }
      }
    }
    // Blocks of sequences in mixed order, and garbage in what no token was written to.
    for (int64_t b = 0; b < blocks; ++b) block_table_.push_back(static_cast<int32_t>(b));
    std::shuffle(block_table_.begin(), block_table_.end(), std::mt19937(seed));
    const KvLayer layer = cache_->layer(0);
    std::memset(const_cast<void*>(layer.keys), 0xff, cache_->bytes());  // NaN in every dtype
    for (const int length : lengths_) {
      outputs.emplace_back(static_cast<size_t>(length * shape.heads * shape.head_dim), -1.0f);
    }
  }

  struct Chunk {
    int sequence, first, count;
  };

  void step(const std::vector<Chunk>& chunks) {
    const int width = (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
    const int out_width = shape_.heads * shape_.head_dim;
    std::vector<float> qkv;
    std::vector<int32_t> positions, slots, query_start = {0}, context, tables;
    BatchView batch;
    for (const Chunk& chunk : chunks) {
      const auto s = static_cast<size_t>(chunk.sequence);
      for (int t = chunk.first; t < chunk.first + chunk.count; ++t) {
        qkv.insert(qkv.end(), inputs[s].begin() + int64_t{t} * width, inputs[s].begin() + int64_t{t + 1} * width);
        positions.push_back(t);
        slots.push_back(
            block_table_[s * static_cast<size_t>(table_width_) + static_cast<size_t>(t / shape_.block_size)] *
                shape_.block_size +
            t % shape_.block_size);
      }
      query_start.push_back(static_cast<int32_t>(positions.size()));
      context.push_back(chunk.first + chunk.count);
      const auto row = block_table_.begin() + static_cast<ptrdiff_t>(s) * table_width_;
      tables.insert(tables.end(), row, row + table_width_);
    }
    batch.tokens = static_cast<int32_t>(positions.size());
    batch.sequences = static_cast<int32_t>(chunks.size());
    batch.table_width = table_width_;
    batch.positions = positions.data();
    batch.slots = slots.data();
    batch.query_start = query_start.data();
    batch.context = context.data();
    batch.block_table = tables.data();
    std::vector<float> out(static_cast<size_t>(batch.tokens * out_width), -2.0f);
    RopeArgs rope;
    rope.qkv = qkv.data();
    rope.heads = shape_.heads;
    rope.kv_heads = shape_.kv_heads;
    rope.head_dim = shape_.head_dim;
    rope.rotary_dim = rotary_dim();
    rope.cos_sin = cos_sin_.data();
    rope.q_norm = rope.k_norm = shape_.qk_norm ? norm_.data() : nullptr;
    rope.cache = cache_.get();
    rope.layer = 1;
    rope.batch = batch;
    AttentionArgs attention;
    attention.qkv = qkv.data();
    attention.heads = shape_.heads;
    attention.kv_heads = shape_.kv_heads;
    attention.head_dim = shape_.head_dim;
    attention.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    attention.window = shape_.window;
    attention.soft_cap = shape_.soft_cap;
    attention.cache = cache_.get();
    attention.layer = 1;
    attention.batch = batch;
    attention.out = out.data();
    const std::vector<Operation> operations = {rope, attention};
    ASSERT_TRUE(executor_.run(operations).ok());
    size_t token = 0;
    for (const Chunk& chunk : chunks) {
      std::copy_n(out.begin() + static_cast<ptrdiff_t>(token) * out_width, chunk.count * out_width,
                  outputs[static_cast<size_t>(chunk.sequence)].begin() + int64_t{chunk.first} * out_width);
      token += static_cast<size_t>(chunk.count);
    }
  }

  // The definition in FP64, from inputs; keys and values rounded as the cache rounds them.
  std::vector<double> defined(int sequence) const {
    const int d = shape_.head_dim, width = (shape_.heads + 2 * shape_.kv_heads) * d;
    const int length = lengths_[static_cast<size_t>(sequence)];
    const std::vector<float>& in = inputs[static_cast<size_t>(sequence)];
    const auto head = [&](int t, int h, bool rotate) {
      std::vector<double> x(in.begin() + int64_t{t} * width + int64_t{h} * d,
                            in.begin() + int64_t{t} * width + int64_t{h + 1} * d);
      if (!rotate) return x;
      if (shape_.qk_norm) {
        double sum = 0;
        for (const double v : x) sum += v * v;
        for (int i = 0; i < d; ++i) {
          x[static_cast<size_t>(i)] *= norm_[static_cast<size_t>(i)] / std::sqrt(sum / d + 1e-6);
        }
      }
      std::vector<double> y = x;
      const auto half = static_cast<size_t>(rotary_dim() / 2);
      for (size_t i = 0; i < half; ++i) {
        const size_t at = static_cast<size_t>(t * rotary_dim()) + i;
        const double c = cos_sin_[at], s = cos_sin_[at + half];
        y[i] = x[i] * c - x[i + half] * s;
        y[i + half] = x[i + half] * c + x[i] * s;
      }
      return y;
    };
    const auto cached = [&](double v) {
      const auto f = static_cast<float>(v);
      if (shape_.dtype == DType::kF8E4M3) return static_cast<double>(e4m3_to_fp32(fp32_to_e4m3(f)));
      return static_cast<double>(shape_.dtype == DType::kF16 ? fp16_to_fp32(fp32_to_fp16(f)) : f);
    };
    std::vector<double> out;
    const int group = shape_.heads / shape_.kv_heads;
    std::vector<std::vector<std::vector<double>>> keys(static_cast<size_t>(length)), values(keys);
    for (int t = 0; t < length; ++t) {
      for (int h = 0; h < shape_.kv_heads; ++h) {
        keys[static_cast<size_t>(t)].push_back(head(t, shape_.heads + h, true));
        values[static_cast<size_t>(t)].push_back(head(t, shape_.heads + shape_.kv_heads + h, false));
      }
    }
    for (int t = 0; t < length; ++t) {
      for (int h = 0; h < shape_.heads; ++h) {
        const std::vector<double> q = head(t, h, true);
        const auto kv = static_cast<size_t>(h / group);
        const int begin = shape_.window > 0 ? std::max(0, t - shape_.window + 1) : 0;
        std::vector<double> p;
        for (int j = begin; j <= t; ++j) {
          double s = 0;
          for (size_t i = 0; i < q.size(); ++i) s += q[i] * cached(keys[static_cast<size_t>(j)][kv][i]);
          s /= std::sqrt(static_cast<double>(d));
          if (shape_.soft_cap > 0)
            s = static_cast<double>(shape_.soft_cap) * std::tanh(s / static_cast<double>(shape_.soft_cap));
          p.push_back(s);
        }
        const double most = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& v : p) sum += v = std::exp(v - most);
        for (size_t i = 0; i < q.size(); ++i) {
          double o = 0;
          for (int j = begin; j <= t; ++j) {
            o += p[static_cast<size_t>(j - begin)] * cached(values[static_cast<size_t>(j)][kv][i]);
          }
          out.push_back(o / sum);
        }
      }
    }
    return out;
  }

  std::vector<std::vector<float>> inputs, outputs;

 private:
  int rotary_dim() const { return shape_.rotary_dim > 0 ? shape_.rotary_dim : shape_.head_dim; }

  Shape shape_;
  const KernelTable& table_;
  ThreadPool threads_;
  Executor executor_;
  std::vector<int> lengths_;
  int longest_ = 0;
  int table_width_ = 0;
  std::unique_ptr<CpuKvCache> cache_;
  std::vector<float> norm_, cos_sin_;
  std::vector<int32_t> block_table_;
};

const std::vector<Shape> kShapes = {
    {},
    {.heads = 3, .kv_heads = 3, .head_dim = 20, .block_size = 5},  // nothing is a multiple of 16
    {.heads = 4, .kv_heads = 1, .head_dim = 64, .block_size = 40, .dtype = DType::kF32},
    {.heads = 4, .kv_heads = 2, .head_dim = 16, .window = 19, .soft_cap = 3.0f},
    {.heads = 4, .kv_heads = 2, .head_dim = 32, .block_size = 32, .qk_norm = true},
    {.heads = 2, .kv_heads = 1, .head_dim = 32, .rotary_dim = 12},
    {.heads = 2, .kv_heads = 1, .head_dim = 48, .qk_norm = true, .rotary_dim = 40},
    {.dtype = DType::kF8E4M3},
    {.heads = 3, .kv_heads = 3, .head_dim = 20, .block_size = 5, .dtype = DType::kF8E4M3},
    {.heads = 4, .kv_heads = 2, .head_dim = 64, .block_size = 40, .dtype = DType::kF8E4M3, .window = 19},
    {.heads = 4,
     .kv_heads = 1,
     .head_dim = 16,
     .block_size = 32,
     .dtype = DType::kF8E4M3,
     .soft_cap = 3.0f,
     .qk_norm = true},
};

TEST(Attention, AgreesWithItsDefinition) {
  for (const Shape& shape : kShapes) {
    for (const KernelTable* table : runnable_tables()) {
      Model model(shape, *table, 2, {70, 1, 33}, 11);
      model.step({{0, 0, 70}, {1, 0, 1}, {2, 0, 33}});
      for (int s = 0; s < 3; ++s) {
        const std::vector<double> want = model.defined(s);
        const std::vector<float>& got = model.outputs[static_cast<size_t>(s)];
        // Scores are sums of head_dim products of values up to about 4: 2^-24 * 16 * 64 relative; F16 keys may round
        // the other way where FP32 and FP64 rotations differ: 2^-11 of one product. E4M3 keys hardly ever do (FP32's
        // error is 2^-20 of a step), but then by 2^-3 of a product of up to 16, over sqrt(head_dim).
        const double tolerance = shape.dtype == DType::kF8E4M3 ? 0.2 : 2e-3;
        size_t far = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          ASSERT_NEAR(got[i], want[i], tolerance) << table->name << " head_dim " << shape.head_dim << " at " << i;
          far += std::fabs(static_cast<double>(got[i]) - want[i]) > 2e-3 ? 1 : 0;
        }
        EXPECT_LE(far, want.size() / 100) << table->name << " head_dim " << shape.head_dim;
      }
    }
  }
}

TEST(Attention, EveryTableEqualsScalar) {
  for (const Shape& shape : kShapes) {
    Model reference(shape, scalar_kernels(), 1, {90, 17}, 12);
    reference.step({{0, 0, 90}, {1, 0, 17}});
    for (const KernelTable* table : runnable_tables()) {
      Model model(shape, *table, 3, {90, 17}, 12);
      model.step({{1, 0, 17}, {0, 0, 90}});
      EXPECT_EQ(model.outputs, reference.outputs) << table->name;
    }
  }
}

TEST(Attention, ChunksDecodeAndCompanyDoNotChangeARow) {
  for (const KernelTable* table : runnable_tables()) {
    if (table->name == std::string("scalar-bf16")) continue;
    for (Shape shape : kShapes) {
      if (table->name == std::string("scalar") && shape.head_dim > 32) continue;
      const int length = shape.block_size == 16 ? 1100 : 150;  // over two partitions of keys
      Model whole(shape, *table, 1, {length, 40}, 13);
      whole.step({{0, 0, length}});
      whole.step({{1, 0, 40}});
      Model pieces(shape, *table, 3, {length, 40}, 13);
      // Prefill in uneven chunks, with the other sequence's tokens beside them, then decode.
      pieces.step({{0, 0, 1}});
      pieces.step({{1, 0, 13}, {0, 1, 60}});
      pieces.step({{0, 61, length - 80}, {1, 13, 7}});
      for (int t = length - 19; t < length; ++t) {
        std::vector<Model::Chunk> chunks = {{0, t, 1}};
        const int other = 20 + t - (length - 19);
        chunks.push_back({1, other, other == 38 ? 2 : 1});
        pieces.step(chunks);
      }
      EXPECT_EQ(pieces.outputs, whole.outputs) << table->name << " head_dim " << shape.head_dim;
    }
  }
}

// Blocks of 40 have three groups of lanes, the last of eight keys, and those of 528 have 33: a partition has 32.
TEST(Attention, PartitionsMayEndWithinABlock) {
  for (const KernelTable* table : runnable_tables()) {
    for (const Shape& shape : {Shape{.heads = 2, .kv_heads = 1, .head_dim = 16, .block_size = 40, .window = 19},
                               Shape{.heads = 2, .kv_heads = 1, .head_dim = 16, .block_size = 528}}) {
      const int length = 560;
      Model whole(shape, *table, 1, {length}, 15);
      whole.step({{0, 0, length}});
      Model pieces(shape, *table, 3, {length}, 15);
      pieces.step({{0, 0, 400}});
      for (int t = 400; t < length; ++t) pieces.step({{0, t, 1}});
      EXPECT_EQ(pieces.outputs, whole.outputs) << table->name << " block size " << shape.block_size;
    }
  }
}

// Memory is the system's until a block is used: a first step must not touch as many huge pages as there are layers.
TEST(KvCache, WhatLayersHoldOfABlockLiesTogether) {
  const KvCacheSpec spec{30, 2, 64, 16, 1000, DType::kF16};
  const auto cache = CpuKvCache::create(spec).value();
  const auto* first = static_cast<const char*>(cache->layer(0).keys);
  const auto* last = static_cast<const char*>(cache->layer(29).values);
  EXPECT_LT(last - first, static_cast<ptrdiff_t>(CpuKvCache::bytes_per_block(spec)));
}

TEST(Attention, SplitPartitionsMergeToTheWhole) {
  Random random(14);
  for (const KernelTable* table : runnable_tables()) {
    const KvCacheSpec spec{1, 1, 64, 16, 100, DType::kF16};
    const auto cache = CpuKvCache::create(spec).value();
    auto* keys = static_cast<uint16_t*>(const_cast<void*>(cache->layer(0).keys));
    for (size_t i = 0; i < cache->bytes() / 2; ++i) keys[i] = fp32_to_fp16(random.normal());
    std::vector<int32_t> blocks(100);
    for (int i = 0; i < 100; ++i) blocks[static_cast<size_t>(i)] = i;
    const std::vector<float> q = random.normals(int64_t{3} * 64);
    std::vector<float> whole(int64_t{3} * 64), merged(int64_t{3} * 64, -1.0f);
    std::vector<float> scratch(attention_scratch_floats(64));
    const auto task_into = [&](std::vector<float>& out, std::vector<QueryRow>& rows) {
      rows.clear();
      for (int r = 0; r < 3; ++r)
        rows.push_back({q.data() + int64_t{r} * 64, out.data() + int64_t{r} * 64, r * 500, 1550 + r * 20});
      AttentionTask task;
      task.layer = cache->layer(0);
      task.blocks = blocks.data();
      task.head_dim = 64;
      task.scale = 0.125f;
      task.rows = rows.data();
      task.row_count = 3;
      task.scratch = scratch.data();
      return task;
    };
    std::vector<QueryRow> rows;
    table->attention(task_into(whole, rows));
    const AttentionTask task = task_into(merged, rows);
    std::vector<std::vector<float>> states;
    std::vector<const float*> pointers;
    for (int p = 0; p < 4; ++p) {
      states.emplace_back(attention_state_floats(3, 64));
      table->attention_partition(task, p, states.back().data());
    }
    pointers.reserve(states.size());
    for (const auto& state : states) pointers.push_back(state.data());
    table->attention_merge(task, pointers.data(), 4);
    EXPECT_EQ(merged, whole) << table->name;
  }
}

// A cache of blocks of `block_size` whose code for key `token`, dimension d, is keys(token, d); the same of values.
template <typename Keys, typename Values>
std::unique_ptr<CpuKvCache> cache_of_codes(int tokens, int block_size, int dim, Keys keys, Values values) {
  const int64_t blocks = (tokens + block_size - 1) / block_size;
  auto cache = CpuKvCache::create({1, 1, dim, block_size, blocks, DType::kF8E4M3}).value();
  const KvLayer layer = cache->layer(0);
  auto* to_keys = static_cast<uint8_t*>(const_cast<void*>(layer.keys));
  auto* to_values = static_cast<uint8_t*>(const_cast<void*>(layer.values));
  for (int t = 0; t < tokens; ++t) {
    const int64_t block = t / block_size * layer.block_stride, place = t % block_size;
    for (int d = 0; d < dim; ++d) {
      to_keys[block + ((place / 16) * layer.dim + d) * 16 + place % 16] = keys(t, d);
      to_values[block + place * layer.dim + d] = values(t, d);
    }
  }
  return cache;
}

TEST(Attention, ReadsEveryE4m3Code) {
  constexpr int kDim = 20;
  std::vector<int32_t> blocks(600);
  for (int i = 0; i < 600; ++i) blocks[static_cast<size_t>(i)] = i;
  for (const KernelTable* table : runnable_tables()) {
    for (const int block_size : {1, 5, 16, 40, 64}) {
      AttentionTask task;
      task.blocks = blocks.data();
      task.head_dim = kDim;
      std::vector<float> scratch(attention_scratch_floats(32));
      task.scratch = scratch.data();
      // Values: a row that sees one key gives that key's value.
      const auto cache = cache_of_codes(
          256, block_size, kDim, [](int, int) { return uint8_t{0x38}; },
          [](int t, int d) { return static_cast<uint8_t>(t + d); });
      task.layer = cache->layer(0);
      const std::vector<float> ones(kDim, 1.0f);
      for (int t = 0; t < 256; ++t) {
        std::vector<float> out(kDim, -1.0f);
        const QueryRow row{ones.data(), out.data(), t, t + 1};
        task.rows = &row;
        task.row_count = 1;
        table->attention(task);
        for (int d = 0; d < kDim; ++d) {
          const float want = e4m3_to_fp32(static_cast<uint8_t>(t + d));
          const float got = out[static_cast<size_t>(d)];
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(got)) << table->name << " code " << t + d;
          } else {
            ASSERT_EQ(got, want) << table->name << " code " << t + d << " block size " << block_size;
          }
        }
      }
      // Keys: of two keys the first has the code in one dimension, the second zeros; values 1 and 0 give the first
      // one's share, 1 / (1 + e^-score). The query makes that score 1 or -1.
      const auto pairs = cache_of_codes(
          512, block_size, kDim,
          [](int t, int d) { return static_cast<uint8_t>(t % 2 == 0 && d == t / 2 % kDim ? t / 2 : 0); },
          [](int t, int) { return static_cast<uint8_t>(t % 2 == 0 ? 0x38 : 0); });
      task.layer = pairs->layer(0);
      for (int code = 0; code < 256; ++code) {
        const float key = e4m3_to_fp32(static_cast<uint8_t>(code));
        std::vector<float> q(kDim, 0.0f), out(kDim, -1.0f);
        q[static_cast<size_t>(code % kDim)] = key == 0.0f || std::isnan(key) ? 1.0f : 1.0f / std::fabs(key);
        const QueryRow row{q.data(), out.data(), 2 * code, 2 * code + 2};
        task.rows = &row;
        table->attention(task);
        if (std::isnan(key)) continue;
        const double score = key == 0.0f ? 0.0 : key > 0.0f ? 1.0 : -1.0;
        ASSERT_NEAR(out[0], 1.0 / (1.0 + std::exp(-score)), 1e-6) << table->name << " code " << code;
      }
    }
  }
}

TEST(Attention, RoundsToE4m3AsTheScalarConversion) {
  std::vector<float> x = {0.0f, -0.0f, 448.0f, 449.0f, 464.0f, 480.0f, 1e30f, -1e30f, 1e-30f, -1e-45f};
  x.push_back(std::numeric_limits<float>::infinity());
  x.push_back(-std::numeric_limits<float>::infinity());
  for (int code = 0; code < 0x7e; ++code) {  // both neighbours, what lies halfway between them, and beside that
    const float low = e4m3_to_fp32(static_cast<uint8_t>(code)), high = e4m3_to_fp32(static_cast<uint8_t>(code + 1));
    const float half = (low + high) / 2;
    for (const float v : {low, half, std::nextafter(half, low), std::nextafter(half, high), high}) {
      x.push_back(v);
      x.push_back(-v);
    }
  }
  Random random(16);
  for (int i = 0; i < 20000; ++i) {
    const float v = std::bit_cast<float>(random.bits());
    x.push_back(std::isnan(v) ? 0.0f : v);
    x.push_back(random.normal(std::ldexp(1.0f, random.integer(-12, 9))));
  }
  const auto nan_from = x.size();
  x.push_back(std::numeric_limits<float>::quiet_NaN());
  x.push_back(-std::numeric_limits<float>::quiet_NaN());
  for (const KernelTable* table : runnable_tables()) {
    std::vector<uint8_t> got(x.size() + 1, 0xa5);
    table->to_e4m3(x.data(), static_cast<int64_t>(x.size()), got.data());
    EXPECT_EQ(got.back(), 0xa5);
    for (size_t i = 0; i < nan_from; ++i) {
      ASSERT_EQ(int{got[i]}, int{fp32_to_e4m3(x[i])}) << table->name << " " << x[i];
    }
    for (size_t i = nan_from; i < x.size(); ++i) EXPECT_EQ(got[i] & 0x7f, 0x7f) << table->name;
    for (int64_t n = 1; n < 16; ++n) {
      std::vector<uint8_t> few(17, 0xa5);
      table->to_e4m3(x.data() + 12, n, few.data());
      for (int64_t i = 0; i < 17; ++i) {
        const auto at = static_cast<size_t>(i);
        EXPECT_EQ(few[at], i < n ? fp32_to_e4m3(x[12 + at]) : 0xa5) << table->name << " n " << n;
      }
    }
  }
}

TEST(Attention, AnEmptySequenceIsSkipped) {
  Model model({}, *runnable_tables().back(), 2, {5, 3}, 15);
  model.step({{0, 0, 5}, {1, 0, 0}});
  for (const float v : model.outputs[1]) EXPECT_EQ(v, -1.0f);
}

}  // namespace
}  // namespace nfp::cpu
