// Everything that `nestedfp VERB MODEL` needs of a model, opened in one go: files, configuration, weights on a backend,
// tokenizer, chat template.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/backend.h"
#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "engine/engine.h"
#include "engine/model_runner.h"
#include "io/model_source.h"
#include "io/scaled_source.h"
#include "model/weight_loader.h"
#include "text/tokenizer.h"

namespace nfp {

struct LoadedModel;

// Of a model that has none (ModelConfig::has_head), wherever text or its probabilities are asked for.
inline constexpr std::string_view kNoHead =
    "this model has no head, so it makes no text; its embeddings are at POST /v1/embeddings of `nestedfp serve`";

struct LoadedModelOptions {
  std::string device = "cpu";     // as make_backend has it
  bool deterministic = false;     // likewise
  std::string gemm_choices = {};  // likewise
  double hang_s = 120;            // likewise
  bool dummy = false;             // random weights for a configuration without any
  bool needs_tokenizer = false;   // an error where there is none; else only dummy weights may be without
  bool may_lack_head = false;     // hidden states may be all that the model gives; else that is an error
  int32_t threads = 0;            // 0 = as many as this process may use
  std::string cpu_kernels;        // "" = the best this machine has
  // Tokens of context that are wanted, and the flag or field that an error names: where the model has fewer, that comes
  // before its weights are read. 0 = whatever it has.
  int32_t context = 0;
  std::string context_flag = "--ctx";
  bool fp8_head = false;
  MatrixFilter filter;                             // see LoadOptions
  std::shared_ptr<const TensorScalings> scalings;  // applied to the source before anything is read; may be null
  ProgressCallback progress;
  // Called once all that comes before backend and weights is there. Its error is load()'s: what is wrong with a file
  // that is asked for need not wait until weights are read.
  std::function<Status(const LoadedModel&)> before_weights;
};

struct LoadedModel {
  std::string name;  // as the user gave it
  std::unique_ptr<ModelSource> source;
  ModelConfig config;
  std::unique_ptr<ThreadPool> threads;  // for work beside the backend: reading files, scoring
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;                // after backend: freed before it
  std::shared_ptr<const Tokenizer> tokenizer;  // null where there is none (LoadedModelOptions::needs_tokenizer)
  std::vector<int32_t> end_ids;                // tokens that end an answer, by any of the model's files
  std::string chat_template;                   // source text; empty = the model has none
  std::string chat_template_json;              // where it is a list of named templates: that list
  double load_seconds = 0;
};

// What can be known of a model before its weights are read. Errors are load()'s of these: a configuration that is not
// computed, fewer tokens of context than options.context, no tokenizer, those of options.before_weights.
Result<std::unique_ptr<LoadedModel>> outline(const std::string& model, const LoadedModelOptions& options);

Result<std::unique_ptr<LoadedModel>> load(const std::string& model, const LoadedModelOptions& options);

// Only files, configuration and tokenizer: for verbs that need no weights.
Result<std::shared_ptr<const Tokenizer>> load_tokenizer(const ModelSource& source);

// A model ready to answer: the runner and the engine over it.
struct ServingEngine {
  std::unique_ptr<ModelRunner> runner;
  std::unique_ptr<Engine> engine;
};

// Its config() is `config` with the model's end_ids and all that was left open decided (ModelRunner::config).
Result<ServingEngine> make_engine(LoadedModel& loaded, EngineConfig config, std::unique_ptr<PrecisionPolicy> policy);

}  // namespace nfp
