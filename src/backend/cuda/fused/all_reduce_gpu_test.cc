// Sums over ranks inside the norm that reads them, against the sum made first. Ranks are GPUs of their own where there
// are as many that see each other's memory, and streams of one GPU elsewhere. Needs a Hopper GPU; skips without one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backend/cuda/fused/all_reduce.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "backend/cuda/testing/device.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

class Group {
 public:
  Group(int ranks, size_t most_bytes) {
    int devices = 0;
    EXPECT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    bool peers = devices >= ranks;
    for (int i = 0; peers && i < ranks; ++i) {
      for (int j = 0; j < ranks; ++j) {
        int access = 1;
        if (i != j) cudaDeviceCanAccessPeer(&access, i, j);
        peers = peers && access != 0;
      }
    }
    const size_t bytes = all_reduce_buffer_bytes(ranks, most_bytes);
    for (int i = 0; i < ranks; ++i) {
      devices_.push_back(peers ? i : 0);
      enter(i);
      for (int j = 0; peers && j < ranks; ++j) {
        if (j != i) cudaDeviceEnablePeerAccess(j, 0);
      }
      cudaGetLastError();  // of peers that were there already
      cudaStream_t stream = nullptr;
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      streams_.push_back(stream);
      buffers_.push_back(std::make_unique<DeviceVector<uint8_t>>(bytes));
      EXPECT_TRUE(clear_all_reduce_buffer(buffers_.back()->get(), bytes).ok());
    }
    for (int i = 0; i < ranks; ++i) {
      AllReduce& of_rank = reduces_.emplace_back();
      of_rank.rank = i;
      of_rank.ranks = ranks;
      of_rank.bytes = bytes;
      for (int j = 0; j < ranks; ++j) of_rank.buffers[static_cast<size_t>(j)] = buffers_[static_cast<size_t>(j)]->get();
    }
  }
  ~Group() {
    for (size_t i = 0; i < streams_.size(); ++i) {
      enter(static_cast<int>(i));
      cudaStreamDestroy(streams_[i]);
      buffers_[i].reset();
    }
    cudaSetDevice(0);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  void enter(int rank) const { EXPECT_EQ(cudaSetDevice(devices_[static_cast<size_t>(rank)]), cudaSuccess); }
  cudaStream_t stream(int rank) const { return streams_[static_cast<size_t>(rank)]; }
  const AllReduce& reduce(int rank) const { return reduces_[static_cast<size_t>(rank)]; }
  int ranks() const { return static_cast<int>(reduces_.size()); }
  bool shares_a_gpu() const { return devices_.front() == devices_.back(); }
  void synchronize() const {
    for (int rank = 0; rank < ranks(); ++rank) {
      enter(rank);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }

 private:
  std::vector<int> devices_;
  std::vector<cudaStream_t> streams_;
  std::vector<std::unique_ptr<DeviceVector<uint8_t>>> buffers_;
  std::vector<AllReduce> reduces_;
};

struct Shape {
  int64_t m, k;
  bool bf16, codes;
};

float widen(uint16_t bits, bool bf16) { return bf16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits); }
uint16_t narrow(float v, bool bf16) { return bf16 ? fp32_to_bf16(v) : fp32_to_fp16(v); }

// One norm, of one rank or of none, and what it left.
struct Norm {
  Norm(const Shape& shape, const std::vector<uint16_t>& x_of_rank, const std::vector<uint16_t>& residual_of_all,
       const std::vector<uint16_t>& weights)
      : x(x_of_rank),
        residual(residual_of_all),
        weight(weights),
        h(x_of_rank.size()),
        y(x_of_rank.size()),
        width(PlaneShape{0, shape.k}.padded_k()),
        codes(static_cast<size_t>(shape.m * width)),
        scales(static_cast<size_t>(shape.m)) {
    call.source = GemmInputCall::Source::kNorm;
    call.m = shape.m;
    call.k = call.ldx = call.ldr = shape.k;
    call.bf16 = shape.bf16;
    call.x = x.get();
    call.residual = residual.get();
    call.h = h.get();
    call.weight = weight.get();
    if (shape.codes) {
      call.y_e4m3 = codes.get();
      call.ldy_e4m3 = width;
      call.scales = scales.get();
    } else {
      call.y_f16 = y.get();
      call.ldy = shape.k;
    }
  }
  // What it left, bit by bit.
  std::vector<uint8_t> made() const {
    std::vector<uint8_t> out;
    const auto append = [&](const auto& values) {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
      out.insert(out.end(), bytes, bytes + values.size() * sizeof(values[0]));
    };
    append(h.host());
    if (call.y_e4m3 == nullptr) {
      append(y.host());
    } else {
      append(codes.host());
      append(scales.host());
    }
    return out;
  }
  // Of a norm whose sum of squares is added up in another order: numbers of 16 and of 8 bits are the same or neighbours
  // (bits of a sign and a magnitude are in order).
  bool close(const Norm& other) const {
    const auto neighbours = [](const auto& a, const auto& b) {
      for (size_t i = 0; i < a.size(); ++i) {
        if (std::abs(int{a[i]} - int{b[i]}) > 1) return false;
      }
      return true;
    };
    if (h.host() != other.h.host()) return false;
    if (call.y_e4m3 == nullptr) return neighbours(y.host(), other.y.host());
    const auto mine = scales.host(), theirs = other.scales.host();
    for (size_t i = 0; i < mine.size(); ++i) {
      if (!(std::abs(mine[i] - theirs[i]) <= theirs[i] * 0x1p-20f)) return false;
    }
    return neighbours(codes.host(), other.codes.host());
  }

  GemmInputCall call;
  DeviceVector<uint16_t> x, residual, weight, h, y;
  int64_t width;
  DeviceVector<uint8_t> codes;
  DeviceVector<float> scales;
};

class AllReduceGpu : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
  std::vector<uint16_t> numbers(int64_t count, bool bf16) {
    std::vector<uint16_t> out(static_cast<size_t>(count));
    for (uint16_t& v : out) v = narrow(normal_(random_), bf16);
    return out;
  }
  std::mt19937 random_{11};
  std::normal_distribution<float> normal_;
};

// One group makes calls of all shapes, several of them one behind the other.
TEST_P(AllReduceGpu, IsTheSumAndThenTheNorm) {
  const Group group(GetParam(), size_t{64} * 8192 * 2);
  // Of which all ranks' blocks are on one GPU together.
  const auto most_rows = [](int64_t k) {
    return std::min(120 / GetParam(), static_cast<int>(120'000 / (GetParam() * std::max<int64_t>(k / 8, 128))));
  };
  std::vector<Shape> shapes{{1, 8192, false, false},
                            {1, 8, true, true},
                            {3, 136, false, true},
                            {most_rows(8192), 8192, true, false},
                            {most_rows(8192), 8192, false, true},
                            {most_rows(4096), 4096, false, false},
                            {most_rows(2048), 2048, true, true},
                            {3, 14336, false, true},
                            {2, 32768, true, false}};
  for (int i = 0; i < 40; ++i) {
    const int64_t k = 8 * std::uniform_int_distribution<int64_t>(1, 512)(random_);
    shapes.push_back({std::uniform_int_distribution<int64_t>(1, most_rows(k))(random_), k, i % 2 == 0, i % 3 == 0});
  }
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(::testing::Message() << shape.m << " x " << shape.k << (shape.bf16 ? ", BF16" : "")
                                      << (shape.codes ? ", E4M3" : ""));
    const int64_t count = shape.m * shape.k;
    const auto residual = numbers(count, shape.bf16), weight = numbers(shape.k, shape.bf16);
    std::vector<std::vector<uint16_t>> parts;
    std::vector<float> sum(static_cast<size_t>(count), 0.0f);
    for (int rank = 0; rank < group.ranks(); ++rank) {
      const auto& part = parts.emplace_back(numbers(count, shape.bf16));
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += widen(part[i], shape.bf16);
    }
    std::vector<uint16_t> whole(sum.size());
    for (size_t i = 0; i < sum.size(); ++i) whole[i] = narrow(sum[i], shape.bf16);
    group.enter(0);
    const Norm expected(shape, whole, residual, weight);
    ASSERT_TRUE(prepare_gemm_input(expected.call, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

    std::vector<std::unique_ptr<Norm>> norms;
    for (int rank = 0; rank < group.ranks(); ++rank) {
      group.enter(rank);
      norms.push_back(std::make_unique<Norm>(shape, parts[static_cast<size_t>(rank)], residual, weight));
      norms.back()->call.all_reduce = &group.reduce(rank);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    // Blocks of a stream's next calls come early (dependent launch); on one GPU they would take the others' room.
    constexpr int kCalls = 5;
    const bool one_by_one = group.shares_a_gpu() && shape.m > most_rows(shape.k) / kCalls;
    for (int call = 0; call < kCalls; ++call) {
      if (one_by_one) group.synchronize();
      for (int rank = group.ranks() - 1; rank >= 0; --rank) {
        group.enter(rank);
        const Status status = prepare_gemm_input(norms[static_cast<size_t>(rank)]->call, group.stream(rank));
        ASSERT_TRUE(status.ok()) << status.error().message;
      }
    }
    group.synchronize();
    for (int rank = 0; rank < group.ranks(); ++rank) {
      group.enter(rank);
      EXPECT_TRUE(norms[static_cast<size_t>(rank)]->close(expected)) << "rank " << rank;
      EXPECT_EQ(norms[static_cast<size_t>(rank)]->made(), norms[0]->made()) << "rank " << rank;
    }
  }
}

// Two NaNs side by side of the pattern that says that a part is not there yet, in one exchange and in two.
TEST_P(AllReduceGpu, TakesEveryPattern) {
  const Group group(GetParam(), size_t{16} * 8192 * 2);
  for (const Shape& shape : {Shape{2, 64, false, false}, Shape{12, 8192, false, false}}) {
    auto part = numbers(shape.m * shape.k, false);
    for (size_t i = 8; i < 12; ++i) part[i] = 0xffff;
    const auto residual = numbers(shape.m * shape.k, false), weight = numbers(shape.k, false);
    std::vector<std::unique_ptr<Norm>> norms;
    for (int rank = 0; rank < group.ranks(); ++rank) {
      group.enter(rank);
      norms.push_back(std::make_unique<Norm>(shape, part, residual, weight));
      norms.back()->call.all_reduce = &group.reduce(rank);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    for (int rank = 0; rank < group.ranks(); ++rank) {
      group.enter(rank);
      ASSERT_TRUE(prepare_gemm_input(norms[static_cast<size_t>(rank)]->call, group.stream(rank)).ok());
    }
    group.synchronize();
    for (int rank = 0; rank < group.ranks(); ++rank) {
      group.enter(rank);
      const auto h = norms[static_cast<size_t>(rank)]->h.host();
      for (size_t i = 0; i < h.size(); ++i) ASSERT_EQ(std::isnan(fp16_to_fp32(h[i])), i >= 8 && i < 12) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllReduceGpu, ::testing::Values(2, 3, 4, 8));

TEST(AllReduceCalls, AreRefusedByName) {
  std::array<uint8_t, 512> memory;
  auto* const buffer = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  AllReduce reduce;
  reduce.ranks = 2;
  reduce.buffers = {buffer, buffer};
  reduce.bytes = all_reduce_buffer_bytes(2, size_t{256} * 4096 * 2);
  EXPECT_EQ(reduce.most_bytes(), size_t{256} * 4096 * 2);
  GemmInputCall call;
  call.source = GemmInputCall::Source::kNorm;
  call.m = 256;
  call.k = call.ldx = call.ldr = call.ldy = 4096;
  call.x = call.weight = call.residual = call.y_f16 = buffer;
  call.all_reduce = &reduce;
  const auto refused = [&](const GemmInputCall& bad) {
    const Status status = prepare_gemm_input(bad, nullptr);
    return status.ok() ? std::string() : status.error().message;
  };
  auto bad = call;
  bad.residual = nullptr;
  EXPECT_NE(refused(bad).find("all_reduce belongs to kNorm with a residual"), std::string::npos) << refused(bad);
  bad = call;
  bad.m = 257;
  EXPECT_NE(refused(bad).find("m must be at most max_reduced_rows(k)"), std::string::npos) << refused(bad);
  bad = call;
  bad.k = bad.ldx = bad.ldr = bad.ldy = 8192;
  EXPECT_NE(refused(bad).find("has buffers for fewer rows"), std::string::npos) << refused(bad);
  bad = call;
  bad.k = 4095;
  EXPECT_NE(refused(bad).find("k a multiple of 8"), std::string::npos) << refused(bad);
  bad = call;
  bad.batch_invariant = true;
  EXPECT_NE(refused(bad).find("batch_invariant"), std::string::npos) << refused(bad);
  reduce.rank = 2;
  EXPECT_NE(refused(call).find("rank 2 of 2"), std::string::npos) << refused(call);
  reduce.rank = 0;
  reduce.buffers[1] = nullptr;
  EXPECT_NE(refused(call).find("buffers[1]"), std::string::npos) << refused(call);
  reduce.buffers[1] = buffer;
  reduce.bytes = 300;
  EXPECT_NE(refused(call).find("too few"), std::string::npos) << refused(call);
}

}  // namespace
}  // namespace nfp::cuda
