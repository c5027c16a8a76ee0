// The HTTP/1.1 server: a few threads, each with its own event loop; a connection stays on one of them. Connections are
// coroutines on Boost.Beast's parser (http_session.cc).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"
#include "server/http/http.h"

namespace nfp::http {

struct ServerOptions {
  std::string host = "127.0.0.1";  // an address or a name; IPv6 with or without brackets
  uint16_t port = 8000;            // 0 = any free one; see Server::port()
  int threads = 2;
  size_t max_connections = 16384;
  uint32_t max_header_bytes = 16u << 10;
  uint64_t max_body_bytes = 32u << 20;
  uint64_t max_request_bytes = 1u << 30;             // of all requests together: see ByteBudget
  size_t max_stream_buffer = 256u << 10;             // bytes that a slow reader of a stream may be behind
  std::chrono::milliseconds header_timeout{10'000};  // from a request's first byte to the end of its headers
  std::chrono::milliseconds body_timeout{60'000};    // from there to the end of its body
  std::chrono::milliseconds idle_timeout{75'000};    // between requests of a connection
  std::chrono::milliseconds write_timeout{30'000};   // without the client taking a byte
};

struct ServerStats {
  uint64_t connections = 0;       // open now
  uint64_t exchanges = 0;         // requests whose answer is being made or sent now
  uint64_t accepted = 0;          // connections so far
  uint64_t refused = 0;           // connections beyond max_connections
  uint64_t slow_readers_cut = 0;  // streams cut off at max_stream_buffer or write_timeout
  uint64_t request_bytes = 0;     // held now, of max_request_bytes
};

// An address of this machine that nobody else reaches, in any spelling: an IPv4 address as an IPv6 one, too.
bool is_loopback_address(std::string_view text);

class Server {
 public:
  // Binds and listens, so that an occupied port is an error here. `handler` must outlive the server.
  static Result<std::unique_ptr<Server>> listen(ServerOptions options, Handler* handler);
  ~Server();

  void start();
  uint16_t port() const;
  std::string url() const;   // for clients on this machine, "http://[::1]:8000"
  bool on_loopback() const;  // nobody else reaches it
  // Accepts no more connections. Open ones get one more answer each, so that a health check learns what is happening.
  void stop_accepting();
  // Waits until no exchange runs. False when some still do after `timeout`.
  bool wait_idle(std::chrono::milliseconds timeout);
  // Closes everything and joins the threads.
  void stop();
  ServerStats stats() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace nfp::http
