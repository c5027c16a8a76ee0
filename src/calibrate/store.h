// Where calibrations are kept between runs: a folder for each model and settings in the user's cache. Every layer is a
// file of its own, written whole or not at all, so that an interrupted calibration goes on where it stopped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "calibrate/sensitivity.h"
#include "calibrate/text.h"
#include "calibrate/upper_choice.h"
#include "io/model_source.h"
#include "io/scaled_source.h"

namespace nfp {

// Tells models apart: the configuration, and names, shapes, types and values of all tensors. The same for any number of
// threads.
Result<uint64_t> content_key(const ModelSource& source, ThreadPool& threads, const ProgressCallback& progress);

class CalibrationStore {
 public:
  // `key` of model and settings; the folder is made when something is saved, or by make_folder().
  static Result<CalibrationStore> open(const std::string& cache_folder, uint64_t key);

  // Whether there is any, for whatever model.
  static bool any(const std::string& cache_folder);

  const std::string& folder() const { return folder_; }
  Status make_folder() const;
  // Nothing where it was not saved, or is damaged (it is then computed again).
  std::optional<std::vector<UpperChoice>> layer(int32_t index) const;
  Status save_layer(int32_t index, std::span<const UpperChoice> choices) const;
  std::optional<TokenSequences> text() const;
  Status save_text(const TokenSequences& text) const;
  std::optional<std::vector<Sensitivity>> sensitivities() const;
  Status save_sensitivity(std::span<const Sensitivity> order) const;
  std::optional<TensorScalings> smoothing() const;
  Status save_smoothing(const TensorScalings& scalings) const;

 private:
  std::string layer_path(int32_t index) const;
  std::string folder_;
  uint64_t key_ = 0;
};

}  // namespace nfp
