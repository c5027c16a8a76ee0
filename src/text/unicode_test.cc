#include "text/unicode.h"

#include <gtest/gtest.h>

#include "text/utf8.h"

namespace nfp::text {
namespace {

std::string changed(std::string_view text, Case to) { return change_case(text, to).value_or("(refused)"); }

TEST(Unicode, CountsAndFindsCodePoints) {
  EXPECT_EQ(count_code_points("aé語🙂"), 4u);
  EXPECT_EQ(byte_of("aé語🙂", 0), 0u);
  EXPECT_EQ(byte_of("aé語🙂", 3), 6u);
  EXPECT_EQ(byte_of("aé語🙂", 4), 10u);
}

TEST(Unicode, ChangesCase) {
  EXPECT_EQ(changed("hÉLLO wörld ǆ", Case::kLower), "héllo wörld ǆ");
  EXPECT_EQ(changed("héllo ß ǆ", Case::kUpper), "HÉLLO SS Ǆ");
  EXPECT_EQ(changed("ßa WORLD", Case::kCapitalize), "Ssa world");
  EXPECT_EQ(changed("they're HERE ǆx", Case::kTitle), "They'Re Here ǅx");
  EXPECT_EQ(changed("İ", Case::kLower), "i̇");
}

TEST(Unicode, SigmaEndsWordsInItsFinalForm) {
  EXPECT_EQ(changed("ΑΣ ΣΑΣ. Σ", Case::kLower), "ας σας. σ");
  EXPECT_EQ(changed("Α'Σ'Α", Case::kLower), "α'σ'α");
}

TEST(Unicode, RefusesCapitalsOfSeveralLetters) {
  EXPECT_EQ(change_case("ﬁne", Case::kUpper), std::nullopt);
  EXPECT_EQ(change_case("ΐ", Case::kCapitalize), std::nullopt);
  EXPECT_EQ(changed("ﬁne", Case::kLower), "ﬁne");
}

// No letter's case changes to bytes that are not UTF-8.
TEST(Unicode, EveryCodePointChangesToText) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    for (const Case to : {Case::kLower, Case::kUpper, Case::kTitle}) ASSERT_TRUE(is_utf8(changed(text, to)));
  }
}

TEST(Unicode, StripsPythonsSpace) {
  EXPECT_EQ(strip_space(" \t\x1c é \u3000\u0085"), "é");
  EXPECT_EQ(strip_space("  a ", true, false), "a ");
  EXPECT_EQ(strip_space("  a ", false, true), "  a");
  EXPECT_EQ(strip_space(" \n"), "");
}

}  // namespace
}  // namespace nfp::text
