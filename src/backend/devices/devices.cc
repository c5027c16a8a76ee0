#include "backend/devices/devices.h"

#include "backend/cpu/cpu_backend.h"
#include "base/log.h"
#ifdef NFP_HAVE_CUDA
#include "backend/cuda/cuda_backend.h"
#endif

namespace nfp {
namespace {

Result<std::unique_ptr<Backend>> make_cpu(const BackendOptions& options) {
  return make_cpu_backend({.threads = options.threads, .pin = false, .kernels = options.cpu_kernels});
}

Result<std::unique_ptr<Backend>> make_cuda(const BackendOptions& options) {
#ifdef NFP_HAVE_CUDA
  return make_cuda_backend({.threads = options.threads,
                            .deterministic = options.deterministic,
                            .gemm_choices = options.gemm_choices,
                            .hang_s = options.hang_s});
#else
  (void)options;
  return error(ErrorCode::kUnsupported,
               "this program was built without CUDA; build it where nvcc is on the path, or use --device cpu");
#endif
}

struct Device {
  std::string_view name;
  Result<std::unique_ptr<Backend>> (*make)(const BackendOptions&);
};

// In the order in which "auto" tries them.
constexpr Device kDevices[] = {{"cuda", make_cuda}, {"cpu", make_cpu}};

}  // namespace

std::vector<std::string> device_names() {
  std::vector<std::string> names = {"auto"};
  for (const Device& device : kDevices) names.emplace_back(device.name);
  return names;
}

Result<std::unique_ptr<Backend>> make_backend(std::string_view device, const BackendOptions& options) {
  if (device == "cpu" && !options.gemm_choices.empty()) {
    return error(ErrorCode::kUsage, "--gemm-choices: '{}' chooses a GPU's kernels, which the device cpu has none of",
                 options.gemm_choices);
  }
  for (const Device& candidate : kDevices) {
    if (device == candidate.name) return candidate.make(options);
    if (device != "auto") continue;
    auto backend = candidate.make(options);
    if (backend.ok() || backend.error().code != ErrorCode::kUnsupported || &candidate == std::end(kDevices) - 1) {
      return backend;
    }
    log::debug("device auto: {}", backend.error().message);
    if (!options.gemm_choices.empty()) {
      const std::string& why = backend.error().message;  // and behind it what to do, which is done here
      log::warn("the choices of kernels in '{}' are not used: {}", options.gemm_choices, why.substr(0, why.find(';')));
    }
  }
  std::string names;
  for (const std::string& name : device_names()) names += (names.empty() ? "" : ", ") + name;
  return error(ErrorCode::kUsage, "device '{}' is unknown; use one of {}", device, names);
}

}  // namespace nfp
