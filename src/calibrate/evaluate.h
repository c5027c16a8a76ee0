// How good a model is in each form of FP8, on one text: perplexity, KL divergence from its own FP16, and the error of
// each layer's outputs. What `nestedfp evaluate` runs.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "calibrate/calibrate.h"
#include "eval/perplexity.h"
#include "model/model.h"
#include "nested/precision.h"
#include "runtime/loaded_model.h"

namespace nfp {

struct Evaluation;

struct EvaluateOptions {
  std::string file;  // where the text is from, for reports
  std::string text;
  int32_t ctx = 512;
  int64_t chunks = 20;
  int32_t threads = 0;
  // Made for the model, or nothing: then a calibrated checkpoint's own uppers are what is compared with the nearest.
  std::optional<Calibration> calibration;
  std::optional<Calibration> smoothed;                   // the same with smoothing, for rows of its own
  std::vector<double> shares = {0.25, 0.5, 0.75, 0.88};  // of the weights in FP8, where an order is known
  // Which forms, besides FP16: those whose names ("nearest, 100 % in FP8, activations 16/32 bit") have one of these in
  // them; empty = all.
  std::vector<std::string> forms;
  bool activations = true;  // the rows with E4M3 activations too
  // Folder for the base's distributions (2 bytes a token of the vocabulary and scored position); empty = $TMPDIR or
  // /tmp.
  std::string scratch;
  std::function<void(const std::string& form, int64_t chunk, int64_t chunks)> progress;
  std::function<Status(const Evaluation&)> measured;  // what there is so far, after each form
};

struct FormResult {
  std::string weights;  // "FP16", "nearest", "calibrated", "smoothed" (and calibrated), "per channel", "128x128 blocks"
  Precision precision = Precision::kFp16;
  std::string activations;  // "16/32 bit", "E4M3, a scale a token", "E4M3, static 99.99 %", "E4M3, delayed"
  double share = 1.0;       // of the linear layers' weights in FP8
  PerplexityResult result;
};

// || y_fp8 - y_fp16 || / || y_fp16 || over the outputs of one linear layer fed exact inputs.
struct LayerError {
  std::string weights;
  GemmType type = GemmType::kQkv;
  int32_t layer = 0;
  double error = 0;
};

struct Evaluation {
  std::string model, file;
  int32_t ctx = 0;
  std::string calibration;        // "file, 8192 tokens, free choice", or empty
  std::vector<FormResult> forms;  // the first is FP16
  std::vector<LayerError> layers;
  std::vector<Sensitivity> sensitivities;
};

// What evaluate() would find wrong without the weights, worth asking before calibrating: a text shorter than one chunk,
// a scratch folder that cannot be used or has no room.
Status check_evaluation(const LoadedModel& model, const EvaluateOptions& options);

// The weights of the forms that are of EvaluateOptions::calibration and smoothed.
inline constexpr std::string_view kCalibratedForm = "calibrated", kSmoothedForm = "smoothed";

// Whether `options` may ask for a form of these weights. Shares that will be reached are not known before: any may be.
bool wants_weights(const EvaluateOptions& options, std::string_view weights);

Result<Evaluation> evaluate(const std::string& model, const EvaluateOptions& options);

// The error of every linear layer's outputs in `precision`, on one sequence.
Result<std::vector<LayerError>> layer_errors(Model& model, std::span<const int32_t> tokens, Precision precision,
                                             const std::string& weights);

std::string evaluation_to_json(const Evaluation& evaluation);
// One page with tables and plots, nothing loaded from outside.
std::string evaluation_to_html(const Evaluation& evaluation);

}  // namespace nfp
