// A request that the engine works on: what answers in text and embeddings have in common from start to end.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/http.h"
#include "server/serve/server_state.h"

namespace nfp::server {

// What comes with every request.
struct RequestContext {
  std::shared_ptr<http::Exchange> exchange;
  std::string id;                     // X-Request-Id
  std::vector<http::Header> headers;  // for the answer
  std::stop_source stop;              // ends the preparation when the client goes away
  http::ByteLease lease;              // for what the request holds
};

class LiveRequest : public std::enable_shared_from_this<LiveRequest> {
 public:
  LiveRequest(ServerState* state, RequestContext context);
  virtual ~LiveRequest();

  // Prepares here, `on_worker` or on the exchange's thread; then runs on the latter.
  void start(bool on_worker);
  // From any thread: the server does not wait any longer.
  void cut_off();

 protected:
  // Fields of the request that mean nothing here.
  virtual const std::vector<std::string>& ignored() const = 0;
  // May run while cut_off() ends the answer: what that reads, headers_ among it, is complete before.
  virtual MaybeError prepare() = 0;
  // After prepare(), on its thread: go_on(), where nothing else is to be made ready.
  virtual void prepared(MaybeError failure, bool on_worker) { go_on(std::move(failure), on_worker); }
  virtual void run() = 0;
  virtual void cancel_all() = 0;
  // Ends the answer with an error, if it has not ended.
  virtual void fail(const ApiError& error) = 0;
  virtual void log_disconnected() const = 0;

  // On the exchange's thread: what a library throws, or memory that is not there, ends this request and no other.
  void guarded(const std::function<void()>& work);
  // Runs, or fails, on the exchange's thread.
  void go_on(MaybeError failure, bool on_worker);
  // From here on, on the exchange's thread: whatever the engine does for a client ends when it leaves.
  void watch_client();
  // Before the end of the answer, of which so many bytes are left: the request's lease shrinks to them, and is held
  // until they are sent.
  void hold_lease(size_t bytes);

  ServerState* state_;
  std::shared_ptr<http::Exchange> exchange_;
  std::string request_id_;
  std::vector<http::Header> headers_;
  std::stop_source stop_;
  http::ByteLease lease_;
  bool ended_ = false;
  std::chrono::steady_clock::time_point arrival_ = std::chrono::steady_clock::now();
};

// Why the engine ended a request with kError or kCancelled, as its client is told.
ApiError failure_of(const RequestOutput& output);

// The line in the log of a request that failed.
void log_failure(std::string_view request_id, std::string_view endpoint, int status, std::string_view message);

// Names fields that were ignored in the answer's headers and in the log.
void tell_ignored(std::vector<http::Header>& headers, std::string_view request_id,
                  const std::vector<std::string>& names);

}  // namespace nfp::server
