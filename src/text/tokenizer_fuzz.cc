// Any bytes as a tokenizer.json, or as what a GGUF file says of its tokenizer; what loads encodes and decodes a text.
// The input is the file, a zero byte, the text. Instead of a tokenizer.json it may be lines: "GGUF"; the model; the
// pre-tokenizer; a sign for each of the five ids of a role, the three flags, and whether there are types and scores;
// tokens, each behind a sign for its type and one for its score; an empty line; merges.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void use(const std::shared_ptr<const nfp::Tokenizer>& tokenizer, std::string_view text) {
  for (const bool special : {true, false}) {
    const auto ids = tokenizer->encode(text, {.add_special_tokens = special, .parse_special = special});
    if (!ids.ok()) continue;
    for (const int32_t id : *ids) require(tokenizer->id_to_token(id).has_value());
    require(nfp::text::is_utf8(tokenizer->decode(*ids, special)));
    nfp::StreamingDetokenizer stream(tokenizer, {.skip_special = special, .continues = false});
    for (const int32_t id : *ids) require(nfp::text::is_utf8(stream.append(id)));
    require(nfp::text::is_utf8(stream.finish()));
  }
  std::vector<int32_t> some;
  for (const char c : text) some.push_back(static_cast<unsigned char>(c));
  require(nfp::text::is_utf8(tokenizer->decode(some)));
}

// The next line of `rest`, which it is cut off from.
std::string_view next_line(std::string_view* rest) {
  const size_t end = std::min(rest->find('\n'), rest->size());
  const std::string_view line = rest->substr(0, end);
  rest->remove_prefix(std::min(end + 1, rest->size()));
  return line;
}

nfp::Result<std::shared_ptr<const nfp::Tokenizer>> from_gguf(std::string_view rest) {
  nfp::GgufVocab vocab;
  next_line(&rest);
  vocab.model = next_line(&rest);
  vocab.pre = next_line(&rest);
  const std::string signs = std::string(next_line(&rest)) + std::string(10, '-');
  size_t sign = 0;
  for (std::optional<int64_t>* id : {&vocab.bos, &vocab.eos, &vocab.eot, &vocab.eom, &vocab.unknown, &vocab.padding}) {
    if (const char c = signs[sign++]; c != '-') *id = c - '0';
  }
  for (std::optional<bool>* flag : {&vocab.add_bos, &vocab.add_eos, &vocab.add_space_prefix}) {
    if (const char c = signs[sign++]; c != '-') *flag = c == '1';
  }
  std::vector<std::string_view> tokens, merges;
  std::vector<int32_t> types;
  std::vector<float> scores;
  for (std::string_view line = next_line(&rest); line.size() >= 2; line = next_line(&rest)) {
    types.push_back(line[0] - '0');
    scores.push_back(static_cast<float>('0' - line[1]));
    tokens.push_back(line.substr(2));
  }
  while (!rest.empty()) merges.push_back(next_line(&rest));
  vocab.tokens = tokens;
  vocab.merges = merges;
  if (signs[sign++] != '-') vocab.types = types;
  if (signs[sign] != '-') vocab.scores = scores;
  return nfp::Tokenizer::from_gguf(vocab, "fuzz");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.rfind('\0');
  const std::string_view json = input.substr(0, end);
  // Short, because a pattern may rightly use its full share of steps at every byte.
  const std::string_view text =
      (end == std::string_view::npos ? std::string_view() : input.substr(end + 1)).substr(0, 128);
  const auto tokenizer =
      json.starts_with("GGUF") ? from_gguf(json) : nfp::Tokenizer::from_json({json, json, json}, "fuzz");
  if (!tokenizer.ok()) {
    require(!tokenizer.error().message.empty());
    return 0;
  }
  use(*tokenizer, text);
  use(*tokenizer, "Hello  w\xC3\xB6rld, it's 2024!\n\n\t<s>\xE2\x96\x81\xF0\x9F\x99\x82 e\xCC\x81\xFF");
  return 0;
}
