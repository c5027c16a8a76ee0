// nestedfp serve: an OpenAI-compatible server whose precision follows the load.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/log.h"
#include "base/process_memory.h"
#include "engine/loaded_model.h"
#include "flags.h"
#include "progress_bar.h"
#include "server/serve/service.h"
#include "verbs.h"

namespace nfp {
namespace {

struct Flags {
  std::string model;
  server::ServiceOptions service;
  ServingOptions serving;
  LoadedModelOptions load;
  ModelFlags calibration;  // only --calibrate, --fp8-share and what belongs to them
  std::vector<std::string> names;
  std::string api_key_file;
  std::string precision = "auto";
  std::string policy = "threshold:1024";
  std::string default_request_precision = "auto";
  std::string kv_dtype = "f16";
  uint64_t kv_bytes = 0;
  bool no_prefix_caching = false;
  bool quiet = false;
  bool no_page = false;
  int32_t drain_timeout_s = 30;
  uint32_t max_body_mb = 32;
};

Status add_api_keys(Flags& flags) {
  std::vector<std::string>& keys = flags.service.api.api_keys;
  if (const char* key = std::getenv("NESTEDFP_API_KEY"); key != nullptr && *key != '\0') keys.emplace_back(key);
  if (!flags.api_key_file.empty()) {
    std::ifstream file(flags.api_key_file);
    if (!file) return error(ErrorCode::kUsage, "--api-key-file {}: cannot be read", flags.api_key_file);
    for (std::string line; std::getline(file, line);) {
      while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
      if (!line.empty() && line.front() != '#') keys.push_back(line);
    }
    if (keys.empty()) return error(ErrorCode::kUsage, "--api-key-file {}: holds no key", flags.api_key_file);
  }
  for (const std::string& key : keys) {
    if (key.empty()) return error(ErrorCode::kUsage, "--api-key is empty");
  }
  return ok_status();
}

// Bytes that the KV cache may take where the user does not say: what all sequences at full length need, but not more
// than a quarter of the memory that is free.
uint64_t default_kv_bytes(const LoadedModel& loaded, const Flags& flags) {
  const KvCacheSpec spec = loaded.model->kv_spec(1, flags.serving.block_size, flags.serving.kv_dtype);
  const int32_t ctx = flags.serving.ctx > 0 ? flags.serving.ctx : std::min(loaded.config.max_context, 4096);
  const auto blocks = static_cast<uint64_t>((ctx + flags.serving.block_size - 1) / flags.serving.block_size);
  const uint64_t all =
      loaded.backend->kv_bytes_per_block(spec) * blocks * static_cast<uint64_t>(flags.serving.max_sequences);
  uint64_t available = 8ull << 30;
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) available = std::strtoull(line.c_str() + 13, nullptr, 10) << 10;
  }
  return std::min(all, available / 4);
}

Status run(Flags& flags) {
  server::block_stop_signals();
  NFP_RETURN_IF_ERROR(add_api_keys(flags));
  const std::string policy_text = flags.precision == "auto" ? flags.policy : flags.precision;
  const Precision fp8 = flags.precision == "fp8-w8a8" ? Precision::kFp8W8A8 : Precision::kFp8;
  NFP_ASSIGN_OR_RETURN(auto policy, parse_policy(policy_text, fp8));
  server::ServiceOptions& service_options = flags.service;
  service_options.log_requests = !flags.quiet;
  service_options.api.page = !flags.no_page;
  service_options.drain_timeout = std::chrono::seconds(flags.drain_timeout_s);
  service_options.http.max_body_bytes = uint64_t{flags.max_body_mb} << 20;
  std::optional<PrecisionClass> request_precision;
  if (server::parse_precision(flags.default_request_precision, "", &request_precision)) {
    return error(ErrorCode::kUsage, "--default-request-precision is {}", flags.default_request_precision);
  }
  service_options.default_precision = *request_precision;
  if (const auto checked = server::parse_tool_format(service_options.tool_call_parser, ""); !checked.ok()) {
    return checked.error();
  }
  if (!flags.quiet) log::set_level(log::Level::kInfo);

  // Everything the engine runs on outlives the service.
  std::unique_ptr<LoadedModel> loaded;
  ServingEngine engine;
  NFP_ASSIGN_OR_RETURN(auto service, server::Service::listen(service_options));
  {
    ProgressBar bar;
    flags.load.progress = bar.callback();
    flags.calibration.model = flags.model;
    NFP_ASSIGN_OR_RETURN(loaded, load_calibrated(flags.calibration, flags.load, policy->needs_order()));
  }
  ServingOptions& serving = flags.serving;
  serving.max_queue = service_options.max_queue;
  serving.fp8 = fp8;
  serving.prefix_caching = !flags.no_prefix_caching;
  serving.kv_dtype = flags.kv_dtype == "f32" ? DType::kF32 : DType::kF16;
  serving.kv_bytes = static_cast<int64_t>(flags.kv_bytes > 0 ? flags.kv_bytes : default_kv_bytes(*loaded, flags));
  NFP_ASSIGN_OR_RETURN(engine, make_engine(*loaded, serving, std::move(policy)));

  server::ServedModel::Facts facts;
  facts.names = flags.names.empty() ? std::vector<std::string>{flags.model} : flags.names;
  facts.root = flags.model;
  facts.tokenizer = loaded->tokenizer;
  facts.chat_template = loaded->chat_template;
  facts.chat_template_json = loaded->chat_template_json;
  facts.vocab = engine.runner->vocab();
  facts.max_context = engine.engine->max_context();
  facts.end_ids = engine.engine->options().eos_ids;
  const EngineOptions& made = engine.engine->options();
  const int64_t kv_tokens = int64_t{made.kv_blocks} * made.block_size;
  const std::string name = facts.names.front();
  const int32_t context = facts.max_context;
  const std::string policy_name = engine.engine->policy().name();
  NFP_RETURN_IF_ERROR(service->serve(std::move(facts), std::move(engine.engine)));
  fmt::print(stderr,
             "model      {} ({}; one copy of the weights, {}; loaded in {:.1f} s)\n"
             "memory     {} in use\n"
             "KV cache   {}: {} tokens, or {:.1f} requests of {} tokens\n"
             "batches    up to {} requests and {} tokens a step\n"
             "precision  {}\n"
             "grammars   {}\n"
             "ready      {}  (API at {}/v1)\n",
             name, loaded->backend->info().device, human_bytes(loaded->model->weight_bytes()), loaded->load_seconds,
             human_bytes(process_memory().resident), human_bytes(engine.runner->kv_bytes()), kv_tokens,
             static_cast<double>(kv_tokens) / context, context, made.limits.max_sequences, made.limits.max_step_tokens,
             policy_name, server::grammars_available() ? "xgrammar" : "not built", service->url(), service->url());
  server::wait_for_stop_signal();
  service->drain();
  return ok_status();
}

void add_flags(CLI::App* verb, Flags& f) {
  http::ServerOptions& http = f.service.http;
  verb->add_option("MODEL", f.model,
                   "Hugging Face directory, nested checkpoint, .gguf file, or org/name in the local Hugging Face cache")
      ->required();
  verb->add_option("--host", http.host, "address to listen on; 0.0.0.0 = all")->capture_default_str();
  verb->add_option("--port", http.port, "0 = any free one")->capture_default_str();
  verb->add_option("--served-model-name", f.names, "names that clients may use; default: MODEL");
  verb->add_option("--api-key", f.service.api.api_keys, "clients must send one of these (also NESTEDFP_API_KEY)");
  verb->add_option("--api-key-file", f.api_key_file, "a file with one key a line");
  verb->add_option("--root-path", f.service.api.root_path, "path under which a proxy shows the server");
  verb->add_option("--allowed-origins", f.service.api.allowed_origins, "web pages that may call the API; '*' = all");
  verb->add_option("--max-model-len", f.serving.ctx, "tokens of prompt and answer; 0 = the model's, at most 4096")
      ->check(CLI::Range(0, 1 << 30));
  verb->add_option("--max-num-seqs", f.serving.max_sequences, "requests computed at once")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  verb->add_option("--max-num-batched-tokens", f.serving.max_step_tokens, "tokens of a step")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--max-queue", f.service.max_queue, "waiting requests; more are answered 429")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--kv-cache-memory", f.kv_bytes,
                   "bytes of KV cache, e.g. 2GB; default: a quarter of free memory at most")
      ->transform(CLI::AsSizeValue(false));
  verb->add_option("--block-size", f.serving.block_size, "tokens of a KV block")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  verb->add_option("--dtype-kv", f.kv_dtype, "number format of the KV cache")
      ->check(CLI::IsMember({"f16", "f32"}))
      ->capture_default_str();
  verb->add_flag("--no-enable-prefix-caching", f.no_prefix_caching, "compute equal prefixes anew");
  verb->add_option("--precision", f.precision, "auto: as the policy decides; else always this")
      ->check(CLI::IsMember({"auto", "fp16", "fp8", "fp8-w8a8"}))
      ->capture_default_str();
  verb->add_option("--precision-policy", f.policy,
                   "for auto: threshold:N (FP8 in steps of more than N tokens), graded:LOW:HIGH (in a share of the "
                   "weights that grows with a step's tokens), alternate:N")
      ->capture_default_str();
  verb->add_option("--default-request-precision", f.default_request_precision, "for requests that do not say")
      ->check(CLI::IsMember({"auto", "exact", "fast"}))
      ->capture_default_str();
  verb->add_flag("--fp8-head", f.load.fp8_head, "let lm_head compute in FP8 too in FP8 steps");
  add_share_flag(*verb, f.calibration);
  add_calibration_flags(*verb, f.calibration);
  verb->add_option("--tool-call-parser", f.service.tool_call_parser, "auto, hermes, llama3_json, mistral or none")
      ->capture_default_str();
  verb->add_option("--threads", f.load.threads, "threads to compute with; 0 = all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  verb->add_option("--io-threads", http.threads, "threads for connections")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  verb->add_option("--max-connections", http.max_connections, "open at once")->capture_default_str();
  verb->add_option("--max-body-mb", f.max_body_mb, "size of a request")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  verb->add_option("--stall-timeout", f.service.api.stall_timeout_s,
                   "seconds without a finished step after which /health fails")
      ->capture_default_str();
  verb->add_option("--drain-timeout", f.drain_timeout_s, "seconds that running requests get after SIGTERM")
      ->check(CLI::Range(0, 86400))
      ->capture_default_str();
  verb->add_flag("--no-page", f.no_page, "no page at /");
  verb->add_flag("--disable-log-requests", f.quiet, "no line for each request");
  verb->add_flag("--log-prompts", f.service.log_prompts, "write prompts into the log");
}

}  // namespace

void add_serve(CLI::App& app, Status& status) {
  auto flags = std::make_shared<Flags>();
  flags->serving.max_sequences = 64;
  flags->serving.max_step_tokens = 2048;
  CLI::App* verb = app.add_subcommand("serve", "Serve a model over HTTP as OpenAI does, precision following the load");
  verb->footer(
      "Examples:\n"
      "  nestedfp serve model.gguf\n"
      "  nestedfp serve ./Llama-3.2-1B --host 0.0.0.0 --api-key-file keys --precision-policy threshold:64\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "       -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n"
      "docs/serving.md explains flags, endpoints, metrics and deployment.");
  add_flags(verb, *flags);
  verb->callback([flags, &status] { status = run(*flags); });
}

}  // namespace nfp
