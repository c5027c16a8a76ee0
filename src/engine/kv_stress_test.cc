// Randomised runs of the engine over a runner that keeps what every slot of the KV cache holds: a step must find behind
// its tokens exactly what the sequence's earlier tokens were, whoever had the blocks before; and exact requests must
// find only what FP16 steps wrote.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "engine/engine.h"
#include "policy/slo_policy.h"
#include "policy/testing/step_tables.h"

namespace nfp {
namespace {

constexpr int32_t kTokens = 100, kBlock = 4;

struct Kv {
  uint64_t prefix = 0;  // all tokens up to this one
  bool exact = false;   // all of them were computed in FP16
};

uint64_t after(uint64_t prefix, int32_t token) {
  return (prefix ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15ull + 1;
}

// Steps run when they are submitted, in order, as those of a stream do.
class KvRunner final : public StepRunner {
 public:
  KvRunner(int32_t context, int32_t blocks, int32_t sequences)
      : context_(context), cache_(static_cast<size_t>(blocks * kBlock)), slots_(static_cast<size_t>(sequences)) {}
  int32_t vocab() const override { return kTokens; }
  int32_t max_context() const override { return context_; }
  int32_t max_in_flight() const override { return 2; }
  Status start(const Sequence& s) override {
    EXPECT_GE(s.history_slot, 0);
    EXPECT_TRUE(std::find(s.tokens.begin(), s.tokens.end(), kPendingToken) == s.tokens.end());
    slots_[static_cast<size_t>(s.history_slot)] = s.tokens;
    return ok_status();
  }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    StepOutput output;
    std::vector<int32_t> row;
    std::set<int32_t> written;
    std::set<int32_t> history;
    EXPECT_FALSE(plan.items.empty());
    int32_t sum = 0;
    bool chunks = false;
    for (const ScheduledSequence& item : plan.items) {
      const Sequence& s = *item.sequence;
      sum += item.count;
      EXPECT_GT(item.count, 0);
      EXPECT_TRUE(history.insert(s.history_slot).second);
      const bool apart = plan.exact_singles && item.count == 1;
      if (plan.exact_singles) {
        EXPECT_TRUE(!apart || !chunks);
        chunks = chunks || !apart;
      }
      const bool fp16 = is_exact(precision) || apart;
      EXPECT_TRUE(fp16 || !s.wants_exact());
      std::vector<int32_t> tokens = s.tokens;
      if (item.source >= 0) {
        EXPECT_EQ(item.count, 1);
        EXPECT_EQ(tokens.back(), kPendingToken);
        tokens.back() = previous_.at(static_cast<size_t>(item.source));
      }
      const int32_t end = item.first + item.count;
      EXPECT_LE(static_cast<size_t>(end), s.blocks.size() * kBlock);
      uint64_t prefix = 0;
      bool exact = true;
      for (int32_t t = 0; t < end; ++t) {
        const int32_t token = tokens[static_cast<size_t>(t)];
        EXPECT_NE(token, kPendingToken);
        prefix = after(prefix, token);
        const int32_t slot = s.blocks[static_cast<size_t>(t / kBlock)] * kBlock + t % kBlock;
        Kv& kv = cache_[static_cast<size_t>(slot)];
        if (t < item.first) {
          EXPECT_EQ(kv.prefix, prefix) << s.request.id << " token " << t << " of " << end;
          exact = exact && kv.exact;
          EXPECT_TRUE(kv.exact || !s.wants_exact()) << s.request.id;
        } else {
          EXPECT_TRUE(written.insert(slot).second);
          kv = {prefix, exact && fp16};
        }
      }
      for (int32_t t = 0; t < item.first; ++t) {
        // Nobody writes what another one of the step reads.
        EXPECT_FALSE(written.contains(s.blocks[static_cast<size_t>(t / kBlock)] * kBlock + t % kBlock));
      }
      EXPECT_TRUE(exact || !s.exact || s.scheduled != s.computed) << "the scheduler takes it for exact";
      if (!item.samples) continue;
      EXPECT_EQ(end, s.size());
      auto& seen = slots_[static_cast<size_t>(s.history_slot)];
      EXPECT_EQ(seen, tokens);
      OutputToken& token = output.sampled.emplace_back();
      const uint32_t mix = static_cast<uint32_t>(prefix >> 20);
      token.token = static_cast<int32_t>(mix % 29u == 0 ? 2u : 4u + mix % 6u);
      seen.push_back(token.token);
      row.push_back(token.token);
    }
    EXPECT_EQ(sum, plan.tokens);
    previous_ = std::move(row);
    in_flight_.push_back(std::move(output));
    return next_ticket_++;
  }
  Result<StepOutput> collect(StepTicket ticket) override {
    EXPECT_EQ(ticket + in_flight_.size(), next_ticket_);
    StepOutput output = std::move(in_flight_.front());
    in_flight_.pop_front();
    return output;
  }

 private:
  int32_t context_;
  std::vector<Kv> cache_;
  std::vector<std::vector<int32_t>> slots_;
  std::vector<int32_t> previous_;
  std::deque<StepOutput> in_flight_;
  StepTicket next_ticket_ = 0;
};

// Is not ready now and then, and gives up now and then.
class Moody final : public TokenConstraint {
 public:
  explicit Moody(uint32_t seed) : random_(seed) {}
  bool ready(std::chrono::microseconds) override { return random_() % 3 != 0; }
  bool fill(std::span<uint32_t>) override { return false; }
  bool accept(int32_t) override { return random_() % 40 != 0; }

 private:
  std::mt19937 random_;
};

TEST(KvStress, EveryTokenFindsItsOwnPast) {
  uint64_t preemptions = 0, hits = 0, switches = 0;
  for (uint32_t seed = 0; seed < 150 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
    EngineConfig o;
    o.limits.max_sequences = 1 + draw(8);
    o.limits.max_step_tokens = std::max(o.limits.max_sequences, 3 + draw(40));
    o.kv_blocks = 6 + draw(30);
    o.block_size = kBlock;
    o.end_ids = {2};
    o.steps_in_flight = 1 + draw(2);
    o.fp8 = Precision::kFp8W8A8;
    const bool exact_decode = draw(2) == 0;
    EngineClock::time_point now{};
    o.now = [&] { return now += std::chrono::microseconds(200 + random() % 2000); };
    o.targets = {.ttft_s = draw(2) == 0 ? 1e-3 : 0.1, .itl_s = draw(2) == 0 ? 1e-3 : 0.02};
    KvRunner runner(120, o.kv_blocks, o.limits.max_sequences);
    std::unique_ptr<PrecisionPolicy> policy;
    const int32_t which = draw(4);
    if (which < 2) {
      SloOptions slo;
      slo.exact_decode = exact_decode;
      slo.missed = std::array{SloOptions::Missed::kLast, SloOptions::Missed::kShed,
                              SloOptions::Missed::kAsTheyCome}[static_cast<size_t>(draw(3))];
      policy = std::move(make_slo_policy(std::move(StepModel::fit(testing::synthetic_table())).value(), slo)).value();
    } else {
      policy = std::move(parse_policy(which == 2 ? "alternate:1" : "threshold:8", Precision::kFp8W8A8)).value();
    }
    Engine engine(o, &runner, nullptr, std::move(policy));
    std::map<std::string, int32_t> open;  // tokens so far
    std::map<std::string, std::optional<FinishReason>> ends;
    const auto take = [&](std::vector<RequestOutput> outputs) {
      for (RequestOutput& output : outputs) {
        ASSERT_FALSE(ends[output.id].has_value()) << output.id;
        open[output.id] += static_cast<int32_t>(output.tokens.size());
        if (output.finish) ends[output.id] = output.finish, open.erase(output.id);
        EXPECT_LE(output.usage.prompt.fp16 + output.usage.prompt.fp8, output.usage.prompt_tokens);
      }
    };
    std::set<std::string> cancelled;
    const int32_t room = engine.bounds().max_context;
    int made = 0;
    for (int i = 0; i < 60; ++i) {
      for (int n = draw(4); n > 0; --n) {
        Request r;
        r.id = std::to_string(made++);
        const int32_t length = 1 + draw(draw(4) == 0 ? room - 1 : std::min(room - 1, 20));
        // Few first tokens, so that prefixes are shared.
        const int32_t family = draw(2);
        for (int32_t t = 0; t < length; ++t) r.prompt.push_back(t < 16 ? 4 + family : 4 + draw(2));
        if (draw(3) > 0) r.sampling.max_tokens = 1 + draw(std::min(room - length, 30));
        if (draw(4) == 0) r.sampling.ignore_eos = true;
        r.precision = static_cast<PrecisionClass>(draw(3));
        r.priority = draw(3) - 1;
        if (draw(5) == 0) r.constraint = std::make_unique<Moody>(seed + static_cast<uint32_t>(i));
        if (draw(5) == 0) r.slo_ttft_s = 1e-3 * (1 + draw(300));
        const std::string id = r.id;
        if (engine.submit(std::move(r)).ok()) open[id] = 0;
      }
      for (int n = draw(5); n > 0; --n) take(engine.step());
      if (draw(3) == 0 && !open.empty()) {
        auto one = open.begin();
        std::advance(one, draw(static_cast<int32_t>(open.size())));
        const std::string id = one->first;
        EXPECT_EQ(engine.cancel(id), cancelled.insert(id).second);
      }
      if (::testing::Test::HasFailure()) return;
    }
    int left = 0;
    for (; !engine.idle() && left < 20000; ++left) take(engine.step());
    EXPECT_TRUE(engine.idle()) << open.size() << " requests left";
    EXPECT_TRUE(open.empty());
    EXPECT_EQ(engine.stats().kv_blocks_used, 0);
    preemptions += engine.stats().preemptions;
    hits += engine.stats().prefix_hits;
    switches += engine.stats().precision_switches;
  }
  EXPECT_GT(preemptions, 1000u);
  EXPECT_GT(hits, 1000u);
  EXPECT_GT(switches, 1000u);
}

}  // namespace
}  // namespace nfp
