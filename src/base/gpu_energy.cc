#include "base/gpu_energy.h"

#include <dlfcn.h>

#include <charconv>
#include <cstdlib>
#include <string>

#include "base/csv.h"

namespace nfp {
namespace {

constexpr const char* kLibrary = "libnvidia-ml.so.1";

template <typename Function>
bool find(void* library, const char* name, Function& out) {
  out = reinterpret_cast<Function>(::dlsym(library, name));
  return out != nullptr;
}

}  // namespace

std::vector<std::string_view> visible_gpus(std::string_view text) {
  std::vector<std::string_view> names;
  for (const std::string_view name : split_csv(text)) {
    if (name.empty() || name.starts_with('-')) break;
    names.push_back(name);
  }
  return names;
}

Result<GpuEnergy> GpuEnergy::open() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return error(ErrorCode::kUnsupported, "{} is not here (no NVIDIA driver)", kLibrary);
  int (*init)() = nullptr;
  int (*count)(unsigned*) = nullptr;
  int (*by_index)(unsigned, void**) = nullptr;
  int (*by_uuid)(const char*, void**) = nullptr;
  GpuEnergy energy;
  if (!find(library, "nvmlInit_v2", init) || !find(library, "nvmlDeviceGetCount_v2", count) ||
      !find(library, "nvmlDeviceGetHandleByIndex_v2", by_index) ||
      !find(library, "nvmlDeviceGetHandleByUUID", by_uuid) ||
      !find(library, "nvmlDeviceGetTotalEnergyConsumption", energy.read_)) {
    return error(ErrorCode::kUnsupported, "{} is too old to count energy", kLibrary);
  }
  unsigned all = 0;
  if (init() != 0 || count(&all) != 0) return error(ErrorCode::kUnsupported, "the NVIDIA driver does not answer");
  void* device = nullptr;  // what the driver found
  const auto add = [&](int status) {
    if (status == 0) energy.devices_.push_back(device);
  };
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    for (const std::string_view name : visible_gpus(visible)) {
      unsigned index = 0;
      const bool number = std::from_chars(name.data(), name.data() + name.size(), index).ec == std::errc();
      add(number ? by_index(index, &device) : by_uuid(std::string(name).c_str(), &device));
    }
  } else {
    for (unsigned i = 0; i < all; ++i) add(by_index(i, &device));
  }
  if (energy.devices_.empty()) return error(ErrorCode::kUnsupported, "the NVIDIA driver shows no GPU");
  for (void* each : energy.devices_) {
    unsigned long long millijoules = 0;
    if (energy.read_(each, &millijoules) != 0) {
      return error(ErrorCode::kUnsupported, "this GPU does not count its energy");
    }
  }
  return energy;
}

double GpuEnergy::joules() const {
  double sum = 0;
  for (void* device : devices_) {
    unsigned long long millijoules = 0;
    if (read_(device, &millijoules) == 0) sum += 1e-3 * static_cast<double>(millijoules);
  }
  return sum;
}

}  // namespace nfp
