#include "server/testing/byte_tokenizer.h"

#include <string>
#include <string_view>
#include <vector>

#include "text/utf8.h"

namespace nfp::server {
namespace {

// GPT-2's printable stand-in for a byte.
std::string stand_in(int byte) {
  static const std::vector<uint32_t> table = [] {
    std::vector<uint32_t> codes(256);
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      codes[b] = printable ? b : next++;
    }
    return codes;
  }();
  std::string out;
  text::append_utf8(out, table[static_cast<size_t>(byte)]);
  return out;
}

}  // namespace

const char kChatMlTemplate[] =
    "{% if tools %}<|im_start|>system\n<tool_call> {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

Result<std::shared_ptr<const Tokenizer>> make_byte_tokenizer() {
  std::vector<std::string> texts;
  for (int byte = 0; byte < 256; ++byte) texts.push_back(stand_in(byte));
  texts.emplace_back("<|im_start|>");
  texts.emplace_back("<|im_end|>");
  // A byte-level tokenizer has merges; this one joins two bytes that no text has side by side.
  const std::string merge = texts[0xFE] + " " + texts[0xFF];
  texts.push_back(texts[0xFE] + texts[0xFF]);
  const std::string_view merges[] = {merge};
  const std::vector<std::string_view> tokens(texts.begin(), texts.end());
  std::vector<int32_t> types(tokens.size(), 1);
  types[256] = types[257] = 3;
  GgufVocab vocab;
  vocab.model = "gpt2";
  vocab.pre = "gpt-2";
  vocab.tokens = tokens;
  vocab.types = types;
  vocab.merges = merges;
  vocab.bos = 256;
  vocab.eos = kByteEnd;
  vocab.add_bos = false;
  return Tokenizer::from_gguf(vocab, "the byte tokenizer");
}

}  // namespace nfp::server
