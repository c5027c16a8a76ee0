#include "server/http/request_reader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace nfp::http {
namespace {

// "METHOD path [body]" of each request, then "status message" of a fault, where the bytes come `piece` at a time.
std::vector<std::string> read_all(std::string_view bytes, size_t piece) {
  ServerOptions options;
  options.max_header_bytes = 400;
  options.max_body_bytes = 40;
  std::vector<std::string> seen;
  size_t at = 0, end = 0;
  for (;;) {
    RequestReader reader(options);
    while (!reader.done()) {
      const size_t used = reader.put(bytes.substr(at, end - at));
      at += used;
      if (reader.fault()) {
        seen.push_back(std::to_string(reader.fault()->status) + " " + reader.fault()->message);
        return seen;
      }
      if (used > 0) continue;
      if (end == bytes.size()) return seen;
      end = std::min(bytes.size(), end + piece);
    }
    Request request = reader.take();
    seen.push_back(request.method + " " + request.path + " [" + request.body + "]");
  }
}

TEST(RequestReader, PiecesDoNotMatter) {
  const std::string head = "POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
  struct Case {
    std::string bytes;
    std::vector<std::string> expected;
  };
  const std::vector<Case> cases = {
      Case{head + "0\r\n\r\n" + head + "0\r\nX: 1\r\n\r\n", {"POST /a []", "POST /a []"}},
      Case{head + "3\r\nabc\r\n2;x=\"y\"\r\nde\r\n0\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\n\r\n",
           {"POST /a [abcde]", "GET /b []"}},
      Case{"POST /a?b HTTP/1.0\r\nContent-Length: 4\r\n\r\nbodyGET http://h HTTP/1.0\r\n\r\n",
           {"POST /a [body]", "GET / []"}},
      Case{head + "3\r\nabcd\r\n0\r\n\r\n", {"400 malformed HTTP request: bad chunk"}},
      Case{"GET /" + std::string(200, 'a') + " HTTP/1.1\r\nHost: h\r\nX: " + std::string(200, 'x') + "\r\n\r\n",
           {"431 the headers are larger than 400 bytes"}},
      Case{"GET / HTTP/1.1\r\n\r\n", {"400 Host is missing"}},
      Case{"\r\nPOST /a HTTP/1.0\r\nContent-Length: 4\r\n\r\nbody\r\n\r\nGET /b HTTP/1.1\r\nHost: h\r\n\r\n\r\n",
           {"POST /a [body]", "GET /b []"}},
      Case{"\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.0\r\n\r\n", {"400 malformed HTTP request: bad method"}},
      Case{"\nGET / HTTP/1.0\r\n\r\n", {"400 malformed HTTP request: bad method"}},
      Case{"\r\n\rGET / HTTP/1.0\r\n\r\n", {"400 malformed HTTP request: bad method"}},
      Case{"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 41\r\n\r\n", {"413 the body is larger than 40 bytes"}},
  };
  for (const Case& c : cases) {
    for (size_t piece = 1; piece <= c.bytes.size(); ++piece) EXPECT_EQ(read_all(c.bytes, piece), c.expected) << piece;
  }
}

TEST(RequestReader, ABodyThatIsTooLargeHasAHead) {
  ServerOptions options;
  options.max_body_bytes = 40;
  RequestReader reader(options, "peer");
  reader.put("POST /a?b HTTP/1.1\r\nHost: h\r\nX: y\r\nContent-Length: 41\r\n\r\n");
  ASSERT_TRUE(reader.fault());
  EXPECT_EQ(reader.fault()->status, 413);
  ASSERT_TRUE(reader.head_done());
  EXPECT_EQ(reader.head().path, "/a");
  EXPECT_EQ(reader.head().header("x"), "y");
  EXPECT_EQ(reader.head().peer, "peer");
  // What is wrong with the framing comes first.
  RequestReader doubtful(options);
  doubtful.put("POST /a HTTP/1.1\r\nContent-Length: 41\r\n\r\n");
  ASSERT_TRUE(doubtful.fault());
  EXPECT_EQ(doubtful.fault()->message, "Host is missing");
}

TEST(RequestReader, TrailersAreNotOfTheHead) {
  const std::string bytes =
      "POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nHost: other\r\nX: 1\r\n\r\n";
  const ServerOptions options;
  RequestReader reader(options);
  const size_t head = reader.put(bytes);
  ASSERT_TRUE(reader.head_done());
  EXPECT_EQ(head + reader.put(std::string_view(bytes).substr(head)), bytes.size());
  ASSERT_TRUE(reader.done());
  const Request request = reader.take();
  EXPECT_EQ(request.body, "a");
  EXPECT_EQ(request.count("Host"), 1u);
  EXPECT_EQ(request.count("X"), 0u);
}

}  // namespace
}  // namespace nfp::http
