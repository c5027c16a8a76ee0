#include "server/testing/byte_tokenizer.h"

#include <string>
#include <string_view>
#include <vector>

#include "text/byte_level.h"

namespace nfp::server {
namespace {

// GPT-2's printable stand-in for a byte.
std::string stand_in(int byte) { return text::byte_level_encode(std::string(1, static_cast<char>(byte))); }

}  // namespace

const char kChatMlTemplate[] =
    "{% if tools %}<|im_start|>system\n<tool_call> {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

Result<std::shared_ptr<const Tokenizer>> make_byte_tokenizer() {
  std::vector<std::string> texts;
  texts.reserve(260);
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
