// D[m, n] = epilogue(X[m, k] * W[n, k]^T) with W stored as two byte planes (layout.h), on Hopper.
//
//   NFP_ASSIGN_OR_RETURN(Gemm gemm, Gemm::create());
//   NFP_RETURN_IF_ERROR(gemm.run(call, config, stream));
//
// A call neither allocates nor synchronises, so it can be captured in a CUDA graph. Results are the same from run to
// run: parts of a sum are added in order of k whoever finishes last.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

using Stream = CUstream_st*;

inline constexpr int64_t kMaxGemmSize = int64_t{1} << 30;  // of m, n and k; choose() takes no larger ones either

struct NestedMatrix {
  const uint8_t* upper = nullptr;    // device, PlaneShape{n, k}.bytes(), 16-byte aligned
  const uint8_t* lower = nullptr;    // device, likewise; may be null if only FP8 modes are run
  const float* row_scale = nullptr;  // device [n], 2^e of each row's exponent; null = all 1
  int64_t n = 0;
  int64_t k = 0;
  Join join = Join::kBiased;
};

// Device memory that calls on one stream share. Parts of a cut tile wait for each other, so of one process's streams
// only one at a time may have such a call under way. Zero before the first call; calls leave it so.
struct Workspace {
  static constexpr size_t kCounterBytes = size_t{256} << 10;
  static constexpr size_t kBytes = kCounterBytes + (size_t{96} << 20);  // enough for every call
  void* data = nullptr;
  size_t bytes = 0;
};

struct GemmCall {
  NestedMatrix w;
  Mode mode = Mode::kF16;
  int64_t m = 0;
  // [m, k] of FP16, BF16 or E4M3 (mode); 16-byte aligned. E4M3 rows are PlaneShape::padded_k() bytes in the order of
  // activation_byte(), zeros in the padding. ldx: elements from row to row; its bytes a multiple of 16.
  const void* x = nullptr;
  int64_t ldx = 0;
  // FP8 modes: [m], x is worth x * scale; null = 1.
  const float* token_scale = nullptr;
  // [m, n], or [m, n / 2] with swiglu, of type `output`. ldd in elements. Fastest are outputs of bulk_store_type(mode)
  // with rows that are 16-byte aligned, and swiglu without a residual.
  // With Output::kLargest d is RowLargest::bytes(m, n), without ldd; swiglu and residual do not go with it.
  void* d = nullptr;
  int64_t ldd = 0;
  Output output = Output::kF16;
  const float* bias = nullptr;  // device [n], added before what follows; null = none
  bool swiglu = false;  // d = silu(gate) * up, rows interleaved as layout.h's swiglu_gate_row(); n a multiple of 16
  // With swiglu in the E4M3 modes, of up to RowPeaks::kRows tokens in tiles of up to kTileTokens, to outputs of
  // bulk_store_type(mode) with 16-byte aligned rows: device RowPeaks::kBytes, to which each token's largest output is
  // added (row_peaks.h); null = not wanted.
  uint32_t* peaks = nullptr;
  const void* residual = nullptr;  // like d (its dtype and shape), added last in FP32; may be d itself; null = none
  int64_t ldr = 0;
  Workspace workspace;
  // Programmatic dependent launch: this kernel may start, and fetch weights, while the one before it in the stream
  // still runs.
  bool dependent_launch = true;

  Problem problem() const { return {m, w.n, w.k, mode, swiglu, w.join}; }
};

class Gemm {
 public:
  // For the current device. kUnsupported unless it is compute capability 9.0.
  static Result<Gemm> create();

  const DeviceShape& device() const { return device_; }

  // kUsage on null or misaligned pointers and shapes that do not fit; the message names the field.
  Status run(const GemmCall& call, const Config& config, Stream stream) const;

 private:
  Gemm() = default;
  DeviceShape device_;
  void* encode_tensor_map_ = nullptr;
};

}  // namespace nfp::cuda
