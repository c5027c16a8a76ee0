#include "text/bpe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "text/piece_cache.h"
#include "text/utf8.h"

namespace nfp::text {
namespace {

using Merges = std::vector<std::pair<std::string, std::string>>;

struct Model {
  std::vector<std::string> tokens;
  Merges merges;
};

Bpe build(const Model& model, const BpeOptions& options = {}) {
  Vocabulary vocabulary;
  for (size_t i = 0; i < model.tokens.size(); ++i) vocabulary.add(static_cast<int32_t>(i), model.tokens[i]);
  Bpe bpe(std::move(vocabulary), options);
  for (size_t i = 0; i < model.merges.size(); ++i) {
    EXPECT_TRUE(bpe.add_merge(model.merges[i].first, model.merges[i].second, static_cast<uint32_t>(i)).ok());
  }
  return bpe;
}

std::vector<std::string> encode(const Bpe& bpe, std::string_view piece) {
  ModelScratch scratch;
  std::vector<int32_t> ids;
  bpe.encode(piece, scratch, ids);
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const int32_t id : ids) tokens.emplace_back(bpe.vocabulary().text(id));
  return tokens;
}

using Strings = std::vector<std::string>;

// The definition, one merge at a time.
Strings reference(const Model& model, std::string_view piece) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t i = 0; i < model.merges.size(); ++i) ranks[model.merges[i]] = i;
  Strings symbols;
  for (const char c : piece) symbols.emplace_back(1, c);
  while (true) {
    size_t best = model.merges.size();
    size_t at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ranks.find({symbols[i], symbols[i + 1]});
      if (found != ranks.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == model.merges.size()) return symbols;
    symbols[at] += symbols[at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

Model random_model(std::mt19937& random) {
  Model model{{"a", "b", "c"}, {}};
  for (int i = 0; i < 60; ++i) {
    const std::string left = model.tokens[random() % model.tokens.size()];
    const std::string right = model.tokens[random() % model.tokens.size()];
    if (left.size() + right.size() > 12) continue;
    if (std::find(model.merges.begin(), model.merges.end(), std::pair(left, right)) != model.merges.end()) continue;
    model.merges.emplace_back(left, right);
    if (std::find(model.tokens.begin(), model.tokens.end(), left + right) == model.tokens.end()) {
      model.tokens.push_back(left + right);
    }
  }
  std::shuffle(model.merges.begin(), model.merges.end(), random);
  return model;
}

TEST(Bpe, EqualsTheDefinitionOnRandomModelsAndPieces) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const Model model = random_model(random);
    const Bpe bpe = build(model);
    for (int i = 0; i < 20; ++i) {
      std::string piece;
      const unsigned length = 1 + random() % (i % 2 == 0 ? 48 : 200);  // both the short and the long way
      const unsigned letters = 1 + random() % 3;
      for (unsigned j = 0; j < length; ++j) piece += static_cast<char>('a' + random() % letters);
      ASSERT_EQ(encode(bpe, piece), reference(model, piece)) << piece;
    }
  }
}

TEST(Bpe, LongRunsTakeLinearithmicTime) {
  Model model{{"a"}, {}};
  for (size_t length = 1; length < 64; length *= 2) {
    model.merges.emplace_back(std::string(length, 'a'), std::string(length, 'a'));
    model.tokens.emplace_back(2 * length, 'a');
  }
  const Strings tokens = encode(build(model), std::string(1 << 20, 'a'));
  EXPECT_EQ(tokens, Strings((1 << 20) / 64, std::string(64, 'a')));
}

TEST(Bpe, UnknownCharacters) {
  const Model model{{"<unk>", "a", "<0xC3>", "<0xA9>"}, {}};
  EXPECT_EQ(encode(build(model), "xay"), Strings{"a"});
  EXPECT_EQ(encode(build(model, {.unk = 0}), "xxay"), (Strings{"<unk>", "<unk>", "a", "<unk>"}));
  EXPECT_EQ(encode(build(model, {.fuse_unk = true, .unk = 0}), "xxay"), (Strings{"<unk>", "a", "<unk>"}));
  const BpeOptions fallback = {.byte_fallback = true, .fuse_unk = true, .unk = 0};
  EXPECT_EQ(encode(build(model, fallback), "a\xC3\xA9"), (Strings{"a", "<0xC3>", "<0xA9>"}));
  EXPECT_EQ(encode(build(model, fallback), "a\xC3\xA8"), (Strings{"a", "<unk>"}));  // one of its bytes has no token
}

TEST(Bpe, IgnoreMergesTakesWholePieces) {
  const Model model{{"a", "b", "ab", "abb", "Ġ", "Ġa"}, {{"a", "b"}}};
  EXPECT_EQ(encode(build(model), "abb"), (Strings{"ab", "b"}));
  EXPECT_EQ(encode(build(model, {.ignore_merges = true}), "abb"), Strings{"abb"});
  const Bpe bytes = build(model, {.byte_level = true, .ignore_merges = true});
  EXPECT_EQ(encode(bytes, " a"), Strings{"\xC4\xA0"
                                         "a"});
  EXPECT_EQ(encode(bytes, " ab"), (Strings{"\xC4\xA0", "ab"}));
}

TEST(Bpe, MergesMustBeInTheVocabulary) {
  Bpe bpe = build({{"a", "b", "ab"}, {}});
  EXPECT_TRUE(bpe.add_merge("a", "b", 0).ok());
  EXPECT_EQ(bpe.add_merge("a", "x", 1).error().message, "'x' is not in the vocabulary");
  EXPECT_EQ(bpe.add_merge("b", "a", 1).error().message, "'ba' is not in the vocabulary");
}

TEST(Bpe, MergesFromScores) {
  Bpe bpe = build({{"a", "b", "c", "ab", "bc", "abc"}, {}});
  const float scores[] = {0, 0, 0, -2, -1, -3};
  bpe.derive_merges(scores);
  EXPECT_EQ(encode(bpe, "abc"), Strings{"abc"});  // bc first, then a + bc
  EXPECT_EQ(encode(bpe, "aab"), (Strings{"a", "ab"}));
  const float other[] = {0, 0, 0, -2, -1, -3};
  Bpe without = build({{"a", "b", "c", "ab", "bc"}, {}});
  without.derive_merges(std::span(other).first(5));
  EXPECT_EQ(encode(without, "abc"), (Strings{"a", "bc"}));

  Bpe apart = build({{"a", "b", "c", "ab", "bc", "abc"}, {}});
  apart.derive_merges(scores, {false, false, false, false, false, true});
  EXPECT_EQ(encode(apart, "abc"), (Strings{"a", "bc"}));
}

TEST(Bpe, KnowsWhetherATextMayBeCut) {
  const BpeOptions unknown = {.unk = 0};
  const Model model{{"a", "_", "_a", "__"}, {{"_", "a"}, {"_", "_"}}};
  EXPECT_TRUE(build(model, unknown).may_cut_before("_"));
  EXPECT_FALSE(build({{"a", "_", "a_"}, {{"a", "_"}}}, unknown).may_cut_before("_"));
  EXPECT_FALSE(build({{"a", "_", "_a", "_a_"}, {{"_", "a"}, {"_a", "_"}}}, unknown).may_cut_before("_"));
  EXPECT_FALSE(build({{"a"}, {}}, unknown).may_cut_before("_"));
  // An x that has no token at all leaves "_" and "_", which are merged.
  EXPECT_EQ(encode(build(model), "_x_"), Strings{"__"});
  EXPECT_FALSE(build(model).may_cut_before("_"));
  EXPECT_FALSE(build(model, {.byte_fallback = true}).may_cut_before("_"));  // without tokens of bytes
}

TEST(Vocabulary, FindsWhatWasAdded) {
  Vocabulary vocabulary;
  for (int32_t id = 0; id < 5000; ++id) {
    ASSERT_EQ(vocabulary.add(id * 3, std::string(static_cast<size_t>(id % 40), 'x') + std::to_string(id)),
              Vocabulary::Added::kYes);
  }
  EXPECT_EQ(vocabulary.add(3, "new"), Vocabulary::Added::kIdTaken);
  EXPECT_EQ(vocabulary.add(4, "x1"), Vocabulary::Added::kTextTaken);
  for (int32_t id = 0; id < 5000; ++id) {
    const std::string text = std::string(static_cast<size_t>(id % 40), 'x') + std::to_string(id);
    ASSERT_EQ(vocabulary.find(text), id * 3);
    ASSERT_EQ(vocabulary.text(id * 3), text);
  }
  EXPECT_EQ(vocabulary.find("absent"), Vocabulary::kNone);
  EXPECT_FALSE(vocabulary.has(1));
  EXPECT_FALSE(vocabulary.has(-1));
  EXPECT_EQ(Vocabulary().find("a"), Vocabulary::kNone);
}

TEST(PieceCache, RemembersAndForgets) {
  PieceCache cache;
  cache.serve(1);
  const std::vector<int32_t> tokens = {5, 6};
  std::span<const int32_t> found;
  const auto place = PieceCache::place("word");
  EXPECT_FALSE(cache.find(place, "word", found));
  cache.put(place, "word", tokens);
  ASSERT_TRUE(cache.find(place, "word", found));
  EXPECT_TRUE(std::equal(found.begin(), found.end(), tokens.begin(), tokens.end()));
  cache.serve(1);
  EXPECT_TRUE(cache.find(place, "word", found));
  cache.serve(2);
  EXPECT_FALSE(cache.find(place, "word", found));
  cache.put(place, "word", std::vector<int32_t>(9));
  EXPECT_FALSE(cache.find(place, "word", found));
}

}  // namespace
}  // namespace nfp::text
