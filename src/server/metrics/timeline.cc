#include "server/metrics/timeline.h"

#include <fmt/format.h>

#include <algorithm>

namespace nfp::server {

int64_t Timeline::slice_of(EngineClock::time_point when) const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(when - start_).count() / kSliceMs;
}

Timeline::Slice& Timeline::slice_at(int64_t index) {
  Slice& slice = slices_[static_cast<size_t>(index) % kSlices];
  if (slice.index != index) {
    slice = Slice();
    slice.index = index;
  }
  return slice;
}

void Timeline::add_gap(double seconds) {
  const std::lock_guard lock(mutex_);
  Slice& slice = slice_at(slice_of(EngineClock::now()));
  slice.gap_s = std::max(slice.gap_s, seconds);
}

void Timeline::set_targets(double ttft_s, double itl_s) {
  const std::lock_guard lock(mutex_);
  ttft_target_s_ = ttft_s;
  itl_target_s_ = itl_s;
}

void Timeline::add_step(const StepRecord& step) {
  const auto end =
      step.start + std::chrono::duration_cast<EngineClock::duration>(std::chrono::duration<double>(step.seconds));
  const std::lock_guard lock(mutex_);
  const int64_t index = slice_of(end);
  Slice& slice = slice_at(index);
  (is_exact(step.precision) ? slice.fp16 : slice.fp8) += step.tokens;
  ++slice.steps;
  slice.sequences = std::max(slice.sequences, step.sequences);
  slice.waiting = std::max(slice.waiting, step.waiting);
  slice.kv_use = std::max(slice.kv_use, step.kv_use);
  slice.seconds += step.seconds;
  slice.fp8_weights += step.fp8_share * step.tokens;
  if (step.switched) {
    changes_.push_back({index, last_share_, step.fp8_share, step.change, step.sequences, step.waiting, step.lost});
    if (changes_.size() > kChanges) changes_.pop_front();
  }
  last_share_ = step.fp8_share;
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
  if (values.empty()) return R"({"p50":null,"p90":null,"p99":null})";
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
  };
  return fmt::format(R"({{"p50":{:.2f},"p90":{:.2f},"p99":{:.2f}}})", at(0.5), at(0.9), at(0.99));
}

std::string Timeline::json(int64_t after) const {
  const std::lock_guard lock(mutex_);
  const int64_t now = slice_of(EngineClock::now());
  std::string out = fmt::format(R"({{"now":{},"slice_ms":{},"slices":[)", now, kSliceMs);
  bool first = true;
  const int64_t oldest = std::max(after + 1, now - static_cast<int64_t>(kSlices) + 1);
  for (int64_t i = std::max<int64_t>(oldest, 0); i <= now; ++i) {
    const Slice& s = slices_[static_cast<size_t>(i) % kSlices];
    if (s.index != i) continue;
    fmt::format_to(
        std::back_inserter(out),
        R"({}{{"i":{},"fp16":{},"fp8":{},"steps":{},"running":{},"waiting":{},"kv":{:.4f},"ms":{:.2f},"gap":{:.2f},"share":{:.3f}}})",
        first ? "" : ",", i, s.fp16, s.fp8, s.steps, s.sequences, s.waiting, s.kv_use, s.seconds * 1e3, s.gap_s * 1e3,
        s.fp8_weights / std::max<double>(1, static_cast<double>(s.fp16 + s.fp8)));
    first = false;
  }
  out += "],\"changes\":[";
  first = true;
  for (const Change& c : changes_) {
    if (c.index <= after) continue;
    fmt::format_to(std::back_inserter(out),
                   R"({}{{"i":{},"from":{:.3f},"to":{:.3f},"why":"{}","running":{},"waiting":{},"lost":{}}})",
                   first ? "" : ",", c.index, c.from, c.to, kLevelChangeNames[static_cast<size_t>(c.why)], c.running,
                   c.waiting, c.lost);
    first = false;
  }
  const auto target = [](double seconds) { return seconds > 0 ? fmt::format("{:.2f}", seconds * 1e3) : "null"; };
  out += "],\"ttft_ms\":" + percentiles(ttft_) + ",\"tpot_ms\":" + percentiles(tpot_) +
         ",\"ttft_target_ms\":" + target(ttft_target_s_) + ",\"itl_target_ms\":" + target(itl_target_s_) + "}";
  return out;
}

}  // namespace nfp::server
