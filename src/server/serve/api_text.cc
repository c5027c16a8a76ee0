// The endpoints that the engine works for: completions, chat, the Responses API, the Messages API, embeddings.
#include <optional>
#include <tuple>
#include <utility>

#include "server/api/dialects.h"
#include "server/serve/api_call.h"
#include "server/serve/embedding.h"
#include "server/serve/generation.h"

namespace nfp::server {
namespace {

constexpr std::string_view kResponses = "/v1/responses/";

ApiError no_response(std::string_view id, int status, std::string_view param) {
  return ApiError{status,
                  fmt::format("there is no response '{}' (any more); responses are kept in memory, within "
                              "--response-store-memory",
                              id.substr(0, 100)),
                  std::string(param), "previous_response_not_found"};
}

}  // namespace

void Api::completions(Call& call) { generate(call, false); }
void Api::chat_completions(Call& call) { generate(call, true); }

void Api::generate(Call& call, bool chat) {
  const auto body = json_body(call);
  if (!body) return;
  GenerationRequest request;
  state()->model.facts().sampling.apply(request.sampling);
  auto failure =
      chat ? parse_chat(*body, state()->limits, &request) : parse_completion(*body, state()->limits, &request);
  run(call, std::move(failure), std::move(request));
}

MaybeError Api::read_headers(const Call& call, GenerationRequest* request) const {
  NFP_API_TRY(check_model(request->model));
  const std::string_view precision = call.request.header("X-NestedFP-Precision");
  if (!precision.empty() && !request->precision) {
    NFP_API_TRY(parse_precision(precision, "X-NestedFP-Precision", &request->precision));
  }
  // The gateway's names (llm-d, and what it sent before); a field of the body wins.
  const std::tuple<const char*, const char*, std::optional<double>*> latencies[] = {
      {"x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", &request->slo_ttft_ms},
      {"x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", &request->slo_itl_ms}};
  for (const auto& [name, older, value] : latencies) {
    for (const char* header : {name, older}) {
      const std::string_view text = call.request.header(header);
      if (!text.empty() && !*value) NFP_API_TRY(parse_slo_header(text, header, value));
    }
  }
  request->key = call.key;
  return std::nullopt;
}

void Api::embeddings(Call& call) {
  const auto body = json_body(call);
  if (!body) return;
  EmbeddingRequest request;
  auto failure = parse_embedding(*body, state()->limits, &request);
  if (!failure) failure = read_headers(call, &request.common);
  if (failure) return reply_error(call, *failure);
  std::make_shared<Embedding>(state(), call.context(), std::move(request))->start(call.on_worker);
}

void Api::run(Call& call, MaybeError failure, GenerationRequest request) {
  if (!failure) failure = read_headers(call, &request);
  if (failure) return reply_error(call, *failure);
  std::make_shared<Generation>(state(), call.context(), std::move(request))->start(call.on_worker);
}

void Api::responses(Call& call) {
  const auto body = json_body(call);
  if (!body) return;
  const auto from = std::make_shared<ResponsesRequest>();
  if (auto failure = read_responses(*body, state()->limits, from.get())) return reply_error(call, *failure);
  std::shared_ptr<const ResponseStore::Entry> previous;
  if (!from->previous.empty()) {
    previous = state()->responses.find(from->previous, call.key);
    if (!previous) return reply_error(call, no_response(from->previous, 400, "previous_response_id"));
  }
  auto go_on = [this, from, previous](Call& there) {
    GenerationRequest request;
    state()->model.facts().sampling.apply(request.sampling);
    Json earlier = Json::array();
    if (previous) {
      size_t bytes = 0;
      auto parsed = parse_json(previous->conversation, {}, there.stop.get_token(), &bytes);
      if (!parsed.ok()) {
        ApiError failure = from_engine(parsed.error());
        failure.param = "previous_response_id";
        return reply_error(there, failure);
      }
      if (!there.request.lease.resize(there.request.lease.bytes() + bytes + previous->conversation.size())) {
        return reply_error(
            there, ApiError{429, "the server holds as many bytes of requests as it may; try again later", "", ""});
      }
      earlier = std::move(*parsed);
    }
    auto failure = parse_responses(*from, std::move(earlier), state()->limits, &request);
    run(there, std::move(failure), std::move(request));
  };
  const bool heavy = previous && previous->conversation.size() > kInlineBody;
  if (heavy && !call.on_worker) return on_worker(call, std::move(go_on));
  go_on(call);
}

void Api::stored_response(Call& call) {
  const std::string_view id = call.path.substr(kResponses.size());
  const auto found = state()->responses.find(id, call.key);
  if (!found) return reply_error(call, no_response(id, 404, ""));
  reply_json(call, found->response);
}

void Api::delete_response(Call& call) {
  const std::string_view id = call.path.substr(kResponses.size());
  if (!state()->responses.erase(id, call.key)) return reply_error(call, no_response(id, 404, ""));
  std::string out = "{\"id\":";
  append_string(out, id);
  reply_json(call, out + ",\"object\":\"response\",\"deleted\":true}");
}

void Api::messages(Call& call) {
  const auto body = json_body(call);
  if (!body) return;
  GenerationRequest request;
  state()->model.facts().sampling.apply(request.sampling);
  auto failure = parse_anthropic(*body, state()->limits, /*counting=*/false, &request);
  run(call, std::move(failure), std::move(request));
}

void Api::count_tokens(Call& call) {
  const auto body = json_body(call);
  if (!body) return;
  GenerationRequest request;
  auto failure = parse_anthropic(*body, state()->limits, /*counting=*/true, &request);
  if (!failure) failure = check_model(request.model);
  if (failure) return reply_error(call, *failure);
  tell_ignored(call.headers, call.request_id, request.ignored);
  const ServedModel& model = state()->model;
  const auto stop = call.stop.get_token();
  const auto text = model.render_chat(request, request.tool_choice != ToolChoice::kNone, stop);
  if (!text.ok()) return reply_error(call, from_engine(text.error()));
  const auto tokens =
      model.tokenizer().encode(*text, {.add_special_tokens = false, .parse_special = true, .stop = stop});
  if (!tokens.ok()) return reply_error(call, from_engine(tokens.error()));
  reply_json(call, fmt::format("{{\"input_tokens\":{}}}", tokens->size()));
}

}  // namespace nfp::server
