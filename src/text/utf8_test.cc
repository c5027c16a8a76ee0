#include "text/utf8.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "text/byte_level.h"

namespace nfp::text {
namespace {

TEST(Utf8, UnitsOfWellFormedText) {
  const std::string text = "a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x99\x82";
  size_t at = 0;
  for (const int size : {1, 2, 3, 4}) {
    const Utf8Unit unit = utf8_unit(std::string_view(text).substr(at));
    EXPECT_EQ(unit.kind, Utf8Unit::kComplete);
    EXPECT_EQ(unit.size, size);
    at += unit.size;
  }
}

// The examples of Unicode 15, table 3-8 and its neighbours.
TEST(Utf8, LossyReplacesMaximalIllFormedParts) {
  const std::string r(kReplacement);
  EXPECT_EQ(utf8_lossy("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8_lossy("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(utf8_lossy("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(utf8_lossy("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(utf8_lossy("ok\xF0\x9F\x99"), "ok" + r);
  EXPECT_EQ(utf8_lossy(""), "");
}

TEST(Utf8, LossyOfRandomBytesIsValidAndKeepsValidText) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (unsigned i = random() % 40; i > 0; --i) {
      bytes += static_cast<char>(random() % 3 == 0 ? random() % 128 : 128 + random() % 128);
    }
    const std::string text = utf8_lossy(bytes);
    EXPECT_TRUE(is_utf8(text));
    EXPECT_EQ(utf8_lossy(text), text);
  }
}

TEST(Utf8, CodePointsSurviveTheRoundTrip) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    size_t at = 0;
    ASSERT_EQ(next_code_point(text, at), c);
    ASSERT_EQ(at, text.size());
    ASSERT_EQ(utf8_length(text[0]), text.size());
    ASSERT_EQ(last_character(text), 0u);
  }
}

TEST(Utf8, WhiteSpaceAtBothEnds) {
  EXPECT_EQ(leading_white_space(" \t\xE3\x80\x80x "), 5u);
  EXPECT_EQ(trailing_white_space(" x\xC2\xA0\n"), 3u);
  EXPECT_EQ(leading_white_space("\xE2\x80\x8B"), 0u);  // U+200B is not white space
  EXPECT_EQ(trailing_white_space(" \n "), 3u);
  EXPECT_EQ(trailing_white_space(""), 0u);
}

TEST(ByteLevel, EveryByteSurvivesAndTheWellKnownOnesAreRight) {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string one(1, static_cast<char>(byte));
    EXPECT_EQ(byte_level_decode(byte_level_encode(one)), one);
  }
  EXPECT_EQ(byte_level_encode(" a\n"),
            "\xC4\xA0"
            "a\xC4\x8A");                             // "ĠaĊ"
  EXPECT_EQ(byte_level_decode("a b"), std::nullopt);  // a space stands for no byte
  EXPECT_EQ(byte_level_decode("\xE4\xB8\xAD"), std::nullopt);
}

}  // namespace
}  // namespace nfp::text
