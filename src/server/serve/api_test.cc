// Endpoints over an engine with the fake model, without sockets.
#include "server/serve/api.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <regex>
#include <stdexcept>

#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"
#include "server/serve/service.h"
#include "server/testing/byte_tokenizer.h"
#include "server/testing/fake_runner.h"

namespace nfp::server {
namespace {

// Posted functions run on the thread that waits.
class FakeExchange final : public http::Exchange {
 public:
  void respond(http::Response response) override {
    if (gone || ended) return;
    head = std::move(response);
    ended = true;
  }
  void start(http::Response response) override { head = std::move(response); }
  void write(std::string_view piece) override { head.body += piece; }
  void finish() override { ended = true; }
  void hold(http::ByteLease lease) override { held = std::move(lease); }
  void on_abort(std::function<void()> callback) override { abort_callback = std::move(callback); }
  bool aborted() const override { return gone; }
  void post(std::function<void()> fn) override {
    {
      const std::lock_guard lock(mutex);
      posted.push_back(std::move(fn));
    }
    wake.notify_one();
  }
  // Runs what is posted until the answer has ended; false after ten seconds.
  bool wait(const std::function<bool()>& until) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!until()) {
      std::vector<std::function<void()>> batch;
      {
        std::unique_lock lock(mutex);
        if (!wake.wait_until(lock, end, [this] { return !posted.empty(); })) return false;
        batch.swap(posted);
      }
      for (auto& fn : batch) fn();
    }
    return true;
  }

  http::Response head;
  bool ended = false;
  bool gone = false;
  http::ByteLease held;  // as nobody takes the answer
  std::function<void()> abort_callback;
  std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::function<void()>> posted;
};

class ApiTest : public ::testing::Test {
 protected:
  void start(ApiOptions api_options = {}, int32_t max_queue = 64, FakeRunner::Options runner_options = {},
             int32_t kv_blocks = 512) {
    auto tokenizer = make_byte_tokenizer();
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.error().message;
    runner_ = std::make_unique<FakeRunner>(runner_options);
    EngineConfig options;
    options.limits.max_sequences = 4;
    options.limits.max_queue = max_queue;
    options.kv_blocks = kv_blocks;
    options.end_ids = {kByteEnd};
    options.speculative_tokens = runner_options.drafts;
    options.speculative_always = true;
    if (!policy_) policy_ = std::move(*parse_policy("threshold:1024"));
    auto engine = std::make_unique<Engine>(options, runner_.get(), *tokenizer, std::move(policy_));
    ServedModel::Facts facts;
    facts.names = names_;
    facts.root = "m";
    facts.tokenizer = *tokenizer;
    facts.chat_template = chat_template_;
    api_ = std::make_unique<Api>(std::move(api_options));
    auto model = ServedModel::create(std::move(facts), *engine);
    ASSERT_TRUE(model.ok()) << model.error().message;
    state_ = std::make_unique<ServerState>(std::move(*model));
    engine->set_observer(&metrics_);
    engine_ = std::make_unique<EngineThread>(std::move(engine));
    state_->engine = engine_.get();
    state_->metrics = &metrics_;
    state_->grammars = make_grammar_compiler(*tokenizer, kByteVocab, state_->model.end_ids(), nullptr, grammar_limits_);
    workers_ = std::make_unique<WorkPool>(1, 16);
    grammar_workers_ = std::make_unique<WorkPool>(2, 16);
    state_->workers = workers_.get();
    state_->grammar_workers = grammar_workers_.get();
    state_->tool_format = ToolFormat::kHermes;
    state_->log_requests = false;
    api_->set_ready(state_.get());
  }
  void TearDown() override {
    workers_.reset();
    grammar_workers_.reset();
    engine_.reset();
    // What was posted and never waited for keeps its request alive, and that the exchange.
    for (const auto& exchange : exchanges_) exchange->posted.clear();
  }

  std::shared_ptr<FakeExchange> send(std::string method, std::string path, std::string body = "",
                                     std::vector<http::Header> headers = {}) {
    auto exchange = exchanges_.emplace_back(std::make_shared<FakeExchange>());
    http::Request request;
    request.method = std::move(method);
    request.path = std::move(path);
    request.headers = std::move(headers);
    request.headers.push_back({"Content-Type", "application/json"});
    if (auto refusal = api_->check_head(request)) {
      exchange->respond(std::move(*refusal));
      return exchange;
    }
    request.body = std::move(body);
    request.lease = http::ByteLease(budget_);
    EXPECT_TRUE(request.lease.resize(request.body.size()));
    api_->handle(std::move(request), exchange);
    return exchange;
  }
  // The answer's JSON. Another status ends the test: what follows looks into a body of this one.
  Json ask(std::string path, std::string body, int status = 200, std::vector<http::Header> headers = {}) {
    const char* method = body.empty() ? "GET" : "POST";
    auto exchange = send(method, std::move(path), std::move(body), std::move(headers));
    if (!exchange->wait([&] { return exchange->ended; })) throw std::runtime_error("no answer");
    auto json = parse_json(exchange->head.body);
    if (exchange->head.status != status || !json.ok()) {
      throw std::runtime_error(fmt::format("{}, not {}: {}", exchange->head.status, status, exchange->head.body));
    }
    return std::move(*json);
  }
  // The data of each event of a stream, "[DONE]" left out but asserted. An error ends the test.
  std::vector<Json> stream(std::string path, std::string body) {
    auto exchange = send("POST", std::move(path), std::move(body));
    if (!exchange->wait([&] { return exchange->ended; })) throw std::runtime_error("no answer");
    std::vector<Json> events;
    std::string_view rest = exchange->head.body;
    if (exchange->head.status != 200 || rest.find("data: {\"error\"") != std::string_view::npos ||
        !rest.ends_with("data: [DONE]\n\n")) {
      throw std::runtime_error(fmt::format("{}: {}", exchange->head.status, rest));
    }
    for (size_t end; (end = rest.find("\n\n")) != std::string_view::npos; rest.remove_prefix(end + 2)) {
      const std::string_view event = rest.substr(0, end);
      EXPECT_TRUE(event.starts_with("data: "));
      if (event != "data: [DONE]") events.push_back(Json::parse(event.substr(6)));
    }
    return events;
  }

  // Likewise of an API whose streams have typed events and no "[DONE]".
  std::vector<Json> typed_stream(std::string path, std::string body) {
    const auto exchange = send("POST", std::move(path), std::move(body));
    if (!exchange->wait([&] { return exchange->ended; })) throw std::runtime_error("no answer");
    std::vector<Json> events;
    std::string_view rest = exchange->head.body;
    for (size_t end; (end = rest.find("\n\n")) != std::string_view::npos; rest.remove_prefix(end + 2)) {
      const std::string_view event = rest.substr(0, end);
      events.push_back(Json::parse(event.substr(event.find("data: ") + 6)));
    }
    return events;
  }

  std::unique_ptr<PrecisionPolicy> policy_;  // of the next start(); null: one that refuses nothing
  std::string chat_template_ = kChatMlTemplate;
  std::vector<std::string> names_ = {"m", "org/m"};
  GrammarLimits grammar_limits_;
  std::shared_ptr<http::ByteBudget> budget_;  // of all requests; none: whatever they want
  std::vector<std::shared_ptr<FakeExchange>> exchanges_;
  Metrics metrics_;
  std::unique_ptr<FakeRunner> runner_;
  std::unique_ptr<ServerState> state_;
  std::unique_ptr<WorkPool> workers_;
  std::unique_ptr<WorkPool> grammar_workers_;
  std::unique_ptr<EngineThread> engine_;
  std::unique_ptr<Api> api_;
};

TEST_F(ApiTest, CompletesText) {
  start();
  const Json r = ask("/v1/completions", R"({"model":"m","prompt":["SAY:one","SAY:two"],"max_tokens":10})");
  EXPECT_EQ(r["choices"][0]["text"], "one");
  EXPECT_EQ(r["choices"][1]["text"], "two");
  EXPECT_EQ(r["choices"][1]["index"], 1);
  EXPECT_EQ(r["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(r["usage"]["prompt_tokens"], 14);
  EXPECT_EQ(r["usage"]["completion_tokens"], 8);  // three letters and the end, twice
  EXPECT_EQ(r["usage"]["nestedfp"]["completion"]["fp16_tokens"], 8);
}

TEST_F(ApiTest, EchoAndLogprobsLineUp) {
  start();
  const Json r =
      ask("/v1/completions", R"({"prompt":"SAY:hé","echo":true,"logprobs":2,"max_tokens":9,"prompt_logprobs":1})");
  const Json& choice = r["choices"][0];
  EXPECT_EQ(choice["text"], "SAY:héhé");
  const Json& lists = choice["logprobs"];
  const size_t count = lists["tokens"].size();
  EXPECT_EQ(count, 7u + 4u);
  for (const char* list : {"token_logprobs", "top_logprobs", "text_offset"}) EXPECT_EQ(lists[list].size(), count);
  EXPECT_TRUE(lists["token_logprobs"][0].is_null());
  EXPECT_EQ(lists["tokens"][5], "bytes:\\xc3");
  EXPECT_EQ(lists["text_offset"][7], 6);  // SAY:hé are six characters
  EXPECT_EQ(choice["prompt_logprobs"].size(), 7u);
  EXPECT_TRUE(choice["prompt_logprobs"][0].is_null());
}

TEST_F(ApiTest, APromptIsScoredOnceForItsChoices) {
  start();
  const std::string prompts = "[\"" + std::string(100, 'p') + "\",\"" + std::string(50, 'q') + "\"]";
  for (const char* more : {R"("n":3)", R"("n":2,"best_of":3)"}) {
    const Json r = ask("/v1/completions",
                       R"({"prompt":)" + prompts + R"(,"max_tokens":2,"prompt_logprobs":1,)" + std::string(more) + "}");
    const size_t n = r["choices"].size() / 2;
    for (size_t i = 0; i < 2 * n; ++i) {
      const Json& scores = r["choices"][i]["prompt_logprobs"];
      EXPECT_EQ(scores.size(), i < n ? 100u : 50u);
      EXPECT_EQ(scores, r["choices"][i < n ? 0 : n]["prompt_logprobs"]);
    }
  }
  // Whoever scores a prompt computes all of it; the other two have its whole blocks from the cache.
  const std::string metrics = send("GET", "/metrics")->head.body;
  const size_t cached = metrics.find("\nvllm:prompt_tokens_cached_total");
  ASSERT_NE(cached, std::string::npos);
  EXPECT_EQ(metrics.substr(metrics.find("} ", cached) + 2, 4), std::to_string(2 * 2 * (96 + 48)) + "\n");
  // Chat shows them once.
  const Json chat = ask("/v1/chat/completions",
                        R"({"messages":[{"role":"user","content":"a"}],"max_tokens":2,"prompt_logprobs":1,"n":2})");
  EXPECT_EQ(chat["prompt_logprobs"].size(), chat["usage"]["prompt_tokens"].get<size_t>());
}

TEST_F(ApiTest, AnEchoIsScoredOnceForItsChoices) {
  start();
  for (const int tokens : {2, 0}) {
    const auto answer = [&](int n) {
      return ask("/v1/completions",
                 fmt::format(R"({{"prompt":["{}","\u00e4b"],"max_tokens":{},"echo":true,"logprobs":1,)"
                             R"("temperature":0,"n":{}}})",
                             std::string(100, 'p'), tokens, n));
    };
    const Json one = answer(1), three = answer(3);
    ASSERT_EQ(three["choices"].size(), 6u);
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(three["choices"][i]["logprobs"], one["choices"][i / 3]["logprobs"]);
      EXPECT_EQ(three["choices"][i]["text"], one["choices"][i / 3]["text"]);
    }
    EXPECT_EQ(one["choices"][0]["logprobs"]["text_offset"].size(), 100u + static_cast<size_t>(tokens));
  }
  const std::string metrics = send("GET", "/metrics")->head.body;
  const size_t cached = metrics.find("\nvllm:prompt_tokens_cached_total");
  ASSERT_NE(cached, std::string::npos);
  EXPECT_EQ(metrics.substr(metrics.find("} ", cached) + 2, 4), std::to_string(2 * 2 * 96) + "\n");
}

TEST_F(ApiTest, EachChoicesPromptAndStopStringsCountAsWhatRequestsHold) {
  start({}, /*max_queue=*/1024);
  for (const auto& [choices, status] : {std::pair(8, 200), {16, 429}}) {
    for (const auto& [prompt, stop] : {std::pair(1000, 1), {1, 800}}) {
      budget_ = std::make_shared<http::ByteBudget>(100'000);
      ask("/v1/completions",
          fmt::format(R"({{"prompt":"{}","max_tokens":1,"stop":"{}","n":{}}})", std::string(prompt, 'p'),
                      std::string(stop, 's'), choices),
          status);
    }
  }
}

TEST_F(ApiTest, BoundsTheMemoryOfLogProbabilities) {
  start({}, /*max_queue=*/1024);
  const auto request = [](int n, std::string_view more) {
    return fmt::format(R"({{"prompt":"{}","max_tokens":2,"n":{}{}}})", std::string(200, 'p'), n, more);
  };
  // What is refused holds its bytes until the engine has given its choices up.
  const auto ask_alone = [&](const std::string& body, int status) {
    budget_ = std::make_shared<http::ByteBudget>(200'000);
    return ask("/v1/completions", body, status);
  };
  for (const char* more : {R"(,"echo":true,"logprobs":3)", R"(,"prompt_logprobs":1)"}) {
    EXPECT_EQ(ask_alone(request(1, more), 200)["choices"].size(), 1u);
    const Json refused = ask_alone(request(60, more), 429);
    EXPECT_NE(refused["error"]["message"].get<std::string>().find("log-probabilities"), std::string::npos);
    EXPECT_EQ(ask_alone(request(60, ""), 200)["choices"].size(), 60u);
  }
  const Json refused = ask_alone(R"({"prompt":"a","max_tokens":400,"n":20,"logprobs":5,"ignore_eos":true})", 429);
  EXPECT_NE(refused["error"]["message"].get<std::string>().find("log-probabilities"), std::string::npos);
  // The end of a response's stream tells all of it once more.
  for (const auto& [budget, last] :
       {std::pair(200'000, "response.failed"), std::pair(2'000'000, "response.incomplete")}) {
    budget_ = std::make_shared<http::ByteBudget>(budget);
    const auto events = typed_stream(
        "/v1/responses",
        R"({"input":"a","max_output_tokens":400,"top_logprobs":5,"include":["message.output_text.logprobs"],)"
        R"("ignore_eos":true,"stream":true})");
    EXPECT_EQ(events.back()["type"], last);
  }
  TearDown();
  exchanges_.clear();
  EXPECT_EQ(budget_->used(), 0u);
}

TEST_F(ApiTest, OffsetsAreThoseOfTheText) {
  start();
  // Special tokens that are left out add nothing to it.
  Json r = ask("/v1/completions", R"({"prompt":"SAY:hi","logprobs":0,"max_tokens":4,"ignore_eos":true})");
  EXPECT_EQ(r["choices"][0]["text"], "hi");
  EXPECT_EQ(r["choices"][0]["logprobs"]["text_offset"], Json({0, 1, 2, 2}));
  r = ask("/v1/completions",
          R"({"prompt":"SAY:hi","logprobs":0,"max_tokens":4,"ignore_eos":true,"skip_special_tokens":false})");
  EXPECT_EQ(r["choices"][0]["text"], "hi<|im_end|><|im_end|>");
  EXPECT_EQ(r["choices"][0]["logprobs"]["text_offset"], Json({0, 1, 2, 12}));
  // An answer begins where the echo ends, whatever the prompt's tokens look like there.
  r = ask("/v1/completions", R"({"prompt":[128,97],"echo":true,"logprobs":0,"max_tokens":1})");
  EXPECT_EQ(r["choices"][0]["text"],
            "\xEF\xBF\xBD"
            "aa");
  EXPECT_EQ(r["choices"][0]["logprobs"]["text_offset"][2], 2);
  // A character counts at its first byte; bytes that are none count as the characters that stand for them.
  for (const char* form : {"", R"(,"stream":true)"}) {
    for (const auto& [prompt, echo] : {std::pair(R"([83,65,89,58,195,169,97,195,97,169,128,98])", false),
                                       {R"([195,169,97,195,97,169,128,98])", true}}) {
      const std::string body =
          fmt::format(R"({{"prompt":{},"echo":{},"logprobs":0,"max_tokens":{}{}}})", prompt, echo, echo ? 1 : 9, form);
      Json offsets = Json::array();
      if (*form == '\0') {
        offsets = ask("/v1/completions", body)["choices"][0]["logprobs"]["text_offset"];
      } else {
        for (const Json& event : stream("/v1/completions", body)) {
          const Json& scores = event["choices"][0]["logprobs"];
          if (scores.is_object())
            offsets.insert(offsets.end(), scores["text_offset"].begin(), scores["text_offset"].end());
        }
      }
      // In both "\u00e9a\ufffda\ufffd\ufffdb" and one token more.
      EXPECT_EQ(offsets, Json({0, 1, 1, 2, 3, 4, 5, 6, 7})) << body;
    }
  }
}

// Nothing comes before a prompt's only token, alone and beside longer prompts.
TEST_F(ApiTest, APromptOfOneTokenHasItsEntryInEveryList) {
  start();
  for (const char* prompts : {R"(["a"])", R"(["a","abc","b"])", R"(["abc","a"])"}) {
    for (const int generated : {0, 1, 2}) {
      const Json r = ask("/v1/completions", fmt::format(R"({{"prompt":{},"echo":true,"logprobs":1,"max_tokens":{}}})",
                                                        prompts, generated));
      for (const Json& choice : r["choices"]) {
        const size_t count = choice["text"].get<std::string>().size();  // a byte is a token
        EXPECT_GE(count, 1u + static_cast<size_t>(generated));
        for (const char* list : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
          EXPECT_EQ(choice["logprobs"][list].size(), count) << prompts << " " << generated << " " << list;
        }
        EXPECT_TRUE(choice["logprobs"]["token_logprobs"][0].is_null());
      }
    }
  }
}

TEST_F(ApiTest, MaxTokensZeroScoresThePrompt) {
  start();
  const Json r = ask("/v1/completions", R"({"prompt":"abc","echo":true,"logprobs":0,"max_tokens":0})");
  EXPECT_EQ(r["choices"][0]["text"], "abc");
  EXPECT_EQ(r["choices"][0]["logprobs"]["tokens"].size(), 3u);
  EXPECT_EQ(r["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(r["usage"]["completion_tokens"], 0);
  for (const Json& event :
       stream("/v1/completions", R"({"prompt":"abc","max_tokens":0,"stream":true,)"
                                 R"("stream_options":{"include_usage":true,"continuous_usage_stats":true}})")) {
    EXPECT_EQ(event.value("/usage/completion_tokens"_json_pointer, 0), 0) << dump(event);
    EXPECT_EQ(event.value("/nestedfp/completion/fp16_tokens"_json_pointer, 0), 0) << dump(event);
  }
  // The token that the engine gave ends nothing.
  const Json ended = ask("/v1/completions", R"({"prompt":"abc","stop":"a","stop_token_ids":[97],"max_tokens":0})");
  EXPECT_EQ(ended["choices"][0]["finish_reason"], "length");
  EXPECT_TRUE(ended["choices"][0]["stop_reason"].is_null());
  // The prompt may fill the context.
  const auto scored = [](int tokens) {
    return fmt::format(R"({{"prompt":"{}","echo":true,"logprobs":0,"max_tokens":0}})", std::string(tokens, 'a'));
  };
  const Json full = ask("/v1/completions", scored(4096));
  EXPECT_EQ(full["choices"][0]["logprobs"]["tokens"].size(), 4096u);
  const Json more = ask("/v1/completions", scored(4097), 400)["error"];
  EXPECT_EQ(more["code"], "context_length_exceeded");
  EXPECT_NE(more["message"].get<std::string>().find("4097 tokens (4097 in the prompt, 0 in the completion)"),
            std::string::npos);
}

TEST_F(ApiTest, EveryChunkSaysTheUsageWhereThatIsAskedFor) {
  start();
  state_->reasoning_format = ReasoningFormat::kThink;
  const std::string body =
      R"({"stream":true,"stream_options":{"continuous_usage_stats":true},"tools":[{"type":"function","function":{)"
      R"("name":"f"}}],"messages":[{"role":"user","content":"SAY:<think>Hm</think>Yes <tool_call>{\"name\":\"f\",)"
      R"(\"arguments\":{\"a\":1}}</tool_call>"}]})";
  int64_t last = 0;
  const auto events = stream("/v1/chat/completions", body);
  EXPECT_EQ(events[0]["choices"][0]["delta"]["role"], "assistant");
  EXPECT_EQ(events[0]["usage"]["completion_tokens"], 0);
  EXPECT_GT(events[1]["usage"]["completion_tokens"], 0);
  for (const Json& event : events) {
    ASSERT_TRUE(event.contains("usage")) << dump(event);
    EXPECT_GE(event["usage"]["completion_tokens"].get<int64_t>(), last);
    last = event["usage"]["completion_tokens"].get<int64_t>();
  }
  EXPECT_GT(last, 0);
}

TEST_F(ApiTest, Chats) {
  start();
  const Json r = ask("/v1/chat/completions",
                     R"({"messages":[{"role":"user","content":"SAY:hello"}],"logprobs":true,"top_logprobs":2})");
  EXPECT_EQ(r["object"], "chat.completion");
  EXPECT_EQ(r["choices"][0]["message"]["content"], "hello");
  EXPECT_EQ(r["choices"][0]["logprobs"]["content"][0]["token"], "h");
  EXPECT_EQ(r["choices"][0]["logprobs"]["content"][0]["bytes"], Json({104}));
  EXPECT_EQ(r["choices"][0]["logprobs"]["content"][0]["top_logprobs"].size(), 2u);
}

TEST_F(ApiTest, StreamsAChat) {
  start();
  const auto events =
      stream("/v1/chat/completions", R"({"messages":[{"role":"user","content":"SAY:hey"}],"stream":true,)"
                                     R"("n":2,"stream_options":{"include_usage":true,"continuous_usage_stats":true}})");
  // Clients append a choice when its first event comes, whatever its index.
  for (int i = 0; i < 2; ++i) {
    const Json& event = events[static_cast<size_t>(i)];
    EXPECT_EQ(event["choices"][0]["index"], i);
    EXPECT_EQ(event["choices"][0]["delta"]["role"], "assistant");
    EXPECT_EQ(event["usage"]["prompt_tokens"], events.back()["usage"]["prompt_tokens"]);
    EXPECT_EQ(event["usage"]["completion_tokens"], 0);
  }
  std::string text[2];
  int finished = 0;
  for (const Json& event : events) {
    for (const Json& choice : event["choices"]) {
      text[choice["index"].get<size_t>()] += choice["delta"].value("content", "");
      if (!choice["finish_reason"].is_null()) {
        ++finished;
        EXPECT_EQ(event["nestedfp"]["completion"]["fp16_tokens"], 4);
      }
    }
  }
  EXPECT_EQ(text[0], "hey");
  EXPECT_EQ(text[1], "hey");
  EXPECT_EQ(finished, 2);
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_EQ(events.back()["usage"]["completion_tokens"], 8);
}

TEST_F(ApiTest, CallsTools) {
  start();
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}])";
  const std::string messages =
      R"("messages":[{"role":"user","content":"SAY:ok<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":1}}</tool_call>"}])";
  const Json r = ask("/v1/chat/completions", "{" + tools + "," + messages + "}");
  EXPECT_EQ(r["choices"][0]["finish_reason"], "tool_calls");
  EXPECT_EQ(r["choices"][0]["message"]["content"], "ok");
  EXPECT_EQ(r["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], "{\"x\":1}");

  std::string name, arguments;
  const std::string streamed = "{" + tools + "," + messages + R"(,"stream":true})";
  for (const Json& event : stream("/v1/chat/completions", streamed)) {
    for (const Json& choice : event["choices"]) {
      if (!choice["delta"].contains("tool_calls")) continue;
      const Json& function = choice["delta"]["tool_calls"][0]["function"];
      name += function.value("name", "");
      arguments += function.value("arguments", "");
    }
  }
  EXPECT_EQ(name, "f");
  EXPECT_EQ(arguments, "{\"x\":1}");
}

TEST_F(ApiTest, ForcesAToolCallThroughAGrammar) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  start();
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}}}])";
  for (const char* choice : {R"("required")", R"({"type":"function","function":{"name":"f"}})"}) {
    const Json r = ask(
        "/v1/chat/completions",
        "{" + tools + R"(,"messages":[{"role":"user","content":"hi"}],"max_tokens":99,"tool_choice":)" + choice + "}");
    const Json& calls = r["choices"][0]["message"]["tool_calls"];
    ASSERT_EQ(calls.size(), 1u) << dump(r);
    EXPECT_EQ(calls[0]["function"]["name"], "f");
    EXPECT_TRUE(Json::parse(calls[0]["function"]["arguments"].get<std::string>())["n"].is_number_integer());
  }
}

// What refers to its own root, as Pydantic's nested models do, and what says nothing of its type.
TEST_F(ApiTest, ForcesCallsOfAnySchema) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  start();
  const std::string nested =
      R"({"type":"object","properties":{"who":{"$ref":"#/$defs/P"}},"required":["who"],"additionalProperties":false,)"
      R"("$defs":{"P":{"type":"object","properties":{"$ref":{"type":"integer"}},"required":["$ref"],"additionalProperties":false}}})";
  for (const std::string& parameters : {nested, std::string("{}"), std::string(R"({"type":["object","null"]})")}) {
    for (const char* choice : {R"("required")", R"({"type":"function","function":{"name":"f"}})"}) {
      const Json r =
          ask("/v1/chat/completions",
              R"({"messages":[{"role":"user","content":"hi"}],"max_tokens":99,"tool_choice":)" + std::string(choice) +
                  R"(,"tools":[{"type":"function","function":{"name":"other","parameters":{"$defs":{"P":)"
                  R"({"type":"string"}},"type":"object"}}},{"type":"function","function":{"name":"f","parameters":)" +
                  parameters + "}}]}");
      const Json& calls = r["choices"][0]["message"]["tool_calls"];
      ASSERT_GE(calls.size(), 1u) << dump(r);
      const Json arguments = Json::parse(calls[0]["function"]["arguments"].get<std::string>());
      EXPECT_TRUE(arguments.is_object()) << dump(r);
      if (calls[0]["function"]["name"] == "f" && parameters == nested) {
        EXPECT_TRUE(arguments["who"]["$ref"].is_number_integer()) << dump(r);
      }
    }
  }
}

TEST_F(ApiTest, ContinuesTheLastMessage) {
  start();
  for (const char* content : {"<", "end", "im", "|", "Answer: ", "a\n"}) {
    const Json made =
        ask("/tokenize",
            dump({{"messages", {{{"role", "user"}, {"content", "hi"}}, {{"role", "assistant"}, {"content", content}}}},
                  {"add_generation_prompt", false},
                  {"continue_final_message", true}}));
    const Json text = ask("/detokenize", dump({{"tokens", made["tokens"]}}));
    const std::string prompt = text["prompt"].get<std::string>();
    EXPECT_TRUE(prompt.ends_with("assistant\n" + std::string(content))) << prompt;
  }
  for (const char* path : {"/tokenize", "/v1/chat/completions", "/v1/embeddings"}) {
    const Json refused = ask(
        path,
        R"({"messages":[{"role":"user","content":"a"}],"add_generation_prompt":true,"continue_final_message":true})",
        400);
    EXPECT_EQ(refused["error"]["param"], "continue_final_message") << path;
  }
}

// A refusal of a stream that waits has its status.
TEST_F(ApiTest, AStreamsHeadWaitsWhereRequestsAreRefusedLate) {
  start();
  state_->refuses_late = true;
  const auto exchange = send("POST", "/v1/completions", R"({"prompt":"SAY:x","stream":true})");
  EXPECT_EQ(exchange->head.content_type, http::Response{}.content_type);
  ASSERT_TRUE(exchange->wait([&] { return exchange->ended; }));
  EXPECT_TRUE(exchange->head.content_type.starts_with("text/event-stream"));
  EXPECT_TRUE(exchange->head.body.ends_with("data: [DONE]\n\n"));
}

// Whatever asks for it: a prompt that takes longer than its target alone is refused, and to try again is no use.
TEST_F(ApiTest, ARefusalByThePolicyHasItsCode) {
  SloOptions shed;
  shed.missed = SloOptions::Missed::kShed;
  policy_ = std::move(make_slo_policy(std::move(StepModel::fit(testing::synthetic_table())).value(), shed)).value();
  start();
  for (const char* path : {"/v1/completions", "/v1/embeddings"}) {
    const char* field = path == std::string_view("/v1/completions") ? "prompt" : "input";
    const auto exchange = send("POST", path, fmt::format(R"({{"{}":"hello","slo_ttft_ms":0.01}})", field));
    ASSERT_TRUE(exchange->wait([&] { return exchange->ended; })) << path;
    EXPECT_EQ(exchange->head.status, 429) << path;
    EXPECT_EQ(Json::parse(exchange->head.body)["error"]["code"], "slo_unattainable") << path;
    for (const http::Header& header : exchange->head.headers) EXPECT_NE(header.name, "Retry-After") << path;
  }
}

TEST_F(ApiTest, ACallThatAStopCutsIsNone) {
  start();
  const std::string say =
      R"("content":"SAY:Hm <tool_call>{\"name\":\"f\",\"arguments\":{\"path\":\"a END b\"}}</tool_call>")";
  const Json message =
      ask("/v1/messages", R"({"max_tokens":99,"stop_sequences":["END"],"tools":[{"name":"f","input_schema":)"
                          R"({"type":"object"}}],"messages":[{"role":"user",)" +
                              say + "}]}");
  EXPECT_EQ(message["stop_reason"], "stop_sequence") << dump(message);
  EXPECT_EQ(message["stop_sequence"], "END");
  const std::string chat =
      R"({"tools":[{"type":"function","function":{"name":"f"}}],"messages":[{"role":"user",)" + say + R"(}],"stop":)";
  EXPECT_EQ(ask("/v1/chat/completions", chat + R"(["END"]})")["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(ask("/v1/chat/completions", chat + R"(["</tool_call>"]})")["choices"][0]["finish_reason"], "tool_calls");
  const std::string by_id = chat + R"([],"stop_token_ids":[)";  // a byte is a token
  EXPECT_EQ(ask("/v1/chat/completions", by_id + "69]}")["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(ask("/v1/chat/completions", by_id + "257]}")["choices"][0]["finish_reason"], "tool_calls");
  for (const Json& event : stream("/v1/chat/completions", chat + R"(["END"],"stream":true})")) {
    for (const Json& choice : event["choices"]) EXPECT_NE(choice["finish_reason"], "tool_calls") << dump(event);
  }
}

TEST_F(ApiTest, AKeptResponseWithACutCallGoesOn) {
  start();
  const Json first =
      ask("/v1/responses", R"({"max_output_tokens":45,"tools":[{"type":"function","name":"f"}],"input":)"
                           R"("SAY:Hm <tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"long text\"}}</tool_call>"})");
  EXPECT_EQ(first["status"], "incomplete") << dump(first);
  EXPECT_EQ(first["output"].back()["type"], "function_call") << dump(first);
  const std::string id = first["id"].get<std::string>();
  ask("/v1/responses", R"({"input":"SAY:x","tool_choice":"auto","previous_response_id":")" + id + "\"}");
}

// A stream has an item for each run of thoughts.
TEST_F(ApiTest, AKeptResponseHasAllItsThoughts) {
  chat_template_ = "SAY:{{ messages[1].reasoning_content if messages | length > 1 else messages[0].content }}";
  start();
  state_->reasoning_format = ReasoningFormat::kHarmony;
  const std::string first =
      R"({"max_output_tokens":400,"input":"<|channel|>analysis<|message|>one,<|end|><|start|>assistant<|channel|>)"
      R"(commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|><|start|>assistant)"
      R"(<|channel|>final<|message|>Yes")";
  for (const char* form : {"}", R"(,"stream":true})"}) {
    const auto exchange = send("POST", "/v1/responses", first + form);
    ASSERT_TRUE(exchange->wait([&] { return exchange->ended; }));
    const std::string_view body = exchange->head.body;
    const std::string id(body.substr(body.find("resp_"), 37));
    const Json next = ask("/v1/responses", R"({"input":"go on","previous_response_id":")" + id + "\"}");
    EXPECT_EQ(next["output"].back()["content"][0]["text"], "one,two") << body;
  }
}

TEST_F(ApiTest, LogprobsOfAResponseAreOfItsText) {
  start();
  state_->reasoning_format = ReasoningFormat::kThink;
  const std::string body =
      R"({"input":"SAY:<think>abc</think>hi","include":["message.output_text.logprobs"],"store":false)";
  const auto joined = [](const Json& logprobs) {
    std::string text;
    for (const Json& one : logprobs) text += one["token"].get<std::string>();
    return text;
  };
  const Json whole = ask("/v1/responses", body + "}");
  EXPECT_EQ(joined(whole["output"][1]["content"][0]["logprobs"]), "hi") << dump(whole);
  EXPECT_EQ(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 11) << dump(whole);  // with the last mark
  std::string deltas;
  for (const Json& data : typed_stream("/v1/responses", body + R"(,"stream":true})")) {
    if (data["type"] == "response.output_text.delta") deltas += joined(data["logprobs"]);
    if (data["type"] == "response.completed") {
      EXPECT_EQ(joined(data["response"]["output"][1]["content"][0]["logprobs"]), "hi") << dump(data);
    }
  }
  EXPECT_EQ(deltas, "hi");
}

TEST_F(ApiTest, LogprobsOfAResponseHaveNoMarks) {
  start();
  const auto scored = [&](std::string_view said) {
    const Json r = ask("/v1/responses", fmt::format(R"({{"input":"SAY:{}","store":false,"include":)"
                                                    R"(["message.output_text.logprobs"]}})",
                                                    said));
    std::string bytes;
    for (const Json& item : r["output"]) {
      if (item["type"] != "message") continue;
      for (const Json& one : item["content"][0]["logprobs"]) {
        for (const Json& byte : one["bytes"]) bytes += static_cast<char>(byte.get<int>());
      }
    }
    return bytes;
  };
  state_->reasoning_format = ReasoningFormat::kThink;
  EXPECT_EQ(scored("<think></think> h\u00e9"), "h\xc3\xa9");  // thoughts of nothing
  EXPECT_EQ(scored("<think>a</think><th"), "<th");
  EXPECT_EQ(scored("<thin"), "<thin");
  state_->reasoning_format = ReasoningFormat::kHarmony;
  EXPECT_EQ(scored("<|channel|>final<|message|>\u00e9h<|e"), "\xc3\xa9h<|e");
  EXPECT_EQ(scored("<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>hi"), "hi");
  EXPECT_EQ(scored("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|><|a"), "<|a");
  EXPECT_EQ(scored("<|channel|>commentary<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two"),
            "onetwo");
}

TEST_F(ApiTest, LogprobsOfAResponseHaveAnEndThatIsShown) {
  start();
  const std::pair<const char*, const char*> shown[] = {
      {"", "hi"},
      {R"(,"include_stop_str_in_output":true)", "hi"},
      {R"(,"include_stop_str_in_output":true,"skip_special_tokens":false)", "hi<|im_end|>"},
      {R"(,"include_stop_str_in_output":true,"stop_token_ids":[105])", "hi"},
      {R"(,"stop_token_ids":[105])", "h"},
  };
  for (const auto& [more, text] : shown) {
    const Json r = ask("/v1/responses",
                       R"({"input":"SAY:hi","include":["message.output_text.logprobs"])" + std::string(more) + "}");
    const Json& part = r["output"][0]["content"][0];
    std::string scored;
    for (const Json& one : part["logprobs"]) scored += one["token"].get<std::string>();
    EXPECT_EQ(part["text"], text) << more;
    EXPECT_EQ(scored, text) << more;
  }
}

TEST_F(ApiTest, LogprobsOfAResponseAreOfItsTextAroundCalls) {
  start();
  const auto scored = [&](std::string_view said, bool streamed) {
    const std::string body = fmt::format(
        R"({{"input":{},"store":false,"include":["message.output_text.logprobs"],"max_output_tokens":{},"tools":)"
        R"([{{"type":"function","name":"f"}}],"stream":{}}})",
        dump(Json("SAY:" + std::string(said))), said.size() + 1, streamed);
    const Json r = streamed ? typed_stream("/v1/responses", body).back()["response"] : ask("/v1/responses", body);
    std::string bytes;
    for (const Json& item : r["output"]) {
      if (item["type"] != "message") {
        bytes += '|';
        continue;
      }
      std::string own;
      for (const Json& one : item["content"][0]["logprobs"]) {
        for (const Json& byte : one["bytes"]) own += static_cast<char>(byte.get<int>());
      }
      EXPECT_EQ(own, item["content"][0]["text"]) << dump(r);
      bytes += own;
    }
    return bytes;
  };
  const std::tuple<ToolFormat, const char*, const char*> answers[] = {
      {ToolFormat::kHermes, R"(a<tool_call>{"name":"f","arguments":{}}</tool_call> <b>c)", "a| <b>c"},
      {ToolFormat::kHermes,
       R"(<tool_call>{"name":"f","arguments":{}}</tool_call>  <tool_call>{"name":"f","arguments":{}})", "||"},
      {ToolFormat::kHermes, R"(<tool_call>{"name":"f","arguments":{}} </tool)", "|"},
      {ToolFormat::kHermes, R"(<tool_call>{"name":"f","arguments":{}} so <be)", "| so <be"},
      {ToolFormat::kHermes, R"(a <tool_call>none</tool_call> <)", "a <tool_call>none</tool_call> <"},
      {ToolFormat::kMistral, R"(a[TOOL_CALLS][{"name":"f","arguments":{}}] [b)", "a| [b"},
      {ToolFormat::kMistral, R"([TOOL_CALLS][{"name":"f","arguments":{}}, x)", "|, x"},
      {ToolFormat::kMistral, R"([TOOL_CALLS]f{"a":1}[TOOL)", "|[TOOL"},
      {ToolFormat::kLlama3Json, R"({"name":"f","parameters":{}}; {"name":"f","parameters":{}} hi)", "||hi"},
      {ToolFormat::kQwen3Coder, "<tool_call><function=f></function></tool_call> <b>", "| <b>"},
      {ToolFormat::kGemma, "<start_function_call>call:f{}<end_function_call> <st", "| <st"},
      {ToolFormat::kHarmony,
       "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|> <b",
       "| <b"},
  };
  for (const auto& [format, said, kept] : answers) {
    state_->tool_format = format;
    for (const bool streamed : {false, true}) EXPECT_EQ(scored(said, streamed), kept) << said << streamed;
  }
}

TEST_F(ApiTest, ErrorsHaveOpenAisShape) {
  start();
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"a","suffix":"b"})", 400)["error"]["param"], "suffix");
  EXPECT_EQ(ask("/v1/completions", "{", 400)["error"]["type"], "invalid_request_error");
  EXPECT_EQ(ask("/v1/completions", "[]", 400)["error"]["code"], "invalid_json");
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"a","model":"other"})", 404)["error"]["code"], "model_not_found");
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"a","temperature":-1})", 400)["error"]["param"], "temperature");
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":[300]})", 400)["error"]["param"], "prompt");
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"a","max_tokens":100000})", 400)["error"]["code"],
            "context_length_exceeded");
  EXPECT_EQ(ask("/nowhere", "", 404)["error"]["code"], "not_found");
  EXPECT_EQ(send("DELETE", "/v1/models")->head.status, 405);
}

TEST_F(ApiTest, AnUnknownModelIsToldWhatIsServed) {
  start();
  const auto message = [&] {
    return ask("/v1/completions", R"({"prompt":"a","model":"other"})", 404)["error"]["message"].get<std::string>();
  };
  EXPECT_EQ(message(), "the model 'other' does not exist here; this server serves 'm', 'org/m'");
  TearDown();
  names_.clear();
  for (int i = 0; i < 20; ++i) names_.push_back(fmt::format("m{}", i));
  start();
  EXPECT_TRUE(message().ends_with("'m14', 'm15' and 4 more, which /v1/models lists")) << message();
}

TEST_F(ApiTest, AllowedTokensAndBadWordsRestrictAnswers) {
  for (const int32_t drafts : {0, 3}) {
    start({}, 64, {.drafts = drafts});
    const auto text = [&](const std::string& fields) {
      return ask("/v1/completions", R"({"prompt":"x","max_tokens":8,)" + fields + "}")["choices"][0]["text"];
    };
    // The answer is abcdefgh; the fake takes the first token that is allowed in place of one that is not.
    EXPECT_EQ(text(R"("allowed_token_ids":[97,98,99,101])"), "abcaeaaa");
    EXPECT_EQ(text(R"("bad_words":["b","  e"],"ignore_eos":true)"), "acdfgh");
    EXPECT_EQ(text(R"("bad_words":["cd"],"allowed_token_ids":[97,98,99,100])"), "abcaaaaa");
    EXPECT_EQ(text(R"("bad_words":["zd","bcde"],"allowed_token_ids":[97,98,99,100,101])"), "abcdaaaa");
    EXPECT_EQ(text(R"("bad_words":[],"allowed_token_ids":null)"), "abcdefgh");
    const Json chat =
        ask("/v1/chat/completions", R"({"messages":[{"role":"user","content":"SAY:abcd"}],"n":2,"max_tokens":6,)"
                                    R"("allowed_token_ids":[98,100]})");
    for (const Json& choice : chat["choices"]) EXPECT_EQ(choice["message"]["content"], "bbbdbb") << dump(chat);
    TearDown();
  }
}

TEST_F(ApiTest, WhatAllowedTokensAndBadWordsCannotBeIsNamed) {
  start();
  const auto param = [&](const std::string& fields) {
    const Json error = ask("/v1/completions", R"({"prompt":"x",)" + fields + "}", 400)["error"];
    std::string name = error["param"];
    EXPECT_NE(error["message"].get<std::string>().find(name), std::string::npos) << dump(error);
    return name;
  };
  EXPECT_EQ(param(R"("allowed_token_ids":[])"), "allowed_token_ids");
  EXPECT_EQ(param(R"("allowed_token_ids":5)"), "allowed_token_ids");
  EXPECT_EQ(param(R"("allowed_token_ids":["a"])"), "allowed_token_ids");
  EXPECT_EQ(param(R"("allowed_token_ids":[1,99999])"), "allowed_token_ids");
  EXPECT_EQ(param(R"("allowed_token_ids":[-1])"), "allowed_token_ids");
  EXPECT_EQ(param(R"("allowed_token_ids":[97],"bad_words":["a"])"), "allowed_token_ids");
  EXPECT_EQ(param(R"("allowed_token_ids":[257],"min_tokens":1)"), "allowed_token_ids");
  std::string many = "1";
  for (int i = 0; i < 400; ++i) many += ",1";
  EXPECT_EQ(param(R"("allowed_token_ids":[)" + many + "]"), "allowed_token_ids");
  EXPECT_EQ(param(R"("bad_words":"a")"), "bad_words");
  EXPECT_EQ(param(R"("bad_words":["a",5])"), "bad_words[1]");
  EXPECT_EQ(param(R"("bad_words":["a",""])"), "bad_words[1]");
  EXPECT_EQ(param(R"("bad_words":[" \n"])"), "bad_words[0]");
  EXPECT_EQ(param(R"("bad_words":["a",")" + std::string(1025, 'a') + "\"]"), "bad_words[1]");
  std::string words = "\"a\"";
  for (int i = 0; i < 1024; ++i) words += ",\"a\"";
  EXPECT_EQ(param(R"("bad_words":[)" + words + "]"), "bad_words");
}

TEST_F(ApiTest, WhereNoTokenMayComeTheRequestFails) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  start();
  // After the first token the grammar wants what is not allowed.
  const Json error =
      ask("/v1/completions", R"({"prompt":"x","guided_regex":"ab","allowed_token_ids":[97,257],"max_tokens":4})", 400);
  EXPECT_NE(error["error"]["message"].get<std::string>().find("no token may come after 1 of the answer"),
            std::string::npos)
      << dump(error);
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"x","guided_regex":"a[bc]","bad_words":["b"]})")["choices"][0]["text"],
            "ac");
}

TEST_F(ApiTest, ChatEchoesTheMessageThatItContinues) {
  start();
  const auto body = [](const char* last_role, const char* fields) {
    return fmt::format(R"({{"messages":[{{"role":"user","content":"x"}},{{"role":"{}","content":"SAY:ab"}}],)"
                       R"("n":2,"logprobs":true,"top_logprobs":0,"echo":true{}}})",
                       last_role, fields);
  };
  constexpr const char* kContinue = R"(,"add_generation_prompt":false,"continue_final_message":true)";
  const struct {
    std::string body, text;
  } cases[] = {
      {body("assistant", kContinue), "SAY:abab"},
      {body("assistant", ""), "SAY:abab"},
      {body("user", ""), "ab"},
  };
  for (const auto& [asked, text] : cases) {
    const Json whole = ask("/v1/chat/completions", asked);
    for (const Json& choice : whole["choices"]) {
      EXPECT_EQ(choice["message"]["content"], text) << asked;
      EXPECT_EQ(choice["logprobs"]["content"].size(), 3u);  // of the answer's tokens
    }
    std::array<std::string, 2> streamed;
    std::string form = asked;
    form.insert(1, R"("stream":true,)");
    for (const Json& chunk : stream("/v1/chat/completions", form)) {
      for (const Json& choice : chunk["choices"]) {
        streamed[choice["index"].get<size_t>()] += choice["delta"].value("content", "");
      }
    }
    for (const std::string& one : streamed) EXPECT_EQ(one, text) << asked;
  }
}

TEST_F(ApiTest, PrecisionIsAFieldAndAHeader) {
  start();
  const Json fast = ask("/v1/completions", R"({"prompt":"SAY:a"})", 200, {{"X-NestedFP-Precision", "fast"}});
  EXPECT_EQ(fast["usage"]["nestedfp"]["completion"]["fp8_tokens"], 2);
  const Json exact =
      ask("/v1/completions", R"({"prompt":"SAY:a","precision":"exact"})", 200, {{"X-NestedFP-Precision", "fast"}});
  EXPECT_EQ(exact["usage"]["nestedfp"]["completion"]["fp16_tokens"], 2);
  ask("/v1/completions", R"({"prompt":"SAY:a"})", 400, {{"X-NestedFP-Precision", "half"}});
}

TEST_F(ApiTest, LatencyTargetsAreFieldsAndHeaders) {
  start();
  const auto met = [&](const char* body, const std::vector<http::Header>& headers = {}) {
    return ask("/v1/completions", body, 200, headers)["usage"]["nestedfp"]["slo_met"].get<bool>();
  };
  EXPECT_TRUE(met(R"({"prompt":"SAY:a","slo_ttft_ms":60000,"slo_itl_ms":60000,"priority":-1})"));
  EXPECT_FALSE(met(R"({"prompt":"SAY:a","slo_ttft_ms":1e-6})"));
  EXPECT_FALSE(met(R"({"prompt":"SAY:a"})", {{"x-llm-d-slo-ttft-ms", "0.000001"}}));
  EXPECT_FALSE(met(R"({"prompt":"SAY:abc"})", {{"x-slo-tpot-ms", "1e-6"}}));
  EXPECT_TRUE(met(R"({"prompt":"SAY:a","slo_ttft_ms":60000,"slo_itl_ms":60000})", {{"x-slo-ttft-ms", "0.000001"}}));
  for (const char* body : {R"({"prompt":"a","slo_ttft_ms":0})", R"({"prompt":"a","slo_itl_ms":"5"})",
                           R"({"prompt":"a","slo_itl_ms":1e300})", R"({"prompt":"a","priority":1.5})"}) {
    ask("/v1/completions", body, 400);
  }
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"a"})", 400, {{"x-llm-d-slo-tpot-ms", "nan"}})["error"]["param"],
            "x-llm-d-slo-tpot-ms");
}

TEST_F(ApiTest, KeysOriginsAndRequestIds) {
  ApiOptions options;
  options.api_keys = {"one", "two"};
  options.allowed_origins = {"https://a.example"};
  options.root_path = "/llm/";
  start(options);
  ask("/v1/models", "", 401);
  ask("/v1/models", "", 401, {{"Authorization", "Bearer onex"}});
  ask("/v1/models", "", 401, {{"Authorization", "Basic one"}});
  EXPECT_EQ(ask("/v1/models", "", 200, {{"Authorization", "bearer two"}})["data"][0]["id"], "m");
  EXPECT_EQ(ask("/llm/v1/models/org/m", "", 200, {{"Authorization", "Bearer one"}})["id"], "org/m");
  EXPECT_EQ(ask("/v1/models/org%2Fm", "", 200, {{"Authorization", "Bearer one"}})["id"], "org/m");
  ask("/health", "");
  const auto value = [](const http::Response& response, std::string_view name) {
    for (const auto& header : response.headers) {
      if (header.name == name) return header.value;
    }
    return std::string();
  };
  EXPECT_EQ(value(send("GET", "/health", "", {{"X-Request-Id", "abc-1"}})->head, "X-Request-Id"), "abc-1");
  EXPECT_NE(value(send("GET", "/health", "", {{"X-Request-Id", "a b"}})->head, "X-Request-Id"), "a b");
  EXPECT_EQ(value(send("GET", "/health", "", {{"Origin", "https://a.example"}})->head, "Access-Control-Allow-Origin"),
            "https://a.example");
  EXPECT_EQ(value(send("GET", "/health", "", {{"Origin", "https://b.example"}})->head, "Access-Control-Allow-Origin"),
            "");
  EXPECT_EQ(send("OPTIONS", "/v1/completions", "", {{"Origin", "https://a.example"}})->head.status, 204);
}

TEST(ApiErrors, WhereTryingAgainIsNoUseThereIsNoTime) {
  const auto retry_after = [](const ApiError& error) -> std::string {
    for (const http::Header& header : error_response(error).headers) {
      if (header.name == "Retry-After") return header.value;
    }
    return "none";
  };
  EXPECT_EQ(retry_after({429, "busy", "", ""}), "1");
  EXPECT_EQ(retry_after({429, "too long", "", "slo_unattainable", 0}), "none");
  EXPECT_EQ(retry_after({400, "wrong", "", ""}), "none");
}

TEST_F(ApiTest, AFullQueueIs429) {
  start({}, /*max_queue=*/2, {4096, std::chrono::milliseconds(20), {}});
  std::vector<std::shared_ptr<FakeExchange>> sent;
  int refused = 0;
  for (int i = 0; i < 12; ++i) {
    sent.push_back(send("POST", "/v1/completions", R"({"prompt":"a","max_tokens":5})"));
    if (sent.back()->ended) {
      EXPECT_EQ(sent.back()->head.status, 429) << sent.back()->head.body;
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
  EXPECT_LT(refused, 12);
  for (auto& exchange : sent) EXPECT_TRUE(exchange->wait([&] { return exchange->ended; }));
}

TEST_F(ApiTest, AClientThatGoesAwayFreesItsBlocks) {
  start({}, 64, {4096, std::chrono::milliseconds(2), {}});
  auto exchange = send("POST", "/v1/completions", R"({"prompt":"a","max_tokens":4000,"stream":true})");
  ASSERT_TRUE(exchange->wait([&] { return !exchange->head.body.empty(); }));
  EXPECT_GT(engine_->stats().kv_blocks_used, 0);
  exchange->gone = true;
  exchange->abort_callback();
  for (int i = 0; i < 500 && engine_->stats().kv_blocks_used > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(engine_->stats().kv_blocks_used, 0);
  EXPECT_EQ(engine_->stats().running, 0);
}

TEST_F(ApiTest, HealthFollowsTheEngine) {
  ApiOptions options;
  options.stall_timeout_s = 0.3;
  start(options, 64, {4096, std::chrono::milliseconds(900), {}});
  ask("/health", "");
  auto exchange = send("POST", "/v1/completions", R"({"prompt":"a","max_tokens":2})");
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_EQ(ask("/health", "", 503)["error"]["code"], "stalled");
  EXPECT_TRUE(exchange->wait([&] { return exchange->ended; }));
  api_->set_draining();
  EXPECT_EQ(ask("/health", "", 503)["error"]["code"], "draining");
  ask("/v1/completions", R"({"prompt":"a"})", 503);
}

TEST_F(ApiTest, BeforeTheModelIsThere) {
  api_ = std::make_unique<Api>(ApiOptions());
  EXPECT_EQ(ask("/health", "", 503)["error"]["code"], "loading");
  ask("/v1/completions", R"({"prompt":"a"})", 503);
  ask("/version", "");
  ask("/openapi.json", "");
}

TEST_F(ApiTest, ASlashMayEndAPath) {
  ApiOptions options;
  options.root_path = "/llm";
  start(options);
  EXPECT_EQ(ask("/v1/models/", ""), ask("/v1/models", ""));
  EXPECT_EQ(ask("/llm/v1/models/", ""), ask("/v1/models", ""));
  EXPECT_EQ(ask("/v1/completions/", R"({"prompt":"SAY:a","max_tokens":5})")["choices"][0]["text"], "a");
  EXPECT_EQ(send("GET", "/v1/completions/")->head.status, 405);
  EXPECT_EQ(ask("/v1/models/org/m", "")["id"], "org/m");
  ask("/v1/models/m/", "", 404);  // a name
  for (const char* unknown : {"/v1/models//", "/v1/", "/v1/none/", "/health/"}) ask(unknown, "", 404);
}

TEST_F(ApiTest, TokenizesAndBack) {
  start();
  const Json r = ask("/tokenize", R"({"prompt":"ab","return_token_strs":true})");
  EXPECT_EQ(r["tokens"], Json({97, 98}));
  EXPECT_EQ(r["token_strs"], Json({"a", "b"}));
  EXPECT_EQ(ask("/detokenize", R"({"tokens":[97,98]})")["prompt"], "ab");
  EXPECT_GT(ask("/tokenize", R"({"messages":[{"role":"user","content":"a"}]})")["count"].get<int>(), 10);
  EXPECT_EQ(ask("/tokenizer_info", "")["eos_token"], "<|im_end|>");
  ask("/detokenize", R"({"tokens":[-1]})", 400);
  ask("/detokenize", R"({"tokens":[259]})", 400);
  ask("/tokenize", R"({})", 400);
}

TEST_F(ApiTest, BestOfKeepsTheLikeliest) {
  start();
  const Json r = ask("/v1/completions", R"({"prompt":"SAY:abc","best_of":3,"n":2,"logprobs":1})");
  EXPECT_EQ(r["choices"].size(), 2u);
  EXPECT_EQ(r["choices"][1]["index"], 1);
  EXPECT_EQ(r["usage"]["completion_tokens"], 12);  // of all three
}

TEST_F(ApiTest, ResponsesRepeatMetadata) {
  start();
  const auto with = [](std::string_view metadata) {
    return fmt::format(R"({{"input":"SAY:a","metadata":{}}})", metadata);
  };
  EXPECT_EQ(ask("/v1/responses", with(R"({"a":"b"})"))["metadata"], Json({{"a", "b"}}));
  EXPECT_EQ(ask("/v1/responses", with("null"))["metadata"], Json::object());
  for (const char* bad : {"5", "\"x\"", "[]", R"({"a":1})", R"({"a":null})"}) {
    const Json refused = ask("/v1/responses", with(bad), 400)["error"];
    EXPECT_EQ(refused["param"], "metadata") << bad;
    EXPECT_EQ(refused["message"], "'metadata' must be an object whose values are strings") << bad;
  }
}

// Wide and large bodies, which once took minutes, are read on a worker; what is too much for anybody is 400.
TEST_F(ApiTest, WideBodiesAreReadOrRefusedAtOnce) {
  start();
  const auto wide = [](int keys) {
    std::string metadata;
    for (int i = 0; i < keys; ++i) metadata += fmt::format("{}\"{}\":0", i > 0 ? "," : "", i);
    return R"({"prompt":"SAY:a","metadata":{)" + metadata + "}}";
  };
  EXPECT_EQ(ask("/v1/completions", wide(4000))["choices"][0]["text"], "a");
  EXPECT_NE(ask("/v1/completions", wide(200'000), 400)["error"]["message"].get<std::string>().find("4096 keys"),
            std::string::npos);
  EXPECT_NE(ask("/v1/completions", std::string(70, '['), 400)["error"]["message"].get<std::string>().find(
                "the body is nested deeper than 64 levels"),
            std::string::npos);
}

// Ends with the client, or the pool: none of these is waited for.
TEST_F(ApiTest, LargeWorkEndsWithItsClient) {
  start();
  std::string messages = R"({"messages":[)";
  for (int i = 0; i < 4096; ++i) messages += fmt::format(R"({}{{"role":"user","content":""}})", i > 0 ? "," : "");
  const auto left = send("POST", "/v1/chat/completions", messages + "]}");
  EXPECT_FALSE(left->ended);  // not on this thread
  ASSERT_TRUE(left->abort_callback);
  left->gone = true;
  left->abort_callback();
  // The worker is free again.
  EXPECT_EQ(
      ask("/v1/completions", R"({"prompt":"SAY:b","user":")" + std::string(20'000, 'u') + "\"}")["choices"][0]["text"],
      "b");
}

TEST_F(ApiTest, ThoughtsBeforeReachTheTemplateByEitherName) {
  chat_template_ = "SAY:{{ messages[1].reasoning_content }},{{ messages[1].thinking }}.";
  start();
  const auto said = [&](const std::string& fields) {
    const Json answer =
        ask("/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"},{"role":"assistant",)" + fields +
                                        R"(},{"role":"user","content":"b"}]})");
    return answer["choices"][0]["message"]["content"].get<std::string>();
  };
  EXPECT_EQ(said(R"("content":"x","reasoning_content":"hm")"), "hm,hm.");
  EXPECT_EQ(said(R"("content":"x","reasoning":"hm")"), "hm,hm.");
  EXPECT_EQ(said(R"("content":"x","reasoning":"no","reasoning_content":"hm")"), "hm,hm.");
  const std::string call =
      R"(,"reasoning_content":"hm","tool_calls":[{"id":"1","type":"function","function":{"name":"f"}}])";
  EXPECT_EQ(said(R"("content":null)" + call), "hm,hm.");
  EXPECT_EQ(said(R"("content":"x")" + call), "hm,.");
}

// Whatever a request's size is made of: rendering and tokenizing it is no work for a thread that serves connections.
TEST_F(ApiTest, WhatIsLargeWaitsForAWorker) {
  start();
  std::promise<void> release;
  ASSERT_TRUE(workers_->submit([&](const std::stop_token&) { release.get_future().wait(); }, std::stop_source()));
  const std::string too_long = R"({"max_tokens":100000,"messages":[{"role":"user","content":"a"})";
  const std::string text(20'000, 't');
  // What is refused is refused at once where it is small.
  EXPECT_TRUE(send("POST", "/v1/chat/completions", too_long + "]}")->ended);
  std::string empty;
  for (int i = 0; i < 4000; ++i) empty += R"(,{"role":"user","content":""})";
  std::vector<std::shared_ptr<FakeExchange>> sent;
  for (
      const std::string& more :
      {R"(,{"role":"user","content":")" + text + "\"}]}", empty + "]}",
       R"(],"chat_template_kwargs":{"x":")" + text + "\"}}",
       R"(,{"role":"assistant","content":"","reasoning_content":")" + text + "\"}]}",
       R"(,{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\":\")" +
           text + R"(\"}"}}]}]})"}) {
    sent.push_back(send("POST", "/v1/chat/completions", too_long + more));
    EXPECT_FALSE(sent.back()->ended) << more.substr(0, 60);
  }
  release.set_value();
  for (const auto& exchange : sent) {
    ASSERT_TRUE(exchange->wait([&] { return exchange->ended; }));
    EXPECT_EQ(exchange->head.status, 400) << exchange->head.body;
    EXPECT_NE(exchange->head.body.find("context_length_exceeded"), std::string::npos) << exchange->head.body;
  }
}

// A tree takes many times the bytes of its text, and counts as what it takes.
TEST_F(ApiTest, WhatIsParsedCountsAmongTheBytesOfRequests) {
  start();
  budget_ = std::make_shared<http::ByteBudget>(200'000);
  std::string lists = R"({"prompt":"SAY:a","x":[[])";
  for (int i = 0; i < 10'000; ++i) lists += ",[]";
  const Json refused = ask("/v1/completions", lists + "]}", 429);
  EXPECT_NE(refused["error"]["message"].get<std::string>().find("bytes of requests"), std::string::npos);
  EXPECT_EQ(
      ask("/v1/completions", R"({"prompt":"SAY:a","user":")" + std::string(30'000, 'u') + "\"}")["choices"][0]["text"],
      "a");
  exchanges_.clear();
  workers_.reset();  // whose thread may be the last to hold a request, or the engine's
  engine_.reset();
  EXPECT_EQ(budget_->used(), 0u);
}

// However slowly its client reads it.
TEST_F(ApiTest, ALargeAnswerCountsUntilItIsSent) {
  start();
  const std::string text = R"({"prompt":")" + std::string(9'000, 'a') + "\"}";
  budget_ = std::make_shared<http::ByteBudget>(25'000);
  const Json refused = ask("/tokenize", text, 429);
  EXPECT_NE(refused["error"]["message"].get<std::string>().find("bytes of requests"), std::string::npos);

  const auto counted = [&](const char* method, const std::string& path, const std::string& body) {
    budget_ = std::make_shared<http::ByteBudget>(1'000'000);
    const auto exchange = send(method, path, body);
    EXPECT_TRUE(exchange->wait([&] { return exchange->ended; })) << path;
    EXPECT_EQ(exchange->head.status, 200) << path;
    EXPECT_EQ(budget_->used(), exchange->head.body.size()) << path;
    return exchange->head.body;
  };
  counted("POST", "/tokenize", text);
  counted("POST", "/detokenize", R"({"tokens":[97,98]})");
  counted("POST", "/v1/completions", R"({"prompt":"a","max_tokens":100,"logprobs":5,"ignore_eos":true})");
  const Json kept = Json::parse(counted("POST", "/v1/responses",
                                        R"({"input":"a","max_output_tokens":100,"ignore_eos":true,"top_logprobs":5,)"
                                        R"("include":["message.output_text.logprobs"]})"));
  const std::string path = "/v1/responses/" + kept["id"].get<std::string>();
  counted("GET", path, "");
  counted("GET", path + "/input_items", "");
}

TEST_F(ApiTest, APromptThatCannotFitIsNotTokenized) {
  start();
  const Json r = ask("/v1/completions", R"({"prompt":")" + std::string(2'000'000, 'a') + "\"}", 400);
  EXPECT_EQ(r["error"]["code"], "context_length_exceeded");
  EXPECT_NE(r["error"]["message"].get<std::string>().find("2000000 bytes"), std::string::npos);
}

TEST_F(ApiTest, TemplateVariablesHaveNoReservedNames) {
  start();
  const std::string messages = R"({"messages":[{"role":"user","content":"SAY:a"}],"chat_template_kwargs":)";
  ask("/v1/chat/completions", messages + R"({"enable_thinking":true}})");
  for (const char* path : {"/v1/chat/completions", "/tokenize"}) {
    EXPECT_EQ(ask(path, messages + R"({"messages":[]}})", 400)["error"]["param"], "chat_template_kwargs");
    EXPECT_EQ(ask(path, messages + R"({"tools":[]}})", 400)["error"]["param"], "chat_template_kwargs");
    EXPECT_EQ(ask(path, messages + "[]}", 400)["error"]["param"], "chat_template_kwargs");
  }
}

TEST_F(ApiTest, NoBodyWhereNobodyReadsIt) {
  ApiOptions options;
  options.api_keys = {"one"};
  start(options);
  for (const auto& header : {http::Header{"Content-Length", "1"}, http::Header{"Transfer-Encoding", "chunked"}}) {
    EXPECT_EQ(send("OPTIONS", "/v1/completions", "", {header})->head.status, 413);
    EXPECT_EQ(send("POST", "/ping", "", {header})->head.status, 413);
    EXPECT_EQ(send("GET", "/health", "", {header})->head.status, 413);
    EXPECT_EQ(send("POST", "/v1/completions", "", {header})->head.status, 401);
  }
  EXPECT_EQ(send("POST", "/ping", "", {{"Content-Length", "0"}})->head.status, 200);
}

TEST_F(ApiTest, APrefixIsCachedForItsKeyAndSaltOnly) {
  ApiOptions options;
  options.api_keys = {"one", "two"};
  start(options);
  const std::string prompt(100, 'p');
  const auto cached = [&](const char* key, const char* more = "") {
    const Json r = ask("/v1/completions", R"({"max_tokens":2,"prompt":")" + prompt + "\"" + more + "}", 200,
                       {{"Authorization", std::string("Bearer ") + key}});
    return r["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached("one"), 0);
  EXPECT_EQ(cached("one"), 96);
  EXPECT_EQ(cached("two"), 0);
  EXPECT_EQ(cached("two"), 96);
  EXPECT_EQ(cached("one", R"(,"cache_salt":"s")"), 0);
  EXPECT_EQ(cached("one", R"(,"cache_salt":"t")"), 0);
  EXPECT_EQ(cached("one", R"(,"cache_salt":"s")"), 96);
}

TEST_F(ApiTest, OnlyOurNamesInHost) {
  ApiOptions options;
  start(options);
  api_->set_loopback(true);
  for (const char* host : {"localhost", "localhost:8000", "127.0.0.1:8000", "127.3.2.1", "[::1]:8000",
                           "[::ffff:127.0.0.1]:8000", "[::ffff:7f00:1]", "a.localhost:1"}) {
    EXPECT_EQ(send("GET", "/health", "", {{"Host", host}})->head.status, 200) << host;
  }
  for (const char* host : {"evil.example", "evil.example:8000", "127.0.0.1.evil.example", "notlocalhost", "[::2]:1",
                           "localhost.evil.example:8000", "[::ffff:localhost]", "[::ffff:10.0.0.1]:8000"}) {
    EXPECT_EQ(send("GET", "/health", "", {{"Host", host}})->head.status, 403) << host;
  }
  options.allowed_hosts = {"a.example"};
  api_ = std::make_unique<Api>(options);
  api_->set_ready(state_.get());
  api_->set_loopback(true);
  EXPECT_EQ(send("GET", "/health", "", {{"Host", "a.example:8000"}})->head.status, 200);
  EXPECT_EQ(send("GET", "/health", "", {{"Host", "b.example"}})->head.status, 403);
  // With keys, or reachable from elsewhere, the name says nothing.
  options.allowed_hosts.clear();
  options.api_keys = {"one"};
  api_ = std::make_unique<Api>(options);
  api_->set_ready(state_.get());
  api_->set_loopback(true);
  EXPECT_EQ(send("GET", "/health", "", {{"Host", "b.example"}})->head.status, 200);
}

TEST_F(ApiTest, ChoicesAreAdmittedAllOrNone) {
  start({}, /*max_queue=*/16, {4096, std::chrono::milliseconds(20), {}});
  EXPECT_EQ(ask("/v1/completions", R"({"prompt":"a","n":17})", 400)["error"]["param"], "n");
  const auto first = send("POST", "/v1/completions", R"({"prompt":"a","n":12,"max_tokens":3})");
  const auto second = send("POST", "/v1/completions", R"({"prompt":"a","n":12,"max_tokens":3})");
  ASSERT_TRUE(second->ended);
  EXPECT_EQ(second->head.status, 429);
  ASSERT_TRUE(first->wait([&] { return first->ended; }));
  EXPECT_EQ(first->head.status, 200);
}

TEST_F(ApiTest, ErrorsDoNotEchoWithoutEnd) {
  start();
  const std::string name(1'000'000, 'm');
  const std::string message = R"({"messages":[{"role":"user","content":"a"}],)";
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f"}}],)";
  EXPECT_LT(dump(ask("/v1/completions", R"({"prompt":"a","model":")" + name + "\"}", 404)).size(), 2000u);
  EXPECT_LT(
      dump(ask("/v1/chat/completions",
               message + tools + R"("tool_choice":{"type":"function","function":{"name":")" + name + "\"}}}", 400))
          .size(),
      2000u);
}

TEST_F(ApiTest, ACallThatIsCutIsNoText) {
  start();
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}])";
  const std::string messages =
      R"("messages":[{"role":"user","content":"SAY:ok<tool_call>{\"name\":\"f\",\"arguments\":{\"x\":1}}</tool_call>"}])";
  const Json r = ask("/v1/chat/completions", "{" + tools + "," + messages + R"(,"max_tokens":20})");
  EXPECT_EQ(r["choices"][0]["message"]["content"], "ok");
  EXPECT_EQ(r["choices"][0]["finish_reason"], "length");
}

TEST_F(ApiTest, WholeAnswersHaveTheOrderOfStreams) {
  start();
  const std::string said =
      R"("SAY:A. <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>B.<tool_call>{\"name\":\"f\",\"arguments\":{}} C.")";
  const std::string messages = R"({"messages":[{"role":"user","content":)" + said + "}],";

  const std::string chat = messages + R"("tools":[{"type":"function","function":{"name":"f"}}])";
  std::string text;
  for (const Json& event : stream("/v1/chat/completions", chat + R"(,"stream":true})")) {
    text += event["choices"][0]["delta"].value("content", "");
  }
  EXPECT_EQ(text, "A. B. C.");
  EXPECT_EQ(ask("/v1/chat/completions", chat + "}")["choices"][0]["message"]["content"], text);

  const std::string responses =
      R"({"input":)" + said +
      R"(,"tools":[{"type":"function","name":"f"}],"include":["message.output_text.logprobs"],"store":false)";
  const auto items = [](const Json& response) {
    std::vector<std::string> all;
    for (const Json& item : response["output"]) {
      if (item["type"] == "function_call") {
        all.push_back(item["name"]);
      } else {
        const Json& part = item["content"][0];
        all.push_back(fmt::format("{} ({})", part["text"].get<std::string>(), part["logprobs"].size()));
      }
    }
    return all;
  };
  const std::vector<std::string> streamed =
      items(typed_stream("/v1/responses", responses + R"(,"stream":true})").back()["response"]);
  ASSERT_EQ(streamed.size(), 5u);
  EXPECT_TRUE(streamed[2].starts_with(" B. (")) << streamed[2];
  EXPECT_EQ(items(ask("/v1/responses", responses + "}")), streamed);

  const std::string message = messages + R"("max_tokens":200,"tools":[{"name":"f","input_schema":{"type":"object"}}])";
  std::string streamed_types, types;
  for (const Json& event : typed_stream("/v1/messages", message + R"(,"stream":true})")) {
    if (event["type"] == "content_block_start")
      streamed_types += event["content_block"]["type"].get<std::string>() + ' ';
  }
  const Json whole = ask("/v1/messages", message + "}");
  for (const Json& block : whole["content"]) types += block["type"].get<std::string>() + ' ';
  EXPECT_EQ(types, "text tool_use text tool_use text ");
  EXPECT_EQ(types, streamed_types);
}

TEST_F(ApiTest, NoAnswerShowsWhatWasDrafted) {
  const std::string said = R"(SAY:<think>abc</think>hi. <tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>)";
  const std::string messages = R"({"messages":[{"role":"user","content":")" + said + "\"}],";
  const std::string chat = R"("tools":[{"type":"function","function":{"name":"f"}}],"logprobs":true)";
  const std::string scored = R"(,"include":["message.output_text.logprobs"],"store":false)";
  const std::pair<const char*, std::string> asked[] = {
      {"/v1/completions", R"({"prompt":"SAY:h\u00e9, you","logprobs":2,"echo":true,"return_token_ids":true)"},
      {"/v1/completions", R"({"prompt":"SAY:one, two","logprobs":1,"stop":", t","min_tokens":3)"},
      {"/v1/completions", R"({"prompt":"a","max_tokens":30,"n":3,"best_of":3)"},
      {"/v1/chat/completions", messages + chat + R"(,"return_token_ids":true)"},
      {"/v1/responses", R"({"input":")" + said + R"(","tools":[{"type":"function","name":"f"}])" + scored},
      {"/v1/responses", R"({"input":"SAY:one. two","stop":["."])" + scored},
      {"/v1/messages", messages + R"("max_tokens":100,"tools":[{"name":"f","input_schema":{"type":"object"}}])"}};
  const std::regex names(R"x("(id|item_id|call_id)":"[^"]*"|"created(_at)?":\d+|,"slo_met":(true|false))x");
  std::vector<std::string> plain;
  for (const int32_t drafts : {0, 4}) {
    if (drafts > 0) TearDown();
    start({}, 64, {.drafts = drafts});
    state_->reasoning_format = ReasoningFormat::kThink;
    size_t next = 0;
    for (const auto& [path, body] : asked) {
      for (const char* form : {"}", R"(,"stream":true})"}) {
        const auto exchange = send("POST", path, body + form);
        ASSERT_TRUE(exchange->wait([&] { return exchange->ended; }));
        EXPECT_EQ(exchange->head.status, 200) << exchange->head.body;
        const std::string answer = std::regex_replace(exchange->head.body, names, "");
        if (drafts == 0) {
          plain.push_back(answer);
        } else if (body.find("best_of") == std::string::npos || *form == '}') {
          EXPECT_EQ(answer, plain[next]) << path << body;
        } else {
          EXPECT_EQ(answer.size(), plain[next].size()) << "choices take turns as they come";
        }
        ++next;
      }
    }
  }
  EXPECT_GT(engine_->stats().accepted_tokens, 40u);
}

TEST_F(ApiTest, ACharacterThatIsCutIsLeftOut) {
  start();
  const std::string body = R"({"prompt":"SAY:a😀","max_tokens":3)";
  EXPECT_EQ(ask("/v1/completions", body + "}")["choices"][0]["text"], "a");
  std::string text;
  for (const Json& event : stream("/v1/completions", body + R"(,"stream":true})")) text += event["choices"][0]["text"];
  EXPECT_EQ(text, "a");
}

TEST_F(ApiTest, MinTokensAndAGrammar) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  start();
  const Json r = ask("/v1/completions", R"({"prompt":"x","guided_regex":"a{1,3}","min_tokens":10,"max_tokens":20})");
  EXPECT_EQ(r["choices"][0]["text"], "aaa");
  EXPECT_EQ(r["choices"][0]["finish_reason"], "stop");
  // Stop strings wait as they do without a grammar.
  for (const char* more : {"", R"(,"guided_regex":"[a-z]{12}")"}) {
    const Json stopped = ask(
        "/v1/completions", fmt::format(R"({{"prompt":"x","min_tokens":5,"max_tokens":20,"stop":["b","h"]{}}})", more));
    EXPECT_EQ(stopped["choices"][0]["text"], "abcdefg") << more;
  }
}

TEST_F(ApiTest, AGrammarsEndIsTheAnswersWhateverIsIgnored) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  start();
  const Json r = ask("/v1/completions", R"({"prompt":"x","guided_regex":"a{3}","ignore_eos":true,"max_tokens":20})");
  EXPECT_EQ(r["choices"][0]["text"], "aaa");
  EXPECT_EQ(r["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(r["usage"]["completion_tokens"], 4);
  const Json call = ask(
      "/v1/chat/completions",
      R"({"messages":[{"role":"user","content":"x"}],"max_tokens":50,"ignore_eos":true,"tool_choice":"required","tools":)"
      R"([{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{},"additionalProperties":false}}}]})");
  EXPECT_EQ(call["choices"][0]["finish_reason"], "tool_calls") << call;
}

// Marks of calls may be special tokens and stay in the text that is read for them; the end does not.
TEST_F(ApiTest, TheEndIsNoTextWhereCallsAreReadFromIt) {
  start();
  const auto message = [&](std::string_view more) -> Json {
    return ask(
        "/v1/chat/completions",
        fmt::format(R"({{"messages":[{{"role":"user","content":"SAY:hi"}}],"max_tokens":50,)"
                    R"("include_stop_str_in_output":true,"tools":[{{"type":"function","function":{{"name":"f",)"
                    R"("parameters":{{"type":"object","properties":{{}},"additionalProperties":false}}}}}}]{}}})",
                    more))["choices"][0]["message"];
  };
  EXPECT_EQ(message("")["content"], "hi");
  EXPECT_EQ(message(R"(,"skip_special_tokens":false)")["content"], "hi<|im_end|>");
  if (!grammars_available()) return;
  for (const char* skip : {"true", "false"}) {
    const Json forced = message(fmt::format(
        R"(,"skip_special_tokens":{},"tool_choice":{{"type":"function","function":{{"name":"f"}}}})", skip));
    EXPECT_EQ(forced["tool_calls"][0]["function"]["arguments"], "{}") << skip;
  }
}

TEST_F(ApiTest, StrictSchemasAreEnforcedOrRefused) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  start();
  const auto body = [](const char* strict) {
    return fmt::format(
        R"({{"messages":[{{"role":"user","content":"a"}}],"max_tokens":9,"response_format":{{"type":"json_schema","json_schema":)"
        R"({{"name":"s","strict":{},"schema":{{"type":"array","uniqueItems":true,"items":{{"type":"integer"}}}}}}}}}})",
        strict);
  };
  const Json refused = ask("/v1/chat/completions", body("true"), 400);
  EXPECT_NE(refused["error"]["message"].get<std::string>().find("uniqueItems"), std::string::npos);
  const auto warned = send("POST", "/v1/chat/completions", body("false"));
  ASSERT_TRUE(warned->wait([&] { return warned->ended; }));
  EXPECT_EQ(warned->head.status, 200) << warned->head.body;
  EXPECT_TRUE(std::any_of(warned->head.headers.begin(), warned->head.headers.end(), [](const http::Header& h) {
    return h.name == "X-NestedFP-Unenforced" && h.value == "uniqueItems";
  }));
  ask("/v1/chat/completions",
      R"({"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"type":"object","not":{}}}}]})",
      400);
  // A call is held to its own function's schema.
  const auto forced = [&](const char* name) {
    const auto call = send(
        "POST", "/v1/chat/completions",
        fmt::format(
            R"({{"messages":[{{"role":"user","content":"a"}}],"max_tokens":9,"tools":[{{"type":"function","function":)"
            R"({{"name":"f","parameters":{{"type":"object","not":{{}}}}}}}},{{"type":"function","function":{{"name":"g"}}}}],)"
            R"("tool_choice":{{"type":"function","function":{{"name":"{}"}}}}}})",
            name));
    EXPECT_TRUE(call->wait([&] { return call->ended; }));
    return std::any_of(call->head.headers.begin(), call->head.headers.end(),
                       [](const http::Header& h) { return h.name == "X-NestedFP-Unenforced"; });
  };
  EXPECT_TRUE(forced("f"));
  EXPECT_FALSE(forced("g"));
  const std::string large = R"({"type":"object","description":")" + std::string(70'000, 'd') + "\"}";
  EXPECT_EQ(
      ask("/v1/chat/completions",
          R"({"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","parameters":)" +
              large + "}}]}",
          400)["error"]["param"],
      "tools");
}

// A grammar whose masks take a second each: its own answer ends with an error that says so, and others get their
// tokens.
TEST_F(ApiTest, ADearGrammarHoldsNobodyUp) {
  if (!grammars_available()) GTEST_SKIP() << "built without xgrammar (scripts/build-xgrammar)";
  grammar_limits_.token_burst = std::chrono::milliseconds(50);
  grammar_limits_.token_mean = std::chrono::microseconds(100);
  start();
  const auto dear = send(
      "POST", "/v1/completions",
      R"({"prompt":"x","max_tokens":2000,"guided_grammar":"root ::= e \"~\"\ne ::= e e | e e e | \"a\" | \"a\" e | e \"a\" | \"a\" e \"a\""})");
  for (int i = 0; i < 5; ++i) ask("/v1/completions", R"({"prompt":"x","max_tokens":200})");
  ASSERT_TRUE(dear->wait([&] { return dear->ended; }));
  EXPECT_EQ(dear->head.status, 400) << dear->head.body;
  EXPECT_NE(dear->head.body.find("takes too long"), std::string::npos) << dear->head.body;
}

TEST(ConstantTime, Compares) {
  EXPECT_TRUE(equal_constant_time("abc", "abc"));
  EXPECT_FALSE(equal_constant_time("abc", "abd"));
  EXPECT_FALSE(equal_constant_time("abc", "abcabc"));
  EXPECT_FALSE(equal_constant_time("abcabc", "abc"));
  EXPECT_FALSE(equal_constant_time("a", ""));
  EXPECT_TRUE(equal_constant_time("", ""));
}

}  // namespace
}  // namespace nfp::server
