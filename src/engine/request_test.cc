#include "engine/request.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "engine/testing/allowed_tokens_of.h"

namespace nfp {
namespace {

const std::vector<int32_t> kPrompt = {1, 2, 3};
const RequestBounds kBounds = {.vocab = 10, .max_context = 8, .end_ids = {2}};

TEST(SamplingParams, DefaultsAreValid) { EXPECT_FALSE(validate(kPrompt, {}, kBounds)); }

TEST(SamplingParams, TopPMayBeZero) {
  SamplingParams params;
  params.top_p = 0.0f;
  EXPECT_FALSE(validate(kPrompt, params, kBounds));
}

TEST(Request, PromptAndAnswerFitIntoTheContext) {
  SamplingParams params;
  params.max_tokens = 5;
  EXPECT_FALSE(validate(kPrompt, params, kBounds));
  params.max_tokens = 6;
  auto bad = validate(kPrompt, params, kBounds);
  ASSERT_TRUE(bad);
  EXPECT_TRUE(bad->too_long);
  EXPECT_EQ(bad->field, "max_tokens");
  bad = validate(std::vector<int32_t>(8, 1), {}, kBounds);
  ASSERT_TRUE(bad);
  EXPECT_TRUE(bad->too_long);
  EXPECT_EQ(bad->field, "prompt");
  EXPECT_FALSE(validate(std::vector<int32_t>(8, 1), {}, kBounds, Pooling::kNone, /*prompt_only=*/true));
  bad = validate(std::vector<int32_t>(9, 1), {}, kBounds, Pooling::kNone, /*prompt_only=*/true);
  ASSERT_TRUE(bad);
  EXPECT_TRUE(bad->too_long);
  for (const std::vector<int32_t>& prompt : {std::vector<int32_t>{}, std::vector<int32_t>{1, 10}, {-1}}) {
    for (const bool prompt_only : {false, true}) {
      bad = validate(prompt, {}, kBounds, Pooling::kNone, prompt_only);
      ASSERT_TRUE(bad);
      EXPECT_FALSE(bad->too_long);
      EXPECT_EQ(bad->field, "prompt");
    }
  }
}

// The runner goes by a pooled request's fields as well: log-probabilities of its prompt have room for 128 tokens.
TEST(Request, ThatIsPooledHasItsFieldsChecked) {
  const RequestBounds bounds = {.vocab = 10, .max_context = 8, .hidden = 4};
  EXPECT_FALSE(validate(kPrompt, {}, bounds, Pooling::kMean));
  SamplingParams params;
  params.prompt_logprobs = 1000;
  const auto bad = validate(kPrompt, params, bounds, Pooling::kMean);
  ASSERT_TRUE(bad);
  EXPECT_EQ(bad->field, "prompt_logprobs");
}

TEST(SamplingParams, EachBadFieldIsNamed) {
  const struct {
    const char* field;
    void (*spoil)(SamplingParams&);
  } cases[] = {
      {"temperature", [](SamplingParams& p) { p.temperature = -0.1f; }},
      {"temperature", [](SamplingParams& p) { p.temperature = NAN; }},
      {"top_k", [](SamplingParams& p) { p.top_k = -1; }},
      {"top_p", [](SamplingParams& p) { p.top_p = -0.1f; }},
      {"top_p", [](SamplingParams& p) { p.top_p = 1.5f; }},
      {"min_p", [](SamplingParams& p) { p.min_p = NAN; }},
      {"repetition_penalty", [](SamplingParams& p) { p.repetition_penalty = 0.0f; }},
      {"presence_penalty", [](SamplingParams& p) { p.presence_penalty = 3.0f; }},
      {"frequency_penalty", [](SamplingParams& p) { p.frequency_penalty = NAN; }},
      {"max_tokens", [](SamplingParams& p) { p.max_tokens = 0; }},
      {"min_tokens", [](SamplingParams& p) { p.min_tokens = -1; }},
      {"min_tokens", [](SamplingParams& p) { p.max_tokens = 3, p.min_tokens = 4; }},
      {"top_logprobs", [](SamplingParams& p) { p.top_logprobs = 129; }},
      {"prompt_logprobs", [](SamplingParams& p) { p.prompt_logprobs = -1; }},
      {"logit_bias",
       [](SamplingParams& p) {
         p.logit_bias = {{10, 1.0f}};
       }},
      {"logit_bias",
       [](SamplingParams& p) {
         p.logit_bias = {{1, NAN}};
       }},
      {"logit_bias",
       [](SamplingParams& p) {
         p.logit_bias = {{1, INFINITY}};
       }},
      {"stop_token_ids", [](SamplingParams& p) { p.stop_token_ids = {-3}; }},
      {"allowed_token_ids",
       [](SamplingParams& p) {
         p.allowed = allowed_tokens_of(10, {3, 4}, {{3}, {4}});
       }},
      {"allowed_token_ids",
       [](SamplingParams& p) {
         p.allowed = allowed_tokens_of(10, {3});
         p.logit_bias = {{3, -INFINITY}};
       }},
      {"allowed_token_ids",
       [](SamplingParams& p) {
         p.allowed = allowed_tokens_of(10, {2, 3});
         p.stop_token_ids = {3};
         p.min_tokens = 1;
       }},
      {"bad_words",
       [](SamplingParams& p) {
         p.allowed = allowed_tokens_of(10, {}, {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}});
       }},
      {"stop", [](SamplingParams& p) { p.stop = {""}; }},
  };
  for (const auto& [field, spoil] : cases) {
    SamplingParams params;
    spoil(params);
    const auto bad = validate(kPrompt, params, kBounds);
    ASSERT_TRUE(bad) << field;
    EXPECT_EQ(bad->field, field);
    EXPECT_NE(bad->message.find(field), std::string::npos) << bad->message;
  }
}

TEST(SamplingParams, OneTokenThatMayComeIsEnough) {
  SamplingParams params;
  const std::vector<std::vector<int32_t>> words = {{4}, {3, 3}, {2, 3}};
  params.allowed = allowed_tokens_of(10, {2, 3, 3}, words);
  params.logit_bias = {{4, -INFINITY}, {3, -100.0f}};
  params.min_tokens = 1;
  EXPECT_FALSE(validate(kPrompt, params, kBounds));
  params.allowed = allowed_tokens_of(10, {2}, words);
  EXPECT_TRUE(validate(kPrompt, params, kBounds));
  params.ignore_eos = true;
  EXPECT_FALSE(validate(kPrompt, params, kBounds));
  params.ignore_eos = false;
  params.min_tokens = 0;
  EXPECT_FALSE(validate(kPrompt, params, kBounds));
}

TEST(SamplingParams, MessagesShowTheValueThatWasGiven) {
  SamplingParams params;
  params.temperature = -0.1f;
  EXPECT_NE(validate(kPrompt, params, kBounds)->message.find("is -0.1;"), std::string::npos);
}

TEST(SamplingParams, ABiasOfMinusInfinityForbidsAToken) {
  SamplingParams params;
  params.logit_bias = {{1, -INFINITY}};
  EXPECT_FALSE(validate(kPrompt, params, kBounds));
}

}  // namespace
}  // namespace nfp
