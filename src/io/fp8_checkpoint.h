// Checkpoints whose linear layers are FP8 already: an E4M3 code for each weight and scales beside it. docs/models.md
// ("Sources") says what is served.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "io/shard_set.h"
#include "nested/matrix_analysis.h"

namespace nfp {

// What config.json's quantization_config says of FP8 weights.
struct Fp8Scheme {
  std::string method;                         // quant_method
  int64_t block_rows = 0, block_columns = 0;  // of scales that hold for blocks of a matrix; 0 = none do
};

// Nothing where there is no quantization_config, or where it is a nested checkpoint's. An error for weights that are
// quantised in another way; it names the field.
Result<std::optional<Fp8Scheme>> find_fp8_scheme(std::string_view config_json, const std::string& name);

// One matrix: w[r][c] = code[r][c] * scale of r and c.
struct Fp8Matrix {
  const SafetensorsEntry* codes = nullptr;    // [rows, columns]
  std::vector<float> scales;                  // [rows], or [ceil(rows / block_rows), ceil(columns / block_columns)]
  int64_t block_rows = 0, block_columns = 0;  // 0 = a scale a row
};

// The FP8 matrices of a directory.
class Fp8Weights {
 public:
  // Pairs each FP8 matrix with its scales. Errors name the tensor: no scales, a shape that does not fit, a scale that
  // is negative or no number.
  static Result<Fp8Weights> open(const ShardSet& shards, const Fp8Scheme& scheme, const std::string& path);

  bool empty() const { return matrices_.empty(); }
  const Fp8Matrix* find(std::string_view tensor) const;  // by the file's name; null for others
  // A tensor that belongs to an FP8 matrix: its scales, or those of activations and of the KV cache, which this program
  // makes itself.
  static bool is_scale(std::string_view tensor);
  // "compressed-tensors: 28 matrices with a scale a row": for people.
  std::string text() const;
  bool any_by_rows() const { return by_rows_ > 0; }

 private:
  std::string method_;
  int64_t by_rows_ = 0, by_blocks_ = 0;
  std::map<std::string, Fp8Matrix, std::less<>> matrices_;
};

// Row `r` as FP16: each code * scale rounded to nearest. codes: [columns]; out: [columns].
void fp8_row_to_fp16(const Fp8Matrix& matrix, int64_t r, std::span<const uint8_t> codes, uint16_t* out);

// A matrix with a scale a row, nested without rounding anything: upper is the code, lower what FP16 adds to it (its top
// bit is the code's last one, all others are zero), and the row's factor 2^8 * scale. `analysis`, when given, receives
// what was found. Errors: a code that is NaN. `done` is called when the reader goes away.
Result<std::unique_ptr<MatrixReader>> make_fp8_reader(const Fp8Matrix& matrix, std::span<const std::byte> codes,
                                                      std::string name, std::function<void()> done, ThreadPool& threads,
                                                      MatrixAnalysis* analysis);

}  // namespace nfp
