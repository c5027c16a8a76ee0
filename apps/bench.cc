// nestedfp bench: speed by batch size and precision.
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/process_memory.h"
#include "engine/benchmark.h"
#include "flags.h"
#include "verbs.h"

namespace nfp {
namespace {

struct Flags {
  ModelFlags model;
  BenchmarkOptions options;
  std::string precisions = "fp16,fp8";
  bool json = false;
};

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

void print_json(const Flags& flags, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows) {
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
                    {"stage_us", stages}});
  }
  const nlohmann::ordered_json out = {{"model", flags.model.model},
                                      {"device", loaded.backend->info().device},
                                      {"prompt", flags.options.prompt},
                                      {"context", flags.options.context},
                                      {"generate", flags.options.generate},
                                      {"repeats", flags.options.repeats},
                                      {"load_s", loaded.load_seconds},
                                      {"weight_bytes", loaded.model->weight_bytes()},
                                      {"peak_memory_bytes", process_memory().peak},
                                      {"rows", list}};
  fmt::print("{}\n", out.dump(2));
}

void print_table(const Flags& flags, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows) {
  fmt::print("{}\n", loaded.backend->info().device);
  fmt::print("prefill: prompts of {} tokens; decode: {} tokens from a context of {}; medians of {}\n\n",
             flags.options.prompt, flags.options.generate, flags.options.context, flags.options.repeats);
  fmt::print("{:<8} {:<9} {:>5} {:>11} {:>10} {:>13}   microseconds a step\n", "test", "precision", "batch", "tokens/s",
             "step ms", "weights GB/s");
  for (const BenchmarkRow& row : rows) {
    fmt::print("{:<8} {:<9} {:>5} {:>11.1f} {:>10.3f} {:>13.1f}  ", row.test, name_of(row.precision), row.batch,
               row.tokens_per_s, row.step_ms, row.weight_gb_per_s);
    for (const StageTime& stage : row.stages) fmt::print(" {} {:.0f}", stage.stage, stage.seconds * 1e6);
    fmt::print("\n");
  }
  fmt::print("\nweights {} (one copy); load {:.2f} s; peak memory {}\n", human_bytes(loaded.model->weight_bytes()),
             loaded.load_seconds, human_bytes(process_memory().peak));
}

Status run(const Flags& flags) {
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
  if (flags.json) {
    print_json(flags, *loaded, rows);
  } else {
    print_table(flags, *loaded, rows);
  }
  return ok_status();
}

}  // namespace

void add_bench(CLI::App& app, Status& status) {
  auto flags = std::make_shared<Flags>();
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
  verb->add_flag("--json", flags->json, "print one JSON object");
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
