// A unigram model (Kudo 2018, section 3.2): of all ways to cut a piece into tokens the one whose scores sum to most.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/token_model.h"

namespace nfp::text {

struct UnigramOptions {
  bool byte_fallback = false;       // characters without a token become their bytes' tokens "<0x0A>"
  int32_t unk = Vocabulary::kNone;  // for a run of characters without a token; without it they are dropped
};

class Unigram : public TokenModel {
 public:
  // scores: one for each id.
  Unigram(Vocabulary vocabulary, std::vector<double> scores, const UnigramOptions& options);

  // Takes time for each byte of `piece` and for each byte of the tokens that begin there.
  void encode(std::string_view piece, ModelScratch& scratch, std::vector<int32_t>& out) const override;

 private:
  // A trie of all tokens; the children of a node lie beside each other, by ascending bytes.
  struct Node {
    uint32_t children = 0;
    uint16_t child_count = 0;
    uint8_t byte = 0;
    int32_t token = Vocabulary::kNone;
  };
  static constexpr uint32_t kNoNode = 0;  // the root, which is no node's child
  void build_trie();
  uint32_t child(uint32_t node, uint8_t byte) const;
  void put_unknown(std::string_view text, std::vector<int32_t>& out) const;

  std::vector<double> scores_;
  UnigramOptions options_;
  double unknown_score_;
  std::vector<Node> nodes_;
  std::array<uint32_t, 256> first_;  // the root's children
  std::array<int32_t, 256> fallback_ids_;
};

}  // namespace nfp::text
