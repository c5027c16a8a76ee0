// Other APIs' requests for text, brought into the form of POST /v1/chat/completions, whose parser then checks the rest:
// OpenAI's Responses API and Anthropic's Messages API.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/api/generation_request.h"

namespace nfp::server {

// POST /v1/responses, its own part.
struct ResponsesRequest {
  Json chat = Json::object();   // the chat request without its messages
  Json input = Json::array();   // messages of this request
  Json instructions = nullptr;  // text of the system message, which later responses do not see
  std::string previous;         // previous_response_id; empty = none
  bool store = true;
  std::string shown;  // fields that the answer repeats: "\"tools\":[...],..."
  std::vector<std::string> ignored;
};
MaybeError read_responses(const Json& body, const RequestLimits& limits, ResponsesRequest* out);
// The whole request. `earlier`: messages of the conversation so far (what conversation() made).
MaybeError parse_responses(ResponsesRequest& from, Json earlier, const RequestLimits& limits, GenerationRequest* out);

// The code of the error at which Anthropic's packages go on without threads, sending whole conversations.
inline constexpr std::string_view kThreadUnsupported = "thread_unsupported_request";

// POST /v1/messages and (`counting`, without max_tokens) POST /v1/messages/count_tokens.
MaybeError parse_anthropic(const Json& body, const RequestLimits& limits, bool counting, GenerationRequest* out);

namespace dialect {

// Fields that all of these APIs take as chat completions do.
void pass_on(Fields& fields, Json* chat);
// The string of a field; empty where there is none.
std::string text_field(const Json& object, const char* name);
// A field of chat completions, and the one that this API's clients know. What begins with "]" is of every tool.
struct Renamed {
  std::string_view from, to;
};
// The chat parser with these names in its errors and for the grammar's field.
MaybeError parse_as_chat(const Json& chat, const RequestLimits& limits, std::initializer_list<Renamed> names,
                         GenerationRequest* out);

}  // namespace dialect
}  // namespace nfp::server
