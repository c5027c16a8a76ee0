#include "engine/allowed_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "engine/testing/allowed_tokens_of.h"

namespace nfp {
namespace {

std::vector<int32_t> tokens_of(std::span<const uint32_t> mask) {
  std::vector<int32_t> tokens;
  for (int32_t v = 0; v < static_cast<int32_t>(mask.size()) * 32; ++v) {
    if ((mask[static_cast<size_t>(v / 32)] >> (v % 32) & 1u) != 0) tokens.push_back(v);
  }
  return tokens;
}

// vLLM's rule, word by word.
bool forbidden(const std::vector<std::vector<int32_t>>& words, const std::vector<int32_t>& output, int32_t token) {
  return std::any_of(words.begin(), words.end(), [&](const std::vector<int32_t>& word) {
    if (word.back() != token || word.size() > output.size() + 1) return false;
    return std::equal(word.begin(), word.end() - 1, output.end() - (static_cast<std::ptrdiff_t>(word.size()) - 1));
  });
}

TEST(AllowedTokens, MasksEndWithTheVocabulary) {
  for (const int32_t vocab : {4, 31, 32, 33, 64, 70}) {
    const std::vector<int32_t> left = tokens_of(allowed_tokens_of(vocab, {}, {{3}})->mask());
    EXPECT_EQ(left.size(), static_cast<size_t>(vocab - 1));
    EXPECT_LT(left.back(), vocab);
  }
}

TEST(AllowedTokens, WhatCannotBeIsNamed) {
  const auto field = [](std::vector<int32_t> ids, std::vector<std::vector<int32_t>> words) {
    std::shared_ptr<const AllowedTokens> made;
    const auto bad = AllowedTokens::make(ids, std::move(words), 10, &made);
    EXPECT_FALSE(bad && made);
    EXPECT_TRUE(!bad || bad->message.find(bad->field) != std::string::npos);
    return bad ? bad->field : "";
  };
  EXPECT_EQ(field({3, 10}, {}), "allowed_token_ids");
  EXPECT_EQ(field({-1}, {}), "allowed_token_ids");
  EXPECT_EQ(field(std::vector<int32_t>(11, 3), {}), "allowed_token_ids");
  EXPECT_EQ(field(std::vector<int32_t>(10, 3), {{9, 0}}), "");
  EXPECT_EQ(field({}, {{1, 10}}), "bad_words");
  EXPECT_EQ(field({}, {{-1, 1}}), "bad_words");
  EXPECT_EQ(field({}, {{1}, {}}), "bad_words");
}

TEST(AllowedTokens, FollowVllmsRule) {
  std::mt19937 random(1);
  const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
  for (int i = 0; i < 2000; ++i) {
    const int32_t vocab = 8 + draw(60), letters = 3;
    std::vector<int32_t> ids, output;
    std::vector<std::vector<int32_t>> words;
    for (int32_t k = draw(2) * draw(8); k > 0; --k) ids.push_back(draw(vocab));
    for (int32_t k = draw(6); k > 0; --k) {
      std::vector<int32_t>& word = words.emplace_back();
      for (int32_t n = 1 + draw(4); n > 0; --n) word.push_back(draw(letters));
    }
    for (int32_t n = draw(6); n > 0; --n) output.push_back(draw(letters));
    const auto allowed = allowed_tokens_of(vocab, ids, words);
    std::vector<uint32_t> mask((static_cast<size_t>(vocab) + 31) / 32);
    for (uint32_t& word : mask) word = static_cast<uint32_t>(random() | random());  // a grammar's
    std::vector<int32_t> expected = tokens_of(mask);
    std::erase_if(expected, [&](int32_t token) {
      const bool listed = ids.empty() ? token < vocab : std::find(ids.begin(), ids.end(), token) != ids.end();
      return !listed || forbidden(words, output, token);
    });
    allowed->restrict(mask, output);
    ASSERT_EQ(tokens_of(mask), expected);
  }
}

}  // namespace
}  // namespace nfp
