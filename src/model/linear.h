// One linear layer of a model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "io/family.h"
#include "nested/precision.h"

namespace nfp {

// Which precision it computes in is decided for each step: the step's, where `fp8` allows it.
struct Linear {
  std::unique_ptr<LinearWeight> weight;
  GemmType type = GemmType::kQkv;
  int32_t layer = 0;
  int32_t expert = -1;             // of the layer's experts; -1 = every token's
  bool shared = false;             // of the expert that every token has beside its own
  std::vector<std::string> names;  // of the stacked matrices, in their order, without ".weight"
  bool fp8 = true;                 // member of the set that computes in FP8 in an FP8 step
  double fp8_from = 0;  // least share of its weights that a step must compute in FP8 for this to be among them

  // share: of the weights that the step computes in FP8, 0..1.
  Precision at(Precision step, double share = 1.0) const { return fp8 && fp8_from <= share ? step : Precision::kFp16; }
  std::string_view stage() const {  // as LinearArgs has it
    const bool wide = type == GemmType::kGateUp;
    if (expert >= 0) return wide ? "experts_gate/up" : "experts_down";
    if (shared) return wide ? "shared_gate/up" : "shared_down";
    return name_of(type);
  }
};

// Told of each linear layer's inputs during a forward (calibration): device x is [rows, k], complete once the backend
// is synchronized, and valid until the call returns. It may change x: nothing but this layer reads it. An expert is
// told of the rows that are routed to it, and not at all where there are none.
class LinearObserver {
 public:
  virtual ~LinearObserver() = default;
  virtual void on_linear(const Linear& linear, void* x, int32_t rows) = 0;
  virtual void on_error(const Error& error) = 0;  // the backend failed, and the forward ended
};

}  // namespace nfp
