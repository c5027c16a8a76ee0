// What GPU tests of the C interface share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>

#include "backend/cuda/testing/device.h"
#include "base/float_types.h"
#include "nestedfp.h"

namespace nfp::cuda {

inline float widen(nfp_type type, uint16_t bits) { return type == NFP_BF16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits); }
inline uint16_t narrow(nfp_type type, float v) { return type == NFP_BF16 ? fp32_to_bf16(v) : fp32_to_fp16(v); }

class CApiGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
    nfp_gpu* gpu = nullptr;
    ASSERT_EQ(nfp_gpu_create(&gpu), NFP_OK) << nfp_last_error();
    gpu_.reset(gpu);
  }

  struct Deleter {
    void operator()(nfp_gpu* gpu) const { nfp_gpu_destroy(gpu); }
  };
  std::unique_ptr<nfp_gpu, Deleter> gpu_;
};

}  // namespace nfp::cuda
