#include "engine/scheduler.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <unordered_map>

namespace nfp {
namespace {

struct Bench {
  Bench(int32_t kv_blocks, SchedulerLimits limits, int32_t block_size = 4, bool caching = true)
      : blocks(kv_blocks, block_size, caching), scheduler(limits, &blocks) {}

  Sequence* add(int32_t prompt, int32_t first_token = 0, PrecisionClass precision = PrecisionClass::kAuto) {
    auto sequence = std::make_unique<Sequence>();
    sequence->serial = serial++;
    sequence->request.prompt.resize(static_cast<size_t>(prompt));
    std::iota(sequence->request.prompt.begin(), sequence->request.prompt.end(), first_token);
    sequence->request.precision = precision;
    sequence->tokens = sequence->request.prompt;
    Sequence* raw = sequence.get();
    return scheduler.enqueue(sequence) ? raw : nullptr;
  }
  // Pretends to run a step: every item that samples gets a token.
  StepPlan run(bool exact = true) {
    StepPlan plan = submit();
    collect(exact);
    return plan;
  }
  StepPlan submit() {
    StepPlan plan = scheduler.schedule();
    scheduler.submitted(plan);
    in_flight.push_back(plan);
    return plan;
  }
  // Of the oldest step in flight.
  void collect(bool exact = true) {
    for (const ScheduledSequence& item : in_flight.front().items) {
      if (item.sequence == nullptr) continue;
      scheduler.computed(item, exact);
      if (!item.samples) continue;
      item.sequence->tokens[static_cast<size_t>(item.sequence->size() - item.sequence->pending--)] = 7;
    }
    in_flight.pop_front();
  }
  void remove(Sequence* sequence) {
    for (StepPlan& plan : in_flight) {
      for (ScheduledSequence& item : plan.items) {
        if (item.sequence == sequence) item.sequence = nullptr;
      }
    }
    scheduler.remove(sequence);
  }

  std::deque<StepPlan> in_flight;
  std::unique_ptr<Sequence> kept;
  uint64_t serial = 0;
  BlockManager blocks;
  Scheduler scheduler;
};

TEST(Scheduler, CutsAPromptIntoChunksAndThenDecodes) {
  Bench bench(16, {.max_sequences = 4, .max_step_tokens = 5});
  bench.add(12);
  EXPECT_EQ(bench.run().tokens, 5);
  EXPECT_EQ(bench.run().tokens, 5);
  const StepPlan last = bench.run();
  ASSERT_EQ(last.items.size(), 1u);
  EXPECT_EQ(last.items[0].first, 10);
  EXPECT_EQ(last.items[0].count, 2);
  EXPECT_TRUE(last.items[0].samples);
  const StepPlan decode = bench.run();
  EXPECT_EQ(decode.items[0].count, 1);
  EXPECT_EQ(decode.prefill_tokens, 0);
}

TEST(Scheduler, DecodesGoBeforeNewPrompts) {
  Bench bench(64, {.max_sequences = 8, .max_step_tokens = 6});
  bench.add(3);
  bench.run();
  bench.add(20, 100);
  const StepPlan mixed = bench.run();
  ASSERT_EQ(mixed.items.size(), 2u);
  EXPECT_EQ(mixed.items[0].count, 1);
  EXPECT_EQ(mixed.items[1].count, 5);
  EXPECT_FALSE(mixed.items[1].samples);
  EXPECT_EQ(mixed.prefill_tokens, 5);
}

TEST(Scheduler, KeepsToTheNumberOfSequencesAndTheQueue) {
  Bench bench(64, {.max_sequences = 2, .max_step_tokens = 100, .max_queue = 3});
  for (int i = 0; i < 3; ++i) EXPECT_NE(bench.add(2, i * 10), nullptr);
  EXPECT_EQ(bench.add(2, 90), nullptr);
  EXPECT_EQ(bench.run().items.size(), 2u);
  EXPECT_EQ(bench.scheduler.waiting(), 1);
}

TEST(Scheduler, PreemptsTheYoungestAndLetsItStartAgain) {
  Bench bench(4, {.max_sequences = 4, .max_step_tokens = 100}, 4, false);
  Sequence* old = bench.add(8);
  Sequence* young = bench.add(7, 50);
  bench.run();  // all four blocks are taken; old has 9 tokens now, young 8
  const StepPlan plan = bench.run();
  ASSERT_EQ(plan.preempted.size(), 1u);
  EXPECT_EQ(plan.preempted[0], young);
  ASSERT_EQ(plan.items.size(), 1u);
  EXPECT_EQ(plan.items[0].sequence, old);
  EXPECT_EQ(young->computed, 0);
  EXPECT_EQ(bench.scheduler.waiting(), 1);
  EXPECT_EQ(bench.scheduler.preemptions(), 1u);
  bench.scheduler.remove(old);
  const StepPlan again = bench.run();
  ASSERT_EQ(again.items.size(), 1u);
  EXPECT_EQ(again.items[0].count, 8);  // the prompt and the token it had made
  EXPECT_TRUE(again.items[0].samples);
}

// A chunk of it would fit at once, and be computed again and again: each time that the rest finds no room.
TEST(Scheduler, APromptWaitsUntilAllOfItHasRoom) {
  Bench bench(16, {.max_sequences = 4, .max_step_tokens = 16}, 4, false);
  Sequence* old = bench.add(8);
  bench.run();
  Sequence* large = bench.add(56, 100);  // 14 blocks, and 13 are left
  for (int step = 0; step < 20; ++step) {
    const StepPlan plan = bench.run();
    EXPECT_EQ(plan.tokens, 1);
    EXPECT_TRUE(plan.preempted.empty());
  }
  bench.scheduler.remove(old);
  for (const int32_t first : {0, 16, 32, 48}) {
    const StepPlan plan = bench.run();
    ASSERT_EQ(plan.items.size(), 1u);
    EXPECT_EQ(plan.items[0].sequence, large);
    EXPECT_EQ(plan.items[0].first, first);
    EXPECT_EQ(bench.blocks.in_use(), 14);
  }
  EXPECT_EQ(bench.scheduler.preemptions(), 0u);
}

TEST(Scheduler, ThoseThatStayKeepTheirOrderWhoeverIsRemoved) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
    Bench bench(100, {.max_sequences = 3, .max_step_tokens = 20, .max_queue = 50});
    std::vector<Sequence*> waiting;  // by priority, then in order of arrival
    for (int round = 0; round < 30; ++round) {
      for (int32_t i = draw(12); i > 0; --i) {
        auto sequence = std::make_unique<Sequence>();
        sequence->serial = bench.serial++;
        sequence->request.priority = draw(3) - 1;
        sequence->request.prompt = sequence->tokens = std::vector<int32_t>(5, static_cast<int32_t>(bench.serial));
        Sequence* const raw = sequence.get();
        ASSERT_EQ(bench.scheduler.enqueue(sequence), waiting.size() < 50);
        if (sequence) continue;
        const auto before = [](const Sequence* a, const Sequence* b) {
          return a->request.priority < b->request.priority;
        };
        waiting.insert(std::upper_bound(waiting.begin(), waiting.end(), raw, before), raw);
      }
      for (int32_t i = draw(20); i > 0 && !waiting.empty(); --i) {
        const auto place = waiting.begin() + draw(static_cast<int32_t>(waiting.size()));
        Sequence* const removed = *place;
        EXPECT_EQ(bench.scheduler.remove(removed).get(), removed);
        waiting.erase(place);
      }
      ASSERT_EQ(bench.scheduler.waiting(), static_cast<int32_t>(waiting.size()));
      if (draw(2) == 0) {
        bench.scheduler.states();
        ASSERT_EQ(bench.scheduler.sequences(), waiting);
      } else {
        const StepPlan plan = bench.scheduler.schedule();
        ASSERT_LE(plan.admitted.size(), waiting.size());
        for (Sequence* const admitted : plan.admitted) {
          ASSERT_EQ(admitted, waiting.front());
          waiting.erase(waiting.begin());
          bench.scheduler.remove(admitted);
        }
      }
    }
    EXPECT_EQ(bench.scheduler.running(), 0);
    EXPECT_EQ(bench.blocks.in_use(), 0);
  }
}

TEST(Scheduler, AdmitsByPriorityThenArrivalAndPreemptsTheLeastImportant) {
  Bench bench(100, {.max_sequences = 3, .max_step_tokens = 64});
  Sequence* first = bench.add(4, 0);
  bench.run();
  Sequence* low = bench.add(4, 10);
  Sequence* plain = bench.add(4, 20);
  Sequence* also_plain = bench.add(4, 30);
  Sequence* urgent = bench.add(4, 40);
  EXPECT_EQ(bench.scheduler.waiting(), 4);
  for (auto& [sequence, priority] : {std::pair{low, 5}, {urgent, -1}}) {
    // As the engine has them: the priority is there when they come.
    auto taken = bench.scheduler.remove(sequence);
    taken->request.priority = priority;
    ASSERT_TRUE(bench.scheduler.enqueue(taken));
  }
  StepPlan plan = bench.run();
  ASSERT_EQ(plan.admitted.size(), 2u);
  EXPECT_EQ(plan.admitted[0], urgent);
  EXPECT_EQ(plan.admitted[1], plain);
  // Running: urgent, then in order of admission.
  plan = bench.run();
  ASSERT_EQ(plan.items.size(), 3u);
  EXPECT_EQ(plan.items[0].sequence, urgent);
  EXPECT_EQ(plan.items[1].sequence, first);
  bench.remove(plain);
  EXPECT_EQ(bench.run().admitted, std::vector<Sequence*>{also_plain});
  bench.remove(also_plain);
  EXPECT_EQ(bench.run().admitted, std::vector<Sequence*>{low});
}

TEST(Scheduler, TheLeastImportantGivesItsBlocksBack) {
  Bench bench(6, {.max_sequences = 3, .max_step_tokens = 64}, 4, /*caching=*/false);
  Sequence* low = bench.add(7, 0);
  bench.scheduler.remove(low).swap(bench.kept);
  bench.kept->request.priority = 3;
  ASSERT_TRUE(bench.scheduler.enqueue(bench.kept));
  bench.run();
  Sequence* high = bench.add(7, 10);
  Sequence* other = bench.add(7, 20);
  bench.run();
  StepPlan plan;
  for (int i = 0; i < 9 && plan.preempted.empty(); ++i) plan = bench.run();
  EXPECT_EQ(plan.preempted, std::vector<Sequence*>{low});  // though it came first
  EXPECT_EQ(bench.scheduler.running(), 2);
  ASSERT_EQ(plan.items.size(), 2u);
  EXPECT_EQ(plan.items[0].sequence, high);
  EXPECT_EQ(plan.items[1].sequence, other);
}

TEST(Scheduler, ReusesPrefixesAsThePrecisionAllows) {
  Bench bench(32, {.max_sequences = 4, .max_step_tokens = 100});
  Sequence* first = bench.add(10);
  bench.run(/*exact=*/false);
  bench.scheduler.remove(first);
  Sequence* any = bench.add(10);
  Sequence* exact = bench.add(10, 0, PrecisionClass::kExact);
  StepPlan plan = bench.run();
  ASSERT_EQ(plan.items.size(), 2u);
  EXPECT_EQ(plan.items[0].sequence, any);
  EXPECT_EQ(plan.items[0].first, 8);
  EXPECT_FALSE(any->exact);
  EXPECT_EQ(any->cached, 8);
  EXPECT_EQ(any->reused_fp16, 0);
  EXPECT_EQ(plan.items[1].first, 0);
  EXPECT_TRUE(exact->exact);
  EXPECT_EQ(bench.scheduler.prefix_queries(), 30u);  // the first sequence asked too
  EXPECT_EQ(bench.scheduler.prefix_hits(), 8u);
}

TEST(Scheduler, AWholePromptInTheCacheStillComputesItsLastToken) {
  Bench bench(32, {.max_sequences = 4, .max_step_tokens = 100});
  bench.scheduler.remove((bench.add(8), bench.run().items[0].sequence));
  bench.add(8);
  const StepPlan plan = bench.run();
  EXPECT_EQ(plan.items[0].first, 4);
  EXPECT_TRUE(plan.items[0].samples);
}

// What a policy predicts from: a cached prefix need not be computed.
TEST(Scheduler, StatesOfWaitingSequencesTellWhatThePrefixCacheHas) {
  Bench bench(8, {.max_sequences = 1, .max_step_tokens = 100});
  const auto waiting = [&] {
    const auto states = bench.scheduler.states();
    return std::pair(states.back().context, states.back().missing);
  };
  bench.scheduler.remove((bench.add(9), bench.run().items[0].sequence));
  Sequence* any = bench.add(12);  // its first two blocks are there
  EXPECT_EQ(waiting(), std::pair(8, 4));
  bench.scheduler.remove(any);
  Sequence* exact = bench.add(12, 0, PrecisionClass::kExact);
  EXPECT_EQ(waiting(), std::pair(8, 4));
  bench.scheduler.remove(exact);
  Sequence* scored = bench.add(12);
  scored->request.sampling.prompt_logprobs = 0;
  EXPECT_EQ(waiting(), std::pair(0, 12));
  bench.scheduler.remove(scored);
  // Another one takes the cached blocks while it waits, and one that computes the same brings them back.
  bench.add(12);
  EXPECT_EQ(waiting(), std::pair(8, 4));
  std::vector<int32_t> taken;
  while (const auto block = bench.blocks.allocate()) taken.push_back(*block);
  EXPECT_EQ(waiting(), std::pair(0, 12));
  for (const int32_t block : taken) bench.blocks.release(block);
  Sequence* other = bench.add(30);
  std::unique_ptr<Sequence> first = bench.scheduler.remove(other);
  first->request.priority = -1;
  bench.scheduler.enqueue(first);
  bench.run(/*exact=*/false);
  EXPECT_EQ(waiting(), std::pair(8, 4));
}

// The others wait for the step that computes it, also where it is in flight, and for no other prompt.
TEST(Scheduler, WhatPromptsHaveInCommonIsComputedOnce) {
  for (const bool planned : {false, true}) {
    for (const size_t in_flight : {1, 2}) {
      SCOPED_TRACE(::testing::Message() << planned << in_flight);
      Bench bench(128, {.max_sequences = 8, .max_step_tokens = 40});
      std::vector<Sequence*> equal(4);
      for (Sequence*& sequence : equal) sequence = bench.add(81);
      Sequence* other = bench.add(5, 500);
      int32_t computed = 0;
      for (int step = 0; step < 40; ++step) {
        StepPlan plan;
        if (planned) {
          StepDecision decision;
          const auto states = bench.scheduler.states();
          for (size_t i = 0; i < states.size(); ++i) {
            if (states[i].ready) decision.chunks.push_back({i, states[i].missing});
          }
          plan = bench.scheduler.schedule(decision);
          bench.scheduler.submitted(plan);
          bench.in_flight.push_back(plan);
        } else {
          plan = bench.submit();
        }
        computed += plan.prefill_tokens;
        if (bench.in_flight.size() == in_flight) bench.collect();
      }
      for (Sequence* sequence : equal) EXPECT_GT(sequence->output_size(), 0);
      for (size_t i = 1; i < equal.size(); ++i) EXPECT_EQ(equal[i]->cached, 80);
      EXPECT_EQ(other->cached, 0);
      EXPECT_EQ(computed, 81 + 3 * 1 + 5);
    }
  }
}

// Of a few tokens, the step that it would wait for costs more.
TEST(Scheduler, NobodyWaitsForAShortPrefix) {
  for (const int32_t common : {Scheduler::kLeastPrefix - 1, Scheduler::kLeastPrefix}) {
    Bench bench(64, {.max_sequences = 8, .max_step_tokens = 200});
    bench.add(common);
    bench.add(60);
    const bool waits = common == Scheduler::kLeastPrefix;
    EXPECT_EQ(bench.scheduler.states().back().missing, waits ? 60 - common : 60);
    EXPECT_EQ(bench.run().prefill_tokens, waits ? common : common + 60);
  }
}

TEST(Scheduler, WhoWaitsForAPrefixKeepsItsPlace) {
  Bench bench(64, {.max_sequences = 2, .max_step_tokens = 100});
  Sequence* first = bench.add(41);
  Sequence* second = bench.add(41);
  bench.add(41, 500);
  EXPECT_EQ(bench.run().admitted, std::vector<Sequence*>{first});
  EXPECT_EQ(bench.run().admitted, std::vector<Sequence*>{second});
}

// Its keys and values may come from an FP8 step.
TEST(Scheduler, ExactPromptsWaitOnlyForExactOnes) {
  Bench bench(64, {.max_sequences = 8, .max_step_tokens = 100});
  Sequence* any = bench.add(41);
  Sequence* exact = bench.add(41, 0, PrecisionClass::kExact);
  Sequence* exact_too = bench.add(41, 0, PrecisionClass::kExact);
  const StepPlan plan = bench.run(/*exact=*/false);
  EXPECT_EQ(plan.admitted, (std::vector<Sequence*>{any, exact}));
  EXPECT_EQ(plan.prefill_tokens, 82);
  EXPECT_EQ(bench.scheduler.waiting(), 1);
  EXPECT_EQ(exact_too->cached, 0);
}

TEST(Scheduler, PromptsOfOtherScopesDoNotWait) {
  Bench bench(64, {.max_sequences = 8, .max_step_tokens = 100});
  bench.add(41);
  auto other = std::make_unique<Sequence>();
  other->request.prompt.resize(41);
  std::iota(other->request.prompt.begin(), other->request.prompt.end(), 0);
  other->request.cache_scope = {1, 2};
  other->tokens = other->request.prompt;
  ASSERT_TRUE(bench.scheduler.enqueue(other));
  EXPECT_EQ(bench.scheduler.states().back().missing, 41);
  EXPECT_EQ(bench.run().prefill_tokens, 82);
}

TEST(Scheduler, StatesCountWhatPromptsHaveInCommonOnce) {
  Bench bench(64, {.max_sequences = 8, .max_step_tokens = 10});
  const auto missing = [&] {
    std::vector<int32_t> tokens;
    for (const SequenceState& state : bench.scheduler.states()) tokens.push_back(state.missing);
    return tokens;
  };
  for (int i = 0; i < 3; ++i) bench.add(41 + 2 * i);
  bench.add(41, 500);
  bench.add(41, 0, PrecisionClass::kExact);  // the others' may be computed in FP8
  bench.add(42, 0, PrecisionClass::kExact);
  EXPECT_EQ(missing(), (std::vector<int32_t>{41, 3, 5, 41, 41, 2}));
  bench.run();
  EXPECT_EQ(missing(), (std::vector<int32_t>{31, 3, 5, 41, 33, 2}));
}

// Whatever arrives and leaves: steps keep within limits, every sequence ends, and all blocks come back.
RC_GTEST_PROP(SchedulerProperty, EverythingEndsAndNothingLeaks, ()) {
  const int32_t kv_blocks = *rc::gen::inRange(6, 20);
  SchedulerLimits limits;
  limits.max_sequences = *rc::gen::inRange(1, 6);
  limits.max_step_tokens = *rc::gen::inRange(1, 40);
  Bench bench(kv_blocks, limits, 4, *rc::gen::arbitrary<bool>());
  const int32_t context = kv_blocks * 4;
  const size_t most_in_flight = *rc::gen::inRange(1, 3);
  std::vector<Sequence*> live;
  std::map<Sequence*, int32_t> goal;
  int to_add = *rc::gen::inRange(1, 12);
  for (int step = 0; step < 4000 && (to_add > 0 || !live.empty()); ++step) {
    if (to_add > 0 && *rc::gen::inRange(0, 3) == 0) {
      const int32_t prompt = *rc::gen::inRange(1, context - 4);
      Sequence* sequence = bench.add(prompt, *rc::gen::inRange(0, 2));
      RC_ASSERT(sequence != nullptr);
      live.push_back(sequence);
      sequence->limit = goal[sequence] = std::min(context, prompt + *rc::gen::inRange(1, 20));
      --to_add;
    }
    const StepPlan plan = bench.submit();
    int32_t sum = 0;
    for (const ScheduledSequence& item : plan.items) {
      sum += item.count;
      RC_ASSERT(item.count > 0);
      RC_ASSERT(static_cast<int32_t>(item.sequence->blocks.size()) * 4 >= item.first + item.count);
    }
    RC_ASSERT(sum == plan.tokens);
    RC_ASSERT(plan.tokens <= limits.max_step_tokens);
    RC_ASSERT(bench.scheduler.running() <= limits.max_sequences);
    RC_ASSERT(live.empty() || !plan.items.empty() || !plan.preempted.empty() || bench.in_flight.size() > 1);
    if (bench.in_flight.size() < most_in_flight) continue;
    bench.collect(*rc::gen::arbitrary<bool>());
    for (auto it = live.begin(); it != live.end();) {
      if ((*it)->size() - (*it)->pending >= goal[*it]) {
        bench.remove(*it);
        it = live.erase(it);
      } else {
        ++it;
      }
    }
  }
  RC_ASSERT(live.empty());
  RC_ASSERT(bench.blocks.in_use() == 0);
}

StepDecision decide(std::initializer_list<StepChunk> chunks) {
  StepDecision decision;
  decision.chunks = chunks;
  return decision;
}

TEST(Scheduler, FollowsADecisionsOrderAndChunks) {
  Bench b(100, {.max_sequences = 2, .max_step_tokens = 20});
  Sequence* first = b.add(10, 0);
  Sequence* second = b.add(30, 100);
  Sequence* third = b.add(10, 200);
  ASSERT_EQ(b.scheduler.states().size(), 3u);
  EXPECT_EQ(b.scheduler.states()[1].missing, 30);
  EXPECT_FALSE(b.scheduler.states()[1].running);
  // The third has no place: two run at once. Tokens beyond the step's are cut.
  StepPlan plan = b.scheduler.schedule(decide({{1, 12}, {0, 10}, {2, 10}}));
  ASSERT_EQ(plan.items.size(), 2u);
  EXPECT_EQ(plan.items[0].sequence, second);
  EXPECT_EQ(plan.items[0].count, 12);
  EXPECT_FALSE(plan.items[0].samples);
  EXPECT_EQ(plan.items[1].sequence, first);
  EXPECT_EQ(plan.items[1].count, 8);
  EXPECT_EQ(plan.tokens, 20);
  EXPECT_EQ(plan.prefill_tokens, 20);
  EXPECT_EQ(b.scheduler.running(), 2);
  b.scheduler.submitted(plan);
  b.in_flight.push_back(plan);
  b.collect();
  const auto states = b.scheduler.states();
  EXPECT_EQ(b.scheduler.sequences()[0], second);  // in order of admission
  EXPECT_TRUE(states[0].running);
  EXPECT_EQ(states[0].context, 12);
  EXPECT_EQ(states[0].missing, 18);
  EXPECT_EQ(b.scheduler.sequences()[2], third);
}

TEST(Scheduler, ADecisionTakesBlocksFromWhomItLeavesOut) {
  Bench b(4, {.max_sequences = 4, .max_step_tokens = 64}, 4, false);
  Sequence* urgent = b.add(7);
  Sequence* other = b.add(8);
  b.run();  // all four blocks are taken, and the next token of `other` needs a fifth
  b.scheduler.states();
  StepPlan plan = b.scheduler.schedule(decide({{1, 1}}));
  EXPECT_EQ(plan.preempted, (std::vector<Sequence*>{urgent}));
  ASSERT_EQ(plan.items.size(), 1u);
  EXPECT_EQ(plan.items[0].sequence, other);
}

TEST(Scheduler, ADecisionsLessUrgentGiveBlocksToItsMoreUrgent) {
  Bench b(4, {.max_sequences = 4, .max_step_tokens = 64}, 4, false);
  b.add(8);
  Sequence* late = b.add(8);
  b.run();
  b.scheduler.states();
  // Both need a block: the first of the decision gets it, and whoever is named later gives all of its back.
  StepPlan plan = b.scheduler.schedule(decide({{0, 1}, {1, 1}}));
  EXPECT_EQ(plan.preempted, (std::vector<Sequence*>{late}));
  ASSERT_EQ(plan.items.size(), 1u);
  EXPECT_EQ(plan.items[0].sequence->serial, 0u);
}

struct Anything final : TokenConstraint {
  bool fill(std::span<uint32_t>) override { return false; }
  bool accept(int32_t) override { return true; }
};

// Under a grammar no token is planned before the one in flight is known, so the decision cannot name the sequence.
TEST(Scheduler, WhoseTokenIsOnItsWayIsNotLeftOut) {
  for (const bool older : {true, false}) {
    Bench b(4, {.max_sequences = 4, .max_step_tokens = 64}, 4, false);
    std::vector<Sequence*> both;
    for (const bool waits : {older, !older}) {
      both.push_back(b.add(waits ? 6 : 8));
      if (waits) both.back()->request.constraint = std::make_unique<Anything>();
    }
    b.run();
    const size_t waiting = older ? 0 : 1;
    b.scheduler.states();
    b.in_flight.push_back(b.scheduler.schedule(decide({{waiting, 1}})));
    b.scheduler.submitted(b.in_flight.back());
    ASSERT_FALSE(b.scheduler.states()[waiting].ready);
    // All blocks are taken, and the other one needs a fifth: the younger one gives its own back.
    const StepPlan plan = b.scheduler.schedule(decide({{1 - waiting, 1}}));
    EXPECT_EQ(plan.preempted, (std::vector<Sequence*>{both[1]}));
  }
}

TEST(Scheduler, WhoGetsItsLastTokenGivesItsBlocksBack) {
  Bench b(4, {.max_sequences = 4, .max_step_tokens = 64}, 4, false);
  Sequence* ends = b.add(6);
  Sequence* goes_on = b.add(8);
  ends->limit = 8;
  b.run();
  b.scheduler.states();
  b.in_flight.push_back(b.scheduler.schedule(decide({{0, 1}})));
  b.scheduler.submitted(b.in_flight.back());
  b.scheduler.states();
  const StepPlan plan = b.scheduler.schedule(decide({{1, 1}}));
  EXPECT_EQ(plan.preempted, (std::vector<Sequence*>{ends}));
  ASSERT_EQ(plan.items.size(), 1u);
  EXPECT_EQ(plan.items[0].sequence, goes_on);
}

// What states() tells of the prefix cache, worked out anew for every sequence: states() itself remembers what it told
// of those that wait.
class SearchedAnew {
 public:
  // As it is before states().
  SearchedAnew(const Bench& bench, const std::vector<Sequence*>& live) : blocks_(bench.blocks) {
    for (const Sequence* sequence : live) before_[sequence] = {sequence->found, sequence->keys};
  }
  // Of a sequence that states() shows, in its order.
  int32_t context(const Sequence& sequence, bool running, bool ready) {
    auto& [found, keys] = before_.at(&sequence);
    if (!ready) return sequence.scheduled;
    int32_t context = sequence.scheduled;
    if (!running) {
      found = find(sequence, found, keys);
      context = static_cast<int32_t>(found) * blocks_.block_size();
    }
    if (sequence.size() - context > 1) {
      const size_t coming = coming_blocks(sequence, running, running ? sequence.published : found, keys);
      context = std::max(context, static_cast<int32_t>(coming) * blocks_.block_size());
    }
    return context;
  }
  size_t found(const Sequence& sequence) const { return before_.at(&sequence).first; }

 private:
  using Keys = std::vector<PrefixKey>;
  size_t most(const Sequence& sequence) const {
    if (!blocks_.caching() || sequence.request.sampling.prompt_logprobs) return 0;
    return (sequence.tokens.size() - 1) / static_cast<size_t>(blocks_.block_size());
  }
  bool has(const Sequence& sequence, size_t count, Keys& keys) const {
    const auto size = static_cast<size_t>(blocks_.block_size());
    while (keys.size() < count) {
      const PrefixKey parent = keys.empty() ? sequence.request.cache_scope : keys.back();
      keys.push_back(extend(parent, std::span(sequence.tokens).subspan(keys.size() * size, size)));
    }
    return count == 0 || blocks_.findable(keys[count - 1], sequence.wants_exact());
  }
  // From where the prefix ended last time, in strides that double, then by halves.
  size_t find(const Sequence& sequence, size_t last, Keys& keys) const {
    size_t least = std::min(last, most(sequence)), beyond = most(sequence) + 1, stride = 1;
    if (has(sequence, least, keys)) {
      for (; least + stride < beyond; stride *= 2) {
        if (!has(sequence, least + stride, keys)) {
          beyond = least + stride;
        } else {
          least += stride;
        }
      }
    } else {
      do {
        beyond = least;
        least -= std::min(least, stride);
        stride *= 2;
      } while (!has(sequence, least, keys));
    }
    while (beyond - least > 1) {
      const size_t middle = least + (beyond - least) / 2;
      (has(sequence, middle, keys) ? least : beyond) = middle;
    }
    return least;
  }
  size_t coming_blocks(const Sequence& sequence, bool running, size_t known, const Keys& keys) {
    if (keys.size() <= known) return 0;
    const auto [place, first] = beginners_.try_emplace(keys[known], &sequence);
    const Sequence& other = *place->second;
    if (first) return 0;
    if (sequence.wants_exact() && !other.wants_exact()) place->second = &sequence;
    if (running || (sequence.wants_exact() && !other.wants_exact())) return 0;
    const Keys& others = before_.at(&other).second;
    const size_t end = std::min({most(sequence), keys.size(), others.size()});
    size_t equal = known;
    while (equal < end && keys[equal] == others[equal]) ++equal;
    const int32_t size = blocks_.block_size();
    const int32_t least = (Scheduler::kLeastPrefix + size - 1) / size;
    return equal - known < static_cast<size_t>(least) ? 0 : equal;
  }

  const BlockManager& blocks_;
  std::map<const Sequence*, std::pair<size_t, Keys>> before_;  // Sequence::found, Sequence::keys
  std::unordered_map<PrefixKey, const Sequence*, PrefixKeyHash> beginners_;
};

// Few prefixes for many requests, in a cache that is too small for them: blocks are published, evicted, published again
// and made exact while others wait for them, and requests come, leave, run, and are preempted.
TEST(Scheduler, StatesRememberNothingThatIsNoLongerSo) {
  size_t seen = 0, from_cache = 0, from_others = 0;
  uint64_t preemptions = 0;
  for (uint32_t seed = 0; seed < 60 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto draw = [&](int32_t below) { return static_cast<int32_t>(random() % static_cast<uint32_t>(below)); };
    const int32_t kv_blocks = 30 + draw(60);
    SchedulerLimits limits = {.max_sequences = 1 + draw(8), .max_step_tokens = 20 + draw(100)};
    Bench bench(kv_blocks, limits, 4, /*caching=*/draw(10) > 0);
    const bool answers = draw(2) == 0;
    std::vector<Sequence*> live;
    std::vector<int32_t> taken;
    for (int step = 0; step < 150; ++step) {
      for (int n = live.size() < 40 ? draw(4) : 0; n > 0; --n) {
        auto sequence = std::make_unique<Sequence>();
        sequence->serial = bench.serial++;
        // A few stems, which part again and again; or prompts that go on as others' answers do.
        const bool long_answer = draw(answers ? 2 : 8) == 0;
        const int32_t length = long_answer ? 9 : 1 + draw(std::min(kv_blocks * 4 - 20, 110));
        for (int32_t t = 0, stem = answers ? 0 : draw(2); t < length; ++t) {
          if (t % 16 == 9 && draw(3) == 0) stem = draw(2);
          if (t == 9 && answers) stem = 7;
          sequence->request.prompt.push_back(stem);
        }
        sequence->tokens = sequence->request.prompt;
        sequence->limit = length + 1 + draw(long_answer ? 80 : 12);
        sequence->request.priority = draw(6) == 0 ? draw(3) - 1 : 0;
        sequence->request.precision = draw(3) == 0 ? PrecisionClass::kExact : PrecisionClass::kAuto;
        if (draw(8) == 0) sequence->request.cache_scope = {1, 1};
        if (draw(12) == 0) sequence->request.sampling.prompt_logprobs = 0;
        if (draw(8) == 0) sequence->request.constraint = std::make_unique<Anything>();
        Sequence* raw = sequence.get();
        ASSERT_TRUE(bench.scheduler.enqueue(sequence));
        live.push_back(raw);
      }
      // Somebody else's blocks: what they had is gone.
      for (int n = draw(20) == 0 ? draw(kv_blocks) : 0; n > 0; --n) {
        if (const auto block = bench.blocks.allocate()) taken.push_back(*block);
      }
      if (draw(3) == 0) {
        for (const int32_t block : taken) bench.blocks.release(block);
        taken.clear();
      }

      SearchedAnew anew(bench, live);
      const std::span<SequenceState> states = bench.scheduler.states();
      ASSERT_EQ(states.size(), live.size());
      StepDecision decision;
      for (size_t i = 0; i < states.size(); ++i) {
        const Sequence& sequence = *bench.scheduler.sequences()[i];
        const bool running = i < static_cast<size_t>(bench.scheduler.running());
        const bool ready = running ? !sequence.all_scheduled() && (sequence.pending == 0 || sequence.may_run_ahead())
                                   : sequence.pending == 0;
        ASSERT_EQ(states[i].serial, sequence.serial);
        ASSERT_EQ(states[i].running, running);
        ASSERT_EQ(states[i].ready, ready);
        ASSERT_EQ(states[i].context, anew.context(sequence, running, ready)) << sequence.serial << " in step " << step;
        ASSERT_EQ(sequence.found, anew.found(sequence));
        ASSERT_EQ(states[i].missing, sequence.size() - states[i].context);
        ASSERT_EQ(states[i].emitted, sequence.output_size());
        ASSERT_EQ(states[i].started, sequence.admitted);
        ASSERT_EQ(states[i].exact, sequence.wants_exact());
        ASSERT_EQ(states[i].priority, sequence.request.priority);
        ++seen;
        if (running) continue;
        from_cache += sequence.found > 0 ? 1 : 0;
        from_others += states[i].context > static_cast<int32_t>(sequence.found) * 4 ? 1 : 0;
      }
      // Mostly those that run first, as policies have it; now and then in any order, or not all.
      for (size_t i = 0; i < states.size(); ++i) {
        if (states[i].ready && draw(8) > 0) decision.chunks.push_back({i, 1 + draw(states[i].missing)});
      }
      if (draw(3) == 0) std::shuffle(decision.chunks.begin(), decision.chunks.end(), random);
      if (draw(6) == 0) {
        bench.submit();
      } else {
        bench.in_flight.push_back(bench.scheduler.schedule(decision));
        bench.scheduler.submitted(bench.in_flight.back());
      }
      while (bench.in_flight.size() > static_cast<size_t>(draw(3))) bench.collect(draw(2) == 0);
      const int32_t leaves = draw(12);
      for (size_t i = 0; i < live.size();) {
        const bool ends = live[i]->pending == 0 && live[i]->size() >= live[i]->limit;
        if (ends || (leaves == 0 && draw(5) == 0)) {
          bench.remove(live[i]);
          live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
          ++i;
        }
      }
    }
    preemptions += bench.scheduler.preemptions();
  }
  EXPECT_GT(seen, 100000u);
  EXPECT_GT(from_cache, 10000u);
  EXPECT_GT(from_others, 1000u);
  EXPECT_GT(preemptions, 500u);
}

// A preempted answer's keys are worked out as far as they are asked for: another prompt may have more in common with it
// than a step ago.
TEST(Scheduler, StatesCompareAgainWhereMoreIsKnown) {
  Bench b(20, {.max_sequences = 4, .max_step_tokens = 64});
  Sequence* answer = b.add(9);
  answer->tokens.insert(answer->tokens.end(), 50, 7);
  auto sequence = std::make_unique<Sequence>();
  sequence->serial = b.serial++;
  sequence->request.prompt = answer->tokens;
  sequence->tokens = answer->tokens;
  ASSERT_TRUE(b.scheduler.enqueue(sequence));
  EXPECT_EQ(b.scheduler.states()[1].context, 0);
  EXPECT_EQ(b.scheduler.states()[1].context, 0);
  std::vector<int32_t> taken;
  while (const auto block = b.blocks.allocate()) taken.push_back(*block);
  EXPECT_TRUE(b.scheduler.schedule(decide({{0, 10}})).items.empty());  // it asks for the prefix, and there is no room
  EXPECT_EQ(b.scheduler.states()[1].context, Scheduler::kLeastPrefix);
}

}  // namespace
}  // namespace nfp
