#include "server/serve/api.h"

#include <algorithm>
#include <charconv>
#include <random>

#include "base/log.h"
#include "server/http/http_server.h"
#include "server/serve/api_call.h"
#include "server/serve/demo_load.h"
#include "server/serve/embedded.h"
#include "server/serve/live_request.h"
#include "server/serve/messages_writer.h"
#include "server/serve/version.h"

namespace nfp::server {
namespace {

constexpr size_t kMaxRequestId = 128;

std::string random_id() {
  thread_local std::mt19937_64 source(std::random_device{}());
  return fmt::format("req-{:016x}", source());
}

std::string random_nonce() {
  std::random_device source;
  std::string nonce;
  for (int i = 0; i < 4; ++i) nonce += fmt::format("{:08x}", source());
  return nonce;
}

std::string with_nonce(std::string_view page, std::string_view nonce) {
  constexpr std::string_view kPlace = "@NONCE@";
  std::string out;
  out.reserve(page.size() + 256);
  for (size_t at = 0;;) {
    const size_t next = page.find(kPlace, at);
    out += page.substr(at, next - at);
    if (next == std::string_view::npos) return out;
    out += nonce;
    at = next + kPlace.size();
  }
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

void append_sampling(std::string& out, const SamplingDefaults& sampling) {
  const auto field = [&](std::string_view name, const auto& value) {
    if (value) fmt::format_to(std::back_inserter(out), "{}\"{}\":{}", out.back() == '{' ? "" : ",", name, *value);
  };
  out += '{';
  field("temperature", sampling.temperature);
  field("top_k", sampling.top_k);
  field("top_p", sampling.top_p);
  field("min_p", sampling.min_p);
  field("repetition_penalty", sampling.repetition_penalty);
  out += '}';
}

// As the clients of this path know errors.
http::Response shaped_error(std::string_view path, const ApiError& error) {
  return path.starts_with("/v1/messages") ? anthropic_error_response(error) : error_response(error);
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
  if (!options_.root_path.empty() && path.starts_with(options_.root_path)) {
    const std::string_view rest = path.substr(options_.root_path.size());
    if (rest.empty()) return "/";
    if (rest.front() == '/') return rest;
  }
  return path;
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
  const std::string_view origin = request.header("Origin");
  if (!origin.empty() && !options_.allowed_origins.empty()) {
    const auto& allowed = options_.allowed_origins;
    const bool all = std::find(allowed.begin(), allowed.end(), "*") != allowed.end();
    if (all || std::find(allowed.begin(), allowed.end(), origin) != allowed.end()) {
      headers.push_back({"Access-Control-Allow-Origin", all ? "*" : std::string(origin)});
      headers.push_back(
          {"Access-Control-Expose-Headers", "X-Request-Id, Retry-After, X-NestedFP-Ignored, X-NestedFP-Unenforced"});
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
      return refuse(ApiError{405, fmt::format("{} is not allowed here", request.method), "", "method_not_allowed"},
                    allow.c_str());
    }
    for (const std::string_view other : {"/rerank", "/score", "/pooling", "/classify"}) {
      if (path.ends_with(other)) {
        return refuse(ApiError{404,
                               fmt::format("there is no {} here, as it needs a model with a head for it; this server "
                                           "has /v1/embeddings",
                                           path.substr(path.rfind('/') + 1)),
                               "", "not_found"});
      }
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
    if (call.headers.size() > 1) {  // the origin is allowed
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
  on_worker(call, [this, route](Call& there) { (this->*route->run)(there); });
}

void Api::on_worker(Call& call, std::function<void(Call&)> work) {
  call.on_worker = true;
  call.exchange->on_abort([stop = call.stop]() mutable { stop.request_stop(); });
  if (!state()->workers->submit(
          [shared = call.shared_from_this(), work = std::move(work)](const std::stop_token&) { work(*shared); },
          call.stop)) {
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
  http::Response response = shaped_error(path, error);
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
  if (!call.on_worker) return call.exchange->respond(std::move(response));
  call.exchange->post(
      [exchange = call.exchange, response = std::move(response)]() mutable { exchange->respond(std::move(response)); });
}

void Api::reply_json(Call& call, std::string body) const {
  http::Response response;
  response.body = std::move(body);
  reply(call, std::move(response));
}

void Api::reply_error(Call& call, const ApiError& error) const {
  if (!call.logged.empty() && state()->log_requests) {
    // Where a body is no JSON the message shows a piece of it, and prompts stay out of the log.
    log_failure(call.request_id, call.logged, error.status,
                error.code == "invalid_json" ? "the body cannot be read as JSON" : error.message);
  }
  reply(call, shaped_error(call.path, error));
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
                  fmt::format("the model '{}' does not exist here; this server serves '{}'", name.substr(0, 200),
                              state()->model.name()),
                  "model", "model_not_found"};
}

void Api::page(Call& call) {
  if (!options_.page) return reply_error(call, ApiError{404, "the page is switched off", "", "not_found"});
  http::Response response;
  response.content_type = "text/html; charset=utf-8";
  // Only the page's own scripts and styles carry this answer's nonce: what a model writes cannot run.
  const std::string nonce = random_nonce();
  response.body = with_nonce(kPageHtml, nonce);
  response.headers = {
      {"Content-Security-Policy",
       fmt::format("default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; img-src "
                   "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                   nonce)},
      {"X-Content-Type-Options", "nosniff"},
      {"Referrer-Policy", "no-referrer"},
      {"Cache-Control", "no-cache"}};
  reply(call, std::move(response));
}

void Api::health(Call& call) {
  ServerState* s = state();
  if (s == nullptr) return reply_error(call, ApiError{503, "the model is being loaded", "", "loading"});
  if (s->engine->device_failed()) {
    return reply_error(call,
                       ApiError{503, "the device has failed; the server is to be started again", "", "device_failed"});
  }
  if (draining_) return reply_error(call, ApiError{503, "the server is shutting down", "", "draining"});
  const double stalled = s->engine->seconds_since_progress();
  if (stalled > options_.stall_timeout_s) {
    return reply_error(call, ApiError{503, fmt::format("no step has finished for {:.1f} s", stalled), "", "stalled"});
  }
  reply_json(call, "{\"status\":\"ok\"}");
}

void Api::version(Call& call) { reply_json(call, fmt::format("{{\"version\":\"{}\"}}", kVersion)); }

void Api::metrics(Call& call) {
  ServerState* s = state();
  Metrics::Facts facts;
  facts.model_name = s->model.name();
  facts.engine = s->engine->stats();
  if (server_stats_) {
    const http::ServerStats stats = server_stats_();
    facts.connections = stats.connections;
    facts.slow_readers_cut = stats.slow_readers_cut;
    facts.request_bytes = stats.request_bytes;
  }
  facts.grammars = &s->grammars->stats();
  facts.http = &http_counts_;
  http::Response response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = s->metrics->prometheus(facts);
  reply(call, std::move(response));
}

void Api::openapi(Call& call) { reply_json(call, std::string(kOpenApiJson)); }

void Api::load(Call& call) {
  ServerState* s = state();
  reply_json(call, fmt::format("{{\"server_load\":{}}}", s == nullptr ? 0 : s->in_flight.load()));
}

void Api::timeline(Call& call) {
  int64_t after = -1;
  std::string_view query = call.request.query;
  if (query.starts_with("after=")) {
    query.remove_prefix(6);
    std::from_chars(query.data(), query.data() + query.size(), after);
    after = std::clamp<int64_t>(after, -1, INT64_MAX / 2);
  }
  ServerState* s = state();
  const EngineStats e = s->engine->stats();
  std::string body = s->metrics->timeline().json(after);
  body.pop_back();  // '}'
  fmt::format_to(std::back_inserter(body),
                 ",\"running\":{},\"waiting\":{},\"kv_use\":{:.4f},\"kv_tokens\":{},\"precision_switches\":{},"
                 "\"demo_load\":{}}}",
                 e.running, e.waiting, e.kv_blocks > 0 ? static_cast<double>(e.kv_blocks_used) / e.kv_blocks : 0,
                 int64_t{e.kv_blocks} * e.block_size, e.precision_switches,
                 s->demo_load != nullptr ? fmt::format("{:.3f}", s->demo_load->rate()) : "null");
  reply_json(call, std::move(body));
}

void Api::demo_load(Call& call) {
  DemoLoad* load = state()->demo_load;
  if (load == nullptr) {
    return reply_error(call,
                       ApiError{404, "there is no demo load; start the server with --demo-load", "", "not_found"});
  }
  std::string_view query = call.request.query;
  constexpr std::string_view kRate = "rate=";
  double rate = -1;
  if (query.starts_with(kRate)) {
    query.remove_prefix(kRate.size());
    const auto [end, code] = std::from_chars(query.data(), query.data() + query.size(), rate);
    if (code != std::errc() || end != query.data() + query.size()) rate = -1;
  }
  if (!(rate >= 0 && rate <= DemoLoad::kMostRate)) {
    return reply_error(
        call, bad_request("rate", fmt::format("use ?rate=R, requests a second from 0 to {:.0f}", DemoLoad::kMostRate)));
  }
  load->set_rate(rate);
  reply_json(call, fmt::format("{{\"demo_load\":{:.3f}}}", load->rate()));
}

std::string Api::model_json() const {
  const ServedModel& m = state()->model;
  std::string out;
  for (const std::string& name : m.facts().names) {
    if (!out.empty()) out += ',';
    out += "{\"id\":";
    append_string(out, name);
    out += fmt::format(",\"object\":\"model\",\"created\":{},\"owned_by\":\"nestedfp\",\"root\":", m.created());
    append_string(out, m.facts().root);
    out += fmt::format(",\"parent\":null,\"max_model_len\":{},\"chat\":{},\"grammars\":{},\"default_sampling_params\":",
                       m.bounds().max_context, m.has_chat(), grammars_available());
    append_sampling(out, m.facts().sampling);
    out += '}';
  }
  return out;
}

void Api::models(Call& call) { reply_json(call, "{\"object\":\"list\",\"data\":[" + model_json() + "]}"); }

void Api::model(Call& call) {
  // Names may hold slashes, encoded or not.
  std::string name;
  const std::string_view raw = call.path.substr(std::string_view("/v1/models/").size());
  for (size_t i = 0; i < raw.size(); ++i) {
    unsigned value = 0;
    if (raw[i] == '%' && i + 2 < raw.size() &&
        std::from_chars(raw.data() + i + 1, raw.data() + i + 3, value, 16).ptr == raw.data() + i + 3) {
      name += static_cast<char>(value);
      i += 2;
    } else {
      name += raw[i];
    }
  }
  if (auto failure = check_model(name)) return reply_error(call, *failure);
  const Json all = Json::parse("[" + model_json() + "]");
  for (const Json& entry : all) {
    if (entry["id"] == name) return reply_json(call, dump(entry));
  }
}

// vLLM's form; evaluation harnesses score through it without a tokenizer of their own.
void Api::tokenizer_info(Call& call) {
  const ServedModel& model = state()->model;
  const Tokenizer& tokenizer = model.tokenizer();
  std::string out = "{\"tokenizer_class\":\"nestedfp\"";
  const auto token = [&](std::string_view name, std::optional<int32_t> id) {
    const auto text = id ? tokenizer.id_to_token(*id) : std::nullopt;
    fmt::format_to(std::back_inserter(out), ",\"{}\":", name);
    if (text) {
      append_string(out, *text);
    } else {
      out += "null";
    }
  };
  token("bos_token", tokenizer.bos_id());
  token("eos_token", tokenizer.eos_id());
  token("pad_token", tokenizer.pad_id());
  token("unk_token", tokenizer.unk_id());
  fmt::format_to(std::back_inserter(out),
                 ",\"add_bos_token\":{},\"model_max_length\":{},\"vocab_size\":{},\"chat_template\":",
                 tokenizer.adds_bos(), model.bounds().max_context, tokenizer.vocab_size());
  if (model.facts().chat_template.empty()) {
    out += "null";
  } else {
    append_string(out, model.facts().chat_template);
  }
  reply_json(call, out + "}");
}

void Api::tokenize(Call& call) {
  const auto body = json_body(call);
  if (!body) return;
  const ServedModel& model = state()->model;
  Fields fields(*body);
  GenerationRequest request;
  std::string prompt;
  bool add_special = true;
  bool strings = false;
  const auto read = [&]() -> MaybeError {
    NFP_API_TRY(fields.get("model", &request.model));
    NFP_API_TRY(check_model(request.model));
    NFP_API_TRY(fields.get("return_token_strs", &strings));
    const Json* messages = fields.find("messages");
    if (messages != nullptr) {
      add_special = false;
      NFP_API_TRY(parse_messages(*messages, state()->limits, &request.messages, &request.ignored));
      if (const Json* tools = fields.find("tools")) {
        NFP_API_TRY(parse_tools(*tools, state()->limits, &request.tools, &request.ignored));
      }
      NFP_API_TRY(fields.get("add_generation_prompt", &request.add_generation_prompt));
      NFP_API_TRY(fields.get("continue_final_message", &request.continue_final_message));
      if (request.continue_final_message) request.add_generation_prompt = false;
      NFP_API_TRY(parse_template_variables(fields, &request.template_variables));
    } else {
      if (fields.find("prompt") == nullptr) return bad_request("prompt", "'prompt' (or 'messages') is missing");
      NFP_API_TRY(fields.get("prompt", &prompt));
    }
    NFP_API_TRY(fields.get("add_special_tokens", &add_special));
    return fields.rest(state()->limits, &request.ignored);
  };
  if (auto failure = read()) return reply_error(call, *failure);
  tell_ignored(call.headers, call.request_id, request.ignored);
  if (!request.messages.empty()) {
    auto text = model.render_chat(request, true, call.stop.get_token());
    if (!text.ok()) return reply_error(call, from_engine(text.error()));
    prompt = std::move(*text);
  }
  const auto tokens = model.tokenizer().encode(
      prompt, {.add_special_tokens = add_special, .parse_special = true, .stop = call.stop.get_token()});
  if (!tokens.ok()) return reply_error(call, from_engine(tokens.error()));
  std::string out =
      fmt::format("{{\"count\":{},\"max_model_len\":{},\"tokens\":[", tokens->size(), model.bounds().max_context);
  for (size_t i = 0; i < tokens->size(); ++i) {
    fmt::format_to(std::back_inserter(out), "{}{}", i > 0 ? "," : "", (*tokens)[i]);
  }
  out += "],\"token_strs\":";
  if (!strings) {
    out += "null";
  } else {
    out += '[';
    for (size_t i = 0; i < tokens->size(); ++i) {
      if (i > 0) out += ',';
      append_string(out, model.tokenizer().id_to_token((*tokens)[i]).value_or(""));
    }
    out += ']';
  }
  reply_json(call, out + "}");
}

void Api::detokenize(Call& call) {
  const auto body = json_body(call);
  if (!body) return;
  Fields fields(*body);
  std::string model;
  std::vector<int32_t> ids;
  std::vector<std::string> ignored;
  const auto read = [&]() -> MaybeError {
    NFP_API_TRY(fields.get("model", &model));
    NFP_API_TRY(check_model(model));
    const Json* tokens = fields.find("tokens");
    if (tokens == nullptr || !tokens->is_array()) return bad_request("tokens", "'tokens' must be a list of token ids");
    const int32_t vocab = state()->model.tokenizer().vocab_size();
    for (const Json& token : *tokens) {
      if (!token.is_number_integer() || token < 0 || token >= vocab) {
        return bad_request("tokens", fmt::format("'tokens' must hold token ids from 0 to {}", vocab - 1));
      }
      ids.push_back(token.get<int32_t>());
    }
    return fields.rest(state()->limits, &ignored);
  };
  if (auto failure = read()) return reply_error(call, *failure);
  tell_ignored(call.headers, call.request_id, ignored);
  std::string out = "{\"prompt\":";
  append_string(out, state()->model.tokenizer().decode(ids, false));
  reply_json(call, out + "}");
}

}  // namespace nfp::server
