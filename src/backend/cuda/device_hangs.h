// Whether the device was found to hang. Waiting for it or freeing its memory would then never return, so whoever owns
// some leaves it to the process's end.
#pragma once

#include <atomic>

namespace nfp::cuda {

inline std::atomic<bool>& device_hangs() {
  static std::atomic<bool> hangs{false};
  return hangs;
}

}  // namespace nfp::cuda
