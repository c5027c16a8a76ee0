#include "engine/engine_thread.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.h"

namespace nfp {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(EngineClock::now().time_since_epoch()).count();
}

// False where the sink could not take it. It is to be dropped then, which tells whoever waits for more.
bool give(const OutputSink& sink, RequestOutput&& output) noexcept {
  try {
    sink(std::move(output));
    return true;
  } catch (const std::exception& e) {
    try {
      log::error("a request is dropped, as its output ended by an exception: {}", e.what());
    } catch (const std::exception&) {  // not even memory for the line
    }
    return false;
  }
}

void refuse(const OutputSink& sink, const std::string& id, ErrorCode code, const std::string& message) noexcept {
  try {
    RequestOutput output;
    output.id = id;
    output.finish = FinishReason::kError;
    output.error_code = code;
    output.error = message;
    give(sink, std::move(output));
  } catch (const std::exception&) {  // no memory for it: the sink is dropped
  }
}

}  // namespace

EngineThread::EngineThread(std::unique_ptr<Engine> engine, std::function<void(const Error&)> on_failure)
    : engine_(std::move(engine)),
      max_queue_(engine_->config().limits.max_queue),
      on_failure_(std::move(on_failure)),
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
      return error(ErrorCode::kResource,
                   "the queue is full: {} of its {} places are taken, and this request takes {}; try again later",
                   queued, max_queue_, more);
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
    const bool ended = output.finish.has_value();
    if (give(place->second, std::move(output)) && !ended) continue;
    const auto done = sinks_.extract(place);
    if (!ended) engine_->cancel(done.key());
  }
}

Status EngineThread::submit_to_engine(Request&& request) {
  if (failure_) return error(ErrorCode::kDevice, "{}", failure_->message);
  try {
    return engine_->submit(std::move(request));
  } catch (const std::exception& e) {
    return error(ErrorCode::kResource, "this request could not be taken in: {}; try again later", e.what());
  }
}

void EngineThread::take_in(Submission& item) {
  // Before the request, which could not be taken back. A known id keeps its sink.
  const std::string id = item.request.id;
  const auto [place, fresh] = sinks_.try_emplace(id, std::move(item.sink));
  const Status status =
      fresh ? submit_to_engine(std::move(item.request))
            : error(ErrorCode::kInvalidInput, "request id '{}' is already in flight; choose another", id);
  if (status.ok()) return;
  const OutputSink sink = std::move(fresh ? place->second : item.sink);
  if (fresh) sinks_.erase(place);
  refuse(sink, id, status.error().code, status.error().message);
}

void EngineThread::run_step(const std::vector<std::string>& cancellations, bool stop) {
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
  if (engine_->device_failure()) set_failed(*engine_->device_failure());
  deliver(outputs);
}

void EngineThread::set_failed(Error failure) {
  failure_ = std::move(failure);
  failed_.store(true, std::memory_order_relaxed);
  if (on_failure_) on_failure_(*failure_);
}

// Whatever the engine still holds stays there.
void EngineThread::end_all() {
  for (const auto& [id, sink] : std::exchange(sinks_, {})) refuse(sink, id, ErrorCode::kDevice, failure_->message);
  const std::lock_guard lock(mutex_);
  stats_.running = stats_.waiting = 0;
  queued_.store(static_cast<int32_t>(incoming_.size()), std::memory_order_relaxed);
}

void EngineThread::loop() {
  while (true) {
    std::deque<Submission> incoming;
    std::vector<std::string> cancellations;
    bool stop = false;
    {
      std::unique_lock lock(mutex_);
      while (!stop_ && incoming_.empty() && (failure_ || (cancellations_.empty() && engine_->idle()))) {
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
    try {
      for (Submission& item : incoming) take_in(item);
      if (!failure_) run_step(cancellations, stop);
    } catch (const std::exception& e) {  // halfway: nobody knows what the engine holds
      if (!failure_) set_failed(error(ErrorCode::kResource, "the engine ended by an exception: {}", e.what()));
    }
    if (failure_) end_all();
    if (stop && (failure_ || engine_->idle())) return;
  }
}

}  // namespace nfp
