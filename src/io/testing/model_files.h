// Small models and damaged files for the tests of this folder.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/float_types.h"
#include "base/mapped_file.h"
#include "base/testing/scratch_test.h"
#include "io/testing/small_files.h"

namespace nfp::testing {

inline void set_weight(TestTensor& tensor, int64_t row, int64_t col, uint16_t bits) {
  std::memcpy(tensor.bytes.data() + 2 * (row * tensor.shape[1] + col), &bits, 2);
}

inline void write_tensors(const std::string& path, const std::vector<TestTensor>& tensors) {
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}";
  std::string data;
  for (const TestTensor& t : tensors) {
    const std::vector<int64_t> dims(t.shape.begin(), t.shape.end());
    header +=
        fmt::format(",\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", t.name,
                    info(t.dtype).safetensors_name, fmt::join(dims, ","), data.size(), data.size() + t.bytes.size());
    data += t.bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  ASSERT_TRUE(write_file(path, GgufBuilder::raw<uint64_t>(header.size()) + header + data).ok());
}

// A one-layer model's tensors. F16 rows 3 and 5 of q_proj carry a large weight.
inline std::vector<TestTensor> tiny_model(DType dtype, uint32_t seed = 1) {
  const std::string layer = "model.layers.0.";
  std::vector<TestTensor> out = {
      random_tensor("model.embed_tokens.weight", dtype, {50, 32}, seed),
      random_tensor(layer + "input_layernorm.weight", dtype, {32}, seed + 1),
      random_tensor(layer + "self_attn.q_proj.weight", dtype, {32, 32}, seed + 2),
      random_tensor(layer + "self_attn.q_proj.bias", dtype, {32}, seed + 3),
      random_tensor(layer + "self_attn.k_proj.weight", dtype, {16, 32}, seed + 4),
      random_tensor(layer + "self_attn.v_proj.weight", dtype, {16, 32}, seed + 5),
      random_tensor(layer + "self_attn.o_proj.weight", dtype, {32, 32}, seed + 6),
      random_tensor(layer + "mlp.gate_proj.weight", dtype, {48, 32}, seed + 7),
      random_tensor(layer + "mlp.up_proj.weight", dtype, {48, 32}, seed + 8),
      random_tensor(layer + "mlp.down_proj.weight", dtype, {32, 48}, seed + 9),
      random_tensor("model.norm.weight", dtype, {32}, seed + 10),
  };
  if (dtype == DType::kF16) {
    for (int64_t col = 0; col < 32; ++col) {
      set_weight(out[2], 3, col, 0x2c00);  // 2^-4
      set_weight(out[2], 5, col, 0xac00);
    }
    set_weight(out[2], 3, 4, 0x48a0);  // 9.25
    set_weight(out[2], 5, 1, 0xc000);  // -2
  }
  return out;
}

inline constexpr const char* kTinyConfig = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
 "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
 "intermediate_size": 48, "vocab_size": 50, "rms_norm_eps": 1e-05, "tie_word_embeddings": true}
)";

// config.json, tokenizer.json and the tensors in `shards` files.
inline void write_model(const std::string& folder, const std::vector<TestTensor>& tensors, size_t shards = 1) {
  std::filesystem::create_directories(folder);
  ASSERT_TRUE(write_file(folder + "/config.json", kTinyConfig).ok());
  ASSERT_TRUE(write_file(folder + "/tokenizer.json", "{}").ok());
  if (shards == 1) return write_tensors(folder + "/model.safetensors", tensors);
  std::string map;
  for (size_t s = 0; s < shards; ++s) {
    const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards);
    const auto from = tensors.begin() + static_cast<int64_t>(tensors.size() * s / shards);
    const auto to = tensors.begin() + static_cast<int64_t>(tensors.size() * (s + 1) / shards);
    write_tensors(fmt::format("{}/{}", folder, file), {from, to});
    for (auto t = from; t != to; ++t) map += fmt::format("{}\n  \"{}\": \"{}\"", map.empty() ? "" : ",", t->name, file);
  }
  ASSERT_TRUE(
      write_file(folder + "/model.safetensors.index.json", "{\"metadata\": {}, \"weight_map\": {" + map + "}}\n").ok());
}

// Every file of a directory tree: relative path -> bytes.
inline std::map<std::string, std::string> files_of(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) {
      files[std::filesystem::relative(entry.path(), folder)] = read_text_file(entry.path().string()).value();
    }
  }
  return files;
}

}  // namespace nfp::testing
