// What the backend says of a GPU that failed or hangs, each in a process of its own, as the context is lost with it;
// and of what it cannot compute.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_hangs.h"
#include "backend/cuda/linear/uploader.h"
#include "backend/cuda/testing/device.h"
#include "backend/cuda/testing/matrix.h"

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

// Whoever waits finds it: also what frees memory, which leaves that of a device that hangs.
TEST_F(DeviceFailureGpuDeathTest, WhatTakesTooLongHangsForWhoeverWaits) {
  const auto wait = [](bool frees) {
    auto backend = make_cuda_backend({.threads = 1, .hang_s = 1e-6});
    const size_t bytes = size_t{kRows} * kHidden * sizeof(uint16_t);
    Buffer x = *(*backend)->allocate(bytes), out = *(*backend)->allocate(bytes),
           rows = *(*backend)->allocate(kRows * sizeof(int32_t));
    for (int i = 0; i < 500; ++i) {
      (*backend)->gather_rows(
          {.x = x.data(), .rows = rows.as<int32_t>(), .count = kRows, .hidden = kHidden, .out = out.data()});
    }
    if (frees) out.reset();
    const Status status = (*backend)->synchronize();
    std::fprintf(stderr, "%s\n", status.ok() ? "done" : status.error().message.c_str());
    backend->reset();
    std::_Exit(!status.ok() && status.error().code == ErrorCode::kDevice ? 1 : 0);
  };
  EXPECT_EXIT(wait(false), ::testing::ExitedWithCode(1), "has not finished a step within 1e-06 s: it hangs");
  EXPECT_EXIT(wait(true), ::testing::ExitedWithCode(1), "the GPU hangs: a step before");
}

TEST_F(DeviceFailureGpuDeathTest, WeightsThatTakeTooLongToArriveHang) {
  const auto load = [] {
    constexpr size_t kBytes = size_t{64} << 20;
    ThreadPool threads(1);
    void* weights = nullptr;
    if (cudaMalloc(&weights, kBytes) != cudaSuccess) std::_Exit(3);
    auto uploader = cuda::DeviceUploader::create(1e-9, kBytes);
    Status status = (*uploader)->run(threads, {.items = 1,
                                               .bytes = [](int64_t) { return kBytes; },
                                               .fill = [](int, int64_t, uint8_t*) { return ok_status(); },
                                               .copies =
                                                   [&](int64_t, std::vector<cuda::DeviceUploader::Copy>& out) {
                                                     out.push_back({weights, 0, kBytes});
                                                   }});
    if (status.ok()) status = (*uploader)->finish();
    std::fprintf(stderr, "%s\n", status.ok() ? "done" : status.error().message.c_str());
    uploader->reset();
    std::_Exit(!status.ok() && status.error().code == ErrorCode::kDevice ? 1 : 0);
  };
  EXPECT_EXIT(load(), ::testing::ExitedWithCode(1), "uploading weights: the GPU has not taken them .* it hangs");
}

// What owns memory of a device that hangs ends all the same: freeing it would wait for what runs, forever.
TEST_F(DeviceFailureGpuDeathTest, WeightsOfADeviceThatHangsEnd) {
  const auto end_beside_a_hang = [] {
    auto backend = make_cuda_backend({.threads = 1, .hang_s = 120});
    const cuda::testing::TestMatrix matrix(cuda::testing::Kind::kRestricted, 64, 64, 1);
    {
      const auto weight = (*backend)->make_linear({.parts = {&matrix}, .bias = {}});
      if (!(*backend)->reserve({.tokens = 1, .sequences = 1, .heads = 1, .kv_heads = 1, .head_dim = 64}).ok())
        std::_Exit(1);
      cudaStream_t stream = nullptr;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      cudaLaunchHostFunc(
          stream, [](void*) { pause(); }, nullptr);
      cuda::device_hangs() = true;
      alarm(60);  // ends the process otherwise
    }
    std::fprintf(stderr, "ended\n");
    std::_Exit(0);
  };
  EXPECT_EXIT(end_beside_a_hang(), ::testing::ExitedWithCode(0), "ended");
}

// A weight's scales and bias arrive as its planes do, and by no copy that waits for other streams without a limit.
TEST_F(DeviceFailureGpuDeathTest, NoPartOfAWeightIsWaitedForWithoutALimit) {
  const auto load_beside_a_hang = [] {
    auto backend = make_cuda_backend({.threads = 1, .hang_s = 120});
    const cuda::testing::TestMatrix matrix(cuda::testing::Kind::kRestricted, 64, 64, 1);
    const LinearSpec spec{.parts = {&matrix}, .bias = std::vector<float>(64, 1.0f)};
    const auto first = (*backend)->make_linear(spec);  // makes the uploader
    cudaStream_t stream = nullptr;
    cudaStreamCreate(&stream);
    cudaLaunchHostFunc(
        stream, [](void*) { pause(); }, nullptr);
    alarm(60);  // ends the process otherwise
    const auto weight = (*backend)->make_linear(spec);
    std::fprintf(stderr, "%s\n", weight.ok() ? "uploaded" : weight.error().message.c_str());
    std::_Exit(0);
  };
  EXPECT_EXIT(load_beside_a_hang(), ::testing::ExitedWithCode(0), "uploaded");
}

// Another backend of the process, which was not the one to find that out, has no results either.
TEST_F(DeviceFailureGpuDeathTest, ADeviceThatHangsFailsForAll) {
  const auto wait_beside_a_hang = [](bool synchronizes) {
    auto backend = make_cuda_backend({.threads = 1, .hang_s = 120});
    auto event = (*backend)->make_event();
    (*backend)->record(**event);
    cuda::device_hangs() = true;
    const Status status = synchronizes ? (*backend)->synchronize() : (*backend)->wait(**event);
    std::fprintf(stderr, "%s\n", status.ok() ? "done" : status.error().message.c_str());
    std::_Exit(!status.ok() && status.error().code == ErrorCode::kDevice ? 1 : 0);
  };
  EXPECT_EXIT(wait_beside_a_hang(false), ::testing::ExitedWithCode(1), "the GPU hangs");
  EXPECT_EXIT(wait_beside_a_hang(true), ::testing::ExitedWithCode(1), "the GPU hangs");
}

// Two steps may be in flight, and the first that is waited for is not the one to blame.
TEST(OverflowGpu, IsOfTheWorkBeforeItsEvent) {
  if (!cuda::has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  auto backend = make_cuda_backend({.threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.error().message;
  Backend& device = **backend;
  constexpr int kDim = 64, kLayers = 8;
  const auto cache =
      device.make_kv_cache({.layers = kLayers, .kv_heads = 1, .head_dim = kDim, .block_size = 16, .blocks = 1});
  ASSERT_TRUE(cache.ok());
  const auto on_device = [&](const auto& host) {
    Buffer memory = *device.allocate(host.size() * sizeof(host[0]));
    EXPECT_TRUE(device.upload(memory.data(), host.data(), memory.bytes()).ok());
    return memory;
  };
  const Buffer table = on_device(std::vector<float>(kDim, 1.0f)), zero = on_device(std::vector<int32_t>{0});
  std::vector<uint16_t> ones(size_t{3} * kDim, 0x3c00), beyond = ones;
  beyond[kDim] = 0x7c00;  // in the key
  std::vector<Buffer> rows;
  const auto rotate = [&](const std::vector<uint16_t>& row, int layer) {
    RopeArgs args;
    args.qkv = rows.emplace_back(on_device(row)).data();
    args.heads = args.kv_heads = 1;
    args.head_dim = args.rotary_dim = kDim;
    args.cos_sin = table.as<float>();
    args.cache = cache->get();
    args.layer = layer;
    args.batch.tokens = args.batch.sequences = args.batch.single = 1;
    args.batch.positions = args.batch.slots = zero.as<int32_t>();
    device.rope(args);
  };
  auto first = *device.make_event(), second = *device.make_event(), third = *device.make_event();
  rotate(ones, 1);
  device.record(*first);
  rotate(beyond, 3);
  rotate(ones, 4);
  device.record(*second);
  rotate(ones, 5);
  device.record(*third);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(device.wait(*first).ok());
  const Status told = device.wait(*second);
  ASSERT_FALSE(told.ok());
  EXPECT_EQ(told.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(told.error().message.find("layer 3: "), 0u) << told.error().message;
  EXPECT_TRUE(device.wait(*third).ok());
  EXPECT_TRUE(device.synchronize().ok());
  rotate(beyond, 6);
  const Status synchronized = device.synchronize();
  ASSERT_FALSE(synchronized.ok());
  EXPECT_EQ(synchronized.error().message.find("layer 6: "), 0u) << synchronized.error().message;
  EXPECT_TRUE(device.synchronize().ok());
}

TEST(CaptureGpu, SaysWhatFailedInIt) {
  if (!cuda::has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  auto backend = make_cuda_backend({.threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.error().message;
  ASSERT_TRUE((*backend)->begin_capture().ok());
  EXPECT_FALSE((*backend)->synchronize().ok());  // may not be captured, and ends the capture
  const auto graph = (*backend)->end_capture();
  ASSERT_FALSE(graph.ok());
  EXPECT_EQ(graph.error().code, ErrorCode::kDevice);
  EXPECT_EQ(graph.error().message.find("waiting for the device: "), 0u) << graph.error().message;
}

// Another thread of a library's caller may have another GPU's context, or another of the same one.
TEST(ContextGpu, AThreadWithAnotherOneEnters) {
  if (!cuda::has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  auto backend = make_cuda_backend({.threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.error().message;
  std::thread([&] {
    const cuda::OtherContext other;
    Backend& device = **backend;
    const std::vector<uint16_t> ones(64, 0x3c00);
    const std::vector<int32_t> row{0};
    std::vector<uint16_t> out(ones.size());
    {
      const auto here = device.enter();
      EXPECT_FALSE(other.is_current());
      const size_t bytes = ones.size() * sizeof(uint16_t);
      const Buffer x = *device.allocate(bytes), y = *device.allocate(bytes), rows = *device.allocate(sizeof(int32_t));
      ASSERT_TRUE(device.upload(x.data(), ones.data(), bytes).ok());
      ASSERT_TRUE(device.upload(rows.data(), row.data(), sizeof(int32_t)).ok());
      device.gather_rows({.x = x.data(), .rows = rows.as<int32_t>(), .count = 1, .hidden = 64, .out = y.data()});
      const Status status = device.download(out.data(), y.data(), bytes);
      EXPECT_TRUE(status.ok()) << status.error().message;
    }
    EXPECT_EQ(out, ones);
    EXPECT_TRUE(other.is_current());
  }).join();
}

// What a step could not compute is said before the first.
TEST(LimitsGpu, AreToldBeforeTheFirstStep) {
  if (!cuda::has_hopper()) GTEST_SKIP() << "needs a Hopper GPU";
  auto backend = make_cuda_backend({.threads = 1});
  ASSERT_TRUE(backend.ok()) << backend.error().message;
  StepReserve most{.tokens = 16, .sequences = 4, .heads = 2, .kv_heads = 1, .head_dim = 80, .rotary_dim = 20};
  Status status = (*backend)->reserve(most);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("heads rotate 20 of their 80 features"), std::string::npos)
      << status.error().message;
  most.rotary_dim = 40;
  most.head_dim = 128;
  status = (*backend)->reserve(most);
  EXPECT_TRUE(status.ok()) << status.error().message;
  const auto history = (*backend)->make_token_history(1, 400001);
  ASSERT_FALSE(history.ok());
  EXPECT_NE(history.error().message.find("400001"), std::string::npos) << history.error().message;
  const cuda::testing::TestMatrix wide(cuda::testing::Kind::kRestricted, 64, 32832, 2);
  const auto weight = (*backend)->make_linear({.parts = {&wide}, .bias = {}});
  ASSERT_FALSE(weight.ok());
  EXPECT_EQ(weight.error().message.find("matrix 2: has 32832 inputs"), 0u) << weight.error().message;
}

}  // namespace
}  // namespace nfp
