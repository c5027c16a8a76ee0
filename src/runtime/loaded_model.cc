#include "runtime/loaded_model.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "backend/devices/devices.h"
#include "base/log.h"
#include "base/process_memory.h"
#include "io/model_json.h"
#include "model/dummy_model.h"
#include "model/plan.h"

namespace nfp {
namespace {

// The template's place: chat_template.jinja (transformers >= 4.43), tokenizer_config.json, chat_template.json (of
// processors, before the first), or a GGUF file's metadata.
Status read_chat_template(LoadedModel& loaded) {
  NFP_ASSIGN_OR_RETURN(const auto file, loaded.source->text_file("chat_template.jinja"));
  if (file) {
    loaded.chat_template = *file;
    return ok_status();
  }
  const auto found = [&] { return !loaded.chat_template.empty() || !loaded.chat_template_json.empty(); };
  for (const char* name : {"tokenizer_config.json", "chat_template.json"}) {
    if (found()) break;
    NFP_ASSIGN_OR_RETURN(const auto text, loaded.source->text_file(name));
    if (!text) continue;
    NFP_ASSIGN_OR_RETURN(const auto json,
                         parse_model_json<nlohmann::json>(*text, fmt::format("{}: {}", loaded.source->path(), name)));
    if (!json.contains("chat_template")) continue;
    const auto& chat = json["chat_template"];
    if (chat.is_string()) loaded.chat_template = chat.get<std::string>();
    if (chat.is_array()) {
      loaded.chat_template_json = chat.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
  }
  if (!found() && loaded.source->gguf_tokenizer() != nullptr) {
    loaded.chat_template = std::string(loaded.source->gguf_tokenizer()->chat_template);
  }
  return ok_status();
}

Status read_config(const ModelSource& source, ModelConfig& config) {
  NFP_ASSIGN_OR_RETURN(config, parse_config(source.config_json(), source.path() + ": config.json"));
  NFP_ASSIGN_OR_RETURN(const auto generation, source.text_file("generation_config.json"));
  if (generation) {
    NFP_RETURN_IF_ERROR(apply_generation_config(*generation, source.path() + ": generation_config.json", config));
  }
  return ok_status();
}

Result<std::unique_ptr<ModelSource>> open_source(const std::string& model, const LoadedModelOptions& options) {
  return options.dummy ? open_dummy_model(model) : ModelSource::open(model);
}

Status check_context(const ModelConfig& config, const LoadedModelOptions& options) {
  if (options.context <= config.max_context) return ok_status();
  return error(ErrorCode::kUsage, "{}: a context of {} tokens is wanted, and this model has {}", options.context_flag,
               options.context, config.max_context);
}

}  // namespace

Result<std::shared_ptr<const Tokenizer>> load_tokenizer(const ModelSource& source) {
  NFP_ASSIGN_OR_RETURN(const auto json, source.text_file("tokenizer.json"));
  if (json) {
    NFP_ASSIGN_OR_RETURN(const auto config, source.text_file("tokenizer_config.json"));
    NFP_ASSIGN_OR_RETURN(const auto generation, source.text_file("generation_config.json"));
    const TokenizerFiles files = {*json, config ? std::string_view(*config) : std::string_view(),
                                  generation ? std::string_view(*generation) : std::string_view()};
    return Tokenizer::from_json(files, source.path() + "/tokenizer.json");
  }
  const GgufTokenizer* gguf = source.gguf_tokenizer();
  if (std::error_code code; gguf == nullptr && std::filesystem::exists(source.path() + "/tokenizer.model", code)) {
    return error(ErrorCode::kNotFound,
                 "{0}: has tokenizer.model and no tokenizer.json, which AutoTokenizer.from_pretrained(\"{0}\")"
                 ".save_pretrained(\"{0}\") of transformers makes of it",
                 source.path());
  }
  if (gguf == nullptr) {
    return error(ErrorCode::kNotFound, "{}: has no tokenizer.json; copy it there from the model's original repository",
                 source.path());
  }
  GgufVocab vocab;
  vocab.architecture = gguf->architecture;
  vocab.model = gguf->model;
  vocab.pre = gguf->pre;
  vocab.tokens = gguf->tokens;
  vocab.types = gguf->types;
  vocab.scores = gguf->scores;
  vocab.merges = gguf->merges;
  vocab.bos = gguf->bos;
  vocab.eos = gguf->eos;
  vocab.eot = gguf->eot;
  vocab.eom = gguf->eom;
  vocab.unknown = gguf->unknown;
  vocab.padding = gguf->padding;
  vocab.add_bos = gguf->add_bos;
  vocab.add_eos = gguf->add_eos;
  vocab.add_space_prefix = gguf->add_space_prefix;
  return Tokenizer::from_gguf(vocab, source.path());
}

Result<std::unique_ptr<LoadedModel>> outline(const std::string& model, const LoadedModelOptions& options) {
  auto loaded = std::make_unique<LoadedModel>();
  loaded->name = model;
  NFP_ASSIGN_OR_RETURN(loaded->source, open_source(model, options));
  if (options.scalings) {
    NFP_ASSIGN_OR_RETURN(loaded->source, scale_source(std::move(loaded->source), *options.scalings));
  }
  NFP_RETURN_IF_ERROR(read_config(*loaded->source, loaded->config));
  if (!loaded->config.has_head && !options.may_lack_head) {
    return error(ErrorCode::kUnsupported, "{}: {}", model, kNoHead);
  }
  NFP_RETURN_IF_ERROR(check_context(loaded->config, options));
  auto tokenizer = load_tokenizer(*loaded->source);
  if (tokenizer.ok()) {
    loaded->tokenizer = std::move(tokenizer).value();
  } else if (options.needs_tokenizer || !options.dummy || tokenizer.error().code != ErrorCode::kNotFound) {
    return tokenizer.error();
  }
  NFP_RETURN_IF_ERROR(read_chat_template(*loaded));
  loaded->end_ids = loaded->config.eos_ids;
  if (loaded->tokenizer) {
    for (const int32_t id : loaded->tokenizer->eog_ids()) {
      if (std::find(loaded->end_ids.begin(), loaded->end_ids.end(), id) == loaded->end_ids.end())
        loaded->end_ids.push_back(id);
    }
  }
  if (options.before_weights) NFP_RETURN_IF_ERROR(options.before_weights(*loaded));
  return loaded;
}

Result<std::unique_ptr<LoadedModel>> load(const std::string& model, const LoadedModelOptions& options) {
  const auto started = std::chrono::steady_clock::now();
  NFP_ASSIGN_OR_RETURN(auto loaded, outline(model, options));
  if (const auto& fp8 = loaded->source->stored_fp8()) {
    log::warn(
        "{}: its weights are FP8 already ({}): FP16 steps compute with these too, the original cannot be restored",
        loaded->source->path(), fp8->text);
  }
  NFP_ASSIGN_OR_RETURN(loaded->backend, make_backend(options.device, {.threads = options.threads,
                                                                      .cpu_kernels = options.cpu_kernels,
                                                                      .deterministic = options.deterministic,
                                                                      .gemm_choices = options.gemm_choices,
                                                                      .hang_s = options.hang_s}));
  const ModelPlan plan = plan_model(loaded->config);
  if (const auto memory = loaded->backend->memory()) {
    NFP_RETURN_IF_ERROR(check_weights_fit(model, plan, memory->free, memory->total));
  } else {
    warn_of_memory(model + ": its weights take", plan.both_bytes, "use a smaller model");
  }
  loaded->threads = std::make_unique<ThreadPool>(loaded->backend->info().threads);
  LoadOptions load_options;
  load_options.fp8_head = options.fp8_head;
  load_options.filter = options.filter;
  load_options.progress = options.progress;
  NFP_ASSIGN_OR_RETURN(loaded->model,
                       load_model(*loaded->source, loaded->config, *loaded->backend, *loaded->threads, load_options));
  loaded->load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return loaded;
}

Result<ServingEngine> make_engine(LoadedModel& loaded, EngineConfig config, std::unique_ptr<PrecisionPolicy> policy) {
  config.end_ids = loaded.end_ids;
  ServingEngine serving;
  NFP_ASSIGN_OR_RETURN(serving.runner, ModelRunner::create(*loaded.model, config));
  serving.engine =
      std::make_unique<Engine>(serving.runner->config(), serving.runner.get(), loaded.tokenizer, std::move(policy));
  return serving;
}

}  // namespace nfp
