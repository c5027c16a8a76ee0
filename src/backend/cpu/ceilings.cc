#include "backend/cpu/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "backend/cpu/huge_pages.h"
#include "base/cpu_topology.h"
#include "base/thread_pool.h"

namespace nfp::cpu {
namespace {

double seconds_of(auto&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Operations a second of `loop`, the best of several runs: a ceiling is what the machine can do, not what it does while
// others use it.
double rate_of(ThreadPool& pool, double seconds, double (*loop)(int64_t)) {
  int64_t iterations = 20000;
  double best = 0;
  for (double spent = 0; spent < seconds;) {
    std::vector<double> done(static_cast<size_t>(pool.size()));
    const double time =
        seconds_of([&] { pool.run([&](int thread) { done[static_cast<size_t>(thread)] = loop(iterations); }); });
    double total = 0;
    for (const double d : done) total += d;
    best = std::max(best, total / time);
    spent += time;
    if (time < seconds / 20) iterations *= 2;
  }
  return best;
}

// Writes all of it, so that it is there.
void touch(ThreadPool& pool, Mapping& memory) {
  pool.parallel_for(static_cast<int64_t>(memory.bytes()), 4096, [&](Range range) {
    std::memset(memory.as<char>() + range.begin, 1, static_cast<size_t>(range.size()));
  });
}

// Seconds that reading all of it takes.
double read_once(ThreadPool& pool, const Mapping& memory, const KernelTable& kernels) {
  constexpr int64_t kPiece = 4096;
  return seconds_of([&] {
    pool.parallel_for(static_cast<int64_t>(memory.bytes()) / kPiece, 1, [&](Range range) {
      kernels.read_loop(memory.as<char>() + range.begin * kPiece, static_cast<size_t>(range.size() * kPiece));
    });
  });
}

double bandwidth_of(ThreadPool& pool, double seconds, const Mapping& memory, const KernelTable& kernels) {
  double best = 0;
  for (double spent = 0; spent < seconds;) {
    const double time = read_once(pool, memory, kernels);
    best = std::max(best, static_cast<double>(memory.bytes()) / time);
    spent += time;
  }
  return best;
}

}  // namespace

struct ReadProbe::State {
  ThreadPool pool;
  Mapping memory;
  const KernelTable& kernels;
};

ReadProbe::ReadProbe(std::unique_ptr<State> state) : state_(std::move(state)) {}
ReadProbe::ReadProbe(ReadProbe&&) noexcept = default;
ReadProbe& ReadProbe::operator=(ReadProbe&&) noexcept = default;
ReadProbe::~ReadProbe() = default;

Result<ReadProbe> ReadProbe::create(const MachineOptions& options) {
  NFP_ASSIGN_OR_RETURN(const InstructionSet best, choose_instruction_set("", detect_features()));
  NFP_ASSIGN_OR_RETURN(Mapping memory, Mapping::create(options.megabytes << 20));
  const int threads = options.threads > 0 ? options.threads : usable_cpu_count();
  auto state = std::unique_ptr<State>(new State{ThreadPool(threads), std::move(memory), kernels_of(best)});
  touch(state->pool, state->memory);
  return ReadProbe(std::move(state));
}

size_t ReadProbe::bytes() const { return state_->memory.bytes(); }

double ReadProbe::gbs() {
  return static_cast<double>(state_->memory.bytes()) / read_once(state_->pool, state_->memory, state_->kernels) * 1e-9;
}

Result<MachineCeilings> measure_machine(const MachineOptions& options) {
  const CpuFeatures features = detect_features();
  NFP_ASSIGN_OR_RETURN(const InstructionSet best, choose_instruction_set("", features));
  const KernelTable& kernels = kernels_of(best);
  ThreadPool pool(options.threads > 0 ? options.threads : usable_cpu_count());
  MachineCeilings ceilings;
  ceilings.fma_gflops = rate_of(pool, options.seconds, kernels.fma_loop) * 1e-9;
  const auto dots = [&](InstructionSet set, bool has) {
    return has ? rate_of(pool, options.seconds, kernels_of(set).dot_loop) * 1e-9 : 0.0;
  };
  ceilings.bf16_gflops = dots(InstructionSet::kAvx512Bf16, features.avx512_bf16);
  ceilings.fp16_gflops = dots(InstructionSet::kAvx512Fp16, features.avx512_fp16);
  ceilings.tile_gflops = dots(InstructionSet::kAmx, features.amx);
  for (const bool huge : {true, false}) {
    NFP_ASSIGN_OR_RETURN(Mapping memory, Mapping::create(options.megabytes << 20, !huge));
    touch(pool, memory);
    (huge ? ceilings.read_gbs : ceilings.read_small_gbs) = bandwidth_of(pool, options.seconds, memory, kernels) * 1e-9;
  }
  return ceilings;
}

Result<std::vector<ThreadRate>> measure_thread_rates(std::span<const int> counts, const std::vector<CpuPlace>& places,
                                                     const KernelTable& kernels) {
  constexpr size_t kBytes = size_t{128} << 20;
  constexpr double kSeconds = 0.015;
  NFP_ASSIGN_OR_RETURN(Mapping memory, Mapping::create(kBytes));
  std::vector<ThreadRate> rates;
  for (const int count : counts) {
    std::vector<std::vector<int>> own;  // so that rates are those of as many cores
    for (const int cpu : thread_cpus(places, count)) own.push_back({cpu});
    ThreadPool pool(count, std::move(own));
    if (rates.empty()) touch(pool, memory);
    rates.push_back({count, bandwidth_of(pool, kSeconds, memory, kernels) * 1e-9,
                     rate_of(pool, kSeconds, kernels.fma_loop) * 1e-9});
  }
  return rates;
}

}  // namespace nfp::cpu
