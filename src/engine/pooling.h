// Hidden states of a sequence, gathered over the steps that compute it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "engine/request.h"

namespace nfp {

// Hidden states after the final norm, of consecutive tokens of one sequence, in the runner's memory: valid until it
// takes in another step.
struct HiddenRows {
  const void* data = nullptr;  // [count, width]
  DType dtype = DType::kF32;   // kF32 or kF16
  int32_t width = 0;
  int32_t first = 0;  // position of the first one's token
  int32_t count = 0;
};

// The sum runs in the order of the tokens, in float64: how the prompt was cut into steps does not show.
class PooledStates {
 public:
  // Takes those that are new: a sequence that is computed again after preemption brings rows a second time.
  void add(Pooling pooling, const HiddenRows& rows);
  // [width]: the last row, or the mean of all.
  std::vector<float> result() const;

 private:
  std::vector<double> sum_;
  int32_t rows_ = 0;
  int32_t next_ = 0;  // position of the first token that is not in the sum
};

}  // namespace nfp
