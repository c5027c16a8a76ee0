// Calibration of a whole model: text, inputs of every linear layer, choice of upper bytes, order of sensitivity
// (docs/quality.md). One layer's Hessians are in memory at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "calibrate/sensitivity.h"
#include "calibrate/upper_choice.h"
#include "io/scaled_source.h"
#include "model/weight_loader.h"
#include "nested/upper_rule.h"

namespace nfp {

inline constexpr const char* kSelfText = "self";

inline constexpr int64_t kMostSelfTokens = 524288;

struct CalibrationOptions {
  std::string text = kSelfText;  // the model's own, or a file of plain text
  UpperRule rule = UpperRule::kFree;
  int64_t tokens = 0;  // at most; 0 = 12288 of the model's own (of which kMostSelfTokens at most), 65536 of a file
  uint64_t seed = 0;   // of the model's own text
  double damping = 0.01;
  // Does every layer make up for the errors of those before it (compensation.h)? Some 5 times slower; not set: where
  // the text is a file, as the model's own is for a quick calibration.
  std::optional<bool> compensate;
  // Are the channels of the layers' inputs brought closer to each other first (smoothing.h)?
  bool smooth = false;
  bool measure_sensitivity = true;  // measure the order of sensitivity too
  std::string cache;                // folder for what is kept between runs; empty = the user's
  int32_t threads = 0;              // 0 = as many as this process may use
  std::string cpu_kernels;
  ProgressCallback progress;
};

// Tokens that these options calibrate on, at most.
int64_t calibration_tokens(const CalibrationOptions& options);
bool compensates(const CalibrationOptions& options);
inline constexpr int64_t kSensitivityTokens =
    128;  // of a sequence kept for the order: each is run once for every layer

struct Calibration {
  std::map<std::string, std::shared_ptr<const UpperChoice>, std::less<>> choices;  // by tensor
  // For LoadedModelOptions or scale_source: the choices are of the matrices so scaled. Null = not smoothed.
  std::shared_ptr<const TensorScalings> scalings;
  std::vector<Sensitivity> sensitivities;  // least harm a weight first; empty where it was not asked for
  UpperRule rule = UpperRule::kFree;
  bool compensated = false;
  std::string text;    // "self", or "file"
  int64_t tokens = 0;  // that it was made on
  uint64_t seed = 0;

  // Lays the choices over a model's matrices.
  MatrixFilter filter() const;
  // For config.json's "nestedfp" object: {"rule", "compensated", "smoothed", "text", "tokens", "seed", "order"}.
  std::string to_json() const;
};

// What is in the cache for this model and these options is used; the rest is computed and saved there layer by layer.
// `model` is as for load(). The result depends on model, options and kernels, not on the number of threads.
// Errors: text too short or not UTF-8; a layer whose inputs overflow; a full disk.
Result<Calibration> calibrate(const std::string& model, const CalibrationOptions& options);

// Whether calibrate() would find all of that in the cache. Reads the weights, where there is any calibration at all.
bool is_calibrated(const ModelSource& source, const CalibrationOptions& options);

// How a nested checkpoint's upper bytes were chosen, as its config.json says; what it leaves out is as by default. None
// where it is not calibrated.
struct StoredCalibration {
  std::string rule = "free";  // "free" or "restricted" (UpperRule)
  bool compensated = false;
  bool smoothed = false;
  std::string text = "self";  // "self", or "file"
  int64_t tokens = 0;
};
std::optional<StoredCalibration> stored_calibration(const ModelSource& source);

// The order that a calibrated checkpoint carries in its config.json. Error: it has none.
Result<std::vector<Sensitivity>> stored_sensitivity(const ModelSource& source);

}  // namespace nfp
