#include "calibrate/smoothing.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "base/float_types.h"
#include "engine/sequence_runner.h"
#include "nested/format.h"

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

  Status status;
  ChannelMaxima maxima;

 private:
  Backend& backend_;
  std::vector<float> values_;
};

// e = floor(log2 |x|), and the power of two that its lowest set bit stands for; x is finite and not 0.
struct Span {
  int top;
  int bottom;
};
Span span_of(float x) {
  int exponent = 0;
  const float fraction = std::frexp(x, &exponent);  // [0.5, 1): 24 bits after the point
  const auto mantissa = static_cast<uint32_t>(std::abs(fraction) * 0x1p24f);
  return {exponent - 1, exponent - 24 + std::countr_zero(mantissa)};
}

// Where a dtype's numbers begin and end: multiples of 2^bottom below 2^(top + 1).
Span range_of(DType dtype) {
  if (dtype == DType::kF16) return {15, -24};
  return {127, -126};  // BF16, FP32: normal numbers only, which need no look at their bits
}

int8_t clamp_exponent(int e) { return static_cast<int8_t>(std::clamp<int>(e, -ExponentLimits::kMost, ExponentLimits::kMost)); }

void lower(int8_t& highest, int e) { highest = std::min(highest, std::max<int8_t>(clamp_exponent(e), 0)); }
void raise(int8_t& lowest, int e) { lowest = std::max(lowest, std::min<int8_t>(clamp_exponent(e), 0)); }

// w may be multiplied by 2^e as long as it stays a number of `dtype`.
void limit_value(float w, DType dtype, int8_t& lowest, int8_t& highest) {
  if (w == 0) return;
  const Span span = span_of(w), range = range_of(dtype);
  lower(highest, range.top - span.top);
  raise(lowest, range.bottom - (dtype == DType::kF16 ? span.bottom : span.top));
}

// The same for a nested row's weight w, kept as v with v * 2^exponent taken for it: |v| * 2^e stays within 1.75, and v
// loses no bits.
void limit_nested(float w, float v, int exponent, int8_t& lowest, int8_t& highest) {
  if (w == 0) return;
  if (v == 0 || std::ldexp(v, exponent) != w) raise(lowest, 0);
  if (v == 0) return;
  const Span span = span_of(v);
  const bool wide = std::abs(std::ldexp(v, -span.top)) > kNestableMax;
  lower(highest, -span.top - (wide ? 1 : 0));
  raise(lowest, -24 - span.bottom);
}

DType matrix_dtype(const MatrixSource& matrix) { return matrix.type == WeightType::kF16 ? DType::kF16 : DType::kBF16; }

float value_of(uint16_t bits, DType dtype) { return dtype == DType::kF16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits); }

// Calls visit(r, row's bits) for the rows of a range; a few at once are read.
template <typename F>
Status each_row(const MatrixSource& matrix, Range range, F&& visit) {
  const auto cols = static_cast<size_t>(matrix.cols);
  std::vector<uint16_t> row(cols);
  for (int64_t r = range.begin; r < range.end; ++r) {
    NFP_RETURN_IF_ERROR(matrix.read(r, 1, row.data()));
    visit(r, std::span<const uint16_t>(row));
  }
  return ok_status();
}

// Of one nested row whose every weight is multiplied by 2^-e (see row_limits).
void limit_row(std::span<const uint16_t> row, DType dtype, bool nested, int exponent, int8_t& lowest, int8_t& highest) {
  int8_t down = -ExponentLimits::kMost, up = ExponentLimits::kMost;  // of s = -e
  float largest = 0;
  for (uint16_t bits : row) {
    const float w = value_of(bits, dtype);
    limit_value(w, dtype, down, up);
    largest = std::max(largest, std::abs(w));
  }
  if (dtype == DType::kBF16 && !nested) down = up = 0;
  if (dtype == DType::kBF16 && largest > 0) {
    // A row that grows past 1.75 has another exponent, with which small weights may be held worse.
    const Span span = span_of(largest);
    const bool wide = std::ldexp(largest, -span.top) > kNestableMax;
    lower(up, exponent > 0 ? 0 : -span.top - (wide ? 1 : 0));
  }
  raise(lowest, -up);
  lower(highest, -down);
}

// The tensors at which one vector of channels is scaled down (a norm, or up's rows) and scaled up again (columns).
struct Place {
  std::vector<std::string> rows;     // times 2^-e
  std::vector<std::string> columns;  // times 2^e
  std::string inputs;                // whose maxima count
};

std::vector<Place> places_of(const ModelSource& source, const ModelConfig& config) {
  std::vector<Place> places;
  for (int32_t i = 0; i < config.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    places.push_back({{layer + "input_layernorm.weight"},
                      {attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"},
                      attention + "q_proj"});
    places.push_back({{layer + "post_attention_layernorm.weight"},
                      {mlp + "gate_proj.weight", mlp + "up_proj.weight"},
                      mlp + "gate_proj"});
    Place wide{{mlp + "up_proj.weight"}, {mlp + "down_proj.weight"}, mlp + "down_proj"};
    if (source.has(mlp + "up_proj.bias")) wide.rows.push_back(mlp + "up_proj.bias");
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

}  // namespace

Result<ChannelMaxima> measure_channels(Model& model, const TokenSequences& text) {
  if (model.backend().activation_dtype() != DType::kF32) {
    return error(ErrorCode::kUnsupported, "channels are measured on a backend with FP32 activations");
  }
  size_t longest = 1;
  int64_t tokens = 0;
  for (const auto& sequence : text) {
    longest = std::max(longest, sequence.size());
    tokens += static_cast<int64_t>(sequence.size());
  }
  const auto length = static_cast<int32_t>(longest);
  NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(model, length, length));
  ChannelObserver observer(model.backend());
  const auto step = static_cast<size_t>(std::max<int64_t>(1, (tokens + kChannelTokens - 1) / kChannelTokens));
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

void ExponentLimits::narrow(const ExponentLimits& other) {
  for (size_t c = 0; c < lowest.size(); ++c) {
    lowest[c] = std::max(lowest[c], other.lowest[c]);
    highest[c] = std::min(highest[c], other.highest[c]);
  }
}

Result<ExponentLimits> column_limits(const ModelSource& source, std::string_view matrix, ThreadPool& threads) {
  NFP_ASSIGN_OR_RETURN(const MatrixSource rows, source.matrix_source(matrix));
  NFP_ASSIGN_OR_RETURN(const MatrixAnalysis analysis, analyse_matrix(rows, threads));
  const bool nested = analysis.storage == Storage::kNested;
  const DType dtype = matrix_dtype(rows);
  ExponentLimits limits(rows.cols);
  Status status;
  std::mutex mutex;
  threads.parallel_for(rows.rows, 1, [&](Range range) {
    ExponentLimits part(rows.cols);
    std::vector<uint16_t> shifted(static_cast<size_t>(rows.cols));
    Status read = each_row(rows, range, [&](int64_t r, std::span<const uint16_t> row) {
      const int exponent = nested ? analysis.exponents[static_cast<size_t>(r)] : 0;
      if (nested) shift_row(row, rows.type, exponent, shifted.data());
      for (size_t c = 0; c < row.size(); ++c) {
        const float w = value_of(row[c], dtype);
        limit_value(w, dtype, part.lowest[c], part.highest[c]);
        // A dense matrix is held in FP16, without row exponents.
        if (nested) {
          limit_nested(w, fp16_to_fp32(shifted[c]), exponent, part.lowest[c], part.highest[c]);
        } else if (dtype == DType::kBF16) {
          part.lowest[c] = part.highest[c] = 0;
        }
      }
    });
    const std::lock_guard lock(mutex);
    limits.narrow(part);
    if (!read.ok()) status = std::move(read);
  });
  NFP_RETURN_IF_ERROR(status);
  return limits;
}

Result<ExponentLimits> row_limits(const ModelSource& source, std::string_view tensor, ThreadPool& threads) {
  const TensorInfo* info = source.find(tensor);
  if (info == nullptr) return error(ErrorCode::kInvalidInput, "{}: tensor '{}' is missing", source.path(), tensor);
  ExponentLimits limits(info->rows());
  if (info->shape.rank() != 2) {
    std::vector<float> values(static_cast<size_t>(info->shape.elements()));
    NFP_RETURN_IF_ERROR(source.read_f32(tensor, values));
    for (size_t r = 0; r < values.size(); ++r) {
      int8_t down = -ExponentLimits::kMost, up = ExponentLimits::kMost;
      limit_value(values[r], info->dtype, down, up);
      limits.lowest[r] = static_cast<int8_t>(-up);
      limits.highest[r] = static_cast<int8_t>(-down);
    }
    return limits;
  }
  NFP_ASSIGN_OR_RETURN(const MatrixSource rows, source.matrix_source(tensor));
  NFP_ASSIGN_OR_RETURN(const MatrixAnalysis analysis, analyse_matrix(rows, threads));
  const bool nested = analysis.storage == Storage::kNested;
  Status status;
  std::mutex mutex;
  threads.parallel_for(rows.rows, 1, [&](Range range) {
    Status read = each_row(rows, range, [&](int64_t r, std::span<const uint16_t> row) {
      const auto at = static_cast<size_t>(r);
      limit_row(row, matrix_dtype(rows), nested, nested ? analysis.exponents[at] : 0, limits.lowest[at],
                limits.highest[at]);
    });
    const std::lock_guard lock(mutex);
    if (!read.ok()) status = std::move(read);
  });
  NFP_RETURN_IF_ERROR(status);
  return limits;
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
  for (const Place& place : places_of(source, config)) {
    const auto found = maxima.find(place.inputs);
    if (found == maxima.end() || !complete(place, source, found->second.size())) continue;
    ExponentLimits limits(static_cast<int64_t>(found->second.size()));
    for (const std::string& name : place.rows) {
      NFP_ASSIGN_OR_RETURN(const ExponentLimits more, row_limits(source, name, threads));
      limits.narrow(more);
    }
    for (const std::string& name : place.columns) {
      NFP_ASSIGN_OR_RETURN(const ExponentLimits more, column_limits(source, name, threads));
      limits.narrow(more);
    }
    const std::vector<int8_t> exponents = choose_exponents(found->second, limits);
    if (std::all_of(exponents.begin(), exponents.end(), [](int8_t e) { return e == 0; })) continue;
    for (const std::string& name : place.rows) {
      std::vector<int8_t>& rows = scalings[name].rows;
      rows.resize(exponents.size());
      std::transform(exponents.begin(), exponents.end(), rows.begin(), [](int8_t e) { return static_cast<int8_t>(-e); });
    }
    for (const std::string& name : place.columns) scalings[name].columns = exponents;
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
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return bad();
  TensorScalings scalings;
  for (const auto& [tensor, entry] : json.items()) {
    if (!entry.is_object()) return bad();
    TensorScaling& scaling = scalings[tensor];
    for (auto [key, list] : {std::pair{"rows", &scaling.rows}, std::pair{"columns", &scaling.columns}}) {
      if (!entry.contains(key) || !entry[key].is_array()) return bad();
      for (const auto& e : entry[key]) {
        if (!e.is_number_integer() || std::abs(e.get<int64_t>()) > 2 * ExponentLimits::kMost) return bad();
        list->push_back(static_cast<int8_t>(e.get<int64_t>()));
      }
    }
  }
  return scalings;
}

}  // namespace nfp
