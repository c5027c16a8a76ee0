// What calibration decided about a matrix: for every weight, which of its two neighbours the upper byte takes. One bit
// a weight, so a calibration is kept beside a model at a sixteenth of its size and laid over its matrices as they are
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "calibrate/gptq.h"
#include "nested/matrix_reader.h"

namespace nfp {

struct UpperChoice {
  std::string name;  // the matrix's tensor, "model.layers.0.self_attn.q_proj.weight"
  int64_t rows = 0;
  int64_t cols = 0;
  UpperRule rule = UpperRule::kFree;
  std::vector<uint8_t> bits;  // [rows, choice_row_bytes(cols)], as choose_uppers writes it
};

// The same matrix with the chosen uppers. A dense matrix stays as it is. Error: a shape other than the choice's.
Result<std::unique_ptr<MatrixReader>> make_chosen_reader(std::unique_ptr<MatrixReader> reader,
                                                         std::shared_ptr<const UpperChoice> choice);

// A file of choices: "NFPCHOI1", u64 key, u32 matrices; for each u32 bytes of the name, the name, u8 rule, u64 rows,
// u64 cols, the bits; u64 FNV-1a of all before. Little endian. `key` says what the choices are for.
Status write_choices(const std::string& path, uint64_t key, std::span<const UpperChoice> choices);
// Errors name `path`: not such a file, cut short, damaged, or of another key.
Result<std::vector<UpperChoice>> parse_choices(std::span<const std::byte> bytes, const std::string& path, uint64_t key);

// 64-bit FNV-1a, to be continued from `hash`.
inline constexpr uint64_t kHashStart = 0xcbf29ce484222325ull;
uint64_t hash_bytes(std::span<const std::byte> bytes, uint64_t hash = kHashStart);

}  // namespace nfp
