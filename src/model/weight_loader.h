// From the tensors of a checkpoint to a model in a backend.
#pragma once

#include <cfloat>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/model_source.h"
#include "model/model.h"

namespace nfp {

// Another reading of a matrix, such as one with calibrated upper bytes. Given the tensor's name and its reader.
using MatrixFilter =
    std::function<Result<std::unique_ptr<MatrixReader>>(const std::string&, std::unique_ptr<MatrixReader>)>;

// That the checkpoint has every tensor that the configuration implies, and these as large. load_model() asks too.
Status check_complete(const ModelSource& source, const ModelConfig& config);

// One after the other; either may be empty.
MatrixFilter chain(MatrixFilter first, MatrixFilter second);

struct LoadOptions {
  bool fp8_head = false;  // does lm_head compute in FP8 in an FP8 step
  MatrixFilter filter;    // may be empty
  ProgressCallback progress;
};

// Of queries and keys whose heads rotate in pairs of neighbours: the rows to which one gives the order of heads that
// rotate in halves, all first features of pairs before all second ones. Products of queries with keys stay what they
// are.
struct NeighbourPairs {
  int64_t rows = 0;  // of all matrices that are stacked, those from the first on up to here; 0 = none
  int64_t head_dim = 0, rotary_dim = 0;
};

// Reads tensors into a backend: what layers load themselves with.
class WeightLoader {
 public:
  WeightLoader(const ModelSource& source, Backend& backend, ThreadPool& threads, const LoadOptions& options);

  // Stacks the matrices NAME.weight (and NAME.bias, if `bias`) of `names` into one weight of [rows, cols] in all.
  // kInterleave takes two matrices, or one that holds all rows of the first and then of the second.
  Result<Linear> linear(GemmType type, int32_t layer, const std::vector<std::string>& names, int64_t rows, int64_t cols,
                        bool bias, RowOrder order = RowOrder::kConcat, const NeighbourPairs& pairs = {});
  // (NAME.weight + offset) * scale in device memory as FP32. An error where a number is beyond `most`.
  Result<Buffer> vector(const std::string& name, int64_t size, float offset = 0.0f, float scale = 1.0f,
                        float most = FLT_MAX);

  Backend& backend() { return backend_; }

 private:
  Result<std::unique_ptr<MatrixReader>> matrix(const std::string& name, int64_t cols);
  void tell(const std::string& tensor);

  const ModelSource& source_;
  Backend& backend_;
  ThreadPool& threads_;
  LoadOptions options_;
  uint64_t done_ = 0;
};

// `threads` reads the checkpoint; it may be the one the backend uses, as loading does not run beside steps.
Result<std::unique_ptr<Model>> load_model(const ModelSource& source, const ModelConfig& config, Backend& backend,
                                          ThreadPool& threads, const LoadOptions& options);

}  // namespace nfp
