#include "server/metrics/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "server/api/json_text.h"

namespace nfp::server {

int64_t Timeline::slice_of(EngineClock::time_point when) const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(when - start_).count() / kSliceMs;
}

void Timeline::add_step(const StepRecord& step) {
  const auto end =
      step.start + std::chrono::duration_cast<EngineClock::duration>(std::chrono::duration<double>(step.seconds));
  const std::lock_guard lock(mutex_);
  const int64_t index = slice_of(end);
  Slice& slice = slices_[static_cast<size_t>(index) % kSlices];
  if (slice.index != index) {
    slice = Slice();
    slice.index = index;
  }
  (is_exact(step.precision) ? slice.fp16 : slice.fp8) += step.tokens - step.exact_tokens;
  slice.fp16 += step.exact_tokens;
  ++slice.steps;
  slice.sequences = std::max(slice.sequences, step.sequences);
  slice.waiting = std::max(slice.waiting, step.waiting);
  slice.kv_use = std::max(slice.kv_use, step.kv_use);
  slice.seconds += step.seconds;
  (is_exact(step.precision) ? slice.prefill_fp16 : slice.prefill_fp8) += step.prefill_tokens;
  slice.most_tokens = std::max(slice.most_tokens, step.tokens);
  slice.most_seconds = std::max(slice.most_seconds, step.seconds);
  if (!step.switched) return;
  const auto at = std::chrono::duration_cast<std::chrono::milliseconds>(step.start - start_);
  switches_.push_back({index, at.count(), step});
  if (switches_.size() > kSwitches) switches_.pop_front();
}

void Timeline::set_policy(std::string_view name, const LatencyTargets& targets) {
  std::string json = "{\"name\":";
  append_string(json, name);
  fmt::format_to(std::back_inserter(json), ",\"ttft_ms\":{},\"itl_ms\":{}}}", targets.ttft_s * 1e3,
                 targets.itl_s * 1e3);
  const std::lock_guard lock(mutex_);
  policy_ = std::move(json);
}

void Timeline::add_sample(Samples& samples, double seconds) {
  const std::lock_guard lock(mutex_);
  const Sample sample{EngineClock::now(), seconds};
  if (samples.ring.size() < kSamples) {
    samples.ring.push_back(sample);
  } else {
    samples.ring[samples.next] = sample;
  }
  samples.next = (samples.next + 1) % kSamples;
}

std::string Timeline::percentiles(const Samples& samples) const {
  const auto since = EngineClock::now() - std::chrono::minutes(1);
  std::vector<double> values;
  for (const Sample& sample : samples.ring) {
    if (sample.when >= since) values.push_back(sample.seconds * 1e3);
  }
  std::sort(values.begin(), values.end());
  // Of fewer, a percentile would be the largest value under another name.
  const auto at = [&](double share, size_t least) {
    if (values.size() < least) return std::string("null");
    return fmt::format("{:.2f}",
                       values[static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)))]);
  };
  return fmt::format(R"({{"count":{},"p50":{},"p90":{},"p99":{}}})", values.size(), at(0.5, 1), at(0.9, 10),
                     at(0.99, 100));
}

std::string Timeline::json(int64_t after) const {
  const std::lock_guard lock(mutex_);
  const int64_t now = slice_of(EngineClock::now());
  const auto started = std::chrono::duration_cast<std::chrono::milliseconds>(started_.time_since_epoch());
  std::string out = fmt::format(R"({{"started_ms":{},"now":{},"slice_ms":{},"policy":{},"slices":[)", started.count(),
                                now, kSliceMs, policy_);
  bool first = true;
  const int64_t oldest = std::max(after + 1, now - static_cast<int64_t>(kSlices) + 1);
  for (int64_t i = std::max<int64_t>(oldest, 0); i <= now; ++i) {
    const Slice& s = slices_[static_cast<size_t>(i) % kSlices];
    if (s.index != i) continue;
    fmt::format_to(std::back_inserter(out),
                   R"({}{{"i":{},"fp16":{},"fp8":{},"prefill_fp16":{},"prefill_fp8":{},"steps":{},"running":{},)"
                   R"("waiting":{},"kv":{:.4f},"ms":{:.2f},"most_tokens":{},"most_ms":{:.2f}}})",
                   first ? "" : ",", i, s.fp16, s.fp8, s.prefill_fp16, s.prefill_fp8, s.steps, s.sequences, s.waiting,
                   s.kv_use, s.seconds * 1e3, s.most_tokens, s.most_seconds * 1e3);
    first = false;
  }
  out += "],\"switches\":[";
  first = true;
  for (const Switch& one : switches_) {
    if (one.index <= after) continue;
    const StepRecord& step = one.step;
    fmt::format_to(std::back_inserter(out),
                   R"({}{{"i":{},"at_ms":{},"precision":"{}","share":{:.3f},"tokens":{},"prefill":{},"running":{},)"
                   R"("waiting":{},"lost":{},"predicted_ms":{:.2f},"why":"{}"}})",
                   first ? "" : ",", one.index, one.at_ms, name_of(step.precision), step.fp8_share, step.tokens,
                   step.prefill_tokens, step.sequences, step.waiting, step.lost, step.predicted_s * 1e3,
                   kLevelChangeNames[static_cast<size_t>(step.change)]);
    first = false;
  }
  out += "],\"ttft_ms\":" + percentiles(ttft_) + ",\"tpot_ms\":" + percentiles(tpot_) + "}";
  return out;
}

}  // namespace nfp::server
