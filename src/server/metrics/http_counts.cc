#include "server/metrics/http_counts.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace nfp::server {
namespace {

// prometheus-fastapi-instrumentator's bounds, which is what counts in vLLM's server.
constexpr double kDuration[] = {0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1,  1.5, 2,
                                2.5,  3,     3.5,  4,     4.5, 5,    7.5, 10,   30, 60};

}  // namespace

HttpCounts::HttpCounts(std::vector<std::string_view> handlers)
    : handlers_(std::move(handlers)), cells_(handlers_.size() + 1), seconds_(kDuration) {}

void HttpCounts::add(std::string_view handler, std::string_view method, int status, double seconds) {
  const auto place = std::find(handlers_.begin(), handlers_.end(), handler);
  const auto known = std::find(kMethods.begin(), kMethods.end() - 1, method);
  const auto kind = static_cast<size_t>(std::clamp(status / 100, 1, 5) - 1);
  Cell& cell = cells_[static_cast<size_t>(place - handlers_.begin())];
  cell.counts[static_cast<size_t>(known - kMethods.begin())][kind].fetch_add(1, std::memory_order_relaxed);
  seconds_.observe(seconds);
}

void HttpCounts::write(std::string& out) const {
  out += "# HELP http_requests_total Answers by path, method and kind of status.\n# TYPE http_requests_total counter\n";
  for (size_t h = 0; h < cells_.size(); ++h) {
    for (size_t m = 0; m < kMethods.size(); ++m) {
      for (size_t k = 0; k < kKinds; ++k) {
        const uint64_t count = cells_[h].counts[m][k].load(std::memory_order_relaxed);
        if (count == 0) continue;
        fmt::format_to(std::back_inserter(out),
                       "http_requests_total{{handler=\"{}\",method=\"{}\",status=\"{}xx\"}} {}\n",
                       h < handlers_.size() ? handlers_[h] : "none", kMethods[m], k + 1, count);
      }
    }
  }
  out += "# HELP http_request_duration_highr_seconds From a request's head to its answer's.\n";
  out += "# TYPE http_request_duration_highr_seconds histogram\n";
  seconds_.write(out, "http_request_duration_highr_seconds", "");
}

}  // namespace nfp::server
