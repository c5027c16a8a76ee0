#include "runtime/sampling_defaults.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

TEST(SamplingDefaults, ReadsWhatIsThereAndLeavesTheRest) {
  const auto read = parse_sampling_defaults(
      R"({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": false, "eos_token_id": [1, 2]})", "f");
  ASSERT_TRUE(read.ok()) << read.error().message;
  SamplingParams params;
  params.min_p = 0.25f;
  read->apply(params);
  EXPECT_FLOAT_EQ(params.temperature, 0.6f);
  EXPECT_EQ(params.top_k, 20);
  EXPECT_FLOAT_EQ(params.top_p, 0.95f);
  EXPECT_FLOAT_EQ(params.min_p, 0.25f);
  EXPECT_FLOAT_EQ(params.repetition_penalty, 1.0f);
  EXPECT_EQ(read->text(), "temperature 0.6, top_k 20, top_p 0.95");
}

TEST(SamplingDefaults, ALengthHoldsWhereNoneIsAskedFor) {
  const auto read = parse_sampling_defaults(R"({"max_new_tokens": 2048, "max_length": 4096})", "f");
  ASSERT_TRUE(read.ok()) << read.error().message;
  SamplingParams params;
  read->apply(params);
  EXPECT_EQ(params.default_max_tokens, 2048);
  EXPECT_FALSE(params.max_tokens);
  EXPECT_FALSE(read->empty() || read->says_how_to_draw());
  EXPECT_EQ(read->json(), R"({"max_tokens":2048})");
}

TEST(SamplingDefaults, NullMeansAbsentAndMinusOneMeansOff) {
  const auto read = parse_sampling_defaults(R"({"temperature": null, "top_k": -1})", "f");
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_FALSE(read->temperature);
  EXPECT_EQ(read->top_k, 0);
  EXPECT_TRUE(parse_sampling_defaults("{}", "f")->empty());
}

TEST(SamplingDefaults, ErrorsNameFileAndField) {
  for (const char* text :
       {R"({"temperature": "hot"})", R"({"temperature": -1})", R"({"top_k": 1.5})", R"({"top_p": -0.1})",
        R"({"repetition_penalty": 0})", R"({"max_new_tokens": 0})", R"({"max_new_tokens": 1.5})",
        R"({"max_new_tokens": "all"})", R"({"max_new_tokens": 3000000000})", "[]", "{"}) {
    const auto read = parse_sampling_defaults(text, "the-file");
    ASSERT_FALSE(read.ok()) << text;
    EXPECT_NE(read.error().message.find("the-file"), std::string::npos) << read.error().message;
  }
  EXPECT_NE(parse_sampling_defaults(R"({"min_p": 2})", "f").error().message.find("min_p"), std::string::npos);
}

}  // namespace
}  // namespace nfp
