#include "server/api/generation_request.h"

#include <gtest/gtest.h>

#include "server/api/dialects.h"
#include "server/api/embedding_request.h"
#include "server/api/json_schema.h"

namespace nfp::server {
namespace {

struct Parsed {
  MaybeError error;
  GenerationRequest request;
};

RequestLimits strict() {
  RequestLimits limits;
  limits.strict = true;
  return limits;
}

Parsed completion(std::string_view text) {
  Parsed p;
  p.error = parse_completion(*parse_json(text), strict(), &p.request);
  return p;
}
Parsed chat(std::string_view text) {
  Parsed p;
  p.error = parse_chat(*parse_json(text), strict(), &p.request);
  return p;
}

constexpr std::string_view kHi = R"("messages":[{"role":"user","content":"hi"}])";

Parsed chat_with(std::string_view more) { return chat("{" + std::string(kHi) + "," + std::string(more) + "}"); }

TEST(GenerationRequest, TakesEveryFormOfPrompt) {
  EXPECT_EQ(completion(R"({"prompt":"a"})").request.prompts.size(), 1u);
  EXPECT_EQ(*completion(R"({"prompt":["a","b"]})").request.prompts[1].text, "b");
  EXPECT_EQ(completion(R"({"prompt":[1,2,3]})").request.prompts[0].tokens, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(completion(R"({"prompt":[[1],[2,3]]})").request.prompts[1].tokens.size(), 2u);
  for (const char* bad : {R"({})", R"({"prompt":null})", R"({"prompt":[]})", R"({"prompt":{}})", R"({"prompt":[1.5]})",
                          R"({"prompt":[[]]})", R"({"prompt":[1,"a"]})", R"({"prompt":["a",1]})",
                          R"({"prompt":[99999999999]})", R"({"prompt":true})"}) {
    const auto p = completion(bad);
    ASSERT_TRUE(p.error) << bad;
    EXPECT_EQ(p.error->param, "prompt") << bad;
  }
}

TEST(GenerationRequest, ReadsEveryField) {
  const auto p = completion(
      R"({"model":"m","prompt":"a","max_tokens":7,"temperature":0.5,"top_p":0.9,"top_k":-1,"min_p":0.1,"n":2,"best_of":3,
          "presence_penalty":1,"frequency_penalty":-1,"repetition_penalty":1.1,"seed":42,"stop":["x","y"],
          "stop_token_ids":[5],"logit_bias":{"3":-100},"min_tokens":2,"ignore_eos":true,"logprobs":3,"prompt_logprobs":1,
          "echo":true,"add_special_tokens":false,"skip_special_tokens":false,"include_stop_str_in_output":true,
          "precision":"exact","user":"u","suffix":null})");
  ASSERT_FALSE(p.error) << p.error->message;
  const GenerationRequest& r = p.request;
  EXPECT_EQ(r.sampling.max_tokens, 7);
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0.5f);
  EXPECT_EQ(r.sampling.top_k, 0);
  EXPECT_EQ(r.n, 2);
  EXPECT_EQ(r.best_of, 3);
  EXPECT_EQ(r.sampling.seed, 42u);
  EXPECT_EQ(r.sampling.stop.size(), 2u);
  EXPECT_EQ(r.sampling.logit_bias.at(0), (std::pair<int32_t, float>{3, -100.0f}));
  EXPECT_TRUE(r.wants_logprobs);
  EXPECT_EQ(r.top_logprobs, 3);
  EXPECT_EQ(r.prompt_logprobs, 1);
  EXPECT_EQ(r.add_special_tokens, false);
  EXPECT_EQ(r.precision, PrecisionClass::kExact);
}

TEST(GenerationRequest, ASeedOfMinusOneIsNone) {
  for (const auto& [field, seed] : {std::pair<std::string, std::optional<uint64_t>>{R"("seed":-1)", std::nullopt},
                                    {R"("seed":null)", std::nullopt},
                                    {R"("seed":0)", 0},
                                    {R"("seed":-2)", static_cast<uint64_t>(-2)}}) {
    GenerationRequest r;
    ASSERT_FALSE(
        parse_chat(*parse_json(R"({"messages":[{"role":"user","content":"a"}],)" + field + "}"), RequestLimits(), &r));
    EXPECT_EQ(r.sampling.seed, seed) << field;
  }
}

TEST(GenerationRequest, UnknownFieldsAreIgnoredByNameUnlessStrict) {
  GenerationRequest r;
  ASSERT_FALSE(parse_chat(*parse_json(R"({"messages":[{"role":"user","content":"a","x":1}],"y":2,"temperature":0})"),
                          RequestLimits(), &r));
  EXPECT_EQ(r.ignored, (std::vector<std::string>{"messages[0].x", "y"}));
}

TEST(GenerationRequest, WhatTheServerHasAsDefaultStaysWhereNothingIsSaid) {
  GenerationRequest r;
  r.sampling.temperature = 0.25f;
  r.sampling.top_k = 7;
  ASSERT_FALSE(parse_completion(*parse_json(R"({"prompt":"a","temperature":null,"top_p":0.5})"), strict(), &r));
  EXPECT_FLOAT_EQ(r.sampling.temperature, 0.25f);
  EXPECT_EQ(r.sampling.top_k, 7);
  EXPECT_FLOAT_EQ(r.sampling.top_p, 0.5f);
}

TEST(GenerationRequest, TheTemplateIsToldOfEffortAndDocuments) {
  Parsed p = chat(R"({"messages":[{"role":"user","content":"hi"}],"reasoning_effort":"none","documents":[{"a":1}],
                     "chat_template_kwargs":{"enable_thinking":true}})");
  ASSERT_FALSE(p.error) << p.error->message;
  EXPECT_EQ(p.request.template_variables["reasoning_effort"], "none");
  EXPECT_EQ(p.request.template_variables["enable_thinking"], true);  // chat_template_kwargs wins
  EXPECT_EQ(p.request.template_variables["thinking"], false);
  EXPECT_EQ(p.request.template_variables["documents"].size(), 1u);
  EXPECT_EQ(p.request.template_fields.size(), 2u);
}

TEST(GenerationRequest, NamesWhatItDoesNotSupport) {
  const auto expect = [](const Parsed& p, std::string_view param) {
    ASSERT_TRUE(p.error) << param;
    EXPECT_EQ(p.error->param, param);
    EXPECT_NE(p.error->message.find(param), std::string::npos) << p.error->message;
  };
  expect(completion(R"({"prompt":"a","suffix":"b"})"), "suffix");
  expect(completion(R"({"prompt":"a","use_beam_search":true})"), "use_beam_search");
  expect(completion(R"({"prompt":"a","nonsense":1})"), "nonsense");
  expect(chat_with(R"("functions":[{}])"), "functions");
  expect(chat_with(R"("store":true)"), "store");
  expect(chat_with(R"("modalities":["audio"])"), "modalities");
  expect(chat_with(R"("top_logprobs":2)"), "top_logprobs");
  expect(chat_with(R"("stream_options":{})"), "stream_options");
  expect(chat_with(R"("stream":true,"stream_options":{"other":1})"), "stream_options.other");
  // Inert values ask for nothing.
  EXPECT_FALSE(completion(R"({"prompt":"a","use_beam_search":false,"suffix":""})").error);
  EXPECT_FALSE(chat_with(R"("store":false,"functions":null,"modalities":["text"],"service_tier":"auto")").error);
  // So does vLLM's default of a field of beam search, which its clients send.
  EXPECT_FALSE(completion(R"({"prompt":"a","length_penalty":1.0})").error);
  EXPECT_FALSE(chat_with(R"("length_penalty":1.0)").error);
}

// Not "'type' must be a string" where several objects of a request have a type.
TEST(GenerationRequest, NamesFieldsByTheirPath) {
  const auto expect = [](const MaybeError& error, std::string_view param) {
    ASSERT_TRUE(error) << param;
    EXPECT_EQ(error->param, param);
    EXPECT_NE(error->message.find(fmt::format("'{}'", param)), std::string::npos) << error->message;
  };
  expect(chat_with(R"("response_format":{"type":1})").error, "response_format.type");
  expect(chat_with(R"("response_format":{"type":"json_schema","json_schema":{"schema":{},"strict":1}})").error,
         "response_format.json_schema.strict");
  expect(chat_with(R"("stream":true,"stream_options":{"include_usage":1})").error, "stream_options.include_usage");
  expect(chat_with(R"("structured_outputs":{"json_object":1})").error, "structured_outputs.json_object");
  expect(chat_with(R"("structured_outputs":{"regex":1})").error, "structured_outputs.regex");
  expect(chat_with(R"("structured_outputs":{"oracle":1})").error, "structured_outputs.oracle");
  expect(chat(R"({"messages":[{"role":"user","content":"a"},{"role":5,"content":"a"}]})").error, "messages[1].role");
  expect(chat(R"({"messages":[{"role":"user","content":"a","name":5}]})").error, "messages[0].name");
  const auto responses = [](std::string_view text) {
    ResponsesRequest request;
    return read_responses(*parse_json(text), strict(), &request);
  };
  expect(responses(R"({"input":[{"type":5}]})"), "input[0].type");
  expect(responses(R"({"input":[{"type":"function_call","name":5}]})"), "input[0].name");
  const auto embedding = [](std::string_view text) {
    EmbeddingRequest request;
    return parse_embedding(*parse_json(text), strict(), &request);
  };
  expect(embedding(R"({"input":"a","embed_dtype":"little"})"), "embed_dtype");
  expect(embedding(R"({"input":"a","endianness":"float32"})"), "endianness");
  EXPECT_FALSE(embedding(R"({"input":"a","embed_dtype":"float32","endianness":"native"})"));
}

TEST(GenerationRequest, ChecksTypesAndBounds) {
  for (const char* bad :
       {R"("n":0)", R"("n":129)", R"("n":1.5)", R"("n":"2")", R"("max_tokens":-1)", R"("temperature":"hot")",
        R"("stream":1)", R"("stop":5)", R"("stop":[1])", R"("logit_bias":{"x":1})", R"("logit_bias":{"1":101})",
        R"("logit_bias":[])", R"("seed":1e30)", R"("precision":"half")", R"("prompt_logprobs":21)",
        R"("top_logprobs":21,"logprobs":true)", R"("temperature":1e999)"}) {
    const auto text = "{" + std::string(kHi) + "," + bad + "}";
    const auto json = parse_json(text);
    if (!json.ok()) continue;  // 1e999 is no number to the parser already
    GenerationRequest request;
    EXPECT_TRUE(parse_chat(*json, RequestLimits(), &request)) << bad;
  }
  EXPECT_FALSE(chat_with(R"("n":2.0)").error);
}

TEST(GenerationRequest, AStreamHasNoLogprobsOfItsPrompt) {
  const auto parse = [](int wanted, const RequestLimits& limits, GenerationRequest* request) {
    const auto body = fmt::format(R"({{"prompt":"a","stream":true,"prompt_logprobs":{}}})", wanted);
    return parse_completion(*parse_json(body), limits, request);
  };
  GenerationRequest none, some, told;
  EXPECT_FALSE(parse(0, RequestLimits(), &none));
  EXPECT_FALSE(none.prompt_logprobs);
  EXPECT_EQ(none.ignored, std::vector<std::string>{"prompt_logprobs"});
  EXPECT_EQ(parse(1, RequestLimits(), &some)->param, "prompt_logprobs");
  EXPECT_EQ(parse(0, strict(), &told)->param, "prompt_logprobs");
}

TEST(GenerationRequest, ContinuesAMessageUnlessANewOneIsAskedForToo) {
  for (const char* more : {"", R"(,"add_generation_prompt":null)", R"(,"add_generation_prompt":false)"}) {
    const auto continued = chat_with(R"("continue_final_message":true)" + std::string(more));
    ASSERT_FALSE(continued.error) << more << continued.error->message;
    EXPECT_FALSE(continued.request.add_generation_prompt) << more;
  }
  const auto both = chat_with(R"("continue_final_message":true,"add_generation_prompt":true)");
  ASSERT_TRUE(both.error);
  EXPECT_EQ(both.error->param, "continue_final_message");
}

TEST(GenerationRequest, MaxTokensZeroWantsOnlyThePrompt) {
  const auto p = completion(R"({"prompt":"a","max_tokens":0,"echo":true,"logprobs":1})");
  ASSERT_FALSE(p.error);
  EXPECT_TRUE(p.request.no_output);
  EXPECT_EQ(p.request.sampling.max_tokens, 1);
  EXPECT_EQ(completion(R"({"prompt":"a"})").request.sampling.max_tokens, 16);
  EXPECT_FALSE(chat_with(R"("max_tokens":3,"max_completion_tokens":5)").error);
  EXPECT_EQ(chat_with(R"("max_tokens":3,"max_completion_tokens":5)").request.sampling.max_tokens, 5);
}

TEST(GenerationRequest, NormalizesMessages) {
  const auto p = chat(
      R"({"messages":[{"role":"developer","content":"be brief"},
                      {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
                      {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
                        "function":{"name":"f","arguments":"{\"x\": 1}"}}]},
                      {"role":"tool","tool_call_id":"1","content":"2"}]})");
  ASSERT_FALSE(p.error) << p.error->message;
  EXPECT_EQ(p.request.messages[0]["role"], "system");
  EXPECT_EQ(p.request.messages[1]["content"], "a\nb");
  EXPECT_EQ(p.request.messages[2]["tool_calls"][0]["function"]["arguments"]["x"], 1);
  EXPECT_EQ(p.request.messages[3]["tool_call_id"], "1");
  for (const char* bad :
       {R"({"messages":[]})", R"({"messages":{}})", R"({"messages":[1]})",
        R"({"messages":[{"role":"robot","content":""}]})", R"({"messages":[{"role":"user"}]})",
        R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})",
        R"({"messages":[{"role":"user","content":5}]})",
        R"({"messages":[{"role":"user","content":"a","tool_calls":[]}]})",
        R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"no"}}]}]})",
        R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":5}}]}]})",
        R"({"messages":[{"role":"user","content":"a","surprise":1}]})"}) {
    EXPECT_TRUE(chat(bad).error) << bad;
  }
}

TEST(GenerationRequest, ArgumentsThatWereCutOffAreNoneAndTold) {
  const auto with = [](const std::string& arguments) {
    Parsed p;
    p.error = parse_chat(*parse_json(R"({"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f",)"
                                     R"("arguments":)" +
                                     arguments + "}}]}]}"),
                         RequestLimits{}, &p.request);
    return p;
  };
  const Parsed cut = with(R"("{\"x\": \"lon")");
  ASSERT_FALSE(cut.error) << cut.error->message;
  EXPECT_EQ(cut.request.messages[0]["tool_calls"][0]["function"]["arguments"], Json::object());
  EXPECT_EQ(cut.request.ignored, (std::vector<std::string>{"messages[0].tool_calls[0].function.arguments"}));
  for (const char* other : {R"("[1]")", "[1]", "5"}) EXPECT_TRUE(with(other).error) << other;
}

TEST(GenerationRequest, ToolChoice) {
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}])";
  EXPECT_EQ(chat_with(tools).request.tool_choice, ToolChoice::kAuto);
  EXPECT_EQ(chat_with(tools + R"(,"tool_choice":"required")").request.tool_choice, ToolChoice::kRequired);
  const auto named = chat_with(tools + R"(,"tool_choice":{"type":"function","function":{"name":"f"}})");
  EXPECT_EQ(named.request.tool_choice, ToolChoice::kNamed);
  EXPECT_EQ(named.request.tool_name, "f");
  EXPECT_TRUE(chat_with(tools + R"(,"tool_choice":{"type":"function","function":{"name":"g"}})").error);
  EXPECT_TRUE(chat_with(tools + R"(,"tool_choice":"sometimes")").error);
  EXPECT_TRUE(chat_with(R"("tool_choice":"auto")").error);
  EXPECT_TRUE(chat_with(R"("tools":[{"type":"function"}])").error);
  EXPECT_TRUE(chat_with(tools + R"(,"tool_choice":"required","guided_regex":"a")").error);
  // The form of an answer in text, which a forced call leaves no room for.
  for (const std::string choice : {R"("required")", R"({"type":"function","function":{"name":"f"}})"}) {
    std::string fields = tools + R"(,"response_format":{"type":"json_object"},"tool_choice":)";
    fields += choice;
    const auto forced = chat_with(fields);
    EXPECT_FALSE(forced.error);
    EXPECT_EQ(forced.request.grammar.kind, GrammarSpec::Kind::kNone);
  }
  // Where the model may choose, a call takes the place of such an answer, and of no other grammar's.
  EXPECT_TRUE(chat_with(tools + R"(,"response_format":{"type":"json_object"})").request.call_or_grammar);
  EXPECT_FALSE(chat_with(tools + R"(,"guided_regex":"a")").request.call_or_grammar);
  EXPECT_FALSE(
      chat_with(tools + R"(,"tool_choice":"none","response_format":{"type":"json_object"})").request.call_or_grammar);
}

TEST(GenerationRequest, AllowedTools) {
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f","parameters":{"not":{}}}},)"
                            R"({"type":"function","function":{"name":"g"}}],"tool_choice":)";
  const auto allow = [&](const std::string& allowed) {
    return chat_with(tools + R"({"type":"allowed_tools","allowed_tools":)" + allowed + "}");
  };
  const Parsed p = allow(R"({"mode":"required","tools":[{"type":"function","function":{"name":"g"}}]})");
  ASSERT_FALSE(p.error) << p.error->message;
  EXPECT_EQ(p.request.tool_choice, ToolChoice::kRequired);
  ASSERT_EQ(p.request.tools.size(), 1u);
  EXPECT_EQ(p.request.tools[0]["function"]["name"], "g");
  EXPECT_TRUE(p.request.unenforced.empty());  // "not" is the other one's
  const Parsed both = allow(R"({"mode":"auto","tools":[{"function":{"name":"g"}},{"function":{"name":"f"}},5]})");
  ASSERT_FALSE(both.error) << both.error->message;
  EXPECT_EQ(both.request.tool_choice, ToolChoice::kAuto);
  EXPECT_EQ(both.request.tools.size(), 2u);
  EXPECT_EQ(both.request.unenforced, std::vector<std::string>{"not"});
  for (const auto& [bad, param] : {std::pair("5", "tool_choice.allowed_tools"),
                                   {R"({"mode":"none","tools":[]})", "tool_choice.allowed_tools.mode"},
                                   {R"({"mode":"auto"})", "tool_choice.allowed_tools.tools"},
                                   {R"({"tools":[{"function":{"name":"h"}},{"function":5},{}]})", "tool_choice"}}) {
    const Parsed refused = allow(bad);
    ASSERT_TRUE(refused.error) << bad;
    EXPECT_EQ(refused.error->param, param) << bad;
  }
  EXPECT_TRUE(chat_with(R"("tool_choice":{"type":"allowed_tools","allowed_tools":{"tools":[]}})").error);
}

TEST(GenerationRequest, Grammars) {
  using Kind = GrammarSpec::Kind;
  EXPECT_EQ(chat_with(R"("response_format":{"type":"text"})").request.grammar.kind, Kind::kNone);
  EXPECT_EQ(chat_with(R"("response_format":{"type":"json_object"})").request.grammar.kind, Kind::kJsonObject);
  EXPECT_EQ(
      chat_with(R"("response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object"}}})")
          .request.grammar.kind,
      Kind::kJsonSchema);
  EXPECT_EQ(chat_with(R"("guided_json":{"type":"object"})").request.grammar.text, R"({"type":"object"})");
  EXPECT_EQ(chat_with(R"("guided_regex":"a+")").request.grammar.kind, Kind::kRegex);
  EXPECT_EQ(chat_with(R"("guided_grammar":"root ::= \"a\"")").request.grammar.kind, Kind::kEbnf);
  EXPECT_EQ(chat_with(R"("structured_outputs":{"choice":["a","b"]})").request.grammar.choices.size(), 2u);
  EXPECT_TRUE(chat_with(R"("guided_regex":"a","guided_choice":["b"])").error);
  EXPECT_TRUE(chat_with(R"("response_format":{"type":"xml"})").error);
  EXPECT_TRUE(chat_with(R"("response_format":{"type":"json_schema"})").error);
  EXPECT_TRUE(chat_with(R"("guided_choice":[])").error);
  EXPECT_TRUE(chat_with(R"("structured_outputs":{"oracle":1})").error);
  // llama.cpp's, Together's and Fireworks' forms.
  for (const std::string type : {"json_object", "json_schema"}) {
    const Parsed p = chat_with(R"("response_format":{"type":")" + type + R"(","schema":{"type":"array","not":{}}})");
    ASSERT_FALSE(p.error) << p.error->message;
    EXPECT_EQ(p.request.grammar.kind, Kind::kJsonSchema);
    EXPECT_EQ(p.request.grammar.text, R"({"type":"array","not":{}})");
    EXPECT_EQ(p.request.grammar.unenforced, std::vector<std::string>{"not"});
    EXPECT_EQ(chat_with(R"("response_format":{"type":")" + type + R"(","schema":5})").error->param,
              "response_format.schema");
  }
  EXPECT_EQ(chat_with(R"("response_format":{"type":"json_object","schema":null})").request.grammar.kind,
            Kind::kJsonObject);
  EXPECT_EQ(chat_with(R"("grammar":"root ::= \"a\"")").request.grammar.kind, Kind::kEbnf);
  EXPECT_EQ(completion(R"({"prompt":"a","json_schema":{"type":"array"}})").request.grammar.text, R"({"type":"array"})");
  EXPECT_EQ(chat_with(R"("grammar":"","json_schema":{"type":"array"})").request.grammar.kind, Kind::kJsonSchema);
  EXPECT_EQ(chat_with(R"("grammar":5)").error->param, "grammar");
  EXPECT_EQ(chat_with(R"("json_schema":[])").error->param, "json_schema");
  EXPECT_TRUE(chat_with(R"("grammar":"root ::= \"a\"","json_schema":{})").error);
  std::string deep = "{}";
  for (int i = 0; i < 40; ++i) deep = fmt::format(R"({{"properties":{}}})", deep);
  EXPECT_TRUE(chat_with(R"("guided_json":)" + deep).error);
  EXPECT_TRUE(chat_with(R"("guided_regex":")" + std::string(300'000, 'a') + "\"").error);
}

TEST(GenerationRequest, BoundsLists) {
  std::string stops, bias;
  for (int i = 0; i < 17; ++i) stops += (i > 0 ? ",\"s" : "\"s") + std::to_string(i) + "\"";
  EXPECT_EQ(chat_with("\"stop\":[" + stops + "]").error->param, "stop");
  for (int i = 0; i < 1025; ++i) bias += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":1";
  EXPECT_EQ(chat_with("\"logit_bias\":{" + bias + "}").error->param, "logit_bias");
  EXPECT_EQ(completion(R"({"prompt":["a","b","c"],"n":128,"best_of":128,"stop":")" + std::string(2000, 'x') + "\"}")
                .error->param,
            "stop");
  // Forced calls make a grammar of the tools: of their names as well as of their parameters, all together.
  const auto tools = [](size_t name, size_t pattern) {
    std::string list;
    for (const char* end : {"a", "b"}) {
      list += std::string(list.empty() ? "" : ",") + R"({"type":"function","function":{"name":")" +
              std::string(name, 'n') + end + R"(","parameters":{"type":"object","description":")" +
              std::string(pattern, 'p') + "\"}}}";
    }
    return chat_with("\"tool_choice\":\"required\",\"tools\":[" + list + "]");
  };
  EXPECT_FALSE(tools(60, 10'000).error);
  for (const auto& large : {tools(60, 40'000), tools(40'000, 60)}) {
    ASSERT_TRUE(large.error);
    EXPECT_EQ(large.error->param, "tools");
  }
}

// Lists whose product would take minutes.
TEST(GenerationRequest, AllowedToolsAreFoundInOnePass) {
  constexpr int kMany = 100'000;
  Json tools = Json::array(), allowed = Json::array();
  for (int i = 0; i < kMany; ++i) {
    tools.push_back({{"type", "function"}, {"name", fmt::format("f{}", i)}});
    allowed.push_back({{"type", "function"}, {"name", fmt::format("g{}", i)}});
  }
  for (const Json& odd : {Json(1), Json(nullptr), Json::object(), Json({{"name", 5}}), Json({{"name", "f7"}})}) {
    allowed.push_back(odd);
  }
  const Json body = {{"input", "hi"},
                     {"tools", std::move(tools)},
                     {"tool_choice", {{"type", "allowed_tools"}, {"mode", "required"}, {"tools", std::move(allowed)}}}};
  RequestLimits limits;
  limits.max_tools = kMany;
  ResponsesRequest request;
  const MaybeError error = read_responses(body, limits, &request);
  ASSERT_FALSE(error) << error->message;
  ASSERT_EQ(request.chat["tools"].size(), 1u);
  EXPECT_EQ(request.chat["tools"][0]["function"]["name"], "f7");
  EXPECT_EQ(request.chat["tool_choice"], "required");

  // However few of them are allowed.
  ResponsesRequest refused;
  const MaybeError too_many = read_responses(body, RequestLimits(), &refused);
  ASSERT_TRUE(too_many);
  EXPECT_EQ(too_many->param, "tools");
  EXPECT_NE(too_many->message.find("at most 128"), std::string::npos) << too_many->message;
}

MaybeError responses(const std::string& more, GenerationRequest* out) {
  ResponsesRequest request;
  const MaybeError error = read_responses(*parse_json(R"({"input":"a",)" + more + "}"), strict(), &request);
  return error ? error : parse_responses(request, Json::array(), strict(), out);
}
MaybeError anthropic(const std::string& more, GenerationRequest* out) {
  return parse_anthropic(
      *parse_json(R"({"model":"m","max_tokens":9,"messages":[{"role":"user","content":"a"}],)" + more + "}"), strict(),
      /*counting=*/false, out);
}

// OpenAI's and Anthropic's range begins there.
TEST(GenerationRequest, TopPOfZeroIsTheEngines) {
  const auto p = completion(R"({"prompt":"a","top_p":0,"top_k":5})");
  ASSERT_FALSE(p.error) << p.error->message;
  EXPECT_EQ(p.request.sampling.top_k, 5);
  EXPECT_FLOAT_EQ(p.request.sampling.top_p, 0.0f);
  EXPECT_FLOAT_EQ(completion(R"({"prompt":"a","top_p":-0.5})").request.sampling.top_p,
                  -0.5f);  // the engine's to refuse
}

TEST(GenerationRequest, SchemaOfAnyJsonObjectInResponses) {
  GenerationRequest out;
  const auto error = responses(R"("text":{"format":{"type":"json_object","schema":{"type":"array"}}})", &out);
  ASSERT_FALSE(error) << error->message;
  EXPECT_EQ(out.grammar.text, R"({"type":"array"})");
  EXPECT_EQ(out.grammar.param, "text.format.schema");
  GenerationRequest refused;
  EXPECT_EQ(responses(R"("text":{"format":{"type":"json_object","schema":5}})", &refused)->param, "text.format.schema");
}

TEST(GenerationRequest, OtherApisTakeTheExtensionsOfChat) {
  for (const auto& api : {responses, anthropic}) {
    GenerationRequest out;
    const MaybeError error = api(
        R"("top_k":3,"min_p":0.1,"repetition_penalty":1.1,"presence_penalty":0.5,"frequency_penalty":0.5,"seed":4,
           "stop_token_ids":[5],"include_stop_str_in_output":true,"ignore_eos":true,"min_tokens":2,
           "logit_bias":{"3":1},"allowed_token_ids":[3,4],"bad_words":["x"],"skip_special_tokens":false,
           "guided_regex":"a+","documents":[{"a":1}],"include_reasoning":false,"priority":-1)",
        &out);
    ASSERT_FALSE(error) << error->message;
    EXPECT_EQ(out.sampling.top_k, 3);
    EXPECT_EQ(out.sampling.stop_token_ids, std::vector<int32_t>{5});
    EXPECT_EQ(out.allowed_token_ids, (std::vector<int32_t>{3, 4}));
    EXPECT_EQ(out.bad_words, std::vector<std::string>{"x"});
    EXPECT_EQ(out.grammar.kind, GrammarSpec::Kind::kRegex);
    EXPECT_EQ(out.template_variables["documents"].size(), 1u);
    EXPECT_FALSE(out.include_reasoning);
    const MaybeError wrong = api(R"("bad_words":[5])", &(out = {}));
    ASSERT_TRUE(wrong);
    EXPECT_EQ(wrong->param, "bad_words[0]");
    ASSERT_FALSE(api(R"("structured_outputs":{"choice":["a","b"]})", &(out = {})));
    EXPECT_EQ(out.grammar.choices.size(), 2u);
    EXPECT_TRUE(api(R"("structured_outputs":{"choice":["a"]},"guided_json":{})", &(out = {})));
  }
}

// What the chat parser says of them, and the grammar's compiler will.
TEST(GenerationRequest, OtherApisNamesOfSchemas) {
  GenerationRequest out;
  ASSERT_FALSE(responses(R"("text":{"format":{"type":"json_schema","name":"a","schema":{"type":"array"}}})", &out));
  EXPECT_EQ(out.grammar.param, "text.format.schema");
  ASSERT_FALSE(responses(R"("text":{"format":{"type":"json_object"}})", &(out = {})));
  EXPECT_EQ(out.grammar.param, "text.format");
  ASSERT_FALSE(
      anthropic(R"("output_config":{"format":{"type":"json_schema","schema":{"type":"array"}}})", &(out = {})));
  EXPECT_EQ(out.grammar.param, "output_config.format.schema");

  const MaybeError strict =
      responses(R"("tools":[{"type":"function","name":"f","strict":true,"parameters":{"not":{}}}])", &(out = {}));
  ASSERT_TRUE(strict);
  EXPECT_EQ(strict->param, "tools[0].parameters");
  EXPECT_EQ(strict->message.rfind("'tools[0].parameters' asks for strict", 0), 0u) << strict->message;
  const MaybeError no_object = anthropic(R"("tools":[{"name":"f","input_schema":{"type":"array"}}])", &(out = {}));
  ASSERT_TRUE(no_object);
  EXPECT_EQ(no_object->param, "tools[0].input_schema");
  EXPECT_EQ(no_object->message.rfind("'tools[0].input_schema' must describe an object", 0), 0u) << no_object->message;
  ASSERT_FALSE(anthropic(R"("tools":[{"name":"f","input_schema":{"type":"object"}},{"name":"g","input_schema":{}}])",
                         &(out = {})));
  const MaybeError no_schema = anthropic(R"("tools":[{"name":"f","input_schema":5}])", &(out = {}));
  ASSERT_TRUE(no_schema);
  EXPECT_EQ(no_schema->message, "'tools[0].input_schema' must be a JSON schema (an object)");
}

TEST(GenerationRequest, TypesBesideValuesAreComparedInOnePass) {
  constexpr int kMany = 100'000;
  Json types = Json::array(), values = Json::array();
  for (int i = 0; i < kMany; ++i) {
    types.push_back(fmt::format("a{}", i));  // no type's name
    values.push_back(fmt::format("{}", i));
  }
  types.push_back("string");
  Json schema = {{"type", std::move(types)}, {"enum", std::move(values)}};
  EXPECT_TRUE(unenforced_keywords(schema).empty());
  schema["enum"].push_back(1);
  EXPECT_EQ(unenforced_keywords(schema), std::vector<std::string>{"type"});
}

TEST(GenerationRequest, TypesOfASchema) {
  using Names = std::vector<std::string>;
  const auto found = [](std::string_view text) { return unenforced_keywords(*parse_json(text)); };
  EXPECT_EQ(found(R"({"type":"integer","enum":[1,-2]})"), Names());
  EXPECT_EQ(found(R"({"type":"integer","const":1.5})"), Names{"type"});
  EXPECT_EQ(found(R"({"type":"number","enum":[1,1.5]})"), Names());
  EXPECT_EQ(found(R"({"type":["null","boolean","array","object"],"enum":[null,true,[],{}]})"), Names());
  EXPECT_EQ(found(R"({"type":["null","boolean","array","object"],"enum":[""]})"), Names{"type"});
  EXPECT_EQ(found(R"({"type":"text","const":"a"})"), Names{"type"});
  EXPECT_EQ(found(R"({"type":"integer","multipleOf":2})"), Names());
  EXPECT_EQ(found(R"({"type":["integer","number"],"multipleOf":2})"), Names{"multipleOf"});
  // Integers that the grammar would round.
  EXPECT_EQ(found(R"({"enum":[9223372036854775807,-9223372036854775808]})"), Names());
  EXPECT_EQ(found(R"({"enum":[1,{"a":[9223372036854775808]}]})"), Names{"enum"});
  EXPECT_EQ(found(R"({"const":18446744073709551615})"), Names{"const"});
  EXPECT_EQ(found(R"({"const":18446744073709551616})"), Names{"const"});
  EXPECT_EQ(found(R"({"enum":[-9223372036854775809]})"), Names{"enum"});
  EXPECT_EQ(found(R"({"enum":[1e18,-0.5]})"), Names());
  // Bounds that the grammar leaves out.
  EXPECT_EQ(found(R"({"type":"integer","minimum":0,"maximum":18446744073709551615})"), Names{"maximum"});
  EXPECT_EQ(found(R"({"type":["integer","null"],"exclusiveMinimum":-1e19})"), Names{"exclusiveMinimum"});
  EXPECT_EQ(found(R"({"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807})"), Names());
  EXPECT_EQ(found(R"({"type":"number","maximum":18446744073709551615})"), Names());
  // The place gives a type only where the schema names none.
  EXPECT_EQ(found(R"({"type":"object","propertyNames":{"pattern":"^a"}})"), Names());
  EXPECT_EQ(found(R"({"type":"object","propertyNames":{"type":"text","pattern":"^a"}})"), Names{"pattern"});
}

TEST(GenerationRequest, ASchemasSizeAndDepthComeBeforeItsKeywords) {
  const auto strict_schema = [](const std::string& members) {
    return chat_with(R"("response_format":{"type":"json_schema","json_schema":{"strict":true,"schema":{"not":{})" +
                     members + "}}}");
  };
  ASSERT_TRUE(strict_schema("").error);
  EXPECT_NE(strict_schema("").error->message.find("not enforced"), std::string::npos);
  const auto large = strict_schema(R"(,"description":")" + std::string(300'000, 'd') + "\"");
  ASSERT_TRUE(large.error);
  EXPECT_EQ(large.error->param, "response_format.json_schema.schema");
  EXPECT_NE(large.error->message.find("larger than"), std::string::npos) << large.error->message;
  std::string deep = "{}";
  for (int i = 0; i < 40; ++i) deep = fmt::format(R"({{"items":{}}})", deep);
  const auto nested = strict_schema(R"(,"items":)" + deep);
  ASSERT_TRUE(nested.error);
  EXPECT_NE(nested.error->message.find("nested deeper"), std::string::npos) << nested.error->message;
  // As text it is not even read.
  const auto text = chat_with(R"("guided_json":")" + std::string(300'000, '[') + "\"");
  ASSERT_TRUE(text.error);
  EXPECT_EQ(text.error->param, "guided_json");
  EXPECT_NE(text.error->message.find("larger than"), std::string::npos) << text.error->message;
}

}  // namespace
}  // namespace nfp::server
