// Answers by path, method and kind of status, under the names that vLLM's server has from its HTTP framework.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/metrics/histogram.h"

namespace nfp::server {

class HttpCounts {
 public:
  // `handlers`: the paths that are told apart, as they are shown; all others are "none". They must outlive this.
  explicit HttpCounts(std::vector<std::string_view> handlers);

  // From any thread.
  void add(std::string_view handler, std::string_view method, int status, double seconds);
  // Prometheus text.
  void write(std::string& out) const;

 private:
  static constexpr std::array<std::string_view, 5> kMethods = {"GET", "POST", "DELETE", "OPTIONS", "other"};
  static constexpr size_t kKinds = 5;  // 1xx to 5xx
  struct Cell {
    std::array<std::array<std::atomic<uint64_t>, kKinds>, kMethods.size()> counts{};
  };

  std::vector<std::string_view> handlers_;
  std::vector<Cell> cells_;  // of each handler, and of none
  Histogram seconds_;        // of all
};

}  // namespace nfp::server
