#include "server/metrics/metrics.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/testing/scratch_folder.h"
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
  metrics.on_first_token(0.02, 10);
  metrics.on_token_gap(0.01);
  metrics.on_token_gap(0.2);
  metrics.on_finished(finished(FinishReason::kLength, 3));
  metrics.on_finished(finished(FinishReason::kCancelled, 0));
  metrics.on_answered(3);
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
  EXPECT_TRUE(has_line(text, "vllm:request_prompt_tokens_sum{" + m + "} 20"));
  EXPECT_TRUE(has_line(text, "vllm:request_prefill_kv_computed_tokens_sum{" + m + "} 10"));
  EXPECT_TRUE(has_line(text, "vllm:request_max_num_generation_tokens_sum{" + m + "} 3"));
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

// Of steps with drafts the table knows nothing: its sum beside that of step times must not lack them.
TEST(Metrics, StepsWithDraftsCountAsTheyWere) {
  const auto total = [](const Metrics& metrics) {
    Metrics::Facts facts;
    const std::string text = metrics.prometheus(facts);
    const std::string name = "\nnestedfp:table_step_time_seconds_total{model_name=\"\",engine=\"0\"} ";
    return text.substr(text.find(name) + name.size(), 3);
  };
  StepRecord plain, drafts;
  plain.table_s = 0.5;
  plain.seconds = 1;
  drafts.drafted = 4;
  drafts.seconds = 2;
  Metrics without_table;
  without_table.on_step(drafts);
  EXPECT_EQ(total(without_table), "0\n#");
  Metrics metrics;
  metrics.on_step(plain);
  metrics.on_step(drafts);
  EXPECT_EQ(total(metrics), "2.5");
}

TEST(Metrics, NamesAreUtf8) {
  Metrics metrics;
  Metrics::Facts facts;
  facts.model_name = "a\xff\\\n\xc3\xbc";
  const std::string text = metrics.prometheus(facts);
  EXPECT_NE(text.find("{model_name=\"a\uFFFD\\\\\\n\u00fc\","), std::string::npos) << text.substr(0, 1000);
}

// A dashboard takes zeros for a start in 1970 and for no open files.
TEST(Metrics, WhatIsNotKnownOfTheProcessIsLeftOut) {
  const Metrics metrics;
  EXPECT_NE(metrics.prometheus({}).find("\nprocess_open_fds "), std::string::npos);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string text = metrics.prometheus({});
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(text.find("\nprocess_cpu_seconds_total "), std::string::npos);
  EXPECT_TRUE(has_line(text, "process_max_fds 0"));
  for (const char* name : {"open_fds", "start_time_seconds", "resident_memory_bytes", "virtual_memory_bytes"})
    EXPECT_EQ(text.find(fmt::format("process_{}", name)), std::string::npos) << name;
}

// What routers and autoscalers take: attainment by tier, the level, and how well steps are predicted.
TEST(Metrics, AttainmentLevelAndPredictions) {
  Metrics metrics;
  for (const bool own : {false, true}) {
    for (const bool attained : {true, false, true}) {
      RequestRecord request = finished(FinishReason::kLength, own ? 5 : 7);
      request.own_targets = own;
      request.attained = attained && !own;
      metrics.on_finished(request);
    }
  }
  RequestRecord refused = finished(FinishReason::kError, 0);
  refused.shed = true;
  metrics.on_finished(refused);
  StepRecord step;
  step.precision = Precision::kFp8;
  step.fp8_share = 0.5;
  step.switched = true;
  step.change = LevelChange::kPace;
  step.tokens = 20;
  step.exact_tokens = 4;
  step.oldest_wait_s = 1.5;
  step.predicted_s = 0.009;
  step.table_s = 0.008;
  step.seconds = 0.010;
  metrics.on_step(step);
  step.switched = false;
  step.fp8_share = 0.5004;
  step.predicted_s = 0.0107;
  metrics.on_step(step);
  Metrics::Facts facts;
  facts.model_name = "m";
  EXPECT_TRUE(has_line(metrics.prometheus(facts), "nestedfp:oldest_wait_seconds{model_name=\"m\",engine=\"0\"} 0"));
  facts.engine.running = 1;
  const std::string text = metrics.prometheus(facts);
  const std::string m = "model_name=\"m\",engine=\"0\"";
  const std::pair<std::string, std::string> lines[] = {
      {"slo_requests_total{" + m + ",tier=\"default\"}", "4"},
      {"slo_attained_total{" + m + ",tier=\"default\"}", "2"},
      {"slo_attained_tokens_total{" + m + ",tier=\"default\"}", "14"},
      {"slo_requests_total{" + m + ",tier=\"own\"}", "3"},
      {"slo_attained_total{" + m + ",tier=\"own\"}", "0"},
      {"slo_shed_total{" + m + "}", "1"},
      {"fp8_share{" + m + "}", "0.5004"},
      {"oldest_wait_seconds{" + m + "}", "1.5"},
      {"level_tokens_total{" + m + ",fp8_share=\"0.500\"}", "32"},
      {"level_tokens_total{" + m + ",fp8_share=\"0.000\"}", "8"},
      {"level_changes_total{" + m + ",reason=\"pace\"}", "1"},
      {"step_prediction_off_bucket{" + m + ",le=\"0.08\"}", "1"},
      {"step_prediction_off_bucket{" + m + ",le=\"0.12\"}", "2"},
      {"predicted_step_time_seconds_count{" + m + "}", "2"},
      {"table_step_time_seconds_total{" + m + "}", "0.016"},
  };
  for (const auto& [name, value] : lines) {
    EXPECT_TRUE(has_line(text, fmt::format("nestedfp:{} {}", name, value))) << name << '\n' << text;
  }
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
  const std::chrono::duration<double, std::milli> unix_time = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_NEAR((*json)["started_ms"].get<double>(), unix_time.count(), 60'000);
  ASSERT_EQ((*json)["switches"].size(), 1u);
  EXPECT_EQ((*json)["switches"][0]["why"], "first_tokens");
  EXPECT_EQ((*json)["switches"][0]["share"], 0.5);
  EXPECT_EQ((*json)["ttft_ms"]["p50"], 250.0);
  EXPECT_TRUE((*json)["tpot_ms"]["p50"].is_null());
  EXPECT_TRUE((*parse_json(timeline.json(1'000'000)))["slices"].empty());
}

TEST(StepLog, HasALineForEachStep) {
  const nfp::testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/steps.csv";
  Metrics metrics;
  auto log = StepLog::create(path);
  ASSERT_TRUE(log.ok()) << log.error().message;
  metrics.set_step_log(std::move(log).value());
  StepRecord step;
  step.precision = Precision::kFp8;
  step.fp8_share = 0.5;
  step.change = LevelChange::kFirstTokens;
  step.tokens = 33;
  step.prefill_tokens = 32;
  step.sequences = 2;
  step.waiting = 4;
  step.work.add(32, 100);
  step.work.add(1, 50);
  step.predicted_s = 0.010;
  step.table_s = 0.008;
  step.seconds = 0.0125;
  step.drafted = 6;
  step.accepted = 5;
  metrics.on_step(step);
  step.start += std::chrono::milliseconds(1500);
  metrics.on_step(step);
  std::ifstream file(path);  // lines are there as soon as they are written
  std::string head, first, second, more;
  ASSERT_TRUE(std::getline(file, head) && std::getline(file, first) && std::getline(file, second));
  EXPECT_FALSE(std::getline(file, more));
  EXPECT_EQ(head,
            "start_s,precision,fp8_share,change,tokens,prefill_tokens,sequences,waiting,prefill_pairs,prefill_keys,"
            "decode_keys,predicted_ms,table_ms,ms,drafted,accepted");
  EXPECT_EQ(first, "0.0000,fp8,0.500,first_tokens,33,32,2,4,3728,132,51,10.000,8.000,12.500,6,5");
  EXPECT_EQ(second.substr(0, 11), "1.5000,fp8,");

  for (const std::string place : {"/nonexistent/steps.csv", "/dev/full"}) {
    const auto refused = StepLog::create(place);
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.error().message.find("--step-log " + place + ": "), std::string::npos) << refused.error().message;
  }
}

TEST(StepLog, KeepsWhatWasThereUntilTheFirstStep) {
  const nfp::testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/steps.csv";
  std::ofstream(path) << "of another server\n";
  auto log = StepLog::create(path);
  ASSERT_TRUE(log.ok()) << log.error().message;
  std::string line;
  EXPECT_TRUE(std::getline(std::ifstream(path), line) && line == "of another server");
  (*log)->add({});
  (*log)->add({});
  std::ifstream file(path);
  int lines = 0;
  for (; std::getline(file, line); ++lines) EXPECT_EQ(line.starts_with("start_s,precision,"), lines == 0);
  EXPECT_EQ(lines, 3);
}

TEST(StepLog, EndsWithAWholeLineWhereTheFileTakesNoMore) {
  const nfp::testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/steps.csv";
  auto log = StepLog::create(path);
  ASSERT_TRUE(log.ok()) << log.error().message;
  (*log)->add({});
  const auto size = std::filesystem::file_size(path);
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit full = before;
  full.rlim_cur = size + 10;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  ::testing::internal::CaptureStderr();
  (*log)->add({});
  const std::string told = ::testing::internal::GetCapturedStderr();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(told.find("--step-log " + path + ": "), std::string::npos) << told;
  (*log)->add({});  // not after a line that is missing
  EXPECT_EQ(std::filesystem::file_size(path), size);
}

// The engine's thread writes it.
TEST(StepLog, APipeThatNobodyReadsEndsIt) {
  const nfp::testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  auto log = StepLog::create(path);
  ASSERT_TRUE(log.ok()) << log.error().message;
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 5000; ++i) (*log)->add({});
  const std::string told = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(told.find("--step-log " + path + ": "), std::string::npos) << told;
  EXPECT_NE(told.find("no more steps are written"), std::string::npos) << told;
  ::close(reader);
}

}  // namespace
}  // namespace nfp::server
