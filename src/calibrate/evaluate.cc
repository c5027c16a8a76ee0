#include "calibrate/evaluate.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/temporary_path.h"
#include "calibrate/activations.h"
#include "calibrate/nearest_filter.h"
#include "eval/baselines.h"
#include "eval/sequence_runner.h"
#include "runtime/loaded_model.h"

namespace nfp {
namespace {

// Multiplies what each layer is fed once more, in both precisions.
class ErrorObserver final : public LinearObserver {
 public:
  ErrorObserver(Backend& backend, Precision precision, std::string weights)
      : backend_(backend), precision_(precision), weights_(std::move(weights)) {}

  void on_linear(const Linear& linear, void* x, int32_t rows) override {
    if (status_.ok()) status_ = measure(linear, x, rows);
  }
  void on_error(const Error& error) override { status_ = error; }
  Result<std::vector<LayerError>> take() {
    NFP_RETURN_IF_ERROR(status_);
    return std::move(errors_);
  }

 private:
  Status measure(const Linear& linear, const void* x, int32_t rows) {
    NFP_ASSIGN_OR_RETURN(const std::vector<float> exact, multiply(linear, x, rows, Precision::kFp16));
    NFP_ASSIGN_OR_RETURN(const std::vector<float> fp8, multiply(linear, x, rows, precision_));
    double difference = 0, size = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const double d = static_cast<double>(fp8[i]) - exact[i];
      difference += d * d;
      size += static_cast<double>(exact[i]) * exact[i];
    }
    errors_.push_back({weights_, linear.type, linear.layer, size > 0 ? std::sqrt(difference / size) : 0.0});
    return ok_status();
  }

  Result<std::vector<float>> multiply(const Linear& linear, const void* x, int32_t rows, Precision precision) {
    const auto count = static_cast<size_t>(rows) * static_cast<size_t>(linear.weight->n());
    NFP_ASSIGN_OR_RETURN(const Buffer y, backend_.allocate(count * sizeof(float)));
    LinearArgs args;
    args.weight = linear.weight.get();
    args.x = x;
    args.rows = rows;
    args.precision = precision;
    args.y = y.data();
    args.y_is_f32 = true;
    backend_.linear(args);
    std::vector<float> values(count);
    NFP_RETURN_IF_ERROR(backend_.download(values.data(), y.data(), y.bytes()));
    return values;
  }

  Backend& backend_;
  Precision precision_;
  std::string weights_;
  Status status_;
  std::vector<LayerError> errors_;
};

// The folder that EvaluateOptions::scratch stands for. Error: it is none, or nothing can be written to it.
Result<std::string> scratch_folder(const std::string& given) {
  std::error_code failed;
  std::filesystem::path folder = given;
  if (given.empty()) folder = std::filesystem::temp_directory_path(failed);
  if (!failed && !std::filesystem::is_directory(folder, failed) && !failed) {
    failed = std::make_error_code(std::errc::not_a_directory);
  }
  if (!failed && ::access(folder.c_str(), W_OK | X_OK) != 0) failed = {errno, std::generic_category()};
  if (!failed) return folder.string();
  if (!given.empty()) return error(ErrorCode::kUsage, "--scratch {}: {}", given, failed.message());
  const char* const asked = std::getenv("TMPDIR");
  return error(ErrorCode::kUsage,
               "the folder for temporary files (TMPDIR, now '{}') cannot be used: {}; set TMPDIR to one that can be "
               "written to, or name one with --scratch",
               asked == nullptr ? "" : asked, failed.message());
}

// Of FP16's distributions.
std::string base_path(const std::string& folder) {
  const std::string place = (std::filesystem::path(folder) / "nestedfp-evaluate").string();
  warn_of_leftovers(place);
  return temporary_beside(place);
}

// As reports have it.
std::string describe(const StoredCalibration& c) {
  return fmt::format("{}, {} tokens, {} choice{}{}", c.text == kSelfText ? "the model's own text" : c.text, c.tokens,
                     c.rule, c.compensated ? ", compensated" : "", c.smoothed ? ", smoothed" : "");
}

constexpr const char* kPlain = "16/32 bit";
constexpr const char* kPerToken = "E4M3, a scale a token";
constexpr const char* kDelayed = "E4M3, delayed";
constexpr double kStaticShares[] = {0.999, 0.9999, 0.99999, 1.0};
std::string static_scale(double share) { return fmt::format("E4M3, static {:g} %", 100 * share); }

std::string form_name(std::string_view weights, double share, std::string_view activations) {
  return fmt::format("{}, {:.0f} % in FP8, activations {}", weights, 100 * share, activations);
}

constexpr size_t kRangeChunks = 8;  // that static scales are measured on

// Runs the forms one after the other; only one model is in memory at a time.
class Evaluator {
 public:
  Evaluator(std::string model, const EvaluateOptions& options, std::string base)
      : model_(std::move(model)), options_(options), base_(std::move(base)) {}

  Status run(Evaluation& out) {
    const bool calibrated = options_.calibration.has_value();
    {
      NFP_RETURN_IF_ERROR(open(calibrated ? options_.calibration->filter() : MatrixFilter()));
      const std::string weights(kCalibratedForm);
      NFP_RETURN_IF_ERROR(load_once());
      if (const auto stored = stored_calibration(*loaded_->source); stored && !calibrated && !options_.smoothed) {
        out.calibration = describe(*stored);
      }
      NFP_RETURN_IF_ERROR(add(out, "FP16", Precision::kFp16, 0.0, kPlain));
      if (calibrated || stored_) {
        NFP_RETURN_IF_ERROR(add(out, weights, Precision::kFp8, 1.0));
        NFP_RETURN_IF_ERROR(add_activations(out, weights));
        NFP_RETURN_IF_ERROR(add_scalings(out, weights));
        NFP_RETURN_IF_ERROR(add_errors(out, weights));
        NFP_RETURN_IF_ERROR(add_shares(out, weights));
      }
    }
    if (options_.smoothed) {
      NFP_RETURN_IF_ERROR(open(options_.smoothed->filter(), options_.smoothed->scalings));
      const std::string weights(kSmoothedForm);
      NFP_RETURN_IF_ERROR(add(out, weights, Precision::kFp8, 1.0));
      NFP_RETURN_IF_ERROR(add_activations(out, weights));
      NFP_RETURN_IF_ERROR(add_scalings(out, weights));
      NFP_RETURN_IF_ERROR(add_errors(out, weights));
    }
    NFP_RETURN_IF_ERROR(open(nearest_filter()));
    NFP_RETURN_IF_ERROR(add(out, "nearest", Precision::kFp8, 1.0));
    NFP_RETURN_IF_ERROR(add_activations(out, "nearest"));
    NFP_RETURN_IF_ERROR(add_errors(out, "nearest"));
    NFP_RETURN_IF_ERROR(open(fp8_channel_filter(/*head=*/false)));
    NFP_RETURN_IF_ERROR(add(out, "per channel", Precision::kFp8, 1.0));
    NFP_RETURN_IF_ERROR(add_activations(out, "per channel"));
    NFP_RETURN_IF_ERROR(open(block_fp8_filter()));
    NFP_RETURN_IF_ERROR(add(out, "128x128 blocks", Precision::kFp8, 1.0));
    for (const std::string& part : options_.forms) {
      if (!found_.contains(part)) log::warn("--forms {}: nothing measured here has this in its name", part);
    }
    return ok_status();
  }

 private:
  // The model is loaded when its first form is measured.
  Status open(MatrixFilter filter, std::shared_ptr<const TensorScalings> scalings = nullptr) {
    loaded_.reset();
    load_options_ = {};
    load_options_.threads = options_.threads;
    load_options_.filter = std::move(filter);
    load_options_.scalings = std::move(scalings);
    return ok_status();
  }

  Status load_once() {
    if (loaded_ != nullptr) return ok_status();
    NFP_ASSIGN_OR_RETURN(loaded_, load(model_, load_options_));
    if (tokens_.empty()) {
      NFP_ASSIGN_OR_RETURN(tokens_, loaded_->tokenizer->encode(options_.text, {.parse_special = false}));
      auto order = stored_sensitivity(*loaded_->source);
      stored_ = order.ok();
      if (options_.calibration) {
        sensitivities_ = options_.calibration->sensitivities;
      } else if (order.ok()) {
        sensitivities_ = std::move(*order);
      }
    }
    return ok_status();
  }

  Status add(Evaluation& out, const std::string& weights, Precision precision, double share,
             const std::string& activations = kPlain, ActivationRounder* rounder = nullptr) {
    const std::string form = form_name(weights, share, activations);
    bool wanted = is_exact(precision) || options_.forms.empty();
    for (const std::string& part : options_.forms) {
      if (form.find(part) == std::string::npos) continue;
      wanted = true;
      found_.insert(part);
    }
    if (!wanted) return ok_status();
    NFP_RETURN_IF_ERROR(load_once());
    PerplexityOptions options;
    options.ctx = options_.ctx;
    options.chunks = options_.chunks;
    options.precision = precision;
    options.observer = rounder;
    if (loaded_->tokenizer->adds_bos()) options.bos = loaded_->tokenizer->bos_id();
    (is_exact(precision) ? options.save_base : options.kld_base) = base_.name();
    const auto progress = [&](const PerplexityResult& r, int64_t chunks) {
      if (options_.progress) options_.progress(form, r.chunks, chunks);
    };
    NFP_ASSIGN_OR_RETURN(PerplexityResult result,
                         perplexity(*loaded_->model, tokens_, options, *loaded_->threads, progress));
    if (rounder != nullptr) NFP_RETURN_IF_ERROR(rounder->status());
    out.forms.push_back({weights, precision, activations, share, result});
    return options_.measured ? options_.measured(out) : ok_status();
  }

  Status add_activations(Evaluation& out, const std::string& weights) {
    return options_.activations ? add(out, weights, Precision::kFp8W8A8, 1.0, kPerToken) : ok_status();
  }

  // Scales a tensor, from ranges over the text's end: chunks that are not scored, unless all are.
  Status add_scalings(Evaluation& out, const std::string& weights) {
    if (!options_.activations) return ok_status();
    NFP_RETURN_IF_ERROR(load_once());
    const auto ctx = static_cast<size_t>(options_.ctx);
    const size_t chunks = std::min(tokens_.size() / ctx, kRangeChunks);
    TokenSequences text;
    for (size_t i = 0; i < chunks; ++i) {
      const auto end = tokens_.end() - static_cast<std::ptrdiff_t>(i * ctx);
      text.emplace_back(end - static_cast<std::ptrdiff_t>(ctx), end);
    }
    NFP_ASSIGN_OR_RETURN(const ActivationRanges ranges, measure_ranges(*loaded_->model, text));
    for (const double share : kStaticShares) {
      ActivationRounder rounder(*loaded_->backend, ActivationScaling::kStatic, ranges, share);
      NFP_RETURN_IF_ERROR(add(out, weights, Precision::kFp8, 1.0, static_scale(share), &rounder));
    }
    ActivationRounder rounder(*loaded_->backend, ActivationScaling::kDelayed, ranges, 1.0);
    return add(out, weights, Precision::kFp8, 1.0, kDelayed, &rounder);
  }

  Status add_shares(Evaluation& out, const std::string& weights) {
    if (sensitivities_.empty()) return ok_status();
    out.sensitivities = sensitivities_;
    for (double share : options_.shares) {
      NFP_ASSIGN_OR_RETURN(const double reached, set_fp8_share(*loaded_->model, sensitivities_, share));
      NFP_RETURN_IF_ERROR(add(out, weights, Precision::kFp8, reached));
      if (options_.activations) NFP_RETURN_IF_ERROR(add(out, weights, Precision::kFp8W8A8, reached, kPerToken));
    }
    return ok_status();
  }

  Status add_errors(Evaluation& out, const std::string& weights) {
    if (!options_.forms.empty()) return ok_status();
    NFP_RETURN_IF_ERROR(load_once());
    const auto count = std::min<size_t>(tokens_.size(), static_cast<size_t>(options_.ctx));
    NFP_ASSIGN_OR_RETURN(const auto errors,
                         layer_errors(*loaded_->model, std::span(tokens_).first(count), Precision::kFp8, weights));
    out.layers.insert(out.layers.end(), errors.begin(), errors.end());
    return ok_status();
  }

  std::string model_;
  const EvaluateOptions& options_;
  TemporaryPath base_;
  std::vector<int32_t> tokens_;
  LoadedModelOptions load_options_;
  std::unique_ptr<LoadedModel> loaded_;
  std::vector<Sensitivity> sensitivities_;
  bool stored_ = false;          // the checkpoint itself is calibrated
  std::set<std::string> found_;  // of the forms asked for
};

}  // namespace

Result<std::vector<LayerError>> layer_errors(Model& model, std::span<const int32_t> tokens, Precision precision,
                                             const std::string& weights) {
  const auto length = static_cast<int32_t>(tokens.size());
  NFP_ASSIGN_OR_RETURN(const auto runner, SequenceRunner::create(model, length, length));
  ErrorObserver observer(model.backend(), precision, weights);
  NFP_RETURN_IF_ERROR(runner->feed(tokens, Precision::kFp16, {0, -1, &observer}));
  return observer.take();
}

Status check_evaluation(const LoadedModel& model, const EvaluateOptions& options) {
  NFP_ASSIGN_OR_RETURN(const std::string scratch, scratch_folder(options.scratch));
  NFP_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                       model.tokenizer->encode(options.text, {.parse_special = false}));
  PerplexityOptions base;
  base.ctx = options.ctx;
  base.chunks = options.chunks;
  base.save_base = base_path(scratch);
  Status checked = check_perplexity(model.config.vocab, tokens, base);
  if (!checked.ok() && checked.error().code == ErrorCode::kIo) {
    return error(ErrorCode::kIo, "--scratch {}: {}", scratch, checked.error().message);
  }
  return checked;
}

bool wants_weights(const EvaluateOptions& options, std::string_view weights) {
  if (options.forms.empty()) return true;
  std::vector<std::string> activations = {kPlain};
  if (options.activations) {
    activations.insert(activations.end(), {kPerToken, kDelayed});
    for (const double share : kStaticShares) activations.push_back(static_scale(share));
  }
  for (const std::string& one : activations) {
    for (int percent = 0; percent <= 100; ++percent) {
      const std::string form = form_name(weights, percent / 100.0, one);
      const auto names = [&](const std::string& part) { return form.find(part) != std::string::npos; };
      if (std::any_of(options.forms.begin(), options.forms.end(), names)) return true;
    }
  }
  return false;
}

Result<Evaluation> evaluate(const std::string& model, const EvaluateOptions& options) {
  Evaluation evaluation;
  evaluation.model = model;
  evaluation.file = options.file;
  evaluation.ctx = options.ctx;
  if (const auto& made = options.calibration ? options.calibration : options.smoothed) {
    const Calibration& c = *made;
    evaluation.calibration = describe({.rule = c.rule == UpperRule::kFree ? "free" : "restricted",
                                       .compensated = c.compensated,
                                       .smoothed = c.scalings != nullptr,
                                       .text = c.text,
                                       .tokens = c.tokens});
  }
  NFP_ASSIGN_OR_RETURN(const std::string scratch, scratch_folder(options.scratch));
  Evaluator evaluator(model, options, base_path(scratch));
  NFP_RETURN_IF_ERROR(evaluator.run(evaluation));
  return evaluation;
}

}  // namespace nfp
