// The files and names of a nested checkpoint on disk (docs/format.md, "On disk"), in one place for those who write
// and those who read it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"

namespace nfp {

inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kModelIndex = "model.safetensors.index.json";
inline constexpr const char* kTokenizerGguf = "tokenizer.gguf";  // the metadata of a GGUF tokenizer, no tensors
inline constexpr const char* kNestedFolder = "nestedfp";
inline constexpr const char* kLowerFile = "lower.safetensors";
inline constexpr const char* kLowerIndex = "lower.safetensors.index.json";
// What the original directory looked like, so that restore gives back the same files: config.json, the index, and the
// header of each safetensors file as FILE.header.
inline constexpr const char* kSourceFolder = "nestedfp/source";
inline constexpr const char* kHeaderSuffix = ".header";
inline constexpr int kNestedVersion = 1;

// For the matrix NAME.weight ("weight" is its tensor's name).
inline std::string scale_name(std::string_view weight) { return std::string(weight) + "_scale"; }
inline std::string lower_name(std::string_view weight) { return std::string(weight) + "_lower"; }

// config.json's "nestedfp" object.
struct NestedHeader {
  DType source_dtype = DType::kF16;           // of the nested matrices: F16 or BF16
  std::map<std::string, DType> other_dtypes;  // matrices of the other one
  bool uppers_restricted = true;              // "rule": restricted or free (docs/format.md, "One weight")
  std::map<std::string, int64_t> inexact;     // matrices with BF16 weights that did not convert exactly: how many
  std::map<std::string, std::string> dense;   // linear matrices that could not be nested -> why
  std::string calibration;                    // JSON object of whoever chose the uppers; empty = nobody

  DType dtype_of(const std::string& tensor) const {
    const auto place = other_dtypes.find(tensor);
    return place == other_dtypes.end() ? source_dtype : place->second;
  }
};

// The source's config.json with "quantization_config" (compressed-tensors) and "nestedfp" added. `ignore`: names of
// linear modules that are not FP8. Error: the config is not a JSON object.
Result<std::string> nested_config(std::string_view config, const std::string& name, const NestedHeader& header,
                                  const std::vector<std::string>& ignore);
// Both taken out again.
Result<std::string> plain_config(std::string_view config, const std::string& name);

// `name` is the file, for messages.
Result<NestedHeader> parse_nested_header(std::string_view config, const std::string& name);

}  // namespace nfp
