// nestedfp replay: a request trace against a simulated machine or a running server.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "base/log.h"
#include "base/stop_signals.h"
#include "engine/engine_config.h"
#include "policy/slo_policy.h"
#include "progress_bar.h"
#include "replay/http_load.h"
#include "replay/report.h"
#include "replay/simulator.h"
#include "replay/step_source.h"
#include "replay/trace.h"
#include "report_file.h"
#include "text/utf8.h"
#include "verbs.h"

namespace nfp {
namespace {

struct ReplayFlags {
  std::string trace;
  std::string table;
  StepSource source;
  double table_scale = 1;
  std::vector<std::string> policies = {"fp16", "threshold:1024", "slo-fp16", "slo-fp8", "slo"};
  std::vector<double> rates;
  TraceSelection selection;
  SimulationOptions simulation;
  bool find_rate = false;
  double attainment = 0.95;
  std::vector<std::string> goodput;
  std::vector<double> fp8_levels;
  std::string slo_missed = "last";
  bool as_served = false, exact_decode = false, send_targets = false;
  bool sequences_given = false, step_tokens_given = false, uneven_given = false,
       steps_in_flight_given = false;  // in `simulation`
  std::vector<std::string> kl;
  HttpLoadOptions http;
  std::string json, csv, html, command;
};

// `bar` and `what` must outlive what comes back.
ReplayProgress drawn_by(ProgressBar& bar, const std::string& what) {
  return [draw = bar.callback(), &what](size_t done, size_t total) {
    if (draw) draw({what, done, total});
  };
}

// The files to write, opened before anything is played.
struct Outputs {
  std::optional<AtomicFile> json, csv, html;
};
Result<Outputs> open_outputs(const ReplayFlags& flags) {
  NFP_RETURN_IF_ERROR(check_no_overlap({{"--json", flags.json}, {"--csv", flags.csv}, {"--html", flags.html}},
                                       {{"TRACE", flags.trace}, {"--simulate", flags.table}}));
  Outputs files;
  NFP_ASSIGN_OR_RETURN(files.json, open_report(flags.json));
  NFP_ASSIGN_OR_RETURN(files.csv, open_report(flags.csv));
  NFP_ASSIGN_OR_RETURN(files.html, open_report(flags.html));
  return files;
}

class Simulation {
 public:
  // `of_slo`: with the levels that slo may choose from, where they are not the model's.
  Simulation(const ReplayFlags& flags, const Trace& trace, StepModel model, std::optional<StepModel> of_slo)
      : flags_(flags), trace_(trace), model_(model), reference_(std::move(model)), of_slo_(std::move(of_slo)) {
    options_ = flags.simulation;
    model_.scale(options_.slowdown);
    if (of_slo_) of_slo_->scale(options_.slowdown);
    for (const StepLevel& level : model_.levels()) {
      if (!is_exact(level.precision)) options_.fp8 = level.precision;
    }
  }

  Result<std::unique_ptr<PrecisionPolicy>> make_policy(const std::string& policy) const {
    if (const auto levels = parse_slo_levels(policy)) {
      SloOptions slo;
      slo.levels = *levels;
      slo.missed = *parse_slo_missed(flags_.slo_missed);
      slo.exact_decode = flags_.exact_decode;
      return make_slo_policy(of_slo_ && *levels == SloOptions::Levels::kAll ? *of_slo_ : model_, slo);
    }
    const std::string_view text = policy == "fp8" ? name_of(options_.fp8) : std::string_view(policy);
    auto made = parse_policy(text, options_.fp8);
    if (made.ok()) {
      const Precision fp8 = precision_from_name(text).value_or(options_.fp8);
      if (is_exact(fp8) || model_.find_level(fp8, 1) < model_.levels().size()) return made;
      return error(ErrorCode::kUsage,
                   "--policies {}: the step times have no {}; measure it too, with nestedfp bench MODEL steps", policy,
                   name_of(fp8));
    }
    return error(ErrorCode::kUsage, "--policies: {} (or slo, slo-fp16, slo-fp8)", made.error().message);
  }

  Result<ReplayOutcome> run(const std::string& policy, double rate) const {
    TraceSelection selection = flags_.selection;
    selection.rate = rate;
    NFP_ASSIGN_OR_RETURN(const Trace part, select(trace_, selection));
    const auto make = [&] { return make_policy(policy); };
    const std::string what = rate > 0 ? fmt::format("{} at {:.2f}/s", policy, rate) : policy;
    ProgressBar bar;
    return simulate(part, model_, make, options_, drawn_by(bar, what));
  }
  ReplaySummary summary(const ReplayOutcome& outcome, const std::string& policy, const GoodputLimits& limits,
                        const KlCurve& kl) const {
    return summarize(outcome, policy, &reference_, options_.step_tokens(), limits, kl);
  }

  // The highest rate with that share of requests within 5 times of a request alone, to 1 %; 0: none holds, down to one
  // of hardly any requests.
  Result<double> highest_rate(const std::string& policy) const {
    constexpr double kLeast = 1e-3, kMost = 1e5;
    const auto holds = [&](double rate) -> Result<bool> {
      NFP_ASSIGN_OR_RETURN(const ReplayOutcome outcome, run(policy, rate));
      return *summary(outcome, policy, {}, {}).tight >= flags_.attainment;
    };
    double low = 0, high = 0.25;
    while (high < kMost && !leaves_requests(high)) high *= 2;  // of a short trace a low rate keeps none
    for (;;) {
      NFP_ASSIGN_OR_RETURN(const bool held, holds(high));
      if (!held) break;
      low = high;
      if (high >= kMost) return high;
      high *= 2;
    }
    while (high - low > 0.01 * high) {
      const double middle = (low + high) / 2;
      if (low == 0 && (middle < kLeast || !leaves_requests(middle))) return 0;
      NFP_ASSIGN_OR_RETURN(const bool held, holds(middle));
      (held ? low : high) = middle;
    }
    return low;
  }

 private:
  bool leaves_requests(double rate) const {
    TraceSelection selection = flags_.selection;
    selection.rate = rate;
    return select(trace_, selection).ok();
  }

  const ReplayFlags& flags_;
  const Trace& trace_;
  StepModel model_, reference_;  // of the machine, and of what requests take alone
  std::optional<StepModel> of_slo_;
  SimulationOptions options_;
};

Status finish(Outputs& files, const ReplayReport& report) {
  fmt::print("{}", to_text(report));
  NFP_RETURN_IF_ERROR(write_report(files.json, to_json(report) + "\n"));
  NFP_RETURN_IF_ERROR(write_report(files.csv, to_csv(report)));
  return write_report(files.html, to_html(report));
}

// The trace against a server. With --simulate the table says what a request takes alone.
Status play_server(const ReplayFlags& flags, const Trace& trace, const GoodputLimits& limits, const KlCurve& kl,
                   ReplayReport& report) {
  std::optional<StepModel> model;
  int32_t step_tokens = flags.simulation.max_step_tokens;
  if (!flags.table.empty()) {
    NFP_ASSIGN_OR_RETURN(const StepTable table, read_step_times(flags.table, flags.source));
    NFP_ASSIGN_OR_RETURN(model, StepModel::fit(table));
    model->scale(flags.table_scale);
    if (!flags.step_tokens_given) step_tokens = table.max_step_tokens;
  }
  HttpLoadOptions http = flags.http;
  http.seed = flags.selection.seed;
  if (flags.send_targets) {
    if (!model)
      return error(ErrorCode::kUsage, "--send-targets needs the step times that they follow from: --simulate");
    http.targets = [&](const TraceRequest& asked) -> HttpLoadOptions::Targets {
      TraceRequest two = asked;
      two.output = std::max(asked.output, 2);
      const AloneTimes times = alone(*model, two, step_tokens);
      return {flags.simulation.slo_factor * times.ttft_s, flags.simulation.slo_factor * times.tpot_s};
    };
  }
  report.machine = flags.http.url;
  for (const double rate : flags.rates.empty() ? std::vector<double>{0} : flags.rates) {
    TraceSelection selection = flags.selection;
    selection.rate = rate;
    NFP_ASSIGN_OR_RETURN(const Trace part, select(trace, selection));
    ProgressBar bar;
    NFP_ASSIGN_OR_RETURN(ReplayOutcome outcome, play_over_http(part, http, drawn_by(bar, flags.http.url)));
    report.rows.push_back(summarize(outcome, "server", model ? &*model : nullptr, step_tokens, limits, kl));
    report.outcomes.push_back(std::move(outcome));
    http.played += part.requests.size();  // the same prompts again would be in the server's prefix cache
  }
  return ok_status();
}

// A probe of some seconds that another program disturbed does not tell how uneven the machine is for hours.
constexpr double kMostUneven = 0.4;

// The defaults of `serve` (ServeFlags and EngineConfig), but for what was given; the step's limits are those that the
// table was measured with.
void serve_as_default(ReplayFlags& flags, const StepTable& table) {
  const EngineConfig served;
  if (!flags.send_targets) {
    flags.simulation.ttft_s = served.targets.ttft_s;
    flags.simulation.itl_s = served.targets.itl_s;
    flags.simulation.serve_least = kServeLeast;
  }
  if (!flags.steps_in_flight_given && table.steps_in_flight > 0) {
    flags.simulation.steps_in_flight = table.steps_in_flight;
  }
  if (!flags.sequences_given) flags.simulation.max_sequences = table.max_sequences;
  if (!flags.step_tokens_given) flags.simulation.max_step_tokens = table.max_step_tokens;
  if (flags.fp8_levels.empty()) flags.fp8_levels = served.fp8_levels;
  // The mean of evenly spread times then lies as far above the fastest as the median that was measured.
  if (!flags.uneven_given) flags.simulation.uneven = std::min(2 * table.spread, kMostUneven);
}

Status run(ReplayFlags flags) {
  const StopRemovesTemporaries stop;
  if (flags.http.url.empty() && flags.table.empty()) {
    return error(ErrorCode::kUsage, "say what to play the trace against: --simulate TABLE or --url URL");
  }
  if (!text::is_utf8(flags.http.model)) return error(ErrorCode::kUsage, "--model is not UTF-8: no server has it");
  NFP_ASSIGN_OR_RETURN(const GoodputLimits limits, parse_goodput(flags.goodput));
  NFP_ASSIGN_OR_RETURN(const KlCurve kl, parse_kl(flags.kl));
  NFP_ASSIGN_OR_RETURN(Outputs files, open_outputs(flags));
  NFP_ASSIGN_OR_RETURN(const Trace trace, read_trace_file(flags.trace));
  if (trace.skipped > 0) log::say("{} rows without a prompt or an answer are left out\n", trace.skipped);
  if (trace.unsorted > 0) log::say("{} rows were not in order of time and have been sorted\n", trace.unsorted);
  ReplayReport report;
  report.command = flags.command;
  report.trace = fmt::format("{} ({} requests at {:.2f}/s)", flags.trace, trace.requests.size(), trace.rate());
  if (!flags.http.url.empty()) {
    NFP_RETURN_IF_ERROR(play_server(flags, trace, limits, kl, report));
    return finish(files, report);
  }
  NFP_ASSIGN_OR_RETURN(const StepTable table, read_step_times(flags.table, flags.source));
  if (flags.as_served) serve_as_default(flags, table);
  NFP_ASSIGN_OR_RETURN(StepModel model, StepModel::fit(table));
  const StepModel::FitError fit = model.error_on(table.steps);
  log::say("{} on {}: {} steps, fitted within {:.1f} % (mean; 95 % of them within {:.1f} %)\n", table.model,
           table.device, table.steps.size(), 100 * fit.mean, 100 * fit.p95);
  model.scale(flags.table_scale);
  std::optional<StepModel> of_slo;
  if (!flags.fp8_levels.empty()) {
    std::vector<double> shares = flags.fp8_levels;
    std::erase(shares, 0.0);
    of_slo = model.at_shares(shares);
    // Other policies compute all weights in FP8 where they choose it, as in serve.
    if (std::find(shares.begin(), shares.end(), 1.0) == shares.end()) shares.push_back(1);
    model = model.at_shares(shares);
  }
  const Simulation simulation(flags, trace, std::move(model), std::move(of_slo));
  for (const std::string& policy : flags.policies) {
    if (const auto made = simulation.make_policy(policy); !made.ok()) return made.error();
  }

  report.machine = fmt::format("{}, {}, times {}", table.model, table.device, flags.table_scale);
  if (flags.find_rate) {
    report.attainment = flags.attainment;
    for (const std::string& policy : flags.policies) {
      NFP_ASSIGN_OR_RETURN(const double rate, simulation.highest_rate(policy));
      report.limits.push_back({policy, rate});
    }
  } else {
    const std::vector<double> rates = flags.rates.empty() ? std::vector<double>{0} : flags.rates;
    for (const double rate : rates) {
      for (const std::string& policy : flags.policies) {
        NFP_ASSIGN_OR_RETURN(ReplayOutcome outcome, simulation.run(policy, rate));
        report.rows.push_back(simulation.summary(outcome, policy, limits, kl));
        report.outcomes.push_back(std::move(outcome));
      }
    }
  }
  return finish(files, report);
}

void add_trace_flags(CLI::App& verb, ReplayFlags& f) {
  verb.add_option("TRACE", f.trace, "trace file")->required();
  verb.add_option("--simulate", f.table, "step times: what `bench MODEL steps` wrote (docs/step-times.md)");
  verb.add_option("--url", f.http.url,
                  "a server with OpenAI's API, http://HOST:PORT; with --simulate the table only says what a request "
                  "takes alone");
  verb.add_option("--model", f.http.model, "of --url: the model's name");
  verb.add_option("--api-key", f.http.api_key, "of --url");
  verb.add_option("--vocab", f.http.vocab, "of --url: prompts are of random token ids below this")
      ->check(CLI::Range(16, 1 << 24))
      ->capture_default_str();
  verb.add_flag(
      "--send-targets", f.send_targets,
      "with --url and --simulate, or --as-served: each request names its own targets, --slo-factor times what it takes "
      "alone");
  verb.add_option("--table-model", f.source.model,
                  "of a table of several models: the one of this name or, where there is none, whose name contains it");
  verb.add_option("--table-engine", f.source.engine, "likewise of several engines");
  verb.add_option("--table-scale", f.table_scale, "all step times times this")->check(CLI::Range(1e-3, 1e3));
  verb.add_option("--policies", f.policies,
                  "fp16, fp8, threshold:N, graded:LOW:HIGH, alternate:N, slo; slo-fp16, slo-fp8: slo in one precision")
      ->capture_default_str();
  verb.add_option("--rate", f.rates, "requests a second (several may be given); default: the trace's")
      ->check(CLI::Range(1e-6, 1e6));
  verb.add_option("--speed", f.selection.speed, "the trace's clock runs so many times as fast")
      ->check(CLI::Range(1e-6, 1e6));
  verb.add_option("--requests", f.selection.requests, "only the first so many")->check(CLI::Range(1, 1 << 30));
  verb.add_option("--max-tokens", f.selection.most_tokens, "leave out requests of more tokens, prompt and answer")
      ->check(CLI::Range(1, 1 << 30));
  verb.add_option("--seed", f.selection.seed,
                  "of which requests a lower rate keeps, and of the prompts that --url sends")
      ->capture_default_str();
  verb.add_option("--fp8-levels", f.fp8_levels,
                  "shares of the weights that slo may compute in FP8, as serve has it; those that the table lacks are "
                  "interpolated. Default: those of the table")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0));
  verb.add_flag("--exact-decode", f.exact_decode, "as serve has it");
  verb.add_option("--kl", f.kl,
                  "SHARE:NATS, ...: the KL divergence from FP16 of FP8 in that share of the weights, to report that of "
                  "the trace over that of always FP8");
  verb.add_option("--slo-missed", f.slo_missed, "as serve has it: last, shed or as-they-come")
      ->check(CLI::IsMember({"last", "shed", "as-they-come"}))
      ->capture_default_str();
}

void add_simulation_flags(CLI::App& verb, ReplayFlags& f) {
  SimulationOptions& s = f.simulation;
  verb.add_option("--replicas", s.replicas, "machines behind a router that knows their load")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  verb.add_option("--max-num-seqs", s.max_sequences, "requests in a step")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  verb.add_option("--max-num-batched-tokens", s.max_step_tokens, "tokens of a step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb.add_option("--kv-tokens", s.kv_tokens, "tokens that a machine's KV cache holds")
      ->check(CLI::Range(int64_t{1024}, int64_t{1} << 30))
      ->capture_default_str();
  verb.add_option("--steps-in-flight", s.steps_in_flight, "2: a step is planned while one runs")
      ->check(CLI::Range(1, 2))
      ->capture_default_str();
  verb.add_option("--noise", s.noise, "steps differ from the table by up to this share")
      ->check(CLI::Range(0.0, 0.9))
      ->capture_default_str();
  verb.add_option("--uneven", s.uneven,
                  "steps take up to this share longer than the table says. Default: none; with --as-served, twice what "
                  "the table says that a median step took longer than the fastest")
      ->check(CLI::Range(0.0, 10.0));
  verb.add_option(
          "--slowdown", s.slowdown,
          "steps take so many times what the table says; what requests take alone, which attainment is measured "
          "by, stays the table's")
      ->check(CLI::Range(1e-3, 1e3))
      ->capture_default_str();
  verb.add_option("--slo-factor", s.slo_factor, "targets, in times of the request alone in FP16")
      ->check(CLI::Range(1.0, 1000.0))
      ->capture_default_str();
  verb.add_flag("--as-served", f.as_served,
                "what `serve` does with default flags instead: its targets (500 and 50 ms, and at least 3 times the "
                "request alone), its steps, those in flight and its FP8 levels");
}

// Says which flags that were given mean nothing to what is asked for.
void warn_of_idle_flags(const CLI::App& verb, const ReplayFlags& f) {
  const auto warn = [&](std::initializer_list<const char*> names, std::string_view reason) {
    for (const char* name : names) {
      if (verb.count(name) > 0) log::warn("{}: does nothing, as {}", name, reason);
    }
  };
  const bool real = !f.http.url.empty();
  if (real) {
    warn({"--fp8-levels", "--exact-decode", "--replicas", "--max-num-seqs", "--kv-tokens", "--steps-in-flight",
          "--noise", "--uneven", "--slowdown", "--as-served"},
         "it is of a simulated machine, and --url is a real one");
    if (!f.send_targets) warn({"--slo-factor"}, "requests name no targets without --send-targets");
  } else {
    warn({"--model", "--api-key", "--vocab"}, "it is of --url");
    if (!f.as_served) warn({"--send-targets"}, "simulated requests have these targets without --as-served");
    if (f.as_served && !f.send_targets) {
      warn({"--slo-factor"}, "the targets are those of --as-served without --send-targets");
    }
    const bool slo = std::any_of(f.policies.begin(), f.policies.end(),
                                 [](const std::string& policy) { return parse_slo_levels(policy).has_value(); });
    if (!slo) warn({"--slo-missed", "--exact-decode"}, "only slo goes by it, which is not among --policies");
  }
  if (real && f.table.empty()) {
    warn({"--table-model", "--table-engine", "--table-scale", "--max-num-batched-tokens"},
         "there are no step times without --simulate");
  }
  if (f.find_rate) {
    warn({"--goodput", "--kl", "--csv"}, "--find-rate finds rates alone");
  } else {
    warn({"--attainment"}, "it is of --find-rate");
  }
}

// As a shell takes it for one word.
std::string shell_word(const std::string& text) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=+@%";
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string word = "'";
  for (const char c : text) {
    if (c == '\'') {
      word += "'\\''";
    } else {
      word += c;
    }
  }
  return word + "'";
}

}  // namespace

void add_replay(CLI::App& app, Status& status) {
  auto flags = std::make_shared<ReplayFlags>();
  CLI::App* verb = app.add_subcommand("replay", "Play a request trace: what latency, and which share of it in FP16");
  verb->footer(
      "TRACE is an Azure LLM inference trace, BurstGPT (CSV) or a Mooncake trace (JSON lines). Each may also have\n"
      "`priority` and `precision` (auto, exact, fast) of a request, in columns or fields of these names.\n"
      "Examples:\n"
      "  nestedfp replay azure.csv --simulate steps.json --rate 2 5 10 --requests 1000 --html report.html\n"
      "  nestedfp replay azure.csv --simulate steps.json --find-rate --attainment 0.95\n"
      "  nestedfp replay azure.csv --url http://127.0.0.1:8000 --model demo --rate 1 --requests 100 --goodput "
      "ttft:500\n"
      "docs/slo.md explains the policies and what the figures mean.");
  ReplayFlags& f = *flags;
  add_trace_flags(*verb, f);
  add_simulation_flags(*verb, f);
  verb->add_flag("--find-rate", f.find_rate, "for each policy the highest rate that holds --attainment")
      ->excludes(verb->get_option("--rate"));
  for (const char* simulated : {"--find-rate", "--policies", "--slo-missed"}) {  // a server decides for itself
    verb->get_option("--url")->excludes(verb->get_option(simulated));
  }
  verb->add_option("--attainment", f.attainment, "share of requests within 5 times of a request alone")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  verb->add_option("--goodput", f.goodput, "limits of requests that count: ttft:MS tpot:MS e2el:MS");
  verb->add_option("--json", f.json, "write the report here");
  verb->add_option("--csv", f.csv, "write a line for each request here");
  verb->add_option("--html", f.html, "write a page with plots here");
  verb->callback([flags, verb, &status] {
    flags->command = "nestedfp replay " + shell_word(flags->trace);
    for (const CLI::Option* option : verb->get_options()) {
      const std::string name = option->get_name();
      const bool output = name == "--json" || name == "--csv" || name == "--html";
      if (option->count() == 0 || output || name == "TRACE" || name == "--help" || name == "--api-key") continue;
      flags->command += " " + name;
      if (option->get_expected_max() == 0) continue;
      for (const std::string& value : option->results()) flags->command += " " + shell_word(value);
    }
    flags->sequences_given = verb->count("--max-num-seqs") > 0;
    flags->steps_in_flight_given = verb->count("--steps-in-flight") > 0;
    flags->uneven_given = verb->count("--uneven") > 0;
    flags->step_tokens_given = verb->count("--max-num-batched-tokens") > 0;
    warn_of_idle_flags(*verb, *flags);
    status = run(*flags);
  });
}

}  // namespace nfp
