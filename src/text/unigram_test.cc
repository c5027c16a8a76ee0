#include "text/unigram.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace nfp::text {
namespace {

using Ids = std::vector<int32_t>;

Unigram make(const std::vector<std::pair<std::string, double>>& tokens, const UnigramOptions& options) {
  Vocabulary vocabulary;
  std::vector<double> scores;
  for (const auto& [token, score] : tokens) {
    vocabulary.add(static_cast<int32_t>(scores.size()), token);
    scores.push_back(score);
  }
  return Unigram(std::move(vocabulary), std::move(scores), options);
}

Ids encode(const Unigram& model, std::string_view piece) {
  ModelScratch scratch;
  Ids ids;
  model.encode(piece, scratch, ids);
  return ids;
}

TEST(Unigram, TheBestSumWins) {
  const Unigram model =
      make({{"<unk>", 0}, {"a", -1}, {"b", -1}, {"ab", -2.5}, {"abc", -4}, {"c", -3}, {"bc", -1.5}}, {.unk = 0});
  EXPECT_EQ(encode(model, "ab"), (Ids{1, 2}));
  EXPECT_EQ(encode(model, "abc"), (Ids{1, 6}));
  EXPECT_EQ(encode(model, ""), Ids{});
  const Unigram tied = make({{"<unk>", 0}, {"a", -1}, {"aa", -2}}, {.unk = 0});
  EXPECT_EQ(encode(tied, "aaa"), (Ids{1, 2}));  // of equals the one whose last token begins first
}

TEST(Unigram, UnknownCharactersAreOneToken) {
  const std::vector<std::pair<std::string, double>> tokens = {{"<unk>", 0},  {"a", -1},     {"\xC3\xA9", -2},
                                                              {"<0x78>", 0}, {"<0x79>", 0}, {"xz", -100}};
  const Unigram plain = make(tokens, {.unk = 0});
  EXPECT_EQ(encode(plain, "axya\xC3\xA9y"), (Ids{1, 0, 1, 2, 0}));
  EXPECT_EQ(encode(plain, "a\xF0\x9F\x99\x82"), (Ids{1, 0}));
  EXPECT_EQ(encode(plain, "<unk>"), Ids{0});
  const Unigram bytes = make(tokens, {.byte_fallback = true, .unk = 0});
  EXPECT_EQ(encode(bytes, "axya"), (Ids{1, 3, 4, 1}));
  EXPECT_EQ(encode(bytes, "axwa"), (Ids{1, 0, 1}));  // not all bytes have tokens
  EXPECT_EQ(encode(bytes, "xz"), Ids{5});            // two unknown characters would have a higher score
  EXPECT_EQ(encode(make(tokens, {}), "axya"), (Ids{1, 1}));
}

TEST(Unigram, LongPiecesTakeTimeInLine) {
  std::vector<std::pair<std::string, double>> tokens = {{"<unk>", 0}};
  for (size_t length = 1; length <= 64; ++length) tokens.emplace_back(std::string(length, 'a'), -1.0);
  const Unigram model = make(tokens, {.unk = 0});
  const Ids ids = encode(model, std::string(1 << 20, 'a'));
  EXPECT_EQ(ids, Ids((1 << 20) / 64, 64));
}

}  // namespace
}  // namespace nfp::text
