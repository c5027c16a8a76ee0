// The modes of `nestedfp bench`: the three shapes of use. Flags and wiring.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "bench_report.h"
#include "eval/latency.h"
#include "eval/step_times.h"
#include "eval/throughput.h"
#include "flags.h"

namespace nfp {

// Of the verb and of all its modes.
struct BenchFlags {
  ModelFlags model;
  std::string precisions = "auto";
  int32_t repeats = 3;
  int32_t step_tokens = 0;  // of a mode; 0 = the backend's default
  bool machine = false;
  bool json = false;

  BenchFlags() { model.needs_tokenizer = false; }

  // Error: --precisions that are none. Call before all others: --baseline, too, is checked against these.
  Status resolve();
  // "auto" is FP16 and FP8, in the form that on_device() then gives it.
  Result<std::vector<Precision>> precision_list() const;
  Precision on_device(Precision precision, const LoadedModel& loaded) const {
    return precisions == "auto" && !is_exact(precision) ? loaded.backend->fastest_fp8() : precision;
  }
  // With --machine, for the CPU.
  Result<Ceilings> measure(const LoadedModel& loaded) const;
  // Without its tokenizer: tokens are made up and stay tokens.
  Result<std::unique_ptr<LoadedModel>> load(bool needs_sensitivity, int32_t context, const std::string& flags) const;
  EngineConfig engine(int32_t ctx, int32_t max_sequences) const;
};

struct LatencyMode {
  CLI::App* verb = nullptr;
  LatencyOptions options;
  bool breakdown = false;
  bool switching = false;

  void add_to(CLI::App& bench);
  Status run(const BenchFlags& common) const;
};

struct ThroughputMode {
  CLI::App* verb = nullptr;
  std::vector<int32_t> requests = {32};
  int32_t input = 1024;
  int32_t output = 512;
  std::string trace;
  std::string step_log;
  int32_t max_sequences = 512;

  void add_to(CLI::App& bench);
  Status run(const BenchFlags& common) const;
};

struct StepsMode {
  CLI::App* verb = nullptr;
  StepTimesOptions options;
  std::vector<double> fp8_shares = {1.0};

  void add_to(CLI::App& bench);
  Status run(const BenchFlags& common) const;
};

}  // namespace nfp
