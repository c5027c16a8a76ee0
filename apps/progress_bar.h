// Draws the progress of long work on stderr: a bar on a terminal, nothing elsewhere.
#pragma once

#include "base/progress.h"

namespace nfp {

class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();  // clears the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  // Must not outlive this object.
  ProgressCallback callback();

 private:
  bool terminal_;
  bool drawn_ = false;
  int last_percent_ = -1;
};

}  // namespace nfp
