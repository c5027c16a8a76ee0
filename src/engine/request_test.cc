#include "engine/request.h"

#include <gtest/gtest.h>

#include <cmath>

namespace nfp {
namespace {

TEST(SamplingParams, DefaultsAreValid) { EXPECT_TRUE(validate({}, 10).ok()); }

TEST(SamplingParams, EachBadFieldIsNamed) {
  const struct {
    const char* field;
    void (*spoil)(SamplingParams&);
  } cases[] = {
      {"temperature", [](SamplingParams& p) { p.temperature = -0.1f; }},
      {"temperature", [](SamplingParams& p) { p.temperature = NAN; }},
      {"top_k", [](SamplingParams& p) { p.top_k = -1; }},
      {"top_p", [](SamplingParams& p) { p.top_p = 0.0f; }},
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
      {"stop_token_ids", [](SamplingParams& p) { p.stop_token_ids = {-3}; }},
      {"stop", [](SamplingParams& p) { p.stop = {""}; }},
  };
  for (const auto& [field, spoil] : cases) {
    SamplingParams params;
    spoil(params);
    const Status status = validate(params, 10);
    ASSERT_FALSE(status.ok()) << field;
    EXPECT_NE(status.error().message.find(field), std::string::npos) << status.error().message;
  }
}

}  // namespace
}  // namespace nfp
