// What attention's calls are refused for before a GPU is asked for. What they compute: attention_gpu_test.cc.
#include "backend/cuda/attention/attention.h"

#include <gtest/gtest.h>

namespace nfp::cuda {
namespace {

bool is_refused(int head_dim, KvType type, int heads = 8) {
  AttentionCall call;
  call.heads = heads;
  call.kv_heads = 2;
  call.head_dim = head_dim;
  call.sequences = 4;
  call.cache.type = type;
  const Result<DecodeNeeds> needs = decode_needs(call);
  return !needs.ok() && needs.error().code == ErrorCode::kUsage;  // without a GPU the others end as kResource
}

TEST(AttentionLimits, BothCachesTakeTheSameHeads) {
  for (int head_dim = 0; head_dim <= 320; head_dim += 8) {
    const bool fits = head_dim > 0 && head_dim % 16 == 0 && head_dim <= 256;
    for (const KvType type : {KvType::kF16, KvType::kE4m3}) {
      EXPECT_EQ(is_refused(head_dim, type), !fits) << head_dim << (type == KvType::kE4m3 ? " E4M3" : " FP16");
    }
  }
}

TEST(AttentionLimits, GroupsOfUpTo16) {
  for (const KvType type : {KvType::kF16, KvType::kE4m3}) {
    for (const int head_dim : {64, 128, 256}) {
      EXPECT_FALSE(is_refused(head_dim, type, 32));
      EXPECT_TRUE(is_refused(head_dim, type, 34));
    }
  }
}

TEST(AttentionLimits, WhichDecodeCallsRotate) {
  AttentionCall call;
  for (const KvType type : {KvType::kF16, KvType::kE4m3, KvType::kBf16}) {
    call.cache.type = type;
    for (int head_dim = 16; head_dim <= 256; head_dim += 16) {
      call.head_dim = head_dim;
      EXPECT_EQ(can_rotate(call), (head_dim == 64 || head_dim == 128) && type != KvType::kBf16) << head_dim;
    }
  }
  call.cache = {.type = KvType::kE4m3, .value_scale = 2.0f};
  call.head_dim = 64;
  EXPECT_FALSE(can_rotate(call));
}

}  // namespace
}  // namespace nfp::cuda
