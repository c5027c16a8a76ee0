#include "base/gpu_energy.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

TEST(GpuEnergy, ReadsVisibleDevicesAsCudaDoes) {
  using Names = std::vector<std::string_view>;
  EXPECT_EQ(visible_gpus("0,2"), (Names{"0", "2"}));
  EXPECT_EQ(visible_gpus("GPU-1234,1"), (Names{"GPU-1234", "1"}));
  EXPECT_EQ(visible_gpus("1,-1,2"), (Names{"1"}));
  EXPECT_EQ(visible_gpus(""), Names{});
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
