#include "server/serve/answer_writer.h"

#include <gtest/gtest.h>

#include "policy/policy.h"
#include "server/serve/response_writer.h"
#include "server/testing/fake_runner.h"

namespace nfp::server {
namespace {

// SentencePiece's: a byte's token may have the text of another one.
Result<std::shared_ptr<const Tokenizer>> make_tokenizer() {
  std::vector<std::string> texts = {"<unk>", "<s>", "</s>", "a", "ab"};
  std::vector<int32_t> types = {2, 3, 3, 1, 1};
  for (int byte = 0; byte < 256; ++byte) {
    texts.push_back(fmt::format("<0x{:02X}>", byte));
    types.push_back(6);
  }
  const std::vector<std::string_view> tokens(texts.begin(), texts.end());
  const std::vector<float> scores(tokens.size(), 0);
  GgufVocab vocab;
  vocab.model = "llama";
  vocab.tokens = tokens;
  vocab.types = types;
  vocab.scores = scores;
  vocab.bos = 1;
  vocab.eos = 2;
  vocab.unknown = 0;
  return Tokenizer::from_gguf(vocab, "the tokenizer");
}

TEST(AnswerWriter, TokensOfTheSameTextAreToldApart) {
  constexpr int32_t kLetter = 3, kLetters = 4, kByte = 5 + 'a';
  const auto tokenizer = make_tokenizer();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
  FakeRunner runner({});
  EngineConfig config;
  config.kv_blocks = 8;
  const Engine engine(config, &runner, *tokenizer, std::move(*parse_policy("fp16")));
  ServedModel::Facts facts;
  facts.names = {"m"};
  facts.tokenizer = *tokenizer;
  const auto model = ServedModel::create(std::move(facts), engine);
  ASSERT_TRUE(model.ok()) << model.error().message;

  GenerationRequest request;
  request.top_logprobs = 3;
  const auto tops = [&](int32_t chosen, float logprob, std::vector<TokenLogprob> top) {
    OutputToken token;
    token.token = chosen;
    token.logprob = logprob;
    token.top = std::move(top);
    LogprobLists lists;
    ResponseWriter(&request, &*model, "x", 0).add_logprobs({&token, 1}, std::nullopt, &lists);
    return lists.tokens + " " + lists.tops;
  };
  const std::vector<TokenLogprob> top = {{kByte, -0.5f}, {kLetter, -1.0f}, {kLetters, -2.0f}};
  EXPECT_EQ(tops(kByte, -0.5f, top), R"("a" {"a":-0.5,"token_id:3":-1,"ab":-2})");
  EXPECT_EQ(tops(kLetter, -1.0f, top), R"("a" {"token_id:102":-0.5,"a":-1,"ab":-2})");
  EXPECT_EQ(tops(kLetters, -2.0f, top), R"("ab" {"a":-0.5,"token_id:3":-1,"ab":-2})");
  // One that is not among the likeliest.
  EXPECT_EQ(tops(kLetter, -4.0f, {{kByte, -0.5f}, {kLetters, -2.0f}}), R"("a" {"token_id:102":-0.5,"ab":-2,"a":-4})");
  request.tokens_as_ids = true;
  EXPECT_EQ(tops(kLetter, -1.0f, top), R"("token_id:3" {"token_id:102":-0.5,"token_id:3":-1,"token_id:4":-2})");
}

}  // namespace
}  // namespace nfp::server
