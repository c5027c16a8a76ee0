#include "bench_modes.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdio>

#include "base/log.h"
#include "engine/step_log.h"
#include "eval/step_breakdown.h"
#include "eval/switching.h"
#include "json_output.h"
#include "report_file.h"

namespace nfp {
namespace {

constexpr char kMethod[] =
    "Requests of random tokens, greedy, to their last token whatever is sampled; no prefix is cached, no text is made; "
    "every shape runs before it counts; medians of --repeats. This is how vLLM's figures are measured that ours are "
    "compared with (temperature 0, ignore_eos, prefix caching off, detokenize off, all prompts given to the engine at "
    "once).";
constexpr char kShared[] =
    "A mode also takes what `nestedfp bench --help` lists under Options, such as --precisions, --device and --json.\n";

template <typename Row>
nlohmann::ordered_json to_list(const std::vector<Row>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) list.push_back(to_json(row));
  return list;
}

void tell_line(const std::string& text) { log::say("{}\n", text); }

// A row as it is measured: what the mode prints, unless that is JSON.
void print_row(const BenchFlags& common, const std::string& text) {
  if (common.json) return tell_line(text);
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

CLI::Option* add_counts(CLI::App& app, const char* name, std::vector<int32_t>& values, const char* what) {
  return app.add_option(name, values, what)->check(CLI::Range(1, 1 << 20))->capture_default_str();
}

int32_t largest(const std::vector<int32_t>& values) { return *std::max_element(values.begin(), values.end()); }

}  // namespace

Result<std::vector<Precision>> BenchFlags::precision_list() const {
  const std::string text = precisions == "auto" ? "fp16,fp8" : precisions;
  std::vector<Precision> found;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string name = text.substr(at, comma - at);
    const auto precision = precision_from_name(name);
    if (!precision) {
      return error(ErrorCode::kUsage, "--precisions: '{}' is unknown; use auto, or fp16, fp8 and fp8-w8a8 with commas",
                   name);
    }
    found.push_back(*precision);
    at = comma + 1;
  }
  return found;
}

Status BenchFlags::resolve() {
  NFP_ASSIGN_OR_RETURN(const std::vector<Precision> list, precision_list());
  const bool exact = std::any_of(list.begin(), list.end(), is_exact);
  model.precision = name_of(exact ? Precision::kFp16 : list.front());
  return ok_status();
}

Result<Ceilings> BenchFlags::measure(const LoadedModel& loaded) const {
  if (!machine || loaded.backend->info().name != "cpu") return Ceilings();
  NFP_ASSIGN_OR_RETURN(const cpu::MachineCeilings found,
                       cpu::measure_machine({.threads = loaded.backend->info().threads}));
  return Ceilings(found);
}

Result<std::unique_ptr<LoadedModel>> BenchFlags::load(bool needs_sensitivity, int32_t context,
                                                      const std::string& flags) const {
  NFP_ASSIGN_OR_RETURN(auto loaded, model.load(needs_sensitivity, context, flags));
  loaded->tokenizer.reset();
  return loaded;
}

EngineConfig BenchFlags::engine(int32_t ctx, int32_t max_sequences) const {
  EngineConfig config = model.engine_config();
  config.max_context = std::max(ctx, model.ctx);
  config.limits.max_sequences = max_sequences;
  config.limits.max_step_tokens = step_tokens;
  return config;
}

// ---- latency -------------------------------------------------------------------------------------------------------

void LatencyMode::add_to(CLI::App& bench) {
  verb = bench.add_subcommand("latency", "One batch at a time: time to first token and time of a decode step");
  verb->fallthrough();
  verb->footer(
      std::string(kShared) + kMethod +
      "\nThe decode step is the median time between two results, over steps that decode the whole batch; there are "
      "none where --output is smaller than the number of steps that compute the prompts.\n"
      "Example:\n  nestedfp bench MODEL latency --input 128 --output 128 --batch 1 8 32 --breakdown --json");
  add_counts(*verb, "--batch", options.batches, "requests submitted together (several may be given)");
  add_counts(*verb, "--input", options.inputs, "tokens of a prompt (several may be given)");
  verb->add_option("--output", options.output, "tokens sampled a request; 1 measures the time to first token alone")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_flag(
      "--breakdown", breakdown,
      "also time each kind of operation by itself, in runs of their own without graphs: microseconds, bytes, "
      "FLOPs and share of the device's limits (a known GPU's data sheet; --machine measures a CPU)");
  verb->add_flag("--switching", switching,
                 "also decode with the precision changing at every step, FP16 and each of --precisions in turn, and "
                 "compare with the mean of the two");
}

Status LatencyMode::run(const BenchFlags& common) const {
  LatencyOptions wanted = options;
  wanted.repeats = common.repeats;
  if (switching && common.model.speculative_tokens > 0) {
    return error(ErrorCode::kUsage, "--switching compares plain steps: leave --speculative-tokens out");
  }
  NFP_ASSIGN_OR_RETURN(wanted.precisions, common.precision_list());
  const int32_t context = largest(wanted.inputs) + wanted.output;
  NFP_ASSIGN_OR_RETURN(const auto loaded, common.load(false, context, "--input and --output"));
  for (Precision& precision : wanted.precisions) precision = common.on_device(precision, *loaded);
  EngineConfig served = common.engine(context, largest(wanted.batches));
  nlohmann::ordered_json breakdowns = nlohmann::ordered_json::array();
  std::vector<LatencyRow> rows;
  std::vector<SwitchingRow> switches;
  {
    NFP_ASSIGN_OR_RETURN(const auto engine, BenchEngine::create(*loaded, served));
    served.limits = engine->config().limits;  // what was left open is chosen
    NFP_ASSIGN_OR_RETURN(
        rows, measure_latency(*engine, wanted, [&](const LatencyRow& row) { print_row(common, to_text(row)); }));
    for (const LatencyRow& row : rows) {
      if (!switching || is_exact(row.precision)) continue;
      NFP_ASSIGN_OR_RETURN(switches.emplace_back(), measure_switching(*engine, row.batch, {row.input, row.output},
                                                                      row.precision, wanted.repeats));
      print_row(common, to_text(switches.back()));
    }
  }
  NFP_ASSIGN_OR_RETURN(const Ceilings ceilings, common.measure(*loaded));
  const std::optional<DeviceLimits> limits = device_limits(*loaded, ceilings);
  if (breakdown) {
    served.graphs = false;
    served.speculative_tokens = 0;
    for (const LatencyRow& row : rows) {
      const BreakdownCase c = {row.batch, row.input};
      served.max_context = std::max(served.max_context, row.input + c.output(served.limits.max_step_tokens));
    }
    NFP_ASSIGN_OR_RETURN(const auto engine, BenchEngine::create(*loaded, served));
    for (const LatencyRow& row : rows) {
      NFP_ASSIGN_OR_RETURN(const auto parts, break_down(*engine, {row.batch, row.input}, row.precision, limits));
      for (const StepBreakdown& part : parts) {
        print_row(common, to_text(part));
        breakdowns.push_back(to_json(part));
      }
    }
  }
  if (!common.json) return ok_status();
  nlohmann::ordered_json out = report_head(*loaded, limits);
  out["mode"] = "latency";
  out["step_tokens"] = served.limits.max_step_tokens;
  out["repeats"] = common.repeats;
  out["rows"] = to_list(rows);
  if (breakdown) out["breakdown"] = breakdowns;
  if (switching) out["switching"] = to_list(switches);
  print_indented(out, 1);
  return ok_status();
}

// ---- throughput ----------------------------------------------------------------------------------------------------

void ThroughputMode::add_to(CLI::App& bench) {
  verb = bench.add_subcommand("throughput", "Many requests at once: tokens a second, prefill included");
  verb->fallthrough();
  verb->footer(std::string(kShared) + kMethod +
               "\nExamples:\n  nestedfp bench MODEL throughput --requests 32 128 256 --input 1024 --output 512\n"
               "  nestedfp bench MODEL throughput --requests 500 --trace AzureLLMInferenceTrace_conv.csv");
  add_counts(*verb, "--requests", requests, "submitted at once (several may be given)");
  CLI::Option* in = verb->add_option("--input", input, "tokens of a prompt")->check(CLI::Range(1, 1 << 20));
  CLI::Option* out = verb->add_option("--output", output, "tokens sampled a request")->check(CLI::Range(1, 1 << 20));
  in->capture_default_str();
  out->capture_default_str();
  verb->add_option("--trace", trace,
                   "take lengths from this CSV file (columns ContextTokens and GeneratedTokens), of its first requests "
                   "that fit --ctx; when they came does not count")
      ->excludes(in)
      ->excludes(out);
  verb->add_option("--max-sequences", max_sequences, "requests computed at once at most")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  verb->add_option(
      "--step-log", step_log,
      "write every step as a line to this CSV file: tokens, precision, time; those that warm up come first");
}

Status ThroughputMode::run(const BenchFlags& common) const {
  constexpr int32_t kTraceContext = 4096;  // longer requests of a trace are left out
  NFP_RETURN_IF_ERROR(
      check_no_overlap({{"--step-log", step_log}},
                       {{"MODEL", common.model.model}, {"--trace", trace}, {"--calibrate", common.model.calibrate}}));
  ThroughputOptions options;
  options.repeats = common.repeats;
  NFP_ASSIGN_OR_RETURN(options.precisions, common.precision_list());
  int32_t ctx = input + output;
  if (trace.empty()) {
    for (const int32_t count : requests) options.loads.emplace_back(count, BenchRequest{input, output});
  } else {
    ctx = common.model.ctx > 0 ? common.model.ctx : kTraceContext;
    NFP_ASSIGN_OR_RETURN(const std::string text, read_flag_file("--trace", trace));
    for (const int32_t count : requests) {
      NFP_ASSIGN_OR_RETURN(options.loads.emplace_back(), parse_trace(text, trace, count, ctx));
    }
  }
  std::unique_ptr<StepLog> log;
  if (!step_log.empty()) {
    NFP_ASSIGN_OR_RETURN(log, StepLog::create(step_log));
  }
  NFP_ASSIGN_OR_RETURN(
      const auto loaded,
      common.load(false, ctx, trace.empty() ? "--input and --output" : "--ctx (4096 with --trace unless given)"));
  for (Precision& precision : options.precisions) precision = common.on_device(precision, *loaded);
  const EngineConfig served = common.engine(ctx, std::min(largest(requests), max_sequences));
  NFP_ASSIGN_OR_RETURN(const auto engine, BenchEngine::create(*loaded, served));
  if (log) engine->on_recorded = [&log](const StepRecord& step) { log->add(step); };
  NFP_ASSIGN_OR_RETURN(
      const std::vector<ThroughputRow> rows,
      measure_throughput(*engine, options, [&](const ThroughputRow& row) { print_row(common, to_text(row)); }));
  if (!common.json) return ok_status();
  nlohmann::ordered_json out = report_head(*loaded, std::nullopt);
  out["mode"] = "throughput";
  out["step_tokens"] = engine->config().limits.max_step_tokens;
  out["repeats"] = common.repeats;
  if (trace.empty()) {
    out["input"] = input;
    out["output"] = output;
  } else {
    out["trace"] = trace;
  }
  out["rows"] = to_list(rows);
  print_indented(out, 1);
  return ok_status();
}

// ---- steps ---------------------------------------------------------------------------------------------------------

void StepsMode::add_to(CLI::App& bench) {
  verb = bench.add_subcommand("steps", "A table of step times by tokens, sequences, context and precision, as JSON");
  verb->fallthrough();
  verb->footer(
      std::string(kShared) + kMethod +
      "\nThe table is written to standard output; docs/step-times.md describes its format.\n"
      "Example:\n  nestedfp bench MODEL steps --prefill 256 1024 --sequences 1 32 --contexts 128 1024 > t.json");
  add_counts(*verb, "--prefill", options.prefill,
             "tokens of prompts computed alone; longer ones than --step-tokens give a row for each chunk");
  add_counts(*verb, "--sequences", options.sequences, "decoded together");
  add_counts(*verb, "--contexts", options.contexts, "tokens of each decoded sequence, each with each of --sequences");
  add_counts(*verb, "--mixed", options.mixed, "prompt tokens computed beside each of these decodes");
  verb->add_option("--decode-steps", options.decode_steps, "decode steps of a kind")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--fp8-shares", fp8_shares,
                   "shares of the weights in FP8, in precisions that have it, those that it harms least first: as "
                   "--calibrate or a converted model says, else by kind of layer")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
}

Status StepsMode::run(const BenchFlags& common) const {
  StepTimesOptions wanted = options;
  wanted.repeats = common.repeats;
  wanted.levels.clear();
  NFP_ASSIGN_OR_RETURN(const std::vector<Precision> precisions, common.precision_list());
  bool shares = false;
  for (const Precision precision : precisions) {
    for (const double share : fp8_shares) {
      if (is_exact(precision) && share != fp8_shares.front()) continue;
      shares = shares || share < 1;
      wanted.levels.push_back({precision, share});
    }
  }
  NFP_ASSIGN_OR_RETURN(const auto loaded,
                       common.load(shares, wanted.context_needed(), "--prefill, --contexts and --mixed"));
  for (BenchLevel& level : wanted.levels) level.precision = common.on_device(level.precision, *loaded);
  NFP_ASSIGN_OR_RETURN(const auto engine,
                       BenchEngine::create(*loaded, common.engine(wanted.context_needed(), wanted.sequences_needed())));
  NFP_ASSIGN_OR_RETURN(const StepTable table, measure_step_times(*engine, wanted, tell_line));
  fmt::print("{}\n", to_json_text(table));
  return ok_status();
}

}  // namespace nfp
