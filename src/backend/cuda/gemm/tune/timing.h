// Timing of launches as an engine makes them: captured once in a CUDA graph, replayed, by device events.
#pragma once

#include <functional>
#include <vector>

#include "base/result.h"

struct CUstream_st;
struct CUgraphExec_st;
struct CUevent_st;

namespace nfp::cuda {

class GraphTimer {
 public:
  using Launch = std::function<Status(int index, CUstream_st* stream)>;

  // Captures launch(0) .. launch(launches - 1), which must only enqueue work.
  static Result<GraphTimer> create(int launches, const Launch& launch);
  ~GraphTimer();
  GraphTimer(GraphTimer&& other) noexcept;
  GraphTimer& operator=(GraphTimer&&) = delete;

  // Microseconds a launch, from one replay.
  Result<double> replay();
  // Median of `replays` after `warmups`.
  Result<double> median(int warmups, int replays);
  // Replays back to back for at least `milliseconds` and returns the mean: at the power the kernel sustains.
  Result<double> sustained(double milliseconds);

 private:
  GraphTimer() = default;
  int launches_ = 0;
  CUstream_st* stream_ = nullptr;
  CUgraphExec_st* graph_ = nullptr;
  CUevent_st* begin_ = nullptr;
  CUevent_st* end_ = nullptr;
};

double median_of(std::vector<double> values);

}  // namespace nfp::cuda
