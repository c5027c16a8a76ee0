#include "text/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <span>
#include <utility>

#include "text/byte_level.h"
#include "text/piece_cache.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

namespace nfp {

using text::Vocabulary;

struct Tokenizer::Parts {
  text::TokenizerSpec spec;
  uint64_t serial;              // never used for another tokenizer; the piece cache goes by it
  std::string output;           // what each id adds to the text, one after the other
  std::vector<size_t> offsets;  // [vocab_size + 1] into output
  struct Kind {
    bool present = false;
    bool special = false;
    bool fallback = false;  // output is one byte of a byte-fallback run
  };
  std::vector<Kind> kinds;  // [vocab_size]

  Kind kind(int32_t id) const {
    return id >= 0 && static_cast<size_t>(id) < kinds.size() ? kinds[static_cast<size_t>(id)] : Kind{};
  }
};

namespace {

// Working memory that a thread keeps between calls.
struct Workspace {
  text::RegexSearch search;
  text::PieceCache cache;
  text::ModelScratch model;
  std::vector<text::TextPart> parts;
  std::vector<text::TextPart> normalized_parts;
  std::string normalized;
};

// A scratch vector that one huge text blew up is given back.
constexpr size_t kKeepElements = 1 << 16;

class EncodeSink : public text::PieceSink {
 public:
  EncodeSink(const text::TokenModel& model, Workspace& work, const std::stop_token& stop, std::vector<int32_t>& out)
      : model_(model), work_(work), stop_(stop), out_(out) {}
  bool stopped() const { return stopped_; }

  void piece(std::string_view piece) override {
    // What is no longer wanted is still cut into pieces, which is the quick part.
    if (++pieces_ % kStopEvery == 0 && stop_.stop_requested()) stopped_ = true;
    if (stopped_) return;
    if (piece.size() > text::PieceCache::kMaxBytes) {
      model_.encode(piece, work_.model, out_);
      return;
    }
    const auto place = text::PieceCache::place(piece);
    if (std::span<const int32_t> tokens; work_.cache.find(place, piece, tokens)) {
      out_.insert(out_.end(), tokens.begin(), tokens.end());
      return;
    }
    const size_t begin = out_.size();
    model_.encode(piece, work_.model, out_);
    work_.cache.put(place, piece, std::span(out_).subspan(begin));
  }

 private:
  static constexpr size_t kStopEvery = 1024;
  const text::TokenModel& model_;
  Workspace& work_;
  const std::stop_token& stop_;
  size_t pieces_ = 0;
  bool stopped_ = false;
  std::vector<int32_t>& out_;
};

std::optional<uint8_t> parse_fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  uint8_t byte = 0;
  const auto [end, code] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  if (code != std::errc() || end != token.data() + 5) return std::nullopt;
  return byte;
}

std::string output_bytes(const text::Decoder& decoder, std::string_view token, bool& fallback) {
  if (decoder.byte_level) {
    // What is not written in the byte alphabet stands for itself.
    return text::byte_level_decode(token).value_or(std::string(token));
  }
  std::string text(token);
  for (const auto& [from, to] : decoder.replaces) {
    std::string replaced;
    size_t done = 0;
    for (size_t at; (at = text.find(from, done)) != std::string::npos; done = at + from.size()) {
      replaced.append(text, done, at - done);
      replaced += to;
    }
    if (done == 0) continue;
    replaced.append(text, done);
    text = std::move(replaced);
  }
  const auto byte = decoder.byte_fallback ? parse_fallback_byte(text) : std::nullopt;
  fallback = byte.has_value();
  return fallback ? std::string(1, static_cast<char>(*byte)) : text;
}

std::optional<int32_t> optional_id(int32_t id) {
  return id == Vocabulary::kNone ? std::nullopt : std::optional<int32_t>(id);
}

}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<const Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  if (text.size() >= size_t{1} << 31) {
    return error(ErrorCode::kResource, "text of {} bytes is too long to tokenize; at most 2 GiB - 1", text.size());
  }
  const text::TokenizerSpec& spec = parts_->spec;
  std::string repaired;
  if (!text::is_utf8(text)) text = repaired = text::utf8_lossy(text);

  thread_local Workspace work;
  work.cache.serve(parts_->serial);
  std::vector<int32_t> ids;
  ids.reserve(spec.prefix.size() + spec.suffix.size() + text.size() / 3);
  if (options.add_special_tokens) ids = spec.prefix;
  EncodeSink sink(*spec.model, work, options.stop, ids);

  work.parts.clear();
  NFP_RETURN_IF_ERROR(spec.added.split(text, false, options.parse_special, work.search, work.parts));
  for (const text::TextPart& part : work.parts) {
    if (part.id != Vocabulary::kNone) {
      ids.push_back(part.id);
      continue;
    }
    NFP_ASSIGN_OR_RETURN(
        const std::string_view normalized,
        spec.normalizer.apply(text.substr(part.begin, part.end - part.begin), work.normalized, work.search));
    work.normalized_parts.clear();
    NFP_RETURN_IF_ERROR(spec.added.split(normalized, true, options.parse_special, work.search, work.normalized_parts));
    for (const text::TextPart& piece : work.normalized_parts) {
      if (piece.id != Vocabulary::kNone) {
        ids.push_back(piece.id);
        continue;
      }
      const bool first = part.begin == 0 && piece.begin == 0;
      NFP_RETURN_IF_ERROR(
          spec.pre_tokenizer.run(normalized.substr(piece.begin, piece.end - piece.begin), first, work.search, sink));
    }
  }
  if (options.add_special_tokens) ids.insert(ids.end(), spec.suffix.begin(), spec.suffix.end());
  if (std::max(work.model.symbols.capacity(), work.model.scores.capacity()) > kKeepElements) work.model = {};
  if (work.normalized.capacity() > kKeepElements) work.normalized = {};
  if (sink.stopped()) return error(ErrorCode::kCancelled, "the tokens are no longer wanted");
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  const text::Decoder& decoder = parts_->spec.decoder;
  std::string out;
  std::string run;  // bytes of fallback tokens that follow each other
  const auto end_run = [&] {
    if (text::is_utf8(run)) {
      out += run;
    } else {
      for (size_t i = 0; i < run.size(); ++i) out += text::kReplacement;
    }
    run.clear();
  };
  bool first = true;
  for (const int32_t id : ids) {
    const Parts::Kind kind = parts_->kind(id);
    if (!kind.present || (skip_special && kind.special)) continue;
    const std::string_view bytes = token_bytes(id);
    if (kind.fallback) {
      run += bytes;
      first = false;
      continue;
    }
    if (!run.empty()) end_run();
    if (first && decoder.leading_space == LeadingSpace::kDropFirstToken) {
      out += first_token_bytes(id);
    } else {
      out += bytes;
    }
    first = false;
  }
  end_run();
  if (decoder.leading_space == LeadingSpace::kDropOne && out.starts_with(' ')) out.erase(0, 1);
  return decoder.byte_level ? text::utf8_lossy(out) : out;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  const auto index = static_cast<size_t>(id);
  return std::string_view(parts_->output)
      .substr(parts_->offsets[index], parts_->offsets[index + 1] - parts_->offsets[index]);
}

std::optional<std::string_view> Tokenizer::id_to_token(int32_t id) const {
  if (const text::AddedToken* token = parts_->spec.added.find(id)) return token->content;
  const Vocabulary& vocabulary = parts_->spec.model->vocabulary();
  if (!vocabulary.has(id)) return std::nullopt;
  return vocabulary.text(id);
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  if (const text::AddedToken* added = parts_->spec.added.find(token)) return added->id;
  return optional_id(parts_->spec.model->vocabulary().find(token));
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(parts_->kinds.size()); }

bool Tokenizer::is_special(int32_t id) const { return parts_->kind(id).special; }

std::optional<int32_t> Tokenizer::bos_id() const { return optional_id(parts_->spec.special.bos); }
std::optional<int32_t> Tokenizer::eos_id() const { return optional_id(parts_->spec.special.eos); }
std::optional<int32_t> Tokenizer::pad_id() const { return optional_id(parts_->spec.special.pad); }
std::optional<int32_t> Tokenizer::unk_id() const { return optional_id(parts_->spec.special.unk); }

bool Tokenizer::adds_bos() const {
  const std::vector<int32_t>& prefix = parts_->spec.prefix;
  return !prefix.empty() && prefix.front() == parts_->spec.special.bos;
}

std::span<const std::pair<std::string, std::string>> Tokenizer::named_tokens() const {
  return parts_->spec.named_tokens;
}
std::span<const std::string> Tokenizer::additional_special_tokens() const {
  return parts_->spec.additional_special_tokens;
}

std::span<const int32_t> Tokenizer::eog_ids() const { return parts_->spec.special.eog; }

std::optional<uint8_t> Tokenizer::fallback_byte(int32_t id) const {
  if (!parts_->kind(id).fallback) return std::nullopt;
  return static_cast<uint8_t>(token_bytes(id)[0]);
}

Tokenizer::LeadingSpace Tokenizer::leading_space() const { return parts_->spec.decoder.leading_space; }

std::string Tokenizer::first_token_bytes(int32_t id) const {
  // The Metaspace decoder stands alone: its mark is all that it replaces.
  const std::string& mark = parts_->spec.decoder.replaces.front().first;
  std::string text(id_to_token(id).value_or(std::string_view()));
  for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos;) text.erase(at, mark.size());
  return text;
}

namespace text {

Result<std::shared_ptr<const Tokenizer>> make_tokenizer(TokenizerSpec spec) {
  static std::atomic<uint64_t> serials = 0;
  auto parts = std::make_unique<Tokenizer::Parts>();
  int32_t size = spec.model->vocabulary().id_limit();
  for (const AddedToken& token : spec.added.tokens()) size = std::max(size, token.id + 1);

  parts->offsets.reserve(static_cast<size_t>(size) + 1);
  parts->kinds.resize(static_cast<size_t>(size));
  const auto add = [&](int32_t id, std::string_view token, bool special) {
    Tokenizer::Parts::Kind& kind = parts->kinds[static_cast<size_t>(id)];
    kind.present = true;
    kind.special = special;
    parts->output += output_bytes(spec.decoder, token, kind.fallback);
  };
  for (int32_t id = 0; id < size; ++id) {
    parts->offsets.push_back(parts->output.size());
    if (const AddedToken* added = spec.added.find(id)) {
      add(id, added->content, added->special);
    } else if (spec.model->vocabulary().has(id)) {
      add(id, spec.model->vocabulary().text(id), false);
    }
  }
  parts->offsets.push_back(parts->output.size());

  for (const std::vector<int32_t>* ids : {&spec.prefix, &spec.suffix}) {
    for (const int32_t id : *ids) {
      if (spec.added.find(id) == nullptr && !spec.model->vocabulary().has(id)) {
        return error(ErrorCode::kInvalidInput, "field 'post_processor' adds id {}, which no token has", id);
      }
    }
  }
  std::vector<int32_t>& eog = spec.special.eog;
  if (spec.special.eos != Vocabulary::kNone) eog.push_back(spec.special.eos);
  std::sort(eog.begin(), eog.end());
  eog.erase(std::unique(eog.begin(), eog.end()), eog.end());
  parts->serial = ++serials;
  parts->spec = std::move(spec);
  return std::make_shared<const Tokenizer>(std::move(parts));
}

int32_t first_known(const AddedTokens& added, std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    if (const AddedToken* token = added.find(name)) return token->id;
  }
  return Vocabulary::kNone;
}

void add_known_eog(const AddedTokens& added, std::vector<int32_t>& eog) {
  for (const std::string_view name :
       {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
        "</s>", "<eos>", "<|eot|>", "<|return|>", "<EOT>", "<|observation|>", "<end_of_utterance>"}) {
    if (const AddedToken* token = added.find(name)) eog.push_back(token->id);
  }
}

void cut_at_marks(PreTokenizer& pre_tokenizer, const Bpe& bpe) {
  if (!bpe.may_cut_before("\xE2\x96\x81")) return;
  auto runs = Regex::compile(R"(\x{2581}+[^\x{2581}]*)");
  if (runs.ok()) pre_tokenizer.add(PreTokenizer::Split{std::move(runs).value(), SplitBehavior::kIsolated, false});
}

Error in_file(const std::string& name, Error err) {
  err.message = name + ": " + err.message;
  return err;
}

}  // namespace text
}  // namespace nfp
