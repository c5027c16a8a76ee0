// Times of a backend's operations on a stream, by events around each. Only while it is on; then kernels no longer
// overlap, so the times add up to more than an unprofiled step.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/operation_cost.h"

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
    Timed(Profiler* profiler, cudaEvent_t end, cudaStream_t stream) : profiler_(profiler), end_(end), stream_(stream) {}
    ~Timed() {
      if (end_ != nullptr) cudaEventRecord(end_, stream_);
    }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

    // The rest of the operation counts as another stage, from the event that this returns: it must be recorded. Null
    // where no times are taken.
    template <typename Cost>
    cudaEvent_t then(std::string_view stage, Cost&& cost) {
      if (end_ == nullptr) return nullptr;
      const cudaEvent_t between = end_;
      end_ = profiler_->add(stage, std::nullopt, between, std::forward<Cost>(cost));
      return between;
    }

   private:
    Profiler* profiler_;
    cudaEvent_t end_;
    cudaStream_t stream_;
  };
  // `cost` gives an OperationCost. It is called by times(), so what it reads must be there until then.
  template <typename Cost>
  Timed time(std::string_view stage, cudaStream_t stream, Cost&& cost, std::optional<Precision> precision = {}) {
    if (!on_) return {this, nullptr, stream};
    cudaEvent_t begin = nullptr;
    cudaEventCreate(&begin);
    events_.push_back(begin);
    cudaEventRecord(begin, stream);
    return {this, add(stage, precision, begin, std::forward<Cost>(cost)), stream};
  }

  // Host memory with these numbers of the device's as they are at this point of the stream, for costs to read. Null
  // where no times are taken, or where there is no memory for it.
  const int32_t* keep(const int32_t* device, size_t count, cudaStream_t stream) {
    if (!on_) return nullptr;
    if (room_ < count) {
      const size_t wanted = std::max(count, kBlock);
      void* block = nullptr;
      if (cudaHostAlloc(&block, wanted * sizeof(int32_t), cudaHostAllocDefault) != cudaSuccess) return nullptr;
      blocks_.push_back(static_cast<int32_t*>(block));
      room_ = wanted;
      used_ = 0;
    }
    int32_t* const host = blocks_.back() + used_;
    if (cudaMemcpyAsync(host, device, count * sizeof(int32_t), cudaMemcpyDeviceToHost, stream) != cudaSuccess)
      return nullptr;
    used_ += count;
    room_ -= count;
    return host;
  }

  // The stream must have been waited for.
  std::vector<StageTime> times() const {
    StageTimes sums;
    for (const Record& record : records_) {
      float ms = 0;
      if (cudaEventElapsedTime(&ms, record.begin, record.end) != cudaSuccess) continue;
      sums.add(record.stage, record.precision, record.cost(), static_cast<double>(ms) * 1e-3);
    }
    return sums.all();
  }

 private:
  static constexpr size_t kBlock = size_t{1} << 18;  // numbers that are kept in one piece of memory
  struct Record {
    std::string_view stage;
    std::optional<Precision> precision;
    cudaEvent_t begin, end;
    std::function<OperationCost()> cost;
  };
  template <typename Cost>
  cudaEvent_t add(std::string_view stage, std::optional<Precision> precision, cudaEvent_t begin, Cost&& cost) {
    cudaEvent_t end = nullptr;
    cudaEventCreate(&end);
    events_.push_back(end);
    records_.push_back({stage, precision, begin, end, std::forward<Cost>(cost)});
    return end;
  }
  void clear() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
    for (int32_t* block : blocks_) cudaFreeHost(block);
    events_.clear();
    blocks_.clear();
    records_.clear();
    room_ = used_ = 0;
  }

  bool on_ = false;
  std::vector<Record> records_;
  std::vector<cudaEvent_t> events_;  // of all records; some end one and begin the next
  std::vector<int32_t*> blocks_;
  size_t room_ = 0, used_ = 0;  // of the last block
};

}  // namespace nfp::cuda
