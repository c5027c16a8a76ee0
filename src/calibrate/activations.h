// Scales for E4M3 activations other than one a token: what an engine with per-tensor scales would compute, simulated.
//
// A per-tensor scale makes the quantisation of a layer's inputs one multiplication that needs no look at the whole row,
// but one scale has to serve all tokens. Here the inputs of each linear layer are rounded to E4M3 in place (x / s to
// E4M3, clipped at 448, times s) before a step in Precision::kFp8 multiplies them; E4M3 values times a scale are exact
// to BF16's or FP32's own rounding, 2^-9 or less beside E4M3's 2^-4.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "calibrate/text.h"
#include "model/model.h"

namespace nfp {

// |x| of one tensor, counted in bins of 1/16 of a power of two.
class MagnitudeHistogram {
 public:
  void add(const float* x, int64_t count);
  // The upper edge of the bin in which this share (0..1) of the values is reached; the largest value where share is 1.
  float quantile(double share) const;
  float largest() const { return largest_; }

 private:
  std::array<int64_t, 4096> bins_{};  // by FP32's exponent and top four mantissa bits
  int64_t count_ = 0;
  float largest_ = 0;
};

// By the linear layer's first matrix.
using ActivationRanges = std::map<std::string, MagnitudeHistogram, std::less<>>;

// Of every linear layer's inputs over `text`, in exact FP16.
Result<ActivationRanges> measure_ranges(Model& model, const TokenSequences& text);

enum class ActivationScaling : uint8_t {
  kStatic,   // from calibration, the same in every step
  kDelayed,  // from the largest |x| of the last kDelayedSteps steps, as Transformer Engine's delayed scaling
};

inline constexpr int kDelayedSteps = 16;

// Rounds inputs in place, by the scaling's rule. Attach it to a forward in Precision::kFp8.
class ActivationRounder final : public LinearObserver {
 public:
  // Static scales: quantile(share) / 448 of `ranges`. Delayed ones start from there.
  ActivationRounder(Backend& backend, ActivationScaling scaling, const ActivationRanges& ranges, double share);

  void on_linear(const Linear& linear, void* x, int32_t rows) override;
  void on_error(const Error& error) override { status_ = error; }
  Status status() const { return status_; }

 private:
  struct Tensor {
    float scale = 1;
    std::vector<float> recent;  // largest |x| of the last steps
    size_t next = 0;
  };

  Backend& backend_;
  ActivationScaling scaling_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  Status status_;
  std::vector<float> values_;
};

// x / scale rounded to E4M3, clipped at 448, times scale; in place.
void round_to_e4m3(float* x, int64_t count, float scale);

}  // namespace nfp
