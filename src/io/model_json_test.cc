#include "io/model_json.h"

#include <gtest/gtest.h>

#include <cmath>

namespace nfp {
namespace {

using Json = nlohmann::ordered_json;

std::string message(std::string_view text) {
  const auto json = parse_model_json<nlohmann::json>(text, "f");
  EXPECT_FALSE(json.ok()) << text;
  return json.ok() ? "" : json.error().message;
}

TEST(ModelJson, NumbersThatPythonWritesAreReadAndWrittenBack) {
  const std::string text = R"({
  "z": NaN,
  "a": [
    Infinity,
    -Infinity,
    1.5
  ],
  "NaN": "NaN, Infinity and \" -Infinity",
  "o": {
    "-Infinity": -1
  }
})";
  const auto json = parse_model_json<Json>(text, "f");
  ASSERT_TRUE(json.ok()) << json.error().message;
  EXPECT_TRUE(std::isnan((*json)["z"].get<double>()));
  EXPECT_EQ((*json)["a"][0].get<double>(), INFINITY);
  EXPECT_EQ((*json)["a"][1].get<double>(), -INFINITY);
  EXPECT_EQ((*json)["NaN"], "NaN, Infinity and \" -Infinity");
  EXPECT_EQ(dump_model_json(*json), text);
}

TEST(ModelJson, AFaultHasItsPlace) {
  EXPECT_EQ(message("{\n  \"a\": 1,\n  \"b\": nan\n}"), "f: is not JSON at line 3, column 9");
  EXPECT_EQ(message("{\"a\": NaN, \"b\": Inf}"), "f: is not JSON at line 1, column 17");
  EXPECT_EQ(message("{\"a\": xNaN}"), "f: is not JSON at line 1, column 7");
  EXPECT_EQ(message("{\"a\": NaN"), "f: is not JSON: it ends too early");
  EXPECT_EQ(message("{\"a\": \"Na"), "f: is not JSON: it ends too early");
  EXPECT_EQ(message("{\"a\": \"\\"), "f: is not JSON: it ends too early");
  EXPECT_EQ(message(""), "f: is not JSON: it ends too early");
  EXPECT_EQ(message("{\"a\": 1e999}"), "f: is not JSON (a number is too large)");
  EXPECT_EQ(message("NaN"), "f: is not a JSON object");
  EXPECT_EQ(message(std::string(1000, '[')), "f: is nested deeper than 200 levels");
}

}  // namespace
}  // namespace nfp
