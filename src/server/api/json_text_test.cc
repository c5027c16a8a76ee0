#include "server/api/json_text.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

namespace nfp::server {
namespace {

std::string escaped(std::string_view text) {
  std::string out;
  append_string(out, text);
  return out;
}

TEST(JsonText, EscapesWhatJsonForbids) {
  EXPECT_EQ(escaped("a\"b\\c\nd\x01\x7f"), "\"a\\\"b\\\\c\\nd\\u0001\x7f\"");
  EXPECT_EQ(escaped("é€😀"), "\"é€😀\"");
  EXPECT_EQ(escaped("\xff"), "\"\xEF\xBF\xBD\"");
  EXPECT_EQ(escaped("a\xe2\x82"), "\"a\xEF\xBF\xBD\xEF\xBF\xBD\"");    // cut short
  EXPECT_EQ(escaped("\xed\xa0\x80").find("\xed"), std::string::npos);  // a surrogate
  EXPECT_EQ(escaped("\xc0\xaf").find("\xc0"), std::string::npos);      // overlong
}

TEST(JsonText, WhateverIsWrittenReadsBack) {
  EXPECT_TRUE(rc::check("any bytes give valid JSON, valid UTF-8 unchanged", [](const std::string& bytes) {
    const auto parsed = parse_json(escaped(bytes));
    RC_ASSERT(parsed.ok());
    const bool valid = escaped(bytes).find("\xEF\xBF\xBD") == std::string::npos;
    if (valid) RC_ASSERT(parsed->get<std::string>() == bytes);
  }));
}

TEST(JsonText, RefusesDeepNestingAndBadText) {
  EXPECT_TRUE(parse_json(std::string(64, '[') + std::string(64, ']')).ok());
  EXPECT_FALSE(parse_json(std::string(65, '[') + std::string(65, ']')).ok());
  EXPECT_FALSE(parse_json(std::string(1'000'000, '[')).ok());
  EXPECT_TRUE(parse_json("\"[[[[\\\"[[[\"", 1).ok());  // brackets in strings are text
  EXPECT_FALSE(parse_json("\"\xff\"").ok());
  EXPECT_FALSE(parse_json("").ok());
  EXPECT_FALSE(parse_json("{} x").ok());
  EXPECT_FALSE(parse_json("\"\\ud800\"").ok());
  const auto failure = parse_json("{\"a\": }");
  ASSERT_FALSE(failure.ok());
  EXPECT_EQ(failure.error().message.find("json.exception"), std::string::npos) << failure.error().message;
}

TEST(JsonText, NumbersThatJsonLacksAreNull) {
  std::string out;
  append_number(out, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(out, "null");
  out.clear();
  append_number(out, -0.1f);
  EXPECT_EQ(out, "-0.1");
}

}  // namespace
}  // namespace nfp::server
