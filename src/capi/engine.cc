// A loaded model and its engine behind the C interface (include/nestedfp_engine.h).
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "base/json_depth.h"
#include "capi/engine_json.h"
#include "capi/status.h"
#include "nestedfp_engine.h"
#include "runtime/chat_session.h"
#include "runtime/loaded_model.h"
#include "runtime/sampling_defaults.h"

using nfp::Result;
using nfp::Status;
using nfp::capi::done;
using nfp::capi::fail;
using nfp::capi::guarded;
using Json = nlohmann::ordered_json;

struct nfp_engine {
  std::mutex mutex;
  std::unique_ptr<nfp::LoadedModel> loaded;
  nfp::SamplingDefaults sampling;
  nfp::ServingEngine serving;
};

namespace nfp::capi {
namespace {

thread_local std::string engine_error;

}  // namespace

nfp_status fail(nfp_status code, std::string_view message) {
  engine_error = naming_options(message);
  return code;
}

namespace {

nfp_status give(const std::string& text, char** out) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) return fail(NFP_RESOURCE, "out of memory");
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return NFP_OK;
}

nfp_status give(const Json& json, char** out) {
  return give(json.dump(-1, ' ', false, Json::error_handler_t::replace), out);
}

Status need_tokenizer(const nfp_engine& engine) {
  if (engine.loaded->tokenizer != nullptr) return ok_status();
  return error(ErrorCode::kUnsupported, "{}: has no tokenizer; give token ids", engine.loaded->name);
}

Result<std::unique_ptr<nfp_engine>> open(const char* model, const char* options_text) {
  NFP_ASSIGN_OR_RETURN(const Json options_json, parse_object(options_text, "options"));
  NFP_ASSIGN_OR_RETURN(EngineSettings settings, parse_settings(options_json));
  auto engine = std::make_unique<nfp_engine>();
  settings.model.before_weights = [&](const LoadedModel& outlined) -> Status {
    NFP_ASSIGN_OR_RETURN(engine->sampling,
                         load_sampling_defaults(*outlined.source, settings.generation_config, "generation_config"));
    return ok_status();
  };
  NFP_ASSIGN_OR_RETURN(engine->loaded, load(model, settings.model));
  settings.serving.fp8 = settings.fp8.value_or(engine->loaded->backend->fastest_fp8());
  // On a CPU the KV cache is the caller's memory, so it is small; a device's is there for it.
  constexpr int32_t kSequencesOnCpu = 8;
  int32_t& sequences = settings.serving.limits.max_sequences;
  if (sequences == 0 && !engine->loaded->backend->memory()) sequences = kSequencesOnCpu;
  NFP_ASSIGN_OR_RETURN(auto policy, parse_policy(settings.policy, settings.serving.fp8, /*shares=*/false));
  if (policy->needs_sensitivity()) {
    return error(ErrorCode::kUnsupported, "policy '{}': graded policies are the program's (nestedfp serve)",
                 settings.policy);
  }
  NFP_ASSIGN_OR_RETURN(engine->serving, make_engine(*engine->loaded, settings.serving, std::move(policy)));
  return engine;
}

}  // namespace
}  // namespace nfp::capi

using nfp::capi::give;

extern "C" {

int32_t nfp_engine_abi_version(void) { return NFP_ENGINE_ABI_VERSION; }
const char* nfp_engine_last_error(void) { return nfp::capi::engine_error.c_str(); }
void nfp_engine_free(char* text) { std::free(text); }

nfp_status nfp_engine_open(const char* model, const char* options, nfp_engine** engine) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(model != nullptr && options != nullptr && engine != nullptr, "nfp_engine_open: a pointer is null");
    auto made = nfp::capi::open(model, options);
    if (!made.ok()) return fail(made.error());
    *engine = std::move(made).value().release();
    return NFP_OK;
  });
}

void nfp_engine_close(nfp_engine* engine) {
  if (engine == nullptr) return;
  const auto here = engine->loaded->backend->enter();
  engine->serving.engine.reset();
  engine->serving.runner.reset();
  delete engine;
}

nfp_status nfp_engine_info(nfp_engine* engine, char** info) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && info != nullptr, "nfp_engine_info: a pointer is null");
    const std::lock_guard lock(engine->mutex);
    const nfp::LoadedModel& loaded = *engine->loaded;
    return give(Json{{"model", loaded.name},
                     {"device", loaded.backend->info().device},
                     {"vocab_size", loaded.config.vocab},
                     {"max_model_len", engine->serving.engine->config().max_context},
                     {"weight_bytes", loaded.model->weight_bytes()},
                     {"load_s", loaded.load_seconds},
                     {"policy", engine->serving.engine->policy().name()},
                     {"default_sampling_params", Json::parse(engine->sampling.json())}},
                info);
  });
}

nfp_status nfp_engine_encode(nfp_engine* engine, const char* text, size_t bytes, char** ids) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && text != nullptr && ids != nullptr, "nfp_engine_encode: a pointer is null");
    if (Status status = nfp::capi::need_tokenizer(*engine); !status.ok()) return fail(status.error());
    const auto encoded = engine->loaded->tokenizer->encode(std::string_view(text, bytes));
    if (!encoded.ok()) return fail(encoded.error());
    return give(Json{{"ids", *encoded}}, ids);
  });
}

nfp_status nfp_engine_decode(nfp_engine* engine, const char* ids, char** text) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && ids != nullptr && text != nullptr, "nfp_engine_decode: a pointer is null");
    if (Status status = nfp::capi::need_tokenizer(*engine); !status.ok()) return fail(status.error());
    const auto json = nfp::parse_file_json<Json>(ids);
    const auto numbers = nfp::capi::parse_ids(json, "ids");
    if (!numbers.ok()) return fail(numbers.error());
    return give(Json{{"text", engine->loaded->tokenizer->decode(*numbers)}}, text);
  });
}

nfp_status nfp_engine_apply_chat_template(nfp_engine* engine, const char* input, char** ids) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && input != nullptr && ids != nullptr,
                     "nfp_engine_apply_chat_template: a pointer is null");
    if (Status status = nfp::capi::need_tokenizer(*engine); !status.ok()) return fail(status.error());
    auto json = nfp::capi::parse_object(input, "input");
    if (!json.ok()) return fail(json.error());
    const Json messages = json->value("messages", Json::array());
    const Json tools = json->value("tools", Json());
    json->erase("messages");
    json->erase("tools");
    const auto chat = nfp::load_chat_template(*engine->loaded, !tools.is_null());
    if (!chat.ok()) return fail(chat.error());
    const auto encoded = nfp::encode_chat(*engine->loaded, *chat, messages, tools, *json);
    if (!encoded.ok()) return fail(encoded.error());
    return give(Json{{"ids", *encoded}}, ids);
  });
}

nfp_status nfp_engine_submit(nfp_engine* engine, const char* request) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && request != nullptr, "nfp_engine_submit: a pointer is null");
    const auto json = nfp::capi::parse_object(request, "request");
    if (!json.ok()) return fail(json.error());
    auto parsed = nfp::capi::parse_request(*json, engine->loaded->tokenizer.get(), engine->loaded->config.vocab);
    if (!parsed.ok()) return fail(parsed.error());
    const std::lock_guard lock(engine->mutex);
    return done(engine->serving.engine->submit(std::move(parsed).value()));
  });
}

nfp_status nfp_engine_cancel(nfp_engine* engine, const char* id) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && id != nullptr, "nfp_engine_cancel: a pointer is null");
    const std::lock_guard lock(engine->mutex);
    engine->serving.engine->cancel(id);
    return NFP_OK;
  });
}

nfp_status nfp_engine_step(nfp_engine* engine, char** outputs) {
  return guarded([&]() -> nfp_status {
    NFP_CAPI_REQUIRE(engine != nullptr && outputs != nullptr, "nfp_engine_step: a pointer is null");
    const std::lock_guard lock(engine->mutex);
    const auto here = engine->loaded->backend->enter();
    Json list = Json::array();
    if (!engine->serving.engine->idle()) {
      for (const nfp::RequestOutput& output : engine->serving.engine->step()) {
        list.push_back(nfp::capi::to_json(output));
      }
    }
    const bool idle = engine->serving.engine->idle();
    return give(Json{{"outputs", std::move(list)}, {"idle", idle}}, outputs);
  });
}

}  // extern "C"
