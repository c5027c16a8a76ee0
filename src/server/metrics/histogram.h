// A Prometheus histogram that one thread fills and any thread reads, without locks.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace nfp::server {

class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds), counts_(bounds.size() + 1) {}

  void observe(double value) {
    size_t bucket = 0;
    while (bucket < bounds_.size() && value > bounds_[bucket]) ++bucket;
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    double sum = sum_.load(std::memory_order_relaxed);
    while (!sum_.compare_exchange_weak(sum, sum + value, std::memory_order_relaxed)) {
    }
  }
  // Lines NAME_bucket, NAME_sum, NAME_count in Prometheus' text format; `labels` like `model_name="m"`, or none.
  void write(std::string& out, std::string_view name, std::string_view labels) const;

 private:
  std::span<const double> bounds_;  // ascending upper bounds, of static storage
  std::vector<std::atomic<uint64_t>> counts_;
  std::atomic<double> sum_{0};
};

}  // namespace nfp::server
