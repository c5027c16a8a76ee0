#include "server/metrics/metrics.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/process_memory.h"
#include "server/grammar/grammar.h"
#include "server/metrics/process_facts.h"
#include "text/utf8.h"

namespace nfp::server {
namespace {

// vLLM's bucket bounds, so that dashboards made for it show the same shapes.
constexpr double kTtft[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25,  0.5,   0.75,
                            1.0,   2.5,   5.0,  7.5,  10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0};
constexpr double kGap[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1,  0.15, 0.2,  0.3,
                           0.4,   0.5,    0.75,  1.0,  2.5,   5.0,  7.5,   10.0, 20.0, 40.0, 80.0};
constexpr double kRequest[] = {0.3,  0.5,  0.8,  1.0,  1.5,   2.0,   2.5,   5.0,   10.0,   15.0,  20.0,
                               30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0};
constexpr double kIteration[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
constexpr double kLength[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
constexpr double kAnswers[] = {1, 2, 5, 10, 20};
constexpr double kStep[] = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075,
                            0.1,    0.15,  0.2,   0.3,   0.5,  0.75, 1.0,  2.0,  5.0};
constexpr double kBetween[] = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0};

constexpr double kShare[] = {0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0};

constexpr std::string_view kReasonNames[] = {"stop", "length", "abort", "error"};

class Writer {
 public:
  explicit Writer(std::string_view labels) : labels_(labels) {}

  void head(std::string_view name, std::string_view type, std::string_view help) {
    fmt::format_to(std::back_inserter(out), "# HELP {0} {2}\n# TYPE {0} {1}\n", name, type, help);
  }
  template <typename T>
  void value(std::string_view name, T number, std::string_view more = "") {
    fmt::format_to(std::back_inserter(out), "{}{{{}{}{}}} {}\n", name, labels_, more.empty() ? "" : ",", more, number);
  }
  template <typename T>
  void gauge(std::string_view name, T number, std::string_view help) {
    head(name, "gauge", help);
    value(name, number);
  }
  void counter(std::string_view name, uint64_t number, std::string_view help) {
    head(name, "counter", help);
    value(name, number);
  }
  void histogram(std::string_view name, const Histogram& histogram, std::string_view help) {
    head(name, "histogram", help);
    histogram.write(out, name, labels_);
  }

  std::string out;

 private:
  std::string_view labels_;
};

// What is not UTF-8 becomes U+FFFD: Prometheus refuses all of a scrape that has such a byte.
std::string escape_label(std::string_view text) {
  std::string out;
  for (const char c : text::utf8_lossy(text)) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

// Requests, KV cache and prefix cache under vLLM's names.
void write_engine(const EngineStats& e, bool prefix_caching, Writer* w) {
  const double kv_use = e.kv_blocks > 0 ? static_cast<double>(e.kv_blocks_used) / e.kv_blocks : 0;
  w->gauge("vllm:num_requests_running", e.running, "Requests in the running batch.");
  w->gauge("vllm:num_requests_waiting", e.waiting, "Requests waiting to be admitted.");
  w->gauge("vllm:num_requests_swapped", 0, "Always 0: preempted requests are recomputed, not swapped.");
  w->gauge("vllm:kv_cache_usage_perc", kv_use, "Share of KV cache blocks in use (1 = all).");
  w->gauge("vllm:gpu_cache_usage_perc", kv_use, "The same under its older name.");
  w->head("vllm:cache_config_info", "gauge", "The KV cache's configuration, as labels.");
  w->value("vllm:cache_config_info", 1,
           fmt::format("block_size=\"{}\",num_gpu_blocks=\"{}\",num_cpu_blocks=\"0\",enable_prefix_caching=\"{}\"",
                       e.block_size, e.kv_blocks, prefix_caching ? "True" : "False"));
  w->head("vllm:lora_requests_info", "gauge", "LoRA adapters in use: none, there is no LoRA.");
  w->value("vllm:lora_requests_info", 0, "max_lora=\"0\",waiting_lora_adapters=\"\",running_lora_adapters=\"\"");
  w->counter("vllm:num_preemptions_total", e.preemptions, "Requests that gave their KV blocks back to older ones.");
  w->counter("vllm:spec_decode_num_drafts_total", e.drafts, "Drafts: one a sequence and step with draft tokens.");
  w->counter("vllm:spec_decode_num_draft_tokens_total", e.drafted_tokens, "Tokens drafted in FP8, verified in FP16.");
  w->counter("vllm:spec_decode_num_accepted_tokens_total", e.accepted_tokens, "Draft tokens that were right.");
  w->counter("vllm:prefix_cache_queries_total", e.prefix_queries, "Prompt tokens looked up in the prefix cache.");
  w->counter("vllm:prefix_cache_hits_total", e.prefix_hits, "Prompt tokens found there.");
  w->counter("vllm:gpu_prefix_cache_queries_total", e.prefix_queries, "The same under its older name.");
  w->counter("vllm:gpu_prefix_cache_hits_total", e.prefix_hits, "The same under its older name.");
  w->counter("vllm:prompt_tokens_cached_total", e.prefix_hits, "Prompt tokens taken from the prefix cache.");
}

void write_steps(const EngineStats& e, Writer* w) {
  w->head("nestedfp:steps_total", "counter", "Engine steps by precision.");
  for (size_t i = 0; i < kPrecisionCount; ++i) {
    w->value("nestedfp:steps_total", e.steps_by_precision[i], fmt::format("precision=\"{}\"", kPrecisionNames[i]));
  }
  w->head("nestedfp:tokens_total", "counter", "Tokens computed (prompt and output) by precision of their step.");
  for (size_t i = 0; i < kPrecisionCount; ++i) {
    w->value("nestedfp:tokens_total", e.tokens_by_precision[i], fmt::format("precision=\"{}\"", kPrecisionNames[i]));
  }
  w->gauge("nestedfp:captured_steps", e.captured.steps, "Captured decode steps (CUDA graphs) that are kept.");
  w->gauge("nestedfp:captured_steps_bytes", e.captured.bytes, "Device memory that captured steps take.");
}

// Of the process, under the names of Prometheus's own client libraries, which have no labels.
void write_process(Writer* w) {
  rusage used = {};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  w->head("process_cpu_seconds_total", "counter", "Processor time used, of the system and the program.");
  fmt::format_to(std::back_inserter(w->out), "process_cpu_seconds_total {:.6f}\n",
                 seconds(used.ru_utime) + seconds(used.ru_stime));
  const auto gauge = [&](std::string_view name, const std::optional<uint64_t>& value, std::string_view help) {
    if (!value) return;
    w->head(name, "gauge", help);
    fmt::format_to(std::back_inserter(w->out), "{} {}\n", name, *value);
  };
  const ProcessFacts self = process_facts();
  const uint64_t resident = process_memory().resident;
  gauge("process_resident_memory_bytes", resident > 0 ? std::optional(resident) : std::nullopt, "Resident memory.");
  gauge("process_virtual_memory_bytes", self.virtual_bytes, "Address space in use.");
  if (self.start_s) {
    w->head("process_start_time_seconds", "gauge", "When it began, seconds since 1970.");
    fmt::format_to(std::back_inserter(w->out), "process_start_time_seconds {:.2f}\n", *self.start_s);
  }
  gauge("process_open_fds", self.open_files, "Open file descriptors.");
  gauge("process_max_fds", self.most_files, "File descriptors that it may open.");
}

void write_grammars(const GrammarStats& g, Writer* w) {
  w->gauge("nestedfp:grammars_compiling", g.compiling.load(), "Grammars being compiled.");
  w->histogram("nestedfp:grammar_compile_seconds", g.compile_seconds, "Duration of compiling a grammar, well or not.");
  w->counter("nestedfp:grammar_cache_hits_total", g.hits, "Requests whose grammar was compiled already.");
  w->gauge("nestedfp:grammar_cache_bytes", g.cached_bytes.load(), "Memory of the compiled grammars that are kept.");
  w->head("nestedfp:grammars_refused_total", "counter", "Grammars that were not compiled, by reason.");
  const std::pair<std::string_view, uint64_t> refused[] = {{"time", g.refused_time},
                                                           {"busy", g.refused_busy},
                                                           {"invalid", g.refused_invalid},
                                                           {"failed", g.refused_failed},
                                                           {"cancelled", g.cancelled}};
  for (const auto& [reason, count] : refused) {
    w->value("nestedfp:grammars_refused_total", count, fmt::format("reason=\"{}\"", reason));
  }
  w->counter("nestedfp:grammar_answers_stopped_total", g.answers_stopped,
             "Answers ended as their masks took too long.");
  w->counter("nestedfp:grammar_process_restarts_total", g.restarts, "Processes for grammars started again.");
}

}  // namespace

void Histogram::write(std::string& out, std::string_view name, std::string_view labels) const {
  uint64_t total = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i].load(std::memory_order_relaxed);
    const std::string bound = i < bounds_.size() ? fmt::format("{}", bounds_[i]) : std::string("+Inf");
    fmt::format_to(std::back_inserter(out), "{}_bucket{{{}{}le=\"{}\"}} {}\n", name, labels, labels.empty() ? "" : ",",
                   bound, total);
  }
  const std::string braces = labels.empty() ? "" : fmt::format("{{{}}}", labels);
  fmt::format_to(std::back_inserter(out), "{0}_sum{1} {2}\n{0}_count{1} {3}\n", name, braces,
                 sum_.load(std::memory_order_relaxed), total);
}

Metrics::Metrics()
    : ttft_(kTtft),
      token_gap_(kGap),
      tpot_(kGap),
      e2e_(kRequest),
      queue_(kRequest),
      prefill_(kRequest),
      decode_(kRequest),
      inference_(kRequest),
      step_tokens_(kIteration),
      prompt_length_(kLength),
      generation_length_(kLength),
      max_tokens_(kLength),
      longest_(kLength),
      computed_prompt_(kLength),
      params_n_(kAnswers),
      step_time_{Histogram(kStep), Histogram(kStep), Histogram(kStep)},
      prediction_off_(kShare),
      predicted_(kStep),
      between_(kBetween) {}

void Metrics::on_step(const StepRecord& step) {
  step_tokens_.observe(step.tokens);
  step_time_[static_cast<size_t>(step.precision)].observe(step.seconds);
  between_.observe(step.between_s);
  timeline_.add_step(step);
  if (step_log_) step_log_->add(step);
  level_.store(step.fp8_share, std::memory_order_relaxed);
  oldest_wait_.store(step.oldest_wait_s, std::memory_order_relaxed);
  count_tokens(step.fp8_share, step.tokens - step.exact_tokens);
  if (step.exact_tokens > 0) count_tokens(0, step.exact_tokens);
  if (step.switched) changes_[static_cast<size_t>(step.change)].fetch_add(1, std::memory_order_relaxed);
  // Here and below: one thread writes, so load and store need not be one.
  // The table has no steps with drafts. Those count as they were, or the machine would seem slower by their time.
  const double by_table = by_table_.load(std::memory_order_relaxed);
  const bool as_it_was = step.drafted > 0 && by_table > 0;
  by_table_.store(by_table + (as_it_was ? step.seconds : step.table_s), std::memory_order_relaxed);
  if (step.predicted_s <= 0 || step.seconds <= 0) return;
  predicted_.observe(step.predicted_s);
  prediction_off_.observe(std::abs(step.predicted_s - step.seconds) / step.seconds);
  const double mean = prediction_error_.load(std::memory_order_relaxed);
  const double off = std::abs(step.predicted_s - step.seconds) / step.seconds;
  const double share = 1.0 / static_cast<double>(std::min<uint64_t>(++predictions_, 100));
  prediction_error_.store(mean + share * (off - mean), std::memory_order_relaxed);
}

void Metrics::count_tokens(double fp8_share, int32_t tokens) {
  fp8_share = std::round(fp8_share * 1000) / 1000;  // as it is written: what reads alike is one series
  for (Level& level : levels_) {
    const double share = level.share.load(std::memory_order_relaxed);
    if (share >= 0 && share != fp8_share) continue;
    level.share.store(fp8_share, std::memory_order_relaxed);
    level.tokens.fetch_add(static_cast<uint64_t>(tokens), std::memory_order_relaxed);
    break;
  }
}

void Metrics::on_token_gap(double seconds) {
  generation_tokens_.fetch_add(1, std::memory_order_relaxed);
  token_gap_.observe(seconds);
}

void Metrics::on_first_token(double seconds, int32_t prompt_tokens) {
  prompt_tokens_.fetch_add(static_cast<uint64_t>(prompt_tokens), std::memory_order_relaxed);
  generation_tokens_.fetch_add(1, std::memory_order_relaxed);
  ttft_.observe(seconds);
  timeline_.add_ttft(seconds);
}

void Metrics::on_finished(const RequestRecord& r) {
  finished_[static_cast<size_t>(r.finish)].fetch_add(1, std::memory_order_relaxed);
  e2e_.observe(r.e2e_s);
  queue_.observe(r.queue_s);
  prompt_length_.observe(r.usage.prompt_tokens);
  if (!r.prompt_only) {
    generation_length_.observe(r.usage.completion_tokens);
    max_tokens_.observe(r.max_tokens);
  }
  const size_t tier = r.own_targets ? 1 : 0;
  if (r.shed) {  // not within its targets, as those who wait for it see
    shed_.fetch_add(1, std::memory_order_relaxed);
    judged_[tier].fetch_add(1, std::memory_order_relaxed);
  }
  if (r.usage.completion_tokens == 0 && !r.prompt_only) return;
  if (r.prompt_only) prompt_tokens_.fetch_add(static_cast<uint64_t>(r.usage.prompt_tokens), std::memory_order_relaxed);
  computed_prompt_.observe(r.usage.prompt_tokens - r.usage.cached_tokens);
  judged_[tier].fetch_add(1, std::memory_order_relaxed);
  if (r.attained) {
    attained_[tier].fetch_add(1, std::memory_order_relaxed);
    attained_tokens_[tier].fetch_add(static_cast<uint64_t>(r.usage.completion_tokens), std::memory_order_relaxed);
  }
  prefill_.observe(r.prefill_s);
  if (!r.prompt_only) decode_.observe(r.decode_s);
  inference_.observe(r.prefill_s + r.decode_s);
  if (r.usage.completion_tokens > 1) {
    const double tpot = r.decode_s / (r.usage.completion_tokens - 1);
    tpot_.observe(tpot);
    timeline_.add_tpot(tpot);
  }
}

std::string Metrics::prometheus(const Facts& facts) const {
  const EngineStats& e = facts.engine;
  const std::string labels = fmt::format("model_name=\"{}\",engine=\"0\"", escape_label(facts.model_name));
  Writer w(labels);
  write_engine(e, prefix_caching_, &w);
  w.counter("vllm:prompt_tokens_total", prompt_tokens_, "Prompt tokens computed or found in the prefix cache.");
  w.counter("vllm:generation_tokens_total", generation_tokens_, "Tokens generated.");
  w.head("vllm:request_success_total", "counter", "Finished requests by reason.");
  for (size_t i = 0; i < kFinishReasons; ++i) {
    w.value("vllm:request_success_total", finished_[i].load(std::memory_order_relaxed),
            fmt::format("finished_reason=\"{}\"", kReasonNames[i]));
  }
  w.histogram("vllm:iteration_tokens_total", step_tokens_, "Tokens in a step.");
  w.histogram("vllm:time_to_first_token_seconds", ttft_, "From a request's arrival to its first token.");
  w.histogram("vllm:inter_token_latency_seconds", token_gap_, "Between two tokens of a request.");
  w.histogram("vllm:time_per_output_token_seconds", token_gap_, "The same under its older name.");
  w.histogram("vllm:request_time_per_output_token_seconds", tpot_,
              "A request's mean time for a token after the first.");
  w.histogram("vllm:e2e_request_latency_seconds", e2e_, "From a request's arrival to its end.");
  w.histogram("vllm:request_queue_time_seconds", queue_,
              "From arrival to being scheduled, or to the end where that never was.");
  w.histogram("vllm:request_prefill_time_seconds", prefill_, "From being scheduled to the first token.");
  w.histogram("vllm:request_decode_time_seconds", decode_, "From the first token to the last.");
  w.histogram("vllm:request_inference_time_seconds", inference_, "From being scheduled to the last token.");
  w.histogram("vllm:request_prompt_tokens", prompt_length_, "Prompt tokens of a request.");
  w.histogram("vllm:request_generation_tokens", generation_length_, "Tokens generated for a request.");
  w.histogram("vllm:request_params_max_tokens", max_tokens_, "Tokens a request was allowed.");
  w.histogram("vllm:request_max_num_generation_tokens", longest_,
              "Tokens of the longest of the answers that a request wanted of a prompt.");
  w.histogram("vllm:request_params_n", params_n_, "Answers that a request wants of each prompt.");
  w.histogram("vllm:request_prefill_kv_computed_tokens", computed_prompt_,
              "Prompt tokens of a request that the prefix cache did not have, where it gave an answer.");

  write_process(&w);
  if (facts.http != nullptr) facts.http->write(w.out);

  write_steps(e, &w);
  w.head("nestedfp:level_tokens_total", "counter",
         "Tokens computed (prompt and output) by share of the weights that their step computed in FP8.");
  for (const Level& level : levels_) {
    const double share = level.share.load(std::memory_order_relaxed);
    if (share < 0) break;
    w.value("nestedfp:level_tokens_total", level.tokens.load(std::memory_order_relaxed),
            fmt::format("fp8_share=\"{:.3f}\"", share));
  }
  w.counter("nestedfp:precision_switches_total", e.precision_switches,
            "Steps whose precision, or share of the weights in FP8, differs from the last.");
  w.head("nestedfp:level_changes_total", "counter", "The same by reason.");
  for (size_t i = 1; i < changes_.size(); ++i) {
    w.value("nestedfp:level_changes_total", changes_[i].load(std::memory_order_relaxed),
            fmt::format("reason=\"{}\"", kLevelChangeNames[i]));
  }
  w.head("nestedfp:step_time_seconds", "histogram", "Duration of a step by precision.");
  for (size_t i = 0; i < kPrecisionCount; ++i) {
    step_time_[i].write(w.out, "nestedfp:step_time_seconds",
                        labels + fmt::format(",precision=\"{}\"", kPrecisionNames[i]));
  }
  w.histogram("nestedfp:between_steps_seconds", between_,
              "What the engine's thread did from the end of a step to waiting for the next: what requests ask of it.");
  w.gauge("nestedfp:fp8_share", level_.load(), "Share of the weights that the last step computed in FP8 (0 = FP16).");
  w.histogram("nestedfp:predicted_step_time_seconds", predicted_, "Duration of a step as predicted before it ran.");
  w.gauge("nestedfp:step_prediction_error", prediction_error_.load(),
          "Mean of |predicted - measured| / measured over about the last 100 steps.");
  w.histogram("nestedfp:step_prediction_off", prediction_off_, "|predicted - measured| / measured of each step.");
  w.head(
      "nestedfp:table_step_time_seconds_total", "counter",
      "How long the steps so far take by the table of step times that slo predicts from, without what it learnt "
      "since: beside the sum of step_time_seconds it tells how much slower than when it was measured the machine is.");
  w.value("nestedfp:table_step_time_seconds_total", by_table_.load(std::memory_order_relaxed), "");
  w.gauge("nestedfp:oldest_wait_seconds", e.running + e.waiting > 0 ? oldest_wait_.load() : 0,
          "Age of the oldest request without a token, when the last step was planned; 0 without requests.");
  w.counter("nestedfp:slo_shed_total", shed_, "Requests refused as their first token could not come in time.");
  constexpr std::string_view kTiers[] = {"tier=\"default\"", "tier=\"own\""};
  const auto by_tier = [&](std::string_view name, const auto& values, std::string_view help) {
    w.head(name, "counter", help);
    for (size_t i = 0; i < 2; ++i) w.value(name, values[i].load(std::memory_order_relaxed), kTiers[i]);
  };
  by_tier(
      "nestedfp:slo_requests_total", judged_,
      "Requests that gave a token or were refused as it could not come in time, by whose latency targets they had.");
  by_tier("nestedfp:slo_attained_total", attained_, "Of these, first token and mean gap within the targets.");
  by_tier("nestedfp:slo_attained_tokens_total", attained_tokens_, "Output tokens of those: goodput.");
  w.gauge("nestedfp:http_connections", facts.connections, "Open connections.");
  w.counter("nestedfp:slow_readers_cut_total", facts.slow_readers_cut, "Streams cut off because nobody read them.");
  w.gauge("nestedfp:request_bytes", facts.request_bytes, "Bytes of requests held: read, parsed, waiting.");
  if (facts.grammars != nullptr) write_grammars(*facts.grammars, &w);
  return std::move(w.out);
}

}  // namespace nfp::server
