// A fixed set of threads that run the same function together, each on its own static share of the work. There is no
// queue and no stealing: which thread computes what depends only on the sizes, so timing is steady and results
// are reproducible.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace nfp {

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
};

// Share `part` of 0..count-1 split over `parts`, every boundary but the last a multiple of `align`. Shares differ by at
// most one `align`; later ones may be empty.
Range partition(int64_t count, int part, int parts, int64_t align = 1);

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller of run(). Where `cpus` is given, thread i is bound to those of cpus[i] (the
  // caller, thread 0, while it is in run()); to none where these are none. Throws where the system allows no more
  // threads.
  explicit ThreadPool(int threads, std::vector<std::vector<int>> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return threads_; }

  // Calls fn(thread) for thread = 0..size()-1, thread 0 being the caller, and returns when all have returned. fn must
  // not throw and must not call run() again. One caller at a time.
  template <typename F>
  void run(F&& fn) {
    using Fn = std::remove_reference_t<F>;
    run_erased([](void* context, int thread) { (*static_cast<Fn*>(context))(thread); },
               const_cast<std::remove_const_t<Fn>*>(&fn));
  }

  // Calls fn(range) with each thread's share of 0..count-1.
  template <typename F>
  void parallel_for(int64_t count, int64_t align, F&& fn) {
    run([&](int thread) {
      const Range range = partition(count, thread, threads_, align);
      if (!range.empty()) fn(range);
    });
  }

  // Inside run(): waits until every thread of the pool has come here.
  void barrier();

 private:
  using Function = void (*)(void*, int);
  void run_erased(Function function, void* context);
  void worker(int thread);
  void end();

  const int threads_;
  std::vector<std::vector<int>> cpus_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
  // Apart from each other: every worker spins on the first while the last one to finish writes the second.
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int32_t> running_{0};
  alignas(64) std::atomic<int32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_generation_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace nfp
