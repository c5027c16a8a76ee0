#include "text/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "text/utf8.h"

namespace nfp::text {

Unigram::Unigram(Vocabulary vocabulary, std::vector<double> scores, const UnigramOptions& options)
    : TokenModel(std::move(vocabulary)), scores_(std::move(scores)), options_(options) {
  constexpr double kUnknownPenalty = 10;  // SentencePiece's
  double least = std::numeric_limits<double>::infinity();
  for (int32_t id = 0; id < vocabulary_.id_limit(); ++id) least = std::min(least, scores_[static_cast<size_t>(id)]);
  unknown_score_ = least - kUnknownPenalty;
  for (unsigned byte = 0; byte < 256; ++byte) {
    fallback_ids_[byte] = vocabulary_.find(fmt::format("<0x{:02X}>", byte));
  }
  build_trie();
}

// Breadth first: a node's tokens are those of a range that share its bytes.
void Unigram::build_trie() {
  struct Range {
    size_t begin, end, depth;
  };
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < vocabulary_.id_limit(); ++id) {
    if (vocabulary_.has(id)) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end(), [this](int32_t a, int32_t b) { return vocabulary_.text(a) < vocabulary_.text(b); });
  nodes_.resize(1);
  std::vector<Range> ranges = {{0, ids.size(), 0}};
  for (size_t at = 0; at < nodes_.size(); ++at) {
    auto [begin, end, depth] = ranges[at];
    if (begin < end && vocabulary_.text(ids[begin]).size() == depth) nodes_[at].token = ids[begin++];
    nodes_[at].children = static_cast<uint32_t>(nodes_.size());
    while (begin < end) {
      const char byte = vocabulary_.text(ids[begin])[depth];
      size_t next = begin;
      while (next < end && vocabulary_.text(ids[next])[depth] == byte) ++next;
      nodes_.push_back({.byte = static_cast<uint8_t>(byte)});
      ranges.push_back({begin, next, depth + 1});
      ++nodes_[at].child_count;
      begin = next;
    }
  }
  first_.fill(kNoNode);
  for (uint16_t i = 0; i < nodes_[0].child_count; ++i)
    first_[nodes_[nodes_[0].children + i].byte] = nodes_[0].children + i;
}

uint32_t Unigram::child(uint32_t node, uint8_t byte) const {
  const auto begin = nodes_.begin() + nodes_[node].children;
  const auto end = begin + nodes_[node].child_count;
  const auto found = std::lower_bound(begin, end, byte, [](const Node& a, uint8_t b) { return a.byte < b; });
  return found != end && found->byte == byte ? static_cast<uint32_t>(found - nodes_.begin()) : kNoNode;
}

void Unigram::put_unknown(std::string_view text, std::vector<int32_t>& out) const {
  int32_t id = vocabulary_.find(text);
  const auto fallback = [this](char byte) { return fallback_ids_[static_cast<uint8_t>(byte)]; };
  if (id == Vocabulary::kNone && options_.byte_fallback &&
      std::all_of(text.begin(), text.end(), [&](char byte) { return fallback(byte) != Vocabulary::kNone; })) {
    for (const char byte : text) out.push_back(fallback(byte));
    return;
  }
  if (id == Vocabulary::kNone) id = options_.unk;
  if (id != Vocabulary::kNone) out.push_back(id);
}

void Unigram::encode(std::string_view piece, ModelScratch& scratch, std::vector<int32_t>& out) const {
  constexpr int32_t kNowhere = -1;
  std::vector<double>& scores = scratch.scores;     // of the best way to each place
  std::vector<int32_t>& starts = scratch.previous;  // where its last token begins
  std::vector<int32_t>& tokens = scratch.symbols;   // and which it is
  std::vector<int32_t>& ends = scratch.next;
  scores.assign(piece.size() + 1, 0.0);
  starts.assign(piece.size() + 1, kNowhere);
  tokens.resize(piece.size() + 1);
  const auto offer = [&](size_t from, size_t to, double score, int32_t token) {
    if (starts[to] != kNowhere && scores[from] + score <= scores[to]) return;
    scores[to] = scores[from] + score;
    starts[to] = static_cast<int32_t>(from);
    tokens[to] = token;
  };
  for (size_t at = 0; at < piece.size();) {
    const size_t character_end = at + utf8_length(piece[at]);
    bool known = false;
    uint32_t node = first_[static_cast<uint8_t>(piece[at])];
    for (size_t end = at + 1; node != kNoNode; ++end) {
      if (const int32_t token = nodes_[node].token; token != Vocabulary::kNone) {
        offer(at, end, scores_[static_cast<size_t>(token)], token);
        known = known || end == character_end;
      }
      node = end < piece.size() ? child(node, static_cast<uint8_t>(piece[end])) : kNoNode;
    }
    if (!known) offer(at, character_end, unknown_score_, options_.unk);
    at = character_end;
  }

  ends.clear();
  for (size_t end = piece.size(); end > 0; end = static_cast<size_t>(starts[end])) {
    ends.push_back(static_cast<int32_t>(end));
  }
  size_t unknown = 0;  // characters without a token that end where the next token begins
  size_t begin = 0;
  for (auto end = ends.rbegin(); end != ends.rend(); ++end) {
    const auto to = static_cast<size_t>(*end);
    if (tokens[to] == options_.unk) {
      unknown += to - begin;
    } else {
      if (unknown > 0) put_unknown(piece.substr(begin - unknown, unknown), out);
      unknown = 0;
      out.push_back(tokens[to]);
    }
    begin = to;
  }
  if (unknown > 0) put_unknown(piece.substr(begin - unknown, unknown), out);
}

}  // namespace nfp::text
