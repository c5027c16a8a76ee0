#include "server/http/http_server.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include <thread>

#include "base/log.h"
#include "base/open_files.h"
#include "server/http/http_session.h"

namespace nfp::http {
namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr std::chrono::milliseconds kAcceptPause{50};
constexpr const char* kMoreFiles = "allow more open files (ulimit -n)";

bool out_of_files(const error_code& code) { return code == asio::error::no_descriptors; }

void run(asio::io_context& context) {
  for (;;) {
    try {
      context.run();
      return;
    } catch (const std::exception& e) {  // out of a handler; the others go on
      log_exception(e);
    }
  }
}

// As URLs have it: "127.0.0.1:8000", "[::1]:8000".
std::string authority(const tcp::endpoint& endpoint) {
  const std::string address = endpoint.address().to_string();
  return fmt::format("{}:{}", endpoint.address().is_v6() ? "[" + address + "]" : address, endpoint.port());
}

bool is_loopback(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address.is_loopback();
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).is_loopback();
}

}  // namespace

bool is_loopback_address(std::string_view text) {
  error_code no_address;
  const asio::ip::address address = asio::ip::make_address(text, no_address);
  return !no_address && is_loopback(address);
}

void log_exception(const std::exception& exception) noexcept {
  try {
    log::error("a connection's work ended by an exception: {}", exception.what());
  } catch (const std::exception&) {  // not even memory for the line
  }
}

IoLoop::~IoLoop() {
  std::vector<std::function<void()>> left;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    left.swap(inbox_);
  }
  left.clear();
  batch_.clear();
  dirty_.clear();
}

void IoLoop::post(std::function<void()> fn) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;  // `fn` ends after the lock, as its own end may post
    inbox_.push_back(std::move(fn));
    if (scheduled_) return;
    scheduled_ = true;
  }
  asio::post(context, [this] { run_posted(); });
}

void IoLoop::run_posted() {
  {
    const std::lock_guard lock(mutex_);
    batch_.swap(inbox_);
    scheduled_ = false;
  }
  in_batch_ = true;
  for (auto& fn : batch_) {
    try {
      fn();
    } catch (const std::exception& e) {
      log_exception(e);
    }
  }
  batch_.clear();
  in_batch_ = false;
  auto dirty = std::move(dirty_);
  dirty_.clear();
  for (auto& session : dirty) {
    try {
      flush_session(*session);
    } catch (const std::exception& e) {
      log_exception(e);
    }
  }
}

void IoLoop::flush_later(std::shared_ptr<Session> session) {
  if (in_batch_) {
    dirty_.push_back(std::move(session));
  } else {
    flush_session(*session);
  }
}

struct Server::Impl {
  ServerOptions options;
  Handler* handler = nullptr;
  Counters counters;
  std::shared_ptr<ByteBudget> budget;
  std::atomic<bool> draining{false};
  std::vector<std::unique_ptr<IoLoop>> loops;
  std::vector<std::thread> threads;
  std::vector<asio::executor_work_guard<asio::io_context::executor_type>> guards;
  std::unique_ptr<tcp::acceptor> acceptor;  // on loops[0]
  tcp::endpoint endpoint;                   // that it is bound to
  std::atomic<size_t> next_loop{0};

  SessionContext session_context() { return {&options, handler, &counters, &draining, budget}; }
  asio::awaitable<void> accept_loop();
  asio::awaitable<void> accept_connections();
  asio::awaitable<void> sweeper(IoLoop* loop);
};

asio::awaitable<void> Server::Impl::accept_loop() {
  for (bool pause = false;;) {
    try {
      if (pause) co_await asio::steady_timer(loops[0]->context, kAcceptPause).async_wait(asio::use_awaitable);
      co_return co_await accept_connections();
    } catch (const std::exception& e) {
      log_exception(e);
      pause = true;
    }
  }
}

asio::awaitable<void> Server::Impl::accept_connections() {
  asio::steady_timer pause(loops[0]->context);
  // Of one kind one at most in ten seconds: either may last for hours.
  auto next_refusal = std::chrono::steady_clock::now(), next_failure = next_refusal;
  const auto is_due = [](std::chrono::steady_clock::time_point& next) {
    const auto now = std::chrono::steady_clock::now();
    if (now < next) return false;
    next = now + std::chrono::seconds(10);
    return true;
  };
  while (acceptor->is_open()) {
    IoLoop* loop = loops[next_loop++ % loops.size()].get();
    error_code ec;
    tcp::socket socket = co_await acceptor->async_accept(loop->context, asio::redirect_error(asio::use_awaitable, ec));
    if (ec == asio::error::operation_aborted || !acceptor->is_open()) co_return;
    if (ec) {  // out of file descriptors, or the client was faster in leaving
      if (is_due(next_failure)) {
        log::warn("accept failed: {}{}{}", ec.message(), out_of_files(ec) ? "; " : "",
                  out_of_files(ec) ? kMoreFiles : "");
      }
      pause.expires_after(kAcceptPause);
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, ec));
      continue;
    }
    ++counters.accepted;
    if (counters.connections >= options.max_connections) {
      ++counters.refused;
      socket.close(ec);
      if (is_due(next_refusal)) {
        log::warn("connections are refused, {} so far: as many as --max-connections ({}) are open",
                  counters.refused.load(), options.max_connections);
      }
      continue;
    }
    asio::post(loop->context,
               [socket = std::move(socket), place = Admission(&counters), loop, context = session_context()]() mutable {
                 start_session(std::move(socket), std::move(place), loop, context);
               });
  }
}

// Deadlines are checked a few times a second for all connections at once: no timer for each.
asio::awaitable<void> Server::Impl::sweeper(IoLoop* loop) {
  asio::steady_timer timer(loop->context);
  for (;;) {
    try {
      error_code ec;
      timer.expires_after(std::chrono::milliseconds(200));
      co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ec));
      if (ec) co_return;
      sweep_sessions(loop, false);
    } catch (const std::exception& e) {
      log_exception(e);
    }
  }
}

Result<std::unique_ptr<Server>> Server::listen(ServerOptions options, Handler* handler) {
  if (options.threads < 1) return error(ErrorCode::kUsage, "--io-threads is {}; expected at least 1", options.threads);
  allow_most_open_files();
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  impl->handler = handler;
  impl->budget = std::make_shared<ByteBudget>(impl->options.max_request_bytes);
  try {
    for (int i = 0; i < impl->options.threads; ++i) impl->loops.push_back(std::make_unique<IoLoop>());
  } catch (const boost::system::system_error& e) {
    return error(ErrorCode::kIo, "--io-threads {}: {}; {}", impl->options.threads, e.what(),
                 out_of_files(e.code()) ? kMoreFiles : "use fewer");
  }
  const std::string& host = impl->options.host;
  const uint16_t port = impl->options.port;

  error_code ec;
  tcp::endpoint endpoint;
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';  // as URLs write IPv6
  const asio::ip::address address =
      bracketed ? asio::ip::make_address_v6(host.substr(1, host.size() - 2), ec) : asio::ip::make_address(host, ec);
  if (!ec) {
    endpoint = tcp::endpoint(address, port);
  } else {
    tcp::resolver resolver(impl->loops[0]->context);
    auto found = resolver.resolve(host, std::to_string(port), tcp::resolver::passive, ec);
    if (ec || found.empty()) return error(ErrorCode::kUsage, "--host {}: not an address of this machine", host);
    endpoint = found.begin()->endpoint();
  }
  impl->acceptor = std::make_unique<tcp::acceptor>(impl->loops[0]->context);
  tcp::acceptor& acceptor = *impl->acceptor;
  acceptor.open(endpoint.protocol(), ec);
  if (!ec) acceptor.set_option(asio::socket_base::reuse_address(true), ec);
  if (!ec) acceptor.bind(endpoint, ec);
  if (!ec) acceptor.listen(4096, ec);
  if (ec) {
    return error(ErrorCode::kIo, "cannot listen on {}: {}; {}", authority(endpoint), ec.message(),
                 out_of_files(ec) ? kMoreFiles : "choose another --port or --host");
  }
  impl->endpoint = acceptor.local_endpoint(ec);
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() { stop(); }

void Server::start() {
  asio::co_spawn(impl_->loops[0]->context, impl_->accept_loop(), asio::detached);
  for (auto& loop : impl_->loops) {
    asio::co_spawn(loop->context, impl_->sweeper(loop.get()), asio::detached);
    impl_->guards.push_back(asio::make_work_guard(loop->context));
    impl_->threads.emplace_back([context = &loop->context] { run(*context); });
  }
}

uint16_t Server::port() const { return impl_->endpoint.port(); }

std::string Server::url() const {
  tcp::endpoint reached = impl_->endpoint;
  if (reached.address().is_unspecified()) {
    reached.address(reached.address().is_v6() ? asio::ip::address(asio::ip::address_v6::loopback())
                                              : asio::ip::address_v4::loopback());
  }
  return "http://" + authority(reached);
}

bool Server::on_loopback() const { return is_loopback(impl_->endpoint.address()); }

void Server::stop_accepting() {
  impl_->draining = true;
  asio::post(impl_->loops[0]->context, [impl = impl_.get()] {
    error_code ec;
    impl->acceptor->close(ec);
  });
}

bool Server::wait_idle(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (impl_->counters.exchanges > 0) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void Server::stop() {
  if (impl_->threads.empty()) return;
  stop_accepting();
  for (auto& loop : impl_->loops) {
    asio::post(loop->context, [loop = loop.get()] { sweep_sessions(loop, true); });
  }
  // Closed connections end their coroutines; then nothing but our own guard and timer keeps a loop running.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (impl_->counters.connections > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (auto& loop : impl_->loops) loop->context.stop();
  for (auto& thread : impl_->threads) thread.join();
  impl_->threads.clear();
  impl_->guards.clear();
}

ServerStats Server::stats() const {
  const Counters& c = impl_->counters;
  return {c.connections, c.exchanges, c.accepted, c.refused, c.slow_readers_cut, impl_->budget->used()};
}

}  // namespace nfp::http
