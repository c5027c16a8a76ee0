// A linear layer's weight on the device: both byte planes once, and nothing else of the matrix.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/linear/uploader.h"
#include "base/result.h"
#include "base/thread_pool.h"

namespace nfp::cuda {

class WeightPlan;

// Consecutive columns of y that one product computes (weight_plan.h).
struct WeightSegment {
  bool nested = false;
  NestedMatrix matrix;              // if nested
  const uint16_t* dense = nullptr;  // else: device, FP16 [rows, k]
  int64_t first_column = 0;
  int64_t rows = 0;
  const float* bias = nullptr;         // device [rows], or null
  const uint16_t* bias_f16 = nullptr;  // dense only: what cuBLASLt adds to FP16 outputs
};

class CudaWeight final : public LinearWeight {
 public:
  // Reads the spec's parts on all threads and sends them to the current device. The last bytes may still be on their
  // way when it returns: uploader.finish() before the first use.
  static Result<std::unique_ptr<CudaWeight>> make(const LinearSpec& spec, DeviceUploader& uploader,
                                                  ThreadPool& threads);
  ~CudaWeight() override;
  CudaWeight(const CudaWeight&) = delete;
  CudaWeight& operator=(const CudaWeight&) = delete;

  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  size_t bytes_read(Precision precision) const override;
  size_t bytes_held() const override { return planes_bytes_ + extras_bytes_; }

  // The form that x must have in a step of this precision: E4M3 in kFp8W8A8, where all of the weight can use it. To be
  // asked before the operation that writes x.
  Precision consumes(Precision step) const override {
    return step == Precision::kFp8W8A8 && !has_dense_ ? Precision::kFp8W8A8 : Precision::kFp16;
  }
  bool interleaved() const { return interleaved_; }  // gate and up rows, as layout.h's swiglu_gate_row() orders them
  std::span<const WeightSegment> segments() const { return segments_; }

 private:
  CudaWeight() = default;
  Status take_memory(const WeightPlan& plan);
  // scales: [n] what the plan's rows are multiplied by, written here.
  Status upload_matrices(const WeightPlan& plan, DeviceUploader& uploader, ThreadPool& threads,
                         std::vector<float>& scales);
  // Row scales where a row has one, the bias, and its FP16 for cuBLASLt, in one piece.
  Status upload_extras(const WeightPlan& plan, DeviceUploader& uploader, ThreadPool& threads,
                       const std::vector<float>& scales);

  int64_t n_ = 0, k_ = 0;
  bool interleaved_ = false;
  bool has_dense_ = false;
  std::vector<WeightSegment> segments_;
  uint8_t* planes_ = nullptr;  // device: planes and FP16 matrices
  size_t planes_bytes_ = 0;
  uint8_t* extras_ = nullptr;  // device: row scales and bias
  size_t extras_bytes_ = 0;
};

}  // namespace nfp::cuda
