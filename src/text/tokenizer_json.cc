// Tokenizer::from_json: Hugging Face's tokenizer.json, with what tokenizer_config.json and generation_config.json add.
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/python_json.h"
#include "text/tokenizer.h"
#include "text/tokenizer_components.h"
#include "text/tokenizer_parts.h"
#include "text/unigram.h"

namespace nfp {
namespace text {
namespace {

// Merges of the largest known vocabularies are under 600,000.
constexpr size_t kMaxMerges = 1 << 24;

Result<Json> parse_json(simdjson::dom::parser& parser, std::string_view text, std::string_view what) {
  Json root;
  const simdjson::error_code code = parser.parse(text.data(), text.size()).get(root);
  if (code != simdjson::SUCCESS) {
    return error(ErrorCode::kInvalidInput, "{} is not JSON: {}", what, simdjson::error_message(code));
  }
  if (!root.is<simdjson::dom::object>()) return error(ErrorCode::kInvalidInput, "{} is not a JSON object", what);
  return root;
}

Status add_to_vocabulary(int32_t id, std::string_view token, Vocabulary& vocabulary) {
  if (token.size() > kMaxTokenBytes) {
    return error(ErrorCode::kInvalidInput,
                 "field 'model.vocab': the token with id {} has {} bytes; at most {} are supported", id, token.size(),
                 kMaxTokenBytes);
  }
  switch (vocabulary.add(id, token)) {
    case Vocabulary::Added::kYes:
      break;
    case Vocabulary::Added::kIdTaken:
      return error(ErrorCode::kInvalidInput, "field 'model.vocab': id {} belongs to '{}' and to '{}'", id,
                   vocabulary.text(id), token);
    case Vocabulary::Added::kTextTaken:
      return error(ErrorCode::kInvalidInput, "field 'model.vocab' has '{}' twice", token);
  }
  return ok_status();
}

Result<Vocabulary> parse_vocabulary(Json model) {
  NFP_ASSIGN_OR_RETURN(const Json node, need_field(model, "model", "vocab"));
  simdjson::dom::object fields;
  if (node.get(fields) != simdjson::SUCCESS) {
    return error(ErrorCode::kInvalidInput, "field 'model.vocab' is not an object of tokens and ids");
  }
  Vocabulary vocabulary;
  vocabulary.reserve(fields.size(), fields.size() * 8);
  for (const auto [token, value] : fields) {
    int64_t id = 0;
    if (value.get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokenId) {
      return error(ErrorCode::kInvalidInput, "field 'model.vocab': the id of '{}' is not an integer from 0 to {}",
                   token, kMaxTokenId - 1);
    }
    NFP_RETURN_IF_ERROR(add_to_vocabulary(static_cast<int32_t>(id), token, vocabulary));
  }
  return vocabulary;
}

// ["left", "right"], or "left right" as files before version 0.20 have it.
bool split_merge(Json merge, std::string_view& left, std::string_view& right) {
  if (std::string_view line; merge.get(line) == simdjson::SUCCESS) {
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) return false;
    left = line.substr(0, space);
    right = line.substr(space + 1);
    return true;
  }
  simdjson::dom::array pair;
  return merge.get(pair) == simdjson::SUCCESS && pair.size() == 2 && pair.at(0).get(left) == simdjson::SUCCESS &&
         pair.at(1).get(right) == simdjson::SUCCESS;
}

Status parse_merges(Json model, Bpe& bpe) {
  NFP_ASSIGN_OR_RETURN(const simdjson::dom::array merges, array_field(model, "model", "merges"));
  // A list this long reports a saturated size; either way it is no tokenizer.
  if (merges.size() >= kMaxMerges - 1) return error(ErrorCode::kInvalidInput, "field 'model.merges' is too long");
  bpe.reserve_merges(merges.size());
  uint32_t index = 0;
  for (const Json merge : merges) {
    // The first line of merges.txt, in files that were made from one: no merge, although it may look like a pair.
    if (std::string_view line; merge.get(line) == simdjson::SUCCESS && line.starts_with("#version")) continue;
    std::string_view left;
    std::string_view right;
    if (!split_merge(merge, left, right)) {
      return error(ErrorCode::kInvalidInput, "field 'model.merges[{}]' is not a pair of tokens", index);
    }
    if (const Status added = bpe.add_merge(left, right, index); !added.ok()) {
      return error(ErrorCode::kInvalidInput, "field 'model.merges[{}]': {}", index, added.error().message);
    }
    ++index;
  }
  return ok_status();
}

Result<std::unique_ptr<Bpe>> parse_bpe(Json model, bool byte_level, int32_t& unk) {
  for (const std::string_view affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!find_field(model, affix)) continue;
    NFP_ASSIGN_OR_RETURN(const std::string text, string_field(model, "model", affix));
    if (!text.empty())
      return error(ErrorCode::kUnsupported, "field 'model.{}' is '{}'; it is not supported", affix, text);
  }
  if (const auto dropout = find_field(model, "dropout")) {
    if (double rate = 0; dropout->get(rate) != simdjson::SUCCESS || rate != 0) {
      return error(ErrorCode::kUnsupported, "field 'model.dropout' is not 0; it makes tokens random");
    }
  }
  NFP_ASSIGN_OR_RETURN(Vocabulary vocabulary, parse_vocabulary(model));
  BpeOptions options;
  options.byte_level = byte_level;
  NFP_ASSIGN_OR_RETURN(options.byte_fallback, bool_field(model, "model", "byte_fallback", false));
  NFP_ASSIGN_OR_RETURN(options.ignore_merges, bool_field(model, "model", "ignore_merges", false));
  NFP_ASSIGN_OR_RETURN(options.fuse_unk, bool_field(model, "model", "fuse_unk", false));
  if (find_field(model, "unk_token")) {
    NFP_ASSIGN_OR_RETURN(const std::string token, string_field(model, "model", "unk_token"));
    options.unk = vocabulary.find(token);
    if (options.unk == Vocabulary::kNone && !token.empty()) {
      return error(ErrorCode::kInvalidInput, "field 'model.unk_token': '{}' is not in the vocabulary", token);
    }
    unk = options.unk;
  }
  auto bpe = std::make_unique<Bpe>(std::move(vocabulary), options);
  NFP_RETURN_IF_ERROR(parse_merges(model, *bpe));
  return bpe;
}

Result<std::unique_ptr<Unigram>> parse_unigram(Json model, int32_t& unk) {
  NFP_ASSIGN_OR_RETURN(const simdjson::dom::array list, array_field(model, "model", "vocab"));
  Vocabulary vocabulary;
  std::vector<double> scores;
  for (const Json entry : list) {
    const auto id = static_cast<int32_t>(scores.size());
    simdjson::dom::array pair;
    std::string_view token;
    double score = 0;
    if (entry.get(pair) != simdjson::SUCCESS || pair.size() != 2 || pair.at(0).get(token) != simdjson::SUCCESS ||
        pair.at(1).get(score) != simdjson::SUCCESS) {
      return error(ErrorCode::kInvalidInput, "field 'model.vocab[{}]' is not a token and its score", id);
    }
    if (id >= kMaxTokenId) return error(ErrorCode::kInvalidInput, "field 'model.vocab' is too long");
    NFP_RETURN_IF_ERROR(add_to_vocabulary(id, token, vocabulary));
    scores.push_back(score);
  }
  UnigramOptions options;
  NFP_ASSIGN_OR_RETURN(options.byte_fallback, bool_field(model, "model", "byte_fallback", false));
  if (find_field(model, "unk_id")) {
    NFP_ASSIGN_OR_RETURN(const int64_t id, int_field(model, "model", "unk_id"));
    if (id < 0 || id >= vocabulary.id_limit()) {
      return error(ErrorCode::kInvalidInput, "field 'model.unk_id' is {}; there are {} tokens", id, scores.size());
    }
    unk = options.unk = static_cast<int32_t>(id);
  }
  return std::make_unique<Unigram>(std::move(vocabulary), std::move(scores), options);
}

// All of it but its id.
Result<AddedToken> parse_added_token(Json node, const std::string& path) {
  AddedToken token;
  NFP_ASSIGN_OR_RETURN(token.content, string_field(node, path, "content"));
  if (token.content.size() > kMaxTokenBytes) {
    return error(ErrorCode::kInvalidInput, "field '{}.content' has {} bytes; at most {} are supported", path,
                 token.content.size(), kMaxTokenBytes);
  }
  NFP_ASSIGN_OR_RETURN(token.special, bool_field(node, path, "special", false));
  NFP_ASSIGN_OR_RETURN(token.single_word, bool_field(node, path, "single_word", false));
  NFP_ASSIGN_OR_RETURN(token.lstrip, bool_field(node, path, "lstrip", false));
  NFP_ASSIGN_OR_RETURN(token.rstrip, bool_field(node, path, "rstrip", false));
  NFP_ASSIGN_OR_RETURN(token.normalized, bool_field(node, path, "normalized", !token.special));
  return token;
}

Result<std::vector<AddedToken>> parse_added_tokens(Json root, const Vocabulary& vocabulary) {
  std::vector<AddedToken> tokens;
  if (!find_field(root, "added_tokens")) return tokens;
  NFP_ASSIGN_OR_RETURN(const simdjson::dom::array list, array_field(root, "", "added_tokens"));
  for (const Json node : list) {
    const std::string path = fmt::format("added_tokens[{}]", tokens.size());
    NFP_ASSIGN_OR_RETURN(const int64_t id, int_field(node, path, "id"));
    if (id < 0 || id >= kMaxTokenId) {
      return error(ErrorCode::kInvalidInput, "field '{}.id' is {}; ids go from 0 to {}", path, id, kMaxTokenId - 1);
    }
    NFP_ASSIGN_OR_RETURN(AddedToken token, parse_added_token(node, path));
    token.id = static_cast<int32_t>(id);
    const int32_t known = vocabulary.find(token.content);
    if (known != Vocabulary::kNone && known != token.id) {
      return error(ErrorCode::kInvalidInput, "field '{}': '{}' has id {} here and {} in model.vocab", path,
                   token.content, token.id, known);
    }
    if (known == Vocabulary::kNone && vocabulary.has(token.id)) {
      return error(ErrorCode::kInvalidInput, "field '{}': id {} is '{}' here and '{}' in model.vocab", path, token.id,
                   token.content, vocabulary.text(token.id));
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

int32_t find_token(const TokenizerSpec& spec, std::string_view token) {
  const AddedToken* added = spec.added.find(token);
  return added != nullptr ? added->id : spec.model->vocabulary().find(token);
}

// "<s>", or {"content": "<s>"}.
std::optional<std::string_view> token_text(Json value) {
  std::string_view token;
  if (value.get(token) == simdjson::SUCCESS) return token;
  const auto content = find_field(value, "content");
  if (!content || content->get(token) != simdjson::SUCCESS) return std::nullopt;
  return token;
}

// Nothing for null.
Result<std::optional<std::string_view>> token_field(Json config, std::string_view key) {
  const auto field = find_field(config, key);
  if (!field) return std::optional<std::string_view>();
  const auto token = token_text(*field);
  if (!token) {
    return error(ErrorCode::kInvalidInput, "field '{}' is neither a token nor an object with its 'content'", key);
  }
  return token;
}

constexpr std::array<std::string_view, 7> kRoles = {"bos_token", "eos_token", "pad_token", "unk_token",
                                                    "sep_token", "cls_token", "mask_token"};

// As transformers finds the tokens that a template may name: roles that all tokenizers have, and a model's own, which
// are in an object or, since its version 5, beside the others. Version 4 has a list, too.
Status read_named_tokens(Json config, TokenizerSpec& spec) {
  for (const std::string_view name : kRoles) {
    if (name == "bos_token" || name == "eos_token") continue;  // which templates have by their ids
    NFP_ASSIGN_OR_RETURN(const auto token, token_field(config, name));
    if (token) spec.named_tokens.emplace_back(name, *token);
  }
  const auto add_members = [&](simdjson::dom::object members, bool all) {
    for (const auto& [name, value] : members) {
      if (!all && !name.ends_with("_token")) continue;
      if (!all && std::find(kRoles.begin(), kRoles.end(), name) != kRoles.end()) continue;
      if (const auto token = token_text(value)) spec.named_tokens.emplace_back(name, *token);
    }
  };
  simdjson::dom::object members;
  if (config.get(members) == simdjson::SUCCESS) add_members(members, /*all=*/false);
  const auto extra = find_field(config, "extra_special_tokens");
  if (extra && extra->get(members) == simdjson::SUCCESS) add_members(members, /*all=*/true);
  simdjson::dom::array list;
  const auto additional = find_field(config, "additional_special_tokens");
  if (!additional || additional->get(list) != simdjson::SUCCESS) return ok_status();
  for (const Json value : list) {
    if (const auto token = token_text(value)) spec.additional_special_tokens.emplace_back(*token);
  }
  return ok_status();
}

// Calls visit(token) for what a tokenizer_config.json calls a special token: a text, or an object with its flags.
template <typename Visit>
void each_special(Json config, Visit&& visit) {
  for (const std::string_view role : kRoles) {
    if (const auto token = find_field(config, role)) visit(*token);
  }
  for (const std::string_view more : {"additional_special_tokens", "extra_special_tokens"}) {
    const auto field = find_field(config, more);
    simdjson::dom::array list;
    simdjson::dom::object named;
    if (field && field->get(list) == simdjson::SUCCESS) {
      for (const Json token : list) visit(token);
    } else if (field && field->get(named) == simdjson::SUCCESS) {
      for (const auto& [name, token] : named) visit(token);
    }
  }
}

// What transformers adds to the tokens of tokenizer.json: those of added_tokens_decoder in the order of their ids, then
// special tokens that the vocabulary alone has.
class TokensOfConfig {
 public:
  TokensOfConfig(const Vocabulary& vocabulary, std::vector<AddedToken>& tokens)
      : vocabulary_(vocabulary), tokens_(tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      places_.emplace(tokens[i].content, i);
      next_id_ = std::max(next_id_, tokens[i].id + 1);
    }
    next_id_ = std::max(next_id_, static_cast<int32_t>(vocabulary.size()));
  }

  Status add(Json config) {
    std::unordered_set<std::string_view> special;
    each_special(config, [&](Json token) {
      if (const auto text = token_text(token)) special.insert(*text);
    });
    if (const auto field = find_field(config, "added_tokens_decoder")) {
      NFP_ASSIGN_OR_RETURN(std::vector<AddedToken> listed, parse_list(*field));
      for (AddedToken& token : listed) {
        token.special = token.special || special.contains(token.content);
        NFP_RETURN_IF_ERROR(put(std::move(token)));
      }
    } else {
      for (AddedToken& token : tokens_) token.special = token.special || special.contains(token.content);
    }
    Status status = ok_status();
    each_special(config, [&](Json token) {
      const auto text = token_text(token);
      if (!status.ok() || !text || places_.contains(std::string(*text))) return;
      if (vocabulary_.find(*text) == Vocabulary::kNone) return;
      status = put_special(token, *text);
    });
    return status;
  }

 private:
  static Result<std::vector<AddedToken>> parse_list(Json field) {
    simdjson::dom::object members;
    if (field.get(members) != simdjson::SUCCESS) {
      return error(ErrorCode::kInvalidInput, "field 'added_tokens_decoder' is not an object of ids and tokens");
    }
    std::vector<AddedToken> listed;
    for (const auto& [key, node] : members) {
      const std::string path = fmt::format("added_tokens_decoder.{}", key);
      NFP_ASSIGN_OR_RETURN(AddedToken token, parse_added_token(node, path));
      const auto [end, code] = std::from_chars(key.data(), key.data() + key.size(), token.id);
      if (code != std::errc() || end != key.data() + key.size() || token.id < 0 || token.id >= kMaxTokenId) {
        return error(ErrorCode::kInvalidInput, "field '{}': the name is not an id from 0 to {}", path, kMaxTokenId - 1);
      }
      listed.push_back(std::move(token));
    }
    std::stable_sort(listed.begin(), listed.end(),
                     [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
    return listed;
  }

  Status put_special(Json node, std::string_view text) {
    AddedToken token;
    if (node.is<simdjson::dom::object>()) {
      NFP_ASSIGN_OR_RETURN(token, parse_added_token(node, "special token"));
    }
    token.content = text;
    token.special = true;
    return put(std::move(token));
  }

  // As the `tokenizers` package does it: a token that is there keeps its id and takes the new flags, but stays special
  // and is looked for where it was. A new one takes the next id, whatever the file says.
  Status put(AddedToken token) {
    if (token.content.empty()) return ok_status();
    if (const auto place = places_.find(token.content); place != places_.end()) {
      AddedToken& old = tokens_[place->second];
      old.single_word = token.single_word;
      old.lstrip = token.lstrip;
      old.rstrip = token.rstrip;
      if (!old.special && old.normalized != token.normalized) old.normalized = old.both = true;
      old.special = old.special || token.special;
      return ok_status();
    }
    token.id = vocabulary_.find(token.content);
    if (token.id == Vocabulary::kNone) {
      if (vocabulary_.has(next_id_) || next_id_ >= kMaxTokenId) {
        return error(ErrorCode::kInvalidInput, "field 'added_tokens_decoder': '{}' would get id {}, which is {}",
                     token.content, next_id_, vocabulary_.has(next_id_) ? "another token's" : "beyond all ids");
      }
      token.id = next_id_++;
    }
    places_.emplace(token.content, tokens_.size());
    tokens_.push_back(std::move(token));
    return ok_status();
  }

  const Vocabulary& vocabulary_;
  std::vector<AddedToken>& tokens_;
  std::unordered_map<std::string, size_t> places_;  // in tokens_, by content
  int32_t next_id_ = 0;
};

// A token that the tokenizer does not have is left out.
Status apply_token(Json config, std::string_view key, const TokenizerSpec& spec, int32_t& id) {
  NFP_ASSIGN_OR_RETURN(const auto token, token_field(config, key));
  const int32_t found = token ? find_token(spec, *token) : Vocabulary::kNone;
  if (found != Vocabulary::kNone) id = found;
  return ok_status();
}

Status apply_tokenizer_config(Json config, TokenizerSpec& spec) {
  SpecialIds& special = spec.special;
  NFP_RETURN_IF_ERROR(apply_token(config, "bos_token", spec, special.bos));
  NFP_RETURN_IF_ERROR(apply_token(config, "eos_token", spec, special.eos));
  NFP_RETURN_IF_ERROR(apply_token(config, "pad_token", spec, special.pad));
  NFP_RETURN_IF_ERROR(apply_token(config, "unk_token", spec, special.unk));
  NFP_RETURN_IF_ERROR(read_named_tokens(config, spec));
  // These classes of transformers replace the post-processor; for the others the fields are remainders of slow
  // tokenizers and mean nothing.
  std::string_view name;
  if (const auto field = find_field(config, "tokenizer_class"); !field || field->get(name) != simdjson::SUCCESS) {
    return ok_status();
  }
  const auto is_of = [&](std::string_view kind) { return name.find(kind) != std::string_view::npos; };
  const bool begins = is_of("Llama") || is_of("Gemma") || is_of("Cohere");
  if (!begins && !is_of("GPTNeoX")) return ok_status();
  NFP_ASSIGN_OR_RETURN(const bool add_bos, bool_field(config, "", "add_bos_token", begins));
  NFP_ASSIGN_OR_RETURN(const bool add_eos, bool_field(config, "", "add_eos_token", false));
  spec.prefix.clear();
  spec.suffix.clear();
  if (add_bos && special.bos != Vocabulary::kNone) spec.prefix.push_back(special.bos);
  if (add_eos && special.eos != Vocabulary::kNone) spec.suffix.push_back(special.eos);
  return ok_status();
}

// Returns whether the file says which tokens end a generation.
Result<bool> apply_generation_config(Json config, std::vector<int32_t>& eog) {
  const auto field = find_field(config, "eos_token_id");
  if (!field) return false;
  const auto add = [&](Json node) {
    int64_t id = 0;
    if (node.get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokenId) return false;
    eog.push_back(static_cast<int32_t>(id));
    return true;
  };
  simdjson::dom::array list;
  bool good = true;
  if (field->get(list) == simdjson::SUCCESS) {
    for (const Json node : list) good = good && add(node);
  } else {
    good = add(*field);
  }
  if (!good) return error(ErrorCode::kInvalidInput, "field 'eos_token_id' is not a token id or a list of them");
  return true;
}

Status parse_model(Json root, bool byte_level, TokenizerSpec& spec) {
  NFP_ASSIGN_OR_RETURN(const Json model, need_field(root, "", "model"));
  std::string type = "BPE";
  if (find_field(model, "type")) {
    NFP_ASSIGN_OR_RETURN(type, string_field(model, "model", "type"));
  }
  if (type == "Unigram" && byte_level) {
    return error(ErrorCode::kUnsupported, "field 'model.type' is Unigram, which is not supported behind ByteLevel");
  }
  if (type == "Unigram") {
    NFP_ASSIGN_OR_RETURN(spec.model, parse_unigram(model, spec.special.unk));
    return ok_status();
  }
  if (type != "BPE") {
    return error(ErrorCode::kUnsupported, "field 'model.type' is '{}'; supported are BPE and Unigram", type);
  }
  NFP_ASSIGN_OR_RETURN(auto bpe, parse_bpe(model, byte_level, spec.special.unk));
  if (!byte_level) cut_at_marks(spec.pre_tokenizer, *bpe);
  spec.model = std::move(bpe);
  return ok_status();
}

// Its added tokens apart, to which tokenizer_config.json may add. `prefix_space`: see parse_pre_tokenizer.
Result<TokenizerSpec> parse_tokenizer(Json root, std::optional<bool> prefix_space, std::vector<AddedToken>& added) {
  TokenizerSpec spec;
  if (const auto node = find_field(root, "normalizer")) {
    NFP_RETURN_IF_ERROR(parse_normalizer(*node, "normalizer", 0, spec.normalizer));
  }
  bool byte_level = false;
  if (const auto node = find_field(root, "pre_tokenizer")) {
    NFP_RETURN_IF_ERROR(parse_pre_tokenizer(*node, "pre_tokenizer", 0, prefix_space, spec.pre_tokenizer, byte_level));
  }
  if (const auto node = find_field(root, "post_processor")) {
    NFP_RETURN_IF_ERROR(parse_post_processor(*node, "post_processor", 0, spec.prefix, spec.suffix));
  }
  NFP_ASSIGN_OR_RETURN(const Json decoder, need_field(root, "", "decoder"));
  NFP_ASSIGN_OR_RETURN(spec.decoder, parse_decoder(decoder, "decoder"));
  NFP_RETURN_IF_ERROR(parse_model(root, byte_level, spec));
  NFP_ASSIGN_OR_RETURN(added, parse_added_tokens(root, spec.model->vocabulary()));
  return spec;
}

// False where it is left out, but by the class that knows a third value, none.
Result<std::optional<bool>> parse_prefix_space(Json config) {
  constexpr const char* kField = "add_prefix_space";
  std::string_view name;
  if (const auto field = find_field(config, "tokenizer_class")) std::ignore = field->get(name);
  const bool may_be_none = name.find("Llama") != std::string_view::npos;
  simdjson::dom::object fields;
  const bool is_null = config.get(fields) == simdjson::SUCCESS && fields.at_key(kField).is_null();
  if (is_null || (may_be_none && !find_field(config, kField))) return std::optional<bool>();
  NFP_ASSIGN_OR_RETURN(const bool prefix, bool_field(config, "", kField, false));
  return std::optional(prefix);
}

Result<TokenizerSpec> parse_files(const TokenizerFiles& files) {
  simdjson::dom::parser parser, config_parser;
  NFP_ASSIGN_OR_RETURN(const Json root, parse_json(parser, files.tokenizer_json, "the tokenizer"));
  const auto in_config = [](Error err) { return in_file("tokenizer_config.json", std::move(err)); };
  std::optional<Json> config;
  std::optional<bool> prefix_space;
  if (!files.tokenizer_config.empty()) {
    auto parsed = parse_json(config_parser, quote_non_finite(files.tokenizer_config), "the file");
    if (!parsed.ok()) return in_config(std::move(parsed).error());
    config = *parsed;
    const auto prefix = parse_prefix_space(*config);
    if (!prefix.ok()) return in_config(prefix.error());
    prefix_space = *prefix;
  }
  std::vector<AddedToken> added;
  NFP_ASSIGN_OR_RETURN(TokenizerSpec spec, parse_tokenizer(root, prefix_space, added));
  if (config) {
    Status status = TokensOfConfig(spec.model->vocabulary(), added).add(*config);
    if (!status.ok()) return in_config(std::move(status).error());
  }
  NFP_ASSIGN_OR_RETURN(spec.added, AddedTokens::make(std::move(added), spec.normalizer));
  SpecialIds& special = spec.special;
  special.bos = first_known(spec.added, {"<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"});
  special.eos = first_known(spec.added, {"</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"});
  if (config) {
    Status status = apply_tokenizer_config(*config, spec);
    if (!status.ok()) return in_config(std::move(status).error());
  }
  bool knows_end = false;
  if (!files.generation_config.empty()) {
    const auto apply = [&]() -> Status {
      NFP_ASSIGN_OR_RETURN(const Json generation,
                           parse_json(parser, quote_non_finite(files.generation_config), "the file"));
      NFP_ASSIGN_OR_RETURN(knows_end, apply_generation_config(generation, special.eog));
      return ok_status();
    };
    if (Status status = apply(); !status.ok()) return in_file("generation_config.json", std::move(status).error());
  }
  if (!knows_end) add_known_eog(spec.added, special.eog);
  return spec;
}

}  // namespace
}  // namespace text

Result<std::shared_ptr<const Tokenizer>> Tokenizer::from_json(const TokenizerFiles& files, const std::string& name) {
  auto spec = text::parse_files(files);
  if (!spec.ok()) return text::in_file(name, std::move(spec).error());
  auto tokenizer = text::make_tokenizer(std::move(spec).value());
  if (!tokenizer.ok()) return text::in_file(name, std::move(tokenizer).error());
  return tokenizer;
}

}  // namespace nfp
