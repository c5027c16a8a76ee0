// One connection: a coroutine that reads requests one after another, and the exchange that answers each.
#include "server/http/http_session.h"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <exception>
#include <optional>

#include "base/log.h"
#include "server/http/request_reader.h"

namespace nfp::http {
namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

namespace {

constexpr size_t kSmallRead = 2u << 10;  // thousands of connections wait in such a read
constexpr size_t kBodyRead = 64u << 10;
constexpr size_t kKeptCapacity = 16u << 10;  // of a connection's emptied buffers
constexpr size_t kMaxAhead = 1u << 20;       // of later requests that are read while one is answered

// RFC 9110, 6.6.1: who has a clock says when it answered.
void append_date(std::string& out) {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  ::gmtime_r(&now, &utc);
  char text[64];
  out.append(text, std::strftime(text, sizeof(text), "Date: %a, %d %b %Y %H:%M:%S GMT\r\n", &utc));
}

void append_header(std::string& out, std::string_view name, std::string_view value) {
  out.append(name).append(": ");
  for (const char c : value) {
    if (c != '\r' && c != '\n' && c != '\0') out.push_back(c);
  }
  out.append("\r\n");
}

// Bytes that the kernel holds and the client has not taken. It asks us for more only when much of that is gone, which
// a slow client may take longer for than any timeout.
int unsent_bytes(tcp::socket& socket) {
  int bytes = 0;
  return ioctl(socket.native_handle(), SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

void append_chunk(std::string& out, std::string_view piece) {
  fmt::format_to(std::back_inserter(out), "{:x}\r\n", piece.size());
  out.append(piece).append("\r\n");
}

}  // namespace

class Session final : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, Admission place, IoLoop* loop, const SessionContext& context)
      : place_(std::move(place)),
        socket_(std::move(socket)),
        wake_(loop->context),
        loop_(loop),
        context_(context),
        ahead_(context.budget) {
    loop_->sessions.insert(this);
    error_code ec;
    socket_.set_option(tcp::no_delay(true), ec);
    socket_.non_blocking(true, ec);
    const auto remote = socket_.remote_endpoint(ec);
    if (!ec) peer_ = remote.address().to_string() + ":" + std::to_string(remote.port());
    wake_.expires_at(asio::steady_timer::time_point::max());
  }
  ~Session() {
    loop_->sessions.erase(this);
    count_end();
  }

  asio::awaitable<void> run();
  void sweep(Clock::time_point now, bool all);
  void flush();

  // The exchange's side.
  bool current(uint64_t serial) const { return active_ && serial == serial_ && !closed_; }
  void respond(const Response& response);
  void start(const Response& head);
  void write(std::string_view piece);
  void finish();
  void hold(ByteLease lease) { answer_ = std::move(lease); }
  void set_abort(std::function<void()> callback) { on_abort_ = std::move(callback); }
  IoLoop* loop() const { return loop_; }
  void abandon(uint64_t serial);
  void abandon_later(uint64_t serial) { abandoned_ = serial; }  // with the next sweep; from any thread

 private:
  enum class Phase { kIdle, kHeader, kBody, kAnswering, kLingering };

  asio::awaitable<bool> read_some();
  asio::awaitable<bool> read_ahead();
  asio::awaitable<bool> read_request();
  asio::awaitable<void> wait_answered();
  asio::awaitable<void> linger();
  void send_more();
  void dispatch(Request request);
  void answer_early(const Response& response);
  void append_head(const Response& response, bool stream);
  template <typename Append>
  void append_whole(const Append& append);
  void end_answer();
  void count_end();
  void abort_connection();
  void set_phase(Phase phase, std::chrono::milliseconds allowed);
  void take_head(const RequestReader& reader);

  Admission place_;
  tcp::socket socket_;
  asio::steady_timer wake_;             // cancelled to wake the coroutine
  asio::cancellation_signal answered_;  // ends a read_ahead()
  IoLoop* loop_;
  SessionContext context_;
  std::string peer_;
  beast::flat_buffer buffer_;
  ByteLease ahead_;   // for what the buffer holds of later requests
  ByteLease answer_;  // for the answer that is being sent

  Phase phase_ = Phase::kIdle;
  Clock::time_point deadline_ = Clock::time_point::max();
  Clock::time_point write_deadline_ = Clock::time_point::max();
  std::string method_, path_;  // of the request that is answered next; empty = its head is not there
  Clock::time_point arrived_;  // when that was read
  uint64_t serial_ = 0;        // of the current exchange
  std::atomic<uint64_t> abandoned_{0};
  bool active_ = false;   // an exchange is being answered
  bool counted_ = false;  // among the exchanges, until all of the answer is the kernel's
  bool keep_alive_ = true;
  bool http_1_0_ = false;
  bool head_only_ = false;
  bool streaming_ = false;
  bool chunked_ = false;
  bool closed_ = false;
  bool close_after_ = false;  // once everything is sent
  std::function<void()> on_abort_;

  std::string out_;       // gathered
  std::string inflight_;  // being sent
  size_t sent_ = 0;       // of inflight_
  int unsent_ = 0;        // in the kernel, when write_deadline_ was set
  bool sending_ = false;
};

// Ends with the request if nobody else answers it: a handler that drops its exchange must not leave a client waiting.
class SessionExchange final : public Exchange {
 public:
  SessionExchange(std::shared_ptr<Session> session, uint64_t serial) : session_(std::move(session)), serial_(serial) {}
  ~SessionExchange() override {
    session_->abandon_later(serial_);
    try {
      session_->loop()->post([session = std::move(session_), serial = serial_] { session->abandon(serial); });
    } catch (const std::exception&) {  // no memory for that: a sweep does it
    }
  }
  void respond(Response response) override {
    if (session_->current(serial_)) session_->respond(response);
  }
  void start(Response head) override {
    if (session_->current(serial_)) session_->start(head);
  }
  void write(std::string_view piece) override {
    if (session_->current(serial_)) session_->write(piece);
  }
  void finish() override {
    if (session_->current(serial_)) session_->finish();
  }
  void hold(ByteLease lease) override {
    if (session_->current(serial_)) session_->hold(std::move(lease));
  }
  void on_abort(std::function<void()> callback) override {
    if (session_->current(serial_)) {
      session_->set_abort(std::move(callback));
    } else if (callback) {
      callback();
    }
  }
  bool aborted() const override { return !session_->current(serial_); }
  void post(std::function<void()> fn) override { session_->loop()->post(std::move(fn)); }

 private:
  std::shared_ptr<Session> session_;
  uint64_t serial_;
};

void Session::set_phase(Phase phase, std::chrono::milliseconds allowed) {
  phase_ = phase;
  deadline_ = allowed.count() > 0 ? Clock::now() + allowed : Clock::time_point::max();
}

// False at the connection's end.
asio::awaitable<bool> Session::read_some() {
  error_code ec;
  const size_t room = phase_ == Phase::kBody ? kBodyRead : kSmallRead;
  const size_t n =
      co_await socket_.async_read_some(buffer_.prepare(room), asio::redirect_error(asio::use_awaitable, ec));
  buffer_.commit(n);
  co_return !ec && n > 0 && !closed_;
}

// What comes while an answer is under way is the next request, early; it stays in the buffer. False at the connection's
// end, and where more comes than any client has reason to send.
asio::awaitable<bool> Session::read_ahead() {
  error_code ec;
  const size_t n = co_await socket_.async_read_some(
      buffer_.prepare(kSmallRead),
      asio::redirect_error(asio::bind_cancellation_slot(answered_.slot(), asio::use_awaitable), ec));
  buffer_.commit(n);
  if (ec == asio::error::operation_aborted) co_return !closed_;
  if (ec || n == 0 || closed_) co_return false;
  // Where the answer has ended meanwhile, read_request() sees to what came, and may answer 429.
  co_return !active_ || (buffer_.size() <= kMaxAhead && ahead_.resize(buffer_.size()));
}

// Takes from a complete head what the connection goes by.
void Session::take_head(const RequestReader& reader) {
  keep_alive_ = reader.keep_alive() && !*context_.draining;
  http_1_0_ = reader.http_1_0();
  const Request& head = reader.head();
  head_only_ = head.method == "HEAD";
  method_ = head.method;
  path_ = head.path;
  arrived_ = Clock::now();
}

// Reads one request and hands it over. False when the connection is to be closed.
asio::awaitable<bool> Session::read_request() {
  const ServerOptions& options = *context_.options;
  RequestReader reader(options, peer_);
  ByteLease lease(context_.budget);
  ahead_.resize(0);
  method_.clear();
  path_.clear();
  set_phase(Phase::kIdle, options.idle_timeout);

  while (!reader.done()) {
    const bool head_seen = reader.head_done();
    if (buffer_.size() > 0) {
      buffer_.consume(reader.put({static_cast<const char*>(buffer_.data().data()), buffer_.size()}));
      if (phase_ == Phase::kIdle && reader.begun()) set_phase(Phase::kHeader, options.header_timeout);
    }
    const bool head_came = reader.head_done() && !head_seen;
    if (head_came) take_head(reader);
    if (reader.fault()) {
      // The head may be incomplete, so its wish is unknown.
      if (!reader.head_done()) head_only_ = false;
      answer_early(context_.handler->protocol_error(reader.fault()->status, reader.fault()->message,
                                                    reader.head_done() ? &reader.head() : nullptr));
      co_return false;
    }
    if (head_came) {
      if (auto refusal = context_.handler->check_head(reader.head())) {
        answer_early(*refusal);
        co_return false;
      }
      set_phase(Phase::kBody, options.body_timeout);
      if (reader.expects_continue()) {
        out_.append("HTTP/1.1 100 Continue\r\n\r\n");
        flush();
      }
      continue;
    }
    if (reader.head_done() && !lease.resize(reader.body_bytes())) {
      answer_early(context_.handler->protocol_error(429, "the server holds as many bytes of requests as it may",
                                                    &reader.head()));
      co_return false;
    }
    if (!reader.done() && (!co_await read_some() || close_after_)) co_return false;
  }
  if (buffer_.size() == 0) buffer_.shrink_to_fit();
  Request request = reader.take();
  request.lease = std::move(lease);
  dispatch(std::move(request));
  co_return true;
}

void Session::dispatch(Request request) {
  set_phase(Phase::kAnswering, std::chrono::milliseconds(0));
  active_ = true;
  counted_ = true;
  streaming_ = false;
  ++serial_;
  ++context_.counters->exchanges;
  auto exchange = std::make_shared<SessionExchange>(shared_from_this(), serial_);
  context_.handler->handle(std::move(request), std::move(exchange));
}

// While an answer is under way, reading on tells when the client goes away.
asio::awaitable<void> Session::wait_answered() {
  while ((active_ || sending_ || !out_.empty()) && !closed_) {
    if (active_) {
      if (!co_await read_ahead()) {
        abort_connection();
        co_return;
      }
    } else {
      error_code ec;
      co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, ec));
    }
  }
}

// After a refusal the client may still be sending: closing at once would reset the connection and could destroy the
// answer on its way, so what comes is read and dropped for a moment.
asio::awaitable<void> Session::linger() {
  while ((sending_ || !out_.empty()) && !closed_) {
    error_code ec;
    co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, ec));
  }
  if (closed_) co_return;
  error_code ec;
  socket_.shutdown(tcp::socket::shutdown_send, ec);
  set_phase(Phase::kLingering, std::chrono::milliseconds(1000));
  size_t dropped = 0;
  while (!closed_ && dropped < (1u << 20)) {
    dropped += buffer_.size();
    buffer_.consume(buffer_.size());
    if (!co_await read_some()) break;
  }
}

asio::awaitable<void> Session::run() {
  const auto self = shared_from_this();
  for (;;) {
    bool taken = false;
    try {
      taken = co_await read_request();
    } catch (const std::exception& e) {
      log_exception(e);
      // Of a request that its handler has, the exchange has ended, which answers 500.
      taken = active_;
      if (!taken)
        answer_early(context_.handler->protocol_error(429, "there is no memory to read the request", nullptr));
    }
    if (!taken) {
      if (!closed_ && (sending_ || !out_.empty() || close_after_)) co_await linger();
      break;
    }
    co_await wait_answered();
    if (closed_ || close_after_) {
      if (!closed_) co_await linger();
      break;
    }
  }
  abort_connection();
}

void Session::append_head(const Response& response, bool stream) {
  const bool chunked = stream && !http_1_0_;
  const auto seconds = method_.empty() ? Clock::duration(0) : Clock::now() - arrived_;
  context_.handler->answered(method_, path_, response.status, std::chrono::duration<double>(seconds).count());
  fmt::format_to(std::back_inserter(out_), "HTTP/1.1 {} {}\r\n", response.status, reason_phrase(response.status));
  append_date(out_);
  if (!response.content_type.empty() && response.status != 204) {
    append_header(out_, "Content-Type", response.content_type);
  }
  for (const Header& header : response.headers) append_header(out_, header.name, header.value);
  if (chunked) {
    out_.append("Transfer-Encoding: chunked\r\n");
  } else if (!stream && response.status != 204) {
    fmt::format_to(std::back_inserter(out_), "Content-Length: {}\r\n", response.body.size());
  }
  if (*context_.draining) keep_alive_ = false;
  out_.append(keep_alive_ ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n");
}

// All that it appends or, where there is no memory for that, nothing, so that an error can still be told.
template <typename Append>
void Session::append_whole(const Append& append) {
  const size_t before = out_.size();
  try {
    append();
  } catch (const std::exception&) {
    out_.resize(before);
    throw;
  }
}

void Session::respond(const Response& response) {
  if (streaming_) return finish();
  append_whole([&] {
    append_head(response, /*stream=*/false);
    if (!head_only_ && response.status != 204) out_.append(response.body);
  });
  end_answer();
}

void Session::answer_early(const Response& response) {
  if (closed_) return;
  keep_alive_ = false;
  close_after_ = true;
  streaming_ = false;
  append_head(response, /*stream=*/false);
  if (!head_only_) out_.append(response.body);
  flush();
}

void Session::start(const Response& head) {
  if (streaming_) return;
  chunked_ = !http_1_0_;
  if (http_1_0_) keep_alive_ = false;  // the end of the connection is the end of the body
  append_whole([&] { append_head(head, /*stream=*/true); });
  streaming_ = true;
  if (!head.body.empty()) return write(head.body);
  loop_->flush_later(shared_from_this());
}

void Session::write(std::string_view piece) {
  if (!streaming_ || piece.empty()) return;
  // What the client could have taken by now it is given first; what counts is what it then left before this piece,
  // so that no piece, however large, makes a reader slow.
  const size_t most = context_.options->max_stream_buffer;
  if (out_.size() + inflight_.size() - sent_ > most) {
    flush();
    if (closed_) return;
    if (out_.size() + inflight_.size() - sent_ > most) {
      ++context_.counters->slow_readers_cut;
      return abort_connection();
    }
  }
  if (!head_only_) {
    if (chunked_) {
      append_whole([&] { append_chunk(out_, piece); });
    } else {
      out_.append(piece);
    }
  }
  loop_->flush_later(shared_from_this());
}

void Session::finish() {
  if (!streaming_) return;
  if (chunked_ && !head_only_) out_.append("0\r\n\r\n");
  end_answer();
}

void Session::end_answer() {
  active_ = false;
  streaming_ = false;
  on_abort_ = nullptr;
  if (!keep_alive_) close_after_ = true;
  // The coroutine may be in a read that watches the client; that read then simply brings the next request.
  set_phase(Phase::kIdle, context_.options->idle_timeout);
  loop_->flush_later(shared_from_this());
}

void Session::count_end() {
  if (std::exchange(counted_, false)) --context_.counters->exchanges;
  answer_.resize(0);
}

void Session::abandon(uint64_t serial) {
  if (!current(serial)) return;
  if (streaming_) {
    abort_connection();  // a body cut short must not look complete
  } else {
    respond(context_.handler->protocol_error(500, "the request was dropped", nullptr));
  }
}

void Session::flush() {
  if (sending_ || closed_) return;
  if (out_.empty()) {
    if (!active_) count_end();
    if (phase_ == Phase::kIdle && !active_) set_phase(Phase::kIdle, context_.options->idle_timeout);
    if (close_after_ && !active_ && phase_ != Phase::kLingering) {
      // The coroutine may be reading: end that, so that it closes the connection.
      error_code ec;
      socket_.shutdown(tcp::socket::shutdown_send, ec);
      set_phase(Phase::kLingering, std::chrono::milliseconds(1000));
    }
    wake_.cancel();
    // The next request may be there already; else the read that goes on brings it.
    if (!active_ && buffer_.size() > 0) answered_.emit(asio::cancellation_type::all);
    return;
  }
  // Nearly always the kernel takes everything at once; the event loop is only for the rest.
  error_code now;
  const size_t sent = socket_.write_some(asio::buffer(out_), now);
  if (now && now != asio::error::would_block && now != asio::error::try_again) return abort_connection();
  if (sent == out_.size()) {
    out_.clear();
    if (out_.capacity() > kKeptCapacity) out_.shrink_to_fit();
    return flush();
  }
  out_.erase(0, sent);
  sending_ = true;
  inflight_.swap(out_);
  out_.clear();
  sent_ = 0;
  send_more();
}

// Each piece that the client takes gives it the whole time again for the next.
void Session::send_more() {
  write_deadline_ = Clock::now() + context_.options->write_timeout;
  unsent_ = unsent_bytes(socket_);
  socket_.async_write_some(asio::buffer(inflight_) + sent_, [self = shared_from_this()](error_code ec, size_t n) {
    if (ec) return self->abort_connection();
    self->sent_ += n;
    if (self->sent_ < self->inflight_.size()) return self->send_more();
    self->sending_ = false;
    self->write_deadline_ = Clock::time_point::max();
    self->inflight_.clear();
    self->sent_ = 0;
    if (self->inflight_.capacity() > kKeptCapacity) self->inflight_.shrink_to_fit();
    self->flush();
  });
}

void Session::abort_connection() {
  if (closed_) return;
  closed_ = true;
  error_code ec;
  socket_.close(ec);
  wake_.cancel();
  count_end();
  active_ = false;
  if (auto callback = std::exchange(on_abort_, nullptr)) callback();
}

void Session::sweep(Clock::time_point now, bool all) {
  if (closed_) return;
  if (all) return abort_connection();
  if (abandoned_ == serial_) abandon(serial_);
  if (now >= write_deadline_) {
    if (const int unsent = unsent_bytes(socket_); unsent < unsent_) {
      unsent_ = unsent;
      write_deadline_ = now + context_.options->write_timeout;
      return;
    }
    if (active_) ++context_.counters->slow_readers_cut;
    return abort_connection();
  }
  if (now < deadline_) return;
  if (phase_ == Phase::kIdle && (sending_ || !out_.empty())) return;  // flush() lets idle time begin
  if (phase_ == Phase::kHeader || phase_ == Phase::kBody) {
    head_only_ = false;
    answer_early(context_.handler->protocol_error(408, "the request came too slowly", nullptr));
    set_phase(Phase::kLingering, std::chrono::milliseconds(1000));
    return;
  }
  abort_connection();
}

void start_session(tcp::socket socket, Admission place, IoLoop* loop, const SessionContext& context) {
  auto session = std::make_shared<Session>(std::move(socket), std::move(place), loop, context);
  asio::co_spawn(
      loop->context, [session]() { return session->run(); },
      [session](const std::exception_ptr& failure) {
        if (!failure) return;
        session->sweep(Clock::now(), /*all=*/true);
        std::rethrow_exception(failure);  // the loop's thread tells of it
      });
}

void sweep_sessions(IoLoop* loop, bool all) {
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Session>> sessions;  // closing one changes the set
  sessions.reserve(loop->sessions.size());
  for (Session* session : loop->sessions) sessions.push_back(session->shared_from_this());
  for (auto& session : sessions) {
    try {
      session->sweep(now, all);
    } catch (const std::exception& e) {
      log_exception(e);
      session->sweep(now, /*all=*/true);
    }
  }
}

void flush_session(Session& session) { session.flush(); }

}  // namespace nfp::http
