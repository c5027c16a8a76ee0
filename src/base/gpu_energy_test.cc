#include "base/gpu_energy.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace nfp {
namespace {

TEST(GpuEnergy, ReadsVisibleDevicesAsCudaDoes) {
  using Names = std::vector<std::string_view>;
  EXPECT_EQ(visible_gpus("0,2"), (Names{"0", "2"}));
  EXPECT_EQ(visible_gpus("GPU-1234,1"), (Names{"GPU-1234", "1"}));
  EXPECT_EQ(visible_gpus("1,-1,2"), (Names{"1"}));
  EXPECT_EQ(visible_gpus(""), Names{});
}

TEST(GpuEnergy, AddsUpWhatTheVisibleGpusUsed) {
  const std::string library = NFP_BINARY_DIR "/tests/libnfp_fake_nvml.so";  // testing/fake_nvml.cc
  const char* before = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string kept = before == nullptr ? "" : before;
  const auto joules = [&](const char* visible) {
    if (visible == nullptr) {
      ::unsetenv("CUDA_VISIBLE_DEVICES");
    } else {
      ::setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    }
    const auto energy = GpuEnergy::open(library.c_str());
    return energy.ok() ? energy->joules() : -1.0;
  };
  EXPECT_EQ(joules(nullptr), 11);
  EXPECT_EQ(joules("1"), 10);
  EXPECT_EQ(joules("GPU-a"), 1);
  EXPECT_EQ(joules("GPU-b,0"), 11);
  EXPECT_EQ(joules("7"), -1);
  EXPECT_EQ(joules(""), -1);
  if (before == nullptr) {
    ::unsetenv("CUDA_VISIBLE_DEVICES");
  } else {
    ::setenv("CUDA_VISIBLE_DEVICES", kept.c_str(), 1);
  }
}

TEST(GpuEnergy, CountsOrSaysWhyNot) {
  const auto energy = GpuEnergy::open();
  if (!energy.ok()) {
    EXPECT_EQ(energy.error().code, ErrorCode::kUnsupported);
    EXPECT_FALSE(energy.error().message.empty());
    return;
  }
  EXPECT_GT(energy->gpus(), 0);
  const double before = energy->joules();
  EXPECT_GT(before, 0);
  EXPECT_GE(energy->joules(), before);
}

}  // namespace
}  // namespace nfp
