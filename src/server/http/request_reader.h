// The bytes of a connection as requests: where one ends and the next begins, and what makes that doubtful. No socket
// and no coroutine, so that it is fuzzed. Includes Boost.
#pragma once

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include <optional>
#include <string>
#include <string_view>

#include "server/http/http.h"
#include "server/http/http_server.h"

namespace nfp::http {

// Reads one request; the next needs another reader. Not copied nor moved.
class RequestReader {
 public:
  // What is wrong with the bytes, as the status that answers them. Nothing after it is a request.
  struct Fault {
    int status = 400;
    std::string message;
  };

  // Of `options` the bounds of headers and body. `peer` is what requests say of theirs.
  explicit RequestReader(const ServerOptions& options, std::string peer = {});
  RequestReader(const RequestReader&) = delete;
  RequestReader& operator=(const RequestReader&) = delete;

  // Reads on in `bytes`, and says how many it is done with: the rest is to be given again, together with what comes
  // after it. Returns once at the end of the head, which may be looked at before the body; else where more is needed,
  // at the request's end or at a fault.
  size_t put(std::string_view bytes);

  bool begun() const { return begun_; }  // more than empty lines came
  const std::optional<Fault>& fault() const { return fault_; }
  bool done() const { return parser_.is_done(); }

  // Below: once the head is there, faulty or not.
  bool head_done() const { return head_done_; }
  const Request& head() const { return head_; }  // without body
  bool keep_alive() const;
  bool http_1_0() const { return parser_.get().version() < 11; }
  bool expects_continue() const;  // and the body is not there
  size_t body_bytes() const { return parser_.get().body().size(); }

  // The whole request. Once, when done() and without fault. What fields a chunked body's trailer has
  // are dropped: they have not been checked, and are none of the head's (RFC 9110, 6.5.1).
  Request take();

 private:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  Request read_head() const;
  void check_head();

  const ServerOptions& options_;
  Parser parser_;
  bool begun_ = false;
  int empty_lines_ = 0;
  bool head_done_ = false;
  size_t head_bytes_ = 0;
  Request head_;
  std::optional<Fault> fault_;
};

}  // namespace nfp::http
