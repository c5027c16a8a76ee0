#include "text/tokenizer_components.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "text/utf8.h"

namespace nfp::text {
namespace {

// Sequences of sequences are legal and pointless; real files have one level.
constexpr int kMaxDepth = 8;
// Steps of one pipeline, in all its sequences together: each takes time and stack for every text.
constexpr size_t kMaxSteps = 64;

Error wrong_type(const std::string& path, std::string_view key, std::string_view expected) {
  return error(ErrorCode::kInvalidInput, "field '{}' is not {}", field_path(path, key), expected);
}

Error unsupported(const std::string& path, std::string_view what) {
  return error(ErrorCode::kUnsupported, "field '{}' is {}, which is not supported", path, what);
}

// Sequences may lie in sequences, so a pipeline is asked how long it is after each child.
Status check_steps(size_t steps, const std::string& path) {
  return steps <= kMaxSteps ? ok_status() : unsupported(path, "a step beyond the 64 that a pipeline may have");
}

// Calls visit(child, path) for each child of a Sequence.
template <typename Visit>
Status each_child(Json node, const std::string& path, std::string_view key, int depth, Visit&& visit) {
  if (depth >= kMaxDepth) return unsupported(path, "nested too deeply");
  NFP_ASSIGN_OR_RETURN(const simdjson::dom::array children, array_field(node, path, key));
  if (children.size() > kMaxSteps) return unsupported(path, "a sequence of more than 64 steps");
  size_t i = 0;
  for (const Json child : children) {
    NFP_RETURN_IF_ERROR(visit(child, fmt::format("{}[{}]", field_path(path, key), i)));
    ++i;
  }
  return ok_status();
}

// {"Regex": PATTERN} or {"String": TEXT}.
Result<Regex> parse_pattern(Json node, const std::string& path) {
  NFP_ASSIGN_OR_RETURN(const Json pattern, need_field(node, path, "pattern"));
  const std::string at = field_path(path, "pattern");
  const bool is_regex = find_field(pattern, "Regex").has_value();
  NFP_ASSIGN_OR_RETURN(const std::string text, string_field(pattern, at, is_regex ? "Regex" : "String"));
  auto regex = is_regex ? Regex::compile(text) : Regex::literal(text);
  if (!regex.ok()) {
    return error(regex.error().code, "field '{}': {}", field_path(at, is_regex ? "Regex" : "String"),
                 regex.error().message);
  }
  return regex;
}

Result<SplitBehavior> parse_behavior(Json node, const std::string& path, std::optional<SplitBehavior> absent) {
  if (absent && !find_field(node, "behavior")) return *absent;
  NFP_ASSIGN_OR_RETURN(const std::string name, string_field(node, path, "behavior"));
  constexpr std::pair<std::string_view, SplitBehavior> kNames[] = {
      {"Removed", SplitBehavior::kRemoved},
      {"Isolated", SplitBehavior::kIsolated},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous},
  };
  for (const auto& [known, behavior] : kNames) {
    if (name == known) return behavior;
  }
  return unsupported(field_path(path, "behavior"), "'" + name + "'");
}

Status add_split(PreTokenizer& pre_tokenizer, std::string_view pattern, SplitBehavior behavior, bool invert = false) {
  NFP_ASSIGN_OR_RETURN(Regex regex, Regex::compile(pattern));
  pre_tokenizer.add(PreTokenizer::Split{std::move(regex), behavior, invert});
  return ok_status();
}

// prepend_scheme, or what came before it: add_prefix_space.
Result<PreTokenizer::Metaspace::Prepend> parse_prepend(Json node, const std::string& path) {
  using Metaspace = PreTokenizer::Metaspace;
  if (!find_field(node, "prepend_scheme")) {
    NFP_ASSIGN_OR_RETURN(const bool add, bool_field(node, path, "add_prefix_space", true));
    return add ? Metaspace::kAlways : Metaspace::kNever;
  }
  NFP_ASSIGN_OR_RETURN(const std::string scheme, string_field(node, path, "prepend_scheme"));
  if (scheme == "never") return Metaspace::kNever;
  if (scheme == "first") return Metaspace::kFirst;
  if (scheme == "always") return Metaspace::kAlways;
  return unsupported(field_path(path, "prepend_scheme"), "'" + scheme + "'");
}

Result<std::string> parse_one_character(Json node, const std::string& path, std::string_view key) {
  NFP_ASSIGN_OR_RETURN(std::string text, string_field(node, path, key));
  if (text.empty() || utf8_length(text[0]) != text.size()) return wrong_type(path, key, "one character");
  return text;
}

// ["</s>", 2] of the Bert and Roberta post-processors.
Result<int32_t> parse_token_id_pair(Json node, const std::string& path, std::string_view key) {
  NFP_ASSIGN_OR_RETURN(const simdjson::dom::array pair, array_field(node, path, key));
  int64_t id = 0;
  if (pair.at(1).get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokenId) {
    return wrong_type(path, key, "a token and its id");
  }
  return static_cast<int32_t>(id);
}

// TemplateProcessing's "single": special tokens before and after {"Sequence": {"id": "A"}}.
Status parse_template(Json node, const std::string& path, std::vector<int32_t>& before, std::vector<int32_t>& after) {
  NFP_ASSIGN_OR_RETURN(const simdjson::dom::array pieces, array_field(node, path, "single"));
  if (pieces.size() > kMaxSteps) return unsupported(field_path(path, "single"), "a template of more than 64 tokens");
  bool seen = false;
  for (const Json piece : pieces) {
    if (find_field(piece, "Sequence")) {
      if (seen) return unsupported(field_path(path, "single"), "a template with the text in it twice");
      seen = true;
      continue;
    }
    NFP_ASSIGN_OR_RETURN(const Json special, need_field(piece, field_path(path, "single[]"), "SpecialToken"));
    NFP_ASSIGN_OR_RETURN(const std::string name,
                         string_field(special, field_path(path, "single[].SpecialToken"), "id"));
    NFP_ASSIGN_OR_RETURN(const Json known, need_field(node, path, "special_tokens"));
    const std::string tokens_path = field_path(path, "special_tokens");
    NFP_ASSIGN_OR_RETURN(const Json token, need_field(known, tokens_path, name));
    NFP_ASSIGN_OR_RETURN(const simdjson::dom::array ids, array_field(token, field_path(tokens_path, name), "ids"));
    for (const Json element : ids) {
      int64_t id = 0;
      if (element.get(id) != simdjson::SUCCESS || id < 0 || id >= kMaxTokenId) {
        return wrong_type(field_path(tokens_path, name), "ids", "a list of token ids");
      }
      (seen ? after : before).push_back(static_cast<int32_t>(id));
      if (before.size() + after.size() > kMaxSteps) return unsupported(path, "a template of more than 64 tokens");
    }
  }
  if (!seen) return unsupported(field_path(path, "single"), "a template without the text");
  return ok_status();
}

// One step of a decoder, or all of them: the order below is the only one that is understood.
struct DecoderBuilder {
  Decoder decoder;
  bool fused = false;
  bool closed = false;  // nothing may follow

  Status add_replace(Json node, const std::string& path) {
    NFP_ASSIGN_OR_RETURN(const Json pattern, need_field(node, path, "pattern"));
    const bool is_regex = find_field(pattern, "Regex").has_value();
    NFP_ASSIGN_OR_RETURN(std::string from,
                         string_field(pattern, field_path(path, "pattern"), is_regex ? "Regex" : "String"));
    NFP_ASSIGN_OR_RETURN(std::string to, string_field(node, path, "content"));
    if (fused) {
      // llm-jp's: of all beginnings of lines that of the text.
      if (!is_regex || from != R"((?<!\n)^ )" || !to.empty()) {
        return unsupported(path, "a Replace after Fuse other than of one leading space");
      }
      decoder.leading_space = Tokenizer::LeadingSpace::kDropOne;
      closed = true;
      return ok_status();
    }
    if (is_regex && from.find_first_of(R"(\^$.|?*+()[]{})") != std::string::npos) {
      return unsupported(path, "a Replace of a regular expression that is more than a text");
    }
    if (from.empty() || to.size() > from.size()) return unsupported(path, "a replacement longer than what it replaces");
    // The steps are taken token by token, those for bytes last: "<0x0A>" must reach them.
    if (decoder.byte_fallback && static_cast<unsigned char>(from[0]) < 0x80)
      return unsupported(path, "a Replace of ASCII after ByteFallback");
    decoder.replaces.emplace_back(std::move(from), std::move(to));
    return ok_status();
  }

  Status add(Json node, const std::string& path, int depth) {
    NFP_ASSIGN_OR_RETURN(const std::string type, string_field(node, path, "type"));
    if (type == "Sequence") {
      return each_child(node, path, "decoders", depth, [&](Json child, const std::string& at) -> Status {
        NFP_RETURN_IF_ERROR(add(child, at, depth + 1));
        return check_steps(decoder.replaces.size(), at);
      });
    }
    if (closed) return unsupported(path, "a decoder after one that must be the last");
    if (type == "ByteLevel") {
      if (!decoder.replaces.empty() || decoder.byte_fallback || fused) return unsupported(path, "ByteLevel not alone");
      decoder.byte_level = closed = true;
    } else if (type == "Replace") {
      NFP_RETURN_IF_ERROR(add_replace(node, path));
    } else if (type == "ByteFallback") {
      decoder.byte_fallback = true;
    } else if (type == "Fuse") {
      fused = true;
    } else if (type == "Strip") {
      NFP_ASSIGN_OR_RETURN(const std::string content, string_field(node, path, "content"));
      NFP_ASSIGN_OR_RETURN(const int64_t start, int_field(node, path, "start"));
      NFP_ASSIGN_OR_RETURN(const int64_t stop, int_field(node, path, "stop"));
      if (!fused || content != " " || start != 1 || stop != 0) {
        return unsupported(path, "a Strip other than of one leading space of the fused text");
      }
      decoder.leading_space = Tokenizer::LeadingSpace::kDropOne;
      closed = true;
    } else if (type == "Metaspace") {
      if (!decoder.replaces.empty() || decoder.byte_fallback || fused) return unsupported(path, "Metaspace not alone");
      NFP_ASSIGN_OR_RETURN(std::string mark, parse_one_character(node, path, "replacement"));
      NFP_ASSIGN_OR_RETURN(const auto prepend, parse_prepend(node, path));
      decoder.replaces.emplace_back(std::move(mark), " ");
      if (prepend != PreTokenizer::Metaspace::kNever) {
        decoder.leading_space = Tokenizer::LeadingSpace::kDropFirstToken;
      }
      closed = true;
    } else {
      return unsupported(path, "the decoder '" + type + "'");
    }
    return ok_status();
  }
};

}  // namespace

std::string field_path(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
}

std::optional<Json> find_field(Json object, std::string_view key) {
  simdjson::dom::object fields;
  Json value;
  if (object.get(fields) != simdjson::SUCCESS || fields.at_key(key).get(value) != simdjson::SUCCESS ||
      value.is_null()) {
    return std::nullopt;
  }
  return value;
}

Result<Json> need_field(Json object, const std::string& path, std::string_view key) {
  if (!object.is<simdjson::dom::object>()) {
    return error(ErrorCode::kInvalidInput, "field '{}' is not an object", path.empty() ? "(all)" : path);
  }
  const auto value = find_field(object, key);
  if (!value) return error(ErrorCode::kInvalidInput, "field '{}' is missing", field_path(path, key));
  return *value;
}

Result<std::string> string_field(Json object, const std::string& path, std::string_view key) {
  NFP_ASSIGN_OR_RETURN(const Json value, need_field(object, path, key));
  std::string_view text;
  if (value.get(text) != simdjson::SUCCESS) return wrong_type(path, key, "a string");
  return std::string(text);
}

Result<bool> bool_field(Json object, const std::string& path, std::string_view key, std::optional<bool> absent) {
  if (absent && !find_field(object, key)) return *absent;
  NFP_ASSIGN_OR_RETURN(const Json value, need_field(object, path, key));
  bool flag = false;
  if (value.get(flag) != simdjson::SUCCESS) return wrong_type(path, key, "true or false");
  return flag;
}

Result<int64_t> int_field(Json object, const std::string& path, std::string_view key) {
  NFP_ASSIGN_OR_RETURN(const Json value, need_field(object, path, key));
  int64_t number = 0;
  if (value.get(number) != simdjson::SUCCESS) return wrong_type(path, key, "an integer");
  return number;
}

Result<simdjson::dom::array> array_field(Json object, const std::string& path, std::string_view key) {
  NFP_ASSIGN_OR_RETURN(const Json value, need_field(object, path, key));
  simdjson::dom::array array;
  if (value.get(array) != simdjson::SUCCESS) return wrong_type(path, key, "a list");
  return array;
}

Status parse_normalizer(Json node, const std::string& path, int depth, Normalizer& normalizer) {
  NFP_ASSIGN_OR_RETURN(const std::string type, string_field(node, path, "type"));
  if (type == "Sequence") {
    return each_child(node, path, "normalizers", depth, [&](Json child, const std::string& at) -> Status {
      NFP_RETURN_IF_ERROR(parse_normalizer(child, at, depth + 1, normalizer));
      return check_steps(normalizer.size(), at);
    });
  }
  constexpr std::pair<std::string_view, UnicodeForm> kForms[] = {{"NFC", UnicodeForm::kNfc},
                                                                 {"NFD", UnicodeForm::kNfd},
                                                                 {"NFKC", UnicodeForm::kNfkc},
                                                                 {"NFKD", UnicodeForm::kNfkd}};
  for (const auto& [name, form] : kForms) {
    if (type == name) {
      normalizer.add(form);
      return ok_status();
    }
  }
  if (type == "Prepend") {
    NFP_ASSIGN_OR_RETURN(std::string text, string_field(node, path, "prepend"));
    if (text.size() > 64) return unsupported(field_path(path, "prepend"), "longer than 64 bytes");
    normalizer.add(Normalizer::Prepend{std::move(text)});
  } else if (type == "Replace") {
    NFP_ASSIGN_OR_RETURN(const Json pattern, need_field(node, path, "pattern"));
    Normalizer::Replace step;
    NFP_ASSIGN_OR_RETURN(step.to, string_field(node, path, "content"));
    if (find_field(pattern, "Regex")) {
      NFP_ASSIGN_OR_RETURN(Regex regex, parse_pattern(node, path));
      step.pattern.push_back(std::move(regex));
    } else {
      NFP_ASSIGN_OR_RETURN(step.from, string_field(pattern, field_path(path, "pattern"), "String"));
      if (step.from.empty()) return unsupported(field_path(path, "pattern"), "an empty text");
    }
    normalizer.add(std::move(step));
  } else if (type == "Strip") {
    NFP_ASSIGN_OR_RETURN(const bool left, bool_field(node, path, "strip_left", std::nullopt));
    NFP_ASSIGN_OR_RETURN(const bool right, bool_field(node, path, "strip_right", std::nullopt));
    normalizer.add(Normalizer::Strip{left, right});
  } else {
    return unsupported(path, "the normalizer '" + type + "'");
  }
  return ok_status();
}

Status parse_pre_tokenizer(Json node, const std::string& path, int depth, std::optional<bool> prefix_space,
                           PreTokenizer& pre_tokenizer, bool& byte_level) {
  NFP_ASSIGN_OR_RETURN(const std::string type, string_field(node, path, "type"));
  if (type == "Sequence") {
    return each_child(node, path, "pretokenizers", depth, [&](Json child, const std::string& at) -> Status {
      NFP_RETURN_IF_ERROR(parse_pre_tokenizer(child, at, depth + 1, {}, pre_tokenizer, byte_level));
      return check_steps(pre_tokenizer.size(), at);
    });
  }
  // What came after it would see the byte alphabet in place of the text.
  if (byte_level) return unsupported(path, "a pre-tokenizer after ByteLevel");
  if (type == "ByteLevel") {
    NFP_ASSIGN_OR_RETURN(const bool prefix, bool_field(node, path, "add_prefix_space", true));
    NFP_ASSIGN_OR_RETURN(const bool split, bool_field(node, path, "use_regex", true));
    if (prefix_space.value_or(prefix)) pre_tokenizer.add(PreTokenizer::PrependSpace{});
    byte_level = true;
    return split ? add_split(pre_tokenizer, kGpt2Pattern, SplitBehavior::kIsolated) : ok_status();
  }
  if (type == "Split") {
    NFP_ASSIGN_OR_RETURN(Regex pattern, parse_pattern(node, path));
    NFP_ASSIGN_OR_RETURN(const SplitBehavior behavior, parse_behavior(node, path, std::nullopt));
    NFP_ASSIGN_OR_RETURN(const bool invert, bool_field(node, path, "invert", false));
    pre_tokenizer.add(PreTokenizer::Split{std::move(pattern), behavior, invert});
    return ok_status();
  }
  if (type == "Digits") {
    NFP_ASSIGN_OR_RETURN(const bool individual, bool_field(node, path, "individual_digits", false));
    return add_split(pre_tokenizer, R"(\p{N})", individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous);
  }
  if (type == "Punctuation") {
    NFP_ASSIGN_OR_RETURN(const SplitBehavior behavior, parse_behavior(node, path, SplitBehavior::kIsolated));
    return add_split(pre_tokenizer, R"([!-\/:-@\x{5B}-`{-~\p{P}])", behavior);
  }
  if (type == "Whitespace") {  // Rust's \w: with the joiners U+200C and U+200D
    return add_split(pre_tokenizer, R"([\w\x{200C}\x{200D}]+|[^\w\s\x{200C}\x{200D}]+)", SplitBehavior::kRemoved, true);
  }
  if (type == "WhitespaceSplit") return add_split(pre_tokenizer, R"(\s)", SplitBehavior::kRemoved);
  if (type == "CharDelimiterSplit") {
    NFP_ASSIGN_OR_RETURN(const std::string delimiter, parse_one_character(node, path, "delimiter"));
    NFP_ASSIGN_OR_RETURN(Regex regex, Regex::literal(delimiter));
    pre_tokenizer.add(PreTokenizer::Split{std::move(regex), SplitBehavior::kRemoved, false});
    return ok_status();
  }
  if (type == "Metaspace") {
    PreTokenizer::Metaspace stage;
    NFP_ASSIGN_OR_RETURN(stage.replacement, parse_one_character(node, path, "replacement"));
    NFP_ASSIGN_OR_RETURN(stage.prepend, parse_prepend(node, path));
    NFP_ASSIGN_OR_RETURN(stage.split, bool_field(node, path, "split", true));
    pre_tokenizer.add(std::move(stage));
    return ok_status();
  }
  return unsupported(path, "the pre-tokenizer '" + type + "'");
}

Status parse_post_processor(Json node, const std::string& path, int depth, std::vector<int32_t>& prefix,
                            std::vector<int32_t>& suffix) {
  NFP_ASSIGN_OR_RETURN(const std::string type, string_field(node, path, "type"));
  if (type == "Sequence") {
    return each_child(node, path, "processors", depth, [&](Json child, const std::string& at) {
      return parse_post_processor(child, at, depth + 1, prefix, suffix);
    });
  }
  std::vector<int32_t> before;
  std::vector<int32_t> after;
  if (type == "TemplateProcessing") {
    NFP_RETURN_IF_ERROR(parse_template(node, path, before, after));
  } else if (type == "BertProcessing" || type == "RobertaProcessing") {
    NFP_ASSIGN_OR_RETURN(const int32_t cls, parse_token_id_pair(node, path, "cls"));
    NFP_ASSIGN_OR_RETURN(const int32_t sep, parse_token_id_pair(node, path, "sep"));
    before.push_back(cls);
    after.push_back(sep);
  } else if (type != "ByteLevel") {  // that one moves offsets only
    return unsupported(path, "the post-processor '" + type + "'");
  }
  prefix.insert(prefix.begin(), before.begin(), before.end());
  suffix.insert(suffix.end(), after.begin(), after.end());
  if (prefix.size() + suffix.size() > kMaxSteps) return unsupported(path, "a template of more than 64 tokens");
  return ok_status();
}

Result<Decoder> parse_decoder(Json node, const std::string& path) {
  DecoderBuilder builder;
  NFP_RETURN_IF_ERROR(builder.add(node, path, 0));
  return std::move(builder.decoder);
}

}  // namespace nfp::text
