#include "replay/trace.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/testing/scratch_folder.h"

namespace nfp {
namespace {

Result<Trace> read(const std::string& text, const TraceLimits& limits = {}) {
  std::istringstream in(text);
  return read_trace(in, "t", limits);
}

TEST(Trace, ReadsAzure) {
  const auto trace = read(
      "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
      "2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.25+00:00,396,109\n\n2023-11-17T00:00:02Z,5,0\n");
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  EXPECT_EQ(trace->format, "azure");
  ASSERT_EQ(trace->requests.size(), 2u);
  EXPECT_EQ(trace->requests[0].arrival_s, 0);
  EXPECT_NEAR(trace->requests[1].arrival_s, 1.75, 1e-6);
  EXPECT_EQ(trace->requests[1].input, 396);
  EXPECT_EQ(trace->requests[1].output, 109);
  EXPECT_EQ(trace->skipped, 1);
}

TEST(Trace, ReadsBurstGptAndMooncake) {
  const auto burst = read(
      "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
      "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,Failure\n118,ChatGPT,417,276,693,API log\n");
  ASSERT_TRUE(burst.ok()) << burst.error().message;
  EXPECT_EQ(burst->format, "burstgpt");
  ASSERT_EQ(burst->requests.size(), 2u);
  EXPECT_EQ(burst->requests[1].arrival_s, 113);
  EXPECT_EQ(burst->requests[1].output, 276);

  const auto mooncake = read(R"({"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]})"
                             "\n"
                             R"({"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]})");
  ASSERT_TRUE(mooncake.ok()) << mooncake.error().message;
  EXPECT_EQ(mooncake->format, "mooncake");
  EXPECT_NEAR(mooncake->requests[1].arrival_s, 3.053, 1e-9);
}

TEST(Trace, ReadsWhatTheServerTakesOfARequest) {
  const auto none = read("Timestamp,Request tokens,Response tokens\n5,1,2\n");
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->requests[0].priority, 0);
  EXPECT_EQ(none->requests[0].precision, std::nullopt);
  const auto csv = read(
      "Priority,Timestamp,Request tokens,Response tokens,PRECISION\n-3,5,1,2,exact\n,6,1,2,\n7,4,1,2,fast\n"
      "2147483647,7,1,2,auto\n");
  const auto json = read(
      "{\"timestamp\": 5000, \"input_length\": 1, \"output_length\": 2, \"priority\": -3, \"precision\": \"exact\"}\n"
      "{\"timestamp\": 6000, \"input_length\": 1, \"output_length\": 2, \"priority\": null, \"precision\": null}\n"
      "{\"timestamp\": 4000, \"input_length\": 1, \"output_length\": 2, \"priority\": 7, \"precision\": \"fast\"}\n"
      "{\"timestamp\": 7000, \"input_length\": 1, \"output_length\": 2, \"priority\": 2147483647, "
      "\"precision\": \"auto\"}\n");
  for (const auto* trace : {&csv, &json}) {
    ASSERT_TRUE(trace->ok()) << trace->error().message;
    const auto& rows = (*trace)->requests;
    ASSERT_EQ(rows.size(), 4u);
    EXPECT_EQ(rows[0].priority, 7);
    EXPECT_EQ(rows[0].precision, PrecisionClass::kFast);
    EXPECT_EQ(rows[1].priority, -3);
    EXPECT_EQ(rows[1].precision, PrecisionClass::kExact);
    EXPECT_EQ(rows[2].priority, 0);
    EXPECT_EQ(rows[2].precision, std::nullopt);
    EXPECT_EQ(rows[3].priority, 2147483647);
    EXPECT_EQ(rows[3].precision, PrecisionClass::kAuto);
  }
}

TEST(Trace, PutsInOrderWhatIsNot) {
  const auto trace = read("Timestamp,Request tokens,Response tokens\n9,1,1\n3,2,2\n5,3,3\n");
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace->unsorted, 1);  // 3 after 9
  EXPECT_EQ(trace->requests[0].input, 2);
  EXPECT_EQ(trace->requests[2].arrival_s, 6);
}

TEST(Trace, RefusesWhatIsWrongAndNamesTheLine) {
  const std::string azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  const std::string burst = "Timestamp,Request tokens,Response tokens\n";
  const std::pair<std::string, const char*> cases[] = {
      {"", "no request"},
      {azure, "no request"},
      {"a,b\n", "line 1"},
      {azure + "2023-11-16 18:15:46,1\n", "line 2: has 2 columns"},
      {azure + "2023-13-16 18:15:46,1,1\n", "is not a time"},
      {azure + "2023-11-16 18:15:46+02:00,1,1\n", "is not a time"},
      {azure + "2023-11-16 18:15:46.,1,1\n", "is not a time"},
      {azure + "soon,1,1\n", "is not a time"},
      {azure + "2023-11-16 18:15:46,-1,1\n", "must be from 0"},
      {azure + "2023-11-16 18:15:46,1,99999999999999999999\n", "whole numbers"},
      {azure + "2023-11-16 18:15:46,1,1.5\n", "whole numbers"},
      {burst + "nan,1,1\n", "is not a time"},
      {burst + "inf,1,1\n", "is not a time"},
      {burst + "-3,1,1\n", "is not a time"},
      {burst + "1e300,1,1\n", "is not a time"},
      {burst + "1,1,99999999\n", "must be from 0"},
      {"{\"timestamp\": 1}\n", "line 1: timestamp, input_length"},
      {"{\"timestamp\": 1, \"input_length\": 1.5, \"output_length\": 2}\n", "whole numbers"},
      {"{\"timestamp\": 1, \"input_length\": 18446744073709551615, \"output_length\": 2}\n", "must be from 0"},
      {"{\"timestamp\":\n", "line 1: is not a JSON object"},
  };
  const std::string said = "Timestamp,Request tokens,Response tokens,priority,precision\n1,1,1,";
  const std::string json = "{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 2, ";
  const std::pair<std::string, const char*> more[] = {
      {said + "high,exact\n", "line 2: priority 'high': must be a whole number"},
      {said + "1.5,exact\n", "line 2: priority '1.5': must be a whole number"},
      {said + "2147483648,exact\n", "must be from -2147483648 to 2147483647"},
      {said + "1,fp16\n", "line 2: precision 'fp16': must be auto, exact or fast"},
      {json + "\"priority\": \"1\"}\n", "line 1: priority \"1\": must be a whole number"},
      {json + "\"priority\": 1.5}\n", "line 1: priority 1.5: must be a whole number"},
      {json + "\"priority\": 18446744073709551615}\n", "must be from -2147483648"},
      {json + "\"priority\": -9223372036854775808}\n", "must be from -2147483648"},
      {json + "\"precision\": 1}\n", "line 1: precision: must be auto"},
      {json + "\"precision\": \"\"}\n", "line 1: precision '': must be auto"},
  };
  std::vector<std::pair<std::string, const char*>> all(std::begin(cases), std::end(cases));
  all.insert(all.end(), std::begin(more), std::end(more));
  for (const auto& [text, named] : all) {
    const auto trace = read(text);
    ASSERT_FALSE(trace.ok()) << text;
    EXPECT_NE(trace.error().message.find(named), std::string::npos) << text << ": " << trace.error().message;
    EXPECT_TRUE(trace.error().message.starts_with("t: ")) << trace.error().message;
  }
}

TEST(Trace, BoundsWhatItHolds) {
  TraceLimits limits;
  limits.most_line_bytes = 1000;
  limits.most_rows = 3;
  const auto line = read(std::string(1 << 20, 'x'), limits);
  ASSERT_FALSE(line.ok());
  EXPECT_NE(line.error().message.find("more than 1000 bytes"), std::string::npos);
  const auto rows = read("Timestamp,Request tokens,Response tokens\n1,1,1\n2,1,1\n3,1,1\n4,1,1\n", limits);
  ASSERT_FALSE(rows.ok());
  EXPECT_NE(rows.error().message.find("more than 3 rows"), std::string::npos);
}

TEST(Trace, OnlyFilesAreRead) {
  const testing::ScratchFolder scratch;
  const auto folder = read_trace_file(scratch.path());
  ASSERT_FALSE(folder.ok());
  EXPECT_EQ(folder.error().message, scratch.path() + ": is not a file");
  const std::string path = scratch.path() + "/t.csv";
  const auto none = read_trace_file(path);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code, ErrorCode::kNotFound);
  std::ofstream(path) << "Timestamp,Request tokens,Response tokens\n1,2,3\n";
  EXPECT_TRUE(read_trace_file(path).ok());
  std::filesystem::create_symlink(path, scratch.path() + "/link.csv");
  EXPECT_TRUE(read_trace_file(scratch.path() + "/link.csv").ok());
}

Trace steady(int count) {
  Trace trace;
  for (int i = 0; i < count; ++i) trace.requests.push_back({0.1 * i, 10 + i % 7, 3});
  return trace;
}

TEST(Trace, SelectsByRate) {
  const Trace trace = steady(2000);  // 10 a second
  for (const double rate : {0.5, 2.0, 9.0, 30.0}) {
    const auto found = select(trace, {.rate = rate, .requests = 400});
    ASSERT_TRUE(found.ok());
    EXPECT_NEAR(found->rate(), rate, 1e-6 * rate);
    EXPECT_EQ(found->requests.front().arrival_s, 0);
  }
  EXPECT_EQ(select(trace, {.rate = 1, .seed = 3})->requests.size(),
            select(trace, {.rate = 1, .seed = 3})->requests.size());
  const auto fast = select(trace, {.speed = 4});
  EXPECT_NEAR(fast->rate(), 40, 1e-6);
  EXPECT_EQ(select(trace, {.requests = 5})->requests.size(), 5u);
  const auto shorter = select(trace, {.most_tokens = 15});
  for (const TraceRequest& request : shorter->requests) EXPECT_LE(request.input, 12);
}

TEST(Trace, SaysWhatLeavesNothingToReplay) {
  const auto said = [](const Trace& trace, const TraceSelection& selection) {
    const auto found = select(trace, selection);
    return found.ok() ? "" : found.error().message;
  };
  EXPECT_NE(said(steady(2000), {.most_tokens = 2}).find("--max-tokens"), std::string::npos);
  EXPECT_NE(said(steady(1), {.rate = 1}).find("--rate"), std::string::npos);
  EXPECT_NE(said(steady(3), {.rate = 1e-6}).find("--rate"), std::string::npos);
  // What a clock of nanoseconds cannot hold: first tokens came after no time at all.
  Trace far = steady(2);
  far.requests[1].arrival_s = 2e10;
  EXPECT_NE(said(far, {}).find("after 2e+10 s"), std::string::npos) << said(far, {});
  EXPECT_NE(said(steady(20), {.speed = 1e-10}).find("--speed"), std::string::npos);
  EXPECT_EQ(said(far, {.speed = 100}), "");
}

}  // namespace
}  // namespace nfp
