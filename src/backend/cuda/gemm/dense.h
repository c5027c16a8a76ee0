// D[m, n] = X[m, k] * W[n, k]^T by cuBLASLt: for matrices that cannot be nested, and the yardstick of the benchmarks.
//
// Planning asks cuBLASLt for algorithms (host only, about 0.1 ms) and is done once a shape; running allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"

struct CUstream_st;

namespace nfp::cuda {

struct DenseProblem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  DType input = DType::kF16;   // X and W: kF16, kBF16 or kF8E4M3
  DType output = DType::kF16;  // kF16, kBF16 or kF32
  int64_t ldx = 0;             // elements
  int64_t ldd = 0;
  bool fast_accumulation = false;  // E4M3 only: all of k in the tensor core's accumulator
  bool bias = false;               // calls bring one
  // Bytes that divide the addresses of x, and of d and the residual.
  int x_alignment = 256;
  int d_alignment = 256;
};

struct DenseCall {
  const void* w = nullptr;         // device [n, k], rows of k elements, 16-byte aligned
  const void* x = nullptr;         // device [m, k]
  void* d = nullptr;               // device [m, n]
  const void* residual = nullptr;  // device, like d: D = X W^T + residual; null = none
  const void* bias = nullptr;      // device [n] of the output's type, with DenseProblem::bias
  const float* w_scale = nullptr;  // E4M3: one number each, on the device; null = 1
  const float* x_scale = nullptr;
  void* workspace = nullptr;  // DenseGemm::kWorkspaceBytes, 256-byte aligned
};

class DensePlan;

class DenseGemm {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;

  // Loads nothing yet: the first plans() opens cuBLASLt, and says what to do where there is none.
  static Result<DenseGemm> create();
  ~DenseGemm();
  DenseGemm(DenseGemm&&) noexcept;
  DenseGemm& operator=(DenseGemm&&) noexcept;

  // cuBLASLt's algorithms for the problem, its favourite first; at most `count`. Not thread-safe.
  Result<std::vector<DensePlan>> plans(const DenseProblem& problem, int count) const;
  Status run(const DensePlan& plan, const DenseCall& call, CUstream_st* stream) const;

 private:
  DenseGemm() = default;
  Status open() const;
  mutable void* handle_ = nullptr;  // made by the first plans()
};

class DensePlan {
 public:
  struct State;
  const State& state() const { return *state_; }
  explicit DensePlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace nfp::cuda
