// An Engine on a thread of its own, for servers: requests and cancellations go in through bounded queues, outputs come
// back through a callback for each request.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/engine.h"

namespace nfp {

// Called on the engine's thread for every output of one request, in order; the last one has `finish`. Must not block.
using OutputSink = std::function<void(RequestOutput&&)>;

class EngineThread {
 public:
  // The engine's limits.max_queue bounds the requests submitted and not yet admitted to a step. `on_failure` is called
  // once, on the engine's thread, when the engine cannot go on: the device is lost (Engine::device_failure), or an
  // exception came out of a step (kResource). All requests end with an error then, and so does whatever comes later.
  explicit EngineThread(std::unique_ptr<Engine> engine, std::function<void(const Error&)> on_failure = {});
  // Cancels what is left, and joins.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // From any thread. kResource at once when the queue is full; other errors of Engine::submit come as an output with
  // kError, since they are found on the engine's thread.
  Status submit(Request request, OutputSink sink);
  struct Submission {
    Request request;
    OutputSink sink;
  };
  // The same for several: all are taken or none.
  Status submit_all(std::vector<Submission> submissions);
  int32_t max_queue() const { return max_queue_; }
  void cancel(std::string id);

  // From any thread.
  EngineStats stats() const;
  int32_t queued() const { return queued_.load(std::memory_order_relaxed); }
  // Since the engine last finished a step or was idle; for health checks.
  double seconds_since_progress() const;
  // Changes with every such moment.
  int64_t progress() const { return progress_ns_.load(std::memory_order_relaxed); }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  void loop();
  void take_in(Submission& item);
  Status submit_to_engine(Request&& request);
  void run_step(const std::vector<std::string>& cancellations, bool stop);
  void deliver(std::vector<RequestOutput>& outputs);
  void set_failed(Error failure);
  void end_all();

  std::unique_ptr<Engine> engine_;
  const int32_t max_queue_;
  const std::function<void(const Error&)> on_failure_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Submission> incoming_;
  std::vector<std::string> cancellations_;
  bool stop_ = false;
  EngineStats stats_;  // a copy after each step, under mutex_
  std::atomic<int32_t> queued_{0};
  std::atomic<bool> failed_{false};
  std::atomic<int64_t> progress_ns_{0};
  // Engine thread only.
  std::unordered_map<std::string, OutputSink> sinks_;
  std::optional<Error> failure_;  // why the engine makes no further step
  std::thread thread_;
};

}  // namespace nfp
