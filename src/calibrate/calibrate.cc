#include "calibrate/calibrate.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/cpu_topology.h"
#include "base/mapped_file.h"
#include "base/user_folders.h"
#include "calibrate/choose_layers.h"
#include "calibrate/smoothing.h"
#include "calibrate/store.h"
#include "calibrate/text.h"
#include "io/model_json.h"
#include "runtime/loaded_model.h"

namespace nfp {
namespace {

constexpr uint32_t kMethodVersion = 2;     // of the key: raised when the same options would choose otherwise
constexpr uint32_t kSmoothingVersion = 1;  // likewise, of the choice of exponents
constexpr int32_t kSelfLength = 128;       // many short ones: more starts, and no long contexts to attend to
constexpr int32_t kFileLength = 512;
constexpr int64_t kSelfTokens = 12288;
constexpr int64_t kFileTokens = 65536;
constexpr size_t kHeldOut = 1;  // sequences kept for the order of sensitivity

// What own text begins with.
std::optional<int32_t> start_of_text(const Tokenizer& tokenizer) {
  return tokenizer.adds_bos() ? tokenizer.bos_id() : std::nullopt;
}

Result<TokenSequences> self_text(LoadedModel& loaded, const CalibrationOptions& options) {
  SelfTextOptions self;
  self.length = std::min(kSelfLength, loaded.config.max_context);
  const int64_t tokens = calibration_tokens(options);
  self.sequences =
      static_cast<int32_t>(std::clamp<int64_t>(tokens / self.length, 1, kMostSelfTokens / self.length) + kHeldOut);
  self.seed = options.seed;
  self.bos = start_of_text(*loaded.tokenizer);
  return write_self_text(*loaded.model, self, options.progress);
}

// The tokens of a file of text; nothing for the model's own, which is written later.
Result<std::optional<TokenSequences>> file_text(const ModelSource& source, const ModelConfig& config,
                                                const CalibrationOptions& options) {
  if (options.text == kSelfText) return std::optional<TokenSequences>();
  std::error_code code;
  const auto kind = std::filesystem::status(options.text, code).type();
  if (kind == std::filesystem::file_type::fifo || kind == std::filesystem::file_type::character) {
    return error(ErrorCode::kUsage, "{}: is a pipe or a device; --calibrate takes a text file, which may be read twice",
                 options.text);
  }
  const auto text = read_text_file(options.text);
  if (!text.ok()) {
    return error(text.error().code, "{}; --calibrate is self, none or a text file", text.error().message);
  }
  NFP_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(source));
  NFP_ASSIGN_OR_RETURN(TokenSequences cut,
                       cut_text(*tokenizer, *text, options.text, std::min(kFileLength, config.max_context),
                                calibration_tokens(options)));
  return std::optional<TokenSequences>(std::move(cut));
}

// The last sequence is kept for the order of sensitivity, where there are several.
TokenSequences held_out(const TokenSequences& text) {
  TokenSequences kept(text.end() - kHeldOut, text.end());
  for (auto& sequence : kept) sequence.resize(std::min(sequence.size(), static_cast<size_t>(kSensitivityTokens)));
  return kept;
}
TokenSequences used(TokenSequences text) {
  if (text.size() > kHeldOut) text.resize(text.size() - kHeldOut);
  return text;
}

uint64_t hash_sequences(const TokenSequences& text) {
  uint64_t hash = kHashStart;
  for (const auto& sequence : text) hash = hash_bytes(std::as_bytes(std::span(sequence)), hash);
  return hash;
}

// `text`: a file's, as the tokens that its tokenizer makes of it.
Result<uint64_t> settings_key(const ModelSource& source, const CalibrationOptions& options,
                              const std::optional<TokenSequences>& text) {
  std::string settings = fmt::format("{} {} {} {}", kMethodVersion, static_cast<int>(options.rule),
                                     calibration_tokens(options), options.damping);
  if (compensates(options)) settings += " compensate";
  if (options.smooth) settings += fmt::format(" smooth {}", kSmoothingVersion);
  if (text) {
    settings += fmt::format(" file {:x}", hash_sequences(*text));
  } else {
    NFP_ASSIGN_OR_RETURN(const auto tokenizer, load_tokenizer(source));
    settings += fmt::format(" self {}", options.seed);
    if (const auto bos = start_of_text(*tokenizer)) settings += fmt::format(" bos {}", *bos);
  }
  ThreadPool threads(options.threads > 0 ? options.threads : usable_cpu_count());
  NFP_ASSIGN_OR_RETURN(const uint64_t key, content_key(source, threads, options.progress));
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

std::optional<TokenSequences> saved_text(const CalibrationStore& store, const ModelConfig& config) {
  auto saved = store.text();
  if (saved && !fits_vocabulary(*saved, config.vocab)) saved.reset();
  return saved;
}

// A file's text is saved by then.
Result<TokenSequences> calibration_text(LoadedModel& loaded, const CalibrationOptions& options,
                                        const CalibrationStore& store) {
  if (auto saved = saved_text(store, loaded.config)) return std::move(*saved);
  NFP_ASSIGN_OR_RETURN(TokenSequences text, self_text(loaded, options));
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

// What is saved, or else chosen on the model as it is.
Result<TensorScalings> smoothing_of(const std::string& model, const CalibrationOptions& options,
                                    const CalibrationStore& store) {
  if (auto saved = store.smoothing()) return std::move(*saved);
  NFP_ASSIGN_OR_RETURN(const auto loaded, load(model, load_options(options)));
  NFP_ASSIGN_OR_RETURN(TokenSequences text, calibration_text(*loaded, options, store));
  NFP_ASSIGN_OR_RETURN(const ChannelMaxima maxima, measure_channels(*loaded->model, used(std::move(text))));
  NFP_ASSIGN_OR_RETURN(TensorScalings scalings,
                       choose_smoothing(*loaded->source, loaded->config, maxima, *loaded->threads));
  NFP_RETURN_IF_ERROR(store.save_smoothing(scalings));
  return scalings;
}

// "calibration" of config.json's "nestedfp" object; null where there is none.
nlohmann::json stored_object(const ModelSource& source) {
  const auto json = parse_model_json<nlohmann::json>(source.config_json(), source.path() + ": config.json");
  if (!json.ok() || !json->contains("nestedfp")) return nullptr;
  const auto& nested = (*json)["nestedfp"];
  return nested.is_object() && nested.contains("calibration") ? nested["calibration"] : nullptr;
}

}  // namespace

int64_t calibration_tokens(const CalibrationOptions& options) {
  if (options.tokens > 0) return options.tokens;
  return options.text == kSelfText ? kSelfTokens : kFileTokens;
}

bool compensates(const CalibrationOptions& options) { return options.compensate.value_or(options.text != kSelfText); }

MatrixFilter Calibration::filter() const {
  return [choices = choices](const std::string& tensor,
                             std::unique_ptr<MatrixReader> reader) -> Result<std::unique_ptr<MatrixReader>> {
    const auto found = choices.find(tensor);
    if (found == choices.end()) return reader;
    return make_chosen_reader(std::move(reader), found->second);
  };
}

std::string Calibration::to_json() const {
  nlohmann::ordered_json json = {{"rule", rule == UpperRule::kFree ? "free" : "restricted"},
                                 {"compensated", compensated},
                                 {"smoothed", scalings != nullptr},
                                 {"text", text},
                                 {"tokens", tokens},
                                 {"seed", seed}};
  if (!sensitivities.empty()) json["order"] = nlohmann::ordered_json::parse(sensitivity_to_json(sensitivities));
  return json.dump();
}

std::optional<StoredCalibration> stored_calibration(const ModelSource& source) {
  const nlohmann::json json = stored_object(source);
  if (!json.is_object()) return std::nullopt;
  StoredCalibration stored;
  const auto read = [&](const char* name, auto& value, bool (nlohmann::json::*is)() const noexcept) {
    if (const auto at = json.find(name); at != json.end() && ((*at).*is)()) at->get_to(value);
  };
  read("rule", stored.rule, &nlohmann::json::is_string);
  read("compensated", stored.compensated, &nlohmann::json::is_boolean);
  read("smoothed", stored.smoothed, &nlohmann::json::is_boolean);
  read("text", stored.text, &nlohmann::json::is_string);
  read("tokens", stored.tokens, &nlohmann::json::is_number_integer);
  return stored;
}

Result<std::vector<Sensitivity>> stored_sensitivity(const ModelSource& source) {
  const nlohmann::json json = stored_object(source);
  if (!json.is_object() || !json.contains("order")) {
    return error(ErrorCode::kUsage, "{}: carries no order of sensitivity for --fp8-share; add --calibrate self",
                 source.path());
  }
  return sensitivity_from_json(json["order"].dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                               source.path());
}

bool is_calibrated(const ModelSource& source, const CalibrationOptions& options) {
  const std::string cache = options.cache.empty() ? user_cache_folder() : options.cache;
  const auto config = parse_config(source.config_json(), source.path() + ": config.json");
  if (cache.empty() || !config.ok() || !CalibrationStore::any(cache)) return false;
  const auto text = file_text(source, *config, options);
  if (!text.ok()) return false;
  const auto key = settings_key(source, options, *text);
  if (!key.ok()) return false;
  const auto store = CalibrationStore::open(cache, *key);
  if (!store.ok() || !saved_text(*store, *config) || (options.smooth && !store->smoothing()) ||
      (options.measure_sensitivity && !store->sensitivities())) {
    return false;
  }
  for (int32_t layer = 0; layer < config->layers; ++layer) {
    if (!store->layer(layer)) return false;
  }
  return true;
}

Result<Calibration> calibrate(const std::string& model, const CalibrationOptions& options) {
  NFP_ASSIGN_OR_RETURN(const auto source, ModelSource::open(model));
  NFP_ASSIGN_OR_RETURN(const ModelConfig config, parse_config(source->config_json(), source->path() + ": config.json"));
  if (source->stored_fp8() && source->stored_fp8()->by_rows) {
    return error(ErrorCode::kUsage,
                 "{}: its weights are FP8 already ({}): there is no neighbour to choose; leave out "
                 "--calibrate",
                 source->path(), source->stored_fp8()->text);
  }
  NFP_ASSIGN_OR_RETURN(auto text, file_text(*source, config, options));  // before the weights are read
  NFP_ASSIGN_OR_RETURN(const uint64_t key, settings_key(*source, options, text));
  const std::string cache = options.cache.empty() ? user_cache_folder() : options.cache;
  if (cache.empty()) return error(ErrorCode::kIo, "no folder for the cache: set XDG_CACHE_HOME or HOME");
  NFP_ASSIGN_OR_RETURN(const CalibrationStore store, CalibrationStore::open(cache, key));

  auto saved = saved_text(store, config);
  const bool has_text = saved.has_value();
  if (!has_text && text) NFP_RETURN_IF_ERROR(store.save_text(*text));
  if (!text) text = std::move(saved);
  if (!has_text) NFP_RETURN_IF_ERROR(store.make_folder());  // before the weights are read and a text is written

  LoadedModelOptions model_options = load_options(options);
  if (options.smooth) {
    NFP_ASSIGN_OR_RETURN(TensorScalings scalings, smoothing_of(model, options, store));
    model_options.scalings = std::make_shared<const TensorScalings>(std::move(scalings));
  }
  bool missing = !has_text;
  for (int32_t layer = 0; layer < config.layers && !missing; ++layer) missing = !store.layer(layer);
  if (missing) {
    NFP_ASSIGN_OR_RETURN(const auto loaded, load(model, model_options));
    NFP_ASSIGN_OR_RETURN(text, calibration_text(*loaded, options, store));
    NFP_RETURN_IF_ERROR(choose_layers(*loaded, used(*text), options, store));
  }

  Calibration calibration;
  calibration.scalings = model_options.scalings;
  calibration.rule = options.rule;
  calibration.compensated = compensates(options);
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
  calibration.tokens = count_tokens(used(*text));
  if (!options.measure_sensitivity) return calibration;

  if (auto order = store.sensitivities()) {
    calibration.sensitivities = std::move(*order);
    return calibration;
  }
  LoadedModelOptions with_choices = std::move(model_options);
  with_choices.filter = calibration.filter();
  NFP_ASSIGN_OR_RETURN(const auto loaded, load(model, with_choices));
  NFP_ASSIGN_OR_RETURN(calibration.sensitivities,
                       measure_sensitivity(*loaded->model, held_out(*text), {}, *loaded->threads, options.progress));
  NFP_RETURN_IF_ERROR(store.save_sensitivity(calibration.sensitivities));
  return calibration;
}

}  // namespace nfp
