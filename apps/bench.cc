// nestedfp bench: speed by batch size and precision; its modes measure the three shapes of use.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "backend/cpu/ceilings.h"
#include "base/log.h"
#include "base/process_memory.h"
#include "bench_modes.h"
#include "bench_report.h"
#include "status_line.h"
#include "verbs.h"

namespace nfp {
namespace {

struct BenchVerb {
  BenchFlags common;
  BenchmarkOptions options;
  std::vector<CLI::Option*> own;  // not for the modes
  CLI::Option* step_tokens = nullptr;
  LatencyMode latency;
  ThroughputMode throughput;
  StepsMode steps;
};

Status run(const BenchVerb& flags) {
  BenchmarkOptions options = flags.options;
  options.repeats = flags.common.repeats;
  options.max_step_tokens = flags.step_tokens->count() > 0 ? flags.common.step_tokens : options.max_step_tokens;
  options.kv_dtype = flags.common.model.kv_dtype_value();
  NFP_ASSIGN_OR_RETURN(options.precisions, flags.common.precision_list());
  NFP_ASSIGN_OR_RETURN(const auto loaded,
                       flags.common.model.load(false, options.context_needed(), "--prompt, --context and --generate"));
  for (Precision& precision : options.precisions) precision = flags.common.on_device(precision, *loaded);
  const bool terminal = takes_escapes(STDERR_FILENO);
  const auto progress = [&](const std::string& what, int32_t done, int32_t total) {
    if (terminal) draw_status_line(fmt::format("{}/{} {}", done + 1, total, what));
  };
  std::optional<cpu::ReadProbe> probe;
  if (flags.common.machine && loaded->backend->info().name == "cpu") {
    NFP_ASSIGN_OR_RETURN(probe, cpu::ReadProbe::create({.threads = loaded->backend->info().threads, .megabytes = 256}));
    options.read_rate = [&probe] { return probe->gbs(); };
  }
  NFP_ASSIGN_OR_RETURN(const std::vector<BenchmarkRow> rows, run_benchmark(*loaded, options, progress));
  if (terminal) clear_status_line();
  const size_t peak =
      process_memory().peak - (probe ? probe->bytes() : 0);  // before the measurement below takes its own
  NFP_ASSIGN_OR_RETURN(const Ceilings ceilings, flags.common.measure(*loaded));
  (flags.common.json ? print_json : print_table)(options, *loaded, rows, peak, ceilings);
  return ok_status();
}

Status run_mode(const BenchVerb& flags) {
  for (const CLI::Option* option : flags.own) {
    if (option->count() > 0) {
      return error(ErrorCode::kUsage, "{} is not for a mode; see nestedfp bench MODE --help", option->get_name());
    }
  }
  if (flags.common.machine && !flags.latency.verb->parsed()) {
    return error(ErrorCode::kUsage, "--machine is not for this mode, which shows no shares of what a machine can do");
  }
  if (flags.latency.verb->parsed()) return flags.latency.run(flags.common);
  if (flags.throughput.verb->parsed()) return flags.throughput.run(flags.common);
  return flags.steps.run(flags.common);
}

// Says which flags that were given mean nothing to the precisions that are measured.
void warn_of_idle_flags(const CLI::App& verb, const BenchVerb& flags) {
  const BenchFlags& common = flags.common;
  const auto list = common.precision_list();
  if (!list.ok()) return;
  const auto exact = std::count_if(list->begin(), list->end(), is_exact);
  if (exact == 0) warn_of_idle_speculation(common.model.speculative_tokens, common.precisions);
  if (exact < std::ssize(*list)) return;
  const std::string only = "--precisions " + common.precisions;
  if (common.model.speculative_tokens == 0) warn_of_idle_fp8_flags(verb, only);
  if (flags.latency.switching)
    log::warn("--switching: does nothing, as there is nothing to switch to: {} has no FP8", only);
}

}  // namespace

void add_bench(CLI::App& app, Status& status) {
  auto flags = std::make_shared<BenchVerb>();
  CLI::App* verb = app.add_subcommand("bench", "Measure prefill and decode speed");
  verb->footer(
      "Examples:\n"
      "  nestedfp bench model.gguf --batch 1 8 32 --precisions fp16,fp8,fp8-w8a8 --json\n"
      "  nestedfp bench MODEL latency --input 1024 --output 128 --batch 1 8 32\n"
      "  nestedfp bench MODEL throughput --requests 256 --input 1024 --output 512\n"
      "  nestedfp bench MODEL steps > step-times.json");
  BenchFlags& common = flags->common;
  common.model.add_to(*verb);
  verb->remove_option(verb->get_option("--precision"));  // here another name of --precisions
  verb->get_option("MODEL")->required(
      false);  // by itself: required ones take the name of a mode that comes before them
  BenchmarkOptions& options = flags->options;
  flags->own.push_back(verb->add_option("--batch", options.batches, "sequences decoded together (several may be given)")
                           ->check(CLI::Range(1, 4096))
                           ->capture_default_str());
  flags->own.push_back(verb->add_option("--prompt", options.prompt, "tokens of a prompt in the prefill test")
                           ->check(CLI::Range(1, 1 << 20))
                           ->capture_default_str());
  flags->own.push_back(verb->add_option("--context", options.context, "tokens of context when decoding starts")
                           ->check(CLI::Range(1, 1 << 20))
                           ->capture_default_str());
  flags->own.push_back(verb->add_option("--generate", options.generate, "tokens decoded a sequence")
                           ->check(CLI::Range(2, 1 << 20))
                           ->capture_default_str());
  for (CLI::Option* option : flags->own) option->group("Without a mode");
  verb->add_option("--precisions,--precision", common.precisions,
                   "precisions to measure, with commas; auto: fp16, and fp8 on a CPU, fp8-w8a8 on a GPU")
      ->capture_default_str();
  verb->add_option("--repeats", common.repeats, "runs of each test, interleaved; medians are shown")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  flags->step_tokens =
      verb->add_option(
              "--step-tokens", common.step_tokens,
              "tokens a step at most (chunked prefill); default 512, in a mode as serve: 2048 on a CPU, 8192 on "
              "a GPU")
          ->check(CLI::Range(1, 1 << 20));
  verb->add_flag(
      "--machine", common.machine,
      "also measure what this machine can do at most (reading memory, arithmetic) on the same threads, and show "
      "each result as a share of it (latency: of --breakdown); not for throughput and steps; without a mode also the "
      "rate of reading before and after each run (in JSON)");
  verb->add_flag("--json", common.json, "print one JSON object");
  flags->latency.add_to(*verb);
  flags->throughput.add_to(*verb);
  for (CLI::App* mode : {flags->latency.verb, flags->throughput.verb}) common.model.add_speculation(*mode);
  flags->steps.add_to(*verb);
  verb->require_subcommand(0, 1);
  verb->callback([flags, verb, &status] {
    if (flags->common.model.model.empty()) throw CLI::RequiredError("MODEL");
    status = flags->common.resolve();
    if (!status.ok()) return;
    warn_of_idle_flags(*verb, *flags);
    status = verb->get_subcommands().empty() ? run(*flags) : run_mode(*flags);
  });
}

}  // namespace nfp
