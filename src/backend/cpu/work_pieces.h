// One operation's work in pieces, some of which are each thread's own: a thread takes its own in order, and then what
// others have left of theirs. So threads are done at the same time, also where cores or their ways to memory are not
// equally fast, and most of a thread's pieces lie where it has put them (see PackedWeight::share).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace nfp::cpu {

class WorkPieces {
 public:
  explicit WorkPieces(int threads) : next_(static_cast<size_t>(threads)) {}

  // Before the threads begin: their turns then count from 0.
  void restart() {
    for (Next& next : next_) {
      for (std::atomic<int32_t>& taken : next.taken) taken.store(0, std::memory_order_relaxed);
    }
  }

  // Calls work(owner, piece) for pieces 0.. of the calling thread and for those of others, each piece in one thread;
  // for one owner they ascend. count(owner) tells how many there are, the same in every thread. `turn` counts the calls
  // of share() by this thread since restart(); all threads come to each, and meet at a barrier before the next one.
  template <typename Count, typename Work>
  void share(int thread, uint32_t& turn, Count count, Work work) {
    const auto threads = static_cast<int>(next_.size());
    const uint32_t bank = turn++ & 1;
    // The other bank: nobody looks at it before the barrier that follows.
    next_[static_cast<size_t>(thread)].taken[bank ^ 1].store(0, std::memory_order_relaxed);
    for (int i = 0; i < threads; ++i) {
      const int owner = (thread + i) % threads;
      std::atomic<int32_t>& taken = next_[static_cast<size_t>(owner)].taken[bank];
      const int32_t pieces = count(owner);
      for (;;) {
        const int32_t piece = taken.fetch_add(1, std::memory_order_relaxed);
        if (piece >= pieces) break;
        work(owner, piece);
      }
    }
  }

 private:
  struct alignas(64) Next {
    std::atomic<int32_t> taken[2] = {0, 0};
  };
  std::vector<Next> next_;
};

}  // namespace nfp::cpu
