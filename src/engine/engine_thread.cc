#include "engine/engine_thread.h"

#include <algorithm>
#include <utility>

namespace nfp {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(EngineClock::now().time_since_epoch()).count();
}

}  // namespace

EngineThread::EngineThread(std::unique_ptr<Engine> engine, std::function<void(const Error&)> on_device_failure)
    : engine_(std::move(engine)),
      max_queue_(engine_->config().limits.max_queue),
      on_device_failure_(std::move(on_device_failure)),
      stats_(engine_->stats()),
      progress_ns_(now_ns()) {
  thread_ = std::thread([this] { loop(); });
}

EngineThread::~EngineThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

Status EngineThread::submit(Request request, OutputSink sink) {
  std::vector<Submission> one;
  one.push_back({std::move(request), std::move(sink)});
  return submit_all(std::move(one));
}

Status EngineThread::submit_all(std::vector<Submission> submissions) {
  {
    const std::lock_guard lock(mutex_);
    const int32_t queued = static_cast<int32_t>(incoming_.size()) + stats_.waiting;
    const auto more = static_cast<int32_t>(std::min<size_t>(submissions.size(), INT32_MAX / 2));
    if (queued > max_queue_ - more) {
      return error(ErrorCode::kResource, "the queue is full ({} requests wait, and this one is {}); try again later",
                   queued, more);
    }
    for (Submission& submission : submissions) incoming_.push_back(std::move(submission));
    queued_.store(queued + more, std::memory_order_relaxed);
  }
  wake_.notify_one();
  return ok_status();
}

void EngineThread::cancel(std::string id) {
  {
    const std::lock_guard lock(mutex_);
    cancellations_.push_back(std::move(id));
  }
  wake_.notify_one();
}

EngineStats EngineThread::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.waiting += static_cast<int32_t>(incoming_.size());
  return stats;
}

double EngineThread::seconds_since_progress() const { return static_cast<double>(now_ns() - progress()) * 1e-9; }

void EngineThread::deliver(std::vector<RequestOutput>& outputs) {
  for (RequestOutput& output : outputs) {
    const auto place = sinks_.find(output.id);
    if (place == sinks_.end()) continue;
    if (output.finish) {
      const OutputSink sink = std::move(place->second);
      sinks_.erase(place);
      sink(std::move(output));
    } else {
      place->second(std::move(output));
    }
  }
}

void EngineThread::loop() {
  while (true) {
    std::deque<Submission> incoming;
    std::vector<std::string> cancellations;
    bool stop = false;
    {
      std::unique_lock lock(mutex_);
      while (!stop_ && incoming_.empty() && cancellations_.empty() && engine_->idle()) {
        // Idle counts as progress, so that a health check sees a live engine.
        progress_ns_.store(now_ns(), std::memory_order_relaxed);
        wake_.wait_for(lock, std::chrono::milliseconds(200));
      }
      incoming.swap(incoming_);
      cancellations.swap(cancellations_);
      stop = stop_;
      // Until the next copy of stats_, the drained requests still count as waiting.
      stats_.waiting += static_cast<int32_t>(incoming.size());
    }
    for (Submission& item : incoming) {
      const std::string id = item.request.id;
      const bool known = sinks_.contains(id);
      Status status = engine_->submit(std::move(item.request));
      if (status.ok()) {
        sinks_.emplace(id, std::move(item.sink));
        continue;
      }
      RequestOutput refused;
      refused.id = id;
      refused.finish = FinishReason::kError;
      refused.error_code = status.error().code;
      refused.error =
          known ? fmt::format("request id '{}' is already in flight; choose another", id) : status.error().message;
      item.sink(std::move(refused));
    }
    for (const std::string& id : cancellations) engine_->cancel(id);
    if (stop) {
      std::vector<std::string> ids;
      for (const auto& [id, sink] : sinks_) ids.push_back(id);
      for (const std::string& id : ids) engine_->cancel(id);
    }
    std::vector<RequestOutput> outputs = engine_->step();
    progress_ns_.store(now_ns(), std::memory_order_relaxed);
    {
      // Before the outputs: whoever has seen its last one finds its blocks returned.
      const std::lock_guard lock(mutex_);
      stats_ = engine_->stats();
      queued_.store(stats_.waiting + static_cast<int32_t>(incoming_.size()), std::memory_order_relaxed);
    }
    if (engine_->device_failure() && !device_failed_.exchange(true) && on_device_failure_) {
      on_device_failure_(*engine_->device_failure());
    }
    deliver(outputs);
    if (stop && engine_->idle()) return;
  }
}

}  // namespace nfp
