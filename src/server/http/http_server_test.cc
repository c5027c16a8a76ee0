#include "server/http/http_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <future>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace nfp::http {
namespace {

using namespace std::chrono_literals;

constexpr size_t kLarge = size_t{256} << 20;
constexpr size_t kHeld = size_t{20} << 20;

// GET /hello -> "hello"; POST /echo -> the body; GET /stream -> three pieces; GET /endless -> pieces without end;
// GET /hang -> no answer; GET /drop -> the exchange is dropped; GET /refused is refused at its headers; GET /throw and
// GET /throw-later throw, the latter in what it has posted; GET /large -> kLarge bytes; GET /held -> kHeld bytes that
// count among those of requests.
class TestHandler final : public Handler {
 public:
  std::optional<Response> check_head(const Request& request) override {
    if (request.path != "/refused") return std::nullopt;
    Response response;
    response.status = 401;
    response.body = "no";
    return response;
  }
  void handle(Request request, std::shared_ptr<Exchange> exchange) override {
    Response response;
    response.content_type = "text/plain";
    if (request.path == "/hello") {
      response.body = "hello";
      response.headers.push_back({"X-Given", std::string(request.header("x-given"))});
      exchange->respond(std::move(response));
    } else if (request.path == "/echo") {
      response.body = request.body;
      exchange->respond(std::move(response));
    } else if (request.path == "/stream") {
      exchange->start(std::move(response));
      // From another thread, as the engine does it.
      std::thread([exchange] {
        for (int i = 0; i < 3; ++i) {
          exchange->post([exchange, i] { exchange->write("piece" + std::to_string(i)); });
          std::this_thread::sleep_for(2ms);
        }
        exchange->post([exchange] { exchange->finish(); });
      }).detach();
    } else if (request.path == "/endless") {
      exchange->on_abort([this] { aborted = true; });
      exchange->start(std::move(response));
      const std::lock_guard lock(mutex);
      kept = exchange;
    } else if (request.path == "/hang") {
      exchange->on_abort([this] { aborted = true; });
      const std::lock_guard lock(mutex);
      kept = exchange;
    } else if (request.path == "/large") {
      response.body.assign(kLarge, 'x');
      exchange->respond(std::move(response));
    } else if (request.path == "/held") {
      response.body.assign(kHeld, 'x');
      EXPECT_TRUE(request.lease.resize(kHeld));
      exchange->hold(std::move(request.lease));
      exchange->respond(std::move(response));
    } else if (request.path == "/throw") {
      throw std::bad_alloc();
    } else if (request.path == "/throw-later") {
      exchange->post([exchange] { throw std::bad_alloc(); });
    } else if (request.path == "/inject") {
      response.headers.push_back({"X-Bad", "a\r\nSet-Cookie: b"});
      exchange->respond(std::move(response));
    }
  }
  Response protocol_error(int status, std::string_view message, const Request*) override {
    Response response;
    response.status = status;
    response.body = std::string(message);
    return response;
  }
  std::shared_ptr<Exchange> take() {
    for (int i = 0; i < 500; ++i) {
      {
        const std::lock_guard lock(mutex);
        if (kept) return kept;
      }
      std::this_thread::sleep_for(2ms);
    }
    return nullptr;
  }

  std::atomic<bool> aborted{false};
  std::mutex mutex;
  std::shared_ptr<Exchange> kept;
};

class Client {
 public:
  explicit Client(uint16_t port, int receive_buffer = 0) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval wait{5, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    connected = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Client() { hang_up(); }
  void hang_up() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  bool send(std::string_view text) {
    return ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
  }
  // Reads until `mark` has come (all of it is returned), or the connection's end.
  std::string until(std::string_view mark) {
    std::string got;
    char buffer[4096];
    while (mark.empty() || got.find(mark) == std::string::npos) {
      const ssize_t n = recv(fd_, buffer, sizeof(buffer), 0);
      if (n <= 0) break;
      got.append(buffer, static_cast<size_t>(n));
    }
    return got;
  }
  std::string rest() { return until(""); }
  // Reads about so many bytes; returns how many.
  size_t some(size_t bytes) {
    std::vector<char> buffer(64 << 10);
    size_t got = 0;
    while (got < bytes) {
      const ssize_t n = recv(fd_, buffer.data(), std::min(buffer.size(), bytes - got), 0);
      if (n <= 0) break;
      got += static_cast<size_t>(n);
    }
    return got;
  }
  // Bytes up to the mark at the end of what comes.
  size_t rest_size(std::string_view mark) {
    std::vector<char> buffer(64 << 10);
    std::string tail;
    size_t got = 0;
    while (!tail.ends_with(mark)) {
      const ssize_t n = recv(fd_, buffer.data(), buffer.size(), 0);
      if (n <= 0) break;
      got += static_cast<size_t>(n);
      tail.append(buffer.data(), static_cast<size_t>(n));
      tail = tail.substr(tail.size() - std::min(tail.size(), mark.size()));
    }
    return got;
  }
  bool connected = false;

 private:
  int fd_;
};

class HttpServerTest : public ::testing::Test {
 protected:
  void start(ServerOptions options = {}) {
    options.port = 0;
    auto made = Server::listen(options, &handler_);
    ASSERT_TRUE(made.ok()) << made.error().message;
    server_ = std::move(*made);
    server_->start();
  }
  void TearDown() override {
    if (server_) server_->stop();
    {
      const std::lock_guard lock(handler_.mutex);
      handler_.kept.reset();
    }
    server_.reset();
  }
  std::string ask(std::string_view text, std::string_view mark = "") {
    Client client(server_->port());
    client.send(text);
    return client.until(mark);
  }
  bool becomes(const std::function<bool()>& condition) {
    for (int i = 0; i < 1000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(5ms);
    }
    return false;
  }

  TestHandler handler_;
  std::unique_ptr<Server> server_;
};

TEST_F(HttpServerTest, AnswersAndKeepsTheConnection) {
  start();
  Client client(server_->port());
  for (int i = 0; i < 3; ++i) {
    client.send("GET /hello HTTP/1.1\r\nHost: x\r\nX-Given: abc\r\n\r\n");
    const std::string got = client.until("\r\n\r\nhello");
    EXPECT_TRUE(got.starts_with("HTTP/1.1 200 OK\r\n")) << got;
    EXPECT_NE(got.find("X-Given: abc\r\n"), std::string::npos);
    EXPECT_NE(got.find("Content-Length: 5\r\n"), std::string::npos);
    struct tm date = {};
    const size_t at = got.find("\r\nDate: ");
    ASSERT_NE(at, std::string::npos) << got;
    const char* rest = ::strptime(got.c_str() + at, "\r\nDate: %a, %d %b %Y %H:%M:%S GMT", &date);
    ASSERT_NE(rest, nullptr) << got;
    EXPECT_TRUE(std::string_view(rest).starts_with("\r\n")) << got;
    EXPECT_LE(std::abs(::timegm(&date) - std::time(nullptr)), 60);
  }
}

TEST_F(HttpServerTest, AnswersPipelinedRequestsInOrder) {
  start();
  const std::string got =
      ask("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nfirst"
          "GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
          "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nthird");
  const size_t first = got.find("first"), second = got.find("piece2"), third = got.find("third");
  EXPECT_LT(first, second);
  EXPECT_LT(second, third);
  EXPECT_NE(third, std::string::npos) << got;
}

TEST_F(HttpServerTest, ReadsAChunkedBody) {
  start();
  const std::string got =
      ask("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
          "3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n");
  EXPECT_TRUE(got.ends_with("\r\n\r\nabcdefg")) << got;
}

TEST_F(HttpServerTest, ContinuesWhenAskedTo) {
  start();
  Client client(server_->port());
  client.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("abc");
  EXPECT_TRUE(client.until("abc").ends_with("abc"));
}

TEST_F(HttpServerTest, StreamsInChunks) {
  start();
  const std::string got = ask("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", "0\r\n\r\n");
  EXPECT_NE(got.find("Transfer-Encoding: chunked\r\n"), std::string::npos);
  EXPECT_TRUE(got.ends_with("6\r\npiece0\r\n6\r\npiece1\r\n6\r\npiece2\r\n0\r\n\r\n")) << got;
}

TEST_F(HttpServerTest, StreamsToAnHttp10Client) {
  start();
  const std::string got = ask("GET /stream HTTP/1.0\r\n\r\n");
  EXPECT_EQ(got.find("chunked"), std::string::npos);
  EXPECT_TRUE(got.ends_with("\r\n\r\npiece0piece1piece2")) << got;
}

TEST_F(HttpServerTest, AHeadAnswerHasNoBody) {
  start();
  const std::string got = ask("HEAD /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_NE(got.find("Content-Length: 5"), std::string::npos);
  EXPECT_TRUE(got.ends_with("\r\n\r\n")) << got;
}

TEST_F(HttpServerTest, RefusesAtTheHeadersWithoutReadingTheBody) {
  start();
  const std::string got = ask("POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_TRUE(got.starts_with("HTTP/1.1 401 ")) << got;
}

TEST_F(HttpServerTest, BoundsHeadersAndBodies) {
  ServerOptions options;
  options.max_header_bytes = 1000;
  options.max_body_bytes = 1000;
  start(options);
  EXPECT_TRUE(ask("GET /hello HTTP/1.1\r\nX: " + std::string(2000, 'a') + "\r\n\r\n").starts_with("HTTP/1.1 431 "));
  EXPECT_TRUE(ask("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n").starts_with("HTTP/1.1 413 "));
  const std::string chunk = "3e8\r\n" + std::string(1000, 'a') + "\r\n";
  EXPECT_TRUE(ask("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + chunk)
                  .starts_with("HTTP/1.1 413 "));
  // A chunk header that never ends.
  const std::string got =
      ask("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;" + std::string(300'000, 'x'));
  EXPECT_TRUE(got.starts_with("HTTP/1.1 4")) << got;
}

TEST_F(HttpServerTest, RefusesWhatIsNotHttp) {
  start();
  for (const char* text :
       {"\x16\x03\x01\x02", "GET\r\n\r\n", "GET /hello HTTP/9.9\r\n\r\n", "GET /a b HTTP/1.1\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        "GET /hello HTTP/1.1\r\nBad Name: x\r\n\r\n"}) {
    const std::string got = ask(text);
    EXPECT_TRUE(got.starts_with("HTTP/1.1 400 ")) << text << " -> " << got;
  }
}

TEST_F(HttpServerTest, CutsOffSlowRequests) {
  ServerOptions options;
  options.header_timeout = 300ms;
  options.body_timeout = 300ms;
  options.idle_timeout = 300ms;
  start(options);
  EXPECT_TRUE(ask("GET /hello HTT").starts_with("HTTP/1.1 408 "));
  EXPECT_TRUE(ask("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc").starts_with("HTTP/1.1 408 "));
  EXPECT_EQ(ask(""), "");  // says nothing: closed without a word
  EXPECT_EQ(ask("\r\n"), "");
  EXPECT_TRUE(becomes([&] { return server_->stats().connections == 0; }));
}

// Being idle begins when the answer has left, however long that takes.
TEST_F(HttpServerTest, ASlowReaderOfAnAnswerIsNotIdle) {
  ServerOptions options;
  options.max_body_bytes = 64u << 20;
  options.idle_timeout = 300ms;
  start(options);
  Client client(server_->port(), /*receive_buffer=*/64 << 10);
  const std::string body(12u << 20, 'x');
  std::thread sends([&] {
    client.send(fmt::format("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.size()));
    client.send(body);
  });
  size_t got = 0;
  for (int i = 0; i < 10; ++i) {  // over a second
    got += client.some(1u << 20);
    std::this_thread::sleep_for(120ms);
  }
  sends.join();
  got += client.rest_size("end of the connection");
  EXPECT_GE(got, body.size());
}

TEST_F(HttpServerTest, TellsWhenTheClientGoesAway) {
  start();
  for (const char* path : {"/hang", "/endless"}) {
    handler_.aborted = false;
    Client client(server_->port());
    client.send(std::string("GET ") + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
    ASSERT_NE(handler_.take(), nullptr);
    client.hang_up();
    EXPECT_TRUE(becomes([&] { return handler_.aborted.load(); })) << path;
    EXPECT_TRUE(becomes([&] { return server_->stats().exchanges == 0; }));
    const std::lock_guard lock(handler_.mutex);
    handler_.kept.reset();
  }
}

TEST_F(HttpServerTest, CutsOffAStreamThatNobodyReads) {
  ServerOptions options;
  options.max_stream_buffer = 64 << 10;
  start(options);
  Client client(server_->port());
  client.send("GET /endless HTTP/1.1\r\nHost: x\r\n\r\n");
  const auto exchange = handler_.take();
  ASSERT_NE(exchange, nullptr);
  const std::string piece(16 << 10, 'x');
  for (int i = 0; i < 4000 && !handler_.aborted; ++i) {
    std::promise<void> done;
    exchange->post([&] {
      exchange->write(piece);
      done.set_value();
    });
    done.get_future().wait();
  }
  EXPECT_TRUE(handler_.aborted);
  EXPECT_EQ(server_->stats().slow_readers_cut, 1u);
}

TEST_F(HttpServerTest, AnswersForAHandlerThatDropsItsExchange) {
  start();
  EXPECT_TRUE(ask("GET /drop HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 500 "));
}

TEST_F(HttpServerTest, AnExceptionEndsItsRequestAndNoOther) {
  ServerOptions options;
  options.threads = 1;
  start(options);
  Client bystander(server_->port());
  bystander.send("GET /endless HTTP/1.1\r\nHost: a\r\n\r\n");
  const auto stream = handler_.take();
  ASSERT_NE(stream, nullptr);
  Client kept(server_->port());
  for (const std::string path : {"/throw", "/throw-later"}) {
    EXPECT_NE(ask("GET " + path + " HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").find(" 500 "),
              std::string::npos);
    kept.send("GET " + path + " HTTP/1.1\r\nHost: a\r\n\r\n");
    EXPECT_NE(kept.until("dropped").find(" 500 "), std::string::npos);
  }
  stream->post([stream] { stream->write("goes on"); });
  EXPECT_NE(bystander.until("goes on").find("goes on"), std::string::npos);
  EXPECT_NE(ask("GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").find("hello"), std::string::npos);
}

// A sanitizer's memory is not what the limit counts.
#if !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(HttpServerTest, AnAnswerThatThereIsNoMemoryToSendIsAnError) {
  ServerOptions options;
  options.threads = 1;
  start(options);
  Client kept(server_->port());
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit tight = before;
  tight.rlim_cur =
      pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) + kLarge * 3 / 2;  // for the body, and no copy
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  kept.send("GET /large HTTP/1.1\r\nHost: a\r\n\r\n");
  const std::string answer = kept.until("dropped");
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 500 ")) << answer.substr(0, 200);
  kept.send("GET /hello HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_NE(kept.until("hello").find(" 200 "), std::string::npos);
}
#endif

TEST_F(HttpServerTest, LetsNoLineBreakIntoAHeader) {
  start();
  const std::string got = ask("GET /inject HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(got.find("\r\nSet-Cookie"), std::string::npos) << got;
}

TEST_F(HttpServerTest, DrainsWhatRuns) {
  start();
  Client busy(server_->port());
  busy.send("GET /endless HTTP/1.1\r\nHost: x\r\n\r\n");
  const auto exchange = handler_.take();
  ASSERT_NE(exchange, nullptr);
  Client idle(server_->port());
  idle.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  idle.until("hello");
  server_->stop_accepting();
  EXPECT_FALSE(server_->wait_idle(100ms));
  EXPECT_TRUE(becomes([&] { return !Client(server_->port()).connected; }));
  // A connection of a health checker's pool gets one more answer.
  idle.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string last = idle.rest();
  EXPECT_TRUE(last.starts_with("HTTP/1.1 200 ")) << last;
  EXPECT_NE(last.find("Connection: close\r\n"), std::string::npos) << last;
  exchange->post([exchange] {
    exchange->write("end");
    exchange->finish();
  });
  EXPECT_TRUE(server_->wait_idle(2000ms));
  EXPECT_TRUE(busy.until("0\r\n\r\n").ends_with("3\r\nend\r\n0\r\n\r\n"));
}

// A client over a slow line has all of an answer that was made before the end.
TEST_F(HttpServerTest, DrainsWhatIsBeingSent) {
  ServerOptions options;
  options.max_body_bytes = 64u << 20;
  start(options);
  Client client(server_->port(), /*receive_buffer=*/64 << 10);
  const std::string body(24u << 20, 'x');
  client.send(fmt::format("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.size()));
  client.send(body);
  size_t got = client.some(1u << 20);
  server_->stop_accepting();
  EXPECT_FALSE(server_->wait_idle(200ms));
  std::thread reads([&] { got += client.rest_size("end of the connection"); });
  EXPECT_TRUE(server_->wait_idle(10'000ms));
  server_->stop();
  reads.join();
  EXPECT_GE(got, body.size());
}

TEST_F(HttpServerTest, BoundsConnections) {
  ServerOptions options;
  options.max_connections = 2;
  start(options);
  Client a(server_->port()), b(server_->port());
  a.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  b.send("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  a.until("hello");
  b.until("hello");
  EXPECT_EQ(ask("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"), "");
  EXPECT_EQ(server_->stats().refused, 1u);
}

// Two servers in a row must see the same requests in the same bytes.
TEST_F(HttpServerTest, RefusesDoubtfulFraming) {
  start();
  const std::string smuggled = "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n";
  const std::string chunks = "20\r\n" + smuggled + "\r\n0\r\n\r\n";
  for (const char* encoding : {"xchunked", "gzip", "chunked, identity", "chunked, chunked", "gzip, chunked", "identity",
                               "chunked;a=b", "\"chunked\"", "", ",chunked"}) {
    for (const std::string& body : {smuggled, chunks}) {
      const std::string got =
          ask("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + std::string(encoding) + "\r\n\r\n" + body);
      EXPECT_TRUE(got.starts_with("HTTP/1.1 400 ")) << encoding << " -> " << got;
      EXPECT_EQ(got.find("HTTP/1.1", 1), std::string::npos) << encoding << " -> " << got;
    }
  }
  for (const char* head :
       {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST /echo HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3,03\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\n"}) {
    const std::string got = ask(head + chunks);
    EXPECT_TRUE(got.starts_with("HTTP/1.1 400 ")) << head << " -> " << got;
    EXPECT_EQ(got.find("HTTP/1.1", 1), std::string::npos) << got;
  }
  EXPECT_TRUE(ask("GET /hello HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200 "));
  const std::string got =
      ask("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\nConnection: close\r\n\r\n" + chunks);
  EXPECT_TRUE(got.ends_with(smuggled)) << got;
}

TEST_F(HttpServerTest, TakesTheAbsoluteFormOfAUri) {
  start();
  for (const char* target : {"http://x/hello", "HTTP://x:80/hello", "https://x/hello?a=b"}) {
    const std::string got = ask("GET " + std::string(target) + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    EXPECT_TRUE(got.ends_with("\r\n\r\nhello")) << target << " -> " << got;
  }
}

// A byte, or a lot, behind the request does not hide that the client has gone.
TEST_F(HttpServerTest, SeesTheEndBehindBytesThatCameEarly) {
  start();
  for (const size_t extra : {size_t{1}, size_t{300'000}}) {
    handler_.aborted = false;
    Client client(server_->port());
    client.send("GET /hang HTTP/1.1\r\nHost: x\r\n\r\n" + std::string(extra, 'x'));
    ASSERT_NE(handler_.take(), nullptr);
    client.hang_up();
    EXPECT_TRUE(becomes([&] { return handler_.aborted.load(); })) << extra;
    const std::lock_guard lock(handler_.mutex);
    handler_.kept.reset();
  }
}

TEST_F(HttpServerTest, ALargePieceDoesNotMakeAReaderSlow) {
  ServerOptions options;
  options.max_stream_buffer = 64 << 10;
  start(options);
  Client client(server_->port());
  client.send("GET /endless HTTP/1.1\r\nHost: x\r\n\r\n");
  const auto exchange = handler_.take();
  ASSERT_NE(exchange, nullptr);
  // More than the buffer and more than the kernel takes at once.
  std::string piece;
  piece.resize(20'000'000, 'x');
  exchange->post([exchange, piece] {
    exchange->write(piece);
    exchange->finish();
  });
  EXPECT_GT(client.rest_size("\r\n0\r\n\r\n"), 20'000'000u);
  EXPECT_EQ(server_->stats().slow_readers_cut, 0u);
}

TEST_F(HttpServerTest, AReaderThatGoesOnTakingBytesIsNotCutOff) {
  ServerOptions options;
  options.write_timeout = 700ms;
  start(options);
  Client client(server_->port(), /*receive_buffer=*/16 << 10);
  client.send("GET /endless HTTP/1.1\r\nHost: x\r\n\r\n");
  const auto exchange = handler_.take();
  ASSERT_NE(exchange, nullptr);
  std::string piece;
  piece.resize(12'000'000, 'x');
  exchange->post([exchange, piece] {
    exchange->write(piece);
    exchange->finish();
  });
  size_t got = 0;
  for (int i = 0; i < 12; ++i) {  // 2.4 s in all, several times the timeout
    got += client.some(400'000);
    std::this_thread::sleep_for(200ms);
  }
  got += client.rest_size("\r\n0\r\n\r\n");
  EXPECT_GT(got, 12'000'000u);
  EXPECT_EQ(server_->stats().slow_readers_cut, 0u);
}

TEST_F(HttpServerTest, BoundsTheBytesOfAllRequestsTogether) {
  ServerOptions options;
  options.max_request_bytes = 100'000;
  start(options);
  const auto post = [](size_t size, size_t sent) {
    return "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(size) +
           "\r\nConnection: close\r\n\r\n" + std::string(sent, 'a');
  };
  EXPECT_TRUE(ask(post(90'000, 90'000)).starts_with("HTTP/1.1 200 "));
  Client half(server_->port());
  half.send(post(90'000, 60'000));
  EXPECT_TRUE(becomes([&] { return server_->stats().request_bytes == 60'000; }));
  EXPECT_TRUE(ask(post(60'000, 60'000)).starts_with("HTTP/1.1 429 "));
  half.hang_up();
  EXPECT_TRUE(becomes([&] { return server_->stats().request_bytes == 0; }));
  EXPECT_TRUE(ask(post(60'000, 60'000)).starts_with("HTTP/1.1 200 "));
}

// The read that watched for a client's leaving brings the next request: that is answered as on a new connection.
TEST_F(HttpServerTest, AKeptConnectionIsAnsweredWhereRequestsHoldAllBytes) {
  ServerOptions options;
  options.max_request_bytes = 100'000;
  start(options);
  const std::string post = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: ";
  Client one(server_->port()), two(server_->port()), half(server_->port());
  for (Client* client : {&one, &two}) {
    client->send("GET /stream HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_NE(client->until("\r\n0\r\n\r\n"), "");
  }
  half.send(post + "200000\r\n\r\n" + std::string(100'000, 'a'));
  ASSERT_TRUE(becomes([&] { return server_->stats().request_bytes == 100'000; }));
  one.send("GET /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(one.rest().ends_with("\r\n\r\nhello"));
  two.send(post + "1\r\n\r\na");
  EXPECT_TRUE(two.rest().starts_with("HTTP/1.1 429 "));
}

TEST_F(HttpServerTest, WhatAnAnswerHoldsCountsUntilItIsSent) {
  start();
  for (const bool reads : {true, false}) {
    Client client(server_->port(), /*receive_buffer=*/16 << 10);
    client.send("GET /held HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_GT(client.some(100'000), 0u);
    EXPECT_EQ(server_->stats().request_bytes, kHeld);
    if (reads) {
      EXPECT_EQ(client.some(kHeld - 100'000), kHeld - 100'000);
    } else {
      client.hang_up();
    }
    EXPECT_TRUE(becomes([&] { return server_->stats().request_bytes == 0; })) << reads;
  }
}

// The engine may hold an exchange, and post to it, until after the server has stopped.
TEST_F(HttpServerTest, WhatIsPostedAfterTheEndDoesNoHarm) {
  start();
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<std::shared_ptr<Exchange>> exchanges;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<Client>(server_->port()));
    clients.back()->send("GET /hang HTTP/1.1\r\nHost: x\r\n\r\n");
    exchanges.push_back(handler_.take());
    const std::lock_guard lock(handler_.mutex);
    handler_.kept.reset();
  }
  server_->stop();
  for (auto& exchange : exchanges) {
    ASSERT_NE(exchange, nullptr);
    // What is posted is the last to hold the exchange, whose end posts in turn.
    exchange->post([exchange] { exchange->finish(); });
    exchange->post([exchange] { exchange->finish(); });
  }
  exchanges.clear();
  server_.reset();
}

TEST(HttpServerListen, NamesAnOccupiedPort) {
  TestHandler handler;
  ServerOptions options;
  options.port = 0;
  auto first = Server::listen(options, &handler);
  ASSERT_TRUE(first.ok());
  options.port = (*first)->port();
  const auto second = Server::listen(options, &handler);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.error().message.find(std::to_string(options.port)), std::string::npos);
  options.host = "256.1.1.1.example.invalid";
  EXPECT_FALSE(Server::listen(options, &handler).ok());
}

TEST(HttpServerListen, TakesAddressesInAllSpellings) {
  TestHandler handler;
  struct Case {
    const char* host;
    const char* reached;
    bool loopback;
  };
  for (const Case& one :
       {Case{"127.0.0.1", "127.0.0.1", true}, Case{"LOCALHOST", "127.0.0.1", true}, Case{"0.0.0.0", "127.0.0.1", false},
        Case{"[::1]", "[::1]", true}, Case{"::1", "[::1]", true}, Case{"0:0:0:0:0:0:0:1", "[::1]", true},
        Case{"::", "[::1]", false}, Case{"::ffff:127.0.0.1", "[::ffff:127.0.0.1]", true}}) {
    ServerOptions options;
    options.host = one.host;
    options.port = 0;
    const auto server = Server::listen(options, &handler);
    // A machine may have no IPv6, or name itself by it.
    if (!server.ok() && server.error().code == ErrorCode::kIo) continue;
    ASSERT_TRUE(server.ok()) << server.error().message;
    const std::string port = std::to_string((*server)->port());
    const bool by_name = one.host == std::string_view("LOCALHOST") && (*server)->url() == "http://[::1]:" + port;
    EXPECT_TRUE(by_name || (*server)->url() == fmt::format("http://{}:{}", one.reached, port)) << (*server)->url();
    EXPECT_EQ((*server)->on_loopback(), one.loopback) << one.host;
  }
  for (const char* wrong : {"[127.0.0.1]", "[::1", "::1]", "[]", "["}) {
    ServerOptions options;
    options.host = wrong;
    options.port = 0;
    const auto server = Server::listen(options, &handler);
    ASSERT_FALSE(server.ok()) << wrong;
    EXPECT_NE(server.error().message.find("--host"), std::string::npos) << server.error().message;
  }
}

}  // namespace
}  // namespace nfp::http
