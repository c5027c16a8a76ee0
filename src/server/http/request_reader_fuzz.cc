// Bytes of a connection: the requests that are read from them are the same however the bytes are cut into pieces, each
// ends where a strict reading of RFC 9112 says, keeps within the bounds, and means the same when it is written again.
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/request_reader.h"

namespace {

using nfp::http::Request;
using nfp::http::RequestReader;

constexpr size_t kMaxBody = 1500;

nfp::http::ServerOptions bounds() {
  nfp::http::ServerOptions options;
  options.max_header_bytes = 1000;
  options.max_body_bytes = kMaxBody;
  return options;
}

void require(bool true_) {
  if (!true_) __builtin_trap();
}

struct Read {
  std::vector<Request> requests;
  std::vector<bool> old;     // HTTP/1.0, of each
  std::vector<size_t> ends;  // offsets behind each
  bool fault = false;
};

// As a connection reads: what is not taken is given again with more; `piece` says how many bytes come at once.
template <typename Piece>
Read read_all(std::string_view bytes, const nfp::http::ServerOptions& options, Piece&& piece) {
  Read result;
  size_t at = 0, end = 0;  // taken; come
  for (;;) {
    RequestReader reader(options);
    bool head = false;
    while (!reader.done()) {
      const size_t used = reader.put(bytes.substr(at, end - at));
      require(used <= end - at);
      at += used;
      if (reader.fault()) {
        const int status = reader.fault()->status;
        require((status == 400 || status == 413 || status == 431) && !reader.fault()->message.empty());
        result.fault = true;
        return result;
      }
      require(reader.body_bytes() <= kMaxBody);
      if (reader.head_done() && !head) {
        head = true;
        (void)reader.expects_continue();
        (void)reader.keep_alive();
        continue;
      }
      if (reader.done()) break;
      if (end == bytes.size()) return result;
      end += std::min(piece(), bytes.size() - end);
    }
    require(head);
    result.old.push_back(reader.http_1_0());
    result.requests.push_back(reader.take());
    result.ends.push_back(at);
  }
}

bool same(const Request& a, const Request& b) {
  if (a.method != b.method || a.path != b.path || a.query != b.query || a.body != b.body) return false;
  if (a.headers.size() != b.headers.size()) return false;
  for (size_t i = 0; i < a.headers.size(); ++i) {
    if (a.headers[i].name != b.headers[i].name || a.headers[i].value != b.headers[i].value) return false;
  }
  return true;
}

// The line at the front of `bytes`, which is taken off with its end; none where it has no end.
std::optional<std::string_view> take_line(std::string_view& bytes) {
  const size_t end = bytes.find("\r\n");
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view line = bytes.substr(0, end);
  bytes.remove_prefix(end + 2);
  return line;
}

// What `bytes` hold of a chunked body, all of it to the end of its trailer. RFC 9112, 7.1.
std::optional<std::string> decode_chunks(std::string_view bytes) {
  std::string body;
  for (;;) {
    const auto line = take_line(bytes);
    if (!line) return std::nullopt;
    size_t size = 0;
    const auto [stop, code] = std::from_chars(line->data(), line->data() + line->size(), size, 16);
    const auto digits = static_cast<size_t>(stop - line->data());
    if (code != std::errc() || (digits < line->size() && (*line)[digits] != ';')) return std::nullopt;
    if (size == 0) break;
    if (bytes.size() < size + 2 || bytes.substr(size, 2) != "\r\n") return std::nullopt;
    body += bytes.substr(0, size);
    bytes.remove_prefix(size + 2);
  }
  for (auto line = take_line(bytes); line; line = take_line(bytes)) {
    if (line->empty()) return bytes.empty() ? std::optional(body) : std::nullopt;
  }
  return std::nullopt;
}

// `bytes` are all of the request's, from the end of the one before.
void check_framing(const Request& request, std::string_view bytes) {
  require(!request.method.empty() && !request.path.empty() && request.count("Host") <= 1);
  for (const std::string_view text : {std::string_view(request.path), std::string_view(request.query)}) {
    for (const char c : text) require(c > ' ' && c <= '~');
  }
  for (const auto& header : request.headers) {
    require(!header.name.empty());
    for (const char c : header.name) require(c > ' ' && c <= '~' && c != ':');
    require(header.value.find_first_of(std::string_view("\r\n\0", 3)) == std::string::npos);
  }
  while (bytes.starts_with("\r\n")) bytes.remove_prefix(2);
  const size_t head = bytes.find("\r\n\r\n");
  require(head != std::string_view::npos);
  const std::string_view after = bytes.substr(head + 4);
  if (request.count("Transfer-Encoding") > 0) {
    require(request.count("Content-Length") == 0);
    const auto body = decode_chunks(after);
    require(body && *body == request.body);
  } else {
    size_t length = 0;
    for (const char c : request.header("Content-Length")) length = length * 10 + static_cast<size_t>(c - '0');
    require(after.size() == length && request.body == after);
  }
}

std::string written(const Request& request, bool old) {
  std::string text = request.method + " " + request.path;
  if (!request.query.empty()) text += "?" + request.query;
  text += old ? " HTTP/1.0\r\n" : " HTTP/1.1\r\n";
  for (const auto& header : request.headers) {
    if (nfp::http::equal_ignoring_case(header.name, "Transfer-Encoding")) {
      text += "Content-Length: " + std::to_string(request.body.size()) + "\r\n";
    } else {
      text += header.name + ": " + header.value + "\r\n";
    }
  }
  return text + "\r\n" + request.body;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::mt19937 random(data[0]);
  const std::string_view bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  static const nfp::http::ServerOptions options = bounds();
  const auto read_pieces = [&](std::string_view text) {
    return read_all(text, options, [&] { return size_t{1} + random() % (data[0] % 2 == 0 ? 3 : 100); });
  };
  const Read whole = read_all(bytes, options, [&] { return bytes.size(); }), pieces = read_pieces(bytes);
  require(whole.ends == pieces.ends);
  if (whole.fault != pieces.fault) {
    // What is wrong with an element that is not all there is found sooner or later, but found: nothing makes it right,
    // not even the end of a quoted string.
    const std::string more = std::string(bytes) + "\"\"        \r\n\r\n";
    const Read later = read_pieces(more);
    require(later.fault && later.ends == whole.ends);
  }
  for (size_t i = 0; i < whole.requests.size(); ++i) {
    const Request& request = whole.requests[i];
    require(same(request, pieces.requests[i]));
    const size_t start = i == 0 ? 0 : whole.ends[i - 1];
    check_framing(request, bytes.substr(start, whole.ends[i] - start));
    nfp::http::ServerOptions wider = options;
    wider.max_header_bytes *= 4;  // "A:b" is written "A: b"
    const std::string text = written(request, whole.old[i]);
    const Read again = read_all(text, wider, [&] { return text.size(); });
    require(again.requests.size() == 1 && !again.fault && again.requests[0].body == request.body &&
            again.requests[0].method == request.method && again.requests[0].query == request.query);
  }
  return 0;
}
