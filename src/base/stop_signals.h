// SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP, taken by a thread instead of a handler.
#pragma once

#include <atomic>
#include <csignal>
#include <optional>
#include <thread>

namespace nfp {

// Call before other threads are made: the signals then wait for the function below, in every thread.
void block_stop_signals();
// Returns at the first of them; a second one ends the process at once.
void wait_for_stop_signal();

// While one lives, a stop signal ends the process, and nothing half-written stays behind (base/temporary_path.h); so
// does SIGPIPE, where that is not ignored: `nestedfp evaluate ... | head -1`. For long work that has nothing to finish.
// Make it before other threads.
class StopRemovesTemporaries {
 public:
  // `status`: exit with it; without one the process ends by the signal, which is what a shell expects of Ctrl-C.
  explicit StopRemovesTemporaries(std::optional<int> status = std::nullopt);
  ~StopRemovesTemporaries();
  StopRemovesTemporaries(const StopRemovesTemporaries&) = delete;
  StopRemovesTemporaries& operator=(const StopRemovesTemporaries&) = delete;

 private:
  void wait(std::optional<int> status);
  sigset_t before_ = {};
  struct sigaction pipe_before_ = {};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

}  // namespace nfp
