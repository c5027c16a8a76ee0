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
  EXPECT_EQ(escaped("\xed\xa0\x80").find('\xed'), std::string::npos);  // a surrogate
  EXPECT_EQ(escaped("\xc0\xaf").find('\xc0'), std::string::npos);      // overlong
}

// Clients that split a stream's lines at all of Unicode's line ends (httpx's iter_lines) would cut an event there.
TEST(JsonText, LineEndsOfUnicodeAreEscaped) {
  EXPECT_EQ(escaped("a\u0085b\u2028c\u2029\u2028"), R"("a\u0085b\u2028c\u2029\u2028")");
  EXPECT_EQ(escaped("\u0084\u2027\u202a"), "\"\u0084\u2027\u202a\"");
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
  EXPECT_TRUE(parse_json("\"[[[[\\\"[[[\"", {.max_depth = 1}).ok());  // brackets in strings are text
  EXPECT_FALSE(parse_json("\"\xff\"").ok());
  EXPECT_FALSE(parse_json("").ok());
  EXPECT_FALSE(parse_json("{} x").ok());
  EXPECT_FALSE(parse_json(std::string_view("{}\0", 3)).ok());
  EXPECT_FALSE(parse_json(std::string_view("{}\0 x", 5)).ok());
  EXPECT_FALSE(parse_json("\"\\ud800\"").ok());
  const auto failure = parse_json("{\"a\": }");
  ASSERT_FALSE(failure.ok());
  EXPECT_EQ(failure.error().message.find("json.exception"), std::string::npos) << failure.error().message;
}

// An object that the library's reader would take minutes for, in a few milliseconds here; the test's own time limit is
// what fails without that. Beyond the limits: an error that says which.
TEST(JsonText, ReadsInLinearTime) {
  std::string text = "{";
  constexpr int kKeys = 300'000;
  for (int i = 0; i < kKeys; ++i) text += fmt::format("{}\"{}\":0", i > 0 ? "," : "", i);
  text += "}";
  const auto wide = parse_json(text, {.max_keys = kKeys});
  ASSERT_TRUE(wide.ok()) << wide.error().message;
  EXPECT_EQ(wide->size(), static_cast<size_t>(kKeys));
  EXPECT_EQ((*wide)["0"], 0);
  const auto refused = parse_json(text);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("4096 keys"), std::string::npos) << refused.error().message;
  std::string flat = "[";
  for (int i = 0; i < (1 << 20); ++i) flat += "[],";
  const auto many = parse_json(flat + "[]]");
  ASSERT_FALSE(many.ok());
  EXPECT_NE(many.error().message.find("1048576 values"), std::string::npos) << many.error().message;
  // Deep and wide at once.
  std::string deep;
  deep.resize(10'000'000, '[');
  EXPECT_FALSE(parse_json(deep).ok());
}

TEST(JsonText, OfARepeatedKeyTheLastValueCounts) {
  const auto parsed = parse_json(R"({"a":1,"b":{"x":1,"x":2,"x":3},"a":[2],"c":3,"b":4})");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(dump(*parsed), R"({"a":[2],"b":4,"c":3})");
}

TEST(JsonText, AgreesWithTheLibrarysReader) {
  EXPECT_TRUE(rc::check("whatever the library reads, we read alike", [] {
    const auto text = *rc::gen::container<std::string>(rc::gen::elementOf(std::string("{}[],:\"ab01.-e \\tnu")));
    const Json expected = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    const auto parsed = parse_json(text);
    RC_ASSERT(parsed.ok() == !expected.is_discarded());
    if (parsed.ok()) RC_ASSERT(*parsed == expected);
  }));
}

TEST(JsonText, OfATextThatWasCutOffWhatIsWholeIsLeft) {
  const std::string text = R"({"a": "x\u00e9", "b": [1, {"c": true}, "y"], "a": null, "d": {"e": -2.5e1}})";
  EXPECT_EQ(dump(parse_cut_json(text)), dump(*parse_json(text)));
  const std::pair<std::string_view, std::string_view> cuts[] = {
      {"", "null"},
      {"{", "{}"},
      {R"({"a": "x\u00)", "{}"},
      {R"({"a": "xé")", R"({"a":"xé"})"},
      {R"({"a": 1, "b": [1, {"c": tru)", R"({"a":1,"b":[1,{}]})"},
      {R"({"a": [1, {"c": true}, )", R"({"a":[1,{"c":true}]})"},
      {R"({"a": 1, "a": )", R"({"a":1})"},
      {R"({"a": 1, "a": 2, "b)", R"({"a":2})"},
      {R"({"a": -2.5e)", "{}"},
      {R"({"a": 1,, "b": 2)", "null"},
      {R"({"a": x})", "null"},
      {R"({"a": 1}})", "null"},
  };
  for (const auto& [cut, left] : cuts) EXPECT_EQ(dump(parse_cut_json(cut)), left) << cut;
  for (size_t size = 1; size < text.size(); ++size)
    EXPECT_TRUE(parse_cut_json(text.substr(0, size)).is_object()) << size;
  EXPECT_TRUE(parse_cut_json(std::string(1'000'000, '[')).is_null());
}

TEST(JsonText, EndsWhenItIsNoLongerWanted) {
  std::stop_source source;
  source.request_stop();
  std::string flat = "[";
  for (int i = 0; i < 100'000; ++i) flat += "0,";
  // One value is no piece of work that cannot be interrupted.
  for (const std::string& text :
       {flat + "0]", "\"" + std::string(200'000, 'a') + "\"", std::string(200'000, ' ') + "1"}) {
    const auto parsed = parse_json(text, {}, source.get_token());
    ASSERT_FALSE(parsed.ok()) << text.substr(0, 10);
    EXPECT_EQ(parsed.error().code, ErrorCode::kCancelled);
    EXPECT_TRUE(parse_json(text).ok());
  }
}

TEST(JsonText, SaysWhatATreeTakes) {
  size_t bytes = 0;
  ASSERT_TRUE(parse_json("[[],[],[],[]]", {}, {}, &bytes).ok());
  EXPECT_GE(bytes, 5 * sizeof(Json) + 4 * sizeof(Json::array_t));
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
