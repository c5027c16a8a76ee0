#include "policy/step_table.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <functional>

namespace nfp {
namespace {

StepTable example() {
  StepTable table;
  table.model = "m";
  table.device = "d";
  table.weight_bytes = int64_t{16} << 30;
  table.max_step_tokens = 2048;
  table.max_sequences = 64;
  table.kv_dtype = "f16";
  table.spread = 0.125;
  table.steps_in_flight = 2;
  table.levels = {{Precision::kFp16, 0}, {Precision::kFp8W8A8, 0.5}, {Precision::kFp8W8A8, 1}};
  table.steps = {{0, 512, 0, 0, 0, 20.25, 3},
                 {0, 512, 512, 0, 0, 21, 3},
                 {1, 0, 0, 32, 1024, 5.5, 16},
                 {2, 256, 0, 32, 1024, 9.125, 4}};
  return table;
}

TEST(StepTable, ComesBackAsWritten) {
  const StepTable table = example();
  const auto back = parse_step_table(to_json_text(table), "t.json");
  ASSERT_TRUE(back.ok()) << back.error().message;
  EXPECT_EQ(back->model, table.model);
  EXPECT_EQ(back->device, table.device);
  EXPECT_EQ(back->weight_bytes, table.weight_bytes);
  EXPECT_EQ(back->max_step_tokens, table.max_step_tokens);
  EXPECT_EQ(back->max_sequences, table.max_sequences);
  EXPECT_EQ(back->kv_dtype, table.kv_dtype);
  EXPECT_EQ(back->levels, table.levels);
  EXPECT_EQ(back->spread, table.spread);
  EXPECT_EQ(back->steps_in_flight, table.steps_in_flight);
  ASSERT_EQ(back->steps.size(), table.steps.size());
  for (size_t i = 0; i < table.steps.size(); ++i) {
    const StepTime &a = back->steps[i], &b = table.steps[i];
    EXPECT_EQ(a.level, b.level);
    EXPECT_EQ(a.prefill_tokens, b.prefill_tokens);
    EXPECT_EQ(a.prefill_context, b.prefill_context);
    EXPECT_EQ(a.decode_sequences, b.decode_sequences);
    EXPECT_EQ(a.decode_context, b.decode_context);
    EXPECT_EQ(a.ms, b.ms);
    EXPECT_EQ(a.samples, b.samples);
  }
  EXPECT_EQ(back->steps[3].tokens(), 288);
  EXPECT_EQ(back->steps[3].sequences(), 33);
  EXPECT_EQ(back->levels[1].name(), "fp8-w8a8@0.50");
  EXPECT_EQ(back->levels[2].name(), "fp8-w8a8");
}

TEST(StepTable, RefusesWhatIsWrongAndNamesIt) {
  struct Case {
    std::function<void(nlohmann::json&)> spoil;
    const char* named;
  };
  const std::vector<Case> cases = {
      {[](auto& j) { j["format"] = "other"; }, "other"},
      {[](auto& j) { j["version"] = 2; }, "version 2"},
      {[](auto& j) { j.erase("device"); }, "device is missing"},
      {[](auto& j) { j["model"] = 3; }, "model must be a string"},
      {[](auto& j) { j["steps"] = nlohmann::json::array(); }, "steps must be a list"},
      {[](auto& j) { j["levels"] = "fp16"; }, "levels must be a list"},
      {[](auto& j) { j["levels"][1]["precision"] = "int4"; }, "levels[1]: precision 'int4'"},
      {[](auto& j) { j["levels"][0]["fp8_share"] = 0.5; }, "levels[0]: fp8_share"},
      {[](auto& j) { j["levels"][2]["fp8_share"] = 1.5; }, "levels[2]: fp8_share"},
      {[](auto& j) { j["steps"][2]["level"] = 3; }, "steps[2]: level"},
      {[](auto& j) { j["steps"][2]["level"] = -1; }, "steps[2]: level"},
      {[](auto& j) { j["steps"][1]["ms"] = 0; }, "steps[1]: ms"},
      {[](auto& j) { j["steps"][1]["ms"] = 1e-308; }, "steps[1]: ms"},  // its inverse, a weight, is infinite
      {[](auto& j) { j["steps"][3]["prefill_tokens"] = INT32_MAX; }, "steps[3]: prefill_tokens"},
      {[](auto& j) { j["max_step_tokens"] = j["max_sequences"] = INT32_MAX; }, "max_step_tokens"},
      {[](auto& j) { j["steps"][1]["ms"] = nullptr; }, "steps[1]: ms"},
      {[](auto& j) { j["steps"][1]["samples"] = 0; }, "steps[1]: samples"},
      {[](auto& j) { j["steps"][1]["prefill_tokens"] = 1.5; }, "steps[1]: prefill_tokens"},
      {[](auto& j) { j["steps"][1]["prefill_tokens"] = 18446744073709551615ull; }, "steps[1]: prefill_tokens"},
      {[](auto& j) { j["steps"][1]["prefill_tokens"] = 4096; }, "steps[1]: has 4096 tokens"},
      {[](auto& j) { j["steps"][1]["prefill_context"] = 0; }, "steps[1]: this step has been given"},
      {[](auto& j) { j["steps"][2]["decode_context"] = 0; }, "steps[2]: decode_sequences"},
      {[](auto& j) { j["steps"][2]["decode_sequences"] = 0; }, "steps[2]: the step has no tokens"},
      {[](auto& j) { j["steps"][0] = 7; }, "steps[0]: must be an object"},
  };
  for (const Case& c : cases) {
    auto json = nlohmann::json::parse(to_json_text(example()));
    c.spoil(json);
    const auto read = parse_step_table(json.dump(), "t.json");
    ASSERT_FALSE(read.ok()) << c.named;
    EXPECT_EQ(read.error().code, ErrorCode::kInvalidInput);
    EXPECT_NE(read.error().message.find(c.named), std::string::npos) << read.error().message;
    EXPECT_TRUE(read.error().message.starts_with("t.json: ")) << read.error().message;
  }
  for (const char* text : {"", "[", "[]", "7", "{}"}) EXPECT_FALSE(parse_step_table(text, "t.json").ok()) << text;
  EXPECT_FALSE(parse_step_table(std::string(100'000, '['), "t.json").ok());
}

}  // namespace
}  // namespace nfp
