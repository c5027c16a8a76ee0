#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {
std::atomic<int> yields{0};
}

// In the place of the C library's.
int sched_yield() noexcept {
  ++yields;
  return 0;
}

namespace nfp {
namespace {

TEST(Partition, CoversEverythingOnceInOrder) {
  for (int64_t count : {0, 1, 7, 16, 33, 100, 4096}) {
    for (int parts : {1, 2, 3, 8, 64}) {
      for (int64_t align : {1, 4, 16}) {
        int64_t next = 0;
        for (int part = 0; part < parts; ++part) {
          const Range range = partition(count, part, parts, align);
          EXPECT_EQ(range.begin, next);
          EXPECT_GE(range.end, range.begin);
          EXPECT_TRUE(range.end == count || range.end % align == 0);
          next = range.end;
        }
        EXPECT_EQ(next, count);
      }
    }
  }
}

TEST(ThreadPool, EveryThreadRunsOnceEachTime) {
  for (int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    std::vector<int> count(static_cast<size_t>(threads), 0);
    for (int i = 0; i < 1000; ++i) pool.run([&](int thread) { ++count[static_cast<size_t>(thread)]; });
    for (int c : count) EXPECT_EQ(c, 1000);
  }
}

TEST(ThreadPool, BarrierSeparatesPhases) {
  ThreadPool pool(3);
  std::vector<int> value(3, 0);
  bool good = true;
  pool.run([&](int thread) {
    for (int phase = 1; phase <= 500; ++phase) {
      value[static_cast<size_t>(thread)] = phase;
      pool.barrier();
      if (thread == 0) {
        for (int v : value) good = good && v == phase;
      }
      pool.barrier();
    }
  });
  EXPECT_TRUE(good);
}

// A thread that yields its CPU to other programs gets it back late, at every wait.
TEST(ThreadPool, WhoeverWaitsLongSleepsAndDoesNotYield) {
  ThreadPool pool(3);
  const auto late = [](int thread) {
    if (thread == 2) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  };
  yields = 0;
  for (int i = 0; i < 5; ++i) {
    pool.run([&](int thread) {
      late(thread);
      pool.barrier();
      late(thread);  // the caller waits for its end
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(3));  // the workers wait for the next
  }
  EXPECT_EQ(yields, 0);
}

TEST(ThreadPool, TheCallerIsBoundOnlyWhileItComputes) {
  const auto mask = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    EXPECT_EQ(pthread_getaffinity_np(pthread_self(), sizeof(set), &set), 0);
    return set;
  };
  const cpu_set_t before = mask();
  int cpu = 0;
  while (CPU_ISSET(cpu, &before) == 0) ++cpu;
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads, std::vector<std::vector<int>>(static_cast<size_t>(threads), {cpu}));
    pool.run([&](int) {
      const cpu_set_t here = mask();
      EXPECT_EQ(CPU_COUNT(&here), 1);
      EXPECT_TRUE(CPU_ISSET(cpu, &here));
    });
    const cpu_set_t after = mask();
    EXPECT_TRUE(CPU_EQUAL(&before, &after)) << threads;
  }
}

TEST(ThreadPool, AThreadMayRunOnAllCpusThatItIsBoundTo) {
  cpu_set_t all;
  CPU_ZERO(&all);
  ASSERT_EQ(pthread_getaffinity_np(pthread_self(), sizeof(all), &all), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &all)) cpus.push_back(cpu);
  }
  ThreadPool pool(3, {cpus, cpus, {}});
  std::vector<cpu_set_t> masks(3);
  pool.run([&](int thread) {
    pthread_getaffinity_np(pthread_self(), sizeof(cpu_set_t), &masks[static_cast<size_t>(thread)]);
  });
  for (const size_t thread : {0, 1}) {
    EXPECT_EQ(static_cast<size_t>(CPU_COUNT(&masks[thread])), cpus.size());
    for (const int cpu : cpus) EXPECT_TRUE(CPU_ISSET(cpu, &masks[thread])) << thread;
  }
  EXPECT_TRUE(CPU_EQUAL(&masks[2], &all));
}

}  // namespace
}  // namespace nfp
