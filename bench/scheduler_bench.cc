// What it costs to take waiting requests out of the scheduler's queue, all at once in no order, as a policy that sheds
// them or clients that leave do, and to plan a step after that. Prints a line of JSON for each number of requests: the
// median of a few runs.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "engine/scheduler.h"

namespace nfp {
namespace {

double remove_s(int32_t waiting, int32_t removed) {
  BlockManager blocks(64, 16, /*prefix_caching=*/true);
  Scheduler scheduler({.max_sequences = 64, .max_step_tokens = 512, .max_queue = waiting}, &blocks);
  std::vector<Sequence*> sequences;
  for (int32_t i = 0; i < waiting; ++i) {
    auto sequence = std::make_unique<Sequence>();
    sequence->serial = static_cast<uint64_t>(i);
    sequence->request.prompt.assign(40, i);
    sequence->tokens = sequence->request.prompt;
    sequences.push_back(sequence.get());
    scheduler.enqueue(sequence);
  }
  std::mt19937 random(1);
  std::shuffle(sequences.begin(), sequences.end(), random);
  std::vector<std::unique_ptr<Sequence>> kept;  // to free them is not what is measured
  kept.reserve(static_cast<size_t>(removed));
  const auto start = std::chrono::steady_clock::now();
  for (int32_t i = 0; i < removed; ++i) kept.push_back(scheduler.remove(sequences[static_cast<size_t>(i)]));
  scheduler.schedule();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace
}  // namespace nfp

int main() {
  for (const int32_t waiting : {1000, 4000, 16000, 64000}) {
    const int32_t removed = waiting - waiting / 10;
    std::vector<double> seconds;
    seconds.reserve(5);
    for (int run = 0; run < 5; ++run) seconds.push_back(nfp::remove_s(waiting, removed));
    std::sort(seconds.begin(), seconds.end());
    fmt::print("{{\"waiting\":{},\"removed\":{},\"ms\":{:.2f}}}\n", waiting, removed, 1e3 * seconds[2]);
  }
}
