// What `nestedfp tune` asks of a backend: to run products with other kernels, so that whole steps can be timed with
// them. A backend that has such kernels is one (dynamic_cast from Backend).
#pragma once

#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/plan/tuning_table.h"

namespace nfp::cuda {

class GemmChooser {
 public:
  virtual ~GemmChooser() = default;
  virtual const DeviceShape& gemm_device() const = 0;
  // What products are chosen by now: of this device, with its models of time where there are any.
  virtual const TuningTable& gemm_choices() const = 0;
  // Of products enqueued from now on. Captured steps keep the kernels that they were captured with.
  virtual void set_gemm_choices(const TuningTable& table) = 0;
};

}  // namespace nfp::cuda
