// A model: a decoder-only transformer's forward pass over a ragged batch, on any backend.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/model_source.h"
#include "model/config.h"
#include "nested/precision.h"

namespace nfp {

// The linear layers by what they multiply: the rows of `inspect`'s table, and how a set of FP8 layers is named.
enum class GemmType : uint8_t { kQkv, kOutput, kGateUp, kDown, kHead };

// One linear layer. Which precision it computes in is decided for each step: the step's, where `fp8` allows it.
struct Linear {
  std::unique_ptr<LinearWeight> weight;
  GemmType type = GemmType::kQkv;
  int32_t layer = 0;
  std::vector<std::string> names;  // of the stacked matrices, in their order, without ".weight"
  bool fp8 = true;                 // member of the set that computes in FP8 in an FP8 step
  double fp8_from = 0;  // least share of its weights that a step must compute in FP8 for this to be among them

  // share: of the weights that the step computes in FP8, 0..1.
  Precision at(Precision step, double share = 1.0) const { return fp8 && fp8_from <= share ? step : Precision::kFp16; }
};

// Told of each linear layer's inputs during a forward (calibration): device x is [rows, k], complete once the backend
// is synchronized, and valid until the call returns. It may change x: nothing but this layer reads it.
class LinearObserver {
 public:
  virtual ~LinearObserver() = default;
  virtual void on_linear(const Linear& linear, void* x, int32_t rows) = 0;
};

struct ForwardArgs {
  BatchView batch;
  Precision precision = Precision::kFp16;
  KvCache* cache = nullptr;
  double fp8_share = 1.0;  // of the linear layers' weights, in an FP8 step: Linear::fp8_from says which
  // Layers to run, first .. end-1; -1 = to the last. From 0 the tokens are embedded first (alone, where end is 0);
  // from a later layer the hidden states are those in Model::hidden().
  int32_t first_layer = 0;
  int32_t end_layer = -1;
  LinearObserver* observer = nullptr;  // not of the head; null = none
  // Ends the forward before this layer multiplies, once the observer was told of its inputs: Model::hidden() is then
  // the residual stream that the layer would add to, or that its inputs are made of. null = goes on.
  const Linear* until = nullptr;
};

class WeightLoader;

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  virtual Backend& backend() const = 0;

  // Makes room for steps of up to `tokens` tokens, `rows` rows of logits at once, and positions below `positions` (at
  // most the configuration's max_context). Call before the first forward.
  virtual Status reserve(int32_t tokens, int32_t rows, int32_t positions) = 0;
  // Runs the layers: writes keys and values of the batch's tokens, and leaves their hidden states inside.
  virtual void forward(const ForwardArgs& args) = 0;
  // Logits of `count` tokens of the last forward. rows: device [count], indices of tokens; out: device [count, vocab]
  // FP32.
  virtual void logits(const int32_t* rows, int32_t count, Precision precision, float* out) = 0;

  // The residual stream [tokens, hidden] that the last forward left, of the backend's activation_dtype().
  virtual const Buffer& hidden() const = 0;

  virtual std::vector<Linear*> linears() = 0;  // in order of layers; the head (the embedding, where tied) last
  // Reads one layer's weights again, which may come through another filter (calibration goes on with what it chose).
  // Its linears() stay where they are, and are as load_model leaves them.
  virtual Status reload(int32_t layer, WeightLoader& weights) = 0;
  virtual KvCacheSpec kv_spec(int64_t blocks, int32_t block_size, DType dtype) const = 0;
  virtual size_t weight_bytes() const = 0;  // of all linear layers and embeddings, as held
};

enum class Baseline : uint8_t {
  kNone,
  kFp8Channel,  // FP8 with one absmax scale a row instead of nested uppers: what others ship; evaluation only
  kDenseF16,    // plain FP16 matrices instead of nested ones; evaluation only
};

// Another reading of a matrix, such as one with calibrated upper bytes. Given the tensor's name and its reader.
using MatrixFilter =
    std::function<Result<std::unique_ptr<MatrixReader>>(const std::string&, std::unique_ptr<MatrixReader>)>;

struct LoadOptions {
  bool fp8_head = false;  // does lm_head compute in FP8 in an FP8 step
  Baseline baseline = Baseline::kNone;
  MatrixFilter filter;  // applied before the baseline; may be empty
  ProgressCallback progress;
};

// Reads a model's tensors into a backend. What a family's load function works with.
class WeightLoader {
 public:
  WeightLoader(const ModelSource& source, Backend& backend, ThreadPool& threads, const LoadOptions& options);

  // Stacks the matrices NAME.weight (and NAME.bias, if `bias`) of `names` into one weight of [rows, cols] in all.
  Result<Linear> linear(GemmType type, int32_t layer, const std::vector<std::string>& names, int64_t rows, int64_t cols,
                        bool bias, RowOrder order = RowOrder::kConcat);
  // A vector in device memory as FP32.
  Result<Buffer> vector(const std::string& name, int64_t size);
  Result<Buffer> upload(const std::vector<float>& values);
  bool has(const std::string& name) const { return source_.has(name); }
  // Factors by which a GGUF file divides RoPE frequencies (tensor rope_freqs.weight); empty where there is none.
  Result<std::vector<float>> rope_factors(int32_t size) const;

  Backend& backend() { return backend_; }
  const LoadOptions& options() const { return options_; }

 private:
  Result<std::unique_ptr<MatrixReader>> matrix(const std::string& name, int64_t cols, GemmType type);
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
