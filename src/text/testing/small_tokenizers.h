// Small tokenizers for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/byte_level.h"
#include "text/tokenizer.h"

namespace nfp::text {

inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

// Pieces of a tokenizer.json; a test changes what it is about.
struct TokenizerJson {
  std::vector<std::string> tokens;  // by id
  std::vector<std::pair<std::string, std::string>> merges;
  std::string added = "[]";
  std::string normalizer = "null";
  std::string pre_tokenizer = "null";
  std::string post_processor = "null";
  std::string decoder = R"({"type": "ByteLevel"})";
  std::string model_fields = R"("unk_token": null)";

  std::string text() const {
    std::string vocab;
    for (size_t i = 0; i < tokens.size(); ++i) {
      vocab += (i == 0 ? "" : ", ") + json_string(tokens[i]) + ": " + std::to_string(i);
    }
    std::string pairs;
    for (const auto& [left, right] : merges) {
      pairs += (pairs.empty() ? "[" : ", [") + json_string(left) + ", " + json_string(right) + "]";
    }
    return R"({"version": "1.0", "added_tokens": )" + added + R"(, "normalizer": )" + normalizer +
           R"(, "pre_tokenizer": )" + pre_tokenizer + R"(, "post_processor": )" + post_processor + R"(, "decoder": )" +
           decoder + R"(, "model": {"type": "BPE", )" + model_fields + R"(, "vocab": {)" + vocab + R"(}, "merges": [)" +
           pairs + "]}}";
  }
};

// <s> 0, </s> 1, <|im_end|> 2 (special), <tool> 3 (not special); bytes from 4 on (byte b is 4 + b); then "he", "Ġhe",
// "ll", "hell".
inline TokenizerJson byte_level_json() {
  TokenizerJson json;
  json.tokens = {"<s>", "</s>", "<|im_end|>", "<tool>"};
  for (int byte = 0; byte < 256; ++byte)
    json.tokens.push_back(byte_level_encode(std::string(1, static_cast<char>(byte))));
  const std::string space = byte_level_encode(" ");
  for (const auto& [left, right] :
       std::vector<std::pair<std::string, std::string>>{{"h", "e"}, {space, "he"}, {"l", "l"}, {"he", "ll"}}) {
    json.merges.emplace_back(left, right);
    json.tokens.push_back(left + right);
  }
  json.added = R"([{"id": 0, "content": "<s>", "special": true}, {"id": 1, "content": "</s>", "special": true},
                   {"id": 2, "content": "<|im_end|>", "special": true}, {"id": 3, "content": "<tool>", "special": false,
                    "normalized": false}])";
  json.pre_tokenizer = R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";
  return json;
}
inline int32_t byte_id(unsigned char byte) { return 4 + byte; }  // in byte_level_json()'s

// Llama 2's pipeline. <unk> 0, <s> 1, </s> 2, bytes from 3 on, then "▁", "a", "b", "▁a", "é".
inline TokenizerJson sentencepiece_json() {
  TokenizerJson json;
  json.tokens = {"<unk>", "<s>", "</s>"};
  for (int byte = 0; byte < 256; ++byte) {
    constexpr char kHex[] = "0123456789ABCDEF";
    json.tokens.push_back(std::string("<0x") + kHex[byte / 16] + kHex[byte % 16] + ">");
  }
  const std::string mark = "\xE2\x96\x81";
  for (const std::string& token : {mark, std::string("a"), std::string("b"), mark + "a", std::string("\xC3\xA9")}) {
    json.tokens.push_back(token);
  }
  json.merges.emplace_back(mark, "a");
  json.added = R"([{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true},
                   {"id": 2, "content": "</s>", "special": true}])";
  json.normalizer = R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": ")" + mark +
                    R"("}, {"type": "Replace", "pattern": {"String": " "}, "content": ")" + mark + R"("}]})";
  json.post_processor = R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}})";
  json.decoder = R"({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": ")" + mark +
                 R"("}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})";
  json.model_fields = R"("unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true)";
  return json;
}

inline std::shared_ptr<const Tokenizer> load(const TokenizerJson& json, std::string_view config = {},
                                             std::string_view generation = {}) {
  const std::string text = json.text();
  auto tokenizer = Tokenizer::from_json({text, config, generation}, "test/tokenizer.json");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  return tokenizer.ok() ? *tokenizer : nullptr;
}

}  // namespace nfp::text
