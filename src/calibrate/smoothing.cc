#include "calibrate/smoothing.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/json_depth.h"
#include "eval/sequence_runner.h"

namespace nfp {
namespace {

class ChannelObserver final : public LinearObserver {
 public:
  explicit ChannelObserver(Backend& backend) : backend_(backend) {}
  void on_linear(const Linear& linear, void* x, int32_t rows) override {
    const auto cols = static_cast<size_t>(linear.weight->k());
    values_.resize(static_cast<size_t>(rows) * cols);
    if (status.ok()) status = backend_.download(values_.data(), x, values_.size() * sizeof(float));
    if (!status.ok()) return;
    std::vector<float>& largest = maxima[linear.names.front()];
    largest.resize(cols);
    for (size_t i = 0; i < values_.size(); ++i) {
      // NaN too replaces what was there, and stays.
      float& at = largest[i % cols];
      const float magnitude = std::abs(values_[i]);
      if (!(magnitude <= at)) at = magnitude;
    }
  }
  void on_error(const Error& error) override { status = error; }

  Status status;
  ChannelMaxima maxima;

 private:
  Backend& backend_;
  std::vector<float> values_;
};

// The tensors at which one vector of channels is scaled down (a norm, or up's rows) and scaled up again (columns).
struct Place {
  std::vector<std::string> rows;     // times 2^-e
  std::vector<std::string> columns;  // times 2^e
  std::string inputs;                // whose maxima count
};

std::vector<Place> places_of(const ModelSource& source, const Family& family, int32_t layer) {
  const auto weight = [](const std::string& name) { return name + ".weight"; };
  std::vector<Place> places;
  for (const auto& [norm, type] :
       {std::pair{TensorRole::kAttentionNorm, GemmType::kQkv}, {TensorRole::kMlpNorm, GemmType::kGateUp}}) {
    // (offset + w) 2^-e is not offset + another weight that the file's dtype holds.
    if (family.norm_offset != 0 || !family.has(norm)) continue;
    // A router reads the norm in FP32, and its columns would have to be scaled too.
    if (norm == TensorRole::kMlpNorm && family.has(TensorRole::kRouter)) continue;
    Place place{{weight(family.name(norm, layer))}, {}, family.names(type, layer).front()};
    for (const std::string& reader : family.names(type, layer)) place.columns.push_back(weight(reader));
    places.push_back(std::move(place));
  }
  const std::string up = family.name(TensorRole::kUp, layer), down = family.name(TensorRole::kDown, layer);
  if (!up.empty()) {
    Place wide{{weight(up)}, {weight(down)}, down};
    if (source.has(up + ".bias")) wide.rows.push_back(up + ".bias");
    places.push_back(std::move(wide));
  }
  return places;
}

bool complete(const Place& place, const ModelSource& source, size_t channels) {
  const auto size = static_cast<int64_t>(channels);
  return std::all_of(place.rows.begin(), place.rows.end(),
                     [&](const std::string& name) {
                       const TensorInfo* tensor = source.find(name);
                       return tensor != nullptr && tensor->rows() == size;
                     }) &&
         std::all_of(place.columns.begin(), place.columns.end(), [&](const std::string& name) {
           const TensorInfo* tensor = source.find(name);
           return tensor != nullptr && tensor->shape.rank() == 2 && tensor->row_elements() == size;
         });
}

Result<ExponentLimits> limits_of(const Place& place, const ModelSource& source, size_t channels, ThreadPool& threads) {
  ExponentLimits limits(static_cast<int64_t>(channels));
  for (const std::string& name : place.rows) {
    NFP_ASSIGN_OR_RETURN(const ExponentLimits more, row_limits(source, name, threads));
    limits.narrow(more);
  }
  for (const std::string& name : place.columns) {
    NFP_ASSIGN_OR_RETURN(const ExponentLimits more, column_limits(source, name, threads));
    limits.narrow(more);
  }
  return limits;
}

}  // namespace

Result<ChannelMaxima> measure_channels(Model& model, const TokenSequences& text) {
  if (model.backend().activation_dtype() != DType::kF32) {
    return error(ErrorCode::kUnsupported, "channels are measured on a backend with FP32 activations");
  }
  const int32_t length = longest_sequence(text);
  NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(model, length, length));
  ChannelObserver observer(model.backend());
  const auto step =
      static_cast<size_t>(std::max<int64_t>(1, (count_tokens(text) + kChannelTokens - 1) / kChannelTokens));
  for (size_t i = 0; i < text.size(); i += step) {
    runner->restart();
    NFP_RETURN_IF_ERROR(runner->feed(text[i], Precision::kFp16, {0, -1, &observer}));
    NFP_RETURN_IF_ERROR(observer.status);
  }
  for (const auto& [name, maxima] : observer.maxima) {
    if (!std::all_of(maxima.begin(), maxima.end(), [](float x) { return std::isfinite(x); })) {
      return error(ErrorCode::kInvalidInput, "{}: the layer's inputs overflow over the calibration text", name);
    }
  }
  return std::move(observer.maxima);
}

std::vector<int8_t> choose_exponents(const std::vector<float>& maxima, const ExponentLimits& limits) {
  std::vector<int8_t> exponents(maxima.size(), 0);
  double sum = 0, common = -1e30;
  int64_t count = 0;
  for (size_t c = 0; c < maxima.size(); ++c) {
    if (!(maxima[c] > 0)) continue;
    const double size = std::log2(static_cast<double>(maxima[c]));
    sum += size;
    ++count;
    common = std::max(common, size - limits.highest[c]);
  }
  if (count == 0) return exponents;
  common = std::max(common, sum / static_cast<double>(count));
  for (size_t c = 0; c < maxima.size(); ++c) {
    if (!(maxima[c] > 0)) continue;
    const auto e = static_cast<int>(std::lround(std::log2(static_cast<double>(maxima[c])) - common));
    exponents[c] = static_cast<int8_t>(std::clamp<int>(e, limits.lowest[c], limits.highest[c]));
  }
  return exponents;
}

Result<TensorScalings> choose_smoothing(const ModelSource& source, const ModelConfig& config,
                                        const ChannelMaxima& maxima, ThreadPool& threads) {
  TensorScalings scalings;
  for (int32_t layer = 0; layer < config.layers; ++layer) {
    for (const Place& place : places_of(source, *config.family, layer)) {
      const auto found = maxima.find(place.inputs);
      if (found == maxima.end() || !complete(place, source, found->second.size())) continue;
      // up is scaled twice: its columns with the norm, then its rows as the scaled matrix allows.
      TensorScalings so_far;
      for (const auto* names : {&place.rows, &place.columns}) {
        for (const std::string& name : *names) {
          if (const auto scaled = scalings.find(name); scaled != scalings.end()) so_far.insert(*scaled);
        }
      }
      const std::shared_ptr<const ModelSource> borrowed(std::shared_ptr<void>(), &source);
      NFP_ASSIGN_OR_RETURN(const auto view, scale_source(borrowed, std::move(so_far)));
      NFP_ASSIGN_OR_RETURN(const ExponentLimits limits, limits_of(place, *view, found->second.size(), threads));
      const std::vector<int8_t> exponents = choose_exponents(found->second, limits);
      if (std::all_of(exponents.begin(), exponents.end(), [](int8_t e) { return e == 0; })) continue;
      for (const std::string& name : place.rows) {
        std::vector<int8_t>& rows = scalings[name].rows;
        for (int8_t e : exponents) rows.push_back(static_cast<int8_t>(-e));
      }
      for (const std::string& name : place.columns) scalings[name].columns = exponents;
    }
  }
  return scalings;
}

std::string scalings_to_json(const TensorScalings& scalings) {
  nlohmann::json json = nlohmann::json::object();
  for (const auto& [name, scaling] : scalings) {
    json[name] = {{"rows", scaling.rows}, {"columns", scaling.columns}};
  }
  return json.dump();
}

Result<TensorScalings> scalings_from_json(const std::string& text, const std::string& name) {
  const auto bad = [&] { return error(ErrorCode::kInvalidInput, "{}: holds no exponents of tensors", name); };
  const auto json = parse_file_json<nlohmann::json>(text);
  if (!json.is_object()) return bad();
  TensorScalings scalings;
  for (const auto& [tensor, entry] : json.items()) {
    if (!entry.is_object()) return bad();
    TensorScaling& scaling = scalings[tensor];
    for (auto [key, list] : {std::pair{"rows", &scaling.rows}, std::pair{"columns", &scaling.columns}}) {
      if (!entry.contains(key) || !entry[key].is_array()) return bad();
      for (const auto& e : entry[key]) {
        constexpr int64_t kMost = int64_t{2} * ExponentLimits::kMost;
        if (!e.is_number_integer() || e.get<int64_t>() < -kMost || e.get<int64_t>() > kMost) return bad();
        list->push_back(static_cast<int8_t>(e.get<int64_t>()));
      }
    }
  }
  return scalings;
}

}  // namespace nfp
