#include "backend/cuda/fused/all_reduce.h"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace nfp::cuda {

size_t all_reduce_buffer_bytes(int ranks, size_t most_bytes) {
  const size_t part = (most_bytes + kAllReduceAlignment - 1) / kAllReduceAlignment * kAllReduceAlignment;
  return kAllReduceHeader + part * kAllReduceSlots * static_cast<size_t>(ranks - 1);
}

size_t AllReduce::most_bytes() const {
  const size_t parts = kAllReduceSlots * static_cast<size_t>(ranks - 1);
  constexpr size_t kMost = size_t{1} << 31;  // offsets are 32 bits
  return std::min((bytes - kAllReduceHeader) / parts / kAllReduceAlignment * kAllReduceAlignment, kMost);
}

Status AllReduce::check() const {
  if (ranks < 2 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    return error(ErrorCode::kUsage, "all_reduce: rank {} of {} ranks: there may be 2 to {}", rank, ranks, kMaxRanks);
  }
  for (int i = 0; i < ranks; ++i) {
    const void* const buffer = buffers[static_cast<size_t>(i)];
    if (buffer == nullptr || reinterpret_cast<uintptr_t>(buffer) % kAllReduceAlignment != 0) {
      return error(ErrorCode::kUsage, "all_reduce: buffers[{}] is null or not 256-byte aligned", i);
    }
  }
  if (bytes < all_reduce_buffer_bytes(ranks, kAllReduceAlignment)) {
    return error(ErrorCode::kUsage, "all_reduce: {} bytes are too few for a buffer", bytes);
  }
  return ok_status();
}

Status clear_all_reduce_buffer(void* buffer, size_t bytes) {
  if (buffer == nullptr || bytes < kAllReduceHeader) {
    return error(ErrorCode::kUsage, "all_reduce: the buffer is null or too small");
  }
  auto* const after_header = static_cast<uint8_t*>(buffer) + kAllReduceHeader;
  cudaError_t status = cudaMemset(buffer, 0, kAllReduceHeader);
  if (status == cudaSuccess) status = cudaMemset(after_header, kAllReduceEmptyByte, bytes - kAllReduceHeader);
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status == cudaSuccess) return ok_status();
  return error(ErrorCode::kResource, "all_reduce: clearing the buffer: {}", cudaGetErrorString(status));
}

}  // namespace nfp::cuda
