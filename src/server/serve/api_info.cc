// The endpoints that answer from what is there: the page, health and metrics, models, the tokenizer.
#include <charconv>
#include <ctime>
#include <random>

#include "server/http/http_server.h"
#include "server/serve/api_call.h"
#include "server/serve/demo_load.h"
#include "server/serve/embedded.h"
#include "server/serve/version.h"

namespace nfp::server {
namespace {

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

std::string rfc3339(time_t seconds) {
  tm utc{};
  ::gmtime_r(&seconds, &utc);
  char text[64];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc)};
}

}  // namespace

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
  if (s->engine->failed()) {
    return reply_error(call, ApiError{503, "the device or the engine has failed; the server is to be started again", "",
                                      "device_failed"});
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

// OpenAI's and vLLM's members, and Anthropic's.
std::string Api::model_json() const {
  const ServedModel& m = state()->model;
  std::string out;
  for (const std::string& name : m.facts().names) {
    if (!out.empty()) out += ',';
    out += "{\"id\":";
    append_string(out, name);
    out += fmt::format(",\"object\":\"model\",\"created\":{},\"owned_by\":\"nestedfp\",\"root\":", m.created());
    append_string(out, m.facts().root);
    out += ",\"type\":\"model\",\"display_name\":";
    append_string(out, name);
    out += fmt::format(R"(,"created_at":"{}","lifecycle":"active","max_input_tokens":{})", rfc3339(m.created()),
                       m.bounds().max_context);
    out += fmt::format(",\"parent\":null,\"max_model_len\":{},\"chat\":{},\"grammars\":{},\"default_sampling_params\":",
                       m.bounds().max_context, m.has_chat(), grammars_available());
    out += m.facts().sampling.json();
    out += '}';
  }
  return out;
}

void Api::models(Call& call) {
  const std::vector<std::string>& names = state()->model.facts().names;
  std::string out = "{\"object\":\"list\",\"data\":[" + model_json() + "],\"has_more\":false,\"first_id\":";
  append_string(out, names.front());
  out += ",\"last_id\":";
  append_string(out, names.back());
  reply_json(call, std::move(out) + "}");
}

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
      NFP_API_TRY(parse_turn(fields, &request));
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
  reply_counted(call, std::move(out) + "}");
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
  reply_counted(call, std::move(out) + "}");
}

}  // namespace nfp::server
