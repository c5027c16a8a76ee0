#include "replay/simulator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"
#include "replay/report.h"
#include "replay/step_source.h"

namespace nfp {
namespace {

// A machine of 10 ms and 1 ms a token in FP16, of 10 ms and half a millisecond a token in FP8.
StepModel plain_model() {
  StepTable table;
  table.model = "plain";
  table.max_step_tokens = 1000;
  table.max_sequences = 100;
  table.levels = {{Precision::kFp16, 0}, {Precision::kFp8W8A8, 1}};
  for (const size_t level : {0, 1}) {
    table.steps.push_back({level, 0, 0, 1, 10, 10 + (level == 0 ? 1.0 : 0.5), 1});
    table.steps.push_back({level, 0, 0, 1, 1000, 10 + (level == 0 ? 1.0 : 0.5), 1});
    for (const int32_t tokens : {2, 100, 1000}) {
      table.steps.push_back({level, tokens, 0, 0, 0, 10 + (level == 0 ? 1.0 : 0.5) * tokens, 1});
    }
  }
  return std::move(StepModel::fit(table)).value();
}

SimulationOptions small() {
  SimulationOptions options;
  options.max_step_tokens = 100;
  options.max_sequences = 8;
  return options;
}

ReplayOutcome play(const std::vector<TraceRequest>& requests, const char* policy, const SimulationOptions& options) {
  Trace trace;
  trace.requests = requests;
  const StepModel model = plain_model();
  const auto make = [&]() -> Result<std::unique_ptr<PrecisionPolicy>> {
    if (const auto levels = parse_slo_levels(policy)) return make_slo_policy(model, {.levels = *levels});
    return parse_policy(policy, Precision::kFp8W8A8);
  };
  auto outcome = simulate(trace, model, make, options);
  EXPECT_TRUE(outcome.ok()) << outcome.error().message;
  return std::move(outcome).value();
}

TEST(Simulator, ShedRequestsEndAtOnceAndTheOthersAreInTime) {
  // Ten prompts of a tenth of a second in FP16 and 60 ms in FP8 come at once; targets are half a second.
  Trace trace;
  for (int i = 0; i < 20; ++i) trace.requests.push_back({0, 90, 2});
  const StepModel model = plain_model();
  const auto make = [&] { return make_slo_policy(model, {.missed = SloOptions::Missed::kShed}); };
  const auto outcome = simulate(trace, model, make, small());
  ASSERT_TRUE(outcome.ok()) << outcome.error().message;
  int done = 0;
  for (const ReplayedRequest& request : outcome->requests) {
    if (!request.done) continue;
    ++done;
    EXPECT_LE(request.ttft_s, 5 * alone(model, request.asked, 100).ttft_s);
  }
  EXPECT_GE(done, 5);
  EXPECT_LT(done, 20);
}

TEST(Simulator, SaysThatItsClockWouldOverflow) {
  StepModel model = plain_model();
  model.scale(1e10);
  Trace trace;
  for (int i = 0; i < 20; ++i) trace.requests.push_back({0, 90, 2});
  const auto make = [&] { return make_slo_policy(model, {}); };
  const auto outcome = simulate(trace, model, make, small());
  ASSERT_FALSE(outcome.ok());
  EXPECT_NE(outcome.error().message.find("lower --slowdown"), std::string::npos) << outcome.error().message;
}

TEST(Report, DivergenceFollowsTheLevels) {
  EXPECT_TRUE(parse_kl({})->empty());
  const auto curve = parse_kl({"0.5:0.002", "1:0.01"});
  ASSERT_TRUE(curve.ok());
  EXPECT_DOUBLE_EQ(kl_at(*curve, 0), 0);
  EXPECT_DOUBLE_EQ(kl_at(*curve, 0.25), 0.001);
  EXPECT_DOUBLE_EQ(kl_at(*curve, 0.75), 0.006);
  EXPECT_DOUBLE_EQ(kl_at(*curve, 1), 0.01);
  for (const char* wrong : {"0.5:0.1", "1", "1:", "1:x", "0:1", "2:1", "1:nan", "1:-1", "1:0"}) {
    EXPECT_FALSE(parse_kl({wrong}).ok()) << wrong;
  }
  ReplayOutcome outcome;
  outcome.requests.resize(1);
  outcome.tokens_by_share = {{0, 600}, {0.5, 200}, {1, 200}};
  const ReplaySummary row = summarize(outcome, "slo", nullptr, 100, {}, *curve);
  EXPECT_DOUBLE_EQ(*row.fp8_weights, 0.3);
  EXPECT_DOUBLE_EQ(*row.kl_ratio, (0.2 * 0.002 + 0.2 * 0.01) / 0.01);
}

TEST(Simulator, OneRequestTakesWhatItsStepsTake) {
  // 60 tokens at 70 ms, then two steps of one token at 11 ms.
  const ReplayOutcome outcome = play({{0, 60, 3}}, "fp16", small());
  const ReplayedRequest& request = outcome.requests.front();
  EXPECT_TRUE(request.done);
  EXPECT_NEAR(request.ttft_s, 0.070, 1e-4);
  EXPECT_NEAR(request.tpot_s, 0.011, 1e-4);
  EXPECT_NEAR(request.e2e_s, 0.092, 2e-4);
  EXPECT_EQ(outcome.steps, 3u);
  EXPECT_EQ(request.fp16_tokens, 63);
  EXPECT_EQ(outcome.tokens_by_share, (std::map<double, int64_t>{{0.0, 62}}));  // the last token is not computed on
  const AloneTimes times = alone(plain_model(), {0, 60, 3}, 100);
  EXPECT_NEAR(times.ttft_s, request.ttft_s, 1e-6);
  EXPECT_NEAR(times.e2e_s, request.e2e_s, 1e-6);
}

TEST(Simulator, ChunksAndBatchesAsTheSchedulerDoes) {
  // The first prompt takes steps of 100 and 50 tokens; the second fills the second step to 100 (50 of its 70) while it
  // waits from 20 ms on; the third step has a token of the first and the last 20 of the second: 31 ms.
  const ReplayOutcome outcome = play({{0, 150, 2}, {0.02, 70, 1}}, "fp16", small());
  EXPECT_NEAR(outcome.requests[0].ttft_s, 0.110 + 0.110, 1e-3);
  EXPECT_NEAR(outcome.requests[0].e2e_s, 0.220 + 0.031, 1e-3);
  EXPECT_NEAR(outcome.requests[1].ttft_s, 0.251 - 0.02, 1e-3);
  EXPECT_EQ(outcome.steps, 3u);
}

TEST(Simulator, PrecisionFollowsThePolicy) {
  // 90 tokens are more than 50: FP8, 55 ms; then FP16.
  const ReplayOutcome outcome = play({{0, 90, 2}}, "threshold:50", small());
  EXPECT_NEAR(outcome.requests[0].ttft_s, 0.055, 1e-4);
  EXPECT_NEAR(outcome.requests[0].e2e_s, 0.055 + 0.011, 1e-4);
  EXPECT_EQ(outcome.requests[0].fp8_tokens, 91);
  EXPECT_EQ(outcome.requests[0].fp16_tokens, 1);
  EXPECT_EQ(outcome.switches, 1u);
}

TEST(Simulator, RequestsHaveTheTracesPriorityAndPrecision) {
  // One prompt a step; the last of six that came at once goes first.
  std::vector<TraceRequest> requests(6, TraceRequest{0, 100, 1});
  requests[5].priority = -1;
  const ReplayOutcome first = play(requests, "fp16", small());
  for (int i = 0; i < 5; ++i) EXPECT_GT(first.requests[i].ttft_s, first.requests[5].ttft_s) << i;
  requests[5].priority = 0;
  requests[2].precision = PrecisionClass::kExact;
  const ReplayOutcome exact = play(requests, "fp8-w8a8", small());
  for (int i = 0; i < 6; ++i) EXPECT_EQ(exact.requests[i].fp8_tokens, i == 2 ? 0 : 101) << i;
}

// Shares of all, of exact requests and of others that are within 5 times of alone; the longest wait for a first token.
struct Attained {
  double all = 0, exact = 0, others = 0, longest_s = 0;
};
// More than the tests' machine can do, in FP16 at least: prompts and pauses by chance, with exponential lengths.
Attained attained_under_overload(double rate, double exact) {
  std::mt19937_64 random(1);
  const auto share = [&] { return static_cast<double>(random() >> 11) * 0x1.0p-53; };
  Trace trace;
  double now = 0;
  for (int i = 0; i < 600; ++i) {
    now += -std::log(1 - share()) / rate;
    const auto prompt = static_cast<int32_t>(1 + std::min(6000.0, -1000 * std::log(1 - share())));
    const auto answer = static_cast<int32_t>(20 + 230 * share());
    trace.requests.push_back({now, prompt, answer});
    if (share() < exact) trace.requests.back().precision = PrecisionClass::kExact;
  }
  const StepModel model = std::move(StepModel::fit(testing::synthetic_table())).value();
  SimulationOptions options;
  options.max_sequences = 64;
  const auto outcome = simulate(
      trace, model, [&] { return make_slo_policy(model, {}); }, options);
  EXPECT_TRUE(outcome.ok()) << outcome.error().message;
  const ReplaySummary row = summarize(*outcome, "slo", &model, options.step_tokens(), {});
  Attained found{*row.tight, 0, 0, row.ttft.worst};
  if (row.by_precision.empty()) return found;
  found.exact = *row.by_precision.at("exact").tight;
  found.others = *row.by_precision.at("auto").tight;
  return found;
}

// Turns of FP8 steps and exact requests' pay, or are not taken: no fewer are in time than where all are in FP16.
TEST(Simulator, HalfOfTheRequestsExactAttainNoLessThanAllInFp16) {
  for (const double rate : {13.0, 14.0, 16.0}) {
    const Attained half = attained_under_overload(rate, 0.5), whole = attained_under_overload(rate, 1);
    EXPECT_GE(half.all, whole.all) << rate;
    EXPECT_GE(half.exact, half.others - 0.1) << rate;
    EXPECT_LE(half.longest_s, whole.longest_s) << rate;
    const Attained few = attained_under_overload(rate, 0.1);
    EXPECT_GE(few.all, half.all) << rate;
    EXPECT_GE(few.exact, few.others - 0.1) << rate;
  }
}

TEST(Report, SaysWaitsByPriorityAndPrecision) {
  std::vector<TraceRequest> requests(6, TraceRequest{0, 100, 1});  // one prompt a step of 110 ms
  const StepModel model = plain_model();
  const auto summary = [&] { return summarize(play(requests, "fp16", small()), "fp16", &model, 100, {}); };
  EXPECT_TRUE(summary().by_priority.empty());
  EXPECT_TRUE(summary().by_precision.empty());
  requests[4].priority = requests[5].priority = -1;
  requests[0].precision = PrecisionClass::kExact;
  const ReplaySummary row = summary();
  ASSERT_EQ(row.by_priority.size(), 2u);
  const ReplayGroup &first = row.by_priority.at(-1), &others = row.by_priority.at(0);
  EXPECT_EQ(first.requests, 2);
  EXPECT_EQ(others.requests, 4);
  EXPECT_NEAR(first.ttft.worst, 0.22, 1e-3);
  EXPECT_NEAR(others.ttft.worst, 0.66, 1e-3);
  EXPECT_DOUBLE_EQ(*first.tight, 1);
  EXPECT_DOUBLE_EQ(*others.tight, 0.75);
  EXPECT_DOUBLE_EQ(*row.tight, 5.0 / 6);
  EXPECT_EQ(row.by_precision.at("exact").requests, 1);
  EXPECT_EQ(row.by_precision.at("auto").requests, 5);
  ReplayReport report;
  report.rows = {row};
  EXPECT_NE(to_text(report).find("  priority -1: 2 requests, 100.0 % tight"), std::string::npos) << to_text(report);
  EXPECT_NE(to_text(report).find("  precision exact: 1 request,"), std::string::npos) << to_text(report);
  EXPECT_NE(to_html(report).find("<h2>By priority</h2>"), std::string::npos);
}

std::vector<TraceRequest> burst() {
  std::vector<TraceRequest> requests;
  requests.reserve(120);
  for (int i = 0; i < 120; ++i) {
    const int pauses = i / 40;
    requests.push_back({0.05 * i + 3 * pauses, 20 + 37 * i % 90, 1 + 13 * i % 40});
  }
  return requests;
}

TEST(Simulator, ASlowerMachineKeepsTheTargetsOfTheTable) {
  // 60 tokens take 70 ms by the model that is given, which is of a machine half as fast as the table's: the target is
  // five times 35 ms, and FP16 (70 ms) and two steps of 11 ms are within it.
  SimulationOptions options = small();
  options.slowdown = 2;
  const std::vector<TraceRequest> requests(3, TraceRequest{0, 60, 1});
  const ReplayOutcome relaxed = play(requests, "slo", small()), pressed = play(requests, "slo", options);
  EXPECT_EQ(relaxed.requests[2].fp8_tokens, 0);
  EXPECT_GT(pressed.requests[2].fp8_tokens, 0);
}

TEST(Simulator, ChangesAreCountedByReason) {
  const ReplayOutcome outcome = play(burst(), "slo", small());
  uint64_t sum = 0;
  for (const auto& [reason, count] : outcome.switch_reasons) sum += count;
  EXPECT_EQ(sum, outcome.switches);
  EXPECT_GT(outcome.switch_reasons.at("first_tokens"), 0u);
  EXPECT_GT(outcome.switch_reasons.at("room"), 0u);
  const ReplaySummary row = summarize(outcome, "slo", nullptr, 100, {});
  ReplayReport report;
  report.rows = {row};
  const std::string text = to_text(report);
  EXPECT_NE(text.find("precision changed"), std::string::npos) << text;
  EXPECT_NE(text.find("for first tokens in time"), std::string::npos) << text;
}

TEST(Simulator, ReplicasShareTheRequests) {
  SimulationOptions options = small();
  options.replicas = 2;
  const ReplayOutcome outcome = play({{0, 60, 1}, {0.001, 60, 1}, {0.002, 60, 1}}, "fp16", options);
  EXPECT_NEAR(outcome.requests[0].ttft_s, 0.070, 1e-4);
  EXPECT_NEAR(outcome.requests[1].ttft_s, 0.070, 1e-4);
  EXPECT_NEAR(outcome.requests[2].ttft_s, 0.070 + 0.068, 1e-4);  // behind the first
}

TEST(Simulator, StepsInFlightDelayAnArrivalByAStep) {
  SimulationOptions options = small();
  options.steps_in_flight = 2;
  const ReplayOutcome outcome = play({{0, 60, 3}}, "fp16", options);
  EXPECT_NEAR(outcome.requests[0].e2e_s, 0.092, 2e-4);
}

TEST(Simulator, TheSameSeedGivesTheSameRun) {
  SimulationOptions options = small();
  options.noise = 0.2;
  const ReplayOutcome one = play(burst(), "slo", options), two = play(burst(), "slo", options);
  ASSERT_EQ(one.requests.size(), two.requests.size());
  for (size_t i = 0; i < one.requests.size(); ++i) EXPECT_EQ(one.requests[i].e2e_s, two.requests[i].e2e_s);
  options.seed = 2;
  EXPECT_NE(play(burst(), "slo", options).seconds, one.seconds);
}

TEST(Simulator, SloKeepsMoreThanFirstComeAndUsesLessFp8ThanAlwaysFp8) {
  const StepModel model = plain_model();
  const auto row = [&](const char* policy) {
    return summarize(play(burst(), policy, small()), policy, &model, 100, {});
  };
  const ReplaySummary first_come = row("fp16"), slo = row("slo"), fp8 = row("slo-fp8");
  EXPECT_GT(*slo.tight, *first_come.tight);
  EXPECT_GE(*slo.tight, *fp8.tight - 0.1);
  EXPECT_GT(slo.fp16_share, 0.2);
  EXPECT_EQ(fp8.fp16_share, 0);
  EXPECT_EQ(slo.failed, 0);
}

TEST(Simulator, SteadyLoadDoesNotFlap) {
  std::vector<TraceRequest> steady;
  steady.reserve(400);
  for (int i = 0; i < 400; ++i) steady.push_back({0.08 * i, 60, 5});
  const ReplayOutcome outcome = play(steady, "slo", small());
  EXPECT_LE(static_cast<double>(outcome.switches), 0.02 * static_cast<double>(outcome.steps));
}

TEST(Simulator, ATightKvCachePreemptsAndFinishes) {
  SimulationOptions options = small();
  options.kv_tokens = 320;
  for (const char* policy : {"fp16", "slo"}) {
    const ReplayOutcome outcome = play(burst(), policy, options);
    for (const ReplayedRequest& request : outcome.requests) EXPECT_TRUE(request.done);
  }
}

TEST(Report, PercentilesAreOfTheNearestRank) {
  const Percentiles p = percentiles({4, 1, 3, 2});
  EXPECT_EQ(p.p50, 2);
  EXPECT_EQ(p.p90, 4);
  EXPECT_EQ(p.mean, 2.5);
  EXPECT_EQ(p.worst, 4);
  EXPECT_EQ(percentiles({}).p99, 0);
}

TEST(Report, SharesOfOwnTargetsAreOfAllRequests) {
  ReplayOutcome outcome;
  outcome.requests.resize(4);
  EXPECT_FALSE(summarize(outcome, "server", nullptr, 100, {}).own);
  for (int i = 0; i < 3; ++i) outcome.requests[i].done = true;
  outcome.requests[0].own_met = outcome.requests[1].own_met = true;
  outcome.requests[2].own_met = false;
  EXPECT_DOUBLE_EQ(*summarize(outcome, "server", nullptr, 100, {}).own, 0.5);
}

TEST(Report, CountsWhatIsWithinTheLimits) {
  const ReplayOutcome outcome = play({{0, 60, 3}, {10, 90, 3}}, "fp16", small());
  const GoodputLimits limits = *parse_goodput({"ttft:80", "tpot:20"});
  const StepModel model = plain_model();
  const ReplaySummary row = summarize(outcome, "fp16", &model, 100, limits);
  EXPECT_NEAR(*row.goodput, 1 / outcome.seconds, 1e-9);  // the second takes 100 ms to its first token
  EXPECT_EQ(*row.tight, 1);
  EXPECT_EQ(row.fp16_share, 1);
  for (const char* wrong : {"ttft", "ttft:", "ttft:x", "tpot:-1", "itl:5", "e2el:nan"}) {
    EXPECT_FALSE(parse_goodput({wrong}).ok()) << wrong;
  }
  ReplayReport report;
  report.command = "nestedfp replay <&>";
  report.rows = {row};
  report.outcomes = {outcome};
  EXPECT_NE(to_html(report).find("&lt;&amp;&gt;"), std::string::npos);
  EXPECT_NE(to_csv(report).find("fp16,0.1"), std::string::npos) << to_csv(report);
  EXPECT_NE(to_json(report).find("\"attainment_tight\": 1.0"), std::string::npos);
}

TEST(StepSource, ReadsOtherEnginesMeasurements) {
  const char* text = R"({"rows": [
    {"model": "A-8B", "engine": "e 1", "precision": "fp16", "kind": "decode", "sequences": 4, "tokens": 4, "context_per_sequence": 10, "ms": 5},
    {"model": "A-8B", "engine": "e 1", "precision": "fp16", "kind": "decode", "sequences": 4, "tokens": 4, "context_per_sequence": 10, "ms": 7},
    {"model": "A-8B", "engine": "e 1", "precision": "fp8", "kind": "prefill", "sequences": 1, "tokens": 64, "context_per_sequence": 64, "ms": 3},
    {"model": "B", "engine": "e 1", "precision": "fp8", "kind": "prefill", "sequences": 1, "tokens": 64, "context_per_sequence": 64, "ms": 3}]})";
  const auto table = parse_step_rows(text, "t", {"8B", ""});
  ASSERT_TRUE(table.ok()) << table.error().message;
  ASSERT_EQ(table->steps.size(), 2u);
  EXPECT_EQ(table->steps[0].ms, 6);
  EXPECT_EQ(table->steps[0].samples, 2);
  EXPECT_EQ(table->steps[1].prefill_tokens, 64);
  EXPECT_FALSE(parse_step_rows(text, "t", {"C", ""}).ok());
  const std::string row =
      R"({"precision": "fp16", "kind": "decode", "tokens": 4, "context_per_sequence": 512, "ms": 6,)";
  const auto engine = [&](const std::string& asked) {
    const auto found = parse_step_rows(R"({"rows": [)" + row + R"("model": "A", "engine": "v1"},)" + row +
                                           R"("model": "A", "engine": "v1, patched"}]})",
                                       "t", {"A", asked});
    return found.ok() ? found->device : "";
  };
  EXPECT_EQ(engine("v1"), "v1");  // though the other's name contains it
  EXPECT_EQ(engine("patched"), "v1, patched");
  EXPECT_EQ(engine("v"), "");
  EXPECT_FALSE(parse_step_rows(text, "t", {"", ""}).ok());  // two models
  EXPECT_FALSE(parse_step_rows("[]", "t", {}).ok());
  EXPECT_FALSE(parse_step_rows(R"({"rows": [7]})", "t", {}).ok());
  EXPECT_FALSE(parse_step_rows(R"({"rows": [{"model": "A", "ms": -1}]})", "t", {}).ok());
}

}  // namespace
}  // namespace nfp
