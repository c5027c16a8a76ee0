#include "tune/tune_steps.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

#include "backend/cuda/gemm/plan/gemm_chooser.h"
#include "backend/cuda/gemm/tune/tune_plan.h"
#include "backend/devices/devices.h"
#include "base/thread_pool.h"
#include "engine/batch.h"
#include "eval/bench_engine.h"
#include "io/model_source.h"
#include "model/config.h"
#include "model/dummy_model.h"
#include "model/weight_loader.h"

namespace nfp {
namespace {

using cuda::Config;
using cuda::Mode;

constexpr int32_t kBlockSize = 16;
// Layers are as many as hold so many weights: a step finds none of its own in the L2, and its beginning counts little.
// (Three layers of Mistral-Small-24B made a choice for one token in FP8 look 2 % quicker that is 1 % slower in all 40.)
constexpr int64_t kWeights = int64_t{4} << 30;
constexpr int32_t kLeastLayers = 3;
// Candidates take turns of this long, so often, and the best of them and what it would replace some longer turns: a GPU
// at its power limit needs a while to find the clock that a kernel's power allows.
constexpr double kTurnSeconds = 0.008, kLongTurnSeconds = 0.08;
constexpr int kTurns = 6, kLongTurns = 5;
// What a step must take less, to be no noise.
constexpr double kGain = 1.003;

int32_t most_tokens(const TuneStepsOptions& options) {
  int32_t most = 1;
  for (const auto& counts : {options.tokens, options.checked}) {
    for (const int tokens : counts) most = std::max(most, tokens);
  }
  return most;
}

std::optional<Precision> precision_of(Mode mode) {
  if (mode == Mode::kF16) return Precision::kFp16;
  if (mode == Mode::kE4M3) return Precision::kFp8W8A8;
  if (mode == Mode::kW8A16) return Precision::kFp8;
  return std::nullopt;
}

const Config& quickest_of(const cuda::Comparison& found) { return found.is_slower ? found.fastest : found.chosen; }

// The first layers of a model. All of them are alike but for windows, rotation and experts, which come every few
// layers.
ModelConfig first_layers(ModelConfig config) {
  const int64_t wide =
      config.experts.count > 0 && config.has_experts(config.layers - 1)
          ? int64_t{config.experts.count} * config.experts.intermediate + config.experts.shared_intermediate
          : config.intermediate;
  const int64_t weights = config.hidden * (2 * (config.query_features() + config.kv_features()) + 3 * wide);
  const auto enough = static_cast<int32_t>(std::min<int64_t>((kWeights + weights - 1) / weights, config.layers));
  config.layers = std::min(std::max(enough, kLeastLayers), config.layers);
  const auto layers = static_cast<size_t>(config.layers);
  config.windows.resize(layers);
  if (!config.nope_layers.empty()) config.nope_layers.resize(layers);
  if (!config.experts.layers.empty()) config.experts.layers.resize(layers);
  return config;
}

Result<DummyConfig> read_config(const std::string& model) {
  if (auto found = read_dummy_config(model); found.ok()) return found;
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(model));
  return DummyConfig{source->path(), std::string(source->config_json())};
}

// Steps of a few layers, captured with any choice of kernels.
class StepTuner {
 public:
  static Result<std::unique_ptr<StepTuner>> create(const std::string& model, const TuneStepsOptions& options);

  // Without choices, of this device.
  cuda::TuningTable empty_table() const {
    cuda::TuningTable table;
    table.device = chooser_->gemm_choices().device;
    table.copy_models(chooser_->gemm_choices());
    return table;
  }

  // The kernels of all products of steps of `tokens` tokens, into the table.
  Status tune(Mode mode, int tokens, cuda::TuningTable& table);
  // Of a number of tokens that was not tuned: only what makes the step shorter than its choices.
  Status check(Mode mode, int tokens, cuda::Tuned& tuned);

 private:
  // Rows and columns of a product, and what it is called.
  struct Product {
    int64_t n, k;
    std::string name;
  };
  struct Candidate {
    Config config;
    std::unique_ptr<Graph> step;
    std::vector<double> seconds;
  };

  explicit StepTuner(const TuneStepsOptions& options) : options_(options) {}
  Status prepare(int tokens);
  Result<std::unique_ptr<Graph>> capture(Mode mode, const cuda::TuningTable& table);
  // Seconds a step of one turn.
  Result<double> turn(Graph& step, double seconds);
  // Each in a turn, in random order, `turns` times over.
  Status take_turns(std::vector<Candidate*> candidates, int turns, double seconds);
  // Steps with other kernels for one product, where the others are the table's choices; times are seconds a step.
  Result<cuda::Comparison> compare(const Product& product, Mode mode, int tokens, const cuda::TuningTable& table);
  // The same of all of them, one after the other; `found` says whether to keep a product's quickest kernel, or its
  // choice if that is as quick, as a measured choice.
  using Found = std::function<bool(const Product&, const cuda::Comparison&)>;
  Status for_each_product(Mode mode, int tokens, const Found& found);

  const TuneStepsOptions& options_;
  std::unique_ptr<ModelSource> source_;
  ModelConfig config_;
  std::unique_ptr<Backend> backend_;
  cuda::GemmChooser* chooser_ = nullptr;
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StepInput> input_;
  StepShape shape_;
  std::vector<Product> products_;  // with most weights first
  std::mt19937 random_{12};
  double step_seconds_ = 0;  // about
};

Result<std::unique_ptr<StepTuner>> StepTuner::create(const std::string& model, const TuneStepsOptions& options) {
  std::unique_ptr<StepTuner> tuner(new StepTuner(options));
  NFP_ASSIGN_OR_RETURN(DummyConfig text, read_config(model));
  NFP_ASSIGN_OR_RETURN(ModelConfig config, parse_config(text.json, model));
  NFP_RETURN_IF_ERROR(check_tuned_steps(model, config, options));
  tuner->config_ = first_layers(std::move(config));
  const int32_t most = most_tokens(options);
  tuner->source_ = make_dummy_source(std::move(text), tensors_of(tuner->config_), 0);
  auto made = make_backend("cuda", {});
  if (!made.ok()) {
    const std::string& why = made.error().message;  // without its advice to compute on the CPU
    return error(made.error().code, "tune times kernels on a GPU: {}", why.substr(0, why.find("; use --device cpu")));
  }
  tuner->backend_ = std::move(made).value();
  Backend& backend = *tuner->backend_;
  tuner->chooser_ = dynamic_cast<cuda::GemmChooser*>(&backend);
  if (tuner->chooser_ == nullptr)
    return error(ErrorCode::kUnsupported, "tune: {} has no kernels to choose", backend.info().name);
  tuner->threads_ = std::make_unique<ThreadPool>(backend.info().threads);
  NFP_ASSIGN_OR_RETURN(tuner->model_,
                       load_model(*tuner->source_, tuner->config_, backend, *tuner->threads_, LoadOptions{}));

  const int32_t decoded = std::min(most, kMostDecoded);
  const int32_t context = std::min(options.context, tuner->config_.max_context);
  const int32_t positions = std::min(std::max(most, context), tuner->config_.max_context);
  NFP_RETURN_IF_ERROR(tuner->model_->reserve(most, decoded, positions));
  const int32_t blocks =
      std::max(decoded * ((context + kBlockSize - 1) / kBlockSize), (most + kBlockSize - 1) / kBlockSize);
  NFP_ASSIGN_OR_RETURN(tuner->cache_, backend.make_kv_cache(tuner->model_->kv_spec(blocks, kBlockSize, DType::kF16)));
  StepLimits limits;
  limits.tokens = most;
  limits.sequences = decoded;
  limits.table_width = (positions + kBlockSize - 1) / kBlockSize;
  limits.vocab = tuner->config_.vocab;
  limits.block_size = kBlockSize;
  NFP_ASSIGN_OR_RETURN(tuner->input_, StepInput::create(backend, limits));

  for (const Linear* linear : tuner->model_->linears()) {
    if (linear->expert >= 0 || linear->type == GemmType::kHead) continue;
    const Product product{linear->weight->n(), linear->weight->k(), std::string(name_of(linear->type))};
    const auto known = std::find_if(tuner->products_.begin(), tuner->products_.end(),
                                    [&](const Product& p) { return p.n == product.n && p.k == product.k; });
    if (known == tuner->products_.end()) tuner->products_.push_back(product);
  }
  std::stable_sort(tuner->products_.begin(), tuner->products_.end(),
                   [](const Product& a, const Product& b) { return a.n * a.k > b.n * b.k; });
  return tuner;
}

Status StepTuner::prepare(int tokens) {
  const bool decodes = tokens <= kMostDecoded;
  const int32_t context = std::min(options_.context, config_.max_context);
  shape_ = {};
  shape_.tokens = tokens;
  shape_.sequences = decodes ? tokens : 1;
  shape_.single = decodes ? tokens : 0;
  if (decodes) shape_.launch_context = backend_->launch_context(*cache_, shape_.sequences, context);
  input_->begin(0, shape_);
  std::vector<int32_t> ids(static_cast<size_t>(decodes ? 1 : tokens)), blocks;
  const int32_t width = ((decodes ? context : tokens) + kBlockSize - 1) / kBlockSize;
  for (int32_t sequence = 0; sequence < shape_.sequences; ++sequence) {
    for (int32_t& id : ids) id = static_cast<int32_t>(random_() % static_cast<uint32_t>(config_.vocab));
    blocks.resize(static_cast<size_t>(width));
    std::iota(blocks.begin(), blocks.end(), sequence * width);
    input_->add({.tokens = ids, .first = decodes ? context - 1 : 0, .blocks = blocks});
  }
  input_->upload();
  return backend_->synchronize();
}

Result<std::unique_ptr<Graph>> StepTuner::capture(Mode mode, const cuda::TuningTable& table) {
  chooser_->set_gemm_choices(table);
  ForwardArgs args;
  args.batch = input_->view(shape_, nullptr);
  args.precision = *precision_of(mode);
  args.cache = cache_.get();
  model_->forward(args);  // loads what is loaded late, so that the capture only records
  NFP_RETURN_IF_ERROR(backend_->synchronize());
  NFP_RETURN_IF_ERROR(backend_->begin_capture());
  model_->forward(args);
  return backend_->end_capture();
}

Result<double> StepTuner::turn(Graph& step, double seconds) {
  const int replays = step_seconds_ > 0 ? std::max(1, static_cast<int>(seconds / step_seconds_)) : 3;
  NFP_RETURN_IF_ERROR(backend_->replay(step));  // whatever it finds in caches that another step left there
  NFP_RETURN_IF_ERROR(backend_->synchronize());
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < replays; ++i) NFP_RETURN_IF_ERROR(backend_->replay(step));
  NFP_RETURN_IF_ERROR(backend_->synchronize());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / replays;
}

Status StepTuner::take_turns(std::vector<Candidate*> candidates, int turns, double seconds) {
  for (Candidate* candidate : candidates) candidate->seconds.clear();
  for (int i = 0; i < turns; ++i) {
    std::shuffle(candidates.begin(), candidates.end(), random_);
    for (Candidate* candidate : candidates) {
      NFP_ASSIGN_OR_RETURN(const double took, turn(*candidate->step, seconds));
      candidate->seconds.push_back(took);
    }
  }
  return ok_status();
}

Result<cuda::Comparison> StepTuner::compare(const Product& product, Mode mode, int tokens,
                                            const cuda::TuningTable& table) {
  const std::vector<Config> configs =
      cuda::likeliest({tokens, product.n, product.k, mode}, chooser_->gemm_device(), table, options_.candidates);
  std::vector<Candidate> candidates;
  for (const Config& config : configs) {
    cuda::TuningTable with = table;
    with.set(product.n, product.k, mode, tokens, config);
    NFP_ASSIGN_OR_RETURN(auto step, capture(mode, with));
    candidates.push_back({config, std::move(step), {}});
  }
  if (step_seconds_ == 0) {
    NFP_ASSIGN_OR_RETURN(step_seconds_, turn(*candidates[0].step, 0));
  }
  return cuda::compare_with_choice(
      configs, kGain, [&](std::span<const Config> some, bool again) -> Result<std::vector<double>> {
        std::vector<Candidate*> turning;
        for (const Config& config : some) {
          turning.push_back(&*std::find_if(candidates.begin(), candidates.end(),
                                           [&](const Candidate& candidate) { return candidate.config == config; }));
        }
        NFP_RETURN_IF_ERROR(take_turns(turning, again ? kLongTurns : kTurns, again ? kLongTurnSeconds : kTurnSeconds));
        std::vector<double> seconds;
        seconds.reserve(turning.size());
        for (const Candidate* candidate : turning) seconds.push_back(median(candidate->seconds));
        if (!again && options_.tried) {
          options_.tried({mode, tokens, product.n, product.k, config_.layers, {some.begin(), some.end()}, seconds});
        }
        return seconds;
      });
}

Status StepTuner::for_each_product(Mode mode, int tokens, const Found& found) {
  NFP_RETURN_IF_ERROR(prepare(tokens));
  step_seconds_ = 0;
  cuda::TuningTable choices = chooser_->gemm_choices();
  std::string changed;
  double ratio = 1, last = 0;
  for (const Product& product : products_) {
    NFP_ASSIGN_OR_RETURN(const cuda::Comparison outcome, compare(product, mode, tokens, choices));
    if (found(product, outcome)) choices.set(product.n, product.k, mode, tokens, quickest_of(outcome));
    last = outcome.chosen_time;
    if (!outcome.is_slower) continue;
    ratio *= outcome.fastest_time / outcome.chosen_time;
    last = outcome.fastest_time;
    changed += fmt::format(", {} {} for {}", product.name, to_string(outcome.fastest), to_string(outcome.chosen));
  }
  chooser_->set_gemm_choices(choices);
  if (options_.progress) {
    options_.progress(fmt::format("{}, {} tokens: {} layers take {:.1f} us, {:.3f} of before{}", name_of(mode), tokens,
                                  config_.layers, last * 1e6, ratio, changed));
  }
  return ok_status();
}

Status StepTuner::tune(Mode mode, int tokens, cuda::TuningTable& table) {
  return for_each_product(mode, tokens, [&](const Product& product, const cuda::Comparison& found) {
    table.set(product.n, product.k, mode, tokens, quickest_of(found));
    return true;
  });
}

Status StepTuner::check(Mode mode, int tokens, cuda::Tuned& tuned) {
  return for_each_product(mode, tokens, [&](const Product& product, const cuda::Comparison& found) {
    tuned.check.add({tokens, product.n, product.k, mode}, found);
    if (found.is_slower) tuned.table.set(product.n, product.k, mode, tokens, found.fastest);
    return found.is_slower;
  });
}

}  // namespace

Result<ModelConfig> read_tuned_config(const std::string& model) {
  NFP_ASSIGN_OR_RETURN(const DummyConfig text, read_config(model));
  return parse_config(text.json, model);
}

Status check_tuned_steps(const std::string& model, const ModelConfig& config, const TuneStepsOptions& options) {
  for (const Mode mode : options.modes) {
    if (!precision_of(mode)) {
      return error(ErrorCode::kUsage,
                   "--modes: no step of a model runs {}; name f16, e4m3 or w8a16, or tune it for a --shape",
                   name_of(mode));
    }
  }
  const int32_t most = most_tokens(options);
  if (most > kMostDecoded && most > config.max_context) {
    return error(ErrorCode::kUsage, "--tokens: {} are more than the {} tokens of context that {} has", most,
                 config.max_context, model);
  }
  return ok_status();
}

Result<cuda::Tuned> tune_steps(const std::string& config, const TuneStepsOptions& options) {
  NFP_ASSIGN_OR_RETURN(const auto tuner, StepTuner::create(config, options));
  cuda::Tuned tuned{tuner->empty_table(), {}};
  for (const Mode mode : options.modes) {
    for (const int tokens : options.tokens) NFP_RETURN_IF_ERROR(tuner->tune(mode, tokens, tuned.table));
    for (const int tokens : options.checked) NFP_RETURN_IF_ERROR(tuner->check(mode, tokens, tuned));
  }
  return tuned;
}

}  // namespace nfp
