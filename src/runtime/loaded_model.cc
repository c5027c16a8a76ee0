#include "runtime/loaded_model.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>

#include "backend/devices/devices.h"
#include "base/json_depth.h"
#include "model/dummy_model.h"

namespace nfp {
namespace {

constexpr int32_t kDefaultContext = 4096;
// The template's place: chat_template.jinja (transformers >= 4.43), tokenizer_config.json, or a GGUF file's metadata.
Status read_chat_template(LoadedModel& loaded) {
  NFP_ASSIGN_OR_RETURN(const auto file, loaded.source->text_file("chat_template.jinja"));
  if (file) {
    loaded.chat_template = *file;
    return ok_status();
  }
  NFP_ASSIGN_OR_RETURN(const auto tokenizer_config, loaded.source->text_file("tokenizer_config.json"));
  if (tokenizer_config) {
    if (json_too_deep(*tokenizer_config)) {
      return error(ErrorCode::kInvalidInput, "{}: tokenizer_config.json is nested deeper than {} levels",
                   loaded.source->path(), kMaxFileJsonDepth);
    }
    const auto json = nlohmann::json::parse(*tokenizer_config, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("chat_template")) {
      const auto& chat = json["chat_template"];
      if (chat.is_string()) loaded.chat_template = chat.get<std::string>();
      if (chat.is_array())
        loaded.chat_template_json = chat.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
  }
  if (loaded.chat_template.empty() && loaded.chat_template_json.empty() && loaded.source->gguf_tokenizer() != nullptr) {
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
  if (gguf == nullptr) {
    return error(ErrorCode::kNotFound, "{}: has no tokenizer.json; copy it there from the model's original repository",
                 source.path());
  }
  GgufVocab vocab;
  vocab.model = gguf->model;
  vocab.pre = gguf->pre;
  vocab.tokens = gguf->tokens;
  vocab.types = gguf->types;
  vocab.scores = gguf->scores;
  vocab.merges = gguf->merges;
  vocab.bos = gguf->bos;
  vocab.eos = gguf->eos;
  vocab.eot = gguf->eot;
  vocab.unknown = gguf->unknown;
  vocab.padding = gguf->padding;
  vocab.add_bos = gguf->add_bos;
  vocab.add_eos = gguf->add_eos;
  vocab.add_space_prefix = gguf->add_space_prefix;
  return Tokenizer::from_gguf(vocab, source.path());
}

Result<std::unique_ptr<LoadedModel>> load(const std::string& model, const LoadedModelOptions& options) {
  const auto started = std::chrono::steady_clock::now();
  auto loaded = std::make_unique<LoadedModel>();
  loaded->name = model;
  if (options.dummy) {
    NFP_ASSIGN_OR_RETURN(loaded->source, open_dummy_model(model));
  } else {
    NFP_ASSIGN_OR_RETURN(loaded->source, ModelSource::open(model));
  }
  if (options.scalings) {
    NFP_ASSIGN_OR_RETURN(loaded->source, scale_source(std::move(loaded->source), *options.scalings));
  }
  NFP_RETURN_IF_ERROR(read_config(*loaded->source, loaded->config));
  NFP_RETURN_IF_ERROR(read_chat_template(*loaded));
  auto tokenizer = load_tokenizer(*loaded->source);
  if (tokenizer.ok()) {
    loaded->tokenizer = std::move(tokenizer).value();
  } else if (!options.dummy || tokenizer.error().code != ErrorCode::kNotFound) {
    return tokenizer.error();
  }

  NFP_ASSIGN_OR_RETURN(loaded->backend, make_backend(options.device, {.threads = options.threads,
                                                                      .cpu_kernels = options.cpu_kernels,
                                                                      .deterministic = options.deterministic}));
  loaded->threads = std::make_unique<ThreadPool>(loaded->backend->info().threads);
  LoadOptions load_options;
  load_options.fp8_head = options.fp8_head;
  load_options.baseline = options.baseline;
  load_options.filter = options.filter;
  load_options.progress = options.progress;
  NFP_ASSIGN_OR_RETURN(loaded->model,
                       load_model(*loaded->source, loaded->config, *loaded->backend, *loaded->threads, load_options));
  loaded->load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  return loaded;
}

Result<ServingEngine> make_engine(LoadedModel& loaded, const ServingOptions& options,
                                  std::unique_ptr<PrecisionPolicy> policy) {
  const ModelConfig& config = loaded.config;
  RunnerOptions runner;
  runner.max_context = options.ctx > 0 ? options.ctx : std::min(config.max_context, kDefaultContext);
  runner.max_sequences = options.max_sequences;
  runner.max_step_tokens = std::max(options.max_step_tokens, options.max_sequences);
  runner.block_size = options.block_size;
  runner.kv_dtype = options.kv_dtype;
  runner.memory_share = options.memory_share;
  const bool graphs = loaded.backend->prefers_graphs();
  if (graphs && options.graphs) runner.graph_sizes = default_graph_sizes(options.max_sequences);
  const int64_t blocks_a_sequence = (runner.max_context + options.block_size - 1) / options.block_size;
  if (!loaded.backend->memory()) runner.kv_blocks = blocks_a_sequence * options.max_sequences;
  if (options.kv_bytes > 0) {
    const KvCacheSpec spec = loaded.model->kv_spec(1, options.block_size, options.kv_dtype);
    const auto block = static_cast<int64_t>(loaded.backend->kv_bytes_per_block(spec));
    runner.kv_blocks = options.kv_bytes / block;
    if (runner.kv_blocks < 1) {
      return error(ErrorCode::kUsage, "a KV cache of {} bytes holds no block of {} tokens ({} bytes)", options.kv_bytes,
                   options.block_size, block);
    }
  }
  constexpr int64_t kMostBlocks = 1 << 26;
  if (runner.kv_blocks > kMostBlocks) {
    return error(ErrorCode::kUsage, "the KV cache would have {} blocks; ask for a shorter context or fewer sequences",
                 runner.kv_blocks);
  }
  ServingEngine serving;
  NFP_ASSIGN_OR_RETURN(serving.runner, ModelRunner::create(*loaded.model, runner));

  EngineOptions engine;
  engine.limits.max_sequences = runner.max_sequences;
  engine.limits.max_step_tokens = runner.max_step_tokens;
  engine.limits.max_queue = options.max_queue;
  engine.kv_blocks = static_cast<int32_t>(serving.runner->kv_blocks());
  engine.block_size = options.block_size;
  engine.prefix_caching = options.prefix_caching;
  engine.fp8 = options.fp8;
  engine.eos_ids = config.eos_ids;
  if (loaded.tokenizer) {
    for (int32_t id : loaded.tokenizer->eog_ids()) {
      if (std::find(engine.eos_ids.begin(), engine.eos_ids.end(), id) == engine.eos_ids.end())
        engine.eos_ids.push_back(id);
    }
  }
  engine.fp8_levels = options.fp8_levels;
  engine.targets = options.targets;
  engine.steps_in_flight = options.steps_in_flight > 0 ? options.steps_in_flight : graphs ? 2 : 1;
  serving.engine = std::make_unique<Engine>(engine, serving.runner.get(), loaded.tokenizer, std::move(policy));
  return serving;
}

}  // namespace nfp
