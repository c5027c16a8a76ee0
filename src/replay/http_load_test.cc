#include "replay/http_load.h"

#include <gtest/gtest.h>

namespace nfp {
namespace {

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

}  // namespace
}  // namespace nfp
