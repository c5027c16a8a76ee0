// Any bytes as a tokenizer.json; what loads encodes and decodes a text. The input is the file, a zero byte, the text.
#include <cstdint>
#include <cstdlib>
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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.rfind('\0');
  const std::string_view json = input.substr(0, end);
  // Short, because a pattern may rightly use its full share of steps at every byte.
  const std::string_view text =
      (end == std::string_view::npos ? std::string_view() : input.substr(end + 1)).substr(0, 128);
  const auto tokenizer = nfp::Tokenizer::from_json({json, json, json}, "fuzz");
  if (!tokenizer.ok()) {
    require(!tokenizer.error().message.empty());
    return 0;
  }
  use(*tokenizer, text);
  use(*tokenizer, "Hello  w\xC3\xB6rld, it's 2024!\n\n\t<s>\xE2\x96\x81\xF0\x9F\x99\x82 e\xCC\x81\xFF");
  return 0;
}
