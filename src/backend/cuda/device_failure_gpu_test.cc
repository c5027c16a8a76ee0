// What the backend says of a GPU that failed or hangs. Each in a process of its own, as the context is lost with it.
#include <cstdlib>
#include <string>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/testing/device.h"

namespace nfp {
namespace {

constexpr int32_t kRows = 4096, kHidden = 4096;

class DeviceFailureGpuDeathTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  // Ends the process with what waiting for this step says.
  [[noreturn]] static void wait_and_say(double hang_s, int64_t first_row, int times) {
    auto backend = make_cuda_backend({.threads = 1, .hang_s = hang_s});
    auto event = (*backend)->make_event();
    const size_t bytes = size_t{kRows} * kHidden * sizeof(uint16_t);
    Buffer x = *(*backend)->allocate(bytes), out = *(*backend)->allocate(bytes),
           rows = *(*backend)->allocate(kRows * sizeof(int32_t));
    const std::vector<int32_t> from(kRows, static_cast<int32_t>(first_row));
    if (!(*backend)->upload(rows.data(), from.data(), from.size() * sizeof(int32_t)).ok()) std::exit(3);
    for (int i = 0; i < times; ++i) {
      (*backend)->gather_rows(
          {.x = x.data(), .rows = rows.as<int32_t>(), .count = kRows, .hidden = kHidden, .out = out.data()});
    }
    (*backend)->record(**event);
    const Status first = (*backend)->wait(**event);
    const Status again = (*backend)->wait(**event);  // stays
    if (first.ok() && again.ok()) {
      std::fprintf(stderr, "nothing failed\n");
      std::_Exit(0);
    }
    std::fprintf(stderr, "%s\n", first.ok() ? "late" : first.error().message.c_str());
    const bool final = !first.ok() && !again.ok() && first.error().code == ErrorCode::kDevice &&
                       again.error().code == ErrorCode::kDevice;
    std::_Exit(final ? 1 : 2);
  }
};

TEST_F(DeviceFailureGpuDeathTest, NothingFails) {
  EXPECT_EXIT(wait_and_say(120, 0, 1), ::testing::ExitedWithCode(0), "nothing failed");
}

TEST_F(DeviceFailureGpuDeathTest, AnIllegalAccessIsFinal) {
  EXPECT_EXIT(wait_and_say(120, INT32_MAX / 2, 1), ::testing::ExitedWithCode(1), "illegal memory access");
}

// Found by the launch of another kernel, not by waiting.
TEST_F(DeviceFailureGpuDeathTest, AnIllegalAccessThatALaunchFindsIsFinalToo) {
  EXPECT_EXIT(wait_and_say(120, INT32_MAX / 2, 20000), ::testing::ExitedWithCode(1), "illegal memory access");
}

TEST_F(DeviceFailureGpuDeathTest, AStepThatTakesTooLongHangs) {
  EXPECT_EXIT(wait_and_say(1e-6, 0, 500), ::testing::ExitedWithCode(1), "it hangs");
}

}  // namespace
}  // namespace nfp
