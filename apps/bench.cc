// nestedfp bench: speed by batch size and precision.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "backend/cpu/machine.h"
#include "base/process_memory.h"
#include "eval/benchmark.h"
#include "flags.h"
#include "verbs.h"

namespace nfp {
namespace {

struct BenchFlags {
  ModelFlags model;
  BenchmarkOptions options;
  std::string precisions = "fp16,fp8";
  bool machine = false;
  bool json = false;
};

using Ceilings = std::optional<cpu::MachineCeilings>;

// The rate that bounds a row's arithmetic: FP8 steps run on BF16 dot products where the kernels in use have them.
double arithmetic_ceiling(const cpu::MachineCeilings& ceilings, const LoadedModel& loaded, Precision precision) {
  const bool dots = !is_exact(precision) && loaded.backend->info().kernels == "avx512bf16";
  return dots ? ceilings.bf16_gflops : ceilings.fma_gflops;
}

Result<std::vector<Precision>> parse_precisions(const std::string& text) {
  std::vector<Precision> found;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string name = text.substr(at, comma - at);
    const auto precision = precision_from_name(name);
    if (!precision) {
      return error(ErrorCode::kUsage, "--precisions: '{}' is unknown; use fp16, fp8 and fp8-w8a8, with commas", name);
    }
    found.push_back(*precision);
    at = comma + 1;
  }
  return found;
}

void print_json(const BenchFlags& flags, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows,
                size_t peak_memory, const Ceilings& ceilings) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const BenchmarkRow& row : rows) {
    nlohmann::ordered_json stages = nlohmann::ordered_json::object();
    for (const StageTime& stage : row.stages) stages[std::string(stage.stage)] = stage.seconds * 1e6;
    list.push_back({{"test", row.test},
                    {"precision", name_of(row.precision)},
                    {"batch", row.batch},
                    {"tokens_per_s", row.tokens_per_s},
                    {"step_ms", row.step_ms},
                    {"weight_gb_per_s", row.weight_gb_per_s},
                    {"gflop_per_s", row.gflop_per_s},
                    {"stage_us", stages}});
    if (ceilings) {
      list.back()["share_of_read"] = row.weight_gb_per_s / ceilings->read_gbs;
      list.back()["share_of_arithmetic"] = row.gflop_per_s / arithmetic_ceiling(*ceilings, loaded, row.precision);
    }
  }
  nlohmann::ordered_json out = {{"model", flags.model.model},         {"device", loaded.backend->info().device},
                                {"prompt", flags.options.prompt},     {"context", flags.options.context},
                                {"generate", flags.options.generate}, {"repeats", flags.options.repeats},
                                {"load_s", loaded.load_seconds},      {"weight_bytes", loaded.model->weight_bytes()},
                                {"peak_memory_bytes", peak_memory},   {"rows", list}};
  if (ceilings) {
    out["machine"] = {{"threads", loaded.backend->info().threads},
                      {"read_gb_per_s", ceilings->read_gbs},
                      {"read_4k_pages_gb_per_s", ceilings->read_small_gbs},
                      {"fma_gflop_per_s", ceilings->fma_gflops},
                      {"bf16_dot_gflop_per_s", ceilings->bf16_gflops}};
  }
  fmt::print("{}\n", out.dump(2));
}

// "42.9 (71%)", the share only where the ceiling is known.
std::string with_share(double value, double ceiling) {
  return ceiling > 0 ? fmt::format("{:.1f} ({:.0f}%)", value, 100 * value / ceiling) : fmt::format("{:.1f}", value);
}

void print_table(const BenchFlags& flags, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows,
                 size_t peak_memory, const Ceilings& ceilings) {
  fmt::print("{}\n", loaded.backend->info().device);
  fmt::print("prefill: prompts of {} tokens; decode: {} tokens from a context of {}; medians of {}\n\n",
             flags.options.prompt, flags.options.generate, flags.options.context, flags.options.repeats);
  fmt::print("{:<8} {:<9} {:>5} {:>11} {:>10} {:>13} {:>14}   microseconds a step\n", "test", "precision", "batch",
             "tokens/s", "step ms", "weights GB/s", "GFLOP/s");
  for (const BenchmarkRow& row : rows) {
    const double read = ceilings ? ceilings->read_gbs : 0;
    const double arithmetic = ceilings ? arithmetic_ceiling(*ceilings, loaded, row.precision) : 0;
    fmt::print("{:<8} {:<9} {:>5} {:>11.1f} {:>10.3f} {:>13} {:>14}  ", row.test, name_of(row.precision), row.batch,
               row.tokens_per_s, row.step_ms, with_share(row.weight_gb_per_s, read),
               with_share(row.gflop_per_s, arithmetic));
    for (const StageTime& stage : row.stages) fmt::print(" {} {:.0f}", stage.stage, stage.seconds * 1e6);
    fmt::print("\n");
  }
  fmt::print("\nweights {} (one copy); load {:.2f} s; peak memory {}\n", human_bytes(loaded.model->weight_bytes()),
             loaded.load_seconds, human_bytes(peak_memory));
  if (!ceilings) return;
  fmt::print(
      "this machine on {} threads: reads {:.1f} GB/s from huge pages ({:.1f} from 4 KB pages), FP32 {:.0f} GFLOP/s",
      loaded.backend->info().threads, ceilings->read_gbs, ceilings->read_small_gbs, ceilings->fma_gflops);
  if (ceilings->bf16_gflops > 0) fmt::print(", BF16 dot products {:.0f} GFLOP/s", ceilings->bf16_gflops);
  fmt::print("\n");
}

Status run(const BenchFlags& flags) {
  BenchmarkOptions options = flags.options;
  NFP_ASSIGN_OR_RETURN(options.precisions, parse_precisions(flags.precisions));
  options.kv_dtype = flags.model.kv_dtype_value();
  NFP_ASSIGN_OR_RETURN(const auto loaded, flags.model.load());
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  const auto progress = [&](const std::string& what, int32_t done, int32_t total) {
    if (terminal) fmt::print(stderr, "\r\033[K{}/{} {}", done + 1, total, what);
  };
  NFP_ASSIGN_OR_RETURN(const std::vector<BenchmarkRow> rows, run_benchmark(*loaded, options, progress));
  if (terminal) fmt::print(stderr, "\r\033[K");
  const size_t peak = process_memory().peak;  // before the measurement below takes its own
  Ceilings ceilings;
  if (flags.machine) {
    NFP_ASSIGN_OR_RETURN(ceilings, cpu::measure_machine({.threads = loaded->backend->info().threads}));
  }
  if (flags.json) {
    print_json(flags, *loaded, rows, peak, ceilings);
  } else {
    print_table(flags, *loaded, rows, peak, ceilings);
  }
  return ok_status();
}

}  // namespace

void add_bench(CLI::App& app, Status& status) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* verb = app.add_subcommand("bench", "Measure prefill and decode speed");
  verb->footer("Example:\n  nestedfp bench model.gguf --batch 1 8 32 --precisions fp16,fp8,fp8-w8a8 --json");
  flags->model.add_to(*verb);
  BenchmarkOptions& options = flags->options;
  verb->add_option("--batch", options.batches, "sequences decoded together (several may be given)")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  verb->add_option("--precisions", flags->precisions, "precisions to measure, with commas")->capture_default_str();
  verb->add_option("--prompt", options.prompt, "tokens of a prompt in the prefill test")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--context", options.context, "tokens of context when decoding starts")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--generate", options.generate, "tokens decoded a sequence")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  verb->add_option("--repeats", options.repeats, "runs of each test, interleaved; medians are shown")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  verb->add_option("--step-tokens", options.max_step_tokens, "tokens a step at most (chunked prefill)")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_flag(
      "--machine", flags->machine,
      "also measure what this machine can do at most (reading memory, arithmetic) on the same threads, and show "
      "each result as a share of it");
  verb->add_flag("--json", flags->json, "print one JSON object");
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
