#include "backend/cuda/model_shape.h"

#include <gtest/gtest.h>

namespace nfp::cuda {
namespace {

StepReserve shape() { return {.hidden = 576, .heads = 9, .kv_heads = 3, .head_dim = 64, .rotary_dim = 64}; }

Status check_with(void (*change)(StepReserve&)) {
  StepReserve changed = shape();
  change(changed);
  return check_model_shape(changed);
}

TEST(ModelShape, WhatNoKernelTakesIsRefusedByItsSize) {
  EXPECT_TRUE(check_model_shape(shape()).ok());
  StepReserve odd = shape();
  odd.hidden = 580;
  const Status hidden = check_model_shape(odd);
  ASSERT_FALSE(hidden.ok());
  EXPECT_EQ(hidden.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(hidden.error().message.find("hidden size is 580"), std::string::npos) << hidden.error().message;
  odd = shape();
  odd.rotary_dim = 20;
  const Status rotary = check_model_shape(odd);
  ASSERT_FALSE(rotary.ok());
  EXPECT_NE(rotary.error().message.find("rotate 20 of their 64"), std::string::npos) << rotary.error().message;
}

TEST(ModelShape, WhatAttentionDoesNotTakeIsRefusedByItsSize) {
  const auto refused = [](void (*change)(StepReserve&), ErrorCode code, std::string_view what) {
    const Status status = check_with(change);
    ASSERT_FALSE(status.ok()) << what;
    EXPECT_EQ(status.error().code, code);
    EXPECT_NE(status.error().message.find(what), std::string::npos) << status.error().message;
  };
  refused([](StepReserve& s) { s.head_dim = s.rotary_dim = 72; }, ErrorCode::kUnsupported, "72 features");
  refused([](StepReserve& s) { s.head_dim = 272; }, ErrorCode::kUnsupported, "272 features");
  EXPECT_TRUE(check_with([](StepReserve& s) { s.head_dim = 256; }).ok());
  EXPECT_TRUE(check_with([](StepReserve& s) { s.heads = 16, s.kv_heads = 1; }).ok());
  refused([](StepReserve& s) { s.heads = 32, s.kv_heads = 1; }, ErrorCode::kUnsupported, "32 query heads");
  EXPECT_TRUE(check_with([](StepReserve& s) { s.heads = s.kv_heads = 32, s.sequences = 2048; }).ok());
  refused([](StepReserve& s) { s.heads = s.kv_heads = 32, s.sequences = 4096; }, ErrorCode::kUsage,
          "ask for 2048 sequences at most (--max-num-seqs)");
}

}  // namespace
}  // namespace nfp::cuda
