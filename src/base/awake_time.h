// How long this process has waited for something, without the time that it was stopped itself: by a signal, a debugger,
// a paused virtual machine. What it waits for may have stood still as well, and gets to move first.
#pragma once

#include <algorithm>
#include <chrono>

namespace nfp {

class AwakeTime {
 public:
  using Clock = std::chrono::steady_clock;
  // `longest`: between two calls of `at` in a process that runs; what is more was no time awake.
  AwakeTime(Clock::time_point start, Clock::duration longest) : last_(start), longest_(longest) {}
  Clock::duration at(Clock::time_point now) {
    sum_ += std::min(now - last_, longest_);
    last_ = now;
    return sum_;
  }

 private:
  Clock::time_point last_;
  Clock::duration longest_, sum_{0};
};

}  // namespace nfp
