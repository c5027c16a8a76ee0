// The endpoints that the engine works for: completions, chat, the Responses API, the Messages API, embeddings.
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "runtime/loaded_model.h"
#include "server/api/dialects.h"
#include "server/api/response_items.h"
#include "server/serve/api_call.h"
#include "server/serve/embedding.h"
#include "server/serve/generation.h"

namespace nfp::server {
namespace {

constexpr std::string_view kResponses = "/v1/responses/";
constexpr std::string_view kInputItems = "/input_items";

ApiError no_response(std::string_view id, int status, std::string_view param) {
  return ApiError{status,
                  fmt::format("there is no response '{}' (any more); responses are kept in memory, within "
                              "--response-store-memory",
                              id.substr(0, 100)),
                  std::string(param), "previous_response_not_found"};
}

// As OpenAI has it.
ApiError no_item(std::string_view id, std::string param) {
  return ApiError{404,
                  fmt::format("Item with id '{}' not found: items are kept with their responses, in memory, unless "
                              "'store' is false; send the item itself",
                              id.substr(0, 100)),
                  std::move(param), "item_not_found"};
}

ApiError no_path() {
  return ApiError{404, "there is no such path; /openapi.json lists those there are", "", "not_found"};
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
  if (!failure && !state()->model.facts().has_head) failure = bad_request("model", std::string(kNoHead));
  if (failure) return reply_error(call, *failure);
  std::make_shared<Generation>(state(), call.context(), std::move(request))->start(call.on_worker);
}

void Api::responses(Call& call) { read_response(call, &Api::run); }
void Api::count_input_tokens(Call& call) { read_response(call, &Api::count); }

void Api::read_response(Call& call, void (Api::*then)(Call&, MaybeError, GenerationRequest)) {
  auto body = json_body(call);
  if (!body) return;
  const auto from = std::make_shared<ResponsesRequest>();
  std::vector<ItemReference> references;
  if (auto failure = find_references(*body, call.key, from.get(), &references)) return reply_error(call, *failure);
  size_t bytes = 0;
  for (const ItemReference& reference : references) bytes += reference.response->response.size();
  auto go_on = [this, from, then, references = std::move(references),
                body = std::make_shared<Json>(std::move(*body))](Call& there) {
    if (put_items(there, references, body.get())) go_on_from(there, *body, from, then);
  };
  if (bytes > kInlineBody && !call.on_worker) return on_worker(call, bytes, std::move(go_on));
  go_on(call);
}

// Clients that know a response to be kept send references to its items.
MaybeError Api::find_references(const Json& body, int key, ResponsesRequest* from,
                                std::vector<ItemReference>* out) const {
  const auto input = body.find("input");
  if (input == body.end() || !input->is_array()) return std::nullopt;
  std::unordered_set<std::string> ids;
  for (size_t i = 0; i < input->size(); ++i) {
    const Json& item = (*input)[i];
    if (!item.is_object()) continue;
    const std::string where = fmt::format("input[{}]", i);
    Fields fields(item, where);
    const Json* type = fields.find("type");
    if (type != nullptr ? *type != "item_reference" : item.contains("role") || !item.contains("id")) continue;
    std::string id;
    NFP_API_TRY(fields.get("id", &id));
    NFP_API_TRY(fields.rest(state()->limits, &from->ignored));
    if (!ids.insert(id).second) {
      return bad_request(where + ".id",
                         fmt::format("'{}.id' is that of an item before, '{}'", where, id.substr(0, 100)));
    }
    auto response = state()->responses.find(ResponseStore::id_of_item(id), key);
    if (!response) return no_item(id, where + ".id");
    out->push_back({i, std::move(id), std::move(response)});
  }
  return std::nullopt;
}

bool Api::put_items(Call& call, std::span<const ItemReference> references, Json* body) const {
  std::unordered_set<std::string_view> read;    // responses
  std::unordered_map<std::string, Json> items;  // theirs, by id
  for (const ItemReference& reference : references) {
    const std::string param = fmt::format("input[{}].id", reference.place);
    if (read.insert(reference.response->id).second) {
      auto response = kept_json(call, reference.response->response, param);
      if (!response) return false;
      for (Json& item : (*response)["output"]) items.emplace(item["id"].get<std::string>(), std::move(item));
    }
    const auto found = items.find(reference.id);
    if (found == items.end()) {
      reply_error(call, no_item(reference.id, param));
      return false;
    }
    (*body)["input"][reference.place] = std::move(found->second);
  }
  return true;
}

void Api::go_on_from(Call& call, const Json& body, const std::shared_ptr<ResponsesRequest>& from,
                     void (Api::*then)(Call&, MaybeError, GenerationRequest)) {
  if (auto failure = read_responses(body, state()->limits, from.get())) return reply_error(call, *failure);
  std::shared_ptr<const ResponseStore::Entry> previous;
  if (!from->previous.empty()) {
    previous = state()->responses.find(from->previous, call.key);
    if (!previous) return reply_error(call, no_response(from->previous, 400, "previous_response_id"));
  }
  auto go_on = [this, from, previous, then](Call& there) {
    GenerationRequest request;
    state()->model.facts().sampling.apply(request.sampling);
    std::optional<Json> earlier = Json::array();
    if (previous) earlier = kept_json(there, previous->conversation, "previous_response_id");
    if (!earlier) return;
    auto failure = parse_responses(*from, std::move(*earlier), state()->limits, &request);
    (this->*then)(there, std::move(failure), std::move(request));
  };
  const bool heavy = previous && previous->conversation.size() > kInlineBody;
  if (heavy && !call.on_worker) return on_worker(call, previous->conversation.size(), std::move(go_on));
  go_on(call);
}

std::optional<Json> Api::kept_json(Call& call, const std::string& text, std::string_view param) const {
  size_t bytes = 0;
  auto parsed = parse_json(text, {}, call.stop.get_token(), &bytes);
  if (!parsed.ok()) {
    ApiError failure = from_engine(parsed.error());
    failure.param = param;
    reply_error(call, failure);
    return std::nullopt;
  }
  http::ByteLease& lease = call.request.lease;
  if (!lease.resize(lease.bytes() + bytes + text.size())) {
    reply_error(call, ApiError{429, "the server holds as many bytes of requests as it may; try again later", "", ""});
    return std::nullopt;
  }
  return std::move(*parsed);
}

void Api::stored_response(Call& call) {
  std::string_view id = call.path.substr(kResponses.size());
  const bool items = id.ends_with(kInputItems);
  if (items) id.remove_suffix(kInputItems.size());
  if (id.find('/') != std::string_view::npos) return reply_error(call, no_path());
  const auto found = state()->responses.find(id, call.key);
  if (!found) return reply_error(call, no_response(id, 404, ""));
  if (!items && ("&" + call.request.query + "&").find("&stream=true&") != std::string::npos) {
    return reply_error(call, bad_request("stream", "'stream' must be false: the events of a kept response are not kept",
                                         "unsupported_parameter"));
  }
  if (!items) return reply_counted(call, found->response);
  ItemsPage page;
  if (auto failure = read_items_page(call.request.query, &page)) return reply_error(call, *failure);
  auto list = [this, found, page](Call& there) {
    const auto conversation = kept_json(there, found->conversation, "");
    if (!conversation) return;
    auto body = input_items(*conversation, found->id, page);
    if (!body) return reply_error(there, bad_request("after", "'after' is the id of none of these items"));
    reply_counted(there, std::move(*body));
  };
  if (found->conversation.size() > kInlineBody) return on_worker(call, found->conversation.size(), std::move(list));
  list(call);
}

void Api::delete_response(Call& call) {
  const std::string_view id = call.path.substr(kResponses.size());
  if (id.find('/') != std::string_view::npos) return reply_error(call, no_path());
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
  count(call, std::move(failure), std::move(request));
}

void Api::count(Call& call, MaybeError failure, GenerationRequest request) {
  if (!failure) failure = read_headers(call, &request);
  if (failure) return reply_error(call, *failure);
  const ServedModel& model = state()->model;
  model.tell_unread(&request);
  tell_ignored(call.headers, call.request_id, request.ignored);
  const auto stop = call.stop.get_token();
  const auto text = model.render_chat(request, request.tool_choice != ToolChoice::kNone, stop);
  if (!text.ok()) return reply_error(call, from_engine(text.error()));
  auto tokens = model.tokenizer().encode(*text, {.add_special_tokens = false, .parse_special = true, .stop = stop});
  if (!tokens.ok()) return reply_error(call, from_engine(tokens.error()));
  std::vector<std::vector<int32_t>> prompts = {std::move(*tokens)};
  if (auto wrong = truncate_prompts(request, model.bounds().max_context, &prompts)) return reply_error(call, *wrong);
  const char* object = request.api == TextApi::kResponses ? R"("object":"response.input_tokens",)" : "";
  reply_json(call, fmt::format("{{{}\"input_tokens\":{}}}", object, prompts.front().size()));
}

}  // namespace nfp::server
