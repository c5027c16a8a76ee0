// Answers tokenizer questions on stdin, for the tests that compare us with the `tokenizers` package.
//
//   nfp_tokenize TOKENIZER.json [tokenizer_config.json [generation_config.json]]
//   nfp_tokenize --vocab FILE      the tokenizer of a GGUF file as dump_vocab in oracle.py writes it
//
// Numbers are 32-bit little-endian. A question is: op (one byte), flags, length, that many bytes. An answer is: length,
// bytes; ids are 4 bytes each.
//   'e'  text -> ids. flags 1: add special tokens, 2: parse special tokens
//   'd'  ids -> text by decode. flags 1: skip special tokens
//   's'  ids -> text by a StreamingDetokenizer, each part of which is checked to be UTF-8. flags as for 'd'
//   'i'  -> ids: vocab_size, bos, eos, pad, unk (-1 for none), adds_bos, then the end-of-generation ids
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace {

using nfp::Tokenizer;

std::optional<std::string> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// memcpy that may be asked for nothing, from nowhere.
void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

bool read_exactly(void* to, size_t bytes) { return bytes == 0 || std::fread(to, 1, bytes, stdin) == bytes; }

void answer(const void* data, size_t bytes) {
  const auto length = static_cast<uint32_t>(bytes);
  std::fwrite(&length, sizeof(length), 1, stdout);
  if (bytes > 0) std::fwrite(data, 1, bytes, stdout);
  std::fflush(stdout);
}

// Reads what dump_vocab wrote: counted strings and numbers, in a fixed order. The file is our own: no checks.
class Dump {
 public:
  explicit Dump(const std::string& bytes) : bytes_(bytes) {}
  int32_t number() {
    int32_t value = 0;
    copy_bytes(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string_view string() {
    const auto length = static_cast<size_t>(number());
    at_ += length;
    return std::string_view(bytes_).substr(at_ - length, length);
  }
  std::vector<std::string_view> strings() {
    std::vector<std::string_view> all(static_cast<size_t>(number()));
    for (std::string_view& one : all) one = string();
    return all;
  }
  template <typename T>
  std::vector<T> array() {
    std::vector<T> all(static_cast<size_t>(number()));
    copy_bytes(all.data(), bytes_.data() + at_, all.size() * sizeof(T));
    at_ += all.size() * sizeof(T);
    return all;
  }
  std::optional<int64_t> optional() {
    const int32_t value = number();
    return value < 0 ? std::nullopt : std::optional<int64_t>(value);
  }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

nfp::Result<std::shared_ptr<const Tokenizer>> load_dump(const char* path) {
  const std::string bytes = read_file(path).value_or("");
  Dump dump(bytes);
  nfp::GgufVocab vocab;
  vocab.model = dump.string();
  vocab.pre = dump.string();
  const auto tokens = dump.strings();
  const auto types = dump.array<int32_t>();
  const auto scores = dump.array<float>();
  const auto merges = dump.strings();
  vocab.tokens = tokens;
  vocab.types = types;
  vocab.scores = scores;
  vocab.merges = merges;
  vocab.bos = dump.optional();
  vocab.eos = dump.optional();
  vocab.unknown = dump.optional();
  vocab.padding = dump.optional();
  const auto flag = [&]() -> std::optional<bool> {
    const auto value = dump.optional();
    return value ? std::optional<bool>(*value != 0) : std::nullopt;
  };
  vocab.add_bos = flag();
  vocab.add_eos = flag();
  vocab.add_space_prefix = flag();
  return Tokenizer::from_gguf(vocab, path);
}

nfp::Result<std::shared_ptr<const Tokenizer>> load(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "--vocab") return load_dump(argv[2]);
  std::string texts[3];
  for (int i = 1; i < argc && i <= 3; ++i) {
    auto text = read_file(argv[i]);
    if (!text) return nfp::error(nfp::ErrorCode::kIo, "{}: cannot be read", argv[i]);
    texts[i - 1] = std::move(*text);
  }
  return Tokenizer::from_json({texts[0], texts[1], texts[2]}, argc > 1 ? argv[1] : "");
}

std::string stream(const std::shared_ptr<const Tokenizer>& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  nfp::StreamingDetokenizer detokenizer(tokenizer, {.skip_special = skip, .continues = false});
  std::string all;
  const auto take = [&](const std::string& part) {
    all += nfp::text::is_utf8(part) ? part : "\n[part is not UTF-8]\n";
  };
  for (const int32_t id : ids) take(detokenizer.append(id));
  take(detokenizer.finish());
  return all;
}

std::vector<int32_t> info(const Tokenizer& tokenizer) {
  std::vector<int32_t> facts = {tokenizer.vocab_size(),          tokenizer.bos_id().value_or(-1),
                                tokenizer.eos_id().value_or(-1), tokenizer.pad_id().value_or(-1),
                                tokenizer.unk_id().value_or(-1), tokenizer.adds_bos() ? 1 : 0};
  facts.insert(facts.end(), tokenizer.eog_ids().begin(), tokenizer.eog_ids().end());
  return facts;
}

}  // namespace

int main(int argc, char** argv) {
  const auto loaded = load(argc, argv);
  if (!loaded.ok()) {
    std::fprintf(stderr, "%s\n", loaded.error().message.c_str());
    return 1;
  }
  const std::shared_ptr<const Tokenizer>& tokenizer = *loaded;
  for (char op = 0; read_exactly(&op, 1);) {
    uint32_t flags = 0;
    uint32_t length = 0;
    if (!read_exactly(&flags, sizeof(flags)) || !read_exactly(&length, sizeof(length))) return 1;
    std::string data(length, '\0');
    if (!read_exactly(data.data(), length)) return 1;
    std::vector<int32_t> ids;
    if (op == 'e') {
      auto encoded =
          tokenizer->encode(data, {.add_special_tokens = (flags & 1) != 0, .parse_special = (flags & 2) != 0});
      if (!encoded.ok()) {
        std::fprintf(stderr, "%s\n", encoded.error().message.c_str());
        return 1;
      }
      ids = std::move(encoded).value();
      answer(ids.data(), ids.size() * sizeof(int32_t));
      continue;
    }
    ids.resize(length / sizeof(int32_t));
    copy_bytes(ids.data(), data.data(), ids.size() * sizeof(int32_t));
    if (op == 'i') {
      ids = info(*tokenizer);
      answer(ids.data(), ids.size() * sizeof(int32_t));
    } else {
      const bool skip = (flags & 1) != 0;
      const std::string text = op == 'd' ? tokenizer->decode(ids, skip) : stream(tokenizer, ids, skip);
      answer(text.data(), text.size());
    }
  }
  return 0;
}
