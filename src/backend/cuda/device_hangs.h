// Whether the device was found to hang. Waiting for it or freeing its memory would then never return, so whoever owns
// some leaves it to the process's end.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>

#include "base/awake_time.h"

namespace nfp::cuda {

inline std::atomic<bool>& device_hangs() {
  static std::atomic<bool> hangs{false};
  return hangs;
}

// Calls `query` (cudaEventQuery or cudaStreamQuery of what is waited for) until it says something else than
// cudaErrorNotReady, and returns that. CUDA's own ways to wait have no limit: this one finds that the device hangs once
// `hang_s` seconds have passed, and returns none then, as it does at once for a device that was found to hang before.
// `pause`: between two calls.
template <class Query>
std::optional<cudaError_t> wait_at_most(double hang_s, Query query, std::chrono::microseconds pause = {}) {
  if (device_hangs()) return std::nullopt;
  using Clock = AwakeTime::Clock;
  AwakeTime waited(Clock::now(), std::chrono::seconds(1));
  const std::chrono::duration<double> most(hang_s);
  for (uint32_t turn = 0;; ++turn) {
    const cudaError_t status = query();
    if (status != cudaErrorNotReady) return status;
    if ((pause.count() > 0 || turn % 1024 == 0) && waited.at(Clock::now()) > most) break;
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
  }
  device_hangs() = true;
  return std::nullopt;
}

}  // namespace nfp::cuda
