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
    cache_ = draw(2 * kBlocks * kBlockNumbers);
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
    const int64_t block = table_[static_cast<size_t>(sequence * kTableWidth + position / kBlockSize)];
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
  EXPECT_EQ(nfp_attention_decode(nullptr, &call_, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_attention_prefill(gpu_.get(), nullptr, nullptr), NFP_USAGE);
  EXPECT_EQ(nfp_attention_workspace_bytes(gpu_.get(), &call_, nullptr), NFP_USAGE);
}

}  // namespace
}  // namespace nfp::cuda
