// Load generator for the server over the fake model (nestedfp-serve-fake): opens many streams at once on one thread
// with epoll, checks every byte of every answer, and measures when tokens come.
//
//   serve_load streams  --port P --streams 4000 --tokens 200 --period-ms 50   gaps between tokens against the schedule
//   serve_load rate     --port P --streams 64 --tokens 2000                   tokens a second
//   serve_load first    --port P --requests 2000                              time to the first byte, one at a time
//
// Prints one JSON object.
#include <CLI/CLI.hpp>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace {

using Clock = std::chrono::steady_clock;
using nfp::ErrorCode;
using nfp::Result;
using nfp::Status;

struct Options {
  uint16_t port = 8000;
  int streams = 64;
  int tokens = 200;
  int period_ms = 50;
  int requests = 1000;
  int timeout_s = 300;
};

double ms(Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

struct Percentiles {
  double p50 = 0, p99 = 0, p999 = 0, max = 0;
};

Percentiles percentiles(std::vector<float>& values) {
  Percentiles p;
  if (values.empty()) return p;
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
  };
  return {at(0.5), at(0.99), at(0.999), values.back()};
}

struct Stream {
  int fd = -1;
  std::string rest;  // received and not yet understood
  Clock::time_point sent;
  Clock::time_point last;
  int tokens = 0;
  bool head = false;
  bool done = false;  // "[DONE]" has come
  bool wrong = false;
};

Result<int> connect_to(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return nfp::error(ErrorCode::kIo, "socket: {}", std::strerror(errno));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    close(fd);
    return nfp::error(ErrorCode::kIo, "cannot connect to port {}: {}", port, std::strerror(errno));
  }
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

std::string request_text(const Options& options, int tokens, bool close_after) {
  const std::string body = fmt::format(
      R"({{"model":"fake","prompt":"load","max_tokens":{},"ignore_eos":true,"stream":true,"temperature":0}})", tokens);
  return fmt::format(
      "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Type: application/json\r\nContent-Length: "
      "{}\r\n{}\r\n{}",
      options.port, body.size(), close_after ? "Connection: close\r\n" : "", body);
}

// Takes what is complete of the stream; `gaps` gets the times between tokens.
void digest(Stream& stream, Clock::time_point now, std::vector<float>* gaps, std::vector<float>* firsts) {
  constexpr std::string_view kText = "\"text\":\"";
  if (!stream.head) {
    const size_t end = stream.rest.find("\r\n\r\n");
    if (end == std::string::npos) return;
    if (!stream.rest.starts_with("HTTP/1.1 200")) {
      stream.wrong = stream.done = true;
      std::fprintf(stderr, "%.*s\n", 400, stream.rest.c_str());
      return;
    }
    stream.head = true;
    stream.rest.erase(0, end + 4);
  }
  size_t used = 0;
  for (;;) {
    const size_t end = stream.rest.find("\n\n", used);
    if (end == std::string::npos) break;
    const std::string_view event(stream.rest.data() + used, end - used);
    used = end + 2;
    if (event.ends_with("data: [DONE]")) {
      stream.done = true;
      continue;
    }
    const size_t text = event.find(kText);
    if (text == std::string_view::npos) {
      stream.wrong = true;
      continue;
    }
    for (size_t i = text + kText.size(); i < event.size() && event[i] != '"'; ++i) {
      if (event[i] != 'a' + stream.tokens % 26) stream.wrong = true;
      if (stream.tokens == 0) {
        firsts->push_back(static_cast<float>(ms(now - stream.sent)));
      } else {
        gaps->push_back(static_cast<float>(ms(now - stream.last)));
      }
      stream.last = now;
      ++stream.tokens;
    }
  }
  stream.rest.erase(0, used);
}

struct Totals {
  int complete = 0;
  int corrupted = 0;
  int64_t tokens = 0;
  double seconds = 0;
  std::vector<float> gaps, firsts;
};

Result<Totals> run_streams(const Options& options) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  Totals totals;
  totals.gaps.reserve(static_cast<size_t>(options.streams) * static_cast<size_t>(options.tokens));
  const int poll = epoll_create1(EPOLL_CLOEXEC);
  const std::string request = request_text(options, options.tokens, true);
  std::vector<Stream> streams(static_cast<size_t>(options.streams));
  for (Stream& stream : streams) {
    NFP_ASSIGN_OR_RETURN(stream.fd, connect_to(options.port));
    fcntl(stream.fd, F_SETFL, O_NONBLOCK);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &stream;
    epoll_ctl(poll, EPOLL_CTL_ADD, stream.fd, &event);
  }
  const auto begin = Clock::now();
  for (Stream& stream : streams) {
    stream.sent = Clock::now();
    if (write(stream.fd, request.data(), request.size()) != static_cast<ssize_t>(request.size())) {
      return nfp::error(ErrorCode::kIo, "a request was not taken in one piece");
    }
  }
  int open = options.streams;
  std::vector<epoll_event> events(1024);
  std::vector<char> buffer(64 << 10);
  while (open > 0 && Clock::now() - begin < std::chrono::seconds(options.timeout_s)) {
    const int ready = epoll_wait(poll, events.data(), static_cast<int>(events.size()), 1000);
    for (int i = 0; i < ready; ++i) {
      Stream& stream = *static_cast<Stream*>(events[static_cast<size_t>(i)].data.ptr);
      const ssize_t n = read(stream.fd, buffer.data(), buffer.size());
      if (n > 0) {
        stream.rest.append(buffer.data(), static_cast<size_t>(n));
        digest(stream, Clock::now(), &totals.gaps, &totals.firsts);
      } else if (n == 0 || errno != EAGAIN) {
        close(stream.fd);
        stream.fd = -1;
        --open;
      }
    }
  }
  totals.seconds = ms(Clock::now() - begin) / 1e3;
  for (const Stream& stream : streams) {
    totals.tokens += stream.tokens;
    const bool complete = stream.done && stream.tokens == options.tokens;
    totals.complete += complete ? 1 : 0;
    totals.corrupted += stream.wrong ? 1 : 0;
    if (stream.fd >= 0) close(stream.fd);
  }
  close(poll);
  return totals;
}

Status measure_streams(const Options& options) {
  NFP_ASSIGN_OR_RETURN(Totals totals, run_streams(options));
  std::vector<float> late;
  late.reserve(totals.gaps.size());
  for (const float gap : totals.gaps) late.push_back(std::abs(gap - static_cast<float>(options.period_ms)));
  const Percentiles gap = percentiles(totals.gaps);
  const Percentiles off = percentiles(late);
  const Percentiles first = percentiles(totals.firsts);
  fmt::print(R"({{"streams":{},"tokens_each":{},"period_ms":{},"complete":{},"corrupted":{},"seconds":{:.2f},)"
             R"("tokens_per_s":{:.0f},"gap_ms":{{"p50":{:.2f},"p99":{:.2f},"max":{:.2f}}},)"
             R"("off_schedule_ms":{{"p50":{:.2f},"p99":{:.2f},"p999":{:.2f},"max":{:.2f}}},)"
             R"("first_token_ms":{{"p50":{:.1f},"p99":{:.1f}}}}})"
             "\n",
             options.streams, options.tokens, options.period_ms, totals.complete, totals.corrupted, totals.seconds,
             static_cast<double>(totals.tokens) / totals.seconds, gap.p50, gap.p99, gap.max, off.p50, off.p99, off.p999,
             off.max, first.p50, first.p99);
  return nfp::ok_status();
}

// One request after another on one connection: from the request's last byte to the answer's first, and to its first
// token.
Status measure_first(const Options& options) {
  NFP_ASSIGN_OR_RETURN(const int fd, connect_to(options.port));
  const std::string request = request_text(options, 1, false);
  std::vector<float> first_byte, whole;
  std::string got;
  std::vector<char> buffer(64 << 10);
  for (int i = 0; i < options.requests; ++i) {
    got.clear();
    const auto begin = Clock::now();
    if (write(fd, request.data(), request.size()) < 0) return nfp::error(ErrorCode::kIo, "the connection is gone");
    while (!got.ends_with("0\r\n\r\n")) {
      const ssize_t n = read(fd, buffer.data(), buffer.size());
      if (n <= 0) return nfp::error(ErrorCode::kIo, "the connection is gone");
      if (got.empty()) first_byte.push_back(static_cast<float>(ms(Clock::now() - begin)));
      got.append(buffer.data(), static_cast<size_t>(n));
    }
    whole.push_back(static_cast<float>(ms(Clock::now() - begin)));
  }
  close(fd);
  const Percentiles first = percentiles(first_byte);
  const Percentiles all = percentiles(whole);
  fmt::print(R"({{"requests":{},"first_byte_ms":{{"p50":{:.3f},"p99":{:.3f},"max":{:.3f}}},)"
             R"("whole_ms":{{"p50":{:.3f},"p99":{:.3f},"max":{:.3f}}}}})"
             "\n",
             options.requests, first.p50, first.p99, first.max, all.p50, all.p99, all.max);
  return nfp::ok_status();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("load generator for nestedfp-serve-fake");
  app.require_subcommand(1);
  const auto common = [&](CLI::App* sub) {
    sub->add_option("--port", options.port)->required();
    sub->add_option("--timeout-s", options.timeout_s);
  };
  CLI::App* streams = app.add_subcommand("streams");
  CLI::App* rate = app.add_subcommand("rate");
  for (CLI::App* sub : {streams, rate}) {
    common(sub);
    sub->add_option("--streams", options.streams);
    sub->add_option("--tokens", options.tokens);
  }
  streams->add_option("--period-ms", options.period_ms);
  CLI::App* first = app.add_subcommand("first");
  common(first);
  first->add_option("--requests", options.requests);
  CLI11_PARSE(app, argc, argv);
  if (rate->parsed()) options.period_ms = 0;
  const Status status = first->parsed() ? measure_first(options) : measure_streams(options);
  if (!status.ok()) {
    std::fprintf(stderr, "error: %s\n", status.error().message.c_str());
    return 1;
  }
  return 0;
}
