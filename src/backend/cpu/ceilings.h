// What this machine can do at most, measured on the same threads as the work that is compared with it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backend/cpu/thread_count.h"
#include "base/result.h"

namespace nfp::cpu {

struct MachineOptions {
  int threads = 0;         // 0 = as many as this process may use
  double seconds = 0.2;    // a measurement
  size_t megabytes = 512;  // read by the bandwidth measurement, more than the caches hold where memory allows
};

struct MachineCeilings {
  double read_gbs = 0;        // sequential reads of huge pages, 10^9 bytes/s
  double read_small_gbs = 0;  // of 4 KB pages
  double fma_gflops = 0;      // FP32 multiply-adds, 2 operations each
  double bf16_gflops = 0;     // BF16 dot products; 0 where there are none
  double fp16_gflops = 0;     // FP16 multiply-adds; 0 where there are none
  double tile_gflops = 0;     // BF16 products of AMX tiles; 0 where there are none
};

Result<MachineCeilings> measure_machine(const MachineOptions& options);

// How fast memory is read just now: on shared machines that changes within seconds, so that what is compared with it is
// measured in turns with it.
class ReadProbe {
 public:
  static Result<ReadProbe> create(const MachineOptions& options);
  ReadProbe(ReadProbe&&) noexcept;
  ReadProbe& operator=(ReadProbe&&) noexcept;
  ~ReadProbe();
  double gbs();  // of one pass over the memory, 10^9 bytes/s
  size_t bytes() const;

 private:
  struct State;
  explicit ReadProbe(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Both rates with each of these numbers of threads, bound to CPUs as thread_cpus says.
Result<std::vector<ThreadRate>> measure_thread_rates(std::span<const int> counts, const std::vector<CpuPlace>& places,
                                                     const KernelTable& kernels);

}  // namespace nfp::cpu
