#include "base/gpu_energy.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
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

// This program finds testing/fake_nvml.cc in place of a driver.
class VisibleGpus : public ::testing::Test {
 protected:
  VisibleGpus() {
    if (const char* text = std::getenv("CUDA_VISIBLE_DEVICES"); text != nullptr) before_ = text;
  }
  ~VisibleGpus() override { before_ ? set(before_->c_str()) : set(nullptr); }
  static void set(const char* text) {
    text != nullptr ? ::setenv("CUDA_VISIBLE_DEVICES", text, 1) : ::unsetenv("CUDA_VISIBLE_DEVICES");
  }

 private:
  std::optional<std::string> before_;
};

TEST_F(VisibleGpus, AreCounted) {
  const auto gpus = [](const char* visible) {
    set(visible);
    const auto energy = GpuEnergy::open();
    if (!energy.ok()) return 0;
    const double joules = energy->joules();
    EXPECT_GT(joules, 0);
    EXPECT_NEAR(energy->joules() - joules, energy->gpus() * energy->gpus(), 1e-6);  // the fake's joule a question
    return energy->gpus();
  };
  EXPECT_EQ(gpus(nullptr), 2);
  EXPECT_EQ(gpus("1"), 1);
  EXPECT_EQ(gpus("0,1"), 2);
  EXPECT_EQ(gpus("GPU-1234"), 1);
  EXPECT_EQ(gpus("0,-1,1"), 1);
  EXPECT_EQ(gpus("7"), 0);
}

TEST_F(VisibleGpus, NoneIsSaid) {
  set("7");
  const auto energy = GpuEnergy::open();
  ASSERT_FALSE(energy.ok());
  EXPECT_EQ(energy.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(energy.error().message.find("no GPU"), std::string::npos);
}

}  // namespace
}  // namespace nfp
