// HTTP as the rest of the server sees it: a request comes with an Exchange to answer it through. No Boost type appears
// here, so endpoints are tested (and fuzzed) against an Exchange without a socket.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/byte_budget.h"

namespace nfp::http {

struct Header {
  std::string name;
  std::string value;
};

struct Request {
  std::string method;  // "GET", ...
  std::string path;    // before '?', not decoded
  std::string query;   // after '?', not decoded
  std::vector<Header> headers;
  std::string body;
  std::string peer;  // address of the client, "127.0.0.1:51234"
  ByteLease lease;   // of the server's ByteBudget, as large as the body; whoever keeps what it held keeps this too

  // Value of the first header of this name (case does not matter); empty when there is none.
  std::string_view header(std::string_view name) const;
  size_t count(std::string_view name) const;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<Header> headers;  // further ones; line breaks in values are dropped
  std::string body;
};

// The answer to one request. All calls but post() are made on the exchange's own thread: the one that the handler was
// called on and that posted functions run on. Calls after the end, or after the client has gone, do nothing.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // The whole answer.
  virtual void respond(Response response) = 0;

  // Or an answer in pieces. start() sends status and headers (`body` is the first piece), write() a piece, finish() the
  // end. Pieces that the client does not take pile up to a bound; beyond it the client is cut off.
  virtual void start(Response head) = 0;
  virtual void write(std::string_view piece) = 0;
  virtual void finish() = 0;

  // Before respond() or finish(): what the answer counts for until it has been sent, however slowly its client reads.
  virtual void hold(ByteLease lease) = 0;

  // Called once if the client goes away, or is cut off, before the answer has ended.
  virtual void on_abort(std::function<void()> callback) = 0;
  virtual bool aborted() const = 0;

  // From any thread: runs `fn` on the exchange's thread, in order of posting. Never blocks.
  virtual void post(std::function<void()> fn) = 0;
};

class Handler {
 public:
  virtual ~Handler() = default;
  // Called when the headers are there and the body is not: an answer here ends it without reading the body.
  virtual std::optional<Response> check_head(const Request&) { return std::nullopt; }
  virtual void handle(Request request, std::shared_ptr<Exchange> exchange) = 0;
  // Answers for requests that cannot be parsed (400), are too large (413, 431) or come too slowly (408). `head`: where
  // it has been read, else null.
  virtual Response protocol_error(int status, std::string_view message, const Request* head) = 0;
  // An answer's head goes out, `seconds` after its request's came; method and path are empty where that could not be
  // read. From any thread.
  virtual void answered(std::string_view method, std::string_view path, int status, double seconds) {
    (void)method, (void)path, (void)status, (void)seconds;
  }
};

std::string_view reason_phrase(int status);
bool equal_ignoring_case(std::string_view a, std::string_view b);

}  // namespace nfp::http
