// What nest.cc and nest.cu agree on.
#pragma once

#include <cstdint>

#include "backend/cuda/nest/nest_report.h"

namespace nfp::cuda {

// Threads of the kernels that go over planes: one for each 16 bytes.
struct ChunkGrid {
  int64_t n, k, k_groups, chunks;
};
struct NestKernelParams {
  const uint16_t* weights;
  uint8_t* upper;
  uint8_t* lower;
  float* row_scale;
  NestReport* report;
  int64_t ldw, n, k;
  int min_exponent, max_exponent;
  bool bf16, free_join;
};
struct PackKernelParams {
  const uint8_t* bytes;
  uint8_t* out;
  int64_t ld;
  uint8_t bias;
};
struct UnnestKernelParams {
  const uint8_t* upper;
  const uint8_t* lower;
  const float* row_scale;
  uint16_t* weights;
  int64_t ldw;
  bool bf16, free_join;
};

struct NestKernels {
  const void* clear_report;    // (NestReport*, int32_t n), one thread
  const void* find_exponents;  // (NestKernelParams), a block for each row
  const void* nest_chunks;     // (NestKernelParams, ChunkGrid)
  const void* pack_chunks;     // (PackKernelParams, ChunkGrid)
  const void* unnest_chunks;   // (UnnestKernelParams, ChunkGrid)
  int threads;                 // of a block
};
NestKernels nest_kernels();

}  // namespace nfp::cuda
