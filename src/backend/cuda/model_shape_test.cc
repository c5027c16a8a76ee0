#include "backend/cuda/model_shape.h"

#include <gtest/gtest.h>

namespace nfp::cuda {
namespace {

StepReserve shape() { return {.hidden = 576, .heads = 9, .kv_heads = 3, .head_dim = 64, .rotary_dim = 64}; }

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

}  // namespace
}  // namespace nfp::cuda
