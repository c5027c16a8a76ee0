// What is in a model, and how it takes to the nested format: the report of `nestedfp inspect`.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/fp8_check.h"
#include "io/linear_names.h"
#include "io/model_source.h"

namespace nfp {

struct MatrixReport {
  std::string name;
  LinearKind kind = LinearKind::kQkv;
  int64_t rows = 0;
  int64_t cols = 0;
  bool nests_by_paper = false;  // every |w| <= 1.75
  bool nested = false;          // by row exponents
  std::string reason;           // why not
  float largest = 0;            // |w|
  int64_t largest_row = 0;
  std::map<int, int64_t> exponents;  // e != 0 -> rows that have it
  Fp8Check fp8;
};

// Counts of matrices, by kind and in all.
struct Applicability {
  int64_t matrices = 0;
  int64_t by_paper = 0;
  int64_t by_exponents = 0;
  int64_t dense = 0;
  int64_t rows = 0;
  int64_t rows_shifted = 0;
};

enum class Fp8Verdict : uint8_t { kGood, kFair, kPoor };

struct InspectReport {
  std::string model;         // path
  std::string kind;          // "Hugging Face directory", "nested checkpoint", "GGUF file"
  std::string architecture;  // config.json's
  // From config.json; absent fields are left out.
  std::vector<std::pair<std::string, int64_t>> shape;
  int64_t tensors = 0;
  int64_t parameters = 0;
  uint64_t file_bytes = 0;
  uint64_t weight_bytes = 0;    // in memory: the one copy that serves both precisions
  uint64_t two_copies = 0;      // what an FP16 and an FP8 copy would take instead
  uint64_t fp8_step_bytes = 0;  // of linear weights that an FP8 step reads; an FP16 step reads linear_bytes
  uint64_t linear_bytes = 0;
  uint64_t kv_bytes_per_token = 0;        // FP16 KV cache; 0 where config.json does not say
  std::map<std::string, int64_t> stored;  // dtype as in the file -> tensors

  std::array<Applicability, kLinearKindNames.size()> by_kind{};
  Applicability total;
  std::map<int, int64_t> exponents;  // over all matrices
  std::vector<MatrixReport> matrices;

  int64_t bf16_weights = 0;  // in linear layers
  int64_t inexact_fp16 = 0;
  int64_t inexact_nested = 0;
  float largest_error_fp16 = 0;
  float largest_error_nested = 0;

  Fp8Verdict verdict = Fp8Verdict::kGood;
  std::string verdict_text;  // one plain sentence
};

// Reads every linear matrix twice.
Result<InspectReport> inspect(const ModelSource& source, ThreadPool& threads, const ProgressCallback& progress);

std::string inspect_text(const InspectReport& report);
std::string inspect_json(const InspectReport& report);

}  // namespace nfp
