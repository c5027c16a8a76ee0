// Plays a trace against a server with OpenAI's completions API: prompts of random token ids, streamed answers, each
// request sent when the trace says, whatever became of those before it (open loop).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/result.h"
#include "replay/simulator.h"
#include "replay/trace.h"

namespace nfp {

struct HttpLoadOptions {
  std::string url;         // http://HOST[:PORT][/PATH]; "/v1/completions" comes after it
  std::string model;       // the name that requests carry
  std::string api_key;     // empty = none
  double timeout_s = 600;  // of one request
  uint64_t seed = 1;       // of the prompts' tokens
  uint64_t played = 0;     // requests of this seed that the server has had: these get other prompts
  // Prompts are of token ids below this. The lowest are left out: they are often single bytes, and a model that goes on
  // in bytes has its tokens held back until they make a character, which looks as if they came late.
  int32_t vocab = 2000;
  // What each request says it wants; empty = nothing, so that the server's own targets count.
  struct Targets {
    double ttft_s = 0, itl_s = 0;
  };
  std::function<Targets(const TraceRequest&)> targets;
};

// A request that fails stays `done == false`. Error: the URL, or a server that answers no request at all.
Result<ReplayOutcome> play_over_http(const Trace& trace, const HttpLoadOptions& options,
                                     const ReplayProgress& progress);

// What a nestedfp's /metrics say it has computed so far; nothing where it is another's.
struct ServerCounts {
  std::map<double, int64_t> tokens_by_share;      // of the weights in FP8
  std::map<std::string, uint64_t> level_changes;  // by reason (kLevelChangeNames)
};
ServerCounts parse_server_counts(std::string_view metrics);
// Nothing where a count went back: the server was started again meanwhile, or is gone.
ServerCounts counts_between(const ServerCounts& before, ServerCounts after);

struct HttpAddress {
  std::string authority;  // of the URL, for Host: "[::1]:81"
  std::string host, port, path;
};
Result<HttpAddress> parse_http_url(const std::string& url);

// Reads an event stream piece by piece, as it arrives.
class EventReader {
 public:
  // Appends bytes; calls `on_data` with what follows "data: " of each whole line.
  template <typename OnData>
  void feed(std::string_view bytes, const OnData& on_data) {
    for (const char c : bytes) {
      if (c != '\n') {
        if (line_.size() < kMostLine) line_ += c;
        continue;
      }
      if (line_.ends_with('\r')) line_.pop_back();
      constexpr std::string_view kData = "data:";
      if (line_.starts_with(kData)) {
        std::string_view data = std::string_view(line_).substr(kData.size());
        if (data.starts_with(' ')) data.remove_prefix(1);
        on_data(data);
      }
      line_.clear();
    }
  }

 private:
  static constexpr size_t kMostLine = 1 << 20;
  std::string line_;
};

}  // namespace nfp
