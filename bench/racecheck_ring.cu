// What compute-sanitizer's racecheck says of a ring of bulk copies and mbarriers that is correct by construction: the
// yardstick for what it says of the GEMM kernels (docs/kernels.md, "Checks").
//
//   compute-sanitizer --tool racecheck racecheck_ring [copy | store | warp]
//
// One thread fills two stages in turn, by the bulk copy engine (copy) or by an ordinary store (store); 128 threads read
// what has arrived and give the stage back. Every stage is written only after all readers arrived at its `empty`
// barrier, and read only after its `full` barrier completed, so there is no race. With `warp` one lane arrives for each
// warp after __syncwarp(), as the GEMM kernels do. The sum is checked.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"

namespace {

namespace ptx = nfp::cuda::ptx;
constexpr int kReaders = 128, kStages = 2, kWords = 128, kRounds = 16;

template <bool kCopy, bool kPerWarp>
__global__ void ring(const uint32_t* in, unsigned long long* sum) {
  __shared__ __align__(128) uint32_t data[kStages][kWords];
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&full[s]), 1);
      ptx::mbarrier_init(ptx::shared_address(&empty[s]), kPerWarp ? kReaders / 32 : kReaders);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == kReaders) {
    for (int i = 0; i < kRounds; ++i) {
      const int s = i % kStages;
      ptx::mbarrier_wait(ptx::shared_address(&empty[s]), (i / kStages + 1) % 2);
      if constexpr (kCopy) {
        ptx::mbarrier_expect(ptx::shared_address(&full[s]), kWords * 4);
        ptx::bulk_load(ptx::shared_address(data[s]), in + i * kWords, kWords * 4, ptx::shared_address(&full[s]),
                       ptx::kEvictNormal);
      } else {
        for (int w = 0; w < kWords; ++w) data[s][w] = in[i * kWords + w];
        ptx::mbarrier_arrive(ptx::shared_address(&full[s]));
      }
    }
  } else if (threadIdx.x < kReaders) {
    unsigned long long mine = 0;
    for (int i = 0; i < kRounds; ++i) {
      const int s = i % kStages;
      ptx::mbarrier_wait(ptx::shared_address(&full[s]), i / kStages % 2);
      mine += data[s][threadIdx.x % kWords];
      if constexpr (kPerWarp) __syncwarp();
      if (!kPerWarp || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[s]));
    }
    atomicAdd(sum, mine);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const char* way = argc < 2 ? "copy" : argv[1];
  std::vector<uint32_t> host(kWords * kRounds);
  unsigned long long expected = 0, got = 0;
  for (size_t i = 0; i < host.size(); ++i) {
    host[i] = static_cast<uint32_t>(i * 2654435761u);
    expected += host[i];
  }
  uint32_t* in = nullptr;
  unsigned long long* sum = nullptr;
  cudaMalloc(reinterpret_cast<void**>(&in), host.size() * 4);
  cudaMalloc(reinterpret_cast<void**>(&sum), 8);
  cudaMemcpy(in, host.data(), host.size() * 4, cudaMemcpyHostToDevice);
  cudaMemset(sum, 0, 8);
  if (std::strcmp(way, "store") == 0) {
    ring<false, false><<<1, kReaders + 32>>>(in, sum);
  } else if (std::strcmp(way, "warp") == 0) {
    ring<true, true><<<1, kReaders + 32>>>(in, sum);
  } else {
    ring<true, false><<<1, kReaders + 32>>>(in, sum);
  }
  const cudaError_t status = cudaMemcpy(&got, sum, 8, cudaMemcpyDeviceToHost);
  std::printf("%s ring: %s, sum %s\n", way, cudaGetErrorString(status), got == expected ? "right" : "wrong");
  return status == cudaSuccess && got == expected ? 0 : 1;
}
