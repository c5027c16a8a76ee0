// Draws a download on stderr: bytes, speed and the time that is left. A line rewritten in place on a terminal, one
// every ten seconds elsewhere.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/progress.h"

namespace nfp {

class DownloadBar {
 public:
  DownloadBar();
  ~DownloadBar();  // clears the line
  DownloadBar(const DownloadBar&) = delete;
  DownloadBar& operator=(const DownloadBar&) = delete;
  // Must not outlive this object.
  ProgressCallback callback();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(const Progress& progress);

  bool terminal_;
  bool drawn_ = false;
  Clock::time_point next_ = {};  // not drawn again before
  Clock::time_point began_ = {};
  uint64_t first_ = 0;  // bytes that were there at the beginning
  uint64_t total_ = 0;
};

}  // namespace nfp
