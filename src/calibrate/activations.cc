#include "calibrate/activations.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "eval/sequence_runner.h"

namespace nfp {
namespace {

constexpr float kE4m3Largest = 448.0f;

class RangeObserver final : public LinearObserver {
 public:
  explicit RangeObserver(Backend& backend) : backend_(backend) {}
  void on_linear(const Linear& linear, void* x, int32_t rows) override {
    values_.resize(static_cast<size_t>(rows) * static_cast<size_t>(linear.weight->k()));
    if (status.ok()) status = backend_.download(values_.data(), x, values_.size() * sizeof(float));
    if (status.ok()) ranges[linear.names.front()].add(values_.data(), static_cast<int64_t>(values_.size()));
  }
  void on_error(const Error& error) override { status = error; }

  Status status;
  ActivationRanges ranges;

 private:
  Backend& backend_;
  std::vector<float> values_;
};

float scale_of(float largest) { return largest > 0 ? largest / kE4m3Largest : 1.0f; }

}  // namespace

void MagnitudeHistogram::add(const float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(x[i]);
    ++bins_[std::bit_cast<uint32_t>(magnitude) >> 19];
    largest_ = std::max(largest_, magnitude);
  }
  count_ += count;
}

float MagnitudeHistogram::quantile(double share) const {
  const auto wanted = static_cast<int64_t>(std::ceil(share * static_cast<double>(count_)));
  if (wanted >= count_) return largest_;
  int64_t seen = 0;
  for (size_t bin = 0; bin < bins_.size(); ++bin) {
    seen += bins_[bin];
    if (seen >= wanted) return std::min(largest_, std::bit_cast<float>(static_cast<uint32_t>(bin + 1) << 19));
  }
  return largest_;
}

void round_to_e4m3(float* x, int64_t count, float scale) {
  // Adding and taking away a number whose unit in the last place is E4M3's there, as the CPU backend does.
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float v = x[i] * inverse;
    const float magnitude = std::min(std::abs(v), kE4m3Largest);
    const float power = std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) & 0x7f800000u);
    const float shift = std::max(power, 0x1p-6f) * 0x1p20f;
    const float rounded = (magnitude + shift) - shift;
    x[i] = std::copysign(rounded, v) * scale;
  }
}

Result<ActivationRanges> measure_ranges(Model& model, const TokenSequences& text) {
  if (model.backend().activation_dtype() != DType::kF32) {
    return error(ErrorCode::kUnsupported, "activation ranges are measured on a backend with FP32 activations");
  }
  const int32_t length = longest_sequence(text);
  NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(model, length, length));
  RangeObserver observer(model.backend());
  for (const auto& sequence : text) {
    runner->restart();
    NFP_RETURN_IF_ERROR(runner->feed(sequence, Precision::kFp16, {0, -1, &observer}));
    NFP_RETURN_IF_ERROR(observer.status);
  }
  for (const auto& [name, range] : observer.ranges) {
    if (!std::isfinite(range.largest())) {
      return error(ErrorCode::kInvalidInput, "{}: the layer's inputs overflow over the calibration text", name);
    }
  }
  return std::move(observer.ranges);
}

ActivationRounder::ActivationRounder(Backend& backend, ActivationScaling scaling, const ActivationRanges& ranges,
                                     double share)
    : backend_(backend), scaling_(scaling) {
  for (const auto& [name, range] : ranges) tensors_[name].scale = scale_of(range.quantile(share));
}

void ActivationRounder::on_linear(const Linear& linear, void* x, int32_t rows) {
  if (!status_.ok()) return;
  const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(linear.weight->k());
  values_.resize(count);
  status_ = backend_.download(values_.data(), x, count * sizeof(float));
  if (!status_.ok()) return;
  Tensor& tensor = tensors_[linear.names.front()];
  if (scaling_ == ActivationScaling::kDelayed) {
    if (!tensor.recent.empty()) {
      tensor.scale = scale_of(*std::max_element(tensor.recent.begin(), tensor.recent.end()));
    }
    float largest = 0;
    for (float value : values_) largest = std::max(largest, std::abs(value));
    if (tensor.recent.size() < static_cast<size_t>(kDelayedSteps)) {
      tensor.recent.push_back(largest);
    } else {
      tensor.recent[tensor.next] = largest;
      tensor.next = (tensor.next + 1) % tensor.recent.size();
    }
  }
  round_to_e4m3(values_.data(), static_cast<int64_t>(count), tensor.scale);
  status_ = backend_.upload(x, values_.data(), count * sizeof(float));
}

}  // namespace nfp
