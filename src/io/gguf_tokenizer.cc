#include "io/gguf_tokenizer.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace nfp {

std::optional<GgufTokenizer> gguf_tokenizer_of(const GgufFile& gguf) {
  GgufTokenizer t;
  t.model = gguf.text("tokenizer.ggml.model").value_or("");
  if (t.model.empty()) return std::nullopt;
  t.architecture = gguf.text("general.architecture").value_or("");
  t.pre = gguf.text("tokenizer.ggml.pre").value_or("");
  t.chat_template = gguf.text("tokenizer.chat_template").value_or("");
  if (const auto* tokens = gguf.array<std::string_view>("tokenizer.ggml.tokens")) t.tokens = *tokens;
  if (const auto* merges = gguf.array<std::string_view>("tokenizer.ggml.merges")) t.merges = *merges;
  if (const auto* types = gguf.array<int64_t>("tokenizer.ggml.token_type")) {
    for (int64_t type : *types) t.types.push_back(static_cast<int32_t>(std::clamp<int64_t>(type, 0, 100)));
  }
  if (const auto* scores = gguf.array<double>("tokenizer.ggml.scores")) t.scores.assign(scores->begin(), scores->end());
  t.bos = gguf.integer("tokenizer.ggml.bos_token_id");
  t.eos = gguf.integer("tokenizer.ggml.eos_token_id");
  t.eot = gguf.integer("tokenizer.ggml.eot_token_id");
  t.eom = gguf.integer("tokenizer.ggml.eom_token_id");
  t.unknown = gguf.integer("tokenizer.ggml.unknown_token_id");
  t.padding = gguf.integer("tokenizer.ggml.padding_token_id");
  t.add_bos = gguf.boolean("tokenizer.ggml.add_bos_token");
  t.add_eos = gguf.boolean("tokenizer.ggml.add_eos_token");
  t.add_space_prefix = gguf.boolean("tokenizer.ggml.add_space_prefix");
  return t;
}

std::string metadata_only(std::span<const std::byte> file, const GgufFile& gguf) {
  std::string bytes(reinterpret_cast<const char*>(file.data()), gguf.metadata_end);
  // After the magic and the version: the number of tensors.
  std::memset(bytes.data() + 8, 0, sizeof(uint64_t));
  return bytes;
}

Result<MappedFile> read_tokenizer_gguf(const std::string& directory, std::optional<GgufTokenizer>& tokenizer) {
  const std::string path = directory + "/" + kTokenizerGguf;
  std::error_code code;
  if (!std::filesystem::exists(path, code)) return MappedFile();
  NFP_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  NFP_ASSIGN_OR_RETURN(const GgufFile gguf, parse_gguf(file.bytes(), path));
  tokenizer = gguf_tokenizer_of(gguf);
  return file;
}

}  // namespace nfp
