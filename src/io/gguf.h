// The GGUF container (v2 and v3): metadata of typed keys, then tensors in blocks of a quantised or plain type.
// Source: github.com/ggml-org/ggml, docs/gguf.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "base/result.h"
#include "base/shape.h"
#include "io/dequantize.h"

namespace nfp {

// Numbers of any width widen to 64 bits; arrays hold elements of one kind. Strings are views into the file.
struct GgufArray {
  std::variant<std::vector<int64_t>, std::vector<double>, std::vector<std::string_view>> values;
};
using GgufValue = std::variant<int64_t, double, bool, std::string_view, GgufArray>;

struct GgufTensor {
  std::string name;
  const GgmlTypeInfo* type = nullptr;
  Shape shape;         // outermost first (GGUF writes it innermost first)
  uint64_t begin = 0;  // bytes from the start of the file
  uint64_t bytes = 0;
};

struct GgufFile {
  std::unordered_map<std::string, GgufValue> metadata;
  std::vector<GgufTensor> tensors;
  size_t metadata_end = 0;  // bytes from the start of the file to the list of tensors

  // Absent keys and keys of another type give nothing.
  std::optional<int64_t> integer(const std::string& key) const;
  // The same for keys without which the file cannot be read: of another type they are an error that names `file`.
  Result<std::optional<int64_t>> whole_number(const std::string& key, const std::string& file) const;
  std::optional<double> number(const std::string& key) const;  // integers too
  std::optional<bool> boolean(const std::string& key) const;
  std::optional<std::string_view> text(const std::string& key) const;
  template <typename T>
  const std::vector<T>* array(const std::string& key) const {
    const auto place = metadata.find(key);
    if (place == metadata.end()) return nullptr;
    const auto* array = std::get_if<GgufArray>(&place->second);
    return array == nullptr ? nullptr : std::get_if<std::vector<T>>(&array->values);
  }
};

// Checks counts, lengths, types, offsets, sizes and overlaps against the bytes that are there. `name` is the file.
Result<GgufFile> parse_gguf(std::span<const std::byte> file, const std::string& name);

}  // namespace nfp
