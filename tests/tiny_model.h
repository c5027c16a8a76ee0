// The tiny models of tests/models/make_tiny_models.py with their goldens (tests/golden), and a way to run one through
// any schedule of steps. For tests.
#pragma once

#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "engine/batch.h"
#include "io/model_source.h"
#include "model/weight_loader.h"

namespace nfp::testing {

inline constexpr const char* kTinyModels[] = {"llama-tied",
                                              "llama-headdim",
                                              "llama3-rope",
                                              "mistral",
                                              "llama-bias",
                                              "qwen2",
                                              "qwen3",
                                              "qwen2-heads16",
                                              "qwen3-yarn",
                                              "phi3",
                                              "gemma2",
                                              "gemma3",
                                              "phi4-mini",
                                              "llama-yarn",
                                              "smollm3",
                                              "smollm3-window",
                                              "mixtral",
                                              "qwen2-moe",
                                              "qwen3-moe",
                                              "qwen3-moe-window",
                                              "olmoe",
                                              "gemma",
                                              "olmo2",
                                              "olmo2-tied",
                                              "olmo3",
                                              "granite",
                                              "granite-bias",
                                              "phi3-long",
                                              "mistral-full",
                                              "mixtral-full",
                                              "gemma2-uncapped",
                                              "gemma3-pattern",
                                              "qwen2-moe-sparse",
                                              "olmoe-norm",
                                              "olmo3-tied",
                                              "seed-oss",
                                              "seed-oss-bias",
                                              "exaone4",
                                              "exaone4-full",
                                              "glm",
                                              "glm-tied",
                                              "glm4",
                                              "glm4-tied",
                                              "ernie4-5",
                                              "ernie4-5-bias",
                                              "ministral",
                                              "ministral-all",
                                              "helium",
                                              "helium-bias"};

// Those that are FP8 already.
inline constexpr const char* kTinyFp8Models[] = {"phi4-fp8-tensor", "qwen3-fp8-channel", "qwen3-moe-fp8-block"};

// Both.
inline std::vector<const char*> all_tiny_models() {
  std::vector<const char*> names(std::begin(kTinyModels), std::end(kTinyModels));
  names.insert(names.end(), std::begin(kTinyFp8Models), std::end(kTinyFp8Models));
  return names;
}

struct GoldenSequence {
  std::vector<int32_t> tokens;
  std::vector<float> last_logits;  // [vocab] after the last token
  double bf16_error = 0;           // what rounding the inputs of nested matrices to BF16 does to them; FP8 only
  // For each position; FP16 only, else empty.
  std::vector<int32_t> argmax;
  std::vector<float> max_logit;
  std::vector<float> log_sum_exp;
};

struct GoldenPrecision {
  double fp32_error = 0;  // how far an FP32 forward pass is from the true logits
  std::vector<GoldenSequence> sequences;
  std::vector<int32_t> greedy_prompt;
  std::vector<int32_t> greedy_continuation;
};

struct Golden {
  GoldenPrecision fp16;
  GoldenPrecision fp8;
  int64_t matrices = 0;
  int64_t nested_by_paper = 0;
  int64_t rows_with_exponent = 0;
  std::vector<std::string> dense;
};

Result<Golden> read_golden(const std::string& name);

// The generated model's folder, or nothing where the generator did not run (no numpy). A path is itself.
std::string tiny_model_folder(const std::string& name);

// `count` more tokens of sequence `sequence` in one step.
struct Piece {
  size_t sequence = 0;
  size_t count = 0;
};
using Schedule = std::vector<std::vector<Piece>>;

// Every sequence whole, each in a step of its own.
Schedule one_by_one(const std::vector<std::vector<int32_t>>& sequences);

// Pieces of 1 to 40 tokens of all sequences in random order, several to a step.
Schedule random_schedule(uint32_t seed, const std::vector<std::vector<int32_t>>& sequences);

// A model on a backend.
class TinyModel {
 public:
  // kernels: as CpuOptions has it, or "cuda" for the GPU, with results that do not depend on the batch, or
  // "cuda fastest" for one with the fastest kernels for it. A name that is the path of a config.json: random weights
  // for it (dummy_model.h).
  static Result<std::unique_ptr<TinyModel>> load(const std::string& name, const std::string& kernels, int threads,
                                                 MatrixFilter filter = {});

  // Logits [tokens, vocab] of every sequence; the schedule gives each sequence's tokens exactly once. `last_only`: of
  // the last token of each piece, NaN for the others, as of steps where nobody asks for theirs.
  Result<std::vector<std::vector<float>>> run(const std::vector<std::vector<int32_t>>& sequences,
                                              const Schedule& schedule, Precision precision, DType kv_dtype,
                                              bool last_only = false);

  const ModelSource& source() const { return *source_; }
  const ModelConfig& config() const { return model_->config(); }
  Backend& backend() { return *backend_; }
  ThreadPool& threads() { return threads_; }

 private:
  explicit TinyModel(int threads) : threads_(threads) {}
  Status step(const std::vector<std::vector<int32_t>>& sequences, const std::vector<Piece>& pieces,
              const std::vector<std::vector<int32_t>>& tables, Precision precision, KvCache& cache, bool last_only,
              std::vector<std::vector<float>>& logits);

  ThreadPool threads_;
  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<StepInput> input_;
};

}  // namespace nfp::testing
