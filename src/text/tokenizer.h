// Text to token ids and back: what Hugging Face `tokenizers` does with a tokenizer.json, and the same from the
// tokenizer inside a GGUF file. Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), SentencePiece-style BPE (Llama 2,
// Mistral, Gemma), and of tokenizer.json unigram models (Helium).
//
//   NFP_ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::from_json(files, path));
//   NFP_ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer->encode(prompt));
//
// encode is: cut out the added tokens, normalize, pre-tokenize into pieces, BPE or unigram within each piece, then the
// post-processor's BOS and EOS. All methods are const and may be called from any number of threads at once.
// Streams of tokens become text in detokenizer.h; stop strings are found in stop_filter.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace nfp {

// The texts of a Hugging Face model directory. Only the first is needed.
struct TokenizerFiles {
  std::string_view tokenizer_json;
  std::string_view tokenizer_config;   // added_tokens_decoder, bos_token, eos_token, add_bos_token and the like
  std::string_view generation_config;  // eos_token_id: one id or a list, all of which end a generation
};

// What a GGUF file says of its tokenizer (keys tokenizer.ggml.*). Read during from_gguf only, nothing is kept of it.
struct GgufVocab {
  std::string_view architecture;             // general.architecture, which alone tells Phi-3's tokens
  std::string_view model;                    // "gpt2": byte-level BPE; "llama": SentencePiece
  std::string_view pre;                      // names the pre-tokenizer of "gpt2": "smollm", "llama-bpe", "qwen2"...
  std::span<const std::string_view> tokens;  // by id
  std::span<const int32_t> types;            // as many as tokens, or none: 1 normal, 2 unknown, 3 control,
                                             // 4 user defined, 5 unused, 6 byte
  std::span<const float> scores;             // as many as tokens; "llama" needs them, "gpt2" does not
  std::span<const std::string_view> merges;  // "left right", best first; "gpt2" needs them
  std::optional<int64_t> bos, eos, eot, eom, unknown, padding;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
};

struct EncodeOptions {
  bool add_special_tokens = true;  // BOS and EOS as the model's post-processor adds them
  bool parse_special = true;       // "<|im_end|>" in the text is that token; false: it is ordinary text
  std::stop_token stop = {};       // ends the call early, with kCancelled
};

class Tokenizer {
 public:
  // `name` appears in every error ("NAME: field 'model.merges[3]' ..."). Errors: kInvalidInput (not JSON, a field
  // missing or of the wrong type, ids that clash), kUnsupported (a component we do not have, by its name).
  static Result<std::shared_ptr<const Tokenizer>> from_json(const TokenizerFiles& files, const std::string& name);
  // Errors as above; an unknown `pre` is kUnsupported.
  static Result<std::shared_ptr<const Tokenizer>> from_gguf(const GgufVocab& vocab, const std::string& name);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Bytes that are not UTF-8 are read as U+FFFD. Errors: kResource when the model's own regular expression needs more
  // than its share of steps or stack on this text, or the text has 2 GB or more.
  Result<std::vector<int32_t>> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The text of `ids`, always valid UTF-8; skip_special leaves special tokens out. Ids without a token are left out.
  std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;

  // The bytes that a token adds to the text; they need not be whole UTF-8 sequences. Empty for ids without a token.
  std::string_view token_bytes(int32_t id) const;
  // A token as the vocabulary writes it ("Ġthe", "<0x0A>", "<|im_end|>"); nullopt for ids without a token.
  std::optional<std::string_view> id_to_token(int32_t id) const;
  std::optional<int32_t> token_to_id(std::string_view token) const;

  // Largest id + 1, added tokens included. A model's logits may have more columns (padding).
  int32_t vocab_size() const;
  bool is_special(int32_t id) const;
  std::optional<int32_t> bos_id() const;
  std::optional<int32_t> eos_id() const;
  std::optional<int32_t> pad_id() const;
  std::optional<int32_t> unk_id() const;
  // Further tokens that chat templates know by name ("pad_token", "image_token"), and those that are in a list.
  std::span<const std::pair<std::string, std::string>> named_tokens() const;
  std::span<const std::string> additional_special_tokens() const;
  // Whether encode puts BOS first (add_special_tokens).
  bool adds_bos() const;
  // Tokens that end a generation, ascending: EOS, end of turn, and what generation_config names.
  std::span<const int32_t> eog_ids() const;

  // How decode treats the parts that detokenizer.h has to follow.
  // The byte of a byte-fallback token ("<0x0A>" in SentencePiece vocabularies).
  std::optional<uint8_t> fallback_byte(int32_t id) const;
  // SentencePiece puts a space before the text; decode takes it away again.
  enum class LeadingSpace {
    kKeep,
    kDropOne,         // from the text
    kDropFirstToken,  // all marks of spaces in the first token
  };
  LeadingSpace leading_space() const;
  // The bytes that a token adds at the beginning of a text where kDropFirstToken holds.
  std::string first_token_bytes(int32_t id) const;

  // What the loaders put together (tokenizer_parts.h).
  struct Parts;
  explicit Tokenizer(std::unique_ptr<const Parts> parts);

 private:
  std::unique_ptr<const Parts> parts_;
};

}  // namespace nfp
