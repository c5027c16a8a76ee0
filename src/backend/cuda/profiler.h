// Times of a backend's operations on a stream, by events around each. Only while it is on; then kernels no longer
// overlap, so the times add up to more than an unprofiled step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace nfp::cuda {

class Profiler {
 public:
  Profiler() = default;
  ~Profiler() { clear(); }
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  void reset(bool on) {
    clear();
    on_ = on;
  }

  bool on() const { return on_; }

  // Lasts for one operation.
  class Timed {
   public:
    Timed(cudaEvent_t end, cudaStream_t stream) : end_(end), stream_(stream) {}
    ~Timed() {
      if (end_ != nullptr) cudaEventRecord(end_, stream_);
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

   private:
    cudaEvent_t end_;
    cudaStream_t stream_;
  };
  Timed time(std::string_view stage, cudaStream_t stream, uint64_t weight_bytes = 0, uint64_t flops = 0) {
    if (!on_) return {nullptr, stream};
    Record& record = records_.emplace_back(Record{stage, nullptr, nullptr, weight_bytes, flops});
    cudaEventCreate(&record.begin);
    cudaEventCreate(&record.end);
    cudaEventRecord(record.begin, stream);
    return {record.end, stream};
  }

  // The stream must have been waited for.
  std::vector<StageTime> times() const {
    std::map<std::string_view, StageTime> sums;
    for (const Record& record : records_) {
      float ms = 0;
      if (cudaEventElapsedTime(&ms, record.begin, record.end) != cudaSuccess) continue;
      StageTime& sum = sums[record.stage];
      sum.stage = record.stage;
      sum.calls += 1;
      sum.seconds += static_cast<double>(ms) * 1e-3;
      sum.weight_bytes += record.weight_bytes;
      sum.flops += record.flops;
    }
    std::vector<StageTime> all;
    for (const auto& [stage, sum] : sums) all.push_back(sum);
    return all;
  }

 private:
  struct Record {
    std::string_view stage;
    cudaEvent_t begin, end;
    uint64_t weight_bytes, flops;
  };
  void clear() {
    for (const Record& record : records_) {
      cudaEventDestroy(record.begin);
      cudaEventDestroy(record.end);
    }
    records_.clear();
  }

  bool on_ = false;
  std::vector<Record> records_;
};

}  // namespace nfp::cuda
