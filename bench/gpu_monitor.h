// Clock, power and their limits while a measurement runs, from the driver's management library (NVML), which is loaded
// at run time: without it the readings are zero. NVML counts every GPU of a host, CUDA those that a process is given,
// so the current device is looked up by its place on the bus.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace nfp::bench {

struct GpuReading {
  unsigned sm_mhz = 0;         // lowest seen
  double watts = 0;            // highest seen
  bool power_limited = false;  // the driver named the power cap as a reason for the clock
};

class GpuMonitor {
 public:
  GpuMonitor() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    const auto init = symbol<int (*)()>("nvmlInit_v2");
    const auto get = symbol<int (*)(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    power_ = symbol<Get>("nvmlDeviceGetPowerUsage");
    reasons_ = symbol<int (*)(void*, unsigned long long*)>("nvmlDeviceGetCurrentClocksThrottleReasons");
    clock_ = symbol<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
    int current = 0;
    char bus[32] = {};
    if (init == nullptr || get == nullptr || init() != 0 || cudaGetDevice(&current) != cudaSuccess ||
        cudaDeviceGetPCIBusId(bus, sizeof(bus), current) != cudaSuccess || get(bus, &device_) != 0)
      device_ = nullptr;
  }

  // Runs `work` and samples every few milliseconds beside it.
  template <typename Work>
  GpuReading during(const Work& work) {
    GpuReading out;
    std::atomic<bool> stop = false;
    std::thread sampler([&] {
      while (device_ != nullptr && !stop) {
        sample(out);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    });
    work();
    stop = true;
    sampler.join();
    return out;
  }

 private:
  using Get = int (*)(void*, unsigned*);
  template <typename T>
  T symbol(const char* name) const {
    return reinterpret_cast<T>(dlsym(library_, name));
  }
  void sample(GpuReading& out) const {
    constexpr int kSmClock = 1;                              // NVML_CLOCK_SM
    constexpr unsigned long long kPower = 0x4 | 0x8 | 0x80;  // software cap, hardware slowdown, power brake
    unsigned milliwatts = 0, mhz = 0;
    unsigned long long reasons = 0;
    if (power_ != nullptr && power_(device_, &milliwatts) == 0) out.watts = std::max(out.watts, milliwatts * 1e-3);
    if (clock_ != nullptr && clock_(device_, kSmClock, &mhz) == 0)
      out.sm_mhz = out.sm_mhz == 0 ? mhz : std::min(out.sm_mhz, mhz);
    if (reasons_ != nullptr && reasons_(device_, &reasons) == 0) out.power_limited |= (reasons & kPower) != 0;
  }

  void* library_ = nullptr;
  void* device_ = nullptr;
  Get power_ = nullptr;
  int (*reasons_)(void*, unsigned long long*) = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
};

}  // namespace nfp::bench
