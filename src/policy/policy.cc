#include "policy/policy.h"

#include <algorithm>
#include <charconv>

namespace nfp {
namespace {

class AlwaysPolicy final : public PrecisionPolicy {
 public:
  explicit AlwaysPolicy(Precision precision) : precision_(precision) {}
  std::string name() const override { return std::string(name_of(precision_)); }
  Precision choose(const StepLoad&) override { return precision_; }
  bool fixed() const override { return true; }

 private:
  Precision precision_;
};

class ThresholdPolicy final : public PrecisionPolicy {
 public:
  ThresholdPolicy(int32_t threshold, Precision fp8) : threshold_(threshold), fp8_(fp8) {}
  std::string name() const override { return fmt::format("threshold:{}", threshold_); }
  Precision choose(const StepLoad& load) override { return load.step_tokens > threshold_ ? fp8_ : Precision::kFp16; }

 private:
  int32_t threshold_;
  Precision fp8_;
};

class GradedPolicy final : public PrecisionPolicy {
 public:
  GradedPolicy(int32_t low, int32_t high, Precision fp8) : low_(low), high_(high), fp8_(fp8) {}
  std::string name() const override { return fmt::format("graded:{}:{}", low_, high_); }
  Precision choose(const StepLoad& load) override { return load.step_tokens > low_ ? fp8_ : Precision::kFp16; }
  double fp8_share(const StepLoad& load) override {
    const double over = static_cast<double>(load.step_tokens) - low_;
    return std::clamp(over / (static_cast<double>(high_) - low_), 0.0, 1.0);
  }
  bool needs_sensitivity() const override { return true; }

 private:
  int32_t low_, high_;
  Precision fp8_;
};

class AlternatePolicy final : public PrecisionPolicy {
 public:
  AlternatePolicy(int32_t steps, Precision fp8) : steps_(steps), fp8_(fp8) {}
  std::string name() const override { return fmt::format("alternate:{}", steps_); }
  Precision choose(const StepLoad& load) override {
    return (load.step_index / static_cast<uint64_t>(steps_)) % 2 == 0 ? Precision::kFp16 : fp8_;
  }

 private:
  int32_t steps_;
  Precision fp8_;
};

Result<int32_t> parse_count(std::string_view policy, std::string_view digits, int32_t least) {
  int32_t value = 0;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (code != std::errc() || end != digits.data() + digits.size() || value < least) {
    return error(ErrorCode::kUsage, "precision policy '{}': '{}' is not a whole number of at least {}", policy, digits,
                 least);
  }
  return value;
}

}  // namespace

Result<std::unique_ptr<PrecisionPolicy>> parse_policy(std::string_view text, Precision fp8, bool shares) {
  using Pointer = std::unique_ptr<PrecisionPolicy>;
  if (const auto precision = precision_from_name(text)) return Pointer(std::make_unique<AlwaysPolicy>(*precision));
  const size_t colon = text.find(':');
  const std::string_view kind = text.substr(0, colon);
  if (colon != std::string_view::npos && (kind == "threshold" || kind == "alternate")) {
    const bool threshold = kind == "threshold";
    NFP_ASSIGN_OR_RETURN(const int32_t count, parse_count(text, text.substr(colon + 1), threshold ? 0 : 1));
    if (threshold) return Pointer(std::make_unique<ThresholdPolicy>(count, fp8));
    return Pointer(std::make_unique<AlternatePolicy>(count, fp8));
  }
  if (colon != std::string_view::npos && kind == "graded") {
    const std::string_view rest = text.substr(colon + 1);
    const size_t second = rest.find(':');
    if (second == std::string_view::npos) {
      return error(ErrorCode::kUsage, "precision policy '{}': use graded:LOW:HIGH, tokens of a step", text);
    }
    NFP_ASSIGN_OR_RETURN(const int32_t low, parse_count(text, rest.substr(0, second), 0));
    NFP_ASSIGN_OR_RETURN(const int32_t high, parse_count(text, rest.substr(second + 1), 1));
    if (high <= low) {
      return error(ErrorCode::kUsage, "precision policy '{}': {} must be more than {}", text, high, low);
    }
    return Pointer(std::make_unique<GradedPolicy>(low, high, fp8));
  }
  return error(ErrorCode::kUsage,
               "precision policy '{}' is unknown; use fp16, fp8, fp8-w8a8, threshold:TOKENS{} or alternate:STEPS", text,
               shares ? ", graded:LOW:HIGH" : "");
}

}  // namespace nfp
