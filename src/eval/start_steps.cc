#include "eval/start_steps.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "base/atomic_file.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/user_folders.h"
#include "eval/bench_engine.h"
#include "eval/step_probe.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(const StartStepsOptions& options) {
  if (!options.folder.empty()) return options.folder;
  const std::string cache = user_cache_folder();
  return cache.empty() ? fs::path() : fs::path(cache) / "step-times";
}

// What is measured: the options as the engine's runner takes them, in a shorter context.
EngineConfig measured_engine(const LoadedModel& loaded, const StartStepsOptions& options) {
  EngineConfig engine = options.engine;
  engine.speculative_tokens = 0;
  constexpr int32_t kLongest = 4096;
  engine.max_context =
      std::min(engine.max_context > 0 ? engine.max_context : loaded.config.default_context(), kLongest);
  set_defaults(engine.limits, *loaded.backend);
  engine.limits.max_step_tokens = std::max(engine.limits.max_step_tokens, engine.limits.max_sequences);
  return engine;
}

// Everything that a step's time, or which steps are measured, depends on and that may differ between two starts, after
// how it is measured.
std::string key_of(const LoadedModel& loaded, const EngineConfig& engine, const std::string& variant) {
  return fmt::format("5|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}|{}", loaded.name, loaded.model->weight_bytes(),
                     loaded.backend->info().device, loaded.backend->info().threads, name_of(engine.kv_dtype),
                     name_of(engine.fp8), variant, engine.limits.max_sequences, engine.limits.max_step_tokens,
                     engine.max_context, engine.block_size);
}

// A kind of step, and how long it took each time.
struct Kind {
  StepTime step;
  std::vector<double> seconds = {};
};

constexpr int32_t kSmallestChunk = 16;

// In which order kinds are worth their time (start_steps_within).
enum Rank : int { kEnds, kMiddles, kOthers };

// What tells the model's terms apart: tokens alone, chunks behind long contexts, decoding sequences with short and long
// ones, both together. Attention does not depend on the level, so only FP16 sees contexts.
std::vector<StepTime> wanted_steps(int32_t max_sequences, int32_t context) {
  std::vector<StepTime> steps;
  const int32_t half = std::max(1, context / 2), far = std::max(half, context - 256), middle = std::max(1, context / 3);
  for (const size_t level : {0, 1}) {
    for (int32_t tokens = kSmallestChunk; tokens <= 2048; tokens *= 2) steps.push_back({level, tokens});
    for (int32_t n = 1; n <= max_sequences; n *= 2) steps.push_back({level, 0, 0, n, std::min(48, half)});
    steps.push_back({level, 64, 0, 8, std::min(256, half)});
    if (level > 0) continue;
    for (const int32_t tokens : {32, 128, 512}) {
      for (const int32_t before : {middle, far}) steps.push_back({level, tokens, before});
    }
    for (const int32_t n : {1, 4, 16}) steps.push_back({level, 0, 0, n, middle});
    steps.push_back({level, 0, 0, 1, far});
  }
  return steps;
}

// Fastest first, but for one chunk of a prompt before all: decoding sequences tell nothing of what prompts take. What a
// level has is measured next to the same at the other, so that load which comes and goes meets both.
bool goes_before(const StepTime& a, const StepTime& b) {
  const auto place = [](const StepTime& s) {
    const bool chunk = s.prefill_tokens == kSmallestChunk && s.prefill_context == 0 && s.decode_sequences == 0;
    return std::tuple(!chunk, s.tokens(), s.prefill_context, s.decode_context, s.prefill_tokens, s.level);
  };
  return place(a) < place(b);
}

// How long measuring may take, and how many rounds that time is meant for. A CPU has other programs' work between; a
// device has not, and is to be ready at once.
struct Budget {
  using Clock = std::chrono::steady_clock;
  double seconds = 0;
  double rounds = 3.5;
  size_t least_rounds = 2, most_rounds = 7;
  int32_t short_runs = 3;                         // in a round, of steps of few tokens, which are easily disturbed
  int32_t uncounted = 0, uncounted_as_graph = 0;  // runs before those that count, and more of them of decode steps
  bool medians = true;                            // of a round's runs the median counts, else each of them
  Clock::time_point began = Clock::now();
  double elapsed() const { return std::chrono::duration<double>(Clock::now() - began).count(); }
  int32_t runs(const StepTime& step) const { return step.tokens() < 16 ? short_runs : 1; }
  int32_t all_runs(const StepTime& step) const {
    return runs(step) + uncounted + (step.prefill_tokens == 0 ? uncounted_as_graph : 0);
  }
};

Budget budget_of(const Backend& backend, double seconds) {
  if (!backend.memory()) return {.seconds = seconds};
  return {.seconds = std::min(seconds, 1.5),
          .rounds = 1,
          .least_rounds = 1,
          .most_rounds = 2,
          .short_runs = 2,
          .uncounted = 1,
          .uncounted_as_graph = 2,
          .medians = false};
}

// Of the kinds in `all` those that one round has time for in what is left of the budget.
Result<std::vector<Kind>> choose_kinds(StepProbe& probe, const Budget& budget, const std::vector<StepTime>& all) {
  // A step takes so long at the least, and a token of a long one so long: a device is as fast with 64 as with one.
  double least = 0, per_token = 0;
  const int32_t most = std::min(std::max(1, probe.config().max_context / 2), probe.config().limits.max_step_tokens);
  const auto time = [&](int32_t tokens) -> Status {
    const StepTime known = {0, std::min(tokens, most)};
    double fastest = 0;
    for (int i = 0; i < (budget.uncounted > 0 ? 1 : 2); ++i) {  // the first run warms up
      NFP_ASSIGN_OR_RETURN(const auto seconds, probe.run(known, {Precision::kFp16}, 1));
      fastest = i == 0 ? seconds.front() : std::min(fastest, seconds.front());
    }
    least = least > 0 ? std::min(least, fastest) : fastest;
    per_token = fastest / known.tokens();
    return ok_status();
  };
  for (const int32_t tokens : {1, 64}) NFP_RETURN_IF_ERROR(time(tokens));
  constexpr double kShort = 0.02;
  if (64 * per_token < kShort && probe.fits({0, std::min(1024, most)})) NFP_RETURN_IF_ERROR(time(1024));
  // FP8 counts as if it took as long as FP16.
  const auto seconds_of = [&](const StepTime& step) {
    return std::max(least, per_token * step.tokens()) * budget.all_runs(step);
  };
  std::vector<Kind> kinds;
  for (const StepTime& step :
       start_steps_within(all, seconds_of, (budget.seconds - budget.elapsed()) / budget.rounds)) {
    kinds.push_back({step});
  }
  return kinds;
}

Result<StepTable> measure(LoadedModel& loaded, const EngineConfig& engine, double seconds_meant) {
  const Budget budget = budget_of(*loaded.backend, seconds_meant);
  std::vector<StepTime> wanted = start_step_kinds(engine);
  int64_t tokens = 0;  // of KV cache
  for (const StepTime& step : wanted) {
    tokens = std::max(tokens, step.prefill_context + step.prefill_tokens +
                                  int64_t{step.decode_sequences} * (step.decode_context + engine.block_size));
  }
  NFP_ASSIGN_OR_RETURN(const auto probe, StepProbe::create(loaded, engine, tokens));
  std::erase_if(wanted, [&](const StepTime& step) { return !probe->fits(step); });  // into a device's KV cache

  StepTable table;
  table.model = loaded.name;
  table.device = loaded.backend->info().device;
  table.weight_bytes = static_cast<int64_t>(loaded.model->weight_bytes());
  table.max_step_tokens = probe->config().limits.max_step_tokens;
  table.max_sequences = probe->config().limits.max_sequences;
  table.kv_dtype = name_of(probe->config().kv_dtype);
  table.steps_in_flight = probe->config().steps_in_flight;
  table.levels = {{Precision::kFp16, 0}, {probe->computed(engine.fp8), 1}};
  std::vector<Kind> kinds;
  // Again where there was time for more kinds than were chosen: the machine was slower at that moment.
  do {
    NFP_ASSIGN_OR_RETURN(kinds, choose_kinds(*probe, budget, wanted));
    double round_s = 0;
    for (size_t round = 0; round < budget.most_rounds; ++round) {
      if (round >= budget.least_rounds && budget.elapsed() + round_s > budget.seconds) break;
      const double before = budget.elapsed();
      for (Kind& kind : kinds) {
        NFP_ASSIGN_OR_RETURN(const auto seconds,
                             probe->run(kind.step, table.levels[kind.step.level], budget.runs(kind.step)));
        if (budget.medians) {
          kind.seconds.push_back(median(seconds));
        } else {
          kind.seconds.insert(kind.seconds.end(), seconds.begin(), seconds.end());
        }
      }
      round_s = budget.elapsed() - before;
    }
  } while (kinds.size() < wanted.size() && budget.elapsed() < budget.seconds / 2);
  for (const Kind& kind : kinds) {
    // Whatever else the machine did made some of them longer, and none shorter.
    const double fastest = *std::min_element(kind.seconds.begin(), kind.seconds.end());
    StepTime& step = table.steps.emplace_back(kind.step);
    step.ms = 1e3 * fastest;
    step.samples = static_cast<int32_t>(kind.seconds.size());
    table.spread += (median(kind.seconds) / fastest - 1) / static_cast<double>(kinds.size());
  }
  return table;
}

// The steps that either table has, of what both have the lower time: which there was time for differs.
StepTable faster_of(const StepTable& a, const StepTable& b) {
  StepTable best = a;
  for (const StepTime& other : b.steps) {
    const auto same = std::find_if(best.steps.begin(), best.steps.end(), [&](StepTime step) {
      step.ms = other.ms, step.samples = other.samples;
      return step == other;
    });
    if (same == best.steps.end()) {
      best.steps.push_back(other);
    } else {
      same->ms = std::min(same->ms, other.ms);
    }
  }
  best.spread = std::min(a.spread, b.spread);
  return best;
}

// Above it the machine had other work: what was measured is used, and measured again at the next start.
constexpr double kQuietSpread = 0.1;

Status keep(const fs::path& path, const std::string& text) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  if (failed) {
    return error(ErrorCode::kIo, "{}: cannot be made: {}", path.parent_path().string(), failed.message());
  }
  return write_file(path.string(), text);
}

}  // namespace

std::vector<StepTime> start_step_kinds(const EngineConfig& engine) {
  const SchedulerLimits& most = engine.limits;
  const auto fits = [&](const StepTime& step) {
    return step.tokens() <= most.max_step_tokens && step.sequences() <= most.max_sequences &&
           step.prefill_context + step.prefill_tokens <= engine.max_context &&
           step.decode_context <= engine.max_context;
  };
  std::vector<StepTime> steps = wanted_steps(std::min(most.max_sequences, 256), engine.max_context);
  std::erase_if(steps, [&](const StepTime& step) { return !fits(step); });
  const auto at_fp8 = std::count_if(steps.begin(), steps.end(), [](const StepTime& step) { return step.level > 0; });
  if (at_fp8 < 2) {  // a decoding sequence is all that small limits leave
    int32_t tokens = 8;
    while (tokens > 1 && !fits({0, tokens})) tokens /= 2;
    for (const size_t level : {0, 1}) steps.push_back({level, tokens});
  }
  std::sort(steps.begin(), steps.end(), goes_before);
  // In a short context middle, half and far are the same for some.
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

std::vector<StepTime> start_steps_within(std::span<const StepTime> kinds,
                                         const std::function<double(const StepTime&)>& seconds_of, double seconds) {
  constexpr size_t kLeast = 8;
  constexpr double kMostOfAll = 1.0 / 3;  // that one kind may take
  // A kind at both levels, or in FP16 alone.
  struct Group {
    size_t first = 0, count = 0;
    double seconds = 0;
    int rank = kOthers;
  };
  std::vector<Group> groups;
  std::array<std::vector<size_t>, 5> families;  // of those that have time, the shortest first
  for (size_t i = 0; i < kinds.size();) {
    const StepTime& step = kinds[i];
    Group group = {.first = i, .count = i + 1 < kinds.size() && kinds[i + 1].level > 0 ? 2u : 1u};
    for (size_t k = 0; k < group.count; ++k) group.seconds += seconds_of(kinds[i + k]);
    i += group.count;
    groups.push_back(group);
    if (group.seconds > kMostOfAll * seconds) continue;
    const bool decodes = step.decode_sequences > 0, both = decodes && step.prefill_tokens > 0;
    families[both ? 4 : (group.count == 2 ? 0 : 2) + (decodes ? 1 : 0)].push_back(groups.size() - 1);
  }
  for (size_t f = 0; f < families.size(); ++f) {
    const std::vector<size_t>& family = families[f];
    if (family.empty()) continue;
    if (f < 2) {
      groups[family[(family.size() - 1) / 2]].rank = kMiddles;
      groups[family.front()].rank = kEnds;
    }
    groups[family.back()].rank = f < 2 ? kEnds : kMiddles;
  }
  std::vector<size_t> order(groups.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(groups[a].rank, groups[a].seconds) < std::pair(groups[b].rank, groups[b].seconds);
  });
  std::vector<bool> taken(groups.size());
  size_t count = 0;
  double sum = 0;
  const auto take = [&](size_t group) {
    taken[group] = true;
    sum += groups[group].seconds;
    count += groups[group].count;
  };
  for (const size_t group : order) {
    if (groups[group].seconds <= kMostOfAll * seconds && sum + groups[group].seconds <= seconds) take(group);
  }
  for (size_t group = 0; group < groups.size() && count < kLeast; ++group) {
    if (!taken[group]) take(group);
  }
  std::vector<StepTime> chosen;
  for (size_t group = 0; group < groups.size(); ++group) {
    if (!taken[group]) continue;
    for (size_t k = 0; k < groups[group].count; ++k) chosen.push_back(kinds[groups[group].first + k]);
  }
  return chosen;
}

Result<StartSteps> start_step_times(LoadedModel& loaded, const StartStepsOptions& options) {
  StartSteps found;
  const EngineConfig engine = measured_engine(loaded, options);
  std::optional<StepTable> kept;
  const fs::path folder = folder_of(options);
  if (!folder.empty()) {
    const size_t key = std::hash<std::string>{}(key_of(loaded, engine, options.variant));
    found.path = (folder / fmt::format("{:016x}.json", key)).string();
    if (const auto text = read_text_file(found.path); text.ok()) {
      auto table = parse_step_table(*text, found.path);
      // The file's name is a hash: what it holds must be of this model and device all the same.
      if (table.ok() && table->model == loaded.name && table->device == loaded.backend->info().device) {
        kept = std::move(table).value();
      }
    }
  }
  if (kept && kept->spread <= kQuietSpread) {
    found.table = std::move(*kept);
    return found;
  }
  if (options.measures) options.measures();
  const auto start = std::chrono::steady_clock::now();
  NFP_ASSIGN_OR_RETURN(found.table, measure(loaded, engine, options.seconds));
  found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  found.busy = found.table.spread > kQuietSpread;
  if (kept && found.busy) found.table = faster_of(found.table, *kept);
  if (folder.empty()) return found;
  if (const Status saved = keep(found.path, to_json_text(found.table)); !saved.ok()) {
    log::warn("step times are measured again at the next start: {}", saved.error().message);
    found.path.clear();
  }
  return found;
}

}  // namespace nfp
