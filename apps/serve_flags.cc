#include "serve_flags.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "base/mapped_file.h"
#include "base/process_memory.h"
#include "eval/start_steps.h"
#include "policy/slo_policy.h"
#include "report_file.h"
#include "text/utf8.h"

namespace nfp {
namespace {

// Spaces around a key are never meant: no client could send them in its header.
std::string trimmed(std::string_view text) {
  constexpr const char* kSpace = " \t\r\n";
  const size_t begin = text.find_first_not_of(kSpace);
  return begin == std::string_view::npos ? ""
                                         : std::string(text.substr(begin, text.find_last_not_of(kSpace) - begin + 1));
}

// Keys are separated by commas in the environment and by line ends in a file.
Status add_api_keys(const std::string& path, std::vector<std::string>* keys) {
  for (std::string& key : *keys) key = trimmed(key);
  const char* const given = std::getenv("NESTEDFP_API_KEY");
  if (given != nullptr) {
    std::istringstream list(given);
    for (std::string key; std::getline(list, key, ',');) keys->push_back(trimmed(key));
  }
  if (!path.empty()) {
    std::ifstream file(path);
    if (!file) return error(ErrorCode::kUsage, "--api-key-file {}: cannot be read", path);
    const size_t before = keys->size();
    bool first = true;
    for (std::string line; std::getline(file, line);) {
      line = trimmed(std::exchange(first, false) ? without_byte_order_mark(line) : line);
      if (!line.empty() && line.front() != '#') keys->push_back(line);
    }
    if (keys->size() == before) return error(ErrorCode::kUsage, "--api-key-file {}: holds no key", path);
  }
  for (const std::string& key : *keys) {
    if (key.empty()) return error(ErrorCode::kUsage, "an API key is empty; see --api-key and NESTEDFP_API_KEY");
  }
  // Empty it is no key, as in vLLM; it may also be a secret that was not mounted.
  if (given != nullptr && keys->empty()) {
    log::warn("NESTEDFP_API_KEY is set but empty: no key is asked for; unset it if that is meant");
  }
  return ok_status();
}

}  // namespace

void ServeFlags::add_listening(CLI::App& app) {
  http::ServerOptions& http = service.http;
  app.add_option("MODEL", model,
                 "Hugging Face directory, nested checkpoint, .gguf file, or org/name in the local Hugging Face cache")
      ->required();
  app.add_option("--host", http.host, "address to listen on; 0.0.0.0 = all")->capture_default_str();
  app.add_option("--port", http.port, "0 = any free one")->check(CLI::Range(0, 65535))->capture_default_str();
  app.add_option("--served-model-name", names, "names that clients may use; default: MODEL");
  app.add_option("--api-key", service.api.api_keys,
                 "clients must send one of these (also NESTEDFP_API_KEY, with commas)");
  api_key_file_given = app.add_option("--api-key-file", api_key_file, "a file with one key a line");
  app.add_option("--root-path", service.api.root_path, "path under which a proxy shows the server");
  app.add_option("--allowed-origins", service.api.allowed_origins, "web pages that may call the API; '*' = all");
  app.add_option("--allowed-hosts", service.api.allowed_hosts,
                 "names in the Host header; '*' = all. Default: loopback names where only these reach the server and "
                 "there are no keys");
}

void ServeFlags::add_engine(CLI::App& app) {
  app.add_option("--max-model-len", engine.max_context,
                 "tokens of prompt and answer; 0 = the model's, at most what the KV cache holds")
      ->check(CLI::Range(0, 1 << 30));
  engine.limits.max_sequences = 0;
  app.add_option("--max-num-seqs", engine.limits.max_sequences,
                 "requests computed at once; 0 = 64 on a CPU, 256 on a GPU")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str();
  engine.limits.max_step_tokens = 0;
  app.add_option("--max-num-batched-tokens", engine.limits.max_step_tokens,
                 "tokens of a step; 0 = 2048 on a CPU, 8192 on a GPU")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--max-queue", engine.limits.max_queue, "waiting requests; more are answered 429")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  device.add_to(app);
  app.add_option("--kv-cache-memory", engine.kv_bytes,
                 "bytes of KV cache, e.g. 2GB; default: what --gpu-memory-utilization leaves, or on a CPU a quarter of "
                 "free memory at most")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--block-size", engine.block_size, "tokens of a KV block")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  add_kv_dtype_flag(app, kv_dtype);
  add_speculative_flag(app, engine.speculative_tokens);
  app.add_flag("--no-enable-prefix-caching", no_prefix_caching, "compute equal prefixes anew");
}

void ServeFlags::add_precision(CLI::App& app) {
  app.add_option("--precision", precision, "auto: as the policy decides; else always this")
      ->check(CLI::IsMember({"auto", "fp16", "fp8", "fp8-w8a8"}))
      ->capture_default_str();
  policy_given = app.add_option(
      "--precision-policy", policy,
      "for auto: slo (the default: as little FP8 as keeps the latency targets), threshold:N (FP8 in steps of "
      "more than N tokens), graded:LOW:HIGH (in a share of the weights that grows with a step's tokens), "
      "alternate:N; slo-fp16, slo-fp8: slo in one precision");
  slo_ttft_given =
      app.add_option("--slo-ttft-ms", slo_ttft_ms,
                     "wanted time to the first token; unless given, at least 3 times what the prompt takes alone")
          ->check(CLI::Range(1.0, 86'400'000.0))
          ->capture_default_str();
  slo_itl_given =
      app.add_option("--slo-itl-ms", slo_itl_ms,
                     "wanted mean time between tokens; unless given, at least 3 times that of a request alone")
          ->check(CLI::Range(0.1, 86'400'000.0))
          ->capture_default_str();
  only_slo.push_back(app.add_option("--slo-missed", slo_missed,
                                    "requests whose first token cannot be in time: last (behind all others), shed "
                                    "(429) or as-they-come")
                         ->check(CLI::IsMember({"last", "shed", "as-they-come"}))
                         ->capture_default_str());
  app.add_option("--step-times", step_times,
                 "table of `bench MODEL steps` that slo predicts from; default: measured at the first start and kept");
  only_slo.push_back(
      app.add_option(
             "--fp8-levels", fp8_levels,
             "shares of the weights that slo may compute in FP8, those that it harms least first; 0 = FP16, which is "
             "always one of them")
          ->delimiter(',')
          ->check(CLI::Range(0.0, 1.0))
          ->capture_default_str());
  only_slo.push_back(
      app.add_flag("--exact-decode", exact_decode,
                   "let slo compute prompts in FP8 beside sequences that decode in FP16, in two launches a step"));
  app.add_option("--default-request-precision", default_request_precision, "for requests that do not say")
      ->check(CLI::IsMember({"auto", "exact", "fast"}))
      ->capture_default_str();
  app.add_option("--pooling", pooling, "of embeddings that do not say: last (the last token's hidden state) or mean")
      ->check(CLI::IsMember({"last", "mean"}))
      ->capture_default_str();
  app.add_flag("--fp8-head", load.fp8_head, "let lm_head compute in FP8 too in FP8 steps");
  add_share_flag(app, calibration);
  add_calibration_flags(app, calibration);
}

void ServeFlags::add_serving(CLI::App& app) {
  http::ServerOptions& http = service.http;
  add_generation_config_flag(app, generation_config);
  app.add_flag("--strict-requests", service.limits.strict,
               "refuse requests with unknown fields instead of ignoring these");
  app.add_option("--tool-call-parser", service.tool_call_parser,
                 "how the model writes calls: auto, hermes, llama3_json, mistral, qwen3_coder, pythonic, "
                 "phi4_mini_json, gemma, "
                 "gpt_oss or none")
      ->capture_default_str();
  app.add_option(
         "--reasoning-parser", service.reasoning_parser,
         "how the model marks its thoughts: auto, think, deepseek_r1, qwen3, mistral, seed_oss, gpt_oss or none")
      ->capture_default_str();
  app.add_option("--chat-template", chat_template,
                 "a file, or the name of one of the model's own templates, or chatml; default: the model's");
  app.add_option("--threads", load.threads, "threads to compute with; 0 = all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--io-threads", http.threads, "threads for connections")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--max-connections", http.max_connections, "open at once")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--max-body-mb", max_body_mb, "size of a request")->check(CLI::Range(1, 1024))->capture_default_str();
  request_memory_given = app.add_option("--max-request-memory", service.http.max_request_bytes,
                                        "bytes of all requests together: read, parsed and waiting, e.g. 1GB; unless it "
                                        "is given at most a quarter of free memory")
                             ->transform(CLI::AsSizeValue(false))
                             ->capture_default_str();
  app.add_option("--response-store-memory", service.response_store_bytes,
                 "bytes of answers that /v1/responses keeps for previous_response_id, e.g. 64MB; 0 = none")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--grammar-compile-timeout", grammar_compile_s, "CPU seconds that compiling a grammar may take")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  app.add_option("--grammar-token-ms", grammar_token_ms,
                 "milliseconds of CPU that a grammar may take for each token in the long run")
      ->check(CLI::Range(0.1, 10000.0))
      ->capture_default_str();
  app.add_option("--grammar-cache-memory", service.grammars.cache_bytes, "bytes of compiled grammars that are kept")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option(
         "--stall-timeout", service.api.stall_timeout_s,
         "seconds without a finished step after which /health fails, and a GPU counts as hung: its requests end with "
         "an error and the program exits")
      ->check(CLI::Range(0.1, 1e9))
      ->capture_default_str();
  app.add_option("--drain-timeout", drain_timeout_s, "seconds that running requests get after SIGTERM")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  app.add_flag("--demo-load", service.demo_load,
               "a slider on the page for requests that the server makes for itself, to show what load does; also POST "
               "/nestedfp/demo-load?rate=R");
  app.add_option("--step-log", service.step_log,
                 "a CSV file with a line for each step: tokens, level, predicted and measured time");
  app.add_flag("--no-page", no_page, "no page at /");
  app.add_flag("--disable-log-requests", quiet, "no line for each request");
  app.add_flag("--log-prompts", service.log_prompts, "write prompts into the log");
}

Status ServeFlags::resolve() {
  if (api_key_file_given->count() > 0 && api_key_file.empty()) {  // without keys everybody could ask
    return error(ErrorCode::kUsage, "--api-key-file: the name is empty; leave the flag out where no key is asked for");
  }
  NFP_RETURN_IF_ERROR(add_api_keys(api_key_file, &service.api.api_keys));
  NFP_RETURN_IF_ERROR(check_no_overlap({{"--step-log", service.step_log}}, {{"MODEL", model},
                                                                            {"--step-times", step_times},
                                                                            {"--api-key-file", api_key_file},
                                                                            {"--chat-template", chat_template},
                                                                            {"--gemm-choices", device.gemm_choices},
                                                                            {"--calibrate", calibration.calibrate}}));
  service.log_requests = !quiet;
  service.api.page = !no_page;
  service.drain_timeout = std::chrono::seconds(drain_timeout_s);
  service.grammars.compile_time = std::chrono::milliseconds(static_cast<int64_t>(grammar_compile_s * 1e3));
  service.grammars.token_mean = std::chrono::microseconds(static_cast<int64_t>(grammar_token_ms * 1e3));
  service.http.max_body_bytes = uint64_t{max_body_mb} << 20;
  if (request_memory_given->count() == 0) {
    constexpr uint64_t kLeast = 64 << 20;  // a few large requests
    service.http.max_request_bytes = std::min(service.http.max_request_bytes, std::max(kLeast, available_memory() / 4));
  }
  if (service.http.max_request_bytes < (1 << 20)) {
    return error(ErrorCode::kUsage, "--max-request-memory {}: at least 1MB, or most requests are answered 429",
                 service.http.max_request_bytes);
  }
  if (const std::string& path = service.api.root_path; !path.empty() && !path.starts_with('/')) {
    return error(ErrorCode::kUsage, "--root-path {}: must begin with '/'", path);
  }
  if (!std::all_of(names.begin(), names.end(), [](const std::string& name) { return text::is_utf8(name); })) {
    return error(ErrorCode::kUsage, "--served-model-name is not UTF-8: no client could ask for it");
  }
  if (std::find(names.begin(), names.end(), "") != names.end()) {
    return error(ErrorCode::kUsage, "--served-model-name is empty: no client could ask for it");
  }
  // As a variable of a script that is not set; it would mean all addresses.
  if (service.http.host.empty()) return error(ErrorCode::kUsage, "--host is empty; 0.0.0.0 listens on all addresses");
  for (const std::string& origin : service.api.allowed_origins) {
    const size_t scheme = origin.find("://");
    const bool whole = scheme != std::string::npos && scheme > 0 && scheme + 3 < origin.size() &&
                       origin.find('/', scheme + 3) == std::string::npos;
    if (!whole && origin != "*" && origin != "null") {
      return error(ErrorCode::kUsage,
                   "--allowed-origins {}: no browser's; it is '*' or SCHEME://HOST[:PORT], without a slash at the end",
                   origin);
    }
  }
  std::optional<PrecisionClass> request_precision;
  if (server::parse_precision(default_request_precision, "", &request_precision)) {
    return error(ErrorCode::kUsage, "--default-request-precision is {}", default_request_precision);
  }
  service.default_precision = *request_precision;
  service.refuses_late = plans() && slo_missed == "shed";
  service.default_pooling = pooling == "mean" ? Pooling::kMean : Pooling::kLast;
  if (const auto checked = server::parse_tool_format(service.tool_call_parser, ""); !checked.ok()) {
    return checked.error();
  }
  if (const auto checked = server::parse_reasoning_format(service.reasoning_parser, ""); !checked.ok()) {
    return checked.error();
  }
  device.apply(load);
  load.hang_s = service.api.stall_timeout_s;
  engine.targets.ttft_s = slo_ttft_ms / 1e3;
  engine.targets.itl_s = slo_itl_ms / 1e3;
  engine.targets.least_ttft = slo_ttft_given->count() > 0 ? 0 : kServeLeast;
  engine.targets.least_itl = slo_itl_given->count() > 0 ? 0 : kServeLeast;
  engine.memory_share = device.gpu_memory_utilization;
  engine.fp8 = precision == "fp8-w8a8" ? Precision::kFp8W8A8 : Precision::kFp8;
  engine.prefix_caching = !no_prefix_caching;
  std::erase(fp8_levels, 0.0);
  std::sort(fp8_levels.begin(), fp8_levels.end());
  fp8_levels.erase(std::unique(fp8_levels.begin(), fp8_levels.end()), fp8_levels.end());
  if (fp8_levels.size() > 8) return error(ErrorCode::kUsage, "--fp8-levels: at most 8 besides 0");
  if (policy.empty() || parse_slo_levels(policy) == SloOptions::Levels::kAll) {
    if (plans() && !fp8_levels.empty()) engine.fp8_levels = fp8_levels;
  } else if (plans()) {
    fp8_levels = {1};
  }
  engine.kv_dtype = kv_dtype_from_name(kv_dtype);
  return ok_status();
}

// No error: they may come from a configuration file, and be overridden.
void ServeFlags::warn_of_idle_flags() const {
  if (precision != "auto" && policy_given->count() > 0) {
    log::warn("--precision-policy {}: does nothing, as --precision {} is all that is computed in", policy, precision);
  }
  warn_of_idle_speculation(engine.speculative_tokens, precision);
  for (const CLI::Option* flag : only_slo) {
    if (flag->count() == 0 || plans()) continue;
    log::warn("{}: does nothing, as only the policy slo goes by it, and this one is {}", flag->get_name(),
              precision == "auto" ? policy : precision);
  }
}

bool ServeFlags::plans() const {
  return precision == "auto" && (policy.empty() || parse_slo_levels(policy).has_value());
}

bool ServeFlags::plans_shares() const {
  return plans() && std::any_of(fp8_levels.begin(), fp8_levels.end(), [](double share) { return share < 1; });
}

Result<std::optional<StepTable>> ServeFlags::given_step_times() const {
  if (step_times.empty()) return std::optional<StepTable>();
  const auto named = [](const Error& why) {
    return error(why.code, "--step-times: {}; make the file with nestedfp bench MODEL steps, or leave the flag out",
                 why.message);
  };
  const auto text = read_text_file(step_times);
  if (!text.ok()) return named(text.error());
  auto table = parse_step_table(*text, step_times);
  if (!table.ok()) return named(table.error());
  return std::optional<StepTable>(std::move(table).value());
}

void ServeFlags::warn_of_other_step_times(const StepTable& table, const LoadedModel& loaded) const {
  const auto bytes = static_cast<int64_t>(loaded.model->weight_bytes());
  const std::string here = loaded.backend->info().device;
  const std::string_view kv = name_of(engine.kv_dtype);
  const Precision fp8 = computed_precision(*loaded.backend, engine.fp8);
  const auto is_fp8 = [](const StepLevel& level) { return !is_exact(level.precision); };
  const auto known = std::find_if(table.levels.begin(), table.levels.end(), is_fp8);
  const bool other =
      known != table.levels.end() && std::none_of(table.levels.begin(), table.levels.end(),
                                                  [&](const StepLevel& level) { return level.precision == fp8; });
  const auto warn = [&](std::string_view what, std::string_view has, std::string_view serves) {
    log::warn("--step-times {}: was measured with the {} {}, and this is {}: times that it predicts may be far off",
              step_times, what, has, serves);
  };
  // By their size: a model has a name for each of its paths.
  if (table.weight_bytes != bytes) {
    warn("model", fmt::format("{} ({} bytes)", table.model, table.weight_bytes),
         fmt::format("{} ({} bytes)", loaded.name, bytes));
  }
  if (table.device != here) warn("device", table.device, here);
  if (table.kv_dtype != kv) warn("KV cache", table.kv_dtype, kv);
  if (other) warn("precision", name_of(known->precision), name_of(fp8));
}

Result<StepTable> ServeFlags::load_step_times(LoadedModel& loaded) const {
  StartStepsOptions options;
  options.engine = engine;
  options.variant =
      fmt::format("share {} head {} deterministic {}", calibration.fp8_share, load.fp8_head, load.deterministic);
  options.measures = [] { log::say("step times are measured now, which takes some seconds\n"); };
  NFP_ASSIGN_OR_RETURN(StartSteps found, start_step_times(loaded, options));
  if (found.seconds > 0) {
    log::say("step times measured in {:.1f} s{}{}\n", found.seconds,
             found.path.empty() ? "" : ", kept in " + found.path,
             found.busy ? " until the next start, which measures again, as the machine was busy" : "");
  }
  return std::move(found.table);
}

Result<std::unique_ptr<PrecisionPolicy>> ServeFlags::make_slo_policy(const StepTable& table) const {
  NFP_ASSIGN_OR_RETURN(const StepModel measured, StepModel::fit(table));
  SloOptions options;
  if (!policy.empty()) options.levels = *parse_slo_levels(policy);
  options.missed = *parse_slo_missed(slo_missed);
  options.exact_decode = exact_decode;
  return nfp::make_slo_policy(measured.at_shares(fp8_levels), options);
}

Result<std::unique_ptr<PrecisionPolicy>> ServeFlags::make_policy() const {
  auto made = parse_policy(precision == "auto" ? policy : precision, engine.fp8);
  if (!made.ok()) {
    return error(ErrorCode::kUsage, "--precision-policy: {} (or slo, the default, slo-fp16 or slo-fp8)",
                 made.error().message);
  }
  return made;
}

}  // namespace nfp
