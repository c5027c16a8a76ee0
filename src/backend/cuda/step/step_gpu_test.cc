// The step's small kernels against float64. Needs a Hopper GPU; skips elsewhere.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>

#include "backend/cuda/step/step.h"
#include "backend/cuda/testing/device.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

class StepGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
  std::vector<uint16_t> numbers(size_t count, float sigma = 1.0f) {
    std::normal_distribution<float> normal(0.0f, sigma);
    std::vector<uint16_t> out(count);
    for (uint16_t& v : out) v = fp32_to_fp16(normal(random_));
    return out;
  }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  std::mt19937 random_{7};
};

void finish(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.error().message;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(StepGpu, EmbedsExactly) {
  struct Case {
    int64_t vocab, hidden, rows;
    float scale;
    bool row_scale;
  };
  for (const Case& c : {Case{100, 64, 5, 1.0f, false}, Case{301, 576, 33, 1.0f, true}, Case{64, 4096, 1, 1.0f, false},
                        Case{1000, 5120, 70, 53.5f, true}, Case{65, 72, 4, 0.5f, false}, Case{10, 8, 3, 1.0f, true}}) {
    const auto count = static_cast<size_t>(c.vocab * c.hidden);
    std::vector<uint16_t> table = numbers(count, 0.3f);
    for (uint16_t& w : table) {
      if (integer(0, 9) == 0) w = static_cast<uint16_t>(integer(0, 0x3ff) | integer(0, 1) << 15);  // subnormals
      if ((w & 0x7fff) > 0x3f00) w = static_cast<uint16_t>((w & 0x8000) | 0x3f00);
    }
    std::vector<float> row_scale(static_cast<size_t>(c.vocab));
    for (float& s : row_scale) s = std::ldexp(1.0f, integer(-2, 3));
    std::vector<int32_t> ids, source;
    std::vector<SampledRow> previous(5);
    for (SampledRow& p : previous) p.token = integer(0, static_cast<int>(c.vocab) - 1);
    for (int64_t r = 0; r < c.rows; ++r) {
      source.push_back(integer(-3, 4));
      ids.push_back(source.back() < 0 ? integer(0, static_cast<int>(c.vocab) - 1) : -12345);
    }
    if (source[0] >= 0) source[0] = -1, ids[0] = static_cast<int32_t>(c.vocab) - 1;
    const DeviceVector<int32_t> d_ids(ids), d_source(source);
    const DeviceVector<SampledRow> d_previous(previous);
    const DeviceVector<float> d_row_scale(row_scale);
    for (const int kind : {0, 1, 2}) {  // biased planes, free planes, dense
      const Join join = kind == 0 ? Join::kBiased : Join::kFree;
      std::vector<uint8_t> upper(count), lower(count);
      for (size_t i = 0; i < count; ++i) {
        upper[i] = fp32_to_e4m3(fp16_to_fp32(table[i]) * 256.0f);
        if (kind == 1 && (table[i] & 0x7f) != 0 && integer(0, 1) == 0) {  // the other neighbour
          const int truncated = (table[i] >> 7) & 0x7f;
          const int other = (upper[i] & 0x7f) == truncated ? truncated + 1 : truncated;
          if (other < 0x7f) upper[i] = static_cast<uint8_t>((upper[i] & 0x80) | other);
        }
        lower[i] = static_cast<uint8_t>(table[i]);
      }
      const PlaneShape shape{c.vocab, c.hidden};
      std::vector<uint8_t> planes[2];
      for (const Plane plane : {Plane::kUpper, Plane::kLower}) {
        auto& out = planes[static_cast<int>(plane)];
        out.resize(shape.bytes());
        const auto& in = plane == Plane::kUpper ? upper : lower;
        for (int64_t block = 0; block < shape.row_blocks(); ++block) {
          const int64_t first = block * kBlockRows;
          pack_slab(shape, plane, join, std::span(in).subspan(static_cast<size_t>(first * c.hidden)),
                    static_cast<int>(std::min<int64_t>(kBlockRows, c.vocab - first)),
                    out.data() + static_cast<size_t>(block) * shape.slab_bytes());
        }
      }
      const DeviceVector<uint8_t> d_upper(planes[0]), d_lower(planes[1]);
      const DeviceVector<uint16_t> d_dense(table), out(static_cast<size_t>(c.rows * c.hidden));
      EmbedCall call;
      call.table.vocab = c.vocab;
      call.table.hidden = c.hidden;
      call.table.join = join;
      if (kind == 2) {
        call.table.dense = d_dense.get();
      } else {
        call.table.upper = d_upper.get();
        call.table.lower = d_lower.get();
      }
      call.table.row_scale = c.row_scale ? d_row_scale.get() : nullptr;
      call.tokens = {d_ids.get(), d_source.get(), d_previous.get()};
      call.rows = c.rows;
      call.scale = c.scale;
      call.out = out.get();
      finish(run_embed(call, nullptr));
      const auto got = out.host();
      const DeviceVector<float> out_f32(got.size());
      call.out = out_f32.get();
      call.out_is_f32 = true;
      finish(run_embed(call, nullptr));
      const auto got_f32 = out_f32.host();
      for (int64_t r = 0; r < c.rows; ++r) {
        const auto at = static_cast<size_t>(r);
        const auto token =
            static_cast<size_t>(source[at] < 0 ? ids[at] : previous[static_cast<size_t>(source[at])].token);
        for (size_t i = 0; i < static_cast<size_t>(c.hidden); ++i) {
          const float w = fp16_to_fp32(table[token * static_cast<size_t>(c.hidden) + i]);
          const float want = w * (c.scale * (c.row_scale ? row_scale[token] : 1.0f));
          const size_t place = at * static_cast<size_t>(c.hidden) + i;
          ASSERT_EQ(got[place], fp32_to_fp16(want)) << "kind " << kind << " row " << r << " " << i;
          ASSERT_EQ(got_f32[place], want) << "kind " << kind << " row " << r << " " << i;
        }
      }
    }
  }
}

struct RopeCase {
  int32_t tokens, heads, kv_heads, head_dim, rotary_dim, block_size;
  bool norm;
};

// One number of the cache, for either format.
float from_cache(bool e4m3, const std::vector<uint8_t>& cache, size_t at) {
  if (e4m3) return e4m3_to_fp32(cache[at]);
  return fp16_to_fp32(static_cast<uint16_t>(cache[2 * at] | cache[2 * at + 1] << 8));
}
float round_to_cache(bool e4m3, float value) {
  return e4m3 ? e4m3_to_fp32(fp32_to_e4m3(value)) : fp16_to_fp32(fp32_to_fp16(value));
}

class RopeGpu : public StepGpu, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Cache, RopeGpu, ::testing::Bool(),
                         [](const auto& e4m3) { return e4m3.param ? "E4m3" : "F16"; });

TEST_P(RopeGpu, MatchesFloat64AndFillsTheCache) {
  const bool e4m3 = GetParam();
  for (const RopeCase& c :
       {RopeCase{1, 9, 3, 64, 0, 16, false}, RopeCase{7, 32, 8, 128, 0, 16, false},
        RopeCase{33, 4, 2, 128, 0, 32, true}, RopeCase{5, 2, 1, 256, 0, 16, true}, RopeCase{3, 3, 3, 8, 0, 4, true},
        RopeCase{4, 5, 1, 40, 0, 16, true}, RopeCase{6, 4, 4, 80, 32, 16, false}, RopeCase{9, 4, 2, 128, 96, 16, true},
        RopeCase{5, 2, 2, 72, 40, 8, true}, RopeCase{2, 3, 1, 248, 0, 16, false},
        RopeCase{70, 16, 16, 96, 0, 64, false}, RopeCase{3, 2, 1, 256, 8, 16, true}}) {
    const auto dim = static_cast<size_t>(c.head_dim);
    const auto rotary = static_cast<size_t>(c.rotary_dim == 0 ? c.head_dim : c.rotary_dim);
    const auto all_heads = static_cast<size_t>(c.heads + int64_t{2} * c.kv_heads);
    const auto tokens = static_cast<size_t>(c.tokens);
    auto qkv = numbers(tokens * all_heads * dim);
    for (size_t i = 0; i < qkv.size(); i += 7) {  // what E4M3 saturates, and rounds to its subnormals and to zero
      qkv[i] = fp32_to_fp16(fp16_to_fp32(qkv[i]) * std::ldexp(1.0f, integer(-12, 10)));
    }
    constexpr int kPositions = 300;
    std::vector<float> table;
    for (int p = 0; p < kPositions; ++p) {
      for (const bool is_sine : {false, true}) {
        for (size_t i = 0; i < rotary / 2; ++i) {
          const double angle = p * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
          table.push_back(static_cast<float>(is_sine ? std::sin(angle) : std::cos(angle)));
        }
      }
    }
    std::vector<float> q_norm, k_norm;
    for (size_t i = 0; i < dim; ++i) {
      q_norm.push_back(0.5f + static_cast<float>(integer(0, 1000)) * 0.001f);
      k_norm.push_back(0.5f + static_cast<float>(integer(0, 1000)) * 0.002f);
    }
    const int blocks = c.tokens / c.block_size + 3;
    std::vector<int32_t> slots(static_cast<size_t>(blocks * c.block_size)), positions;
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<int32_t>(i);
    std::shuffle(slots.begin(), slots.end(), random_);
    slots.resize(tokens);
    if (tokens > 2) slots[1] = -1;
    for (size_t t = 0; t < tokens; ++t) positions.push_back(integer(0, kPositions - 1));
    const size_t cache = static_cast<size_t>(blocks * c.block_size * c.kv_heads) * dim;
    const size_t cache_bytes = cache * (e4m3 ? 1 : 2);
    const DeviceVector<uint16_t> d_qkv(qkv);
    const DeviceVector<uint8_t> keys(cache_bytes), values(cache_bytes);
    const DeviceVector<float> d_table(table), d_q_norm(q_norm), d_k_norm(k_norm);
    const DeviceVector<int32_t> d_slots(slots), d_positions(positions);
    RopeCall call;
    call.qkv = d_qkv.get();
    call.tokens = c.tokens;
    call.heads = c.heads;
    call.kv_heads = c.kv_heads;
    call.head_dim = c.head_dim;
    call.rotary_dim = c.rotary_dim;
    call.cos_sin = d_table.get();
    call.positions = d_positions.get();
    call.slots = d_slots.get();
    if (c.norm) {
      call.q_norm = d_q_norm.get();
      call.k_norm = d_k_norm.get();
    }
    call.keys = keys.get();
    call.values = values.get();
    call.e4m3_cache = e4m3;
    call.block_size = c.block_size;
    finish(run_rope(call, nullptr));
    const auto got = d_qkv.host();
    std::vector<uint8_t> want_keys(cache_bytes, 0xff), want_values(cache_bytes, 0xff);
    const auto got_keys = keys.host(), got_values = values.host();
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t h = 0; h < all_heads; ++h) {
        const bool is_query = h < static_cast<size_t>(c.heads);
        const bool is_value = h >= static_cast<size_t>(int64_t{c.heads} + c.kv_heads);
        const size_t at = (t * all_heads + h) * dim;
        std::vector<double> x(dim), want(dim);
        double squares = 0;
        for (size_t i = 0; i < dim; ++i) {
          x[i] = static_cast<double>(fp16_to_fp32(qkv[at + i]));
          squares += x[i] * x[i];
        }
        if (c.norm && !is_value) {
          for (size_t i = 0; i < dim; ++i)
            x[i] *= static_cast<double>((is_query ? q_norm : k_norm)[i]) /
                    std::sqrt(squares / static_cast<double>(dim) + 1e-6);
        }
        want = x;
        for (size_t i = 0; i < rotary / 2 && !is_value; ++i) {
          const size_t place = static_cast<size_t>(positions[t]) * rotary + i;
          const double cosine = static_cast<double>(table[place]),
                       sine = static_cast<double>(table[place + rotary / 2]);
          want[i] = x[i] * cosine - x[i + rotary / 2] * sine;
          want[i + rotary / 2] = x[i + rotary / 2] * cosine + x[i] * sine;
        }
        size_t base = 0;
        if (!is_query) {
          const size_t kv_head = h - static_cast<size_t>(c.heads) - (is_value ? static_cast<size_t>(c.kv_heads) : 0);
          if (slots[t] >= 0) {
            const auto slot = static_cast<size_t>(slots[t]), size = static_cast<size_t>(c.block_size);
            base = ((slot / size * static_cast<size_t>(c.kv_heads) + kv_head) * size + slot % size) * dim;
          }
        }
        for (size_t i = 0; i < dim; ++i) {
          if (!is_query) {
            ASSERT_EQ(got[at + i], qkv[at + i]);
          }
          if (!is_query && slots[t] < 0) continue;
          const std::vector<uint8_t>& stored = is_value ? got_values : got_keys;
          const float number = is_query ? fp16_to_fp32(got[at + i]) : from_cache(e4m3, stored, base + i);
          if (is_value) {
            ASSERT_EQ(number, round_to_cache(e4m3, fp16_to_fp32(qkv[at + i])));
          } else {
            // FP32's error of the rotation, whose terms may cancel, and of the norm before it; rounding keeps order.
            const size_t pair = i < rotary / 2 ? i + rotary / 2 : i < rotary ? i - rotary / 2 : i;
            const double slack = 2e-6 * (std::abs(x[i]) + std::abs(x[pair])) + 1e-9;
            const bool narrow = !is_query && e4m3;
            ASSERT_GE(number, round_to_cache(narrow, static_cast<float>(want[i] - slack)))
                << "head_dim " << c.head_dim << " token " << t << " head " << h << " " << i << " of " << want[i];
            ASSERT_LE(number, round_to_cache(narrow, static_cast<float>(want[i] + slack)))
                << "head_dim " << c.head_dim << " token " << t << " head " << h << " " << i << " of " << want[i];
          }
          if (is_query) continue;
          std::vector<uint8_t>& wanted = is_value ? want_values : want_keys;
          const size_t size = e4m3 ? 1 : 2;
          std::copy_n(stored.begin() + static_cast<ptrdiff_t>((base + i) * size), size,
                      wanted.begin() + static_cast<ptrdiff_t>((base + i) * size));
        }
      }
    }
    ASSERT_EQ(got_keys, want_keys) << "written elsewhere, head_dim " << c.head_dim;
    ASSERT_EQ(got_values, want_values);
  }
}

// Tokens found in the batch's arrays are where positions and slots say, in a cache whose blocks lie apart too; BF16
// gives FP16's numbers, rounded.
TEST_F(StepGpu, RopeFindsTokensInTheBatch) {
  constexpr int kHeads = 5, kKvHeads = 2, kDim = 64, kBlockSize = 16, kWidth = 12, kBlocks = 40;
  constexpr int kRow = (kHeads + 2 * kKvHeads) * kDim;
  constexpr int64_t kBlock = int64_t{kKvHeads} * kBlockSize * kDim;
  const std::vector<float> table = [] {
    std::vector<float> out;
    for (int p = 0; p < 200; ++p) {
      for (int i = 0; i < kDim; ++i)
        out.push_back(static_cast<float>(i < kDim / 2 ? std::cos(p * 0.01 * i) : std::sin(p * 0.01 * (i - kDim / 2))));
    }
    return out;
  }();
  const DeviceVector<float> d_table(table);
  // Whole prompts, later chunks, single tokens and what pads; then single tokens alone.
  for (const bool one_each : {false, true}) {
    std::vector<int32_t> starts{0}, contexts, positions, slots, tables;
    int block = kBlocks;
    for (const auto& [tokens, context] : {std::pair{1, 1}, {33, 33}, {1, 130}, {7, 100}, {1, 17}, {1, 0}}) {
      const int count = one_each ? 1 : context > 0 ? tokens : 0;
      starts.push_back(starts.back() + count);
      contexts.push_back(context);
      const size_t row = tables.size();
      for (int i = 0; i < kWidth; ++i) tables.push_back(i * kBlockSize < context ? --block : -1);
      for (int i = 0; i < count; ++i) {
        const int position = std::max(0, context - count + i);
        positions.push_back(position);
        slots.push_back(context == 0 ? -1
                                     : tables[row + static_cast<size_t>(position / kBlockSize)] * kBlockSize +
                                           position % kBlockSize);
      }
    }
    const auto tokens = static_cast<int64_t>(positions.size());
    std::vector<uint16_t> halves, brains;
    for (int64_t i = 0; i < tokens * kRow; ++i) {
      const float v = static_cast<float>(integer(-64, 64)) * 0.0625f;
      halves.push_back(fp32_to_fp16(v));
      brains.push_back(fp32_to_bf16(v));
    }
    const DeviceVector<int32_t> d_starts(starts), d_contexts(contexts), d_tables(tables), d_positions(positions),
        d_slots(slots);
    const auto run = [&](bool batch, bool e4m3, bool bf16, bool apart) {
      const DeviceVector<uint16_t> qkv(bf16 ? brains : halves);
      const size_t bytes = static_cast<size_t>(2 * kBlocks * kBlock) * (e4m3 ? 1 : 2);
      const DeviceVector<uint8_t> cache(bytes);
      RopeCall call;
      call.qkv = qkv.get();
      call.tokens = tokens + (batch && !one_each ? 20 : 0);  // more than there are
      call.heads = kHeads;
      call.kv_heads = kKvHeads;
      call.head_dim = kDim;
      call.cos_sin = d_table.get();
      if (batch) {
        call.query_start = d_starts.get();
        call.context = d_contexts.get();
        call.block_table = d_tables.get();
        call.table_width = kWidth;
        call.sequences = static_cast<int32_t>(contexts.size());
        call.one_token_each = one_each;
      } else {
        call.positions = d_positions.get();
        call.slots = d_slots.get();
      }
      call.keys = cache.get();
      call.values = cache.get() + (apart ? kBlock : kBlocks * kBlock) * (e4m3 ? 1 : 2);
      call.block_stride = apart ? 2 * kBlock : 0;
      call.e4m3_cache = e4m3;
      call.bf16 = bf16;
      call.block_size = kBlockSize;
      finish(run_rope(call, nullptr));
      std::vector<uint16_t> q = qkv.host();
      if (one_each) q.resize(q.size() - kRow);  // the last token pads: its query is nobody's
      std::vector<uint8_t> got = cache.host();
      if (apart) {  // as if they were not
        std::vector<uint8_t> together(got.size());
        const size_t size = static_cast<size_t>(kBlock) * (e4m3 ? 1 : 2);
        for (size_t b = 0; b < kBlocks; ++b) {
          std::copy_n(got.begin() + static_cast<ptrdiff_t>(2 * b * size), size,
                      together.begin() + static_cast<ptrdiff_t>(b * size));
          std::copy_n(got.begin() + static_cast<ptrdiff_t>((2 * b + 1) * size), size,
                      together.begin() + static_cast<ptrdiff_t>((kBlocks + b) * size));
        }
        got = together;
      }
      return std::pair(q, got);
    };
    for (const bool e4m3 : {false, true}) {
      const auto want = run(false, e4m3, false, false);
      for (const bool apart : {false, true}) {
        const auto got = run(true, e4m3, false, apart);
        EXPECT_EQ(got.first, want.first);
        EXPECT_EQ(got.second, want.second);
      }
    }
    const auto want = run(false, false, false, false), got = run(true, false, true, true);
    const auto expect_near = [](float bf16, float f16) {  // both are rounded, of numbers up to 8
      ASSERT_NEAR(bf16, f16, 0x1p-8f * std::abs(f16) + 0x1p-8f);
    };
    for (size_t i = 0; i < want.first.size(); ++i)
      ASSERT_NO_FATAL_FAILURE(expect_near(bf16_to_fp32(got.first[i]), fp16_to_fp32(want.first[i]))) << i;
    for (size_t i = 0; i < want.second.size(); i += 2) {
      const auto bits = [&](const auto& run_of) {
        return static_cast<uint16_t>(run_of.second[i] | run_of.second[i + 1] << 8);
      };
      if (bits(want) == 0xffff) {  // as DeviceVector begins
        ASSERT_EQ(bits(got), 0xffff) << i;
      } else {
        ASSERT_NO_FATAL_FAILURE(expect_near(bf16_to_fp32(bits(got)), fp16_to_fp32(bits(want)))) << i;
      }
    }
  }
}

// Values go to the cache as they are: all FP16 numbers, against the scalar conversion.
TEST_F(StepGpu, EveryFp16NumberIsRoundedToE4m3) {
  constexpr int kDim = 64, kTokens = 65536 / kDim;
  std::vector<uint16_t> qkv(size_t{3} * kDim * kTokens);
  for (size_t i = 0; i < 65536; ++i) qkv[i / kDim * 3 * kDim + size_t{2} * kDim + i % kDim] = static_cast<uint16_t>(i);
  std::vector<int32_t> slots(kTokens);
  for (int t = 0; t < kTokens; ++t) slots[static_cast<size_t>(t)] = t;
  const std::vector<float> table(kDim, 1.0f);
  const DeviceVector<uint16_t> d_qkv(qkv);
  const DeviceVector<float> d_table(table);
  const DeviceVector<int32_t> d_slots(slots), d_positions(std::vector<int32_t>(kTokens, 0));
  const DeviceVector<uint8_t> keys(65536), values(65536);
  RopeCall call;
  call.qkv = d_qkv.get();
  call.tokens = kTokens;
  call.heads = call.kv_heads = 1;
  call.head_dim = kDim;
  call.cos_sin = d_table.get();
  call.positions = d_positions.get();
  call.slots = d_slots.get();
  call.keys = keys.get();
  call.values = values.get();
  call.e4m3_cache = true;
  finish(run_rope(call, nullptr));
  const auto got = values.host();
  for (size_t i = 0; i < 65536; ++i) {
    const float number = fp16_to_fp32(static_cast<uint16_t>(i));
    if (std::isnan(number)) {
      ASSERT_EQ(got[i] & 0x7f, 0x7f) << i;
    } else {
      ASSERT_EQ(got[i], fp32_to_e4m3(number)) << i;
    }
  }
}

// Wherever it is in a query, key or value: infinite, no number, or beyond FP16 once it is turned, which E4M3 makes 448.
TEST_P(RopeGpu, TellsWhatIsBeyondFp16) {
  const bool e4m3 = GetParam();
  constexpr int kHeads = 2, kKvHeads = 1, kTokens = 3;
  for (const auto& [dim, rotary] : {std::pair<int, int>{64, 64}, {128, 96}, {40, 40}}) {
    const std::vector<float> table(static_cast<size_t>(rotary), 1.0f);  // a turn that doubles
    const DeviceVector<float> d_table(table);
    const DeviceVector<int32_t> positions(std::vector<int32_t>(kTokens, 0)), slots(std::vector<int32_t>{4, 0, 9}),
        padding(std::vector<int32_t>{4, -1, 9});
    const size_t cache = size_t{16} * static_cast<size_t>(dim) * 2;
    const DeviceVector<uint8_t> keys(cache), values(cache);
    const uint16_t large = fp32_to_fp16(60000.0f);
    for (const uint16_t half : {uint16_t{0x3c00}, uint16_t{0x7c00}, uint16_t{0xfc00}, uint16_t{0x7e00}, large}) {
      for (int head = 0; head < kHeads + 2 * kKvHeads; ++head) {
        for (int feature = 0; feature < dim; feature += half == large ? dim : 5) {
          std::vector<uint16_t> qkv(static_cast<size_t>(kTokens * (kHeads + 2 * kKvHeads) * dim), 0x3c00);
          const int64_t row = kHeads + 2 * kKvHeads + head;  // of the second token
          const auto at = static_cast<size_t>(row * dim + feature);
          qkv[at] = half;
          if (half == large) qkv[at + static_cast<size_t>(rotary / 2)] = half;
          const DeviceVector<uint16_t> d_qkv(qkv), d_padding(qkv);
          const DeviceVector<int32_t> overflowed(std::vector<int32_t>{-1});
          RopeCall call;
          call.qkv = d_padding.get();
          call.tokens = kTokens;
          call.heads = kHeads;
          call.kv_heads = kKvHeads;
          call.head_dim = dim;
          call.rotary_dim = rotary;
          call.cos_sin = d_table.get();
          call.positions = positions.get();
          call.slots = slots.get();
          call.keys = keys.get();
          call.values = values.get();
          call.e4m3_cache = e4m3;
          call.layer = 5;
          call.overflowed_layer = overflowed.get();
          call.slots = padding.get();
          finish(run_rope(call, nullptr));
          ASSERT_EQ(overflowed.host()[0], -1) << "of a token without a slot, feature " << feature;
          call.qkv = d_qkv.get();
          call.slots = slots.get();
          finish(run_rope(call, nullptr));
          const bool is_query = head < kHeads, is_value = head >= kHeads + kKvHeads;
          const bool told = half == large ? !is_value && (is_query || !e4m3) : half != 0x3c00;
          ASSERT_EQ(overflowed.host()[0], told ? 5 : -1)
              << "head_dim " << dim << " head " << head << " feature " << feature << " number " << half;
        }
      }
    }
  }
}

TEST_F(StepGpu, GathersAndAdds) {
  for (const auto& [hidden, count] : {std::pair<int, int>{8, 1}, {576, 7}, {4096, 64}, {2056, 256}}) {
    const auto h = static_cast<size_t>(hidden), n = static_cast<size_t>(count);
    const auto x = numbers(h * 300), residual = numbers(h * n, 100.0f);
    std::vector<int32_t> rows;
    rows.reserve(n);
    for (int i = 0; i < count; ++i) rows.push_back(integer(0, 299));
    const DeviceVector<uint16_t> d_x(x), out(h * n), d_residual(residual);
    const DeviceVector<int32_t> d_rows(rows);
    finish(run_gather({d_x.get(), d_rows.get(), count, hidden, out.get()}, nullptr));
    const auto got = out.host();
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(std::memcmp(&got[i * h], &x[static_cast<size_t>(rows[i]) * h], h * 2), 0) << "row " << i;
    }
    finish(run_add({out.get(), d_residual.get(), static_cast<int64_t>(h * n), true}, nullptr));
    const auto sum = d_residual.host();
    for (size_t i = 0; i < h * n; ++i) {
      ASSERT_EQ(sum[i], fp32_to_fp16(fp16_to_fp32(got[i]) + fp16_to_fp32(residual[i])));
    }
  }
}

TEST_F(StepGpu, GathersFp32) {
  const size_t hidden = 2056, count = 7;
  std::vector<float> x(hidden * 30);
  for (float& v : x) v = static_cast<float>(integer(-1000000, 1000000));
  std::vector<int32_t> rows;
  for (size_t i = 0; i < count; ++i) rows.push_back(integer(0, 29));
  const DeviceVector<float> d_x(x), out(hidden * count);
  const DeviceVector<int32_t> d_rows(rows);
  GatherCall call{d_x.get(), d_rows.get(), static_cast<int64_t>(count), static_cast<int64_t>(hidden), out.get()};
  call.is_f32 = true;
  finish(run_gather(call, nullptr));
  const auto got = out.host();
  for (size_t i = 0; i < count; ++i) {
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): bit for bit
    ASSERT_EQ(std::memcmp(&got[i * hidden], &x[static_cast<size_t>(rows[i]) * hidden], hidden * sizeof(float)), 0) << i;
  }
}

TEST_F(StepGpu, SoftCaps) {
  for (const size_t count : {size_t{1}, size_t{1000003}}) {
    std::vector<float> x(count);
    std::normal_distribution<float> normal(0.0f, 40.0f);
    for (float& v : x) v = normal(random_);
    const DeviceVector<float> d_x(x);
    finish(run_soft_cap({d_x.get(), static_cast<int64_t>(count), 30.0f}, nullptr));
    const auto got = d_x.host();
    for (size_t i = 0; i < count; ++i) {
      const double want = 30.0 * std::tanh(double{x[i]} / 30.0);
      ASSERT_NEAR(got[i], want, std::abs(want) * 0x1p-20) << x[i];  // tanhf is good to two units of the last place
    }
  }
  // What overflowed is no number, and not the cap.
  const float infinity = std::numeric_limits<float>::infinity();
  const DeviceVector<float> overflowed(std::vector<float>{infinity, -infinity, infinity - infinity, 3e38f});
  finish(run_soft_cap({overflowed.get(), 4, 30.0f}, nullptr));
  const auto got = overflowed.host();
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
  EXPECT_EQ(got[3], 30.0f);
}

TEST_F(StepGpu, CopiesPiecesBetweenHostAndDevice) {
  for (int turn = 0; turn < 40; ++turn) {
    CopyCall call;
    call.pieces = integer(1, CopyCall::kMostPieces);
    struct Side {
      size_t words = 0;
      bool on_host = false;
      uint32_t* at = nullptr;
      std::vector<uint32_t> held;  // what lies there
    };
    std::vector<std::pair<Side, Side>> sides(static_cast<size_t>(call.pieces));
    const auto make = [&](Side& side, size_t words) {
      side.words = words;
      side.on_host = integer(0, 1) == 1;
      for (size_t i = 0; i < words; ++i) side.held.push_back(static_cast<uint32_t>(random_()));
      void* at = nullptr;
      ASSERT_EQ(side.on_host ? cudaHostAlloc(&at, words * 4, cudaHostAllocDefault) : cudaMalloc(&at, words * 4),
                cudaSuccess);
      side.at = static_cast<uint32_t*>(at);
      ASSERT_EQ(cudaMemcpy(side.at, side.held.data(), words * 4, cudaMemcpyDefault), cudaSuccess);
    };
    for (int i = 0; i < call.pieces; ++i) {
      auto& [src, dst] = sides[static_cast<size_t>(i)];
      const int rows = integer(0, 2) == 0 ? 1 : integer(1, 300), words = integer(1, integer(0, 3) == 0 ? 400 : 20);
      const int src_pitch = words + integer(0, 9), dst_pitch = words + integer(0, 9);
      const int src_offset = integer(0, 3), dst_offset = integer(0, 3);
      make(src, static_cast<size_t>(src_offset + rows * src_pitch));
      make(dst, static_cast<size_t>(dst_offset + rows * dst_pitch));
      call.piece[i] = {src.at + src_offset,    dst.at + dst_offset,   int64_t{words} * 4, rows,
                       int64_t{src_pitch} * 4, int64_t{dst_pitch} * 4};
      for (int row = 0; row < rows; ++row)
        std::memcpy(&dst.held[static_cast<size_t>(dst_offset + row * dst_pitch)],
                    &src.held[static_cast<size_t>(src_offset + row * src_pitch)], static_cast<size_t>(words) * 4);
    }
    finish(run_copy(call, nullptr));
    for (auto& [src, dst] : sides) {
      std::vector<uint32_t> found(dst.words);
      ASSERT_EQ(cudaMemcpy(found.data(), dst.at, dst.words * 4, cudaMemcpyDefault), cudaSuccess);
      EXPECT_EQ(found, dst.held) << "turn " << turn;
      for (const Side* side : {&src, &dst}) side->on_host ? cudaFreeHost(side->at) : cudaFree(side->at);
    }
  }
}

TEST_F(StepGpu, RefusesWhatDoesNotFit) {
  EXPECT_FALSE(run_embed({}, nullptr).ok());
  EXPECT_FALSE(run_rope({}, nullptr).ok());
  EXPECT_FALSE(run_gather({}, nullptr).ok());
  EXPECT_FALSE(run_add({}, nullptr).ok());
  EXPECT_FALSE(run_soft_cap({}, nullptr).ok());
  std::vector<uint32_t> words(8);
  const CopyCall::Piece piece = {words.data(), words.data() + 4, 16};
  const auto refused = [](CopyCall::Piece one, int pieces = 1) {
    CopyCall call;
    call.piece[0] = one;
    call.pieces = pieces;
    return !run_copy(call, nullptr).ok();
  };
  EXPECT_TRUE(refused(piece, 0));
  EXPECT_TRUE(refused(piece, CopyCall::kMostPieces + 1));
  EXPECT_TRUE(refused({piece.src, piece.dst, 15}));
  EXPECT_TRUE(refused({piece.src, piece.dst, 0}));
  EXPECT_TRUE(refused({piece.src, piece.dst, 16, 0}));
  EXPECT_TRUE(refused({piece.src, nullptr, 16}));
  EXPECT_TRUE(refused({reinterpret_cast<const char*>(piece.src) + 1, piece.dst, 12}));
  EXPECT_TRUE(refused({piece.src, piece.dst, 16, 2, 18, 16}));
  EXPECT_TRUE(refused({piece.src, piece.dst, CopyCall::kMostBytes / 2 + 4, 2, 16, 16}));
}

}  // namespace
}  // namespace nfp::cuda
