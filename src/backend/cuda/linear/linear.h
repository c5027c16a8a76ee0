// y = x W^T for a CudaWeight, in the precision of the step: which kernels, in which form, with which tiles.
//
//   NFP_ASSIGN_OR_RETURN(LinearRunner runner, LinearRunner::create());
//   NFP_RETURN_IF_ERROR(runner.run(weight, call));
//
// A run only enqueues: no allocation on the device, no synchronisation, so that a step can be captured. The choice of
// kernels is made once for each shape, number of rows and precision, and remembered.
//
// Precisions. kFp16 is exact. kFp8 multiplies the upper bytes with FP16 activations, as the CPU does: half the reading,
// at FP16's rate of products. kFp8W8A8 multiplies them with E4M3 activations. Its sums stay in the tensor
// core for all of k, which loses little (1e-3 to 5e-3 relative RMS) beside rounding both sides to E4M3 (about 2.6e-2
// each) as long as products of both signs cancel; where most agree in sign it loses more, and promoted_sums helps
// (docs/kernels.md, "Linear layers"). A weight of which some segment is FP16 takes FP16
// activations in every precision (CudaWeight::consumes()), and its nested segments run as kFp8 then in FP8 steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/linear/activations.h"
#include "backend/cuda/linear/weight.h"
#include "base/result.h"

struct CUevent_st;

namespace nfp::cuda {

enum class LinearEpilogue : uint8_t {
  kStore,   // y = x W^T + bias
  kSwiglu,  // y = silu(gate) * up of an interleaved weight; y has n / 2 columns
  kGeglu,   // likewise gelu(gate) * up, GELU with tanh, always by a second kernel
};

// Device memory that the calls of one stream share.
struct LinearWorkspace {
  Workspace gemm;
  void* dense = nullptr;    // DenseGemm::kWorkspaceBytes, 256-byte aligned; may be null if no weight has FP16 segments
  void* scratch = nullptr;  // LinearRunner::scratch_bytes(), 256-byte aligned
  size_t scratch_bytes = 0;
  uint32_t* peaks = nullptr;  // RowPeaks::kBytes, zero before the first call; null = rounding finds them by itself
};

struct LinearCall {
  // [rows, k] in the form that weight.consumes(precision) names (activations.h); 256-byte aligned.
  const void* x = nullptr;
  int64_t rows = 0;
  int64_t reserved_rows = 0;  // for which the buffers of x and y were made: where E4M3 scales lie
  Precision precision = Precision::kFp16;
  LinearEpilogue epilogue = LinearEpilogue::kStore;
  Precision consumer = Precision::kFp16;  // of gated ones only: the form of y, as the next weight's consumes() names it
  void* y = nullptr;                      // kStore: [rows, n] FP16, or FP32 with y_is_f32
  bool y_is_f32 = false;                  // kStore only
  // kStore of a weight that finds_largest(): y is the largest outputs of each row (row_largest.h), none is stored.
  bool y_is_largest = false;
  const void* residual = nullptr;  // kStore only: [rows, n] of y's type, added last; may be y; null = none
  // kBatchInvariant: a row's result does not depend on the other rows of the call. (Not of FP16 segments, whose
  // kernels are cuBLASLt's.)
  Reduction reduction = Reduction::kFastest;
  // FP8 steps: add to FP32 registers every 512 of k (Mode::kE4M3Promoted) instead of summing all of k in the tensor
  // core.
  bool promoted_sums = false;
  bool dependent_launch = true;      // the first kernel may start while the one before it in the stream still runs
  CUevent_st* multiplied = nullptr;  // recorded between the product and what comes after() it, if anything; may be null
  LinearWorkspace workspace;
  Stream stream = nullptr;
};

class LinearRunner {
 public:
  // For the current device. `table` (tuned choices; may be null) must outlive the runner. Where it has changed,
  // forget_choices().
  static Result<LinearRunner> create(const TuningTable* table);
  ~LinearRunner();
  LinearRunner(LinearRunner&&) noexcept;
  LinearRunner& operator=(LinearRunner&&) = delete;

  // How a kernel after the product makes y of it.
  enum class After : uint8_t { kNothing, kRound, kActivation, kActivationRound };
  static After after(const CudaWeight& weight, LinearEpilogue epilogue, Precision consumer);

  static bool finds_largest(const CudaWeight& weight);

  // kUsage for calls that do not fit the weight. Not thread-safe.
  Status run(const CudaWeight& weight, const LinearCall& call);

  // Scratch that a call of up to `rows` rows may need.
  static size_t scratch_bytes(const CudaWeight& weight, int64_t rows);

  const Gemm& gemm() const;
  // Kernels are chosen anew.
  void forget_choices();

 private:
  struct State;
  explicit LinearRunner(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace nfp::cuda
