// How many threads to compute with, found by measuring: memory is often read at full speed by fewer threads than there
// are CPUs, and the second hyper-thread of a core may add to arithmetic or take from it.
#pragma once

#include <span>
#include <vector>

#include "backend/cpu/kernel_table.h"
#include "base/cpu_topology.h"
#include "base/result.h"

namespace nfp::cpu {

struct ThreadRate {
  int threads = 0;
  double read_gbs = 0;    // what bounds decode
  double fma_gflops = 0;  // what bounds prefill
};

// Counts worth measuring, most first: all CPUs (or the control group's quota), a thread a core, half and a quarter of
// that. One only where nothing is to choose.
std::vector<int> thread_candidates(const std::vector<CpuPlace>& places, int quota);

// The fewest threads whose geometric mean of both rates is within 3 % of the best. `rates` is not empty.
int best_thread_count(std::span<const ThreadRate> rates);

// Measures the candidates of this machine, some 30 ms each, and nothing where there is one only.
Result<int> choose_thread_count(const std::vector<CpuPlace>& places, const KernelTable& kernels);

}  // namespace nfp::cpu
