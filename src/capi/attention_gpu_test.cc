// Attention through the C interface, against float64. Needs a Hopper GPU; skips elsewhere.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "capi/testing/gpu.h"

namespace nfp::cuda {
namespace {

constexpr int kHeads = 6, kKvHeads = 2, kHeadDim = 64, kBlockSize = 16, kBlocks = 40, kTableWidth = 9;
constexpr int64_t kBlockNumbers = int64_t{kKvHeads} * kBlockSize * kHeadDim;

// Three sequences that decode, then a whole prompt and the end of one; a block's values lie behind its keys.
class CApiAttention : public CApiGpuTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(CApiGpuTest::SetUp());
    if (!gpu_) return;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto draw = [&](int64_t count) {
      std::vector<uint16_t> out(static_cast<size_t>(count));
      for (uint16_t& v : out) v = fp32_to_fp16(normal(random));
      return out;
    };
    cache_ = draw(int64_t{2} * kBlocks * kBlockNumbers);
    for (int s = 0, block = kBlocks; s < 5; ++s) {
      for (int i = 0; i < kTableWidth; ++i) table_.push_back(i * kBlockSize < contexts_[s] ? --block : -1);
    }
    q_ = draw(int64_t{starts_.back()} * kHeads * kHeadDim);
    device_cache_ = std::make_unique<DeviceVector<uint16_t>>(cache_);
    device_q_ = std::make_unique<DeviceVector<uint16_t>>(q_);
    out_ = std::make_unique<DeviceVector<uint16_t>>(q_.size());
    for (int i = 0; i < 3; ++i)
      arrays_[i] = std::make_unique<DeviceVector<int32_t>>(i == 0 ? starts_ : i == 1 ? contexts_ : table_);
    call_.size = sizeof(call_);
    call_.heads = kHeads;
    call_.kv_heads = kKvHeads;
    call_.head_dim = kHeadDim;
    call_.scale = 0.125f;
    call_.block_size = kBlockSize;
    call_.blocks = kBlocks;
    call_.block_stride = 2 * kBlockNumbers;
    call_.keys = device_cache_->get();
    call_.values = device_cache_->get() + kBlockNumbers;
    call_.q = device_q_->get();
    call_.q_stride = int64_t{kHeads} * kHeadDim;
    call_.out = out_->get();
    call_.query_start = arrays_[0]->get();
    call_.context = arrays_[1]->get();
    call_.block_table = arrays_[2]->get();
    call_.table_width = kTableWidth;
    call_.sequences = 5;
    size_t bytes = 0;
    ASSERT_EQ(nfp_attention_workspace_bytes(gpu_.get(), &call_, &bytes), NFP_OK) << nfp_last_error();
    workspace_ = std::make_unique<DeviceVector<uint8_t>>(bytes);
    ASSERT_EQ(cudaMemset(workspace_->get(), 0, bytes), cudaSuccess);
    call_.workspace = workspace_->get();
    call_.workspace_bytes = bytes;
  }

  const uint16_t* cached(int sequence, int head, int position) const {
    const int64_t block = table_[static_cast<size_t>(int64_t{sequence} * kTableWidth + position / kBlockSize)];
    return &cache_[static_cast<size_t>(2 * block * kBlockNumbers +
                                       (int64_t{head} * kBlockSize + position % kBlockSize) * kHeadDim)];
  }

  std::vector<int32_t> starts_{0, 1, 2, 3, 36, 41}, contexts_{1, 100, 17, 33, 130}, table_;
  std::vector<uint16_t> cache_, q_;
  std::unique_ptr<DeviceVector<uint16_t>> device_cache_, device_q_, out_;
  std::unique_ptr<DeviceVector<int32_t>> arrays_[3];
  std::unique_ptr<DeviceVector<uint8_t>> workspace_;
  nfp_attention_call call_{};
};

TEST_F(CApiAttention, DecodeAndPrefillOfOneBatch) {
  nfp_attention_call decode = call_, prefill = call_;
  decode.sequences = 3;
  prefill.first_sequence = 3;
  prefill.sequences = 2;
  prefill.tokens = 38;
  ASSERT_EQ(nfp_attention_decode(gpu_.get(), &decode, nullptr), NFP_OK) << nfp_last_error();
  ASSERT_EQ(nfp_attention_prefill(gpu_.get(), &prefill, nullptr), NFP_OK) << nfp_last_error();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint16_t> out = out_->host();
  for (int s = 0; s < 5; ++s) {
    for (int token = starts_[s]; token < starts_[s + 1]; ++token) {
      const int keys = contexts_[s] - (starts_[s + 1] - 1 - token);
      for (int head = 0; head < kHeads; ++head) {
        const size_t row = static_cast<size_t>(token * kHeads + head) * kHeadDim;
        std::vector<double> weights;
        for (int key = 0; key < keys; ++key) {
          double score = 0;
          for (int d = 0; d < kHeadDim; ++d)
            score += double{fp16_to_fp32(q_[row + d])} * fp16_to_fp32(cached(s, head / 3, key)[d]);
          weights.push_back(score * 0.125);
        }
        const double top = *std::max_element(weights.begin(), weights.end());
        double total = 0;
        for (double& w : weights) total += w = std::exp(w - top);
        for (int d = 0; d < kHeadDim; ++d) {
          double want = 0, size = 0;
          for (int key = 0; key < keys; ++key) {
            const double part = weights[key] / total * fp16_to_fp32(cached(s, head / 3, key)[kBlockNumbers + d]);
            want += part;
            size += std::abs(part);
          }
          // Rounding to FP16 of the weights, half a subnormal of each small one, and of the result.
          ASSERT_NEAR(fp16_to_fp32(out[row + d]), want, 0x1p-10 * size + 0x1p-16)
              << "sequence " << s << " token " << token << " head " << head;
        }
      }
    }
  }
}

// Rotated keys are those of a cache that has them rotated already; a batch that rotates gives what the same batch gives
// of what its first run left.
TEST_F(CApiAttention, RotationAppendsAndRotates) {
  constexpr int kRow = (kHeads + 2 * kKvHeads) * kHeadDim;
  std::vector<uint16_t> qkv;
  for (int token = 0; token < starts_.back(); ++token) {
    for (int i = 0; i < kRow; ++i)
      qkv.push_back(fp32_to_fp16(static_cast<float>((token * 31 + i * 17) % 23 - 11) * 0.125f));
  }
  std::vector<float> table;
  for (int position = 0; position < 200; ++position) {
    for (const bool is_sine : {false, true}) {
      for (int i = 0; i < kHeadDim / 2; ++i) {
        const double angle = position * std::pow(10000.0, -2.0 * i / kHeadDim);
        table.push_back(static_cast<float>(is_sine ? std::sin(angle) : std::cos(angle)));
      }
    }
  }
  const DeviceVector<float> cos_sin(table);
  const auto run = [&](const std::vector<uint16_t>& rows, bool rotates, std::vector<uint16_t>* rotated) {
    const DeviceVector<uint16_t> q(rows);
    nfp_attention_call decode = call_, prefill = call_;
    for (nfp_attention_call* call : {&decode, &prefill}) {
      call->q = q.get();
      call->q_stride = kRow;
      call->cos_sin = rotates ? cos_sin.get() : nullptr;
    }
    decode.sequences = 3;
    prefill.first_sequence = 3;
    prefill.sequences = 2;
    prefill.tokens = 45;  // more than there are
    EXPECT_EQ(nfp_attention_decode(gpu_.get(), &decode, nullptr), NFP_OK) << nfp_last_error();
    EXPECT_EQ(nfp_attention_prefill(gpu_.get(), &prefill, nullptr), NFP_OK) << nfp_last_error();
    if (rotated != nullptr) {  // what it makes of all of them
      const DeviceVector<uint16_t> again(rows);
      for (nfp_attention_call* call : {&decode, &prefill}) call->q = again.get();
      decode.tokens = 0;
      EXPECT_EQ(nfp_attention_append(gpu_.get(), &decode, nullptr), NFP_OK) << nfp_last_error();
      EXPECT_EQ(nfp_attention_append(gpu_.get(), &prefill, nullptr), NFP_OK) << nfp_last_error();
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      *rotated = again.host();
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out_->host();
  };
  std::vector<uint16_t> rotated;
  const std::vector<uint16_t> first = run(qkv, true, &rotated);
  std::vector<uint16_t> after = device_cache_->host();
  const std::vector<uint16_t> second = run(rotated, false, nullptr);
  EXPECT_EQ(device_cache_->host(), after);
  for (size_t i = 0; i < first.size(); ++i)  // decode rotates by itself, a last place apart
    ASSERT_NEAR(fp16_to_fp32(first[i]), fp16_to_fp32(second[i]), 0x1p-8) << i;
  // Keys and values of the new tokens in the cache, and nothing else changed.
  int64_t changed = 0;
  cache_.swap(after);  // `after` is what was before
  for (int s = 0; s < 5; ++s) {
    for (int token = starts_[s]; token < starts_[s + 1]; ++token) {
      const int position = contexts_[s] - (starts_[s + 1] - token);
      for (int head = 0; head < kKvHeads; ++head) {
        const uint16_t* const k = &qkv[static_cast<size_t>(int64_t{token} * kRow + int64_t{kHeads + head} * kHeadDim)];
        const uint16_t* const v = k + int64_t{kKvHeads} * kHeadDim;
        for (int d = 0; d < kHeadDim; ++d, changed += 2) {
          const int i = d % (kHeadDim / 2);
          const double a = fp16_to_fp32(k[i]), b = fp16_to_fp32(k[i + kHeadDim / 2]);
          const double cosine = table[static_cast<size_t>(int64_t{position} * kHeadDim + i)],
                       sine = table[static_cast<size_t>(int64_t{position} * kHeadDim + kHeadDim / 2 + i)];
          const double want = d < kHeadDim / 2 ? a * cosine - b * sine : b * cosine + a * sine;
          ASSERT_NEAR(fp16_to_fp32(cached(s, head, position)[d]), want, 0x1p-11 * std::abs(want) + 0x1p-20)
              << "sequence " << s << " position " << position;
          ASSERT_EQ(cached(s, head, position)[kBlockNumbers + d], v[d]);
        }
      }
    }
  }
  int64_t differ = 0;
  for (size_t i = 0; i < cache_.size(); ++i) differ += cache_[i] != after[i] ? 1 : 0;
  EXPECT_LE(differ, changed);
}

TEST_F(CApiAttention, WrongCallsSayWhatIsWrong) {
  const auto refused = [&](auto change, const std::string& what) {
    nfp_attention_call call = call_;
    change(call);
    EXPECT_NE(nfp_attention_decode(gpu_.get(), &call, nullptr), NFP_OK) << what;
    EXPECT_NE(std::string(nfp_last_error()).find(what), std::string::npos) << nfp_last_error();
  };
  refused([](nfp_attention_call& c) { c.size -= 8; }, "size");
  refused([](nfp_attention_call& c) { c.heads = 5; }, "heads");
  refused([](nfp_attention_call& c) { c.head_dim = 40; }, "head_dim");
  refused([](nfp_attention_call& c) { c.kv_type = static_cast<nfp_kv_type>(7); }, "kv_type");
  refused([](nfp_attention_call& c) { c.block_size = 8; }, "block_size");
  refused([](nfp_attention_call& c) { c.block_stride = kBlockNumbers / 2; }, "block_stride");
  refused([](nfp_attention_call& c) { c.block_stride = 2 * kBlockNumbers + 8; }, "block_stride");
  refused([](nfp_attention_call& c) { c.keys = nullptr; }, "keys");
  refused([](nfp_attention_call& c) { c.q_stride = 8; }, "q_stride");
  refused([](nfp_attention_call& c) { c.sequences = 0; }, "sequences");
  refused([](nfp_attention_call& c) { c.workspace_bytes = 16; }, "workspace");
  const DeviceVector<float> table(64);
  refused([&](nfp_attention_call& c) { c.cos_sin = table.get(); }, "q_stride");  // decode rotates these itself
  EXPECT_EQ(nfp_attention_append(gpu_.get(), &call_, nullptr), NFP_USAGE);
  for (const int64_t stride : {kBlockNumbers / 2, 2 * kBlockNumbers + 8, -2 * kBlockNumbers}) {
    nfp_attention_call append = call_;
    append.cos_sin = table.get();
    append.q_stride = int64_t{kHeads + 2 * kKvHeads} * kHeadDim;
    append.block_stride = stride;
    EXPECT_EQ(nfp_attention_append(gpu_.get(), &append, nullptr), NFP_USAGE) << stride;
    EXPECT_NE(std::string(nfp_last_error()).find("block_stride"), std::string::npos) << nfp_last_error();
  }
  // And has changed nothing: another try would rotate what is rotated.
  std::vector<uint16_t> rows(static_cast<size_t>(starts_.back()) * (kHeads + 2 * kKvHeads) * kHeadDim, 0x3c00);
  const DeviceVector<uint16_t> device_rows(rows);
  const DeviceVector<float> turns(std::vector<float>(size_t{200} * kHeadDim, 0.5f));
  nfp_attention_call rotates = call_;
  rotates.q = device_rows.get();
  rotates.q_stride = int64_t{kHeads + 2 * kKvHeads} * kHeadDim;
  rotates.cos_sin = turns.get();
  rotates.tokens = starts_.back();
  rotates.deterministic = 1;  // decode rotates by a kernel of its own
  rotates.workspace_bytes = 0;
  EXPECT_EQ(nfp_attention_decode(gpu_.get(), &rotates, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_attention_prefill(gpu_.get(), &rotates, nullptr), NFP_USAGE);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(device_rows.host(), rows);
  EXPECT_EQ(device_cache_->host(), cache_);
  EXPECT_EQ(nfp_attention_decode(nullptr, &call_, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_attention_prefill(gpu_.get(), nullptr, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_attention_workspace_bytes(gpu_.get(), &call_, nullptr), NFP_USAGE);
}

}  // namespace
}  // namespace nfp::cuda
