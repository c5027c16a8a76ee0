// Ctrl-C as a flag: while one of these lives, SIGINT sets it instead of ending the program.
#pragma once

#include <atomic>
#include <csignal>

namespace nfp {

class InterruptScope {
 public:
  InterruptScope() {
    pressed().store(false);
    struct sigaction action = {};
    action.sa_handler = [](int) { pressed().store(true); };
    action.sa_flags = SA_RESTART;  // stdout loses what it was writing where a write is cut short
    sigaction(SIGINT, &action, &before_);
  }
  ~InterruptScope() { sigaction(SIGINT, &before_, nullptr); }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
  const std::atomic<bool>* flag() const { return &pressed(); }

 private:
  static std::atomic<bool>& pressed() {
    static std::atomic<bool> flag{false};
    return flag;
  }
  struct sigaction before_ = {};
};

}  // namespace nfp
