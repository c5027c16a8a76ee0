#include "server/serve/live_request.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/log.h"
#include "server/api/json_text.h"

namespace nfp::server {

LiveRequest::LiveRequest(ServerState* state, RequestContext context)
    : state_(state),
      exchange_(std::move(context.exchange)),
      request_id_(std::move(context.id)),
      headers_(std::move(context.headers)),
      stop_(std::move(context.stop)),
      lease_(std::move(context.lease)) {
  ++state_->in_flight;
}

LiveRequest::~LiveRequest() {
  state_->live.remove(this);
  --state_->in_flight;
}

void LiveRequest::start(bool on_worker) {
  tell_ignored(headers_, request_id_, ignored());
  state_->live.add(shared_from_this());
  if (!on_worker) exchange_->on_abort([stop = stop_]() mutable { stop.request_stop(); });
  prepared(prepare(), on_worker);
}

void LiveRequest::go_on(MaybeError failure, bool on_worker) {
  if (!on_worker) {
    return guarded([&] { failure ? fail(*failure) : run(); });
  }
  exchange_->post([self = shared_from_this(), failure = std::move(failure)] {
    self->guarded([&] { failure ? self->fail(*failure) : self->run(); });
  });
}

void LiveRequest::guarded(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& e) {
    try {
      log::error("request={} ended by an exception: {}", request_id_, e.what());
      cancel_all();
      fail(ApiError{500, "the server failed to write this answer", "", ""});
    } catch (const std::exception&) {
      ended_ = true;  // its exchange says so when the engine has given it back
    }
  }
}

void LiveRequest::cut_off() {
  stop_.request_stop();
  exchange_->post([self = shared_from_this()] {
    if (self->ended_) return;
    self->cancel_all();
    self->fail(ApiError{503, "the request was cut off because the server is shutting down", "", ""});
  });
}

void LiveRequest::watch_client() {
  // Weak: the exchange must not keep alive what keeps it alive.
  exchange_->on_abort([weak = weak_from_this()] {
    if (const auto self = weak.lock(); self && !self->ended_) {
      self->ended_ = true;
      self->cancel_all();
      self->log_disconnected();
    }
  });
}

void LiveRequest::hold_lease(size_t bytes) {
  lease_.resize(std::min<uint64_t>(lease_.bytes(), bytes));
  exchange_->hold(std::move(lease_));
}

ApiError failure_of(const RequestOutput& output) {
  if (output.finish == FinishReason::kCancelled) {
    return ApiError{503, "the request was cancelled because the server is shutting down", "", ""};
  }
  ApiError failure = from_engine(Error{output.error_code, output.error});
  if (output.shed) {
    failure.code = "slo_unattainable";
    const double seconds = output.retry_after_s;
    failure.retry_after_s = seconds > 0 ? static_cast<int>(std::clamp(std::ceil(seconds), 1.0, 600.0)) : 0;
  }
  return failure;
}

void log_failure(std::string_view request_id, std::string_view endpoint, int status, std::string_view message) {
  log::info("request={} endpoint={} status={} error={}", request_id, endpoint, status,
            dump(Json(std::string(message.substr(0, 300)))));
}

void tell_ignored(std::vector<http::Header>& headers, std::string_view request_id,
                  const std::vector<std::string>& names) {
  if (names.empty()) return;
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  headers.push_back({"X-NestedFP-Ignored", list});
  log::warn("request={} fields that are not known here were ignored: {}", request_id, list);
}

}  // namespace nfp::server
