// The endpoints: who may call what, and what each path does.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/http.h"
#include "server/http/http_server.h"
#include "server/metrics/http_counts.h"
#include "server/serve/server_state.h"

namespace nfp::server {

struct ResponsesRequest;

struct ApiOptions {
  std::vector<std::string> api_keys;         // empty = everybody may
  std::vector<std::string> allowed_origins;  // for browsers' cross-origin calls; "*" = all; empty = none
  // Names in Host; "*" = all. Without any, on a loopback address and without keys, only loopback's names are accepted:
  // a web page that lets its own name point to 127.0.0.1 must not get through to us (DNS rebinding).
  std::vector<std::string> allowed_hosts;
  std::string root_path;         // "/prefix" that a proxy leaves in place; empty = none
  double stall_timeout_s = 120;  // /health fails when a step takes longer
  bool page = true;              // the page at /
};

class Api final : public http::Handler {
 public:
  explicit Api(ApiOptions options);

  // Until then only what needs no model is answered; the rest gets 503. `state` must outlive all requests.
  void set_ready(ServerState* state) { state_.store(state, std::memory_order_release); }
  void set_draining() { draining_.store(true, std::memory_order_relaxed); }
  bool draining() const { return draining_.load(std::memory_order_relaxed); }
  // Whether we listen on a loopback address; before the first request.
  void set_loopback(bool loopback) { loopback_ = loopback; }
  // Where /metrics takes connection counts from; likewise.
  void set_server_stats(std::function<http::ServerStats()> stats) { server_stats_ = std::move(stats); }

  const std::string& root_path() const { return options_.root_path; }  // without a slash at the end

  std::optional<http::Response> check_head(const http::Request& request) override;
  void handle(http::Request request, std::shared_ptr<http::Exchange> exchange) override;
  http::Response protocol_error(int status, std::string_view message, const http::Request* head) override;
  void answered(std::string_view method, std::string_view path, int status, double seconds) override;

 private:
  struct Call;  // one request on its way through
  struct Route {
    std::string_view method;
    std::string_view path;
    bool open;  // without an API key
    bool needs_model;
    void (Api::*run)(Call&);
    std::string_view logged = {};  // what the log calls it; empty = it has no line for each request
    bool matches(std::string_view asked) const;
  };
  static const Route kRoutes[];
  static std::string_view handler_name(const Route& route);  // as metrics show its path
  static std::vector<std::string_view> handler_names();

  std::string_view inner_path(std::string_view path) const;
  const Route* find_route(std::string_view method, std::string_view path, bool* path_known) const;
  // The number of the request's key, 0 where there are no keys; -1 = not authorized.
  int key_of(const http::Request& request) const;
  bool host_allowed(std::string_view host) const;
  std::vector<http::Header> common_headers(const http::Request& request, std::string* request_id) const;
  http::Response refusal(const http::Request& head, const ApiError& error) const;
  void reply(Call& call, http::Response response) const;
  void reply_json(Call& call, std::string body) const;
  // The same for an answer that may be large: it counts among the bytes of requests, or is refused.
  void reply_counted(Call& call, std::string body) const;
  void reply_error(Call& call, const ApiError& error) const;
  // Goes on with `work` on a worker; 429 where too many wait.
  void on_worker(Call& call, size_t bytes, std::function<void(Call&)> work);
  // The body as a JSON object, or nothing after an error has been sent.
  std::optional<Json> json_body(Call& call) const;
  MaybeError check_model(const std::string& name) const;
  std::string model_json() const;

  void page(Call& call);
  void health(Call& call);
  void version(Call& call);
  void metrics(Call& call);
  void openapi(Call& call);
  void load(Call& call);
  void timeline(Call& call);
  void demo_load(Call& call);
  void models(Call& call);
  void model(Call& call);
  void tokenizer_info(Call& call);
  void tokenize(Call& call);
  void detokenize(Call& call);
  void completions(Call& call);
  void chat_completions(Call& call);
  void embeddings(Call& call);
  void responses(Call& call);
  void count_input_tokens(Call& call);
  // Reads a request of the Responses API with the conversation that it goes on with.
  void read_response(Call& call, void (Api::*then)(Call&, MaybeError, GenerationRequest));
  void go_on_from(Call& call, const Json& body, const std::shared_ptr<ResponsesRequest>& from,
                  void (Api::*then)(Call&, MaybeError, GenerationRequest));
  // An item of the input that stands for one of a kept response.
  struct ItemReference {
    size_t place;
    std::string id;
    std::shared_ptr<const ResponseStore::Entry> response;
  };
  MaybeError find_references(const Json& body, int key, ResponsesRequest* from, std::vector<ItemReference>* out) const;
  // Puts the items in their places; false after an error has been sent.
  bool put_items(Call& call, std::span<const ItemReference> references, Json* body) const;
  // What is kept of a response, or nothing after an error has been sent. `param` is the field named in it.
  std::optional<Json> kept_json(Call& call, const std::string& text, std::string_view param) const;
  void stored_response(Call& call);
  void delete_response(Call& call);
  void messages(Call& call);
  void count_tokens(Call& call);
  void generate(Call& call, bool chat);
  // What all requests for text need once they are parsed.
  void run(Call& call, MaybeError failure, GenerationRequest request);
  // Or how many tokens their prompt has.
  void count(Call& call, MaybeError failure, GenerationRequest request);
  // What headers and the key say of a request, where its body does not.
  MaybeError read_headers(const Call& call, GenerationRequest* request) const;

  ServerState* state() const { return state_.load(std::memory_order_acquire); }

  ApiOptions options_;
  bool loopback_ = false;
  std::atomic<ServerState*> state_{nullptr};
  std::atomic<bool> draining_{false};
  std::function<http::ServerStats()> server_stats_;
  HttpCounts http_counts_;  // one handler for each of kRoutes' paths
};

// Equal, in a time that depends only on the sizes.
bool equal_constant_time(std::string_view a, std::string_view b);

}  // namespace nfp::server
