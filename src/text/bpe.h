// Byte-pair encoding of one piece of text: start from its characters (or bytes), then join the adjacent pair of lowest
// rank, the leftmost of equals, until no pair has a rank (Sennrich et al. 2016, section 3.2).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/token_model.h"

namespace nfp::text {

struct BpeOptions {
  bool byte_level = false;          // characters are bytes, and the vocabulary writes them as byte_level.h says
  bool byte_fallback = false;       // a character without a token becomes its bytes' tokens "<0x0A>"
  bool ignore_merges = false;       // a piece that is a token is that token, whatever the merges say
  bool fuse_unk = false;            // neighbouring unknown characters are one unknown token
  int32_t unk = Vocabulary::kNone;  // for characters without a token; without it they are dropped
};

class Bpe : public TokenModel {
 public:
  Bpe(Vocabulary vocabulary, const BpeOptions& options);

  // Ranks of merges are given in ascending order of importance; a pair that comes again takes the new rank.
  void reserve_merges(size_t count);
  // Errors name the text that has no token.
  Status add_merge(std::string_view left, std::string_view right, uint32_t rank);
  // For SentencePiece vocabularies, which have scores in place of merges: every way to put a token together from two
  // others ranks by that token's score, higher first. scores: one for each id. `apart`: ids that text never merges into
  // (control tokens, bytes).
  void derive_merges(std::span<const float> scores, const std::vector<bool>& apart = {});

  void encode(std::string_view piece, ModelScratch& scratch, std::vector<int32_t>& out) const override;

  const BpeOptions& options() const { return options_; }
  // Whether no token has `mark` after another character, so that a text may be cut before each run of marks and the
  // tokens stay the same. (A merge across the cut would make such a token.)
  bool may_cut_before(std::string_view mark) const;

 private:
  struct Pair {
    uint64_t key = kNoKey;  // left << 32 | right
    uint32_t rank = 0;
    int32_t id = 0;
  };
  static constexpr uint64_t kNoKey = ~uint64_t{0};
  static constexpr uint32_t kNoRank = ~uint32_t{0};

  const Pair* find_pair(int32_t left, int32_t right) const;
  uint32_t rank_of(int32_t left, int32_t right) const {
    const Pair* pair = find_pair(left, right);
    return pair == nullptr ? kNoRank : pair->rank;
  }
  void put_pair(int32_t left, int32_t right, uint32_t rank, int32_t id);
  void rehash(size_t slots);

  void split_into_symbols(std::string_view piece, std::vector<int32_t>& symbols) const;
  void merge_short(ModelScratch& scratch, std::vector<int32_t>& out) const;
  void merge_long(ModelScratch& scratch, std::vector<int32_t>& out) const;

  BpeOptions options_;
  Vocabulary raw_;             // by the bytes that tokens stand for; only for byte_level with ignore_merges
  int32_t byte_ids_[256];      // byte_level: the token of each byte; else of each ASCII character
  int32_t fallback_ids_[256];  // byte_fallback: "<0x00>" ...
  std::vector<Pair> pairs_;    // linear probing; a power of two, at most half full
  size_t pair_count_ = 0;
};

}  // namespace nfp::text
