// A norm that sums over GPUs first, beside the same norm of a whole row, as JSON lines: microseconds a call, on the
// slowest GPU, by replays of a CUDA graph of many calls on each.
//
//   all_reduce_bench [RANKS]   (default 2; GPUs that see each other's memory)
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "device_memory.h"

namespace nfp::cuda {
namespace {

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  fmt::print(stderr, "{}\n", cudaGetErrorString(status));
  std::exit(1);
}

// One GPU's operands and graphs.
struct Rank {
  int device = 0;
  cudaStream_t stream = nullptr;
  AllReduce reduce;
  std::unique_ptr<bench::DeviceMemory> x, residual, h, y, weight, codes, scales, buffer;

  cudaGraphExec_t graph(int64_t m, int64_t k, bool e4m3, bool reduces, int calls) const {
    check(cudaSetDevice(device));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) {
      GemmInputCall call;
      call.source = GemmInputCall::Source::kNorm;
      call.m = m;
      call.k = call.ldx = call.ldr = call.ldy = k;
      call.x = x->as<void>();
      call.residual = residual->as<void>();
      call.h = h->as<void>();
      call.weight = weight->as<void>();
      if (e4m3) {
        call.y_e4m3 = codes->as<uint8_t>();
        call.ldy_e4m3 = PlaneShape{0, k}.padded_k();
        call.scales = scales->as<float>();
      } else {
        call.y_f16 = y->as<void>();
      }
      call.all_reduce = reduces ? &reduce : nullptr;
      bench::must(prepare_gemm_input(call, stream));
    }
    cudaGraph_t made = nullptr;
    cudaGraphExec_t ready = nullptr;
    check(cudaStreamEndCapture(stream, &made));
    check(cudaGraphInstantiate(&ready, made, 0));
    check(cudaGraphDestroy(made));
    return ready;
  }
};

// Median microseconds a call, of the slowest rank.
double measure(const std::vector<Rank>& ranks, int64_t m, int64_t k, bool e4m3, bool reduces) {
  constexpr int kCalls = 200, kRepeats = 15;
  std::vector<cudaGraphExec_t> graphs;
  for (const Rank& rank : ranks) graphs.push_back(rank.graph(m, k, e4m3, reduces, kCalls));
  std::vector<double> times;
  for (int repeat = 0; repeat < kRepeats + 2; ++repeat) {
    std::vector<cudaEvent_t> begins, ends;
    for (size_t i = 0; i < ranks.size(); ++i) {
      check(cudaSetDevice(ranks[i].device));
      check(cudaEventCreate(&begins.emplace_back()));
      check(cudaEventCreate(&ends.emplace_back()));
      // The first replay lets the ranks meet, the second is timed.
      check(cudaGraphLaunch(graphs[i], ranks[i].stream));
      check(cudaEventRecord(begins[i], ranks[i].stream));
      check(cudaGraphLaunch(graphs[i], ranks[i].stream));
      check(cudaEventRecord(ends[i], ranks[i].stream));
    }
    float slowest = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      check(cudaSetDevice(ranks[i].device));
      check(cudaStreamSynchronize(ranks[i].stream));
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begins[i], ends[i]));
      slowest = std::max(slowest, ms);
      check(cudaEventDestroy(begins[i]));
      check(cudaEventDestroy(ends[i]));
    }
    if (repeat >= 2) times.push_back(double{slowest} * 1e3 / kCalls);
  }
  for (const cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void run(int count) {
  constexpr int64_t kRows = 256, kColumns = 8192;
  std::vector<Rank> ranks(static_cast<size_t>(count));
  const size_t bytes = all_reduce_buffer_bytes(count, size_t{kRows * kColumns * 2});
  for (int i = 0; i < count; ++i) {
    Rank& rank = ranks[static_cast<size_t>(i)];
    rank.device = i;
    check(cudaSetDevice(i));
    for (int j = 0; j < count; ++j) {
      if (j != i) check(cudaDeviceEnablePeerAccess(j, 0));
    }
    check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    for (auto* const memory : {&rank.x, &rank.residual, &rank.h, &rank.y, &rank.weight, &rank.codes}) {
      *memory = std::make_unique<bench::DeviceMemory>(size_t{kRows * kColumns * 2});
      check(cudaMemset((*memory)->as<void>(), 0x11, size_t{kRows * kColumns * 2}));
    }
    rank.scales = std::make_unique<bench::DeviceMemory>(size_t{kRows * 4});
    rank.buffer = std::make_unique<bench::DeviceMemory>(bytes);
    bench::must(clear_all_reduce_buffer(rank.buffer->as<void>(), bytes));
  }
  for (Rank& rank : ranks) {
    rank.reduce.rank = rank.device;
    rank.reduce.ranks = count;
    rank.reduce.bytes = bytes;
    for (size_t j = 0; j < ranks.size(); ++j) rank.reduce.buffers[j] = ranks[j].buffer->as<void>();
  }
  for (const int64_t k : {int64_t{4096}, kColumns}) {
    for (const int64_t m : {1, 8, 32, 64, 128, 256}) {
      for (const bool e4m3 : {false, true}) {
        fmt::print(
            "{{\"case\":\"norm of a sum\",\"ranks\":{},\"rows\":{},\"columns\":{},\"to\":\"{}\",\"us\":{:.2f},"
            "\"norm_us\":{:.2f}}}\n",
            count, m, k, e4m3 ? "e4m3" : "f16", measure(ranks, m, k, e4m3, true), measure(ranks, m, k, e4m3, false));
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace
}  // namespace nfp::cuda

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  if (ranks < 2 || ranks > nfp::cuda::kMaxRanks) {
    fmt::print(stderr, "usage: all_reduce_bench [RANKS]   (2 to {})\n", nfp::cuda::kMaxRanks);
    return 2;
  }
  nfp::cuda::run(ranks);
}
