#include "calibrate/calibrate.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/float_types.h"
#include "base/mapped_file.h"
#include "calibrate/descent.h"
#include "calibrate/store.h"
#include "calibrate/text.h"
#include "engine/loaded_model.h"
#include "engine/sequence_runner.h"
#include "nested/format.h"

namespace nfp {
namespace {

constexpr uint32_t kMethodVersion = 2;  // of the key: raised when the same options would choose otherwise
constexpr int32_t kSelfLength = 128;    // many short ones: more starts, and no long contexts to attend to
constexpr int32_t kFileLength = 512;
constexpr int64_t kSelfTokens = 12288;
constexpr int64_t kFileTokens = 65536;
constexpr size_t kHeldOut = 1;  // sequences kept for the order of sensitivity

// Sums H for the linear layers of one transformer layer, by the first matrix's name.
class HessianObserver final : public LinearObserver {
 public:
  HessianObserver(Backend& backend, ThreadPool& threads) : backend_(backend), threads_(threads) {}

  void on_linear(const Linear& linear, void* x, int32_t rows) override {
    const int64_t cols = linear.weight->k();
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    const DType dtype = backend_.activation_dtype();
    raw_.resize(count * size_of(dtype));
    if (status_.ok()) status_ = backend_.download(raw_.data(), x, raw_.size());
    if (!status_.ok()) return;
    values_.resize(count);
    if (dtype == DType::kF32) {
      std::memcpy(values_.data(), raw_.data(), raw_.size());
    } else {
      const auto* bits = reinterpret_cast<const uint16_t*>(raw_.data());
      const auto widen = dtype == DType::kF16 ? fp16_to_fp32 : bf16_to_fp32;
      std::transform(bits, bits + count, values_.begin(), widen);
    }
    const auto [place, made] = sums_.try_emplace(linear.names.front(), cols);
    place->second.add(values_.data(), rows, threads_);
  }

  Result<std::map<std::string, Hessian>> take() {
    NFP_RETURN_IF_ERROR(std::exchange(status_, ok_status()));
    return std::exchange(sums_, {});
  }

 private:
  Backend& backend_;
  ThreadPool& threads_;
  Status status_;
  std::vector<std::byte> raw_;
  std::vector<float> values_;
  std::map<std::string, Hessian> sums_;
};

// Choices for every nested matrix of one transformer layer.
class LayerCalibrator {
 public:
  LayerCalibrator(LoadedModel& loaded, const CalibrationOptions& options) : loaded_(loaded), options_(options) {}

  Result<std::vector<UpperChoice>> run(int32_t layer, std::map<std::string, Hessian> hessians) {
    std::vector<UpperChoice> choices;
    for (const Linear* linear : loaded_.model->linears()) {
      if (linear->layer != layer || linear->type == GemmType::kHead) continue;
      const auto found = hessians.find(linear->names.front());
      if (found == hessians.end()) continue;
      Hessian& hessian = found->second;
      NFP_RETURN_IF_ERROR(hessian.finish(options_.damping, linear->names.front()));
      NFP_ASSIGN_OR_RETURN(const GptqFactor factor, factorise(hessian, linear->names.front(), *loaded_.threads));
      for (const std::string& name : linear->names) {
        NFP_ASSIGN_OR_RETURN(const auto reader, loaded_.source->matrix(name + ".weight", *loaded_.threads));
        if (reader->storage() != Storage::kNested) continue;
        NFP_ASSIGN_OR_RETURN(UpperChoice choice, choose(*reader, name + ".weight", hessian, factor));
        choices.push_back(std::move(choice));
      }
    }
    return choices;
  }

 private:
  Result<UpperChoice> choose(const MatrixReader& reader, std::string name, const Hessian& hessian,
                             const GptqFactor& factor) {
    const int64_t rows = reader.rows(), cols = reader.cols();
    const auto count = static_cast<size_t>(rows * cols);
    std::vector<uint8_t> upper(count), lower(count);
    std::vector<int8_t> exponent(static_cast<size_t>(rows));
    NFP_RETURN_IF_ERROR(reader.read_nested(0, rows, upper.data(), lower.data(), exponent.data()));
    std::vector<uint16_t> nested(count);
    for (size_t i = 0; i < count; ++i) nested[i] = join(upper[i], lower[i]);
    UpperChoice choice{std::move(name), rows, cols, options_.rule, {}};
    choice.bits.resize(static_cast<size_t>(rows * choice_row_bytes(cols)));
    choose_uppers(factor, nested, rows, options_.rule, *loaded_.threads, choice.bits);
    descend(hessian, nested, rows, options_.rule, *loaded_.threads, choice.bits);
    return choice;
  }

  LoadedModel& loaded_;
  const CalibrationOptions& options_;
};

Result<TokenSequences> make_text(LoadedModel& loaded, const CalibrationOptions& options) {
  const int32_t most = loaded.config.max_context;
  if (options.text == kSelfText) {
    SelfTextOptions self;
    self.length = std::min(kSelfLength, most);
    const int64_t tokens = calibration_tokens(options);
    self.sequences = static_cast<int32_t>(std::clamp<int64_t>(tokens / self.length, 1, 4096) + kHeldOut);
    self.seed = options.seed;
    if (loaded.tokenizer->adds_bos()) self.bos = loaded.tokenizer->bos_id();
    return write_self_text(*loaded.model, self, options.progress);
  }
  NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(options.text));
  return cut_text(*loaded.tokenizer, text, options.text, std::min(kFileLength, most), calibration_tokens(options));
}

// The last sequence is kept for the order of sensitivity, where there are several.
TokenSequences held_out(const TokenSequences& text) {
  TokenSequences kept(text.end() - kHeldOut, text.end());
  for (auto& sequence : kept) sequence.resize(std::min(sequence.size(), static_cast<size_t>(kOrderTokens)));
  return kept;
}
TokenSequences used(TokenSequences text) {
  if (text.size() > kHeldOut) text.resize(text.size() - kHeldOut);
  return text;
}

int64_t count_tokens(const TokenSequences& text) {
  int64_t count = 0;
  for (const auto& sequence : text) count += static_cast<int64_t>(sequence.size());
  return count;
}

// Runs the text through the model one layer after the other, keeping all tokens' hidden states in between, and saves
// the choices of each layer that the store does not have.
Status choose_all(LoadedModel& loaded, const TokenSequences& text, const CalibrationOptions& options,
                  const CalibrationStore& store) {
  Model& model = *loaded.model;
  Backend& backend = *loaded.backend;
  const int32_t layers = loaded.config.layers;
  int32_t last = layers;  // no need to go on after the last one that is missing
  while (last > 0 && store.layer(last - 1)) --last;
  size_t longest = 1;
  for (const auto& sequence : text) longest = std::max(longest, sequence.size());
  const auto length = static_cast<int32_t>(longest);
  NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(model, length, length, DType::kF32));
  const size_t token_bytes = static_cast<size_t>(loaded.config.hidden) * size_of(backend.activation_dtype());
  std::vector<std::vector<std::byte>> states(text.size());
  HessianObserver observer(backend, *loaded.threads);
  LayerCalibrator calibrator(loaded, options);
  const uint64_t total = static_cast<uint64_t>(last) * static_cast<uint64_t>(count_tokens(text));
  uint64_t done = 0;
  for (int32_t layer = 0; layer < last; ++layer) {
    const bool missing = !store.layer(layer);
    for (size_t i = 0; i < text.size(); ++i) {
      if (layer > 0) NFP_RETURN_IF_ERROR(backend.upload(model.hidden().data(), states[i].data(), states[i].size()));
      runner->restart();
      NFP_RETURN_IF_ERROR(runner->feed(text[i], Precision::kFp16, {layer, layer + 1, missing ? &observer : nullptr}));
      states[i].resize(text[i].size() * token_bytes);
      NFP_RETURN_IF_ERROR(backend.download(states[i].data(), model.hidden().data(), states[i].size()));
      done += text[i].size();
      if (options.progress) options.progress({"calibrating", done, total});
    }
    if (!missing) continue;
    NFP_ASSIGN_OR_RETURN(auto hessians, observer.take());
    NFP_ASSIGN_OR_RETURN(const std::vector<UpperChoice> choices, calibrator.run(layer, std::move(hessians)));
    NFP_RETURN_IF_ERROR(store.save_layer(layer, choices));
  }
  return ok_status();
}

Result<uint64_t> settings_key(const ModelSource& source, const CalibrationOptions& options) {
  NFP_ASSIGN_OR_RETURN(uint64_t key, content_key(source));
  std::string settings = fmt::format("{} {} {} {}", kMethodVersion, static_cast<int>(options.rule),
                                     calibration_tokens(options), options.damping);
  if (options.text == kSelfText) {
    settings += fmt::format(" self {}", options.seed);
  } else {
    NFP_ASSIGN_OR_RETURN(const std::string text, read_text_file(options.text));
    settings += fmt::format(" file {:x}", hash_bytes(std::as_bytes(std::span(text))));
  }
  return hash_bytes(std::as_bytes(std::span(settings)), key);
}

bool fits_vocabulary(const TokenSequences& text, int32_t vocab) {
  for (const auto& sequence : text) {
    if (sequence.empty()) return false;
    for (int32_t token : sequence) {
      if (token < 0 || token >= vocab) return false;
    }
  }
  return !text.empty();
}

Result<TokenSequences> text_of(LoadedModel& loaded, const CalibrationOptions& options, const CalibrationStore& store) {
  auto saved = store.text();
  if (saved && fits_vocabulary(*saved, loaded.config.vocab)) return std::move(*saved);
  NFP_ASSIGN_OR_RETURN(TokenSequences text, make_text(loaded, options));
  NFP_RETURN_IF_ERROR(store.save_text(text));
  return text;
}

LoadedModelOptions load_options(const CalibrationOptions& options) {
  LoadedModelOptions load;
  load.threads = options.threads;
  load.cpu_kernels = options.cpu_kernels;
  load.progress = options.progress;
  return load;
}

}  // namespace

int64_t calibration_tokens(const CalibrationOptions& options) {
  if (options.tokens > 0) return options.tokens;
  return options.text == kSelfText ? kSelfTokens : kFileTokens;
}

MatrixFilter Calibration::filter() const {
  return [choices = choices](const std::string& tensor,
                             std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    const auto found = choices.find(tensor);
    if (found == choices.end()) return reader;
    return make_chosen_reader(std::move(reader), found->second);
  };
}

std::string Calibration::to_json() const {
  nlohmann::ordered_json json = {
      {"rule", rule == UpperRule::kFree ? "free" : "restricted"}, {"text", text}, {"tokens", tokens}, {"seed", seed}};
  if (!order.empty()) json["order"] = nlohmann::ordered_json::parse(order_to_json(order));
  return json.dump();
}

Result<std::vector<Sensitivity>> stored_order(const ModelSource& source) {
  const auto json = nlohmann::json::parse(source.config_json(), nullptr, /*allow_exceptions=*/false);
  const auto* at = json.is_object() && json.contains("nestedfp") ? &json["nestedfp"] : nullptr;
  at = at != nullptr && at->is_object() && at->contains("calibration") ? &(*at)["calibration"] : nullptr;
  at = at != nullptr && at->is_object() && at->contains("order") ? &(*at)["order"] : nullptr;
  if (at == nullptr) {
    return error(ErrorCode::kUsage, "{}: carries no order of sensitivity for --fp8-share; add --calibrate self",
                 source.path());
  }
  return order_from_json(at->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), source.path());
}

Result<Calibration> calibrate(const std::string& model, const CalibrationOptions& options) {
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(model));
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source->config_json(), source->path() + ": config.json"));
  NFP_ASSIGN_OR_RETURN(const uint64_t key, settings_key(*source, options));
  std::string cache = options.cache;
  if (cache.empty()) {
    NFP_ASSIGN_OR_RETURN(cache, user_cache_folder());
  }
  NFP_ASSIGN_OR_RETURN(const CalibrationStore store, CalibrationStore::open(cache, key));

  bool missing = !store.text();
  for (int32_t layer = 0; layer < config.layers && !missing; ++layer) missing = !store.layer(layer);
  if (missing) {
    NFP_ASSIGN_OR_RETURN(const auto loaded, load(model, load_options(options)));
    NFP_ASSIGN_OR_RETURN(TokenSequences text, text_of(*loaded, options, store));
    NFP_RETURN_IF_ERROR(choose_all(*loaded, used(std::move(text)), options, store));
  }

  Calibration calibration;
  calibration.rule = options.rule;
  calibration.text = options.text == kSelfText ? kSelfText : "file";
  calibration.seed = options.seed;
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    auto choices = store.layer(layer);
    if (!choices) return error(ErrorCode::kIo, "{}: a layer's choices vanished; run again", store.folder());
    for (UpperChoice& choice : *choices) {
      std::string name = choice.name;
      calibration.choices[std::move(name)] = std::make_shared<const UpperChoice>(std::move(choice));
    }
  }
  const auto text = store.text();
  if (!text) return error(ErrorCode::kIo, "{}: the calibration text vanished; run again", store.folder());
  calibration.tokens = count_tokens(used(*text));
  if (!options.order) return calibration;

  if (auto order = store.order()) {
    calibration.order = std::move(*order);
    return calibration;
  }
  LoadedModelOptions with_choices = load_options(options);
  with_choices.filter = calibration.filter();
  NFP_ASSIGN_OR_RETURN(const auto loaded, load(model, with_choices));
  NFP_ASSIGN_OR_RETURN(calibration.order,
                       measure_order(*loaded->model, held_out(*text), {}, *loaded->threads, options.progress));
  NFP_RETURN_IF_ERROR(store.save_order(calibration.order));
  return calibration;
}

}  // namespace nfp
