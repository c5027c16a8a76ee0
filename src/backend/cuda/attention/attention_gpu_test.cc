// Attention against float64. Needs a Hopper GPU; skips elsewhere.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/cuda/attention/attention.h"
#include "backend/cuda/step/step.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

template <typename T>
struct DeviceCopy {
  explicit DeviceCopy(const std::vector<T>& host) : count(host.size()) {
    EXPECT_EQ(cudaMalloc(&data, std::max<size_t>(1, count * sizeof(T))), cudaSuccess);
    set(host);
  }
  ~DeviceCopy() { cudaFree(data); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  T* get() const { return static_cast<T*>(data); }
  void set(const std::vector<T>& host) const {
    EXPECT_EQ(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  std::vector<T> host() const {
    std::vector<T> out(count);
    EXPECT_EQ(cudaMemcpy(out.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }
  void* data = nullptr;
  size_t count;
};

bool have_hopper() {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

struct Shape {
  int heads, kv_heads, head_dim;
  int block_size = 16;
  float soft_cap = 0.0f;
  int window = 0;
  bool e4m3 = false;
  bool rotates = false;  // rows have new keys and values behind their queries, and the cache's scales are 1
  bool apart = false;    // all values lie behind all keys, and not each block's behind its own
  bool bf16 = false;     // queries, cache and outputs
};
struct Sequence {
  int queries, context;
};

// A batch on host and device. What no query may read is NaN or, in the block table, no block; so are the outputs.
class Batch {
 public:
  Batch(const Shape& shape, const std::vector<Sequence>& sequences, uint32_t seed)
      : shape_(shape), sequences_(sequences), random_(seed) {
    int blocks = 1;
    query_start_.push_back(0);
    for (const Sequence& s : sequences_) {
      const int own = (s.context + shape.block_size - 1) / shape.block_size;
      blocks += own;
      width_ = std::max(width_, own + 1);
      query_start_.push_back(query_start_.back() + s.queries);
      context_.push_back(s.context);
    }
    std::vector<int32_t> order(static_cast<size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    const size_t size = static_cast<size_t>(blocks) * shape.kv_heads * shape.block_size * shape.head_dim;
    const size_t element = shape.e4m3 ? 1 : 2;
    keys_.assign(size * element, 0xff);  // no number in either type
    values_.assign(size * element, 0xff);
    wide_keys_.assign(size, NAN);
    wide_values_.assign(size, NAN);
    table_.assign(sequences_.size() * width_, 0x3fffffff);
    size_t used = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      for (int position = 0; position < sequences_[s].context; ++position) {
        if (position % shape.block_size == 0) table_[s * width_ + position / shape.block_size] = order[used++];
        for (int head = 0; head < shape.kv_heads; ++head) {
          for (int d = 0; d < shape.head_dim; ++d) {
            const size_t at = cache_index(s, head, position) + d;
            wide_keys_[at] = store_number(keys_, at, key_scale());
            wide_values_[at] = store_number(values_, at, value_scale());
          }
        }
      }
    }
    q_stride_ = int64_t{shape.heads + 2 * shape.kv_heads} * shape.head_dim;
    q_.assign(static_cast<size_t>(query_start_.back()) * q_stride_, kNan);
    for (int token = 0; token < query_start_.back(); ++token) {
      const int64_t filled = shape.rotates ? q_stride_ : int64_t{shape.heads} * shape.head_dim;
      for (int64_t i = 0; i < filled; ++i) q_[int64_t{token} * q_stride_ + i] = number();
    }
    device_cache_ = std::make_unique<DeviceCopy<uint8_t>>(in_one_array());
    device_q_ = std::make_unique<DeviceCopy<uint16_t>>(q_);
    device_start_ = std::make_unique<DeviceCopy<int32_t>>(query_start_);
    device_context_ = std::make_unique<DeviceCopy<int32_t>>(context_);
    device_table_ = std::make_unique<DeviceCopy<int32_t>>(table_);
    device_out_ = std::make_unique<DeviceCopy<uint16_t>>(poisoned());
    prefill_workspace_ = std::make_unique<DeviceCopy<uint8_t>>(std::vector<uint8_t>(kPrefillWorkspaceBytes));
  }

  AttentionCall call(int first, int sequences) const {
    AttentionCall c;
    c.heads = shape_.heads;
    c.kv_heads = shape_.kv_heads;
    c.head_dim = shape_.head_dim;
    c.scale = scale();
    c.soft_cap = shape_.soft_cap;
    c.window = shape_.window;
    c.cache.keys = device_cache_->get();
    c.cache.values = device_cache_->get() + values_after();
    c.cache.type = shape_.e4m3 ? KvType::kE4m3 : shape_.bf16 ? KvType::kBf16 : KvType::kF16;
    c.cache.key_scale = key_scale();  // (of no meaning for FP16)
    c.cache.value_scale = value_scale();
    c.cache.blocks = static_cast<int64_t>(wide_keys_.size()) / shape_.kv_heads / shape_.block_size / shape_.head_dim;
    c.cache.block_size = shape_.block_size;
    c.cache.block_stride = block_stride();
    c.q = device_q_->get();
    c.q_stride = q_stride_;
    c.out = device_out_->get();
    c.query_start = device_start_->get();
    c.context = device_context_->get();
    c.block_table = device_table_->get();
    c.table_width = width_;
    c.first_sequence = first;
    c.sequences = sequences;
    c.tokens = query_start_[static_cast<size_t>(int64_t{first} + sequences)] - query_start_[static_cast<size_t>(first)];
    c.workspace = prefill_workspace_->get();
    c.workspace_bytes = kPrefillWorkspaceBytes;
    return c;
  }
  // Only the arrays: another batch's contents at this one's addresses. Both have as many blocks and tokens.
  void take_batch_arrays(const Batch& other) const {
    device_start_->set(other.query_start_);
    device_context_->set(other.context_);
    device_table_->set(other.table_);
    device_cache_->set(other.in_one_array());
    device_q_->set(other.q_);
  }
  // What rotates the same tokens by a kernel of its own.
  RopeCall rope(const AttentionCall::Rotation& rotation, const int32_t* positions, const int32_t* slots) const {
    RopeCall c;
    c.qkv = device_q_->get();
    c.tokens = static_cast<int>(last_positions().size());
    c.heads = shape_.heads;
    c.kv_heads = shape_.kv_heads;
    c.head_dim = shape_.head_dim;
    c.cos_sin = rotation.cos_sin;
    c.positions = positions;
    c.slots = slots;
    c.q_norm = rotation.q_norm;
    c.k_norm = rotation.k_norm;
    c.norm_eps = rotation.norm_eps;
    c.keys = device_cache_->get();
    c.values = device_cache_->get() + values_after();
    c.block_stride = block_stride();
    c.e4m3_cache = shape_.e4m3;
    c.block_size = shape_.block_size;
    return c;
  }
  // Of decode batches, up to what pads them.
  std::vector<int32_t> last_positions() const {
    std::vector<int32_t> out;
    for (const Sequence& s : sequences_) {
      if (s.context > 0) out.push_back(s.context - 1);
    }
    return out;
  }
  std::vector<int32_t> last_slots() const {
    std::vector<int32_t> out;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const int position = sequences_[s].context - 1;
      if (position < 0) continue;
      out.push_back(table_[s * width_ + position / shape_.block_size] * shape_.block_size +
                    position % shape_.block_size);
    }
    return out;
  }
  // The device's cache, and the queries that `rotated` has, are what expect_close() goes by from here on.
  void adopt(const Batch& rotated) {
    q_ = rotated.device_q_->host();
    std::tie(keys_, values_) = device_cache();
    for (size_t i = 0; i < wide_keys_.size(); ++i) {
      wide_keys_[i] = number_at(keys_, i, key_scale());
      wide_values_[i] = number_at(values_, i, value_scale());
    }
  }
  // Both batches' caches on the device: the same numbers but for a last place.
  void expect_same_cache(const Batch& other) const {
    int failures = 0;
    const auto compare = [&](const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
      for (size_t i = 0; i < wide_keys_.size(); ++i) {
        const float x = number_at(a, i, 1.0f), y = number_at(b, i, 1.0f);
        if (std::isnan(x) && std::isnan(y)) continue;
        const float step = shape_.e4m3 ? 0x1p-3f * std::abs(y) + 0x1p-9f : 0x1p-10f * std::abs(y) + 0x1p-24f;
        if (!(std::abs(x - y) <= step) && ++failures <= 12) ADD_FAILURE() << "at " << i << ": " << x << ", not " << y;
      }
    };
    const auto [keys, values] = device_cache();
    const auto [other_keys, other_values] = other.device_cache();
    compare(keys, other_keys);
    compare(values, other_values);
    EXPECT_EQ(failures, 0);
  }
  void set_q(int at, uint16_t half) const {
    std::vector<uint16_t> q = device_q_->host();
    q[static_cast<size_t>(at)] = half;
    device_q_->set(q);
  }
  void poison() const { device_out_->set(poisoned()); }
  std::vector<uint16_t> out() const { return device_out_->host(); }
  std::span<const uint16_t> out_of(const std::vector<uint16_t>& out, int sequence) const {
    const size_t row = static_cast<size_t>(shape_.heads) * shape_.head_dim;
    return std::span(out).subspan(query_start_[sequence] * row, sequences_[sequence].queries * row);
  }
  int sequences() const { return static_cast<int>(sequences_.size()); }

  // Compares everything. Error bounds: the probabilities' and the output's rounding to 16 bits (FP16: 2^-11 of the mean
  // magnitude, and half a subnormal a key), the FP32 sum of a score's products, and the soft cap's tanh.
  void expect_close(const std::vector<uint16_t>& out) const {
    int failures = 0;
    double worst = 0.0;
    std::vector<double> scores, mean(shape_.head_dim), magnitude(shape_.head_dim);
    const int group = shape_.heads / shape_.kv_heads;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      for (int i = 0; i < sequences_[s].queries; ++i) {
        const int position = sequences_[s].context - sequences_[s].queries + i;
        const int from = shape_.window > 0 ? std::max(0, position - shape_.window + 1) : 0;
        for (int head = 0; head < shape_.heads; ++head) {
          const uint16_t* q = &q_[int64_t{query_start_[s] + i} * q_stride_ + int64_t{head} * shape_.head_dim];
          std::vector<double> wide_q(shape_.head_dim);
          for (int d = 0; d < shape_.head_dim; ++d) wide_q[d] = widen(q[d]);
          scores.assign(static_cast<size_t>(int64_t{position} - from + 1), 0.0);
          double top = -INFINITY, largest_sum = 0.0;
          for (int key = from; key <= position; ++key) {
            const float* k = &wide_keys_[cache_index(s, head / group, key)];
            double sum = 0.0, absolute = 0.0;
            for (int d = 0; d < shape_.head_dim; ++d) {
              const double product = wide_q[d] * k[d];
              sum += product;
              absolute += std::abs(product);
            }
            sum *= scale();
            if (shape_.soft_cap > 0) sum = shape_.soft_cap * std::tanh(sum / shape_.soft_cap);
            scores[key - from] = sum;
            top = std::max(top, sum);
            largest_sum = std::max(largest_sum, absolute * scale());
          }
          double total = 0.0, largest_value = 0.0;
          std::fill(mean.begin(), mean.end(), 0.0);
          std::fill(magnitude.begin(), magnitude.end(), 0.0);
          for (int key = from; key <= position; ++key) {
            const double weight = std::exp(scores[key - from] - top);
            total += weight;
            const float* v = &wide_values_[cache_index(s, head / group, key)];
            for (int d = 0; d < shape_.head_dim; ++d) {
              const double value = v[d];
              mean[d] += weight * value;
              magnitude[d] += weight * std::abs(value);
              largest_value = std::max(largest_value, std::abs(value));
            }
          }
          const double score_error = (shape_.head_dim + 8) * 0x1p-24 * largest_sum + 2e-6 * shape_.soft_cap + 1e-6;
          for (int d = 0; d < shape_.head_dim; ++d) {
            const double keys = total > 0 ? total : 1.0;  // of none the sums are zeros
            const double want = mean[d] / keys, size = magnitude[d] / keys;
            const double bound = (shape_.bf16 ? 0x1p-8 : 0x1p-11) * (size + std::abs(want)) + 2 * size * score_error +
                                 static_cast<double>(scores.size()) * 0x1p-25 * largest_value / keys + 0x1p-24;
            const double got = widen(out[(int64_t{query_start_[s] + i} * shape_.heads + head) * shape_.head_dim + d]);
            const double error = std::abs(got - want);
            worst = std::isnan(error) ? INFINITY : std::max(worst, error / bound);
            if (error <= bound) continue;
            if (++failures <= 12) {
              ADD_FAILURE() << "sequence " << s << " (" << sequences_[s].queries << " of " << sequences_[s].context
                            << ") query " << i << " head " << head << " dim " << d << ": " << got << ", not " << want
                            << " +- " << bound;
            }
          }
        }
      }
    }
    EXPECT_EQ(failures, 0) << "worst error " << worst << " of its bound";
  }

 private:
  static constexpr uint16_t kNan = 0xffff;
  static constexpr float kKeyScale = 0.03f, kValueScale = 0.07f;

  size_t block_bytes() const {
    return static_cast<size_t>(shape_.kv_heads) * shape_.block_size * shape_.head_dim * (shape_.e4m3 ? 1 : 2);
  }
  size_t values_after() const { return shape_.apart ? keys_.size() : block_bytes(); }  // the keys, in bytes
  int64_t block_stride() const {
    return shape_.apart ? 0 : int64_t{2} * shape_.kv_heads * shape_.block_size * shape_.head_dim;
  }
  std::vector<uint8_t> in_one_array() const {
    const size_t part = values_after();
    std::vector<uint8_t> all;
    all.reserve(keys_.size() * 2);
    for (size_t at = 0; at < keys_.size(); at += part) {
      for (const std::vector<uint8_t>* of : {&keys_, &values_}) {
        const auto from = of->begin() + static_cast<ptrdiff_t>(at);
        all.insert(all.end(), from, from + static_cast<ptrdiff_t>(part));
      }
    }
    return all;
  }
  // Keys and values, each in an array.
  std::pair<std::vector<uint8_t>, std::vector<uint8_t>> device_cache() const {
    const std::vector<uint8_t> all = device_cache_->host();
    const size_t part = values_after();
    std::pair<std::vector<uint8_t>, std::vector<uint8_t>> out;
    for (size_t at = 0; at < all.size(); at += part) {
      std::vector<uint8_t>& to = at / part % 2 == 0 ? out.first : out.second;
      const auto from = all.begin() + static_cast<ptrdiff_t>(at);
      to.insert(to.end(), from, from + static_cast<ptrdiff_t>(part));
    }
    return out;
  }

  uint16_t number() {  // normal, by a table: the caches have millions
    static const std::vector<uint16_t> table = [] {
      std::mt19937 random(1);
      std::normal_distribution<float> normal;
      std::vector<uint16_t> out(65536);
      for (uint16_t& v : out) v = fp32_to_fp16(normal(random));
      return out;
    }();
    const uint16_t half = table[random_() >> 16];
    return shape_.bf16 ? fp32_to_bf16(fp16_to_fp32(half)) : half;
  }
  float widen(uint16_t bits) const { return shape_.bf16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits); }
  float key_scale() const { return shape_.rotates ? 1.0f : kKeyScale; }
  float value_scale() const { return shape_.rotates ? 1.0f : kValueScale; }
  float number_at(const std::vector<uint8_t>& cache, size_t at, float scale) const {
    if (shape_.e4m3) return e4m3_to_fp32(cache[at]) * scale;
    uint16_t half = 0;
    std::memcpy(&half, &cache[at * 2], 2);
    return widen(half);
  }
  float store_number(std::vector<uint8_t>& cache, size_t at, float scale) {
    const uint16_t half = number();
    if (shape_.e4m3) {
      cache[at] = fp32_to_e4m3(fp16_to_fp32(half) / scale);
      return e4m3_to_fp32(cache[at]) * scale;
    }
    std::memcpy(&cache[at * 2], &half, 2);
    return widen(half);
  }
  // Scores a little wider than unit variance, so that the largest keeps changing.
  float scale() const { return 1.5f / std::sqrt(static_cast<float>(shape_.head_dim)); }
  size_t cache_index(size_t sequence, int head, int position) const {
    const int64_t block = table_[sequence * width_ + position / shape_.block_size];
    return ((block * shape_.kv_heads + head) * shape_.block_size + position % shape_.block_size) * shape_.head_dim;
  }
  std::vector<uint16_t> poisoned() const {
    return std::vector<uint16_t>(static_cast<size_t>(query_start_.back()) * shape_.heads * shape_.head_dim, kNan);
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  std::mt19937 random_;
  int width_ = 1;
  int64_t q_stride_ = 0;
  std::vector<int32_t> query_start_, context_, table_;
  std::vector<uint8_t> keys_, values_;
  std::vector<float> wide_keys_, wide_values_;  // what they are worth
  std::vector<uint16_t> q_;
  std::unique_ptr<DeviceCopy<uint8_t>> device_cache_, prefill_workspace_;
  std::unique_ptr<DeviceCopy<uint16_t>> device_q_, device_out_;
  std::unique_ptr<DeviceCopy<int32_t>> device_start_, device_context_, device_table_;
};

std::vector<uint8_t> zeroed_workspace(const AttentionCall& call) {
  const Result<DecodeNeeds> needs = decode_needs(call);
  EXPECT_TRUE(needs.ok()) << needs.error().message;
  return std::vector<uint8_t>(needs.ok() ? needs->workspace_bytes : 0, 0);
}
void attach(AttentionCall& call, const DeviceCopy<uint8_t>& workspace) {
  call.workspace = workspace.get();
  call.workspace_bytes = workspace.count;
}

class AttentionGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!have_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
  void TearDown() override {
    if (have_hopper()) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
};
class AttentionShapesGpu : public AttentionGpu, public ::testing::WithParamInterface<Shape> {};

TEST_P(AttentionShapesGpu, DecodeMatchesFloat64) {
  // Neighbours of tile, span and chunk boundaries, rows cut between many blocks, and padding.
  const Batch batch(GetParam(), {{1, 1}, {1, 15}, {1, 16}, {1, 17}, {1, 5000}, {1, 127}, {1, 513}, {1, 2049}, {1, 1}},
                    1);
  AttentionCall call = batch.call(0, batch.sequences());
  for (const bool deterministic : {false, true}) {
    SCOPED_TRACE(deterministic ? "deterministic" : "balanced");
    call.deterministic = deterministic;
    const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
    attach(call, workspace);
    // Those after the first find what it leaves of the workspace.
    for (const int likely_context : {0, 100, 1000, 9000}) {
      if (deterministic && likely_context > 100) continue;
      call.cut = likely_context == 100 ? DecodeCut::kWarps : DecodeCut::kBlocks;
      batch.poison();
      call.likely_context = likely_context;
      call.early_cache_reads = likely_context != 0;
      ASSERT_TRUE(run_decode(call, nullptr).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      batch.expect_close(batch.out());
    }
  }
}

// Sequences without keys, which pad captured steps, have outputs of zeros wherever they are.
TEST_P(AttentionShapesGpu, DecodeOfNoKeysIsZeros) {
  std::vector<Sequence> many(60, {1, 33});
  many.insert(many.end(), 20, {1, 0});
  const std::vector<std::vector<Sequence>> batches = {
      {{1, 0}},
      {{1, 0}, {1, 0}, {1, 0}},
      {{1, 0}, {1, 300}, {1, 0}, {1, 0}, {1, 700}, {1, 17}, {1, 0}, {1, 0}, {1, 0}},
      many};
  for (const std::vector<Sequence>& sequences : batches) {
    const Batch batch(GetParam(), sequences, 21);
    AttentionCall call = batch.call(0, batch.sequences());
    for (const bool deterministic : {false, true}) {
      call.deterministic = deterministic;
      const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
      attach(call, workspace);
      for (const DecodeCut cut : {DecodeCut::kBlocks, DecodeCut::kWarps}) {
        if (deterministic && cut == DecodeCut::kWarps) continue;
        SCOPED_TRACE(testing::Message() << sequences.size() << " sequences, cut " << static_cast<int>(cut)
                                        << (deterministic ? ", deterministic" : ""));
        call.cut = cut;
        for (const int likely_context : {0, 1000}) {  // the second lets clusters share few rows
          call.likely_context = likely_context;
          call.early_cache_reads = likely_context != 0;
          batch.poison();
          ASSERT_TRUE(run_decode(call, nullptr).ok());
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          batch.expect_close(batch.out());
        }
      }
    }
  }
}

// Calls that find their part of the batch in a plan give the same bits as those that find it themselves.
TEST_P(AttentionShapesGpu, APlanChangesNothing) {
  std::mt19937 random(12);
  const auto integer = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  bool planned_any = false;
  for (const size_t sequences : {3, 20, 64, 70}) {
    std::vector<Sequence> all(sequences);
    for (Sequence& s : all) s = {1, integer(0, 9) == 0 ? 0 : integer(1, integer(0, 5) == 0 ? 900 : 180)};
    const Batch batch(GetParam(), all, 13);
    AttentionCall call = batch.call(0, batch.sequences());
    for (const bool deterministic : {false, true}) {
      call.deterministic = deterministic;
      const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
      attach(call, workspace);
      const DeviceCopy<uint8_t> plan(std::vector<uint8_t>(decode_needs(call)->plan_bytes, 0xff));
      for (const DecodeCut cut : {DecodeCut::kAuto, DecodeCut::kBlocks, DecodeCut::kWarps}) {
        SCOPED_TRACE(testing::Message() << sequences << " sequences, cut " << static_cast<int>(cut)
                                        << (deterministic ? ", deterministic" : ""));
        call.cut = cut;
        call.plan = nullptr;
        batch.poison();
        ASSERT_TRUE(run_decode(call, nullptr).ok());
        const std::vector<uint16_t> own = batch.out();
        const Result<bool> planned = plan_decode(call, plan.get(), nullptr);
        ASSERT_TRUE(planned.ok());
        planned_any |= *planned;
        if (!*planned) continue;
        call.plan = plan.get();
        for (const bool early : {false, true}) {
          call.early_cache_reads = early;
          batch.poison();
          ASSERT_TRUE(run_decode(call, nullptr).ok());
          EXPECT_EQ(batch.out(), own);
        }
      }
    }
  }
  EXPECT_EQ(planned_any, GetParam().head_dim <= 128);
}

// Contexts that launch_context() does not tell apart are few classes, each named by a context that holds it.
TEST_F(AttentionGpu, LaunchContextsAreFewAndHoldTheLongest) {
  AttentionCall call;
  call.heads = 32;
  call.kv_heads = 8;
  call.head_dim = 128;
  call.table_width = 1 << 20;
  for (const int sequences : {1, 2, 3, 8, 32, 64, 256}) {
    call.sequences = sequences;
    std::set<int> classes;
    bool known = true;
    for (int longest = 1; longest <= 200000; longest += longest < 2000 ? 1 : 997) {
      const Result<int> context = launch_context(call, longest);
      ASSERT_TRUE(context.ok());
      known = known && *context > 0;  // from where it makes no difference on, it never does again
      EXPECT_TRUE(known ? *context >= longest : *context == 0) << sequences << " sequences, longest " << longest;
      classes.insert(*context);
    }
    EXPECT_LE(classes.size(), 6u) << sequences;
    EXPECT_TRUE(classes.contains(0)) << sequences;
    EXPECT_TRUE(classes.size() == 1 || sequences < 64) << sequences;
  }
}

// Few enough rows that clusters of 16, 8, 4 or 2 blocks share them, whether the longest context is as was said or not.
TEST_P(AttentionShapesGpu, SmallDecodeMatchesFloat64) {
  for (const int context : {1, 17, 300, 5000}) {
    for (const size_t sequences : {1, 2, 4, 13}) {
      std::vector<Sequence> all(sequences, {1, context / 2 + 1});
      all.front().context = context;
      const Batch batch(GetParam(), all, 10);
      AttentionCall call = batch.call(0, batch.sequences());
      const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
      attach(call, workspace);
      for (const int likely_context : {0, 256, 1000, 4096, 9000}) {
        SCOPED_TRACE(testing::Message() << sequences << " sequences, context " << context << ", likely "
                                        << likely_context);
        batch.poison();
        call.likely_context = likely_context;
        ASSERT_TRUE(run_decode(call, nullptr).ok());
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        batch.expect_close(batch.out());
      }
    }
  }
}

TEST_P(AttentionShapesGpu, PrefillMatchesFloat64) {
  // Whole prompts, later chunks, single tokens, tiles that end anywhere.
  const Batch batch(GetParam(), {{1, 1}, {1, 700}, {5, 5}, {64, 64}, {129, 129}, {33, 1000}, {200, 457}, {2, 3000}}, 2);
  for (int run = 0; run < 2; ++run) {  // the second finds what the first leaves of the workspace
    batch.poison();
    ASSERT_TRUE(run_prefill(batch.call(0, batch.sequences()), nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    batch.expect_close(batch.out());
  }
}

TEST_P(AttentionShapesGpu, MixedBatchInTwoCalls) {
  const Batch batch(GetParam(), {{1, 300}, {1, 40}, {1, 1}, {70, 170}, {3, 90}}, 3);
  AttentionCall decode = batch.call(0, 3);
  const DeviceCopy<uint8_t> workspace(zeroed_workspace(decode));
  attach(decode, workspace);
  ASSERT_TRUE(run_decode(decode, nullptr).ok());
  AttentionCall prefill = batch.call(3, 2);
  prefill.tokens += 100;  // an upper bound will do
  ASSERT_TRUE(run_prefill(prefill, nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  batch.expect_close(batch.out());
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionShapesGpu,
    ::testing::Values(
        Shape{8, 2, 128}, Shape{4, 4, 64}, Shape{6, 2, 128, 32}, Shape{14, 2, 64, 64}, Shape{8, 1, 256},
        Shape{16, 1, 128}, Shape{2, 1, 256, 32, 50.0f, 300}, Shape{16, 1, 64, 16, 0.0f, 100}, Shape{12, 1, 256},
        Shape{9, 3, 64, 16, 20.0f}, Shape{8, 2, 80}, Shape{4, 2, 96, 32, 0.0f, 17}, Shape{2, 2, 16}, Shape{3, 1, 176},
        Shape{8, 2, 128, 64, 30.0f, 1}, Shape{32, 8, 128, 16, 0.0f, 1024}, Shape{8, 2, 128, 16, 0.0f, 0, true},
        Shape{20, 10, 64}, Shape{12, 12, 64, 16, 0.0f, 0, true}, Shape{16, 16, 128, 32},
        Shape{4, 4, 64, 32, 20.0f, 0, true}, Shape{16, 1, 128, 64, 0.0f, 200, true},
        Shape{14, 2, 80, 16, 0.0f, 0, true}, Shape{12, 1, 64, 16, 0.0f, 0, true}, Shape{8, 1, 256, 16, 0.0f, 0, true},
        Shape{2, 1, 256, 32, 50.0f, 300, true}, Shape{12, 1, 256, 64, 0.0f, 0, true},
        Shape{4, 2, 160, 16, 0.0f, 0, true}, Shape{16, 1, 192, 32, 20.0f, 100, true},
        Shape{8, 4, 240, 16, 0.0f, 17, true}, Shape{8, 2, 128, 16, 0.0f, 0, false, false, true},
        Shape{14, 2, 64, 64, 0.0f, 100, false, false, true}, Shape{3, 1, 176, 32, 0.0f, 0, false, false, true},
        Shape{8, 4, 240, 16, 0.0f, 17, true, false, true},
        Shape{.heads = 8, .kv_heads = 2, .head_dim = 128, .bf16 = true},
        Shape{.heads = 4, .kv_heads = 4, .head_dim = 64, .window = 100, .apart = true, .bf16 = true},
        Shape{.heads = 8, .kv_heads = 1, .head_dim = 256, .block_size = 64, .bf16 = true},
        Shape{.heads = 16, .kv_heads = 1, .head_dim = 128, .soft_cap = 30.0f, .apart = true, .bf16 = true},
        Shape{.heads = 12, .kv_heads = 1, .head_dim = 256, .bf16 = true},
        Shape{.heads = 14, .kv_heads = 1, .head_dim = 64, .block_size = 32, .bf16 = true},
        Shape{.heads = 3, .kv_heads = 1, .head_dim = 176, .block_size = 32, .bf16 = true}),
    [](const auto& tested) {
      const Shape& s = tested.param;
      return std::to_string(s.heads) + "x" + std::to_string(s.kv_heads) + "x" + std::to_string(s.head_dim) + "block" +
             std::to_string(s.block_size) + "cap" + std::to_string(static_cast<int>(s.soft_cap)) + "window" +
             std::to_string(s.window) + (s.e4m3 ? "e4m3" : "") + (s.apart ? "apart" : "") + (s.bf16 ? "bf16" : "");
    });

// Rotation inside the decode kernels against a kernel of its own before them, and against float64 of what that leaves.
class RotationGpu : public AttentionGpu, public ::testing::WithParamInterface<Shape> {};

TEST_P(RotationGpu, SameAsAKernelBefore) {
  Shape shape = GetParam();
  shape.rotates = true;
  std::vector<Sequence> few = {{1, 1}, {1, 16}, {1, 17}, {1, 700}, {1, 64}};
  std::vector<Sequence> many;
  many.reserve(90);
  for (int i = 0; i < 90; ++i) many.push_back({1, 1 + (i * 37) % 200});
  std::vector<Sequence> padded = few, many_padded = many;
  padded.insert(padded.end(), 3, {1, 0});
  many_padded.insert(many_padded.end(), 6, {1, 0});
  const std::vector<std::vector<Sequence>> batches = {{{1, 200}}, {{1, 3000}}, few, many, padded, many_padded};
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> weights(static_cast<size_t>(shape.head_dim)), table(static_cast<size_t>(3001 * shape.head_dim));
  for (float& w : weights) w = 1.0f + 0.2f * normal(random);
  for (int position = 0; position <= 3000; ++position) {
    for (int i = 0; i < shape.head_dim / 2; ++i) {
      const double angle = position * std::pow(10000.0, -2.0 * i / shape.head_dim);
      table[static_cast<size_t>(int64_t{position} * shape.head_dim + i)] = static_cast<float>(std::cos(angle));
      table[static_cast<size_t>(int64_t{position} * shape.head_dim + shape.head_dim / 2 + i)] =
          static_cast<float>(std::sin(angle));
    }
  }
  const DeviceCopy<float> norm(weights), cos_sin(table);
  const DeviceCopy<int32_t> overflowed(std::vector<int32_t>{-1});
  for (const bool norms : {false, true}) {
    for (const std::vector<Sequence>& sequences : batches) {
      for (const DecodeCut cut : {DecodeCut::kAuto, DecodeCut::kBlocks, DecodeCut::kWarps}) {
        SCOPED_TRACE(testing::Message() << sequences.size() << " sequences, cut " << static_cast<int>(cut)
                                        << (norms ? ", norms" : ""));
        Batch batch(shape, sequences, 7), reference(shape, sequences, 7);
        const DeviceCopy<int32_t> positions(batch.last_positions()), slots(batch.last_slots());
        AttentionCall call = batch.call(0, batch.sequences());
        call.cut = cut;
        call.rotation.cos_sin = cos_sin.get();
        if (norms) call.rotation.q_norm = call.rotation.k_norm = norm.get();
        call.rotation.overflowed_layer = overflowed.get();
        call.rotation.layer = 3;
        ASSERT_TRUE(can_rotate(call));
        const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
        attach(call, workspace);
        ASSERT_TRUE(run_rope(reference.rope(call.rotation, positions.get(), slots.get()), nullptr).ok());
        const Status status = run_decode(call, nullptr);
        ASSERT_TRUE(status.ok()) << status.error().message;
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        batch.expect_same_cache(reference);
        batch.adopt(reference);
        batch.expect_close(batch.out());
      }
    }
  }
  EXPECT_EQ(overflowed.host()[0], -1);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RotationGpu,
                         ::testing::Values(Shape{32, 8, 128}, Shape{9, 3, 64, 32}, Shape{16, 1, 128, 64},
                                           Shape{8, 8, 64, 16, 0.0f, 50, false, false, true},
                                           Shape{16, 4, 128, 16, 30.0f, 0, true}, Shape{12, 1, 64, 16, 0.0f, 0, true}),
                         [](const auto& param) {
                           const Shape& s = param.param;
                           return "h" + std::to_string(s.heads) + "kv" + std::to_string(s.kv_heads) + "d" +
                                  std::to_string(s.head_dim) + (s.e4m3 ? "e4m3" : "");
                         });

// Of the second sequence: two features of 60000 that are added, or what already is infinite or no number. An FP8 cache
// makes 448 of the sum, but not of these.
TEST_F(AttentionGpu, QueriesKeysAndValuesBeyondFp16AreTold) {
  enum Of { kQuery = 1, kKey = 5, kValue = 7 };  // the second head of each
  struct Case {
    Of of;
    uint16_t half;
    bool e4m3;
    int32_t told;
  };
  const uint16_t large = fp32_to_fp16(60000.0f);
  constexpr uint16_t kInfinite = 0xfc00, kNan = 0x7e00;
  for (const int head_dim : {64, 128}) {
    for (const Case& c : {Case{kKey, large, false, 7}, Case{kKey, large, true, -1}, Case{kQuery, large, false, 7},
                          Case{kQuery, large, true, 7}, Case{kQuery, kInfinite, false, 7}, Case{kQuery, kNan, true, 7},
                          Case{kKey, kInfinite, true, 7}, Case{kKey, kNan, false, 7}, Case{kKey, kNan, true, 7},
                          Case{kValue, kInfinite, false, 7}, Case{kValue, kInfinite, true, 7},
                          Case{kValue, kNan, false, 7}, Case{kValue, kNan, true, 7}}) {
      SCOPED_TRACE(testing::Message() << "head_dim " << head_dim << ", head " << c.of << ", " << c.half
                                      << (c.e4m3 ? ", E4M3" : ""));
      const Shape shape{4, 2, head_dim, 16, 0.0f, 0, c.e4m3, true};
      const Batch batch(shape, {{1, 20}, {1, 40}}, 3);
      AttentionCall call = batch.call(0, batch.sequences());
      const DeviceCopy<float> cos_sin(std::vector<float>(int64_t{64} * head_dim, 1.0f));  // a turn that doubles
      const DeviceCopy<int32_t> overflowed(std::vector<int32_t>{-1});
      call.rotation.cos_sin = cos_sin.get();
      call.rotation.overflowed_layer = overflowed.get();
      call.rotation.layer = 7;
      const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
      attach(call, workspace);
      ASSERT_TRUE(run_decode(call, nullptr).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_EQ(overflowed.host()[0], -1);
      const int at = (1 * 8 + c.of) * head_dim + 5;
      batch.set_q(at, c.half);
      if (c.half == large) batch.set_q(at + head_dim / 2, c.half);
      ASSERT_TRUE(run_decode(call, nullptr).ok());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_EQ(overflowed.host()[0], c.told);
    }
  }
}

// What pads a captured step is computed like any token, and nobody asks what came of it.
TEST_F(AttentionGpu, PaddingBeyondFp16IsNotTold) {
  for (const int head_dim : {64, 128}) {
    for (const bool e4m3 : {false, true}) {
      const Shape shape{4, 2, head_dim, 16, 0.0f, 0, e4m3, true};
      const Batch batch(shape, {{1, 20}, {1, 0}}, 3);
      AttentionCall call = batch.call(0, batch.sequences());
      const DeviceCopy<float> cos_sin(std::vector<float>(int64_t{64} * head_dim, 1.0f));
      const DeviceCopy<int32_t> overflowed(std::vector<int32_t>{-1});
      call.rotation.cos_sin = cos_sin.get();
      call.rotation.overflowed_layer = overflowed.get();
      call.rotation.layer = 7;
      const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
      attach(call, workspace);
      for (const int head : {1, 5, 7}) batch.set_q((1 * 8 + head) * head_dim + 5, 0x7c00);  // of q, k and v
      for (const int likely_context : {0, 20}) {
        for (const DecodeCut cut : {DecodeCut::kAuto, DecodeCut::kWarps}) {
          SCOPED_TRACE(testing::Message() << "head_dim " << head_dim << (e4m3 ? ", E4M3" : "") << ", context "
                                          << likely_context << ", cut " << static_cast<int>(cut));
          call.likely_context = likely_context;
          call.cut = cut;
          batch.poison();
          ASSERT_TRUE(run_decode(call, nullptr).ok());
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          EXPECT_EQ(overflowed.host()[0], -1);
          const std::vector<uint16_t> out = batch.out();
          for (const uint16_t v : batch.out_of(out, 1)) ASSERT_EQ(v, 0);
        }
      }
    }
  }
}

// Nor are heads beyond a group, which are zeros, where a norm has no epsilon.
TEST_F(AttentionGpu, NormsWithoutEpsilonOverflowNowhere) {
  for (const Shape& shape : {Shape{4, 2, 64, 16, 0.0f, 0, false, true}, Shape{12, 1, 128, 16, 0.0f, 0, true, true}}) {
    const Batch batch(shape, {{1, 20}, {1, 40}}, 3);
    AttentionCall call = batch.call(0, batch.sequences());
    const DeviceCopy<float> cos_sin(std::vector<float>(int64_t{64} * shape.head_dim, 0.5f)),
        norm(std::vector<float>(shape.head_dim, 1.0f));
    const DeviceCopy<int32_t> overflowed(std::vector<int32_t>{-1});
    call.rotation.cos_sin = cos_sin.get();
    call.rotation.q_norm = call.rotation.k_norm = norm.get();
    call.rotation.norm_eps = 0.0f;
    call.rotation.overflowed_layer = overflowed.get();
    const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
    attach(call, workspace);
    ASSERT_TRUE(run_decode(call, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(overflowed.host()[0], -1);
  }
}

TEST_F(AttentionGpu, ManySequences) {
  std::vector<Sequence> sequences;
  std::mt19937 random(4);
  sequences.reserve(300);
  for (int i = 0; i < 300; ++i) sequences.push_back({1, static_cast<int>(random() % (i % 10 == 0 ? 2000 : 200)) + 1});
  const Batch batch({8, 2, 64}, sequences, 4);
  AttentionCall call = batch.call(0, batch.sequences());
  const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
  attach(call, workspace);
  for (const DecodeCut cut : {DecodeCut::kAuto, DecodeCut::kBlocks, DecodeCut::kWarps, DecodeCut::kWarps}) {
    batch.poison();
    call.cut = cut;
    ASSERT_TRUE(run_decode(call, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    batch.expect_close(batch.out());
  }
  batch.poison();
  ASSERT_TRUE(run_prefill(call, nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  batch.expect_close(batch.out());
}

TEST_F(AttentionGpu, BlocksDrawSeveralPromptsEach) {
  std::vector<Sequence> sequences;  // of one and two tiles of keys
  sequences.reserve(70);
  for (int i = 0; i < 70; ++i) sequences.push_back({1 + i * 13 % 40, 1 + i * 13 % 40 + i % 4 * 40});
  for (const Shape shape : {Shape{8, 8, 64}, Shape{8, 8, 128}, Shape{8, 8, 256}, Shape{8, 8, 64, 16, 0.0f, 0, true},
                            Shape{16, 8, 128, 32, 0.0f, 0, true}, Shape{8, 8, 256, 16, 0.0f, 0, true},
                            Shape{16, 8, 176, 32, 0.0f, 0, true}}) {
    SCOPED_TRACE(testing::Message() << shape.head_dim << (shape.e4m3 ? " E4M3" : ""));
    const Batch batch(shape, sequences, 11);
    ASSERT_TRUE(run_prefill(batch.call(0, batch.sequences()), nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<uint16_t> first = batch.out();
    batch.expect_close(first);
    batch.poison();  // once more, in whatever order
    ASSERT_TRUE(run_prefill(batch.call(0, batch.sequences()), nullptr).ok());
    EXPECT_EQ(batch.out(), first);
  }
}

TEST_F(AttentionGpu, RowsCutBetweenBlocks) {
  std::vector<Sequence> ragged;
  ragged.reserve(90);
  for (int i = 0; i < 90; ++i) ragged.push_back({1, i % 9 == 0 ? 1500 + i : 1 + i * 37 % 400});
  const std::vector<Sequence> long_one{{1, 9001}};
  for (const Shape shape :
       {Shape{4, 1, 128}, Shape{16, 1, 256}, Shape{9, 3, 64}, Shape{8, 2, 80, 32}, Shape{2, 1, 128, 64, 30.0f, 700},
        Shape{8, 2, 128, 16, 0.0f, 0, true}, Shape{8, 2, 256, 16, 0.0f, 0, true},
        Shape{16, 1, 256, 32, 50.0f, 700, true}, Shape{6, 3, 160, 16, 0.0f, 0, true}}) {
    for (const std::vector<Sequence>& sequences : {ragged, long_one}) {
      SCOPED_TRACE(testing::Message() << shape.heads << " heads of " << shape.head_dim
                                      << (shape.e4m3 ? " E4M3, " : ", ") << sequences.size());
      const Batch batch(shape, sequences, 9);
      AttentionCall call = batch.call(0, batch.sequences());
      const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
      attach(call, workspace);
      for (const DecodeCut cut : {DecodeCut::kBlocks, DecodeCut::kWarps, DecodeCut::kWarps}) {
        batch.poison();
        call.cut = cut;
        ASSERT_TRUE(run_decode(call, nullptr).ok());
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        batch.expect_close(batch.out());
      }
    }
  }
}

TEST_F(AttentionGpu, DeterministicDecodeDoesNotSeeItsNeighbours) {
  std::vector<Sequence> sequences;
  sequences.reserve(40);
  for (int i = 0; i < 40; ++i) sequences.push_back({1, 1 + i * 211 % 9000});
  for (const Shape shape :
       {Shape{8, 2, 128}, Shape{8, 2, 256, 16, 0.0f, 0, true}, Shape{16, 1, 256, 16, 0.0f, 0, true}}) {
    SCOPED_TRACE(testing::Message() << shape.heads << " heads of " << shape.head_dim << (shape.e4m3 ? " E4M3" : ""));
    const Batch batch(shape, sequences, 5);
    AttentionCall call = batch.call(0, batch.sequences());
    call.deterministic = true;
    const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
    attach(call, workspace);
    ASSERT_TRUE(run_decode(call, nullptr).ok());
    const std::vector<uint16_t> together = batch.out();
    batch.poison();
    for (int s = 0; s < batch.sequences(); ++s) {
      AttentionCall alone = batch.call(s, 1);
      alone.deterministic = true;
      attach(alone, workspace);
      ASSERT_TRUE(run_decode(alone, nullptr).ok());
    }
    EXPECT_EQ(batch.out(), together);
  }
}

// What was looked up once is of one device, or one context of it; kernels are launched in others too.
TEST_F(AttentionGpu, ClustersOf16InAnotherContext) {
  const auto decode_one = [] {
    const Batch batch({8, 1, 128}, {{1, 3000}}, 6);
    AttentionCall call = batch.call(0, 1);
    const DeviceCopy<uint8_t> workspace(zeroed_workspace(call));
    attach(call, workspace);
    const Status status = run_decode(call, nullptr);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    batch.expect_close(batch.out());
  };
  decode_one();
  const auto find = [](const char* name, unsigned version) {
    void* found = nullptr;
    EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, nullptr), cudaSuccess);
    return found;
  };
  using Create = CUresult(CUcontext*, unsigned, CUdevice);  // of CUDA 3.2 to 12
  auto* const create = reinterpret_cast<Create*>(find("cuCtxCreate", 3020));
  auto* const destroy = reinterpret_cast<decltype(&cuCtxDestroy)>(find("cuCtxDestroy", 12000));
  CUcontext other = nullptr;
  ASSERT_EQ(create(&other, 0, 0), CUDA_SUCCESS);
  decode_one();
  EXPECT_EQ(destroy(other), CUDA_SUCCESS);
}

TEST_F(AttentionGpu, CapturedGraphReplaysWithAnotherBatch) {
  const Shape shape{8, 2, 128};
  const std::vector<Sequence> first{{1, 900}, {1, 31}, {1, 1}, {70, 170}, {3, 90}};
  const std::vector<Sequence> second{{1, 30}, {1, 898}, {1, 16}, {3, 20}, {70, 240}};
  const Batch batch(shape, first, 6), other(shape, second, 7);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  AttentionCall decode = batch.call(0, 3);
  const DeviceCopy<uint8_t> workspace(zeroed_workspace(decode));
  attach(decode, workspace);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_TRUE(run_decode(decode, stream).ok());
  EXPECT_TRUE(run_prefill(batch.call(3, 2), stream).ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const Batch* contents : {&batch, &other, &batch}) {
    batch.take_batch_arrays(*contents);
    batch.poison();
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    contents->expect_close(batch.out());
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(AttentionGpu, RefusesWhatDoesNotFit) {
  const Batch batch({8, 2, 64}, {{1, 10}}, 8);
  AttentionCall call = batch.call(0, 1);
  EXPECT_FALSE(run_decode(call, nullptr).ok());  // no workspace
  const auto refused = [&](auto change) {
    AttentionCall c = call;
    change(c);
    return !run_prefill(c, nullptr).ok();
  };
  EXPECT_TRUE(refused([](AttentionCall& c) { c.head_dim = 72; }));
  EXPECT_TRUE(refused([](AttentionCall& c) { c.kv_heads = 3; }));
  EXPECT_TRUE(refused([](AttentionCall& c) { c.cache.block_size = 8; }));
  EXPECT_TRUE(refused([](AttentionCall& c) { c.scale = 0.0f; }));
  EXPECT_TRUE(refused([](AttentionCall& c) { c.q_stride = 500; }));
  EXPECT_TRUE(refused([](AttentionCall& c) { c.sequences = 0; }));
}

}  // namespace
}  // namespace nfp::cuda
