#include "policy/slo_policy.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <compare>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

namespace nfp {
namespace {

constexpr int kBeforeAll = -1, kLost = 3;
constexpr double kNever = std::numeric_limits<double>::infinity();

// A sequence whose tokens must be computed before its first or next one: a prompt, or what preemption took.
struct Prefill {
  size_t sequence = 0;
  uint64_t serial = 0;
  int32_t tokens = 0;
  // In the KV cache, if it does not run: what the prefix cache has of it may be nobody's, and is room as well then.
  int32_t room = 0;
  double due = 0;
  double target = 0;
  double arrival = 0;
  // Its deadlines count from here: its arrival, or where preemption stopped an answer, when that needed its last token.
  // One that is ahead of its pace is not late yet.
  double since = 0;
  double stopped = 0;  // its arrival, or when it had that token
  int32_t priority = 0;
  bool begun = false;  // an answer
  bool running = false;
  bool exact = false;
  bool shed = false;
  int8_t rank = 0;  // which of its deadlines can be kept: the target, the second one, the longest wait; kLost: none
};

// What prefills are sorted by, beside each other: of thousands, following pointers would be most of the work. Of equal
// ones that come first that are first in line.
struct Deadline {
  double due = 0;
  double arrival = 0;
  Prefill* prefill = nullptr;
  friend auto operator<=>(const Deadline&, const Deadline&) = default;  // NOLINT(modernize-use-nullptr)
};
struct Length {
  int32_t priority = 0;
  int32_t tokens = 0;
  double arrival = 0;
  Prefill* prefill = nullptr;
  friend auto operator<=>(const Length&, const Length&) = default;  // NOLINT(modernize-use-nullptr)
};

constexpr size_t kSerialPlaces = 1 << 13;
size_t place_of(uint64_t serial) { return serial % kSerialPlaces; }

// Tokens of prompts, and how many of these are of exact requests.
struct PromptTokens {
  double all = 0, exact = 0;
  void add(const Prefill& prefill, int sign = 1) {
    all += sign * prefill.tokens;
    if (prefill.exact) exact += sign * prefill.tokens;
  }
};

// How fast a level gets through prompts beside the sequences that decode. Where some requests are exact, steps with FP8
// take turns with steps in FP16 that are theirs alone, and their prompts get steps of all in FP16.
struct Pace {
  size_t level = 0;
  bool apart = false;   // decoding sequences stay in FP16
  double turn_s = 0;    // a step of exact requests after each; 0 = there is none
  StepWork decodes;     // of a step
  double limit_s = 0;   // of a step
  double decode_s = 0;  // a step without prompts, and the turn
  int32_t chunk = 0;    // prompt tokens of a step
  double chunk_s = 0;   // the time of that step, and of the turn
  // The same of the steps that exact prompts get, where they get others.
  int32_t exact_chunk = 0;
  double exact_chunk_s = 0;
};

// What the sequences of a step ask of it.
struct Demand {
  StepWork decodes;            // one token each,
  StepWork exact, inexact;     // of these
  bool exact_prompts = false;  // there are
  bool any_exact() const { return exact_prompts || exact.tokens > 0; }
  double slack = kNever;        // seconds until the first of these must have its token
  double longest_gap = kNever;  // seconds that none of them should wait, whatever its slack
  double least_itl = kNever;    // the shortest of their target gaps
  int32_t running = 0;
  // Tokens in the KV cache for what does not run yet: what runs has its next tokens, and the rest of a prompt.
  int64_t room = 0;
  double limit() const { return std::min(slack, longest_gap); }
};

class SloPolicy final : public PrecisionPolicy {
 public:
  SloPolicy(StepModel model, const SloOptions& options) : model_(std::move(model)), options_(options) {
    for (size_t level = 0; level < model_.levels().size(); ++level) {
      const bool exact = is_exact(model_.levels()[level].precision);
      const bool whole = model_.levels()[level].fp8_share == 1;
      if (!whole && options_.levels == SloOptions::Levels::kFp8Only) continue;
      if (!exact && options_.levels == SloOptions::Levels::kFp16Only) continue;
      levels_.push_back(level);
    }
    // Least harmful first: FP16, then growing shares of the weights in FP8.
    std::stable_sort(levels_.begin(), levels_.end(),
                     [&](size_t a, size_t b) { return model_.levels()[a].fp8_share < model_.levels()[b].fp8_share; });
  }

  std::string name() const override {
    switch (options_.levels) {
      case SloOptions::Levels::kFp16Only:
        return "slo-fp16";
      case SloOptions::Levels::kFp8Only:
        return "slo-fp8";
      case SloOptions::Levels::kAll:
        break;
    }
    return "slo";
  }
  size_t levels() const { return levels_.size(); }
  bool plans() const override { return true; }
  bool fixed() const override { return options_.levels == SloOptions::Levels::kFp16Only; }
  bool needs_sensitivity() const override {
    return std::any_of(levels_.begin(), levels_.end(), [&](size_t level) {
      const double share = model_.levels()[level].fp8_share;
      return share > 0 && share < 1;
    });
  }
  const StepModel* model() const override { return &model_; }
  Precision choose(const StepLoad&) override { return decided_.precision; }
  double fp8_share(const StepLoad&) override { return decided_.fp8_share; }

  void observe(Precision precision, double fp8_share, const StepWork& work, double seconds) override {
    model_.observe(model_.find_level(precision, fp8_share), work, seconds);
  }

  StepDecision decide(const StepState& state) override;

 private:
  void see_choices(const StepState& state);
  void see_arrivals(const StepState& state);
  void count_lost(uint64_t serial);
  // 0 where few of the recent requests were lost that FP8 alone would have kept, or where that would be idle now, 1
  // where many were.
  double many_lost() const {
    if (fp8_queue_s_ <= now_ - fp8_queue_at_) return 0;
    return std::clamp((lost_share_ - options_.few_lost) / (options_.many_lost - options_.few_lost), 0.0, 1.0);
  }
  double longest_wait(const Prefill& prefill) const {
    return std::max(options_.longest_wait_s, 2 * options_.grace * prefill.target);
  }
  // How long a step may be, for those who come while it runs.
  double step_limit(int32_t steps_ahead) const;
  // The TTFT target of the prompt that a token of recent ones belongs to, in the mean: who comes next may be like it.
  double typical_target() const;
  Demand demand_of(const StepState& state, double error, StepDecision* decision);
  std::vector<Pace> paces_for(const StepState& state, const Demand& demand) const;
  size_t choose_for_prompts(const StepState& state, const std::vector<Pace>& paces, size_t fastest,
                            StepDecision* decision);
  bool may_start(const StepState& state, const Prefill& prefill, int32_t running, int64_t free_tokens) const;
  const Prefill* first_in_line(const StepState& state, const Demand& demand) const;
  void add_prompts(const StepState& state, const Pace& pace, double error, const Demand& demand,
                   std::optional<bool> exact, StepWork* work, StepDecision* decision);
  StepWork fill_turn(const StepState& state, Pace* pace, double error, const Demand& demand, StepDecision* decision);
  void hold_room(const StepState& state, const Demand& demand);
  void settle_level(const std::vector<Pace>& paces, const Pace& pace, double error, const Demand& demand,
                    const StepWork& work, StepDecision* decision) const;
  Pace pace_at(size_t level, bool apart, const Demand& demand, double limit_s, const StepState& state) const;
  std::optional<Pace> shared_pace(const StepState& state, const Demand& demand, const Pace& pace);
  // Tokens a step, and seconds, about, of the rest of a prompt in steps with what decodes.
  int32_t shared_chunk(const Pace& pace, const Prefill& prefill, int32_t context, const StepWork& decodes) const;
  double shared_s(const Pace& pace, const Prefill& prefill, int32_t context, const StepWork& decodes) const;
  // How much FP8 a pace is, to compare with.
  double harm(const Pace& pace) const { return harm(model_.levels()[pace.level].fp8_share, pace.apart); }
  static double harm(double fp8_share, bool apart) { return fp8_share - (apart && fp8_share > 0 ? 1e-3 : 0.0); }
  // When the last of these is done, seconds from now.
  double done_after(const Pace& pace, const PromptTokens& tokens) const;
  // Settles which deadline of each prefill can be kept. urgent_ becomes those that have one, in order of rank and
  // deadline.
  void rank(const Pace& fastest, double now);
  bool keeps(const Pace& pace, double now, double reserve) const;

  StepModel model_;
  SloOptions options_;
  std::vector<size_t> levels_;
  std::vector<size_t> choices_;  // of these, those that the requests which are there allow
  struct Arrival {
    double tokens = 0;
    double target = 0;  // TTFT, seconds
  };
  std::deque<Arrival> recent_;  // the last requests seen
  uint64_t next_serial_ = 0;    // who has this one or a larger one has not been seen
  // Had all been in FP8: how long the prompts that were there at that time would have taken from then on, with that
  // many tokens a second, and which requests (by serial) would have been in time and are not lost yet.
  double fp8_queue_s_ = 0, fp8_queue_at_ = 0, fp8_speed_ = 0;
  std::deque<uint64_t> kept_by_fp8_;
  // By place_of() each of these. Of thousands that are lost nearly all were lost before, and are not among these any
  // more.
  std::bitset<kSerialPlaces> may_be_kept_;
  double now_ = 0;         // of the last decision
  double lost_share_ = 0;  // of recent requests, those that FP8 would have kept
  // The prompt that is cut into many steps now, if any: when it should be done, how much of that is for sharing.
  std::optional<uint64_t> shared_;
  double shared_due_ = 0, shared_room_s_ = 0;
  int shared_steps_ = 0;  // since its level changed
  // The sequence for which room in the KV cache is held, if any; and when that last was so.
  std::optional<uint64_t> held_;
  double held_at_ = -kNever;
  bool exact_turn_ = false;  // it was theirs, in the last decision with turns
  double turn_s_ = 0;        // how long it takes, if it was theirs alone
  StepLevel decided_ = {Precision::kFp16, 0};
  StepDecision last_;  // of the last decision that was not the turn of exact requests
  // Of the decision that is being made, with the memory of those before it.
  std::vector<Prefill> prefills_;  // in the order of the sequences
  std::vector<Prefill*> urgent_;   // those with a deadline that can be kept, the most urgent first
  std::vector<Prefill*> open_;     // those with a deadline that has not passed
  std::vector<Deadline> deadlines_;
  std::vector<Length> kept_, lost_;
};

// Where all requests are exact their steps are in FP16, whatever is decided: a plan for FP8 would be too long for them.
void SloPolicy::see_choices(const StepState& state) {
  const bool all_exact =
      !state.sequences.empty() && std::all_of(state.sequences.begin(), state.sequences.end(),
                                              [](const SequenceState& sequence) { return sequence.exact; });
  if (all_exact) {
    choices_.assign(1, model_.exact_level());
  } else {
    choices_ = levels_;
  }
}

void SloPolicy::see_arrivals(const StepState& state) {
  uint64_t next = next_serial_;
  for (const SequenceState& sequence : state.sequences) {
    if (sequence.serial < next_serial_) continue;
    next = std::max(next, sequence.serial + 1);
    fp8_queue_s_ = std::max(0.0, fp8_queue_s_ - std::max(0.0, sequence.arrival_s - fp8_queue_at_));
    fp8_queue_at_ = std::max(fp8_queue_at_, sequence.arrival_s);
    // Before the first prompts have been planned no pace is known: they count as each would take alone.
    fp8_queue_s_ += fp8_speed_ > 0 ? sequence.missing / fp8_speed_
                                   : model_.prompt_seconds(choices_.back(), sequence.missing, sequence.context,
                                                           state.max_step_tokens);
    if (fp8_queue_s_ <= sequence.ttft_s) kept_by_fp8_.push_back(sequence.serial);
    if (kept_by_fp8_.size() > 256) kept_by_fp8_.pop_front();
    lost_share_ *= 1 - 1 / options_.requests_remembered;
    recent_.push_back({static_cast<double>(sequence.missing), sequence.ttft_s});
    if (recent_.size() > 64) recent_.pop_front();
  }
  next_serial_ = next;
}

void SloPolicy::count_lost(uint64_t serial) {
  if (!may_be_kept_[place_of(serial)]) return;
  const auto kept = std::find(kept_by_fp8_.begin(), kept_by_fp8_.end(), serial);
  if (kept == kept_by_fp8_.end()) return;
  kept_by_fp8_.erase(kept);
  lost_share_ += 1 / options_.requests_remembered;
}

Pace SloPolicy::pace_at(size_t level, bool apart, const Demand& demand, double limit_s, const StepState& state) const {
  Pace pace;
  pace.level = level;
  pace.apart = apart;
  const bool fp8 = !is_exact(model_.levels()[level].precision);
  if (fp8 && (demand.exact_prompts || (demand.exact.tokens > 0 && !apart))) {
    StepWork turn = demand.exact;
    if (demand.exact_prompts) turn.add(options_.least_chunk, 0);
    pace.turn_s = model_.seconds(model_.exact_level(), turn);
  }
  pace.decodes = fp8 && !apart ? demand.inexact : demand.decodes;
  pace.decodes.apart = apart;
  pace.limit_s = limit_s - pace.turn_s;
  pace.decode_s = pace.turn_s;
  if (pace.decodes.tokens > 0) pace.decode_s += model_.seconds(apart ? model_.exact_level() : level, pace.decodes);
  const int32_t room = state.max_step_tokens - pace.decodes.tokens;
  pace.chunk = model_.largest_chunk(level, pace.decodes, 0, room, pace.limit_s);
  // Where decodes leave prompts no room within the limit, they get a small chunk all the same, or they would starve.
  pace.chunk = std::max(pace.chunk, std::min(options_.least_chunk, room));
  if (pace.chunk > 0) {
    StepWork both = pace.decodes;
    both.add(pace.chunk, 0);
    pace.chunk_s = model_.seconds(level, both) + pace.turn_s;
  }
  if (fp8 && demand.exact_prompts) {
    const Pace together = pace_at(model_.exact_level(), false, demand, limit_s, state);
    pace.exact_chunk = together.chunk;
    pace.exact_chunk_s = together.chunk_s;
  }
  return pace;
}

double SloPolicy::done_after(const Pace& pace, const PromptTokens& tokens) const {
  if (pace.chunk <= 0) return kNever;
  const double exact = pace.exact_chunk > 0 ? tokens.exact : 0;
  const double exact_s = exact > 0 ? exact / pace.exact_chunk * pace.exact_chunk_s : 0;
  const double others = tokens.all - exact;
  if (others > pace.chunk) return exact_s + others / pace.chunk * pace.chunk_s;
  if (exact > 0 && others <= 0) return exact_s;
  StepWork both = pace.decodes;
  both.add(static_cast<int32_t>(std::max(1.0, others)), 0);
  return exact_s + model_.seconds(pace.level, both) + pace.turn_s;
}

void SloPolicy::rank(const Pace& fastest, double now) {
  // Moore and Hodgson: in order of deadline; where one would be missed, the longest of those so far is given up. What
  // is given up then competes for its second deadline in what is left. Nobody reads on where an answer stops, so one
  // that has waited too long goes first.
  const auto next_deadline = [&](Prefill& prefill) {
    if (++prefill.rank == 1) prefill.due = prefill.since + options_.grace * prefill.target;
    if (prefill.rank == 2) prefill.due = prefill.since + longest_wait(prefill);
  };
  open_.clear();
  deadlines_.clear();
  PromptTokens before;  // of better ranks
  for (Prefill& prefill : prefills_) {
    if (prefill.begun && now - prefill.stopped >= options_.longest_pause_s) {
      prefill.rank = kBeforeAll;
      before.add(prefill);
      deadlines_.push_back({prefill.due, prefill.arrival, &prefill});
      continue;
    }
    // A deadline that has passed takes nothing from the others, whose order is sought: most of those that wait, where
    // thousands do.
    while (prefill.rank < kLost && prefill.due < now) next_deadline(prefill);
    if (prefill.rank < kLost) open_.push_back(&prefill);
  }
  const auto sort = [&] {
    if (!std::is_sorted(deadlines_.begin(), deadlines_.end())) std::sort(deadlines_.begin(), deadlines_.end());
  };
  const auto take = [&](int rank) {
    for (const Deadline& deadline : deadlines_) {
      if (deadline.prefill->rank == rank) urgent_.push_back(deadline.prefill);
    }
  };
  sort();
  take(kBeforeAll);
  for (int rank = 0; rank < kLost; ++rank) {
    deadlines_.clear();
    for (Prefill* prefill : open_) {
      if (prefill->rank == rank) deadlines_.push_back({prefill->due, prefill->arrival, prefill});
    }
    sort();
    kept_.clear();
    PromptTokens tokens = before;
    const auto shorter = [](const Length& a, const Length& b) {
      return a.priority != b.priority ? a.priority < b.priority : a.tokens < b.tokens;
    };
    for (const Deadline& deadline : deadlines_) {
      Prefill* prefill = deadline.prefill;
      kept_.push_back({prefill->priority, prefill->tokens, prefill->arrival, prefill});
      std::push_heap(kept_.begin(), kept_.end(), shorter);
      tokens.add(*prefill);
      while (!kept_.empty() && now + done_after(fastest, tokens) > deadline.due) {
        std::pop_heap(kept_.begin(), kept_.end(), shorter);
        tokens.add(*kept_.back().prefill, -1);
        next_deadline(*kept_.back().prefill);
        kept_.pop_back();
      }
    }
    before = tokens;
    take(rank);
  }
}

bool SloPolicy::keeps(const Pace& pace, double now, double reserve) const {
  PromptTokens tokens;
  for (const Prefill* prefill : urgent_) {
    tokens.add(*prefill);
    if (prefill->rank == kBeforeAll) continue;
    const double spare = prefill->rank == 0 ? reserve * prefill->target : 0.0;
    if (now + done_after(pace, tokens) + spare > prefill->due) return false;
  }
  // A typical prompt that came now and had to wait for all of these would be in time, too.
  return done_after(pace, tokens) <= typical_target();
}

double SloPolicy::step_limit(int32_t steps_ahead) const {
  if (recent_.empty()) return kNever;
  std::vector<double> sorted;
  for (const Arrival& arrival : recent_) sorted.push_back(arrival.target);
  const auto low = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 10);
  std::nth_element(sorted.begin(), low, sorted.end());
  return options_.step_share / (1 + steps_ahead) * *low;
}

double SloPolicy::typical_target() const {
  double tokens = 0, weighted = 0;
  for (const Arrival& arrival : recent_) tokens += arrival.tokens, weighted += arrival.tokens * arrival.target;
  return tokens > 0 ? weighted / tokens : kNever;
}

// Which prompts are lost or shed, the order of the others, and the first pace that keeps them in time.
size_t SloPolicy::choose_for_prompts(const StepState& state, const std::vector<Pace>& paces, size_t fastest,
                                     StepDecision* decision) {
  size_t chosen = 0;
  const double last = harm(last_.fp8_share, last_.exact_singles);
  rank(paces[fastest], state.now_s);
  may_be_kept_.reset();
  for (const uint64_t serial : kept_by_fp8_) may_be_kept_.set(place_of(serial));
  decision->lost.reserve(prefills_.size());
  PromptTokens tokens;
  bool patient = true;  // none that is lost has waited too long
  for (Prefill& prefill : prefills_) {
    if (prefill.rank > 0) {
      decision->lost.push_back(prefill.sequence);
      count_lost(prefill.serial);
    }
    const SequenceState& sequence = state.sequences[prefill.sequence];
    if (prefill.rank <= 0 || options_.missed != SloOptions::Missed::kShed || sequence.started) {
      tokens.add(prefill);
      patient = patient && (prefill.rank < kLost || state.now_s - prefill.since <= options_.patience_s);
      continue;
    }
    prefill.shed = true;
    decision->shed.push_back(prefill.sequence);
    const size_t level = sequence.exact ? model_.exact_level() : paces[fastest].level;
    const double alone = model_.prompt_seconds(level, prefill.tokens, sequence.context, state.max_step_tokens);
    if (alone > prefill.target) decision->hopeless.push_back(prefill.sequence);
  }
  decision->busy_s = done_after(paces[fastest], tokens);
  std::erase_if(urgent_, [](const Prefill* prefill) { return prefill->shed; });
  if (options_.missed == SloOptions::Missed::kAsTheyCome) {
    patient = true;
    deadlines_.clear();
    for (Prefill& prefill : prefills_) {
      prefill.due = prefill.arrival + prefill.target, prefill.rank = 0;
      deadlines_.push_back({prefill.due, prefill.arrival, &prefill});
    }
    std::sort(deadlines_.begin(), deadlines_.end());
    urgent_.clear();
    for (const Deadline& deadline : deadlines_) urgent_.push_back(deadline.prefill);
  }
  const auto before = [](const Prefill* a, const Prefill* b) {
    return a->rank != b->rank ? a->rank < b->rank : a->priority < b->priority;
  };
  if (!std::is_sorted(urgent_.begin(), urgent_.end(), before)) {
    std::stable_sort(urgent_.begin(), urgent_.end(), before);
  }
  // A level below the last step's stays until there is more room than was missing when it was left.
  while (chosen < paces.size()) {
    const double share = harm(paces[chosen]);
    const double few = share < last ? options_.reserve_to_return : options_.reserve;
    const double many = share < last ? options_.reserve_to_return_of_many : options_.reserve_of_many;
    double reserve = few + many_lost() * (many - few);
    if (share > 0 && share < 1) reserve = std::max(reserve, options_.reserve_partial);
    if (patient && keeps(paces[chosen], state.now_s, reserve)) break;
    ++chosen;
  }
  return chosen == paces.size() ? fastest : chosen;
}

// Keys grow from step to step, so the mean step is the one in the middle.
int32_t SloPolicy::shared_chunk(const Pace& pace, const Prefill& prefill, int32_t context,
                                const StepWork& decodes) const {
  StepWork both = decodes;
  both.apart = pace.apart;
  const int32_t fits =
      model_.largest_chunk(pace.level, both, context + prefill.tokens / 2, prefill.tokens, pace.limit_s);
  return std::max(fits, std::min(options_.least_chunk, prefill.tokens));
}

double SloPolicy::shared_s(const Pace& pace, const Prefill& prefill, int32_t context, const StepWork& decodes) const {
  StepWork both = decodes;
  both.apart = pace.apart;
  const int32_t chunk = shared_chunk(pace, prefill, context, decodes);
  both.add(chunk, context + prefill.tokens / 2);
  return model_.seconds(pace.level, both) * prefill.tokens / chunk;
}

// The pace that gets the first prompt done nearly as soon as alone, where what decodes cuts it into many steps; none
// where it does not, or where `pace`, which keeps the deadlines, has more FP8 anyway.
std::optional<Pace> SloPolicy::shared_pace(const StepState& state, const Demand& demand, const Pace& pace) {
  const bool choice = harm(model_.levels()[choices_.back()].fp8_share, false) > 0;
  const bool asked = demand.decodes.tokens > 0 && !urgent_.empty() && !demand.any_exact();
  if (!asked || !choice) {
    shared_.reset();
    return std::nullopt;
  }
  const Prefill& prefill = *urgent_.front();
  const int32_t context = state.sequences[prefill.sequence].context;
  if (prefill.serial != shared_) {
    shared_.reset();
    if (shared_chunk(pace, prefill, context, demand.decodes) * options_.many_steps >= prefill.tokens)
      return std::nullopt;
    shared_ = prefill.serial;
    const double alone = model_.prompt_seconds(model_.exact_level(), prefill.tokens, context, state.max_step_tokens);
    shared_room_s_ = options_.most_longer * alone;
    shared_due_ = state.now_s + alone + shared_room_s_;
    shared_steps_ = options_.shared_steps;
  }
  const bool settled = shared_steps_++ >= options_.shared_steps;
  const double left = shared_due_ - state.now_s, last = harm(last_.fp8_share, last_.exact_singles);
  const double limit = std::min(demand.limit(), options_.shared_gap * demand.least_itl);
  std::optional<Pace> best;
  double best_s = kNever;
  for (const size_t level : choices_) {
    const Pace next = pace_at(level, false, demand, limit, state);
    const double seconds = shared_s(next, prefill, context, demand.decodes);
    if (best && seconds >= best_s / (1 + options_.least_gain)) continue;
    best = next, best_s = seconds;
    // A level stays for some steps, and changes where half of what the prompt may take longer is spared or missing.
    double spare = 0;
    if (harm(next) <= last) spare = (harm(next) < last ? 1 : -1) * (settled ? 0.5 : kNever);
    if (seconds <= left - spare * shared_room_s_) break;
  }
  if (!best || harm(*best) < harm(pace)) return std::nullopt;
  if (harm(*best) != last) shared_steps_ = 0;
  return best;
}

// A sequence that needs more room than others, which come and go, ever leave at once would wait for as long as they
// come. So no other prompt is admitted before one that has waited long. But only now and then: under more load than
// there is room for many have waited long, and it is the others that can be in time.
void SloPolicy::hold_room(const StepState& state, const Demand& demand) {
  const Prefill* longest = nullptr;
  bool still = false;
  for (const Prefill& prefill : prefills_) {
    if (prefill.running || prefill.shed) continue;
    still = still || prefill.serial == held_;
    if (prefill.room <= demand.room || demand.running == 0) continue;
    if (longest == nullptr || prefill.stopped < longest->stopped) longest = &prefill;
  }
  if (!still) held_.reset();
  if (held_) held_at_ = state.now_s;
  if (held_ || longest == nullptr) return;
  if (state.now_s - std::max(longest->stopped, held_at_) < options_.patience_s) return;
  held_ = longest->serial;
  held_at_ = state.now_s;
}

bool SloPolicy::may_start(const StepState& state, const Prefill& prefill, int32_t running, int64_t free_tokens) const {
  if (prefill.running) return true;
  if (running >= state.max_sequences) return false;
  if (held_ && !prefill.begun && prefill.serial != held_) return false;
  return prefill.room <= free_tokens || running == 0;
}

// Which prompt add_prompts() begins with; null where none may start.
const Prefill* SloPolicy::first_in_line(const StepState& state, const Demand& demand) const {
  const auto may = [&](const Prefill& prefill) { return may_start(state, prefill, demand.running, demand.room); };
  for (const Prefill* prefill : urgent_) {
    if (may(*prefill)) return prefill;
  }
  const Prefill* first = nullptr;
  for (const Prefill& prefill : prefills_) {
    if (prefill.rank != kLost || prefill.shed || !may(prefill)) continue;
    const auto order = [](const Prefill& of) { return std::tuple(of.priority, of.tokens, of.arrival); };
    if (first == nullptr || order(prefill) < order(*first)) first = &prefill;
  }
  return first;
}

// Chunks of prompts behind the decoding sequences, which are in `work`: of all, or of those that are exact or are not.
void SloPolicy::add_prompts(const StepState& state, const Pace& pace, double error, const Demand& demand,
                            std::optional<bool> exact, StepWork* work, StepDecision* decision) {
  int32_t room = std::min(pace.chunk, state.max_step_tokens - work->tokens);
  int64_t free_tokens = demand.room;
  int32_t running = demand.running;
  double end_s = pace.limit_s;  // when the step has to be done, for the sake of prompts that end in it
  const auto may = [&](const Prefill& prefill) {
    return (!exact || prefill.exact == *exact) && may_start(state, prefill, running, free_tokens);
  };
  // False: the step is full.
  const auto add = [&](const Prefill& prefill) {
    const int32_t context = state.sequences[prefill.sequence].context;
    // The pace is of prompts without anything in the cache; what attention to that adds counts here.
    int32_t count = std::min(room, prefill.tokens);
    count = std::max(model_.largest_chunk(pace.level, *work, context, count, end_s),
                     std::min(count, options_.least_chunk - (pace.chunk - room)));
    if (count < 1) return false;
    if (!prefill.running) {
      ++running;
      free_tokens -= prefill.room;
    }
    decision->chunks.push_back({prefill.sequence, count});
    work->add(count, context);
    room -= count;
    if (count < prefill.tokens || prefill.rank > 0) return room > 0;
    // Its first token comes when the step ends: what else is put into the step must not make it late.
    const double left = prefill.due - state.now_s, least = model_.seconds(pace.level, *work);
    if (least <= left) end_s = std::min(end_s, std::max(least, left * (1 - options_.end_errors * error)));
    return room > 0;
  };
  if (room < 1) return;
  for (const Prefill* prefill : urgent_) {
    if (may(*prefill) && !add(*prefill)) return;
  }
  // The shortest first; who may not start now may not after others have started either.
  lost_.clear();
  for (Prefill& prefill : prefills_) {
    if (prefill.rank == kLost && !prefill.shed && may(prefill)) {
      lost_.push_back({prefill.priority, prefill.tokens, prefill.arrival, &prefill});
    }
  }
  std::make_heap(lost_.begin(), lost_.end(), std::greater<>());
  while (!lost_.empty()) {
    const Prefill& prefill = *lost_.front().prefill;
    if (may(prefill) && !add(prefill)) return;
    std::pop_heap(lost_.begin(), lost_.end(), std::greater<>());
    lost_.pop_back();
  }
}

// The chunks of a step at a pace whose steps take turns with those of exact requests. What decodes is in the decision
// already. The turn of exact requests has little of their prompts: where one of these is the first in line, all
// requests are in one step in FP16. It comes after their turn, so that they have not waited for a step of others just
// before it, and as much sooner to its end as that took, for which those others have waited.
StepWork SloPolicy::fill_turn(const StepState& state, Pace* pace, double error, const Demand& demand,
                              StepDecision* decision) {
  const std::vector<StepChunk> decodes = decision->chunks;
  const double waited = std::exchange(turn_s_, 0.0);
  const Pace together = pace_at(model_.exact_level(), false, demand, demand.limit() - waited, state);
  const Prefill* first = first_in_line(state, demand);
  if (first == nullptr || !first->exact || !exact_turn_) {
    exact_turn_ = !exact_turn_;
    if (exact_turn_) {
      *pace = together;
      pace->decodes = demand.exact;
      pace->chunk = std::min(pace->chunk, options_.least_chunk);
    }
    if (!pace->apart) {
      std::erase_if(decision->chunks,
                    [&](const StepChunk& chunk) { return state.sequences[chunk.sequence].exact != exact_turn_; });
    }
    StepWork work = pace->decodes;
    add_prompts(state, *pace, error, demand, exact_turn_, &work, decision);
    if (!decision->chunks.empty()) {
      if (exact_turn_) turn_s_ = model_.seconds(model_.exact_level(), work);
      return work;
    }
  }
  exact_turn_ = true;
  *pace = together;
  decision->chunks = decodes;
  StepWork work = pace->decodes;
  add_prompts(state, *pace, error, demand, std::nullopt, &work, decision);
  return work;
}

// The decoding sequences are in the decision already.
Demand SloPolicy::demand_of(const StepState& state, double error, StepDecision* decision) {
  const double catch_up = options_.catch_up * (1 - options_.catch_up_errors * error);
  const double longest_gap = options_.longest_gap - options_.longest_gap_errors * error;
  const double itl_margin = options_.itl_margin + options_.itl_margin_errors * error;
  Demand demand;
  demand.room = state.free_tokens;
  prefills_.clear();
  urgent_.clear();
  for (size_t i = 0; i < state.sequences.size(); ++i) {
    const SequenceState& sequence = state.sequences[i];
    demand.running += sequence.running ? 1 : 0;
    if (!sequence.ready) continue;
    if (sequence.running && sequence.missing == 1 && sequence.emitted > 0) {
      if (demand.decodes.tokens >= state.max_step_tokens) continue;
      decision->chunks.push_back({i, 1});
      demand.decodes.add(1, sequence.context);
      (sequence.exact ? demand.exact : demand.inexact).add(1, sequence.context);
      continue;
    }
    const bool begun = sequence.emitted > 0;
    const double since = begun ? std::min(state.now_s, sequence.due_s - sequence.itl_s) : sequence.arrival_s;
    Prefill& prefill = prefills_.emplace_back();
    prefill.sequence = i;
    prefill.serial = sequence.serial;
    prefill.tokens = sequence.missing;
    prefill.room = sequence.context + sequence.missing;
    prefill.due = begun ? since + sequence.ttft_s : sequence.due_s;
    prefill.target = sequence.ttft_s;
    prefill.arrival = sequence.arrival_s;
    prefill.since = since;
    prefill.stopped = begun ? sequence.last_s : sequence.arrival_s;
    prefill.priority = sequence.priority;
    prefill.begun = begun;
    prefill.running = sequence.running;
    prefill.exact = sequence.exact;
    demand.exact_prompts = demand.exact_prompts || sequence.exact;
    if (sequence.running) demand.room -= sequence.missing;
  }
  demand.room -= demand.decodes.tokens;
  double least = kNever;  // seconds
  for (const size_t level : choices_) least = std::min(least, model_.seconds(level, demand.decodes));
  struct Wish {
    double slack, gap, itl;
  };
  std::vector<Wish> wishes;
  double unkept = 0;  // the longest target gap that no level keeps
  for (const StepChunk& chunk : decision->chunks) {
    const SequenceState& sequence = state.sequences[chunk.sequence];
    // Aiming a little below the target leaves room for steps that take longer than predicted.
    const double slack = sequence.due_s - state.now_s - itl_margin * sequence.itl_s * sequence.emitted;
    const Wish& wish = wishes.emplace_back(
        Wish{std::max(slack, catch_up * sequence.itl_s), longest_gap * sequence.itl_s, sequence.itl_s});
    if (least > std::min(wish.slack, wish.gap)) unkept = std::max(unkept, wish.itl);
  }
  for (const Wish& wish : wishes) {
    // Where no level computes what decodes within its pace, shorter steps cannot bring that back, and prompts that get
    // a few tokens in each of them would only wait as well. Those with longer targets keep theirs.
    const bool keeps = wish.itl > unkept;
    demand.slack = std::min(demand.slack, keeps ? wish.slack : 2 * least);
    demand.longest_gap = std::min(demand.longest_gap, keeps ? wish.gap : 2 * least);
    demand.least_itl = std::min(demand.least_itl, keeps ? wish.itl : 2 * least);
  }
  return demand;
}

// Candidates, the most wanted first: less FP8, then shorter steps; where nothing else keeps the deadlines, steps as
// long as the decoding sequences' slack allows.
std::vector<Pace> SloPolicy::paces_for(const StepState& state, const Demand& demand) const {
  const double limit = demand.limit(), short_limit = std::min(limit, step_limit(state.steps_ahead));
  std::vector<Pace> paces;
  const bool both = options_.exact_decode && options_.levels == SloOptions::Levels::kAll && demand.decodes.tokens > 0 &&
                    !prefills_.empty();
  const auto add = [&](size_t level, bool apart, double limit_s) {
    paces.push_back(pace_at(level, apart, demand, limit_s, state));
  };
  const auto for_each_level = [&](const auto& add_level) {
    for (const size_t level : choices_) {
      if (both && !is_exact(model_.levels()[level].precision)) add_level(level, true);
      add_level(level, false);
    }
  };
  for_each_level([&](size_t level, bool apart) {
    add(level, apart, short_limit);
    add(level, apart, limit);
  });
  for_each_level([&](size_t level, bool apart) { add(level, apart, demand.slack); });
  return paces;
}

// Precision is not given away in this very step either: its chunk may be shorter than the pace's.
void SloPolicy::settle_level(const std::vector<Pace>& paces, const Pace& pace, double error, const Demand& demand,
                             const StepWork& work, StepDecision* decision) const {
  const double last = harm(last_.fp8_share, last_.exact_singles);
  size_t taken = pace.level;
  bool apart = pace.apart;
  double seconds = work.tokens > 0 ? model_.seconds(taken, work) : 0;
  for (const Pace& other : paces) {
    const double now = harm(model_.levels()[taken].fp8_share, apart);
    if (work.tokens == 0 || harm(other) >= now) continue;
    // What decodes in a launch of its own may be exact.
    if (pace.apart && !other.apart && other.turn_s > 0 && demand.exact.tokens > 0) continue;
    StepWork same = work;
    same.apart = other.apart;
    const double other_s = model_.seconds(other.level, same);
    const bool stays = harm(other) == last && now > last;
    if (other_s > seconds * (stays ? 1 + std::max(options_.least_gain, error) : 1.0)) continue;
    taken = other.level, apart = other.apart, seconds = other_s;
  }
  const StepLevel& level = model_.levels()[taken];
  decision->precision = level.precision;
  decision->fp8_share = level.fp8_share;
  decision->exact_singles = apart;
  decision->predicted_s = seconds;
}

StepDecision SloPolicy::decide(const StepState& state) {
  see_choices(state);
  see_arrivals(state);
  now_ = state.now_s;
  const double error = std::min(model_.recent_error().mean, options_.most_error);
  StepDecision decision;
  const Demand demand = demand_of(state, error, &decision);
  const std::vector<Pace> paces = paces_for(state, demand);
  const bool prompts = !prefills_.empty();
  PromptTokens tokens;
  for (const Prefill& prefill : prefills_) tokens.add(prefill);
  const auto speed = [&](const Pace& pace) {
    if (pace.chunk <= 0) return 0.0;
    if (pace.exact_chunk <= 0) return pace.chunk / pace.chunk_s;
    return tokens.all / ((tokens.all - tokens.exact) / pace.chunk * pace.chunk_s +
                         tokens.exact / pace.exact_chunk * pace.exact_chunk_s);
  };
  size_t fastest = 0;
  for (size_t i = 1; i < paces.size(); ++i) {
    const bool faster = prompts ? speed(paces[i]) > speed(paces[fastest]) : paces[i].decode_s < paces[fastest].decode_s;
    if (faster) fastest = i;
  }

  if (prompts) fp8_speed_ = speed(paces[fastest]);

  size_t chosen = 0;
  if (prompts) chosen = choose_for_prompts(state, paces, fastest, &decision);
  const size_t for_prompts = chosen;
  // Decoding sequences: their next token must not be late for precision's sake either.
  double decode_limit = demand.limit();
  if (many_lost() > 0) {
    decode_limit = std::min(decode_limit, demand.least_itl * (1 - many_lost() * (1 - options_.decode_share_of_many)));
  }
  while (chosen != fastest && chosen + 1 < paces.size() && paces[chosen].decode_s > decode_limit &&
         paces[fastest].decode_s < paces[chosen].decode_s) {
    ++chosen;
  }
  // Precision is never given away for nothing.
  const bool none_left = prefills_.size() == decision.shed.size();
  const auto time_of = [&](const Pace& pace) { return none_left ? pace.decode_s : 1.0 / speed(pace); };
  for (size_t i = 0; i < chosen; ++i) {
    if (time_of(paces[i]) <= time_of(paces[chosen])) chosen = i;
  }

  const std::optional<Pace> shared = shared_pace(state, demand, paces[chosen]);
  Pace pace = shared ? *shared : paces[chosen];
  hold_room(state, demand);
  const bool turns = pace.turn_s > 0;
  StepWork work = pace.decodes;
  if (turns) {
    work = fill_turn(state, &pace, error, demand, &decision);
  } else {
    turn_s_ = 0;
    add_prompts(state, pace, error, demand, std::nullopt, &work, &decision);
  }
  settle_level(paces, pace, error, demand, work, &decision);
  decided_ = {decision.precision, decision.fp8_share};
  if (turns && exact_turn_) return decision;
  const double last = harm(last_.fp8_share, last_.exact_singles);
  const double now = harm(decision.fp8_share, decision.exact_singles);
  if (now > last) {
    decision.change = shared || chosen == for_prompts ? LevelChange::kFirstTokens : LevelChange::kPace;
  } else if (now < last) {
    decision.change = LevelChange::kRoom;
  }
  last_.precision = decision.precision;
  last_.fp8_share = decision.fp8_share;
  last_.exact_singles = decision.exact_singles;
  return decision;
}

}  // namespace

std::optional<SloOptions::Missed> parse_slo_missed(std::string_view text) {
  if (text == "last") return SloOptions::Missed::kLast;
  if (text == "shed") return SloOptions::Missed::kShed;
  if (text == "as-they-come") return SloOptions::Missed::kAsTheyCome;
  return std::nullopt;
}

std::optional<SloOptions::Levels> parse_slo_levels(std::string_view text) {
  if (text == "slo") return SloOptions::Levels::kAll;
  if (text == "slo-fp16") return SloOptions::Levels::kFp16Only;
  if (text == "slo-fp8") return SloOptions::Levels::kFp8Only;
  return std::nullopt;
}

Result<std::unique_ptr<PrecisionPolicy>> make_slo_policy(StepModel model, const SloOptions& options) {
  if (model.exact_level() >= model.levels().size()) {
    return error(ErrorCode::kUsage,
                 "the step times have no FP16 level, by which 'slo' decides; measure it too, with nestedfp bench MODEL "
                 "steps");
  }
  auto policy = std::make_unique<SloPolicy>(std::move(model), options);
  if (policy->levels() == 0) {
    return error(ErrorCode::kUsage, "the step times have no level that the policy '{}' could choose", policy->name());
  }
  return std::unique_ptr<PrecisionPolicy>(std::move(policy));
}

}  // namespace nfp
