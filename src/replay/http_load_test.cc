#include "replay/http_load.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "replay/report.h"

namespace nfp {
namespace {

// A socket on this machine that takes connections.
class Listener {
 public:
  Listener() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const plain = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof(address);
    EXPECT_EQ(::bind(socket_, plain, size), 0);
    EXPECT_EQ(::listen(socket_, 16), 0);
    EXPECT_EQ(::getsockname(socket_, plain, &size), 0);
    port_ = ntohs(address.sin_port);
  }
  ~Listener() { ::close(socket_); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int socket() const { return socket_; }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }

 private:
  int socket_;
  int port_ = 0;
};

// A server that answers completions with these event streams, one after the other, the last one for all that follow.
class StreamServer {
 public:
  explicit StreamServer(std::vector<std::string> streams) : streams_(std::move(streams)) {
    thread_ = std::thread([this] { serve(); });
  }
  ~StreamServer() {
    ::shutdown(listener_.socket(), SHUT_RDWR);  // accept() returns
    thread_.join();
  }
  StreamServer(const StreamServer&) = delete;
  StreamServer& operator=(const StreamServer&) = delete;
  std::string url() const { return listener_.url(); }
  std::vector<std::string> posts() {
    const std::lock_guard lock(mutex_);
    return posts_;
  }

 private:
  void serve() {
    for (int peer = 0; (peer = ::accept(listener_.socket(), nullptr, nullptr)) >= 0; ::close(peer)) {
      const std::string request = read_request(peer);
      std::string answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
      const bool named = request.find("\r\nHost: " + url().substr(7) + "\r\n") != std::string::npos;
      if (request.starts_with("POST") && named) {
        const std::lock_guard lock(mutex_);
        posts_.push_back(request);
        answer = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + streams_[next_];
        if (next_ + 1 < streams_.size()) ++next_;
      }
      for (size_t sent = 0; sent < answer.size();) {
        const ssize_t put = ::send(peer, answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
        if (put <= 0) break;
        sent += static_cast<size_t>(put);
      }
    }
  }
  // All of it, or closing the connection would take what was answered from the client.
  static std::string read_request(int peer) {
    constexpr std::string_view kLength = "Content-Length: ";
    std::string text;
    for (char piece[4096];;) {
      if (const size_t head = text.find("\r\n\r\n"); head != std::string::npos) {
        const size_t length = text.find(kLength);
        const size_t body = length < head ? std::strtoul(text.c_str() + length + kLength.size(), nullptr, 10) : 0;
        if (text.size() >= head + 4 + body) return text;
      }
      const ssize_t got = ::recv(peer, piece, sizeof(piece), 0);
      if (got <= 0) return text;
      text.append(piece, static_cast<size_t>(got));
    }
  }

  const std::vector<std::string> streams_;
  const Listener listener_;
  size_t next_ = 0;
  std::mutex mutex_;
  std::vector<std::string> posts_;  // what was asked
  std::thread thread_;
};

constexpr const char* kTwoTokens =
    "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"index\":0,\"text\":\"b\"}],"
    "\"error\":null}\n\n";
constexpr const char* kDone = "data: [DONE]\n\n";

TEST(HttpLoad, ReadsUrls) {
  const auto plain = parse_http_url("http://127.0.0.1:8000");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->host, "127.0.0.1");
  EXPECT_EQ(plain->port, "8000");
  EXPECT_EQ(plain->path, "");
  EXPECT_EQ(parse_http_url("http://h/v1/")->path, "");
  EXPECT_EQ(parse_http_url("http://h/llm/v1")->path, "/llm");
  EXPECT_EQ(parse_http_url("http://h")->port, "80");
  EXPECT_EQ(parse_http_url("http://[::1]:81/x")->host, "::1");
  EXPECT_EQ(parse_http_url("http://[::1]:81/x")->port, "81");
  EXPECT_EQ(parse_http_url("http://[::1]:81/x")->authority, "[::1]:81");
  for (const char* wrong : {"", "https://h", "h:80", "http://", "http://h:", "http://h:x", "http://:80"}) {
    EXPECT_FALSE(parse_http_url(wrong).ok()) << wrong;
  }
}

TEST(HttpLoad, EventsMayComeInAnyPieces) {
  const std::string stream = "data: {\"a\":1}\r\n\r\n: comment\nevent: x\ndata:two\n\ndata: [DONE]\n\n";
  for (size_t size = 1; size < stream.size(); ++size) {
    EventReader reader;
    std::vector<std::string> found;
    for (size_t at = 0; at < stream.size(); at += size) {
      reader.feed(std::string_view(stream).substr(at, size), [&](std::string_view data) { found.emplace_back(data); });
    }
    EXPECT_EQ(found, (std::vector<std::string>{"{\"a\":1}", "two", "[DONE]"})) << size;
  }
}

TEST(HttpLoad, SaysThatNobodyAnswered) {
  Trace trace;
  trace.requests = {{0, 4, 2}};
  HttpLoadOptions options;
  options.url = "http://127.0.0.1:1";  // nobody listens on tcpmux
  const auto outcome = play_over_http(trace, options, {});
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ(outcome.error().code, ErrorCode::kIo);
  EXPECT_TRUE(outcome.error().message.ends_with("the last failed with: Connection refused")) << outcome.error().message;
}

TEST(HttpLoad, AStreamWithoutAnAnswerIsNone) {
  Trace trace;
  trace.requests = {{0, 4, 2}};
  for (const std::string& stream :
       {std::string(kTwoTokens), std::string(kDone),
        std::string("data: {\"choices\":[],\"usage\":{\"completion_tokens\":5}}\n\n") + kDone}) {
    const StreamServer server({stream});
    HttpLoadOptions options;
    options.url = server.url();
    const auto outcome = play_over_http(trace, options, {});
    ASSERT_FALSE(outcome.ok()) << stream;
    EXPECT_TRUE(outcome.error().message.ends_with("failed with: its stream ended without an answer"))
        << outcome.error().message;
  }
}

TEST(HttpLoad, RequestsSayWhatTheTraceSaysOfThem) {
  Trace trace;
  trace.requests = {{0, 4, 2}, {0, 4, 2, -7, PrecisionClass::kAuto}};
  StreamServer server({std::string(kTwoTokens) + kDone});
  HttpLoadOptions options;
  options.url = server.url();
  ASSERT_TRUE(play_over_http(trace, options, {}).ok());
  int said = 0, silent = 0;
  for (const std::string& post : server.posts()) {
    said +=
        post.find("\"priority\":-7") != std::string::npos && post.find("\"precision\":\"auto\"") != std::string::npos;
    silent += post.find("priority") == std::string::npos && post.find("precision") == std::string::npos;
  }
  EXPECT_EQ(said, 1);
  EXPECT_EQ(silent, 1);
}

TEST(HttpLoad, AServerThatTakesConnectionsAndSaysNothingIsGivenUp) {
  const Listener listener;
  Trace trace;
  trace.requests = {{0, 4, 2}};
  HttpLoadOptions options;
  options.url = listener.url();
  options.timeout_s = 0.1;
  const auto outcome = play_over_http(trace, options, {});
  ASSERT_FALSE(outcome.ok());
  EXPECT_NE(outcome.error().message.find("no request was answered"), std::string::npos) << outcome.error().message;
}

TEST(HttpLoad, AStreamThatEndsWithAnErrorIsNoAnswer) {
  Trace trace;
  trace.requests = {{0, 4, 2}, {0, 4, 2}};
  const std::string good = std::string(kTwoTokens) + kDone;
  const std::pair<const char*, const char*> errors[] = {
      {"{\"message\":\"the device failed\",\"code\":500}", "the device failed"},
      {"\"out of memory\"", "out of memory"},
      {"{\"code\":7}", "{\"code\":7}"}};
  for (const auto& [event, reason] : errors) {
    const std::string failed = std::string(kTwoTokens) + "data: {\"error\":" + event + "}\n\n" + kDone;
    HttpLoadOptions options;
    {
      const StreamServer server({failed, good});
      options.url = server.url();
      const auto outcome = play_over_http(trace, options, {});
      ASSERT_TRUE(outcome.ok()) << outcome.error().message;
      EXPECT_NE(outcome->requests[0].done, outcome->requests[1].done);
    }
    const StreamServer server({failed});
    options.url = server.url();
    const auto outcome = play_over_http(trace, options, {});
    ASSERT_FALSE(outcome.ok());
    EXPECT_NE(outcome.error().message.find(reason), std::string::npos) << outcome.error().message;
  }
}

TEST(HttpLoad, TellsOfPromptsThatThePrefixCacheHad) {
  Trace trace;
  trace.requests = {{0, 4, 2}, {0, 4, 2}};
  const auto said = [&trace](const std::string& details) {
    const std::string usage = R"("usage":{"completion_tokens":2,"prompt_tokens_details":)" + details + "}";
    const StreamServer server({kTwoTokens + ("data: {\"choices\":[]," + usage + "}\n\n") + kDone});
    HttpLoadOptions options;
    options.url = server.url();
    const auto outcome = play_over_http(trace, options, {});
    EXPECT_TRUE(outcome.ok());
    ReplayReport report;
    if (outcome.ok()) report.rows = {summarize(*outcome, "server", nullptr, 1, {})};
    return to_text(report);
  };
  const std::string cached = said(R"({"cached_tokens":3})");
  EXPECT_NE(cached.find("75.0 % of the prompts' tokens were in the server's prefix cache"), std::string::npos)
      << cached;
  for (const char* none : {R"({"cached_tokens":0})", "{}", "null"}) {
    EXPECT_EQ(said(none).find("cache"), std::string::npos) << none;
  }
}

TEST(HttpLoad, PromptsAreOfTheSeedAndOfTheRequestsBefore) {
  Trace trace;
  trace.requests = {{0, 40, 2}, {0, 40, 2}};
  const auto prompts_of = [&trace](uint64_t seed, uint64_t played) {
    StreamServer server({std::string(kTwoTokens) + kDone});
    HttpLoadOptions options;
    options.url = server.url();
    options.seed = seed;
    options.played = played;
    EXPECT_TRUE(play_over_http(trace, options, {}).ok());
    std::set<std::string> prompts;
    for (const std::string& post : server.posts()) {
      const size_t prompt = post.find("\"prompt\"");
      prompts.insert(post.substr(prompt, post.find(']', prompt) - prompt));
    }
    return prompts;
  };
  const std::set<std::string> first = prompts_of(1, 0);
  EXPECT_EQ(first.size(), 2);
  EXPECT_EQ(prompts_of(1, 0), first);
  for (const std::string& prompt : prompts_of(1, 2)) EXPECT_FALSE(first.contains(prompt));
  for (const std::string& prompt : prompts_of(2, 0)) EXPECT_FALSE(first.contains(prompt));
}

TEST(HttpLoad, ReadsTokensByLevelAndChanges) {
  const ServerCounts counts = parse_server_counts(
      "# TYPE nestedfp:level_tokens_total counter\n"
      "nestedfp:level_tokens_total{model_name=\"m\",engine=\"0\",fp8_share=\"0.000\"} 120\n"
      "nestedfp:level_tokens_total{model_name=\"m\",engine=\"0\",fp8_share=\"0.880\"} 1e3\n"
      "nestedfp:level_tokens_total{fp8_share=\"7\"} 5\nnestedfp:level_tokens_total{fp8_share=\"x\"} 5\n"
      "nestedfp:level_changes_total{model_name=\"m\",engine=\"0\",reason=\"first_tokens\"} 3\n"
      "nestedfp:level_changes_total{reason=\"pace\"} 0\nnestedfp:level_changes_total{reason=\"room\"} -1\n"
      "nestedfp:level_changes_total{reason=\"room\"} 2\nnestedfp:level_changes_total{reason=\"room\n"
      "nestedfp:level_tokens_total{fp8_share=\"0.5\"}\nother{fp8_share=\"0.5\"} 3");
  EXPECT_EQ(counts.tokens_by_share, (std::map<double, int64_t>{{0.0, 120}, {0.88, 1000}}));
  EXPECT_EQ(counts.level_changes, (std::map<std::string, uint64_t>{{"first_tokens", 3}, {"room", 2}}));
  EXPECT_TRUE(parse_server_counts("").tokens_by_share.empty());
}

TEST(HttpLoad, CountsOfAServerThatWasStartedAgainAreNone) {
  const ServerCounts before{{{0.0, 100}, {0.5, 7}}, {{"room", 3}}};
  const ServerCounts more = counts_between(before, {{{0.0, 150}, {0.5, 7}, {1.0, 2}}, {{"room", 3}, {"pace", 1}}});
  EXPECT_EQ(more.tokens_by_share, (std::map<double, int64_t>{{0.0, 50}, {0.5, 0}, {1.0, 2}}));
  EXPECT_EQ(more.level_changes, (std::map<std::string, uint64_t>{{"room", 0}, {"pace", 1}}));
  for (const ServerCounts& after : std::initializer_list<ServerCounts>{
           {}, {{{0.0, 150}}, {{"room", 3}}}, {{{0.0, 150}, {0.5, 7}}, {{"room", 2}, {"pace", 1}}}}) {
    const ServerCounts none = counts_between(before, after);
    EXPECT_TRUE(none.tokens_by_share.empty());
    EXPECT_TRUE(none.level_changes.empty());
  }
}

// Each request that is under way is a connection, and its lack of descriptors would be taken for the server's failure.
TEST(HttpLoad, TakesAsManyFilesAsItMay) {
  rlimit before{}, low{}, after{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  low = {std::min<rlim_t>(before.rlim_max, 64), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const StreamServer server({std::string(kTwoTokens) + kDone, kDone});
  Trace trace;
  trace.requests = {{0, 4, 2}, {0, 4, 2}};
  HttpLoadOptions options;
  options.url = server.url();
  ::testing::internal::CaptureStderr();
  const auto outcome = play_over_http(trace, options, {});
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::getrlimit(RLIMIT_NOFILE, &after);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_TRUE(outcome.ok()) << outcome.error().message;
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
  // Why some failed, where not all did, is told.
  EXPECT_NE(said.find("1 of 2 requests failed, the last with: its stream ended without an answer"), std::string::npos)
      << said;
}

}  // namespace
}  // namespace nfp
