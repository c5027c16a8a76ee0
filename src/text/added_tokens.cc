#include "text/added_tokens.h"

#include <algorithm>
#include <utility>

#include "text/utf8.h"
#include "text/vocabulary.h"

namespace nfp::text {
namespace {

// What the `tokenizers` package takes for a part of a word here: Rust's \w.
constexpr std::string_view kWordCharacter = R"([\w\x{200C}\x{200D}])";

}  // namespace

Result<AddedTokens> AddedTokens::make(std::vector<AddedToken> tokens, const Normalizer& normalizer) {
  AddedTokens added;
  RegexSearch search;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const AddedToken& token = tokens[i];
    if (!added.by_id_.emplace(token.id, i).second) {
      return error(ErrorCode::kInvalidInput, "field 'added_tokens' has id {} twice", token.id);
    }
    if (!added.by_content_.emplace(token.content, i).second) {
      return error(ErrorCode::kInvalidInput, "field 'added_tokens' has content '{}' twice", token.content);
    }
    if (token.content.empty()) continue;  // never found in a text
    if (token.single_word && added.word_.empty()) {
      NFP_ASSIGN_OR_RETURN(Regex word, Regex::compile(kWordCharacter));
      added.word_.push_back(std::move(word));
    }
    if (!token.normalized || token.both) added.raw_.add(token.content, static_cast<int32_t>(i));
  }
  // Of those that are the same text when normalized the first is found, and special ones come first.
  for (const bool special : {true, false}) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const AddedToken& token = tokens[i];
      if (token.content.empty() || !token.normalized || token.special != special) continue;
      std::string storage;
      NFP_ASSIGN_OR_RETURN(const std::string_view content, normalizer.apply(token.content, storage, search));
      if (content.size() > kMaxTokenBytes) {  // the normalizer may make more of it
        return error(ErrorCode::kInvalidInput,
                     "the added token with id {} has {} bytes when normalized; at most {} are supported", token.id,
                     content.size(), kMaxTokenBytes);
      }
      added.normalized_.add(content, static_cast<int32_t>(i));
    }
  }
  added.tokens_ = std::move(tokens);
  return added;
}

const AddedToken* AddedTokens::find(int32_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto found = by_content_.find(std::string(content));
  return found == by_content_.end() ? nullptr : &tokens_[found->second];
}

Status AddedTokens::split(std::string_view text, bool normalized, bool parse_special, RegexSearch& search,
                          std::vector<TextPart>& parts) const {
  const Trie& trie = normalized ? normalized_ : raw_;
  const auto is_word = [&](std::string_view character) -> Result<bool> {
    NFP_ASSIGN_OR_RETURN(const RegexSearch::Match match, search.next(word_[0], character, 0));
    return match.found;
  };
  size_t done = 0;                    // end of the last token, the white space it takes included
  size_t run_begin = 0, run_end = 0;  // white space that the next tokens need not look at, as they may be of it too
  for (size_t at = 0; at < text.size() && !trie.nodes.empty();) {
    while (at < text.size() && !trie.begins[static_cast<unsigned char>(text[at])]) ++at;
    size_t end = 0;
    const int32_t index = at < text.size() ? trie.longest(text, at, end) : -1;
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t begin = std::exchange(at, end);
    if (token.special && !parse_special) continue;
    if (token.single_word) {
      const std::string_view before = text.substr(0, begin);
      if (!before.empty()) {
        NFP_ASSIGN_OR_RETURN(const bool joined, is_word(before.substr(last_character(before))));
        if (joined) continue;
      }
      if (end < text.size()) {
        NFP_ASSIGN_OR_RETURN(const bool joined, is_word(text.substr(end, utf8_length(text[end]))));
        if (joined) continue;
      }
    }
    if (token.lstrip) begin = begin > done ? begin - trailing_white_space(text.substr(done, begin - done)) : done;
    if (token.rstrip) {
      if (end < run_begin || end > run_end) {
        run_begin = end;
        run_end = end + leading_white_space(text.substr(end));
      }
      end = run_end;
    }
    if (end <= begin) continue;  // all of it is white space that the token before it took
    if (begin > done) parts.push_back({-1, done, begin});
    parts.push_back({token.id, begin, end});
    done = end;
  }
  if (done < text.size()) parts.push_back({-1, done, text.size()});
  return ok_status();
}

void AddedTokens::Trie::add(std::string_view text, int32_t token) {
  if (text.empty()) return;
  if (nodes.empty()) nodes.emplace_back();
  begins[static_cast<unsigned char>(text[0])] = true;
  size_t node = 0;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    auto& next = nodes[node].next;
    auto place = std::lower_bound(next.begin(), next.end(), std::pair<uint8_t, int32_t>(byte, 0));
    if (place == next.end() || place->first != byte) {
      place = next.insert(place, {byte, static_cast<int32_t>(nodes.size())});
      const auto child = static_cast<size_t>(place->second);
      nodes.emplace_back();  // `place` and `next` are dangling from here on
      node = child;
    } else {
      node = static_cast<size_t>(place->second);
    }
  }
  if (nodes[node].token < 0) nodes[node].token = token;
}

int32_t AddedTokens::Trie::longest(std::string_view text, size_t at, size_t& end) const {
  int32_t best = -1;
  size_t node = 0;
  for (; at < text.size(); ++at) {
    const auto& next = nodes[node].next;
    const auto byte = static_cast<uint8_t>(text[at]);
    const auto place = std::lower_bound(next.begin(), next.end(), std::pair<uint8_t, int32_t>(byte, 0));
    if (place == next.end() || place->first != byte) break;
    node = static_cast<size_t>(place->second);
    if (nodes[node].token >= 0) {
      best = nodes[node].token;
      end = at + 1;
    }
  }
  return best;
}

}  // namespace nfp::text
