// Energy that this machine's NVIDIA GPUs have used, from the driver's own counter (NVML, loaded at run time).
#pragma once

#include <string_view>
#include <vector>

#include "base/result.h"

namespace nfp {

class GpuEnergy {
 public:
  // The GPUs that CUDA_VISIBLE_DEVICES names, or all. An error that says why where there is no driver, no GPU, or one
  // that does not count (before Volta).
  static Result<GpuEnergy> open();

  // Since the driver was loaded, all GPUs together. The counter moves every 20 to 100 ms: ask about seconds.
  double joules() const;
  int gpus() const { return static_cast<int>(devices_.size()); }

 private:
  using Read = int (*)(void*, unsigned long long*);  // millijoules; 0 = done
  Read read_ = nullptr;
  std::vector<void*> devices_;
};

// The entries of a CUDA_VISIBLE_DEVICES, as CUDA reads it: up to the first that is empty or -1.
std::vector<std::string_view> visible_gpus(std::string_view text);

}  // namespace nfp
