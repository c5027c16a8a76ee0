// Randomised runs of the engine over a runner that keeps what every slot of the KV cache holds: a step must find behind
// its tokens exactly what the sequence's earlier tokens were, whoever had the blocks before; and exact requests must
// find only what FP16 steps wrote. Of a step's draft tokens all are written, also those that are wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <numeric>
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

int32_t next_after(uint64_t prefix) {
  const auto mix = static_cast<uint32_t>(prefix >> 20);
  return static_cast<int32_t>(mix % 29u == 0 ? 2u : 4u + mix % 6u);
}

// Steps run when they are submitted, in order, as those of a stream do.
class KvRunner final : public StepRunner {
 public:
  // Of what may fail, every `failing`-th does; 0 = none.
  KvRunner(int32_t context, int32_t blocks, int32_t sequences, uint32_t failing)
      : context_(context),
        cache_(static_cast<size_t>(blocks * kBlock)),
        slots_(static_cast<size_t>(sequences)),
        failing_(failing) {}
  int32_t vocab() const override { return kTokens; }
  int32_t max_context() const override { return context_; }
  int32_t max_in_flight() const override { return 2; }
  int32_t max_drafts(int32_t) const override { return 4; }
  int32_t hidden() const override { return 2; }
  Status start(const Sequence& s) override {
    if (fails()) return error(ErrorCode::kResource, "no room for its history");
    EXPECT_GE(s.history_slot, 0);
    EXPECT_TRUE(std::find(s.tokens.begin(), s.tokens.end(), kPendingToken) == s.tokens.end());
    slots_[static_cast<size_t>(s.history_slot)] = s.tokens;
    return ok_status();
  }
  Result<StepTicket> submit(const StepPlan& plan, Precision precision) override {
    if (fails()) return error(ErrorCode::kResource, "no memory for the step");
    StepOutput output;
    std::vector<int32_t> row;
    std::set<int32_t> written;
    std::set<int32_t> history;
    EXPECT_FALSE(plan.items.empty());
    const bool drafts = plan.drafts() > 0;
    EXPECT_TRUE(!drafts || in_flight_.empty());
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
      add_hidden(item, output);
      auto& scores = output.prompt_logprobs.emplace_back();
      for (int32_t t = item.first + 1; s.request.sampling.prompt_logprobs && t <= end && t < s.prompt_size(); ++t) {
        scores.emplace_back().token = s.request.prompt[static_cast<size_t>(t)];
      }
      EXPECT_EQ(item.samples, end == s.size() && !s.pooled());
      if (!item.samples) continue;
      EXPECT_EQ(end, s.size());
      auto& seen = slots_[static_cast<size_t>(s.history_slot)];
      EXPECT_EQ(seen, tokens);
      const auto sampled = [&] {
        OutputToken token;
        token.token = next_after(prefix);
        token.finite = !fails();
        seen.push_back(token.token);
        return token;
      };
      output.sampled.push_back(sampled());
      row.push_back(output.sampled.back().token);
      if (drafts) output.accepted.emplace_back();
      EXPECT_LE(static_cast<size_t>(end + item.drafts), s.blocks.size() * kBlock);
      EXPECT_TRUE(item.drafts == 0 || (is_exact(precision) && !s.request.constraint && !s.no_drafts));
      bool right = true;
      for (int32_t t = end; t < end + item.drafts; ++t) {
        right = right && random_() % 3 != 0;
        prefix = after(prefix, right ? seen.back() : kTokens + t);
        const int32_t slot = s.blocks[static_cast<size_t>(t / kBlock)] * kBlock + t % kBlock;
        EXPECT_TRUE(written.insert(slot).second);
        cache_[static_cast<size_t>(slot)] = {prefix, exact};
        if (right) output.accepted.back().push_back(sampled());
      }
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
    if (fails()) return error(ErrorCode::kUnsupported, "a key is beyond FP16's range");
    return output;
  }

 private:
  bool fails() { return failing_ > 0 && random_() % failing_ == 0; }
  // Of a hidden state: the token and its position.
  void add_hidden(const ScheduledSequence& item, StepOutput& output) {
    const int32_t count = pooled_rows(item), end = item.first + item.count;
    std::vector<float>& values = states_.emplace_back();
    for (int32_t position = end - count; position < end; ++position) {
      values.push_back(static_cast<float>(item.sequence->tokens[static_cast<size_t>(position)]));
      values.push_back(static_cast<float>(position));
    }
    output.hidden.push_back({values.data(), DType::kF32, 2, end - count, count});
    if (states_.size() > 1000) states_.pop_front();
  }

  int32_t context_;
  std::vector<Kv> cache_;
  std::vector<std::vector<int32_t>> slots_;
  std::vector<int32_t> previous_;
  std::deque<StepOutput> in_flight_;
  std::deque<std::vector<float>> states_;  // a deque: what is in it stays where it is
  StepTicket next_ticket_ = 0;
  uint32_t failing_;
  std::mt19937 random_;
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

// What a request must get.
struct Awaited {
  Awaited() = default;
  Awaited(const Request& r, int32_t room)
      : prompt(r.prompt), pooling(r.pooling), scored(r.sampling.prompt_logprobs.has_value()) {
    grammar = r.constraint != nullptr;
    most = r.prompt_only ? 1 : r.sampling.max_tokens.value_or(room - static_cast<int32_t>(prompt.size()));
    ends = r.sampling.stop_token_ids;
    if (!r.sampling.ignore_eos || grammar) ends.push_back(2);
    for (const int32_t token : prompt) prefix = after(prefix, token);
  }
  void take(const RequestOutput& output) {
    const bool begins = tokens == 0 && !output.tokens.empty();
    for (const OutputToken& token : output.tokens) {
      EXPECT_EQ(token.token, next_after(prefix)) << output.id << " token " << tokens;
      prefix = after(prefix, token.token);
      last = token.token;
      ++tokens;
    }
    EXPECT_EQ(!output.prompt_logprobs.empty(), scored && begins);
    for (size_t i = 0; i < output.prompt_logprobs.size(); ++i) EXPECT_EQ(output.prompt_logprobs[i].token, prompt[i]);
    if (!output.prompt_logprobs.empty()) {
      EXPECT_EQ(output.prompt_logprobs.size(), prompt.size());
    }
    EXPECT_EQ(output.usage.completion_tokens, tokens);
    EXPECT_EQ(output.usage.completion.fp16 + output.usage.completion.fp8, tokens);
    const int32_t counted = output.usage.prompt.fp16 + output.usage.prompt.fp8;
    EXPECT_LE(counted, output.usage.prompt_tokens);
    if (tokens > 0) {
      EXPECT_EQ(counted, output.usage.prompt_tokens);
    }
    if (!output.finish || *output.finish == FinishReason::kError || *output.finish == FinishReason::kCancelled) return;
    EXPECT_EQ(counted, output.usage.prompt_tokens);
    if (pooling != Pooling::kNone) {
      const auto size = static_cast<float>(prompt.size());
      const float mean = std::accumulate(prompt.begin(), prompt.end(), 0.0f) / size;
      ASSERT_EQ(output.embedding.size(), 2u);
      EXPECT_FLOAT_EQ(output.embedding[0], pooling == Pooling::kMean ? mean : static_cast<float>(prompt.back()));
      EXPECT_FLOAT_EQ(output.embedding[1], pooling == Pooling::kMean ? (size - 1) / 2 : size - 1);
      EXPECT_EQ(tokens, 0);
      return;
    }
    const bool stopped = std::find(ends.begin(), ends.end(), last) != ends.end();
    EXPECT_EQ(*output.finish, stopped ? FinishReason::kStop : FinishReason::kLength);
    if (!stopped) {
      EXPECT_EQ(tokens, most);
    }
  }

  std::vector<int32_t> prompt;
  Pooling pooling = Pooling::kNone;
  bool scored = false, grammar = false;
  int32_t most = 0, tokens = 0, last = -1;
  std::vector<int32_t> ends;
  uint64_t prefix = 0;
};

TEST(KvStress, EveryTokenFindsItsOwnPast) {
  uint64_t preemptions = 0, hits = 0, switches = 0, drafted = 0, accepted = 0;
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
    o.speculative_tokens = seed % 2 == 0 ? 0 : 1 + static_cast<int32_t>(seed / 2 % 4);
    o.speculative_always = seed % 4 == 1;
    const bool failing = draw(4) == 0;
    KvRunner runner(120, o.kv_blocks, o.limits.max_sequences, failing ? 50 : 0);
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
    std::map<std::string, Awaited> open;
    const auto take = [&](const std::vector<RequestOutput>& outputs) {
      for (const RequestOutput& output : outputs) {
        ASSERT_TRUE(open.contains(output.id)) << output.id;
        open[output.id].take(output);
        if (output.finish) open.erase(output.id);
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
        if (draw(8) == 0) r.sampling.stop_token_ids = {4 + draw(6)};
        if (draw(8) == 0) r.sampling.prompt_logprobs = 0;
        if (draw(12) == 0) r.prompt_only = true;
        if (draw(8) == 0) r.pooling = draw(2) == 0 ? Pooling::kLast : Pooling::kMean;
        if (draw(4) == 0) r.cache_scope = {1, 1};
        r.precision = static_cast<PrecisionClass>(draw(3));
        r.priority = draw(3) - 1;
        if (r.pooling == Pooling::kNone && draw(5) == 0)
          r.constraint = std::make_unique<Moody>(seed + static_cast<uint32_t>(i));
        if (draw(5) == 0) r.slo_ttft_s = 1e-3 * (1 + draw(300));
        const std::string id = r.id;
        Awaited answer(r, room);
        if (engine.submit(std::move(r)).ok()) open.emplace(id, std::move(answer));
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
    drafted += engine.stats().drafted_tokens;
    accepted += engine.stats().accepted_tokens;
  }
  EXPECT_GT(preemptions, 1000u);
  EXPECT_GT(hits, 1000u);
  EXPECT_GT(switches, 1000u);
  EXPECT_GT(accepted, 1000u);
  EXPECT_GT(drafted, accepted);
}

}  // namespace
}  // namespace nfp
