// Bytes of small models, for tests and fuzzers.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/float_types.h"
#include "base/shape.h"

namespace nfp::testing {

struct TestTensor {
  std::string name;
  DType dtype = DType::kF16;
  Shape shape;
  std::string bytes;
};

// Normal numbers of deviation 0.05 in the dtype (F16, BF16 or F32).
inline TestTensor random_tensor(const std::string& name, DType dtype, Shape shape, uint32_t seed, float sigma = 0.05f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  TestTensor tensor{name, dtype, shape, {}};
  for (int64_t i = 0; i < shape.elements(); ++i) {
    const float value = normal(random);
    if (dtype == DType::kF32) {
      tensor.bytes.append(reinterpret_cast<const char*>(&value), 4);
    } else {
      const uint16_t bits = dtype == DType::kF16 ? fp32_to_fp16(value) : fp32_to_bf16(value);
      tensor.bytes.append(reinterpret_cast<const char*>(&bits), 2);
    }
  }
  return tensor;
}

// Writes GGUF files, good and bad.
class GgufBuilder {
 public:
  explicit GgufBuilder(uint32_t version = 3) : version_(version) {}

  template <typename T>
  static std::string raw(T value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  static std::string text(std::string_view value) { return raw<uint64_t>(value.size()) + std::string(value); }

  GgufBuilder& key(const std::string& name, uint32_t type, const std::string& value) {
    keys_ += text(name) + raw(type) + value;
    ++key_count_;
    return *this;
  }
  GgufBuilder& integer(const std::string& name, uint32_t value) { return key(name, 4, raw(value)); }
  GgufBuilder& number(const std::string& name, float value) { return key(name, 6, raw(value)); }
  GgufBuilder& string(const std::string& name, std::string_view value) { return key(name, 8, text(value)); }
  GgufBuilder& strings(const std::string& name, const std::vector<std::string>& values) {
    std::string value = raw<uint32_t>(8) + raw<uint64_t>(values.size());
    for (const std::string& v : values) value += text(v);
    return key(name, 9, value);
  }
  // dims: innermost first, as GGUF has them.
  GgufBuilder& tensor(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type,
                      const std::string& bytes) {
    data_.resize((data_.size() + 31) / 32 * 32);
    return tensor_at(name, dims, type, data_.size()).data(bytes);
  }
  GgufBuilder& tensor_at(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    tensors_ += text(name) + raw(static_cast<uint32_t>(dims.size()));
    for (uint64_t dim : dims) tensors_ += raw(dim);
    tensors_ += raw(type) + raw(offset);
    ++tensor_count_;
    return *this;
  }
  GgufBuilder& data(const std::string& bytes) {
    data_ += bytes;
    return *this;
  }
  GgufBuilder& claim(uint64_t tensors, uint64_t keys) {
    tensor_count_ = tensors;
    key_count_ = keys;
    return *this;
  }

  std::string build() const {
    std::string out = "GGUF" + raw(version_) + raw(tensor_count_) + raw(key_count_) + keys_ + tensors_;
    out.resize((out.size() + 31) / 32 * 32);
    return out + data_;
  }

 private:
  uint32_t version_;
  uint64_t tensor_count_ = 0, key_count_ = 0;
  std::string keys_, tensors_, data_;
};

// A model of one layer: 2 heads of 8, hidden 32, and a 4-token vocabulary; of tensors nothing yet.
inline GgufBuilder tiny_gguf_keys(const std::string& architecture = "llama") {
  GgufBuilder gguf;
  const auto integer = [&](const std::string& key, uint32_t value) { gguf.integer(architecture + key, value); };
  gguf.string("general.architecture", architecture);
  integer(".block_count", 1);
  integer(".embedding_length", 32);
  integer(".attention.head_count", 2);
  integer(".attention.head_count_kv", 1);
  integer(".attention.key_length", 8);
  integer(".feed_forward_length", 64);
  integer(".context_length", 128);
  gguf.number(architecture + ".rope.freq_base", 10000.0f);
  gguf.number(architecture + ".attention.layer_norm_rms_epsilon", 1e-5f);
  gguf.string("tokenizer.ggml.model", "gpt2").string("tokenizer.ggml.pre", "smollm");
  gguf.strings("tokenizer.ggml.tokens", {"a", "b", "ab", "<s>"}).strings("tokenizer.ggml.merges", {"a b"});
  gguf.integer("tokenizer.ggml.bos_token_id", 3).string("tokenizer.chat_template", "{{ x }}");
  return gguf;
}

inline std::string random_blocks(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out(bytes, '\0');
  for (char& c : out) c = static_cast<char>(random());
  return out;
}

// Blocks of Q8_0 (34 bytes) or Q4_1 (20) with scales that keep the weights small.
inline std::string quantised(size_t blocks, size_t block_bytes, uint32_t seed) {
  std::string out = random_blocks(blocks * block_bytes, seed);
  for (size_t i = 0; i < blocks; ++i) {
    const uint16_t d = fp32_to_fp16(0.001f);
    std::memcpy(out.data() + i * block_bytes, &d, 2);
    if (block_bytes == 20) std::memcpy(out.data() + i * block_bytes + 2, &d, 2);
  }
  return out;
}

// A llama: q is Q8_0, gate Q4_1, the rest F16 and F32.
inline std::string tiny_gguf(GgufBuilder gguf = tiny_gguf_keys()) {
  const auto f16 = [&](const std::string& name, uint64_t rows, uint64_t cols, uint32_t seed) {
    gguf.tensor(name, {cols, rows}, 1,
                random_tensor(name, DType::kF16, {static_cast<int64_t>(rows), static_cast<int64_t>(cols)}, seed).bytes);
  };
  const auto norm = [&](const std::string& name) {
    gguf.tensor(name, {32}, 0, random_tensor(name, DType::kF32, {32}, 9).bytes);
  };
  f16("token_embd.weight", 4, 32, 1);
  norm("blk.0.attn_norm.weight");
  gguf.tensor("blk.0.attn_q.weight", {32, 16}, 8, quantised(16, 34, 2));
  f16("blk.0.attn_k.weight", 8, 32, 3);
  f16("blk.0.attn_v.weight", 8, 32, 4);
  f16("blk.0.attn_output.weight", 32, 16, 5);
  norm("blk.0.ffn_norm.weight");
  gguf.tensor("blk.0.ffn_gate.weight", {32, 64}, 3, quantised(64, 20, 6));
  f16("blk.0.ffn_up.weight", 64, 32, 7);
  f16("blk.0.ffn_down.weight", 32, 64, 8);
  norm("output_norm.weight");
  return gguf.build();
}

}  // namespace nfp::testing
