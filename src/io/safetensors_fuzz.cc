// A safetensors file's header; a parsed header must describe tensors that lie inside the file, apart from each other.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto header = nfp::parse_safetensors(std::as_bytes(std::span(data, size)), "model.safetensors");
  if (!header.ok()) return 0;
  uint64_t before = 8;
  for (const nfp::SafetensorsEntry& entry : header->tensors) {
    if (entry.begin < before || entry.end < entry.begin || entry.end > size) std::abort();
    before = entry.end;
  }
  return 0;
}
