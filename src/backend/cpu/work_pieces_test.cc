#include "backend/cpu/work_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/thread_pool.h"

namespace nfp::cpu {
namespace {

// Every piece once, whoever has it; an owner's own in order; runs of any number of turns after each other.
TEST(WorkPieces, EachIsDoneOnce) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    WorkPieces pieces(threads);
    for (int run = 0; run < 40; ++run) {
      const int turns = run % 4 + 1;
      const auto count = [&](int turn, int owner) { return (owner * 7 + turn * 3 + run) % 9; };
      std::vector<std::vector<std::atomic<int>>> done(static_cast<size_t>(turns * threads));
      for (auto& d : done) d = std::vector<std::atomic<int>>(9);
      std::atomic<bool> ascending = true;
      pieces.restart();
      pool.run([&](int thread) {
        uint32_t turn = 0;
        for (int t = 0; t < turns; ++t) {
          int last_owner = -1, last = -1;
          pieces.share(
              thread, turn, [&](int owner) { return count(t, owner); },
              [&](int owner, int32_t piece) {
                if (owner == last_owner && piece <= last) ascending = false;
                last_owner = owner;
                last = piece;
                ++done[static_cast<size_t>(int64_t{t} * threads + owner)][static_cast<size_t>(piece)];
              });
          pool.barrier();
        }
      });
      EXPECT_TRUE(ascending);
      for (int t = 0; t < turns; ++t) {
        for (int owner = 0; owner < threads; ++owner) {
          for (int piece = 0; piece < 9; ++piece) {
            const int times = done[static_cast<size_t>(int64_t{t} * threads + owner)][static_cast<size_t>(piece)];
            ASSERT_EQ(times, piece < count(t, owner) ? 1 : 0) << "run " << run << " turn " << t << " owner " << owner;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace nfp::cpu
