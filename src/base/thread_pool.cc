#include "base/thread_pool.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <stdexcept>
#include <system_error>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nfp {
namespace {

void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The lowest bit of a number that threads wait for says that some of them sleep until it changes; what the number
// counts is above it. std::atomic::wait would do the same, but gives the CPU away (sched_yield) before it sleeps: where
// other programs run, that costs a thread whole slices of its time at every wait.
constexpr int32_t kSleepers = 1, kOne = 2;

template <typename T>
T count_of(T value) {
  return value & ~static_cast<T>(kSleepers);
}

template <typename T>
void futex(std::atomic<T>& value, int operation, T argument) {
  static_assert(sizeof(value) == sizeof(int32_t) && std::atomic<T>::is_always_lock_free);
  syscall(SYS_futex, &value, operation | FUTEX_PRIVATE_FLAG, argument, nullptr, nullptr, 0);
}

template <typename T>
void wake(std::atomic<T>& value) {
  futex(value, FUTEX_WAKE, static_cast<T>(INT_MAX));
}

// Of a number that nobody else changes meanwhile.
template <typename T>
void change(std::atomic<T>& value, T next) {
  if ((value.exchange(next, std::memory_order_acq_rel) & kSleepers) != 0) wake(value);
}

// Spins for about 50 us (a step's gap between two kernels is shorter), then sleeps in the kernel.
constexpr int kSpins = 2000;

template <typename T>
void wait_while_equal(std::atomic<T>& value, T old) {
  const T asleep = old | kSleepers;
  for (int i = 0; i < kSpins; ++i) {
    if (count_of(value.load(std::memory_order_acquire)) != old) return;
    cpu_relax();
  }
  T found = old;
  while (value.compare_exchange_strong(found, asleep, std::memory_order_acq_rel) || found == asleep) {
    futex(value, FUTEX_WAIT, asleep);
    found = old;
  }
}

void bind_to(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a refusal costs speed, nothing else
}

// Binds the calling thread, if `cpus` are any, as long as this lives: threads that it makes later would be bound as it
// is, and the CPUs that a program may use are those of its mask.
class Bound {
 public:
  explicit Bound(const std::vector<int>& cpus)
      : bound_(!cpus.empty() && pthread_getaffinity_np(pthread_self(), sizeof(before_), &before_) == 0) {
    if (bound_) bind_to(cpus);
  }
  ~Bound() {
    if (bound_) pthread_setaffinity_np(pthread_self(), sizeof(before_), &before_);
  }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

 private:
  cpu_set_t before_ = {};
  bool bound_;
};

}  // namespace

Range partition(int64_t count, int part, int parts, int64_t align) {
  const int64_t units = (count + align - 1) / align;
  const int64_t base = units / parts;
  const int64_t extra = units % parts;
  const int64_t first = part * base + std::min<int64_t>(part, extra);
  const int64_t last = first + base + (part < extra ? 1 : 0);
  return {std::min(first * align, count), std::min(last * align, count)};
}

ThreadPool::ThreadPool(int threads, std::vector<std::vector<int>> cpus)
    : threads_(std::max(1, threads)), cpus_(std::move(cpus)) {
  cpus_.resize(static_cast<size_t>(threads_));
  workers_.reserve(static_cast<size_t>(threads_ - 1));
  try {
    for (int i = 1; i < threads_; ++i) {
      workers_.emplace_back([this, i] {
        const std::vector<int>& own = cpus_[static_cast<size_t>(i)];
        if (!own.empty()) bind_to(own);
        worker(i);
      });
    }
  } catch (const std::system_error& refused) {
    end();
    throw std::runtime_error(
        fmt::format("cannot start {} threads: {}; use fewer (--threads), or allow more (ulimit -u, "
                    "a container's limit of processes)",
                    threads_, refused.code().message()));
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  stop_.store(true, std::memory_order_relaxed);
  change(generation_, count_of(generation_.load(std::memory_order_relaxed)) + kOne);
  for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::run_erased(Function function, void* context) {
  const Bound bound(cpus_[0]);
  if (threads_ == 1) {
    function(context, 0);
    return;
  }
  function_ = function;
  context_ = context;
  running_.store(kOne * (threads_ - 1), std::memory_order_relaxed);
  change(generation_, count_of(generation_.load(std::memory_order_relaxed)) + kOne);
  function(context, 0);
  for (int32_t left = count_of(running_.load(std::memory_order_acquire)); left != 0;
       left = count_of(running_.load(std::memory_order_acquire))) {
    wait_while_equal(running_, left);
  }
}

void ThreadPool::worker(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_while_equal(generation_, seen);
    seen += kOne;
    if (stop_.load(std::memory_order_relaxed)) return;
    function_(context_, thread);
    if (running_.fetch_sub(kOne, std::memory_order_acq_rel) == (kOne | kSleepers)) wake(running_);
  }
}

void ThreadPool::barrier() {
  if (threads_ == 1) return;
  const uint32_t generation = count_of(barrier_generation_.load(std::memory_order_acquire));
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    change(barrier_generation_, generation + kOne);
  } else {
    wait_while_equal(barrier_generation_, generation);
  }
}

}  // namespace nfp
