#include "server/metrics/metrics.h"

#include <gtest/gtest.h>

#include "server/api/json_text.h"

namespace nfp::server {
namespace {

RequestRecord finished(FinishReason reason, int32_t tokens) {
  RequestRecord r;
  r.finish = reason;
  r.usage.prompt_tokens = 10;
  r.usage.completion_tokens = tokens;
  r.decode_s = 0.9;
  r.e2e_s = 1.2;
  return r;
}

bool has_line(const std::string& text, const std::string& line) {
  return ("\n" + text).find("\n" + line + "\n") != std::string::npos;
}

TEST(Metrics, CountsUnderVllmsNames) {
  Metrics metrics;
  metrics.on_first_token(0.02);
  metrics.on_token_gap(0.01);
  metrics.on_token_gap(0.2);
  metrics.on_finished(finished(FinishReason::kLength, 3));
  metrics.on_finished(finished(FinishReason::kCancelled, 0));
  StepRecord step;
  step.precision = Precision::kFp8;
  step.tokens = 40;
  step.seconds = 0.004;
  metrics.on_step(step);
  Metrics::Facts facts;
  facts.model_name = "a \"model\"";
  facts.engine.kv_blocks = 8;
  facts.engine.kv_blocks_used = 2;
  facts.engine.steps_by_precision[1] = 7;
  const std::string text = metrics.prometheus(facts);
  const std::string m = "model_name=\"a \\\"model\\\"\",engine=\"0\"";
  EXPECT_TRUE(has_line(text, "vllm:kv_cache_usage_perc{" + m + "} 0.25")) << text;
  EXPECT_TRUE(has_line(text, "vllm:prompt_tokens_total{" + m + "} 10"));
  EXPECT_TRUE(has_line(text, "vllm:generation_tokens_total{" + m + "} 3"));
  EXPECT_TRUE(has_line(text, "vllm:request_success_total{" + m + ",finished_reason=\"length\"} 1"));
  EXPECT_TRUE(has_line(text, "vllm:request_success_total{" + m + ",finished_reason=\"abort\"} 1"));
  EXPECT_TRUE(has_line(text, "vllm:time_to_first_token_seconds_bucket{" + m + ",le=\"0.01\"} 0"));
  EXPECT_TRUE(has_line(text, "vllm:time_to_first_token_seconds_bucket{" + m + ",le=\"0.02\"} 1"));
  EXPECT_TRUE(has_line(text, "vllm:inter_token_latency_seconds_bucket{" + m + ",le=\"+Inf\"} 2"));
  EXPECT_TRUE(has_line(text, "vllm:inter_token_latency_seconds_count{" + m + "} 2"));
  EXPECT_TRUE(has_line(text, "nestedfp:steps_total{" + m + ",precision=\"fp8\"} 7"));
  EXPECT_TRUE(has_line(text, "nestedfp:step_time_seconds_count{" + m + ",precision=\"fp8\"} 1"));
  EXPECT_TRUE(has_line(text, "nestedfp:step_time_seconds_count{" + m + ",precision=\"fp16\"} 0"));
}

TEST(Metrics, TimelineIsJsonAndKnowsPrecisions) {
  Timeline timeline;
  StepRecord step;
  step.start = EngineClock::now();
  step.tokens = 5;
  timeline.add_step(step);
  step.precision = Precision::kFp8;
  step.tokens = 7;
  timeline.add_step(step);
  step.fp8_share = 0.5;
  step.switched = true;
  step.change = LevelChange::kFirstTokens;
  step.tokens = 12;
  step.waiting = 3;
  timeline.add_step(step);
  timeline.add_ttft(0.25);
  const auto json = parse_json(timeline.json(-1));
  ASSERT_TRUE(json.ok());
  int fp16 = 0, fp8 = 0;
  for (const Json& slice : (*json)["slices"]) {
    fp16 += slice["fp16"].get<int>();
    fp8 += slice["fp8"].get<int>();
  }
  EXPECT_EQ(fp16, 5);
  EXPECT_EQ(fp8, 19);
  ASSERT_EQ((*json)["switches"].size(), 1u);
  EXPECT_EQ((*json)["switches"][0]["why"], "first_tokens");
  EXPECT_EQ((*json)["switches"][0]["share"], 0.5);
  EXPECT_EQ((*json)["ttft_ms"]["p50"], 250.0);
  EXPECT_TRUE((*json)["tpot_ms"]["p50"].is_null());
  EXPECT_TRUE((*parse_json(timeline.json(1'000'000)))["slices"].empty());
}

}  // namespace
}  // namespace nfp::server
