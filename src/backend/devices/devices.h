// The table of backends: the one place that knows which there are.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"

namespace nfp {

struct BackendOptions {
  int threads = 0;                // of the host; 0 = chosen by the backend
  std::string cpu_kernels = {};   // as CpuOptions has it; "" = the best
  bool deterministic = false;     // a sequence's results do not depend on the others in its step (the CPU's never do)
  std::string gemm_choices = {};  // of a GPU: a file of `nestedfp tune`; "" = the built-in choices alone
  double hang_s = 120;            // of a GPU: a step that takes longer counts as hung, and the device as failed
};

// "auto", "cpu", "cuda": what --device takes.
std::vector<std::string> device_names();

// "auto" is a GPU where there is a usable one, else the CPU. Errors of "cuda" say what is missing.
Result<std::unique_ptr<Backend>> make_backend(std::string_view device, const BackendOptions& options);

}  // namespace nfp
