#include "server/serve/api.h"

#include <algorithm>
#include <random>
#include <span>

#include "base/log.h"
#include "server/serve/api_call.h"
#include "server/serve/messages_writer.h"

namespace nfp::server {
namespace {

constexpr size_t kMaxRequestId = 128;

std::string random_id() {
  thread_local std::mt19937_64 source(std::random_device{}());
  return fmt::format("req-{:016x}", source());
}

bool harmless_id(std::string_view text) {
  return !text.empty() && text.size() <= kMaxRequestId &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 0x7F; });
}

// Without port and brackets.
std::string_view host_name(std::string_view host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.rfind(':'));
}

bool is_loopback(std::string_view name) {
  constexpr std::string_view kLocal = "localhost";
  if (name.ends_with('.')) name.remove_suffix(1);
  if (name.size() > kLocal.size() && name[name.size() - kLocal.size() - 1] == '.') {
    name.remove_prefix(name.size() - kLocal.size());  // RFC 6761: all names below it too
  }
  // (Also "127.1", which tools take for an address and no parser does.)
  const bool v4 = name.starts_with("127.") && name.find_first_not_of("0123456789.") == std::string_view::npos;
  return v4 || http::is_loopback_address(name) || http::equal_ignoring_case(name, kLocal);
}

bool has_body(const http::Request& request) {
  const std::string_view length = request.header("Content-Length");
  return request.count("Transfer-Encoding") > 0 || length.find_first_not_of('0') != std::string_view::npos;
}

bool is_json(std::string_view content_type) {
  content_type = content_type.substr(0, content_type.find(';'));
  while (!content_type.empty() && content_type.back() == ' ') content_type.remove_suffix(1);
  return http::equal_ignoring_case(content_type, "application/json");
}

// /v1/models is of OpenAI's clients, too.
bool is_anthropics(const http::Request& request, std::string_view path) {
  return path.starts_with("/v1/messages") ||
         (path.starts_with("/v1/models") && !request.header("Anthropic-Version").empty());
}

// As the clients of this path know errors.
http::Response shaped_error(const http::Request& request, std::string_view path, const ApiError& error) {
  return is_anthropics(request, path) ? anthropic_error_response(error) : error_response(error);
}

// Of paths that other servers have, why they are not here; empty = nothing to say.
std::string_view why_not(std::string_view path) {
  constexpr std::string_view kNeedsHead = ", as it needs a model with a head for it; this server has /v1/embeddings";
  constexpr struct {
    std::string_view begin, end, why;
  } kOthers[] = {
      {"/", "/rerank", kNeedsHead},
      {"/", "/score", kNeedsHead},
      {"/", "/pooling", kNeedsHead},
      {"/", "/classify", kNeedsHead},
      {"/v1/responses", "/compact",
       ", as conversations are not compacted; send those items as 'input' that are to stay"},
      {"/v1/responses/", "/cancel", ", as answers do not run in the background; closing the connection ends one"},
  };
  for (const auto& [begin, end, why] : kOthers) {
    if (path.starts_with(begin) && path.ends_with(end)) return why;
  }
  return "";
}

// For an error, which stays short.
std::string served_names(std::span<const std::string> names) {
  constexpr size_t kMost = 16;
  std::string text = fmt::format("'{}'", fmt::join(names.first(std::min(names.size(), kMost)), "', '"));
  if (names.size() > kMost) text += fmt::format(" and {} more, which /v1/models lists", names.size() - kMost);
  return text;
}

}  // namespace

bool equal_constant_time(std::string_view a, std::string_view b) {
  // Sizes may show; contents may not.
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | (a[i] ^ (b.empty() ? '\0' : b[i % b.size()])));
  }
  return difference == 0;
}

const Api::Route Api::kRoutes[] = {
    {"GET", "/", true, false, &Api::page},
    {"GET", "/health", true, false, &Api::health},
    {"GET", "/ping", true, false, &Api::health},
    {"POST", "/ping", true, false, &Api::health},
    {"GET", "/version", true, false, &Api::version},
    {"GET", "/metrics", true, true, &Api::metrics},
    {"GET", "/openapi.json", true, false, &Api::openapi},
    {"GET", "/load", true, false, &Api::load},
    {"GET", "/nestedfp/timeline", true, true, &Api::timeline},
    {"POST", "/nestedfp/demo-load", false, true, &Api::demo_load},
    {"GET", "/v1/models", false, true, &Api::models},
    {"GET", "/v1/models/", false, true, &Api::model},  // ends with '/': the rest is the id
    {"GET", "/tokenizer_info", false, true, &Api::tokenizer_info},
    {"POST", "/tokenize", false, true, &Api::tokenize},
    {"POST", "/detokenize", false, true, &Api::detokenize},
    {"POST", "/v1/completions", false, true, &Api::completions, "completions"},
    {"POST", "/v1/chat/completions", false, true, &Api::chat_completions, "chat"},
    {"POST", "/v1/embeddings", false, true, &Api::embeddings, "embeddings"},
    {"POST", "/v1/responses", false, true, &Api::responses, "responses"},
    {"POST", "/v1/responses/input_tokens", false, true, &Api::count_input_tokens},  // before those with an id
    {"GET", "/v1/responses/", false, true, &Api::stored_response},
    {"DELETE", "/v1/responses/", false, true, &Api::delete_response},
    {"POST", "/v1/messages", false, true, &Api::messages, "messages"},
    {"POST", "/v1/messages/count_tokens", false, true, &Api::count_tokens},
};

std::string_view Api::handler_name(const Route& route) {
  if (route.path == "/v1/models/") return "/v1/models/{id}";
  if (route.path == "/v1/responses/") return "/v1/responses/{id}";
  return route.path;
}

std::vector<std::string_view> Api::handler_names() {
  std::vector<std::string_view> names;
  for (const Route& route : kRoutes) {
    if (std::find(names.begin(), names.end(), handler_name(route)) == names.end()) names.push_back(handler_name(route));
  }
  return names;
}

void Api::answered(std::string_view method, std::string_view path, int status, double seconds) {
  path = inner_path(path);
  const auto route =
      std::find_if(std::begin(kRoutes), std::end(kRoutes), [&](const Route& one) { return one.matches(path); });
  http_counts_.add(route == std::end(kRoutes) ? "" : handler_name(*route), method, status, seconds);
}

Api::Api(ApiOptions options) : options_(std::move(options)), http_counts_(handler_names()) {
  while (options_.root_path.ends_with('/')) options_.root_path.pop_back();
}

std::string_view Api::inner_path(std::string_view path) const {
  const std::string_view root = options_.root_path;
  if (!root.empty() && path.starts_with(root) && (path.size() == root.size() || path[root.size()] == '/')) {
    path.remove_prefix(root.size());
    if (path.empty()) return "/";
  }
  // A slash at the end of one of the APIs' paths is none of it, as in vLLM, but that of a name is.
  if (!path.starts_with("/v1/") || !path.ends_with('/')) return path;
  const std::string_view bare = path.substr(0, path.size() - 1);
  const bool whole =
      std::any_of(std::begin(kRoutes), std::end(kRoutes), [&](const Route& one) { return one.path == bare; });
  return whole ? bare : path;
}

bool Api::Route::matches(std::string_view asked) const {
  const bool prefix = path.size() > 1 && path.back() == '/';
  return prefix ? asked.starts_with(path) && asked.size() > path.size() : asked == path;
}

const Api::Route* Api::find_route(std::string_view method, std::string_view path, bool* path_known) const {
  *path_known = false;
  for (const Route& route : kRoutes) {
    if (!route.matches(path)) continue;
    *path_known = true;
    if (method == route.method || (method == "HEAD" && route.method == "GET")) return &route;
  }
  return nullptr;
}

int Api::key_of(const http::Request& request) const {
  if (options_.api_keys.empty()) return 0;
  std::string_view given = request.header("Authorization");
  constexpr std::string_view kScheme = "bearer ";
  if (given.empty()) {
    given = request.header("X-Api-Key");  // as Anthropic's clients send it
    if (given.empty()) return -1;
  } else if (given.size() < kScheme.size() || !http::equal_ignoring_case(given.substr(0, kScheme.size()), kScheme)) {
    return -1;
  } else {
    given.remove_prefix(kScheme.size());
  }
  int found = -1;
  for (size_t i = 0; i < options_.api_keys.size(); ++i) {
    if (equal_constant_time(given, options_.api_keys[i])) found = static_cast<int>(i) + 1;
  }
  return found;
}

bool Api::host_allowed(std::string_view host) const {
  const auto& allowed = options_.allowed_hosts;
  const bool local_only = loopback_ && options_.api_keys.empty();
  if (host.empty() || (allowed.empty() && !local_only)) return true;
  const std::string_view name = host_name(host);
  return (loopback_ && is_loopback(name)) || std::any_of(allowed.begin(), allowed.end(), [&](const auto& one) {
           return one == "*" || http::equal_ignoring_case(one, name) || http::equal_ignoring_case(one, host);
         });
}

std::vector<http::Header> Api::common_headers(const http::Request& request, std::string* request_id) const {
  const std::string_view given = request.header("X-Request-Id");
  *request_id = harmless_id(given) ? std::string(given) : random_id();
  std::vector<http::Header> headers = {{"X-Request-Id", *request_id}};
  if (is_anthropics(request, inner_path(request.path))) headers.push_back({"Request-Id", *request_id});
  const std::string_view origin = request.header("Origin");
  if (!origin.empty() && !options_.allowed_origins.empty()) {
    const auto& allowed = options_.allowed_origins;
    const bool all = std::find(allowed.begin(), allowed.end(), "*") != allowed.end();
    if (all || std::find(allowed.begin(), allowed.end(), origin) != allowed.end()) {
      headers.push_back({"Access-Control-Allow-Origin", all ? "*" : std::string(origin)});
      headers.push_back({"Access-Control-Expose-Headers",
                         "X-Request-Id, Request-Id, Retry-After, X-NestedFP-Ignored, X-NestedFP-Unenforced"});
      if (!all) headers.push_back({"Vary", "Origin"});
    }
  }
  return headers;
}

// A refusal that need not wait for the body.
std::optional<http::Response> Api::check_head(const http::Request& request) {
  const auto refuse = [&](const ApiError& error, const char* allow = nullptr) {
    http::Response response = refusal(request, error);
    if (allow != nullptr) response.headers.push_back({"Allow", allow});
    return response;
  };
  if (!host_allowed(request.header("Host"))) {
    return refuse(ApiError{403, "the name in Host is none of this server's; see --allowed-hosts", "", "unknown_host"});
  }
  const std::string_view path = inner_path(request.path);
  const auto no_body = [&]() -> std::optional<http::Response> {
    if (!has_body(request)) return std::nullopt;
    return refuse(ApiError{413, "a request to this path has no body", "", ""});
  };
  if (request.method == "OPTIONS") return no_body();
  bool path_known = false;
  const Route* route = find_route(request.method, path, &path_known);
  if (route == nullptr) {
    if (path_known) {
      std::string allow;
      for (const char* method : {"GET", "HEAD", "POST", "DELETE"}) {
        if (find_route(method, path, &path_known) != nullptr) allow += fmt::format("{}, ", method);
      }
      allow += "OPTIONS";
      return refuse(ApiError{405, fmt::format("{} is not allowed here{}", request.method, why_not(path)), "",
                             "method_not_allowed"},
                    allow.c_str());
    }
    if (const std::string_view why = why_not(path); !why.empty()) {
      const std::string_view name = path.substr(path.rfind('/') + 1);
      return refuse(ApiError{404, fmt::format("there is no {} here{}", name, why), "", "not_found"});
    }
    return refuse(ApiError{404, "there is no such path; /openapi.json lists those there are", "", "not_found"});
  }
  if (!route->open && key_of(request) < 0) {
    return refuse(ApiError{401, "the API key is missing or wrong; send the header 'Authorization: Bearer KEY'", "",
                           "invalid_api_key"});
  }
  if (route->needs_model && state() == nullptr) {
    return refuse(ApiError{503, "the model is being loaded; try again later", "", "loading"});
  }
  if (draining_ && request.method == "POST" && !route->open) {
    return refuse(ApiError{503, "the server is shutting down", "", "draining"});
  }
  if (request.method != "POST" || route->open) return no_body();
  if (!is_json(request.header("Content-Type"))) {
    return refuse(ApiError{415, "the Content-Type must be application/json", "", "unsupported_media_type"});
  }
  if (const std::string_view coding = request.header("Content-Encoding");
      !coding.empty() && !http::equal_ignoring_case(coding, "identity")) {
    return refuse(ApiError{415, "bodies are read as they are; send this one without Content-Encoding", "",
                           "unsupported_media_type"});
  }
  return std::nullopt;
}

void Api::handle(http::Request request, std::shared_ptr<http::Exchange> exchange) {
  const auto shared = std::make_shared<Call>();
  Call& call = *shared;
  call.request = std::move(request);
  call.exchange = std::move(exchange);
  call.path = inner_path(call.request.path);
  call.headers = common_headers(call.request, &call.request_id);
  if (call.request.method == "OPTIONS") {
    http::Response response;
    response.status = 204;
    response.headers.push_back({"Allow", "GET, HEAD, POST, DELETE, OPTIONS"});
    const bool origin_allowed = std::any_of(call.headers.begin(), call.headers.end(), [](const http::Header& header) {
      return header.name == "Access-Control-Allow-Origin";
    });
    if (origin_allowed) {
      response.headers.push_back({"Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS"});
      const std::string_view wanted = call.request.header("Access-Control-Request-Headers");
      response.headers.push_back(
          {"Access-Control-Allow-Headers", wanted.empty() ? "Authorization, Content-Type" : std::string(wanted)});
      response.headers.push_back({"Access-Control-Max-Age", "600"});
    }
    return reply(call, std::move(response));
  }
  bool path_known = false;
  const Route* route = find_route(call.request.method, call.path, &path_known);
  if (route == nullptr) return reply_error(call, ApiError{404, "there is no such path", "", "not_found"});
  call.key = key_of(call.request);
  call.logged = route->logged;
  if (call.request.body.size() <= kInlineBody || !route->needs_model) return (this->*route->run)(call);
  on_worker(call, call.request.body.size(), [this, route](Call& there) { (this->*route->run)(there); });
}

void Api::on_worker(Call& call, size_t bytes, std::function<void(Call&)> work) {
  call.on_worker = true;
  call.exchange->on_abort([stop = call.stop]() mutable { stop.request_stop(); });
  if (!state()->workers->submit(
          [shared = call.shared_from_this(), work = std::move(work)](const std::stop_token&) { work(*shared); },
          call.stop, /*heavy=*/bytes > kHeavyBody)) {
    call.on_worker = false;
    reply_error(call, ApiError{429, "too many large requests wait to be read; try again later", "", ""});
  }
}

http::Response Api::protocol_error(int status, std::string_view message, const http::Request* head) {
  const ApiError error{status, std::string(message), "", ""};
  return head == nullptr ? error_response(error) : refusal(*head, error);
}

http::Response Api::refusal(const http::Request& head, const ApiError& error) const {
  std::string request_id;
  const std::string_view path = inner_path(head.path);
  http::Response response = shaped_error(head, path, error);
  auto headers = common_headers(head, &request_id);
  if (const ServerState* served = state(); served != nullptr && served->log_requests) {
    bool path_known = false;
    const Route* route = find_route(head.method, path, &path_known);
    const bool named = route != nullptr && !route->logged.empty();
    log_failure(request_id, named ? std::string(route->logged) : dump(Json(std::string(path.substr(0, 100)))),
                error.status, error.message);
  }
  response.headers.insert(response.headers.end(), headers.begin(), headers.end());
  return response;
}

void Api::reply(Call& call, http::Response response) const {
  response.headers.insert(response.headers.end(), call.headers.begin(), call.headers.end());
  auto send = [shared = call.shared_from_this(), response = std::move(response)]() mutable {
    shared->exchange->hold(std::move(shared->request.lease));
    shared->exchange->respond(std::move(response));
  };
  if (!call.on_worker) return send();
  call.exchange->post(std::move(send));
}

void Api::reply_json(Call& call, std::string body) const {
  http::Response response;
  response.body = std::move(body);
  reply(call, std::move(response));
}

void Api::reply_counted(Call& call, std::string body) const {
  if (!call.request.lease.resize(body.size())) {
    return reply_error(call,
                       ApiError{429, "the server holds as many bytes of requests as it may; try again later", "", ""});
  }
  reply_json(call, std::move(body));
}

void Api::reply_error(Call& call, const ApiError& error) const {
  if (!call.logged.empty() && state()->log_requests) {
    // Where a body is no JSON the message shows a piece of it, and prompts stay out of the log.
    log_failure(call.request_id, call.logged, error.status,
                error.code == "invalid_json" ? "the body cannot be read as JSON" : error.message);
  }
  reply(call, shaped_error(call.request, call.path, error));
}

std::optional<Json> Api::json_body(Call& call) const {
  size_t bytes = 0;
  auto parsed = parse_json(call.request.body, {}, call.stop.get_token(), &bytes);
  if (!parsed.ok()) {
    if (parsed.error().code != ErrorCode::kInvalidInput) {
      reply_error(call, from_engine(parsed.error()));
    } else {
      reply_error(call, bad_request("", "the body is " + parsed.error().message, "invalid_json"));
    }
    return std::nullopt;
  }
  if (!call.request.lease.resize(call.request.body.size() + bytes)) {
    reply_error(call, ApiError{429, "the server holds as many bytes of requests as it may; try again later", "", ""});
    return std::nullopt;
  }
  call.request.body = std::string();
  call.request.lease.resize(bytes);
  if (!parsed->is_object()) {
    reply_error(call, bad_request("", "the body must be a JSON object", "invalid_json"));
    return std::nullopt;
  }
  return std::move(*parsed);
}

MaybeError Api::check_model(const std::string& name) const {
  if (name.empty() || state()->model.knows(name)) return std::nullopt;
  return ApiError{404,
                  fmt::format("the model '{}' does not exist here; this server serves {}", name.substr(0, 200),
                              served_names(state()->model.facts().names)),
                  "model", "model_not_found"};
}

}  // namespace nfp::server
