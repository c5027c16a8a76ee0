#include "replay/http_load.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <boost/system/system_error.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <random>
#include <stdexcept>

#include "base/gpu_energy.h"
#include "base/json_depth.h"
#include "base/log.h"
#include "base/open_files.h"

namespace nfp {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

constexpr double kMetricsTimeout = 10;  // seconds

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

class Player {
 public:
  Player(const Trace& trace, const HttpLoadOptions& options, HttpAddress address, const ReplayProgress& progress)
      : trace_(trace), options_(options), address_(std::move(address)), progress_(progress) {
    outcome_.requests.resize(trace.requests.size());
  }

  Result<ReplayOutcome> run() {
    boost::system::error_code failed;
    asio::ip::tcp::resolver resolver(context_);
    endpoints_ = resolver.resolve(address_.host, address_.port, failed);
    if (failed) {
      return error(ErrorCode::kIo, "--url {}: {} cannot be resolved: {}", options_.url, address_.host,
                   failed.message());
    }
    allow_most_open_files();
    const ServerCounts before = server_counts();
    const Result<GpuEnergy> energy = energy_of_server();
    const double joules = energy.ok() ? energy->joules() : 0;
    start_ = Clock::now();
    for (size_t i = 0; i < trace_.requests.size(); ++i) asio::co_spawn(context_, play(i), asio::detached);
    run_all();
    outcome_.seconds = seconds_since(start_);
    if (energy.ok()) outcome_.joules = energy->joules() - joules;
    ServerCounts counted = counts_between(before, server_counts());
    outcome_.tokens_by_share = std::move(counted.tokens_by_share);
    for (const auto& [reason, count] : counted.level_changes) outcome_.count_switches(reason, count);
    const auto failures =
        std::count_if(outcome_.requests.begin(), outcome_.requests.end(), [](const auto& r) { return !r.done; });
    if (failures == std::ssize(outcome_.requests))
      return error(ErrorCode::kIo, "{}: no request was answered; the last failed with: {}", options_.url, reason_);
    if (failures > 0)
      log::warn("{}: {} of {} requests failed, the last with: {}", options_.url, failures, outcome_.requests.size(),
                reason_);
    return std::move(outcome_);
  }

 private:
  Result<GpuEnergy> energy_of_server() const {
    const bool here = std::all_of(endpoints_.begin(), endpoints_.end(),
                                  [](const auto& endpoint) { return endpoint.endpoint().address().is_loopback(); });
    if (!here) return error(ErrorCode::kUnsupported, "the server is on another machine");
    return GpuEnergy::open();
  }

  void run_all() {
    context_.run();
    context_.restart();
  }

  // What the server has computed so far. Nothing where it does not tell: it need not be a nestedfp.
  ServerCounts server_counts() {
    ServerCounts counts;
    asio::co_spawn(context_, read_counts(counts), asio::detached);
    run_all();
    return counts;
  }

  asio::awaitable<void> read_counts(ServerCounts& counts) {
    http::request<http::empty_body> message(http::verb::get, address_.path + "/metrics", 11);
    message.set(http::field::host, address_.authority);
    message.set(http::field::connection, "close");
    beast::tcp_stream stream(context_);
    stream.expires_after(duration_of(std::min(options_.timeout_s, kMetricsTimeout)));
    try {
      co_await stream.async_connect(endpoints_, asio::use_awaitable);
      co_await http::async_write(stream, message, asio::use_awaitable);
      beast::flat_buffer buffer;
      http::response<http::string_body> response;
      co_await http::async_read(stream, buffer, response, asio::use_awaitable);
      if (response.result() == http::status::ok) counts = parse_server_counts(response.body());
    } catch (const boost::system::system_error&) {
    }
  }

  asio::awaitable<void> play(size_t index) {
    ReplayedRequest& record = outcome_.requests[index];
    record.asked = trace_.requests[index];
    asio::steady_timer timer(context_);
    timer.expires_at(start_ + duration_of(record.asked.arrival_s));
    // Boost.Asio reports by exceptions here; none leaves this function.
    try {
      co_await timer.async_wait(asio::use_awaitable);
      co_await request(index, record);
    } catch (const boost::system::system_error& failed) {
      record.done = false;
      reason_ = failed.code().message();  // what() also says where in Boost
    } catch (const std::exception& failed) {
      record.done = false;
      reason_ = failed.what();
    }
    ++finished_;
    if (progress_) progress_(finished_, trace_.requests.size());
  }

  std::string body_of(size_t index, const TraceRequest& asked) const {
    std::mt19937_64 random(options_.seed * 1000003 + options_.played + index);
    std::vector<int> prompt(static_cast<size_t>(asked.input));
    const int low = std::min(300, options_.vocab / 2);
    for (int& token : prompt) token = low + static_cast<int>(random() % static_cast<uint64_t>(options_.vocab - low));
    Json body = {{"model", options_.model},
                 {"prompt", prompt},
                 {"max_tokens", asked.output},
                 {"stream", true},
                 {"temperature", 0},
                 {"ignore_eos", true},
                 {"stream_options", {{"include_usage", true}}}};
    // Of what a trace does not say, servers that have no such field need not be told.
    if (asked.priority != 0) body["priority"] = asked.priority;
    if (asked.precision) body["precision"] = name_of(*asked.precision);
    if (options_.targets) {
      const HttpLoadOptions::Targets targets = options_.targets(asked);
      body["slo_ttft_ms"] = 1e3 * targets.ttft_s;
      body["slo_itl_ms"] = 1e3 * targets.itl_s;
    }
    return body.dump();
  }

  asio::awaitable<void> request(size_t index, ReplayedRequest& record) {
    http::request<http::string_body> message(http::verb::post, address_.path + "/v1/completions", 11);
    message.set(http::field::host, address_.authority);
    message.set(http::field::content_type, "application/json");
    message.set(http::field::connection, "close");
    if (!options_.api_key.empty()) message.set(http::field::authorization, "Bearer " + options_.api_key);
    message.body() = body_of(index, record.asked);
    message.prepare_payload();

    beast::tcp_stream stream(context_);
    stream.expires_after(duration_of(options_.timeout_s));
    const auto sent = Clock::now();
    co_await stream.async_connect(endpoints_, asio::use_awaitable);
    co_await http::async_write(stream, message, asio::use_awaitable);
    beast::flat_buffer buffer;
    http::response_parser<http::buffer_body> parser;
    parser.body_limit(boost::none);
    co_await http::async_read_header(stream, buffer, parser, asio::use_awaitable);
    const bool good = parser.get().result() == http::status::ok;
    EventReader events;
    std::array<char, 16384> piece{};
    Clock::time_point last;
    std::string text;
    bool ended = false;
    while (!parser.is_done()) {
      parser.get().body().data = piece.data();
      parser.get().body().size = piece.size();
      boost::system::error_code failed;
      co_await http::async_read_some(stream, buffer, parser, asio::redirect_error(asio::use_awaitable, failed));
      if (failed == http::error::need_buffer) failed = {};
      if (failed) throw boost::system::system_error(failed);
      const std::string_view bytes(piece.data(), piece.size() - parser.get().body().size);
      if (!good) {
        if (text.size() < 500) text += bytes;
        continue;
      }
      events.feed(bytes, [&](std::string_view data) { ended = take(data, sent, last, record) || ended; });
    }
    if (!good) throw std::runtime_error(fmt::format("HTTP {}: {}", parser.get().result_int(), text));
    // `last`: usage alone is no token either.
    record.done = ended && record.output > 0 && last != Clock::time_point();
    if (!record.done) throw std::runtime_error("its stream ended without an answer");
    record.e2e_s = std::chrono::duration<double>(last - sent).count();
    if (record.output > 1) record.tpot_s = (record.e2e_s - record.ttft_s) / (record.output - 1);
  }

  // What an event says that ends a stream in the middle; [DONE] may follow it all the same.
  static std::string reason_of(const Json& failed) {
    if (failed.is_string()) return failed.get<std::string>();
    const auto message = failed.is_object() ? failed.find("message") : failed.end();
    return message != failed.end() && message->is_string() ? message->get<std::string>() : failed.dump();
  }

  // True at the end of the stream. Throws where the server says that the request failed.
  static bool take(std::string_view data, Clock::time_point sent, Clock::time_point& last, ReplayedRequest& record) {
    if (data == "[DONE]") return true;
    const Json json = parse_file_json<Json>(data);
    if (!json.is_object()) return false;
    if (const auto failed = json.find("error"); failed != json.end() && !failed->is_null()) {
      throw std::runtime_error(reason_of(*failed));
    }
    const auto choices = json.find("choices");
    if (choices != json.end() && choices->is_array() && !choices->empty()) {
      // An event may carry several tokens; their number comes with the usage at the end.
      const auto now = Clock::now();
      if (record.output == 0) {
        record.ttft_s = std::chrono::duration<double>(now - sent).count();
      } else {
        record.longest_gap_s = std::max(record.longest_gap_s, std::chrono::duration<double>(now - last).count());
      }
      last = now;
      ++record.output;
    }
    const auto usage = json.find("usage");
    if (usage == json.end() || !usage->is_object()) return false;
    record.output = usage->value("completion_tokens", record.output);
    if (const auto prompt = usage->find("prompt_tokens_details"); prompt != usage->end() && prompt->is_object()) {
      const auto cached = prompt->find("cached_tokens");
      if (cached != prompt->end() && cached->is_number_integer()) record.cached = cached->get<int64_t>();
    }
    const auto precision = usage->find("nestedfp");
    if (precision == usage->end() || !precision->is_object()) return false;
    if (const auto met = precision->find("slo_met"); met != precision->end() && met->is_boolean()) {
      record.own_met = met->get<bool>();
    }
    for (const char* part : {"prompt", "completion"}) {
      const Json counts = precision->value(part, Json::object());
      record.fp16_tokens += counts.value("fp16_tokens", 0);
      if (std::string_view(part) == "completion") record.fp16_output = counts.value("fp16_tokens", 0);
      record.fp8_tokens += counts.value("fp8_tokens", 0);
    }
    return false;
  }

  const Trace& trace_;
  const HttpLoadOptions& options_;
  const HttpAddress address_;
  const ReplayProgress& progress_;
  asio::io_context context_{1};
  asio::ip::tcp::resolver::results_type endpoints_;
  Clock::time_point start_;
  ReplayOutcome outcome_;
  size_t finished_ = 0;
  std::string reason_ = "nothing";
};

}  // namespace

namespace {

// The value of a label in a line of Prometheus' text format; empty where the line has none of that name.
std::string_view label_of(std::string_view line, std::string_view start) {
  const size_t at = line.find(start);
  if (at == std::string_view::npos) return {};
  const std::string_view rest = line.substr(at + start.size());
  return rest.substr(0, std::min(rest.find('"'), rest.size()));
}

}  // namespace

ServerCounts parse_server_counts(std::string_view metrics) {
  constexpr std::string_view kTokens = "nestedfp:level_tokens_total{", kChanges = "nestedfp:level_changes_total{";
  ServerCounts counts;
  while (!metrics.empty()) {
    const std::string_view line = metrics.substr(0, metrics.find('\n'));
    metrics.remove_prefix(std::min(metrics.size(), line.size() + 1));
    const size_t space = line.rfind(' ');
    if (!(line.starts_with(kTokens) || line.starts_with(kChanges)) || space == std::string_view::npos) continue;
    double count = 0;
    if (std::from_chars(line.data() + space + 1, line.data() + line.size(), count).ec != std::errc()) continue;
    if (!(count >= 0 && count < 1e18)) continue;
    if (line.starts_with(kChanges)) {
      const std::string_view reason = label_of(line, "reason=\"");
      if (!reason.empty() && count > 0) counts.level_changes[std::string(reason)] += static_cast<uint64_t>(count);
      continue;
    }
    const std::string_view text = label_of(line, "fp8_share=\"");
    double share = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), share).ec != std::errc()) continue;
    if (share >= 0 && share <= 1) counts.tokens_by_share[share] += static_cast<int64_t>(count);
  }
  return counts;
}

ServerCounts counts_between(const ServerCounts& before, ServerCounts after) {
  for (const auto& [share, tokens] : before.tokens_by_share) {
    if ((after.tokens_by_share[share] -= tokens) < 0) return {};
  }
  for (const auto& [reason, count] : before.level_changes) {
    uint64_t& changes = after.level_changes[reason];
    if (changes < count) return {};
    changes -= count;
  }
  return after;
}

Result<HttpAddress> parse_http_url(const std::string& url) {
  constexpr std::string_view kScheme = "http://";
  if (!url.starts_with(kScheme)) {
    return error(ErrorCode::kUsage, "--url {}: must begin with http:// (TLS is a proxy's)", url);
  }
  const std::string rest = url.substr(kScheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  HttpAddress address;
  address.path = rest.substr(slash);
  while (address.path.ends_with('/')) address.path.pop_back();
  if (address.path.ends_with("/v1")) address.path.erase(address.path.size() - 3);
  address.authority = rest.substr(0, slash);
  const std::string& authority = address.authority;
  const size_t colon = authority.starts_with('[') ? authority.find(':', authority.find(']')) : authority.find(':');
  address.host = authority.substr(0, colon);
  address.port = colon == std::string::npos ? "80" : authority.substr(colon + 1);
  if (address.host.starts_with('[') && address.host.ends_with(']')) {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  const bool digits = !address.port.empty() && address.port.size() < 6 &&
                      address.port.find_first_not_of("0123456789") == std::string::npos;
  if (address.host.empty() || !digits) return error(ErrorCode::kUsage, "--url {}: use http://HOST:PORT", url);
  return address;
}

Result<ReplayOutcome> play_over_http(const Trace& trace, const HttpLoadOptions& options,
                                     const ReplayProgress& progress) {
  NFP_ASSIGN_OR_RETURN(HttpAddress address, parse_http_url(options.url));
  return Player(trace, options, std::move(address), progress).run();
}

}  // namespace nfp
