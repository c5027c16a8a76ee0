// nestedfp serve: an OpenAI-compatible server whose precision follows the load.
#include <fmt/format.h>
#include <malloc.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/process_memory.h"
#include "base/stop_signals.h"
#include "base/temporary_path.h"
#include "flags.h"
#include "progress_bar.h"
#include "serve_flags.h"
#include "server/serve/stall_watch.h"
#include "shell/config_file.h"
#include "verbs.h"

namespace nfp {
namespace {

server::ServedModel::Facts facts_of(const LoadedModel& loaded, const ServeFlags& flags) {
  server::ServedModel::Facts facts;
  facts.names = flags.names.empty() ? std::vector<std::string>{flags.model} : flags.names;
  facts.root = flags.model;
  facts.tokenizer = loaded.tokenizer;
  facts.has_head = loaded.config.has_head;
  facts.chat_template = loaded.chat_template;
  facts.chat_template_json = loaded.chat_template_json;
  return facts;
}

// Seconds between one call and the next.
class Lap {
 public:
  double operator()() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

struct StartSeconds {
  double weights = 0;  // calibration included
  double step_times = 0;
  double engine = 0;  // its KV cache and buffers
};

// What a person needs to know at the start.
void print_start(const LoadedModel& loaded, const EngineConfig& made, int32_t max_context,
                 const server::ServedModel::Facts& facts, uint64_t kv_bytes, const std::string& policy,
                 const StartSeconds& took, const std::string& url) {
  const int64_t kv_tokens = int64_t{made.kv_blocks} * made.block_size;
  log::say(
      "model      {} ({}; one copy of the weights, {})\n"
      "memory     {} in use\n"
      "KV cache   {}: {} tokens, or {:.1f} requests of {} tokens{}\n"
      "batches    up to {} requests and {} tokens a step\n"
      "precision  {}; FP8 steps compute as {}\n"
      "sampling   {}\n"
      "{}"
      "grammars   {}\n"
      "started    weights {:.2f} s, step times {:.2f} s, KV cache and engine {:.2f} s\n"
      "ready      {}  (API at {}/v1)\n",
      facts.names.front(), loaded.backend->info().device, human_bytes(loaded.model->weight_bytes()),
      human_bytes(process_memory().resident), human_bytes(kv_bytes), kv_tokens,
      static_cast<double>(kv_tokens) / max_context, max_context,
      made.kv_dtype == DType::kF8E4M3 ? "; E4M3: keys and values are rounded, for exact requests too" : "",
      made.limits.max_sequences, made.limits.max_step_tokens, policy,
      name_of(computed_precision(*loaded.backend, made.fp8)),
      facts.sampling.says_how_to_draw() ? facts.sampling.text() : "temperature 1 where a request does not say",
      loaded.config.has_head ? "" : "answers    /v1/embeddings alone: the model has no head, so it makes no text\n",
      server::grammars_available() ? "xgrammar" : "not built", took.weights, took.step_times, took.engine, url, url);
}

// glibc keeps large freed blocks in one heap a thread, for good. A server's memory has to come back after large
// requests: blocks of a megabyte are mapped each by itself, and threads share two heaps.
void return_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
  mallopt(M_ARENA_MAX, 2);
}

// Freeing what a failed device holds may wait for it for ever, so nothing is freed.
[[noreturn]] void exit_by_failure(std::string_view what) {
  log::say("nestedfp: error: {}. Start the server again\n", what);
  std::fflush(nullptr);
  remove_all_temporaries();
  std::_Exit(1);
}

Status run(ServeFlags& flags) {
  return_freed_memory();
  block_stop_signals();
  std::optional<StopRemovesTemporaries> stop(std::in_place, 0);  // until there is something to finish
  NFP_RETURN_IF_ERROR(flags.resolve());
  flags.warn_of_idle_flags();
  NFP_ASSIGN_OR_RETURN(std::optional<StepTable> steps, flags.given_step_times());
  std::unique_ptr<PrecisionPolicy> policy;
  if (!flags.plans()) {
    NFP_ASSIGN_OR_RETURN(policy, flags.make_policy());
  }
  if (!flags.quiet) log::set_level(log::Level::kInfo);

  // Everything the engine runs on outlives the service.
  std::unique_ptr<LoadedModel> loaded;
  SamplingDefaults sampling;
  std::optional<server::ServedModel::Facts> facts;
  ServingEngine engine;
  Lap lap;
  StartSeconds took;
  NFP_ASSIGN_OR_RETURN(auto service, server::Service::listen(flags.service));
  {
    ProgressBar bar;
    flags.load.progress = bar.callback();
    flags.load.needs_tokenizer = true;
    flags.load.may_lack_head = true;
    flags.load.context = flags.engine.max_context;
    flags.load.context_flag = "--max-model-len";
    flags.load.before_weights = [&](const LoadedModel& opened) -> Status {
      NFP_ASSIGN_OR_RETURN(sampling, load_sampling_defaults(*opened.source, flags.generation_config));
      if (facts) return ok_status();
      facts = facts_of(opened, flags);
      NFP_RETURN_IF_ERROR(server::choose_chat_template(flags.chat_template, *facts));
      return server::check_chat_template(*facts);
    };
    flags.calibration.model = flags.model;
    NFP_ASSIGN_OR_RETURN(loaded, load_calibrated(flags.calibration, flags.load,
                                                 flags.plans_shares() || (policy && policy->needs_sensitivity())));
  }
  took.weights = lap();
  log::say("weights    {} bytes in after {:.2f} s\n", loaded->model->weight_bytes(), took.weights);
  if (flags.precision == "auto") flags.engine.fp8 = loaded->backend->fastest_fp8();
  if (steps) flags.warn_of_other_step_times(*steps, *loaded);
  if (flags.plans()) {
    if (!steps) {
      NFP_ASSIGN_OR_RETURN(steps, flags.load_step_times(*loaded));
    }
    NFP_ASSIGN_OR_RETURN(policy, flags.make_slo_policy(*steps));
  } else {
    if (flags.precision == "auto") {
      NFP_ASSIGN_OR_RETURN(policy, flags.make_policy());  // again: its FP8 is the backend's
    }
    if (steps) {
      NFP_ASSIGN_OR_RETURN(StepModel model, StepModel::fit(*steps));
      policy->watch_by(std::move(model));
    }
  }
  took.step_times = lap();
  NFP_ASSIGN_OR_RETURN(engine, make_engine(*loaded, flags.engine, std::move(policy)));
  took.engine = lap();

  facts->tokenizer = loaded->tokenizer;
  facts->sampling = sampling;
  const EngineConfig made = engine.engine->config();
  const int32_t max_context = engine.engine->bounds().max_context;
  if (max_context < flags.engine.max_context) {
    return error(ErrorCode::kUsage,
                 "--max-model-len {}: the KV cache holds {} tokens; give it more (--kv-cache-memory), or ask for a "
                 "shorter context",
                 flags.engine.max_context, max_context);
  }
  const std::string policy_name = engine.engine->policy().name();
  stop.reset();
  log::never_wait();
  NFP_RETURN_IF_ERROR(service->serve(*facts, std::move(engine.engine)));
  print_start(*loaded, made, max_context, *facts, engine.runner->kv_bytes(), policy_name, took, service->url());
  std::optional<server::StallWatch> watch;
  if (loaded->backend->memory()) {  // a device: it may never answer again, which a long step on a CPU always does
    // Of a hung step the backend itself says so, and requests end with an error. This is for when it cannot.
    constexpr double kGrace = 15;
    watch.emplace([&] { return service->engine().progress(); }, flags.load.hang_s + kGrace,
                  [](double seconds) {
                    exit_by_failure(fmt::format("the device has not moved for {:.0f} s, nor has its driver", seconds));
                  });
  }
  wait_for_stop_signal();
  service->drain();
  if (service->engine().failed()) exit_by_failure("the device or the engine failed while serving; the log says how");
  return ok_status();
}

}  // namespace

void add_serve(CLI::App& app, Status& status) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* verb = app.add_subcommand("serve", "Serve a model over HTTP as OpenAI does, precision following the load");
  verb->footer(
      "Examples:\n"
      "  nestedfp serve model.gguf\n"
      "  nestedfp serve --config serve.toml\n"
      "  nestedfp serve ./Llama-3.2-1B --host 0.0.0.0 --api-key-file keys --precision-policy threshold:64\n"
      "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "       -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n"
      "docs/serving.md explains flags, endpoints, metrics and deployment.");
  flags->add_to(*verb);
  shell::add_config_flag(*verb);
  verb->callback([flags, verb, &status] {
    if (flags->precision == "fp16" && flags->engine.speculative_tokens == 0) {
      warn_of_idle_fp8_flags(*verb, "--precision fp16");
    }
    status = run(*flags);
  });
}

}  // namespace nfp
