// Between http_server.cc (threads, accepting) and http_session.cc (one connection). Includes Boost.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

#include "server/http/http_server.h"

namespace nfp::http {

class Session;

struct Counters {
  std::atomic<uint64_t> connections{0};
  std::atomic<uint64_t> exchanges{0};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> slow_readers_cut{0};
};

// A connection's place among those that are open.
class Admission {
 public:
  explicit Admission(Counters* counters) : counters_(counters) { ++counters_->connections; }
  Admission(Admission&& other) noexcept : counters_(std::exchange(other.counters_, nullptr)) {}
  Admission& operator=(Admission&&) = delete;
  ~Admission() {
    if (counters_ != nullptr) --counters_->connections;
  }

 private:
  Counters* counters_;
};

// Memory that is not there, or what a library throws, ends what asked for it and no other's request. Never throws.
void log_exception(const std::exception& exception) noexcept;

// One event loop and what lives on it.
class IoLoop {
 public:
  IoLoop() = default;
  // What is still posted goes, and what that posts in turn; nothing runs. The threads have ended.
  ~IoLoop();
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;
  // From any thread. Functions that come while the loop is busy are run together, with one wake-up for all.
  void post(std::function<void()> fn);
  // On the loop's thread: the session has bytes to send; they go out once the current batch of functions has run.
  void flush_later(std::shared_ptr<Session> session);

  std::unordered_set<Session*> sessions;  // loop's thread only

 private:
  void run_posted();
  std::mutex mutex_;
  std::vector<std::function<void()>> inbox_;
  std::vector<std::function<void()>> batch_;  // loop's thread only
  std::vector<std::shared_ptr<Session>> dirty_;
  bool scheduled_ = false;
  bool closed_ = false;    // post() drops what it is given
  bool in_batch_ = false;  // loop's thread only

 public:
  // Destroyed first: its end destroys coroutines, sessions and exchanges, which call post() and change `sessions`.
  boost::asio::io_context context{1};
};

struct SessionContext {
  const ServerOptions* options = nullptr;
  Handler* handler = nullptr;
  Counters* counters = nullptr;
  const std::atomic<bool>* draining = nullptr;
  std::shared_ptr<ByteBudget> budget;
};

// Takes over an accepted socket whose executor is the loop's. On the loop's thread.
void start_session(boost::asio::ip::tcp::socket socket, Admission place, IoLoop* loop, const SessionContext& context);
// Closes what is past its deadline, or whose client is gone; with `all`, all.
void sweep_sessions(IoLoop* loop, bool all);
// Sends what write() has gathered.
void flush_session(Session& session);

}  // namespace nfp::http
