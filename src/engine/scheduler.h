// Decides which tokens of which sequences the next step computes. Pure: it moves sequences between two lists and blocks
// between owners; it knows no tensor and no clock.
//
// While a step is in flight the next one is planned from what will be when it is done (Sequence::scheduled); its tokens
// are then read on the device. A sequence is scheduled by its missing keys and values: prompt chunks, recomputed tokens
// after preemption and decode steps are all "the next tokens up to the end, as far as the budget reaches". Running
// sequences come first, then waiting ones are admitted while budget, places and blocks for all their tokens last, each
// kind in order of priority and then of arrival. When blocks run out, the last running sequence in that order gives its
// blocks back and waits again (preemption by recomputation).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/beginners.h"
#include "engine/block_manager.h"
#include "engine/sequence.h"
#include "policy/policy.h"

namespace nfp {

struct SchedulerLimits {
  int32_t max_sequences = 64;      // running at once
  int32_t max_step_tokens = 2048;  // tokens a step, all sequences together (chunked prefill cuts longer prompts)
  int32_t max_queue = 1024;        // waiting requests
};

struct ScheduledSequence {
  Sequence* sequence = nullptr;
  int32_t first = 0;     // == sequence->scheduled
  int32_t count = 0;     // tokens first .. first+count-1 are computed
  bool samples = false;  // the chunk reaches the end: a token is sampled, unless the request is pooled
  int32_t source = -1;   // >= 0: the one token is that row's of the step in flight
  uint32_t life = 0;     // the sequence's
  // So many tokens after the one are drafted in FP8, then verified: the step samples behind each
  // (StepOutput::accepted).
  int32_t drafts = 0;
};

struct StepPlan {
  std::vector<ScheduledSequence> items;
  int32_t tokens = 0;
  int32_t prefill_tokens = 0;
  double fp8_share = 1.0;  // of the weights in FP8, should the step run in FP8 (the policy's choice)
  // In an FP8 step, items of one token are computed in FP16, in a launch of their own before the others; they come
  // first.
  bool exact_singles = false;
  std::vector<Sequence*> preempted;  // in this call; they wait again
  std::vector<Sequence*> admitted;   // in this call
  // Of any item, the most.
  int32_t drafts() const {
    int32_t most = 0;
    for (const ScheduledSequence& item : items) most = std::max(most, item.drafts);
    return most;
  }
};

class Scheduler {
 public:
  // Whoever waits for a prefix waits for a step, which takes long for however few tokens: a prefix of fewer than these
  // is computed again instead.
  static constexpr int32_t kLeastPrefix = 32;

  Scheduler(SchedulerLimits limits, BlockManager* blocks)
      : limits_(limits),
        blocks_(blocks),
        least_prefix_(static_cast<size_t>((kLeastPrefix + blocks->block_size() - 1) / blocks->block_size())) {}

  // False when the queue is full (the sequence is left untouched). Its serial and its priority stay as they are while
  // it is here.
  bool enqueue(std::unique_ptr<Sequence>& sequence);
  // Plans one step, by priority, then first come, first served. Blocks for all its tokens are allocated on return.
  StepPlan schedule();
  // The same as a policy wants it: what state() showed, in the decision's order. Where blocks run out, running
  // sequences that the decision left out give theirs back, then the least urgent ones.
  StepPlan schedule(const StepDecision& decision);
  // What a policy sees: running sequences, then waiting ones, each kind in order of priority and arrival. Where a
  // sequence has tokens, `last_s` and `due_s` are the engine's to fill in; sequences()[i] is what states()[i]
  // describes. Both are valid until the next call of anything.
  std::span<SequenceState> states();
  const std::vector<Sequence*>& sequences() const { return viewed_; }
  // Tells that the plan was submitted: its items are scheduled, and those that sample have a pending token more.
  void submitted(const StepPlan& plan);
  // Blocks for so many tokens of a running sequence in all; false: there are not enough.
  bool reserve(Sequence& sequence, int32_t tokens) { return grow(sequence, tokens); }
  // Gives back what reserve() took and its scheduled tokens do not need.
  void trim(Sequence& sequence);
  // Of a step with drafts: the token after the sequence's last one was computed too, and one more is to be taken.
  void accepted(Sequence& sequence, bool exact);
  // Of a step that was submitted and came to nothing: its items are planned again.
  void take_back(const StepPlan& plan);
  // Tells that an item of a plan was computed: advances `computed` and publishes blocks that became full.
  void computed(const ScheduledSequence& item, bool exact);
  // Takes the sequence out of whichever list it is in and gives its blocks back.
  std::unique_ptr<Sequence> remove(Sequence* sequence);

  int32_t running() const { return static_cast<int32_t>(running_.size()); }
  int32_t waiting() const { return static_cast<int32_t>(waiting_.size() - gaps_); }
  const SchedulerLimits& limits() const { return limits_; }
  uint64_t preemptions() const { return preemptions_; }
  uint64_t prefix_queries() const { return prefix_queries_; }  // prompt tokens looked up
  uint64_t prefix_hits() const { return prefix_hits_; }        // and found

 private:
  // What states() showed of a waiting sequence. Of thousands that wait nearly all are as they were a step ago, and each
  // Sequence is on a page of its own: the state, and what tells whether it still holds, are together here.
  struct alignas(64) View {
    SequenceState state;  // without what comes from others
    // Of its first blocks, the last one that the prefix cache has and the one behind that.
    PrefixKey last, next;
    bool current = false;   // all of this holds as long as `last` can be found and `next` cannot
    bool has_last = false;  // there is such a block,
    bool has_next = false;  // and the prefix cache may get this one
    bool begins = false;    // it goes on with `next`, and may be the first that does
    // What coming_blocks() found when it compared with the sequence of that serial and its so many keys; 0: it did not.
    int32_t coming = 0;
    uint32_t compared_keys = 0;
    uint64_t compared_with = 0;
  };
  struct Waiting {
    std::unique_ptr<Sequence> sequence;  // null: it was removed, and leaves a gap
    uint32_t view = 0;                   // index in views_
    int32_t priority = 0;                // the sequence's, also of a gap
    uint64_t serial = 0;
    bool operator<(const Waiting& other) const {
      return priority != other.priority ? priority < other.priority : serial < other.serial;
    }
  };
  void queue_up(std::unique_ptr<Sequence> sequence);
  std::unique_ptr<Sequence> take_waiting(size_t index);
  // Of a sequence that may wait: its place, or the end.
  std::deque<Waiting>::iterator find_waiting(const Sequence& sequence);
  // Before a step is planned: many that are removed at once cost one pass over the others.
  void close_gaps();
  static SequenceState state_of(const Sequence& sequence, bool running);
  // Makes the view of a waiting sequence anew.
  void look(Sequence& sequence, View& view) const;

  bool grow(Sequence& sequence, int32_t tokens);  // blocks for `tokens` tokens in all
  void give_back(Sequence& sequence);
  void preempt(size_t index, StepPlan& plan);
  void reuse_prefix(Sequence& sequence);
  // Of a full block of the sequence: what it is known by in the prefix cache.
  const PrefixKey& key_of(Sequence& sequence, size_t block) const;
  // First blocks that a sequence may take from the prefix cache.
  size_t most_reusable(const Sequence& sequence) const;
  // Of these, how many reuse_prefix() would find for a waiting sequence now, about: in a prefix, what lies before a
  // block that is there is taken to be there too.
  size_t find_prefix(Sequence& sequence) const;
  // Whether the block that a waiting sequence needs next is computed by a step in flight or by this one, for a sequence
  // that has at least kLeastPrefix more tokens in common with it. The block is in the prefix cache after that: the
  // sequence waits for it, or all that come together would compute what they have in common.
  bool prefix_is_coming(const Waiting& waiting, const StepPlan& plan);
  // Blocks that a waiting sequence has in common with one that states() has shown before it, which goes on where this
  // one begins: they are computed once.
  int32_t coming_blocks(const Sequence& sequence, View& view);
  void add(StepPlan& plan, Sequence& sequence, int32_t count) const;
  // Moves waiting_[index] to the running ones; its blocks are there.
  void admit(size_t index, StepPlan& plan);
  static void count_prefill(StepPlan& plan);

  SchedulerLimits limits_;
  BlockManager* blocks_;
  size_t least_prefix_;                             // kLeastPrefix in blocks
  std::vector<std::unique_ptr<Sequence>> running_;  // by priority, then in order of admission
  std::deque<Waiting> waiting_;                     // by priority, then in order of arrival
  size_t gaps_ = 0;                                 // of these
  std::vector<View> views_;                         // of waiting ones, in no order
  std::vector<uint32_t> free_views_;
  std::vector<SequenceState> states_;
  std::vector<Sequence*> viewed_;
  size_t viewed_running_ = 0;  // of these
  Beginners beginners_;
  uint64_t preemptions_ = 0;
  uint64_t prefix_queries_ = 0;
  uint64_t prefix_hits_ = 0;
};

}  // namespace nfp
