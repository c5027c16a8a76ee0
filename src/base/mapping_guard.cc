#include "base/mapping_guard.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/temporary_path.h"

namespace nfp {
namespace {

// Written under the mutex, read by the signal handler: hence atomics, and `begin` set last.
struct Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<size_t> bytes{0};
  std::atomic<char*> path{nullptr};
};

std::mutex mutex;
std::array<Slot, 1024> slots;

void say(const char* text) {
  // There is nobody left to tell that stderr is closed.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const Slot& slot : slots) {
    const uintptr_t begin = slot.begin.load(std::memory_order_acquire);
    if (begin == 0 || at < begin || at - begin >= slot.bytes.load(std::memory_order_relaxed)) continue;
    say("nestedfp: error: ");
    say(slot.path.load(std::memory_order_relaxed));
    say(": got shorter, or could not be read, while it was in use; run again when nothing writes to it\n");
    // More than a handler may do elsewhere: the thread was reading the file, and holds no lock of what removes others.
    remove_all_temporaries();
    ::_exit(1);
  }
  std::signal(signal, SIG_DFL);  // returning repeats the access, which then ends the process as if we were not here
}

}  // namespace

void install_mapping_guard() {
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

void guard_mapping(const void* begin, size_t bytes, const std::string& path) {
  const std::lock_guard lock(mutex);
  for (Slot& slot : slots) {
    if (slot.begin.load(std::memory_order_relaxed) != 0) continue;
    char* copy = ::strdup(path.c_str());
    if (copy == nullptr) return;
    slot.path.store(copy, std::memory_order_relaxed);
    slot.bytes.store(bytes, std::memory_order_relaxed);
    slot.begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
    return;
  }
}

void unguard_mapping(const void* begin) {
  const std::lock_guard lock(mutex);
  for (Slot& slot : slots) {
    if (slot.begin.load(std::memory_order_relaxed) != reinterpret_cast<uintptr_t>(begin)) continue;
    slot.begin.store(0, std::memory_order_release);
    std::free(slot.path.exchange(nullptr, std::memory_order_relaxed));
    return;
  }
}

}  // namespace nfp
