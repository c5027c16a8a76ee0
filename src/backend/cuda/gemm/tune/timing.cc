#include "backend/cuda/gemm/tune/timing.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace nfp::cuda {
namespace {

Status check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return ok_status();
  return error(ErrorCode::kResource, "timing: {}: {}", what, cudaGetErrorString(status));
}

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

Result<GraphTimer> GraphTimer::create(int launches, const Launch& launch) {
  GraphTimer timer;
  timer.launches_ = launches;
  NFP_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&timer.stream_, cudaStreamNonBlocking), "creating a stream"));
  NFP_RETURN_IF_ERROR(check(cudaEventCreate(&timer.begin_), "creating an event"));
  NFP_RETURN_IF_ERROR(check(cudaEventCreate(&timer.end_), "creating an event"));
  NFP_RETURN_IF_ERROR(
      check(cudaStreamBeginCapture(timer.stream_, cudaStreamCaptureModeThreadLocal), "beginning a capture"));
  Status status;
  for (int i = 0; i < launches && status.ok(); ++i) status = launch(i, timer.stream_);
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(timer.stream_, &graph);
  if (status.ok()) status = check(ended, "ending a capture");
  if (status.ok()) status = check(cudaGraphInstantiate(&timer.graph_, graph, 0), "instantiating a graph");
  if (graph != nullptr) cudaGraphDestroy(graph);
  NFP_RETURN_IF_ERROR(std::move(status));
  return timer;
}

GraphTimer::GraphTimer(GraphTimer&& other) noexcept
    : launches_(other.launches_),
      stream_(std::exchange(other.stream_, nullptr)),
      graph_(std::exchange(other.graph_, nullptr)),
      begin_(std::exchange(other.begin_, nullptr)),
      end_(std::exchange(other.end_, nullptr)) {}

GraphTimer::~GraphTimer() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Result<double> GraphTimer::replay() {
  NFP_RETURN_IF_ERROR(check(cudaEventRecord(begin_, stream_), "recording"));
  NFP_RETURN_IF_ERROR(check(cudaGraphLaunch(graph_, stream_), "replaying"));
  NFP_RETURN_IF_ERROR(check(cudaEventRecord(end_, stream_), "recording"));
  NFP_RETURN_IF_ERROR(check(cudaEventSynchronize(end_), "waiting for a replay"));
  float milliseconds = 0;
  NFP_RETURN_IF_ERROR(check(cudaEventElapsedTime(&milliseconds, begin_, end_), "reading events"));
  return double{milliseconds} * 1e3 / launches_;
}

Result<double> GraphTimer::median(int warmups, int replays) {
  std::vector<double> times;
  for (int i = 0; i < warmups + replays; ++i) {
    NFP_ASSIGN_OR_RETURN(const double time, replay());
    if (i >= warmups) times.push_back(time);
  }
  return median_of(std::move(times));
}

Result<double> GraphTimer::sustained(double milliseconds) {
  NFP_ASSIGN_OR_RETURN(const double once, replay());
  const int replays = std::max(1, static_cast<int>(std::ceil(milliseconds * 1e3 / (once * launches_))));
  NFP_RETURN_IF_ERROR(check(cudaEventRecord(begin_, stream_), "recording"));
  for (int i = 0; i < replays; ++i) NFP_RETURN_IF_ERROR(check(cudaGraphLaunch(graph_, stream_), "replaying"));
  NFP_RETURN_IF_ERROR(check(cudaEventRecord(end_, stream_), "recording"));
  NFP_RETURN_IF_ERROR(check(cudaEventSynchronize(end_), "waiting for replays"));
  float elapsed = 0;
  NFP_RETURN_IF_ERROR(check(cudaEventElapsedTime(&elapsed, begin_, end_), "reading events"));
  return double{elapsed} * 1e3 / (double{1} * replays * launches_);
}

}  // namespace nfp::cuda
