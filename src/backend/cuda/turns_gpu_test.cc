// Two backends of a process on one GPU. Needs a Hopper GPU; skips elsewhere.
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/testing/device.h"
#include "backend/cuda/testing/matrix.h"

namespace nfp {
namespace {

class TurnsGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  }
};

TEST_F(TurnsGpu, AStepWaitsForTheOtherBackends) {
  auto first = make_cuda_backend({.threads = 1}), second = make_cuda_backend({.threads = 1});
  ASSERT_TRUE(first.ok() && second.ok());
  constexpr int32_t kRows = 4096, kHidden = 4096;
  constexpr size_t kBytes = size_t{kRows} * kHidden * sizeof(uint16_t);
  const Buffer x = *(*first)->allocate(kBytes), out = *(*first)->allocate(kBytes),
               rows = *(*first)->allocate(kRows * sizeof(int32_t)), mark = *(*first)->allocate(sizeof(int32_t)),
               one = *(*first)->allocate_host(sizeof(int32_t)), seen = *(*second)->allocate_host(sizeof(int32_t));
  *one.as<int32_t>() = 1;
  const auto done = *(*second)->make_event();
  ASSERT_TRUE((*first)->synchronize().ok() && (*second)->synchronize().ok());
  {
    const auto turn = (*first)->turn();
    for (int i = 0; i < 500; ++i) {  // some 20 ms
      (*first)->gather_rows(
          {.x = x.data(), .rows = rows.as<int32_t>(), .count = kRows, .hidden = kHidden, .out = out.data()});
    }
    (*first)->copy({.dst = mark.data(), .src = one.data(), .bytes = sizeof(int32_t)});
  }
  {
    const auto turn = (*second)->turn();
    (*second)->copy({.dst = seen.data(), .src = mark.data(), .bytes = sizeof(int32_t)});
    (*second)->record(*done);
  }
  const Status status = (*second)->wait(*done);
  ASSERT_TRUE(status.ok()) << status.error().message;
  EXPECT_EQ(*seen.as<int32_t>(), 1);
}

TEST_F(TurnsGpu, ABackendThatIsGoneIsNotWaitedFor) {
  auto left = make_cuda_backend({.threads = 1});
  ASSERT_TRUE(left.ok());
  {
    auto gone = make_cuda_backend({.threads = 1});
    ASSERT_TRUE(gone.ok());
    const auto turn = (*gone)->turn();
  }
  { const auto turn = (*left)->turn(); }
  const Status status = (*left)->synchronize();
  EXPECT_TRUE(status.ok()) << status.error().message;
}

// 64 tokens by 2048 x 8192 are 32 tiles in four parts, which wait for each other, a block an SM. Of two such products
// at once neither may have room for all of its blocks.
TEST_F(TurnsGpu, ProductsWhosePartsWaitForEachOtherEnd) {
  constexpr int32_t kRows = 64, kIn = 8192, kOut = 2048;
  const cuda::testing::TestMatrix matrix(cuda::testing::Kind::kPlain, kOut, kIn, 1);
  const auto compute = [&](std::string& failure) {
    auto backend = make_cuda_backend({.threads = 1, .hang_s = 20});
    if (!backend.ok()) return void(failure = backend.error().message);
    Backend& device = **backend;
    const auto weight = *device.make_linear({.parts = {&matrix}, .bias = {}});
    Status status = device.reserve(
        {.tokens = kRows, .sequences = kRows, .hidden = kOut, .heads = 1, .kv_heads = 1, .head_dim = 64});
    const Buffer x = *device.allocate(device.activation_bytes(kRows, kIn)),
                 y = *device.allocate(device.activation_bytes(kRows, kOut));
    const auto done = *device.make_event();
    for (int step = 0; step < 300 && status.ok(); ++step) {
      {
        const auto turn = device.turn();
        for (int i = 0; i < 50; ++i)
          device.linear({.weight = weight.get(), .x = x.data(), .rows = kRows, .y = y.data()});
        device.record(*done);
      }
      status = device.wait(*done);
    }
    if (!status.ok()) failure = status.error().message;
  };
  std::vector<std::string> failures(2);
  std::thread other([&] { compute(failures[1]); });
  compute(failures[0]);
  other.join();
  EXPECT_EQ(failures[0], "");
  EXPECT_EQ(failures[1], "");
}

}  // namespace
}  // namespace nfp
