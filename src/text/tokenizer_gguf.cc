// Tokenizer::from_gguf. A GGUF file names its pre-tokenizer; what the names mean is the table below.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

namespace nfp {
namespace text {
namespace {

// tokenizer.ggml.token_type
enum GgufTokenType : int32_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTekkenPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// o200k's, of GPT-4o and Phi-4-mini: words with what the apostrophe adds to them.
constexpr std::string_view kO200kPattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// Seed's: signs do not take the line ends behind them along.
constexpr std::string_view kSeedPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+)";
// MiniCPM5's: Llama 3's, but that numbers are cut before.
constexpr std::string_view kNumbersTogetherPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// BLOOM's: words with a space before them, without the signs that end a sentence.
constexpr std::string_view kBloomPattern = R"( ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+)";
constexpr std::string_view kDigit = R"(\p{N})", kThreeNumbersPattern = R"(\p{N}{1,3})";
// llama.cpp's "default": marks, words, numbers, and these by three digits, each cut from what the one before left.
constexpr std::string_view kMarksPattern = R"([\p{P}$+<=>^~|]+)", kNumberPattern = R"(\p{N}+)",
                           kThreeDigitsPattern = "[0-9][0-9][0-9]";

// DeepSeek's of 2023 and 2024: line ends, words and signs with a space before them, Chinese and Korean, digits. The
// letters of one are those with a case that its makers listed.
constexpr std::string_view kLineEndPattern = R"([\r\n])", kWordPattern = R"(\s?\p{L}+)", kSignsPattern = R"(\s?\p{P}+)",
                           kWideSignsPattern =
                               R"(\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+)",
                           kTrailingSpacePattern = R"(\s+$)",
                           kHanPattern = R"([\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+)";
constexpr std::string_view kCasedPattern =
    R"(\s?[)"
    R"(A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF})"
    R"(\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1})"
    R"(\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5})"
    R"(\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A})"
    R"(\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B})"
    R"(\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC})"
    R"(\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107})"
    R"(\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134})"
    R"(\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4})"
    R"(\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787})"
    R"(\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A})"
    R"(\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2})"
    R"(\x{118A0}-\x{118DF}\x{1E900}-\x{1E943})"
    R"(]+)";

struct KnownPre {
  std::string_view name;                     // tokenizer.ggml.pre
  std::array<std::string_view, 6> patterns;  // pieces, by one after the other; empty ones at the end
  bool nfc;                                  // as the model's tokenizer.json normalizes
  bool ignore_merges;
  bool add_bos;  // unless the file says otherwise
};

constexpr KnownPre kKnownPre[] = {
    {"default", {kMarksPattern, kGpt2Pattern, kNumberPattern, kThreeDigitsPattern}, false, false, false},
    {"gpt-2", {kGpt2Pattern}, false, false, false},
    {"phi-2", {kGpt2Pattern}, false, false, false},
    {"olmo", {kGpt2Pattern}, false, false, false},
    {"exaone4", {kGpt2Pattern}, false, false, false},
    {"mpt", {kGpt2Pattern}, false, false, false},
    {"mellum", {kGpt2Pattern}, false, false, false},
    {"granite-docling", {kGpt2Pattern}, false, false, false},
    {"trillion", {kGpt2Pattern}, false, false, false},
    {"a.x-4.0", {kGpt2Pattern}, false, false, false},
    {"smollm", {kDigit, kGpt2Pattern}, false, false, false},
    {"starcoder", {kDigit, kGpt2Pattern}, false, false, false},
    {"refact", {kDigit, kGpt2Pattern}, false, false, false},
    {"minerva-7b", {kDigit, kGpt2Pattern}, false, false, false},
    {"command-r", {kDigit, kGpt2Pattern}, true, false, true},
    {"llama-bpe", {kLlama3Pattern}, false, true, true},
    {"llama3", {kLlama3Pattern}, false, true, true},
    {"llama-v3", {kLlama3Pattern}, false, true, true},
    {"falcon3", {kLlama3Pattern}, false, true, false},
    {"midm-2.0", {kLlama3Pattern}, false, true, true},
    {"pixtral", {kLlama3Pattern}, false, true, true},
    {"minicpm5", {kThreeNumbersPattern, kNumbersTogetherPattern}, false, true, false},
    {"viking", {kBloomPattern, kDigit}, false, false, false},
    {"dbrx", {kLlama3Pattern}, false, false, false},
    {"glm4", {kLlama3Pattern}, false, true, false},
    {"chatglm-bpe", {kLlama3Pattern}, false, false, false},
    {"smaug-bpe", {kLlama3Pattern}, false, false, false},
    {"qwen2", {kQwen2Pattern}, true, false, false},
    {"deepseek-r1-qwen", {kQwen2Pattern}, true, false, false},
    {"megrez", {kQwen2Pattern}, false, false, false},
    {"kormo", {kQwen2Pattern}, false, false, false},
    {"f2llmv2", {kQwen2Pattern}, false, false, false},
    {"stablelm2", {kQwen2Pattern}, false, false, false},
    {"seed-coder", {kSeedPattern}, false, false, false},
    {"tekken", {kTekkenPattern}, false, true, true},
    {"gpt-4o", {kO200kPattern}, false, false, false},
    {"deepseek-llm",
     {kLineEndPattern, kCasedPattern, kWideSignsPattern, kTrailingSpacePattern, kHanPattern, kNumberPattern},
     false,
     false,
     false},
    {"deepseek-coder", {kLineEndPattern, kWordPattern, kSignsPattern, kHanPattern, kDigit}, false, false, false},
};

Result<const KnownPre*> find_pre(std::string_view name) {
  if (name.empty()) name = "default";
  std::string known;
  for (const KnownPre& pre : kKnownPre) {
    if (pre.name == name) return &pre;
    known += known.empty() ? "" : ", ";
    known += pre.name;
  }
  return error(ErrorCode::kUnsupported, "key 'tokenizer.ggml.pre' is '{}'; known pre-tokenizers: {}", name, known);
}

Status check(const GgufVocab& vocab) {
  const auto count = vocab.tokens.size();
  if (count == 0) return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.tokens' is missing or empty");
  if (count > static_cast<size_t>(kMaxTokenId)) {
    return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.tokens' has {} entries; at most {} are supported",
                 count, kMaxTokenId);
  }
  if (!vocab.types.empty() && vocab.types.size() != count) {
    return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.token_type' has {} entries for {} tokens",
                 vocab.types.size(), count);
  }
  if (!vocab.scores.empty() && vocab.scores.size() != count) {
    return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.scores' has {} entries for {} tokens",
                 vocab.scores.size(), count);
  }
  for (size_t i = 0; i < count; ++i) {
    if (vocab.tokens[i].size() > kMaxTokenBytes) {
      return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.tokens[{}]' has {} bytes; at most {} are supported",
                   i, vocab.tokens[i].size(), kMaxTokenBytes);
    }
    if (!is_utf8(vocab.tokens[i])) {
      return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.tokens[{}]' is not UTF-8", i);
    }
  }
  return ok_status();
}

Result<Vocabulary> make_vocabulary(const GgufVocab& vocab) {
  Vocabulary vocabulary;
  vocabulary.reserve(vocab.tokens.size(), 8 * vocab.tokens.size());
  for (size_t i = 0; i < vocab.tokens.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    // llama.cpp's converter invents "[PAD7]" for rows of a matrix that no token of a byte-level vocabulary stands for.
    if (vocab.model == "gpt2" && !vocab.types.empty() && vocab.types[i] == kUnused) continue;
    if (vocabulary.add(id, vocab.tokens[i]) == Vocabulary::Added::kTextTaken) {
      return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.tokens[{}]': '{}' is also token {}", i,
                   vocab.tokens[i], vocabulary.find(vocab.tokens[i]));
    }
  }
  return vocabulary;
}

Result<int32_t> role(const GgufVocab& vocab, std::string_view key, std::optional<int64_t> id) {
  if (!id) return Vocabulary::kNone;
  if (*id < 0 || *id >= static_cast<int64_t>(vocab.tokens.size())) {
    return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.{}_token_id' is {}; there are {} tokens", key, *id,
                 vocab.tokens.size());
  }
  return static_cast<int32_t>(*id);
}

// Phi-3's tokens take the white space behind them along, as its tokenizer.json says and GGUF has no key for. (Phi-4's
// vocabularies are byte-level.)
bool takes_space_behind(const GgufVocab& vocab, std::string_view token) {
  return vocab.architecture == "phi3" && vocab.model == "llama" && token != "<unk>" && token != "<s>" &&
         token != "<|endoftext|>";
}

std::vector<AddedToken> added_tokens(const GgufVocab& vocab) {
  std::vector<AddedToken> added;
  for (size_t i = 0; i < vocab.types.size(); ++i) {
    const int32_t type = vocab.types[i];
    if (type != kControl && type != kUserDefined && type != kUnknown) continue;
    AddedToken token;
    token.id = static_cast<int32_t>(i);
    token.content = vocab.tokens[i];
    token.special = type != kUserDefined;
    token.rstrip = takes_space_behind(vocab, vocab.tokens[i]);
    added.push_back(std::move(token));
  }
  return added;
}

Status add_merges(const GgufVocab& vocab, Bpe& bpe) {
  if (vocab.merges.empty()) return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.merges' is missing or empty");
  bpe.reserve_merges(vocab.merges.size());
  for (size_t i = 0; i < vocab.merges.size(); ++i) {
    const std::string_view line = vocab.merges[i];
    // A token may begin with a space itself, so the one that separates is looked for after the first byte.
    const size_t space = line.find(' ', 1);
    if (space == std::string_view::npos) {
      return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.merges[{}]' is not a pair of tokens", i);
    }
    const Status merged = bpe.add_merge(line.substr(0, space), line.substr(space + 1), static_cast<uint32_t>(i));
    if (!merged.ok()) {
      return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.merges[{}]': {}", i, merged.error().message);
    }
  }
  return ok_status();
}

Status add_gguf_split(std::string_view pattern, PreTokenizer& pre_tokenizer) {
  if (pattern.empty()) return ok_status();
  NFP_ASSIGN_OR_RETURN(Regex regex, Regex::compile(pattern));
  pre_tokenizer.add(PreTokenizer::Split{std::move(regex), SplitBehavior::kIsolated, false});
  return ok_status();
}

// "gpt2": byte-level BPE.
Status fill_byte_level(const GgufVocab& vocab, Vocabulary vocabulary, TokenizerSpec& spec, bool& add_bos) {
  NFP_ASSIGN_OR_RETURN(const KnownPre* pre, find_pre(vocab.pre));
  BpeOptions options;
  options.byte_level = true;
  options.ignore_merges = pre->ignore_merges;
  if (pre->nfc) spec.normalizer.add(UnicodeForm::kNfc);
  for (const std::string_view pattern : pre->patterns) {
    NFP_RETURN_IF_ERROR(add_gguf_split(pattern, spec.pre_tokenizer));
  }
  auto bpe = std::make_unique<Bpe>(std::move(vocabulary), options);
  NFP_RETURN_IF_ERROR(add_merges(vocab, *bpe));
  spec.model = std::move(bpe);
  spec.decoder.byte_level = true;
  add_bos = pre->add_bos;
  return ok_status();
}

// "llama": SentencePiece BPE with byte fallback, merges by score.
Status fill_sentencepiece(const GgufVocab& vocab, Vocabulary vocabulary, TokenizerSpec& spec, bool& add_bos) {
  if (vocab.scores.empty()) return error(ErrorCode::kInvalidInput, "key 'tokenizer.ggml.scores' is missing or empty");
  constexpr std::string_view kMark = "\xE2\x96\x81";
  BpeOptions options;
  options.byte_fallback = true;
  options.fuse_unk = true;
  options.unk = spec.special.unk;
  const bool prefix = vocab.add_space_prefix.value_or(true);
  if (prefix) spec.normalizer.add(Normalizer::Prepend{std::string(kMark)});
  spec.normalizer.add(Normalizer::Replace{" ", {}, std::string(kMark)});
  auto bpe = std::make_unique<Bpe>(std::move(vocabulary), options);
  // As SentencePiece: the text "<0x41>" is no way to write the byte, nor "<s>" inside a word the control token.
  std::vector<bool> apart(vocab.tokens.size());
  for (size_t i = 0; i < vocab.types.size(); ++i) {
    apart[i] = vocab.types[i] == kControl || vocab.types[i] == kUnknown || vocab.types[i] == kByte;
  }
  bpe->derive_merges(vocab.scores, apart);
  cut_at_marks(spec.pre_tokenizer, *bpe);
  spec.model = std::move(bpe);
  spec.decoder.replaces.emplace_back(kMark, " ");
  spec.decoder.byte_fallback = true;
  if (prefix) spec.decoder.leading_space = Tokenizer::LeadingSpace::kDropOne;
  add_bos = true;
  return ok_status();
}

// Behind what was asked for in the middle of a text come the padding, the next file or the next repository of what the
// model was trained on. llama.cpp ends an answer there.
constexpr std::string_view kFimEnds[] = {"<|fim_pad|>",   "<fim-pad>",         "<fim_pad>", "<|fim_repo|>",
                                         "<|repo_name|>", "<fim-repo>",        "<REPO>",    "<reponame>",
                                         "<|file_sep|>",  "<|file_separator|>"};

Result<TokenizerSpec> read_gguf(const GgufVocab& vocab) {
  NFP_RETURN_IF_ERROR(check(vocab));
  TokenizerSpec spec;
  NFP_ASSIGN_OR_RETURN(spec.special.bos, role(vocab, "bos", vocab.bos));
  NFP_ASSIGN_OR_RETURN(spec.special.eos, role(vocab, "eos", vocab.eos));
  NFP_ASSIGN_OR_RETURN(spec.special.unk, role(vocab, "unknown", vocab.unknown));
  NFP_ASSIGN_OR_RETURN(spec.special.pad, role(vocab, "padding", vocab.padding));
  NFP_ASSIGN_OR_RETURN(const int32_t eot, role(vocab, "eot", vocab.eot));
  NFP_ASSIGN_OR_RETURN(const int32_t eom, role(vocab, "eom", vocab.eom));
  NFP_ASSIGN_OR_RETURN(Vocabulary vocabulary, make_vocabulary(vocab));
  bool add_bos = false;
  if (vocab.model == "gpt2") {
    NFP_RETURN_IF_ERROR(fill_byte_level(vocab, std::move(vocabulary), spec, add_bos));
  } else if (vocab.model == "llama") {
    NFP_RETURN_IF_ERROR(fill_sentencepiece(vocab, std::move(vocabulary), spec, add_bos));
  } else {
    return error(ErrorCode::kUnsupported, "key 'tokenizer.ggml.model' is '{}'; supported are gpt2 and llama",
                 vocab.model);
  }
  NFP_ASSIGN_OR_RETURN(spec.added, AddedTokens::make(added_tokens(vocab), spec.normalizer));
  if (vocab.add_bos.value_or(add_bos) && spec.special.bos != Vocabulary::kNone) spec.prefix = {spec.special.bos};
  if (vocab.add_eos.value_or(false) && spec.special.eos != Vocabulary::kNone) spec.suffix = {spec.special.eos};
  for (const auto& [name, id] : {std::pair("pad_token", spec.special.pad), {"unk_token", spec.special.unk}}) {
    if (id != Vocabulary::kNone) spec.named_tokens.emplace_back(name, vocab.tokens[static_cast<size_t>(id)]);
  }
  for (const int32_t end : {eot, eom}) {
    if (end != Vocabulary::kNone) spec.special.eog.push_back(end);
  }
  add_known_eog(spec.added, spec.special.eog);
  for (const std::string_view name : kFimEnds) {
    if (const AddedToken* token = spec.added.find(name)) spec.special.eog.push_back(token->id);
  }
  return spec;
}

}  // namespace
}  // namespace text

Result<std::shared_ptr<const Tokenizer>> Tokenizer::from_gguf(const GgufVocab& vocab, const std::string& name) {
  auto spec = text::read_gguf(vocab);
  if (!spec.ok()) return text::in_file(name, std::move(spec).error());
  auto tokenizer = text::make_tokenizer(std::move(spec).value());
  if (!tokenizer.ok()) return text::in_file(name, std::move(tokenizer).error());
  if (vocab.model == "gpt2" && vocab.pre.empty()) {
    log::warn(
        "{}: does not say how its model cuts text (tokenizer.ggml.pre), so llama.cpp's default is used; a newer "
        "conversion may answer better",
        name);
  }
  return tokenizer;
}

}  // namespace nfp
