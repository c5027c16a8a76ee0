// Between round_rows.cc (checks, launch) and round_rows.cu (kernel).
#pragma once

#include <cstdint>

namespace nfp::cuda {

struct RoundRowsParams {
  const uint16_t* x;
  uint32_t* peaks;
  uint8_t* y;
  float* scales;
  int64_t ldx, ldy;
  int k;
  int chunks;      // of 16 columns, in padded_k()
  int blocks;      // that share a row, in one cluster
  bool rehearses;  // each block goes through its code once before its inputs are there, without loading or storing
};

inline constexpr int kRoundRowsThreads = 256;
// Takes RoundRowsParams. Grid: rows x blocks, a thread for each chunk.
const void* round_rows_function();

}  // namespace nfp::cuda
