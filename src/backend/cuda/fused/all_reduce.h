// A sum over the GPUs of a tensor-parallel group, made inside the kernel that reads it (GemmInputCall::all_reduce):
// each GPU stores its part of a row into the others' memory and adds what they stored into its own. One exchange,
// without a flag behind the data: who waits reads until no word is the pattern that was there before, as in NCCL's LL
// protocol ("Demystifying NCCL", arXiv 2507.04786, section III) and TensorRT-LLM's one-shot all-reduce. Of three ranks
// and more, many rows go by their owners: rank r adds up rows r, r + ranks, ... and stores the sums into the others'
// memory, two exchanges of fewer bytes.
//
// All GPUs make the same calls in the same order, on one stream at a time, and each adds in the order of the ranks, in
// FP32 with one rounding to 16 bits: all hold the same bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "backend/cuda/fused/all_reduce_kernel.h"
#include "base/result.h"

namespace nfp::cuda {

struct AllReduce {
  int rank = 0;
  int ranks = 0;                              // 2 to kMaxRanks
  std::array<void*, kMaxRanks> buffers = {};  // each rank's, as this process sees it; 256-byte aligned
  size_t bytes = 0;                           // of a buffer

  // Bytes (rows x columns x 2) that a call may add.
  size_t most_bytes() const;
  // kUsage where a field is wrong.
  Status check() const;
};

// Of a buffer for calls of at most so many bytes.
size_t all_reduce_buffer_bytes(int ranks, size_t most_bytes);

// Makes a rank's own buffer ready, once, and synchronises. No rank may call before all have done so.
Status clear_all_reduce_buffer(void* buffer, size_t bytes);

}  // namespace nfp::cuda
