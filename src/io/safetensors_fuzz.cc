// A safetensors file: a parsed header must describe tensors that lie inside the file, apart from each other. And the
// configurations of nested, FP8 and multimodal checkpoints, the other JSON that this folder reads.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include "io/fp8_checkpoint.h"
#include "io/nested_checkpoint.h"
#include "io/safetensors.h"
#include "io/text_model.h"

namespace {

void parse(std::span<const std::byte> file) {
  const auto header = nfp::parse_safetensors(file, "model.safetensors");
  if (!header.ok()) return;
  uint64_t before = 8;
  for (const nfp::SafetensorsEntry& entry : header->tensors) {
    if (entry.begin < before || entry.end < entry.begin || entry.end > file.size()) std::abort();
    before = entry.end;
  }
}

// A file whose header is the input, so that mutations need not keep a length right.
void parse_as_header(std::string_view header) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof(length));
  file += header;
  file.resize(file.size() + 64);
  parse(std::as_bytes(std::span(file)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  parse(std::as_bytes(std::span(data, size)));
  parse_as_header(text);
  if (const auto info = nfp::parse_nested_info(text, "config.json"); info.ok()) {
    (void)nfp::nested_config(text, *info, {});
    (void)nfp::plain_config(text);
  }
  (void)nfp::find_fp8_scheme(text, "config.json");
  (void)nfp::text_model_config(text, "config.json");
  return 0;
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Starts from whole headers: mutations of nothing would take long to become JSON.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  constexpr std::string_view kSeeds[] = {
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})",
      R"({"hidden_size":4,"quantization_config":{"ignore":["x"]},"nestedfp":{"version":1,"lower":"nestedfp",)"
      R"("source_dtype":"F16","uppers":"free","dtypes":{"a":"BF16"},"inexact":["a"]}})",
      R"({"quantization_config":{"quant_method":"compressed-tensors","format":"float-quantized","config_groups":{"g":)"
      R"({"weights":{"num_bits":8,"type":"float","strategy":"block","block_structure":[128,128]}}}}})",
      R"({"architectures":["Gemma3ForConditionalGeneration"],"eos_token_id":1,"text_config":{"model_type":"gemma3_text"}})",
  };
  const std::string_view start = kSeeds[seed % std::size(kSeeds)];
  if (size >= 16 || max_size < start.size()) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, start.data(), start.size());
  return start.size();
}
