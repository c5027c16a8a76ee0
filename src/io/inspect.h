// What a model's weights are like, seen from the nested format: which linear layers nest, by which rule, and what FP8
// will make of them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "io/family.h"
#include "io/model_source.h"

namespace nfp {

// What rounding to upper bytes does to one matrix.
struct Fp8Check {
  double relative_error = 0;   // sqrt(sum (q - w)^2 / sum w^2); about 0.026 for weights well inside E4M3's range
  double outlier_ratio = 0;    // max |w| / root mean square
  double dynamic_range = 0;    // log2(max |w| / smallest non-zero |w|), bits
  double subnormal_share = 0;  // of non-zero weights: below E4M3's normal range once scaled, so rounded more coarsely
  int64_t narrow_rows = 0;     // rows whose root mean square lies below E4M3's normal range
};

struct MatrixReport {
  std::string name;
  std::string part_of;  // the file's tensor whose rows these are; empty = that of this name
  GemmType type = GemmType::kQkv;
  DType dtype = DType::kF16;  // of the source
  int64_t rows = 0, cols = 0;
  bool nests_by_paper = false;       // every |w| <= 1.75 (NestedFP, section 4.1)
  bool nests = false;                // with row exponents (docs/format.md)
  float largest = 0;                 // max |w|
  std::string reason;                // why dense
  std::map<int, int64_t> exponents;  // rows by exponent, zero left out
  int64_t inexact_fp16 = 0;          // BF16 or FP32 weights that plain FP16 changes
  int64_t inexact_nested = 0;        // BF16 or FP32 weights that nested FP16 changes
  float largest_error = 0;           // of these
  Fp8Check fp8;

  int64_t inexact() const { return nests ? inexact_nested : inexact_fp16; }
};

struct KindSummary {
  int64_t matrices = 0;
  int64_t by_paper = 0;
  int64_t by_exponents = 0;  // nested only thanks to row exponents
  int64_t dense = 0;
};

// What FP16 changes of the linear layers that the source holds in one other dtype.
struct SourceRounding {
  bool present = false;  // is some layer held so?
  int64_t inexact = 0;   // weights that change
  float largest_error = 0;
};

enum class Fp8Verdict : uint8_t { kGood, kUsable, kPoor };

struct InspectReport {
  std::vector<MatrixReport> matrices;
  std::array<KindSummary, kGemmTypes> kinds;
  KindSummary total;  // without lm_head, as the paper counts
  uint64_t parameters = 0;
  uint64_t linear_parameters = 0;  // without lm_head
  uint64_t fp16_bytes = 0;         // all parameters at two bytes
  uint64_t file_bytes = 0;
  int64_t rows = 0;          // of the linear layers but lm_head
  int64_t shifted_rows = 0;  // of these, with an exponent
  std::map<int, int64_t> exponents;
  SourceRounding bf16, f32;
  double relative_error = 0;  // of all linear layers together
  Fp8Verdict verdict = Fp8Verdict::kGood;
  std::string verdict_text;
  std::vector<std::string> left_out;  // tensors that `belongs` does not know
};

// Whether a tensor of the files is one of the model.
using TensorFilter = std::function<bool(const std::string& name)>;

// Reads every linear layer twice, on all threads. Fused matrices count as the source has them (io/split_source.h).
// Without `belongs` all tensors count.
Result<InspectReport> inspect(const ModelSource& source, ThreadPool& threads, const ProgressCallback& progress,
                              const TensorFilter& belongs = {});

}  // namespace nfp
