// The safetensors container: 8 bytes of header length, a JSON header, tensors one behind the other.
// Source: github.com/huggingface/safetensors, README, "Format".
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/mapped_file.h"
#include "base/result.h"
#include "base/shape.h"

namespace nfp {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::string stored;  // the dtype as the file spells it. One that is not known here is kU8, with the bytes as shape.
  Shape shape;
  uint64_t begin = 0;  // bytes from the start of the file
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  // by offset
  std::map<std::string, std::string> metadata;
};

// Checks everything that a header can get wrong: length, JSON, dtypes, shapes, that sizes match shapes (of known
// dtypes), that tensors lie inside the file, and overlap neither each other nor the header. `name` is the file, for
// messages.
Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file, const std::string& name);

}  // namespace nfp
