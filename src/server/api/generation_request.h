// What a client asks for in POST /v1/completions and POST /v1/chat/completions: OpenAI's fields, and vLLM's and our own
// extras. Parsing checks every field; one that we do not support is an error that names it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/api/api_error.h"
#include "server/api/json_text.h"

namespace nfp::server {

struct RequestLimits {
  int max_n = 128;  // choices of one prompt
  int max_prompts = 2048;
  int max_choices = 2048;  // prompts x best_of
  int max_stop_strings = 16;
  int max_stop_bytes = 1024;  // of one stop string
  int max_stop_token_ids = 256;
  int max_logit_bias = 1024;
  int max_bad_words = 1024;
  int max_bad_word_bytes = 1024;  // of one
  int max_logprobs = 20;
  int max_messages = 4096;
  int max_tools = 128;
  int max_schema_depth = 32;
  int max_schema_bytes = 64 << 10;    // of all tools' parameters together, as JSON
  int max_grammar_bytes = 256 << 10;  // schema, regex, grammar, or all choices together
  bool strict = false;                // unknown fields are errors; else they are ignored, and the client is told
  bool keep_responses = true;         // of the Responses API, where a request does not say otherwise
};

// A constraint on the text, to be compiled for the model's vocabulary (server/grammar).
struct GrammarSpec {
  enum class Kind : uint8_t { kNone, kJsonObject, kJsonSchema, kRegex, kEbnf, kChoice };
  Kind kind = Kind::kNone;
  std::string text;                     // schema (JSON), regular expression or EBNF
  std::vector<std::string> choices;     // kChoice
  std::string param;                    // the field it came from, for errors
  std::vector<std::string> unenforced;  // keywords of a schema that the grammar does not follow
};

struct PromptInput {
  std::optional<std::string> text;
  std::vector<int32_t> tokens;  // where there is no text
};

enum class ToolChoice : uint8_t { kNone, kAuto, kRequired, kNamed };

// In whose form the answer is.
enum class TextApi : uint8_t { kOpenAi, kResponses, kMessages };

struct GenerationRequest {
  bool chat = false;
  TextApi api = TextApi::kOpenAi;
  std::string model;  // empty = the served one

  // completions
  std::vector<PromptInput> prompts;

  // chat
  Json messages = Json::array();  // checked; content parts joined, tool arguments as objects
  Json tools = nullptr;           // null or an array
  ToolChoice tool_choice = ToolChoice::kNone;
  std::string tool_name;                // kNamed
  std::vector<std::string> unenforced;  // keywords of tools' schemas
  bool parallel_tool_calls = true;
  bool include_reasoning = true;
  Json template_variables = Json::object();  // chat_template_kwargs
  // Fields that act through a variable of the chat template, where it reads that.
  struct TemplateField {
    std::string field;
    std::vector<std::string> variables;  // any of these
  };
  std::vector<TemplateField> template_fields;
  bool add_generation_prompt = true;
  bool continue_final_message = false;

  SamplingParams sampling;  // `logprobs`, `top_logprobs`, `prompt_logprobs`, `allowed` are set from the fields below
  std::vector<int32_t> allowed_token_ids;
  std::vector<std::string> bad_words;
  bool echo = false;       // the prompt stands before the answer; in chat the message that this one continues
  bool no_output = false;  // max_tokens 0: only the prompt is wanted
  bool wants_logprobs = false;
  int top_logprobs = 0;
  std::optional<int> prompt_logprobs;
  int n = 1;
  int best_of = 1;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  std::optional<bool> add_special_tokens;  // absent = as the endpoint does it
  bool skip_special_tokens = true;
  std::optional<int32_t> truncate_prompt;  // so many tokens of a prompt; -1 = as many as there is room for
  bool keep_prompt_start = false;          // of these the first, else the last
  bool return_token_ids = false;
  bool tokens_as_ids = false;  // "token_id:17" in lists of log-probabilities
  std::optional<PrecisionClass> precision;
  std::optional<double> slo_ttft_ms, slo_itl_ms;
  int priority = 0;
  GrammarSpec grammar;
  bool call_or_grammar = false;  // a call may take the place of what follows the grammar
  std::string user;
  std::string cache_salt;  // cached prefixes are shared only among requests of the same
  int key = 0;             // which API key sent it; 0 = there are none
  // Tokens of the answer for which the context must have room.
  int32_t wanted_tokens() const { return no_output ? 0 : sampling.max_tokens.value_or(1); }
  // The Responses API's own.
  std::string shown;         // fields that its answer repeats, as JSON
  std::string conversation;  // messages up to here as JSON, where the answer is to be kept
  bool store = false;
  std::vector<std::string> ignored;  // fields that are not known here
};

class Fields;
struct Unknown;

MaybeError parse_completion(const Json& body, const RequestLimits& limits, GenerationRequest* out);
MaybeError parse_chat(const Json& body, const RequestLimits& limits, GenerationRequest* out);

// The chat part alone, as /tokenize takes it too. `messages` of OpenAI's shape to what templates expect.
// `ignored` receives unknown fields; null = they are errors.
MaybeError parse_messages(const Json& messages, const RequestLimits& limits, Json* out,
                          std::vector<std::string>* ignored = nullptr);
// Text of a string or of a list of parts whose type is one of `types`; parts are separated by line breaks.
MaybeError read_text_parts(const Json& content, const std::string& where, std::initializer_list<std::string_view> types,
                           const Unknown& unknown, std::string* out);
MaybeError parse_template_variables(Fields& fields, Json* out);
// Whether the prompt ends with the beginning of an answer, or within the last message.
MaybeError parse_turn(Fields& fields, GenerationRequest* out);
// There is one tier only.
MaybeError check_service_tier(Fields& fields);
// Text or token ids, one or a list: 'prompt' of completions, 'input' of embeddings (`param`).
MaybeError parse_prompt(const Json& prompt, std::string_view param, const RequestLimits& limits,
                        std::vector<PromptInput>* out);
// What any request may say of how it is served: truncation, precision, cache_salt, user, priority, targets.
MaybeError parse_serving(Fields& fields, GenerationRequest* out);
// `unenforced`: keywords of the tools' schemas that a forced call would not follow; null = not wanted.
MaybeError parse_tools(const Json& tools, const RequestLimits& limits, Json* out, std::vector<std::string>* ignored,
                       std::vector<std::string>* unenforced = nullptr);
// The answer to a schema that asks for `strict` and cannot have it.
ApiError unenforced_error(const std::vector<std::string>& keywords, std::string_view param);

// "exact", "auto" or "fast"; `param` is the field or header named in the error.
MaybeError parse_precision(std::string_view text, std::string_view param, std::optional<PrecisionClass>* out);

// The text of a header: milliseconds, more than 0 and at most a day.
MaybeError parse_slo_header(std::string_view text, std::string_view header, std::optional<double>* out);

// Reads the fields of a JSON object and remembers which were known.
class Fields {
 public:
  // `place` of the object in the body ("stream_options", "messages[2]"), empty for the body itself: errors name fields
  // with it.
  explicit Fields(const Json& object, std::string place = "") : object_(object), place_(std::move(place)) {}

  // Null counts as absent, as OpenAI's clients send it for what is not set.
  const Json* find(std::string_view name);
  MaybeError get(std::string_view name, bool* out);
  MaybeError get(std::string_view name, std::string* out);
  MaybeError get(std::string_view name, int64_t low, int64_t high, int64_t* out);
  MaybeError get(std::string_view name, int low, int high, int* out);
  MaybeError get(std::string_view name, float* out);
  // Understood, but not supported: any value but an inert one (false, 0, "", [], {}) is an error.
  MaybeError unsupported(std::string_view name, std::string_view why);
  // Accepted and without any effect on the answer.
  void without_effect(std::string_view name) { known_.push_back(name); }
  // An error for the first field that no call above has named.
  MaybeError rest() const;
  // Or, unless `limits` are strict, their names in `ignored`, which stays short.
  MaybeError rest(const RequestLimits& limits, std::vector<std::string>* ignored) const;
  // As errors name it: "stream_options.include_usage".
  std::string path(std::string_view name) const;

 private:
  const Json& object_;
  std::string place_;
  std::vector<std::string_view> known_;
};

// What comes of members that are not known, of the objects inside a request: as Fields::rest() has it.
struct Unknown {
  const RequestLimits& limits;
  std::vector<std::string>* ignored;
  MaybeError check(const Json& object, const std::string& where, std::initializer_list<const char*> known) const;
  // The same of a known member whose value is of no use: it is told, or an error that says why.
  MaybeError leave_out(std::string where, std::string why) const;
};

}  // namespace nfp::server
