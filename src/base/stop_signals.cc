#include "base/stop_signals.h"

#include <pthread.h>
#include <unistd.h>

#include <string_view>

#include "base/log.h"
#include "base/temporary_path.h"

namespace nfp {
namespace {

// SIGHUP stays ignored where it was (nohup): a signal that is blocked is delivered to who waits for it all the same.
sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&set, number);
  struct sigaction hangup = {};
  if (::sigaction(SIGHUP, nullptr, &hangup) != 0 || hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  return set;
}

std::string_view name_of(int number) { return number == SIGINT ? "SIGINT" : number == SIGTERM ? "SIGTERM" : "SIGHUP"; }

std::atomic<bool> broken_pipe{false};

// SIGPIPE comes to the thread that wrote, where no other thread can take it, and a handler must not remove files.
void on_broken_pipe(int) {
  broken_pipe.store(true);
  ::kill(::getpid(), SIGTERM);
  while (true) ::pause();
}

[[noreturn]] void end_by(int number) {
  std::signal(number, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, number);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  std::raise(number);
  _exit(128 + number);  // not reached
}

}  // namespace

void block_stop_signals() {
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void wait_for_stop_signal() {
  const sigset_t set = stop_signals();
  int number = 0;
  while (sigwait(&set, &number) != 0) {
  }
  // By a handler: a thread for it is what the system may not have any more. Before the log, which may be a pipe that
  // nobody reads and that is full.
  for (const int again : {SIGINT, SIGTERM, SIGHUP}) {
    if (sigismember(&set, again) == 1) std::signal(again, [](int) { _exit(130); });
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  log::info("received {}: finishing what runs; a second signal ends at once", name_of(number));
}

StopRemovesTemporaries::StopRemovesTemporaries(std::optional<int> status) {
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_BLOCK, &set, &before_);
  thread_ = std::thread([this, status] { wait(status); });
  ::sigaction(SIGPIPE, nullptr, &pipe_before_);
  if (pipe_before_.sa_handler == SIG_DFL) std::signal(SIGPIPE, on_broken_pipe);
}

StopRemovesTemporaries::~StopRemovesTemporaries() {
  struct sigaction pipe = {};
  // Who lives on may have chosen meanwhile what it does with it.
  if (::sigaction(SIGPIPE, nullptr, &pipe) == 0 && pipe.sa_handler == on_broken_pipe) {
    ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  }
  done_.store(true);
  pthread_kill(thread_.native_handle(), SIGINT);  // to that thread alone
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopRemovesTemporaries::wait(std::optional<int> status) {
  const sigset_t set = stop_signals();
  siginfo_t info = {};
  while (sigwaitinfo(&set, &info) < 0) {
  }
  if (done_.load() && info.si_pid == ::getpid()) return;  // the destructor
  remove_all_temporaries();
  if (status) _exit(*status);
  end_by(broken_pipe.load() ? SIGPIPE : info.si_signo);
}

}  // namespace nfp
