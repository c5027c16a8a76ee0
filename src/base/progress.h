// How long work tells about itself: a callback that the library calls and the program draws. Calls come from one thread
// at a time and `done` never falls.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace nfp {

struct Progress {
  std::string_view what;  // "loading", "converting"
  uint64_t done = 0;      // bytes
  uint64_t total = 0;     // bytes
};

using ProgressCallback = std::function<void(const Progress&)>;  // may be empty

}  // namespace nfp
