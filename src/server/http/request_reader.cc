#include "server/http/request_reader.h"

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <fmt/format.h>

#include <algorithm>

namespace nfp::http {
namespace beast = boost::beast;
using boost::system::error_code;

namespace {

// What is left of a chunked body has so many bytes at least ("0", two line ends). With fewer Beast's assertions fail
// where its parser has seen the "0" of a body without chunks (1.81).
constexpr size_t kLeastOfChunks = 5;
constexpr int kMaxEmptyLines = 8;            // before a request
constexpr size_t kMaxUnparsed = 128u << 10;  // bytes without one complete element (a chunk header, a trailer)

std::string_view view(beast::string_view s) { return {s.data(), s.size()}; }

// What makes the message's length doubtful: two servers in a row might see different requests in it (RFC 9112, 6.3 and
// 11.2). Empty = nothing.
std::string_view framing_fault(const Request& request, std::string_view target, bool http_1_0) {
  if (std::any_of(target.begin(), target.end(), [](char c) { return c <= ' ' || c > '~'; })) {
    return "the target has characters that must be written with %";
  }
  const size_t encodings = request.count("Transfer-Encoding");
  if (encodings > 0 && request.count("Content-Length") > 0) {
    return "both Transfer-Encoding and Content-Length are given";
  }
  if (encodings > 0 && http_1_0) return "Transfer-Encoding is not of HTTP/1.0";
  if (encodings > 0 && (encodings > 1 || !equal_ignoring_case(request.header("Transfer-Encoding"), "chunked"))) {
    return "the Transfer-Encoding must be 'chunked' and nothing else";
  }
  if (request.count("Content-Length") > 1) return "Content-Length is given more than once";
  // Beast takes a list whose numbers are all the same, as in "3, 03"; others read the first, or refuse it.
  const std::string_view length = request.header("Content-Length");
  if (std::any_of(length.begin(), length.end(), [](char c) { return c < '0' || c > '9'; })) {
    return "the Content-Length must be a number and nothing else";
  }
  const size_t hosts = request.count("Host");
  if (hosts > 1) return "Host is given more than once";
  if (hosts == 0 && !http_1_0) return "Host is missing";
  return {};
}

// Some take white space between a chunk's size and its extension, and some do not.
void check_chunk_header(uint64_t, beast::string_view extensions, error_code& ec) {
  if (!extensions.empty() && extensions.front() != ';') ec = beast::http::error::bad_chunk_extension;
}

RequestReader::Fault too_large_head(const ServerOptions& options) {
  return {431, fmt::format("the headers are larger than {} bytes", options.max_header_bytes)};
}

RequestReader::Fault malformed(const error_code& ec, const ServerOptions& options) {
  if (ec == beast::http::error::header_limit) return too_large_head(options);
  if (ec == beast::http::error::body_limit) {
    return {413, fmt::format("the body is larger than {} bytes", options.max_body_bytes)};
  }
  return {400, "malformed HTTP request: " + ec.message()};
}

}  // namespace

RequestReader::RequestReader(const ServerOptions& options, std::string peer) : options_(options) {
  head_.peer = std::move(peer);
  parser_.eager(false);
  parser_.header_limit(options.max_header_bytes);
  parser_.body_limit(options.max_body_bytes);
  parser_.on_chunk_header(check_chunk_header);
}

size_t RequestReader::put(std::string_view bytes) {
  size_t taken = 0;
  // Some clients send a line end behind a body (RFC 9112, 2.2).
  while (!begun_) {
    const std::string_view rest = bytes.substr(taken);
    if (rest.empty() || rest == "\r") return taken;
    begun_ = !rest.starts_with("\r\n") || empty_lines_ == kMaxEmptyLines;
    if (begun_) break;
    ++empty_lines_;
    taken += 2;
  }
  const size_t least = head_done_ && parser_.chunked() ? kLeastOfChunks : 1;
  while (!fault_ && !done() && bytes.size() - taken >= least) {
    error_code ec;
    const size_t used = parser_.put(boost::asio::buffer(bytes.data() + taken, bytes.size() - taken), ec);
    taken += used;
    if (!head_done_) head_bytes_ += used;
    if (!ec && parser_.is_header_done() && !head_done_) {
      head_done_ = true;
      parser_.eager(true);
      check_head();
      break;
    }
    if (ec && ec != beast::http::error::need_more) {
      fault_ = malformed(ec, options_);
      if (ec == beast::http::error::body_limit && !head_done_) {  // by Content-Length: the head is all there
        head_done_ = true;
        check_head();
      }
    } else if (!done() && (ec || used == 0)) {
      if (bytes.size() - taken > kMaxUnparsed) fault_ = {400, "malformed HTTP request: a chunk header has no end"};
      break;
    }
  }
  return taken;
}

void RequestReader::check_head() {
  std::string peer = std::move(head_.peer);
  head_ = read_head();
  head_.peer = std::move(peer);
  // Beast counts a start line that comes together with the fields apart.
  if (head_bytes_ > options_.max_header_bytes) {
    fault_ = too_large_head(options_);
    return;
  }
  const std::string_view doubt = framing_fault(head_, view(parser_.get().target()), http_1_0());
  if (!doubt.empty()) fault_ = {400, std::string(doubt)};
}

Request RequestReader::read_head() const {
  const auto& message = parser_.get();
  Request request;
  request.method = std::string(view(message.method_string()));
  std::string_view target = view(message.target());
  // The absolute form, as clients write it to proxies (RFC 9112, 3.2.2): its authority counts, not Host's.
  std::string_view authority;
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!equal_ignoring_case(target.substr(0, scheme.size()), scheme)) continue;
    authority = target.substr(scheme.size());
    const size_t end = authority.find_first_of("/?");
    target = end == std::string_view::npos ? "/" : authority.substr(end);
    authority = authority.substr(0, end);
    break;
  }
  const size_t question = target.find('?');
  request.path = std::string(target.substr(0, question));
  if (question != std::string_view::npos) request.query = std::string(target.substr(question + 1));
  for (const auto& field : message) {
    request.headers.push_back({std::string(view(field.name_string())), std::string(view(field.value()))});
    if (!authority.empty() && field.name() == beast::http::field::host) request.headers.back().value = authority;
  }
  if (request.path.empty()) request.path = "/";
  return request;
}

bool RequestReader::keep_alive() const {
  // Whether any Connection field says "close"; Beast's parser forgets one that follows an "upgrade".
  for (const auto& field : parser_.get()) {
    if (field.name() != beast::http::field::connection) continue;
    if (beast::http::token_list(field.value()).exists("close")) return false;
  }
  return parser_.get().keep_alive();
}

bool RequestReader::expects_continue() const {
  return !done() && !http_1_0() && beast::iequals(parser_.get()["Expect"], "100-continue");
}

Request RequestReader::take() {
  Request request = std::move(head_);
  request.body = std::move(parser_.get().body());
  return request;
}

}  // namespace nfp::http
