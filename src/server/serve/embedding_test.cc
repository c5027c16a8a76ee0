#include "server/serve/embedding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace nfp::server {
namespace {

std::string base64(const std::vector<float>& values) {
  std::string out;
  append_base64(out, values);
  return out;
}

// Python: base64.b64encode(struct.pack("<3f", 1, -2.5, 1e-40))
TEST(Embedding, Base64IsOfLittleEndianFloats) {
  EXPECT_EQ(base64({}), "");
  EXPECT_EQ(base64({1.0f}), "AACAPw==");
  EXPECT_EQ(base64({1.0f, -2.5f}), "AACAPwAAIMA=");
  EXPECT_EQ(base64({1.0f, -2.5f, 1e-40f}), "AACAPwAAIMDCFgEA");
}

TEST(Embedding, IsCutAndThenNormalised) {
  std::vector<float> values = {3, 4, 12};
  finish_embedding(values, 2, true);
  EXPECT_EQ(values, (std::vector<float>{0.6f, 0.8f}));
  values = {3, 4, 12};
  finish_embedding(values, 9, false);
  EXPECT_EQ(values, (std::vector<float>{3, 4, 12}));
  values = {0, 0};
  finish_embedding(values, 2, true);
  EXPECT_EQ(values, (std::vector<float>{0, 0}));
  values.assign(3, 3e38f);  // whose squares are beyond FP32
  finish_embedding(values, 3, true);
  for (const float value : values) EXPECT_FLOAT_EQ(value, 1 / std::sqrt(3.0f));
}

MaybeError parse(const char* text, EmbeddingRequest* out) { return parse_embedding(Json::parse(text), {}, out); }

TEST(EmbeddingRequest, TakesAllFormsOfInput) {
  for (const auto& [text, inputs] : {std::pair{R"({"input": "a"})", 1u},
                                     {R"({"input": ["a", "b"]})", 2u},
                                     {R"({"input": [1, 2, 3]})", 1u},
                                     {R"({"input": [[1], [2, 3], [4]]})", 3u},
                                     {R"({"messages": [{"role": "user", "content": "x"}]})", 0u}}) {
    EmbeddingRequest request;
    const auto failure = parse(text, &request);
    ASSERT_FALSE(failure) << failure->message;
    EXPECT_EQ(request.common.prompts.size(), inputs) << text;
    EXPECT_EQ(request.common.chat, inputs == 0);
    EXPECT_EQ(request.common.add_special_tokens, inputs != 0);
    EXPECT_TRUE(request.normalize);
    EXPECT_FALSE(request.pooling || request.dimensions || request.base64);
  }
}

TEST(EmbeddingRequest, NamesWhatIsWrong) {
  for (const auto& [text, param] : {std::pair{R"({})", "input"},
                                    {R"({"input": []})", "input"},
                                    {R"({"input": [1, "a"]})", "input"},
                                    {R"({"input": ["a", 1]})", "input"},
                                    {R"({"input": {}})", "input"},
                                    {R"({"input": "a", "messages": []})", "input"},
                                    {R"({"messages": []})", "messages"},
                                    {R"({"input": "a", "encoding_format": "bytes"})", "encoding_format"},
                                    {R"({"input": "a", "dimensions": 0})", "dimensions"},
                                    {R"({"input": "a", "pooling": "max"})", "pooling"},
                                    {R"({"input": "a", "normalize": 1})", "normalize"},
                                    {R"({"input": "a", "truncate_prompt_tokens": -2})", "truncate_prompt_tokens"},
                                    {R"({"input": "a", "embed_dtype": "float16"})", "embed_dtype"},
                                    {R"({"input": "a", "endianness": "big"})", "endianness"},
                                    {R"({"input": "a", "precision": "fp8"})", "precision"}}) {
    EmbeddingRequest request;
    const auto failure = parse(text, &request);
    ASSERT_TRUE(failure) << text;
    EXPECT_EQ(failure->status, 400);
    EXPECT_EQ(failure->param, param) << text;
  }
}

}  // namespace
}  // namespace nfp::server
