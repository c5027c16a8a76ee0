#include "io/gguf_tokenizer.h"

#include <algorithm>

namespace nfp {
namespace {

template <typename T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

std::optional<GgufTokenizer> read_gguf_tokenizer(const GgufFile& gguf) {
  GgufTokenizer t;
  t.model = gguf.text("tokenizer.ggml.model").value_or("");
  if (t.model.empty()) return std::nullopt;
  t.pre = gguf.text("tokenizer.ggml.pre").value_or("");
  t.chat_template = gguf.text("tokenizer.chat_template").value_or("");
  if (const auto* tokens = gguf.array<std::string_view>("tokenizer.ggml.tokens")) t.tokens = *tokens;
  if (const auto* merges = gguf.array<std::string_view>("tokenizer.ggml.merges")) t.merges = *merges;
  if (const auto* types = gguf.array<int64_t>("tokenizer.ggml.token_type")) {
    for (int64_t type : *types) t.types.push_back(static_cast<int32_t>(std::clamp<int64_t>(type, 0, 100)));
  }
  if (const auto* scores = gguf.array<double>("tokenizer.ggml.scores")) {
    for (double score : *scores) t.scores.push_back(static_cast<float>(score));
  }
  t.bos = gguf.integer("tokenizer.ggml.bos_token_id");
  t.eos = gguf.integer("tokenizer.ggml.eos_token_id");
  t.eot = gguf.integer("tokenizer.ggml.eot_token_id");
  t.unknown = gguf.integer("tokenizer.ggml.unknown_token_id");
  t.padding = gguf.integer("tokenizer.ggml.padding_token_id");
  t.add_bos = gguf.boolean("tokenizer.ggml.add_bos_token");
  t.add_eos = gguf.boolean("tokenizer.ggml.add_eos_token");
  t.add_space_prefix = gguf.boolean("tokenizer.ggml.add_space_prefix");
  return t;
}

std::string write_gguf_tokenizer(const GgufFile& gguf) {
  std::string keys;
  uint64_t count = 0;
  for (const auto& [key, bytes] : gguf.raw_metadata) {
    if (!key.starts_with("tokenizer.")) continue;
    keys.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    ++count;
  }
  std::string out = "GGUF";
  append<uint32_t>(out, 3);
  append<uint64_t>(out, 0);
  append<uint64_t>(out, count);
  return out + keys;
}

}  // namespace nfp
