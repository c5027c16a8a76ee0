#include "backend/cuda/gemm/plan/tuning_table.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/json_depth.h"
#include "base/mapped_file.h"

namespace nfp::cuda {
namespace {

constexpr std::string_view kFormat = "nestedfp gemm choices 2";
constexpr std::string_view kFormatWithoutModels = "nestedfp gemm choices 1";

std::optional<Mode> parse_mode(std::string_view name) {
  for (const Mode mode : kModes) {
    if (name == name_of(mode)) return mode;
  }
  return std::nullopt;
}

constexpr int kMostTokens = 1 << 20;

// Without a model of time, every number of tokens runs the cuts of this many under batch invariance.
constexpr int64_t kInvariantTokens = 16;

struct Quantity {
  const char* name;
  double TimeModel::*value;
  bool required = true;  // or 0 where a file does not name it
};
constexpr std::array kQuantities = {
    Quantity{"launch_us", &TimeModel::launch_us},
    Quantity{"memory_tb_s", &TimeModel::memory_tb_s},
    Quantity{"l2_tb_s", &TimeModel::l2_tb_s},
    Quantity{"tflops", &TimeModel::tflops},
    Quantity{"exchange_us", &TimeModel::exchange_us},
    Quantity{"exchange_us_kb", &TimeModel::exchange_us_kb},
    Quantity{"exchange_us_part", &TimeModel::exchange_us_part, false},
    Quantity{"turn_us", &TimeModel::turn_us, false},
    Quantity{"split_us", &TimeModel::split_us},
    Quantity{"split_us_kb", &TimeModel::split_us_kb},
    Quantity{"split_us_part", &TimeModel::split_us_part, false},
    Quantity{"stream_us", &TimeModel::stream_us},
    Quantity{"stream_us_kb", &TimeModel::stream_us_kb},
    Quantity{"pair_tb_s", &TimeModel::pair_tb_s, false},
    Quantity{"reread", &TimeModel::reread},
};

bool is_time(const nlohmann::json& value) {
  return value.is_number() && value.get<double>() >= 0 && value.get<double>() < 1e9;
}

// Empty, or what is wrong with it.
std::string parse_model(const nlohmann::json& entry, TimeModel& model) {
  for (const Quantity& quantity : kQuantities) {
    const auto at = entry.find(quantity.name);
    if (at == entry.end() && !quantity.required) continue;
    if (at == entry.end() || !is_time(*at)) return fmt::format("'{}' of a model is not a number from 0", quantity.name);
    model.*quantity.value = at->get<double>();
  }
  if (model.memory_tb_s <= 0 || model.l2_tb_s <= 0 || model.tflops <= 0) return "a rate of a model is 0";
  const auto tiles = entry.find("tiles");
  if (tiles == entry.end() || !tiles->is_object()) return "'tiles' of a model is not an object";
  for (const auto& [name, cost] : tiles->items()) {
    const auto config = parse_config(name);
    if (!config || config->splits != 1) return fmt::format("no such tile: '{}'", name);
    if (!cost.is_array() || cost.size() != 2 || !is_time(cost[0]) || !is_time(cost[1]))
      return fmt::format("the costs of '{}' are not two numbers", name);
    const auto index = std::find(kTiles.begin(), kTiles.end(), config->tile) - kTiles.begin();
    model.tiles[static_cast<size_t>(index)] = {cost[0].get<double>(), cost[1].get<double>()};
  }
  return {};
}

}  // namespace

Result<TuningTable> TuningTable::parse(std::string_view text, const std::string& source) {
  using Json = nlohmann::json;
  const auto bad = [&](std::string_view what) {
    return error(ErrorCode::kInvalidInput, "{}: {}; make the file again with 'nestedfp tune'", source, what);
  };
  if (json_too_deep(text)) return bad("is nested too deeply");
  const Json root = Json::parse(text, nullptr, false);
  if (!root.is_object()) return bad("is not a JSON object");
  const auto string_field = [](const Json& object, const char* key) -> std::string {
    const auto at = object.find(key);
    return at != object.end() && at->is_string() ? at->get<std::string>() : std::string();
  };
  const std::string format = string_field(root, "format");
  if (format != kFormat && format != kFormatWithoutModels)
    return bad(fmt::format("'format' is neither '{}' nor '{}'", kFormat, kFormatWithoutModels));
  TuningTable table;
  table.device = string_field(root, "device");
  if (format == kFormat) {
    const auto models = root.find("models");
    if (models == root.end() || !models->is_object()) return bad("'models' is not an object");
    for (const auto& [name, entry] : models->items()) {
      const auto mode = parse_mode(name);
      if (!mode || !entry.is_object()) return bad(fmt::format("no model of a mode: '{}'", name));
      TimeModel model;
      if (const std::string wrong = parse_model(entry, model); !wrong.empty()) return bad(wrong);
      table.set_model(*mode, model);
    }
  }
  const auto choices = root.find("choices");
  if (choices == root.end() || !choices->is_array()) return bad("'choices' is not a list");
  for (const Json& entry : *choices) {
    if (!entry.is_object()) return bad("an entry of 'choices' is not an object");
    int64_t sizes[2] = {0, 0};
    for (const int i : {0, 1}) {
      const auto at = entry.find(i == 0 ? "n" : "k");
      if (at == entry.end() || !at->is_number_integer()) return bad("'n' or 'k' of a choice is not a whole number");
      sizes[i] = at->get<int64_t>();
      if (sizes[i] <= 0 || sizes[i] > (int64_t{1} << 30)) return bad("'n' or 'k' of a choice is out of range");
    }
    const auto mode = parse_mode(string_field(entry, "mode"));
    if (!mode) return bad(fmt::format("unknown mode '{}'", string_field(entry, "mode")));
    const auto by_tokens = entry.find("by_tokens");
    if (by_tokens == entry.end() || !by_tokens->is_object()) return bad("'by_tokens' of a choice is not an object");
    for (const auto& [key, value] : by_tokens->items()) {
      int tokens = 0;
      const auto [end, status] = std::from_chars(key.data(), key.data() + key.size(), tokens);
      const bool known = status == std::errc() && end == key.data() + key.size() && tokens > 0 && tokens <= kMostTokens;
      if (!known) return bad(fmt::format("'{}' is not a number of tokens from 1 to {}", key, kMostTokens));
      const auto config = value.is_string() ? parse_config(value.get_ref<const std::string&>()) : std::nullopt;
      if (!config || !exists(config->tile, *mode)) return bad(fmt::format("no such kernel: {}", value.dump()));
      table.set(sizes[0], sizes[1], *mode, tokens, *config);
    }
  }
  return table;
}

Result<TuningTable> TuningTable::load(const std::string& path) {
  NFP_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const auto bytes = file.bytes();
  return parse({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path);
}

const TuningTable* built_in_table(std::string_view device, int sms) {
  static const Result<TuningTable> h100 = TuningTable::parse(built_in_choices_h100(), "built-in choices for H100");
  static const Result<TuningTable> h200 = TuningTable::parse(built_in_choices_h200(), "built-in choices for H200");
  if (sms != 132) return nullptr;
  const auto named = [&](std::string_view part) { return device.find(part) != std::string_view::npos; };
  if (named("H100")) return h100.ok() ? &*h100 : nullptr;
  if (named("H200")) return h200.ok() ? &*h200 : nullptr;  // a GH200 too: its GPU has the same SMs
  return nullptr;
}

std::string TuningTable::dump() const {
  nlohmann::ordered_json root;
  root["format"] = has_models() ? kFormat : kFormatWithoutModels;
  root["device"] = device;
  for (const auto& [mode, model] : models_) {
    nlohmann::ordered_json entry;
    for (const Quantity& quantity : kQuantities) entry[quantity.name] = model.*quantity.value;
    entry["tiles"] = nlohmann::ordered_json::object();
    for (size_t i = 0; i < kTiles.size(); ++i) {
      if (model.tiles[i].step_us > 0)
        entry["tiles"][to_string({kTiles[i], 1, false})] = {model.tiles[i].step_us, model.tiles[i].tile_us};
    }
    root["models"][std::string(name_of(mode))] = std::move(entry);
  }
  root["choices"] = nlohmann::ordered_json::array();
  for (const auto& [key, buckets] : choices_) {
    nlohmann::ordered_json entry;
    entry["n"] = std::get<0>(key);
    entry["k"] = std::get<1>(key);
    entry["mode"] = name_of(std::get<2>(key));
    for (const auto& [tokens, config] : buckets) entry["by_tokens"][std::to_string(tokens)] = to_string(config);
    root["choices"].push_back(std::move(entry));
  }
  return root.dump(1) + "\n";
}

void TuningTable::fill_from(const TuningTable& other) {
  for (const auto& [shape, buckets] : other.choices_) choices_[shape].insert(buckets.begin(), buckets.end());
  models_.insert(other.models_.begin(), other.models_.end());
}

void TuningTable::set(int64_t n, int64_t k, Mode mode, int tokens, const Config& config) {
  choices_[{n, k, mode}][tokens] = config;
}

namespace {

// The mode whose measured choices serve a mode without its own: BF16 does the same work as FP16 in the same tiles, and
// W8A16 reads what E4M3 reads, which is what counts for few tokens (but a model of its own knows better).
Mode measured_as(const Problem& problem, bool has_model) {
  if (problem.mode == Mode::kBF16) return Mode::kF16;
  return problem.mode == Mode::kW8A16 && problem.m <= 64 && !has_model ? Mode::kE4M3 : problem.mode;
}

bool is_bucket(int tokens) {
  return std::find(kTokenBuckets.begin(), kTokenBuckets.end(), tokens) != kTokenBuckets.end();
}

// Up to here tuned numbers of tokens are as close as the widths of tiles, and what was measured is within 1 % of the
// best.
constexpr int64_t kFineBuckets = 64;

}  // namespace

const TuningTable::Buckets* TuningTable::buckets(const Problem& problem) const {
  auto shape = choices_.find({problem.n, problem.k, problem.mode});
  if (shape == choices_.end())
    shape = choices_.find({problem.n, problem.k, measured_as(problem, models_.contains(problem.mode))});
  return shape == choices_.end() ? nullptr : &shape->second;
}

std::optional<Config> TuningTable::find(const Problem& problem) const {
  if (const auto near = checked(problem)) return near;
  const Buckets* tuned = buckets(problem);
  if (tuned == nullptr) return std::nullopt;
  auto at = tuned->lower_bound(token_bucket(problem.m));
  while (at != tuned->end() && !is_bucket(at->first)) ++at;
  if (at == tuned->end() || !exists(at->second.tile, problem.mode, problem.join)) return std::nullopt;
  return at->second;
}

std::optional<Config> TuningTable::checked(const Problem& problem) const {
  const Buckets* tuned = buckets(problem);
  if (tuned == nullptr) return std::nullopt;
  const int64_t width = problem.m <= kFineBuckets ? 8 : 16, least = (problem.m - 1) / width * width + 1;
  const std::pair<const int, Config>* nearest = nullptr;
  int64_t distance = width;
  for (auto at = tuned->lower_bound(static_cast<int>(least)); at != tuned->end() && at->first < least + width; ++at) {
    const int64_t away = std::abs(at->first - problem.m);
    if (away > distance || !exists(at->second.tile, problem.mode, problem.join)) continue;
    distance = away;
    nearest = &*at;  // of two as near the larger
  }
  if (nearest == nullptr || is_bucket(nearest->first)) return std::nullopt;
  return nearest->second;
}

bool TuningTable::has_bucket(const Problem& problem) const {
  const Buckets* tuned = buckets(problem);
  return tuned != nullptr && tuned->contains(token_bucket(problem.m));
}

const TimeModel* TuningTable::model(Mode mode) const {
  auto at = models_.find(mode == Mode::kBF16 ? Mode::kF16 : mode);
  if (at == models_.end() && mode == Mode::kW8A16) at = models_.find(Mode::kF16);
  return at == models_.end() ? nullptr : &at->second;
}

namespace {

// The fastest candidate by prediction. Choices that were measured to be the fastest at the numbers of tokens on either
// side are taken unless another should be so much faster.
constexpr double kMeasuredNearby = 0.97;
// Stream-K's time depends most on what the L2 still holds, which is not modelled well: with more than two tiles of
// tokens it took up to 1.5 times as long as predicted.
constexpr double kStreamMargin = 1.02, kWideStreamMargin = 1.2;
Config predicted(const Problem& problem, const DeviceShape& device, const TimeModel& model, const TuningTable& table) {
  std::array<std::optional<Config>, 2> nearby;
  Problem neighbour = problem;
  neighbour.m = token_bucket(problem.m);
  nearby[0] = table.find(neighbour);
  const auto above = std::find(kTokenBuckets.begin(), kTokenBuckets.end(), neighbour.m);
  if (problem.m < neighbour.m && above != kTokenBuckets.begin()) {
    neighbour.m = *(above - 1);
    nearby[1] = table.find(neighbour);
  }
  Config best;
  double best_us = std::numeric_limits<double>::infinity();
  const auto consider = [&](const Config& config) {
    double us = predict_us(model, problem, config, device);
    if (config == nearby[0] || config == nearby[1]) us *= kMeasuredNearby;
    if (config.splits == 0) us *= problem.m <= int64_t{2} * config.tile.tokens ? kStreamMargin : kWideStreamMargin;
    if (us < best_us) {
      best_us = us;
      best = config;
    }
  };
  for_each_candidate(problem, device, consider);
  if (std::isinf(best_us)) return analytic_choice(problem, device);  // a model that knows none of the tiles
  return best;
}

// Batch-invariant runs cut every tile's k in so many parts. (A cluster holds them, so that however many tokens there
// are some tile can keep the cut.)
bool keeps_cut(const Problem& problem, const Config& config, const DeviceShape& device) {
  const Schedule schedule = make_schedule(problem, config, device);
  return config.splits == 1 ? schedule.shares == 0
                            : schedule.shares == schedule.tiles() * std::min<int>(config.splits, schedule.k_iterations);
}

struct Predicted {
  Config config;
  double us = std::numeric_limits<double>::infinity();
};
// The fastest tile with every k cut in `splits`. One row block per warpgroup keeps promotion's interval the same in
// all.
Predicted fastest_with_cut(const Problem& problem, int splits, const DeviceShape& device, const TimeModel& model) {
  Predicted best;
  for_each_tile(problem, [&](const Tile& tile) {
    if (problem.mode == Mode::kE4M3Promoted && tile.row_blocks != 1) return;
    for (const bool exchange : {false, true}) {
      if (exchange && !can_exchange(tile, splits)) continue;
      const Config config{tile, static_cast<int16_t>(splits), exchange};
      const double us = predict_us(model, problem, config, device);
      if (us < best.us && keeps_cut(problem, config, device)) best = {config, us};
    }
  });
  return best;
}

// The cut that costs the least over all numbers of tokens, each power of four as often as any other.
int invariant_splits(Problem problem, const DeviceShape& device, const TimeModel& model) {
  int best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (const int splits : {1, 2, 3, 4, 5, 6, 8}) {
    double logs = 0;
    for (const int64_t m : {1, 4, 16, 64, 256, 1024, 4096}) {
      problem.m = m;
      logs += std::log(fastest_with_cut(problem, splits, device, model).us);
    }
    if (logs < least) {
      least = logs;
      best = splits;
    }
  }
  return best;
}

}  // namespace

Choice choose(const Problem& problem, const DeviceShape& device, const TuningTable* table, Reduction reduction) {
  if (reduction == Reduction::kBatchInvariant) {
    int splits = 1;
    const TimeModel* model = table == nullptr ? nullptr : table->model(problem.mode);
    if (model != nullptr) {
      splits = invariant_splits(problem, device, *model);
      const Predicted predicted = fastest_with_cut(problem, splits, device, *model);
      if (!std::isinf(predicted.us)) return {predicted.config, "batch-invariant"};
    } else {
      // Cuts are those of a decode step. (A cluster holds that many parts, so that however many tokens there are some
      // tile can keep the cut.)
      Problem decode = problem;
      decode.m = kInvariantTokens;
      splits = std::clamp<int>(choose(decode, device, table, Reduction::kFastest).config.splits, 1, kMaxCluster);
    }
    // The tile is free, since a result does not depend on it. One row block per warpgroup keeps promotion's interval
    // the same everywhere.
    Choice best{{kTiles[0], 1, false}, "batch-invariant"};
    bool found = false;
    for (Config config : candidates(problem, device)) {
      if (problem.mode == Mode::kE4M3Promoted && config.tile.row_blocks != 1) continue;
      config.splits = static_cast<int16_t>(splits);
      config.exchange = can_exchange(config.tile, splits);
      if (!keeps_cut(problem, config, device)) continue;
      best.config = config;
      found = true;
      break;
    }
    if (found) return best;
    // No tile can keep all parts of so many tokens: the widest exchange holds nothing in memory.
    for (const Tile& tile : kTiles) {
      if (exists(tile, problem.mode, problem.join) && tile.row_blocks == 1 && can_exchange(tile, splits))
        best.config = {tile, static_cast<int16_t>(splits), true};
    }
    return best;
  }
  if (table != nullptr) {
    const auto tuned = table->find(problem);
    const TimeModel* model = table->model(problem.mode);
    const bool of_bucket =
        table->has_bucket(problem) && (problem.m <= kFineBuckets || problem.m == token_bucket(problem.m));
    const bool measured = tuned && (of_bucket || table->checked(problem));
    if (model != nullptr && !measured) return {predicted(problem, device, *model, *table), "predicted"};
    if (tuned) return {*tuned, "tuned"};
  }
  return {analytic_choice(problem, device), "analytic"};
}

std::string describe(const Problem& p, const Choice& choice, const DeviceShape& device) {
  const Schedule s = make_schedule(p, choice.config, device);
  std::string text =
      fmt::format("m {}, n {}, k {}, {}: {} ({}), {} blocks for {} tiles", p.m, p.n, p.k, name_of(p.mode),
                  to_string(choice.config), choice.reason, s.grid, s.tiles() * choice.config.tile.cluster);
  if (s.shares > s.split_tiles)
    text += fmt::format(", {} of them cut into {} shares of k", s.split_tiles * choice.config.tile.cluster,
                        s.shares * choice.config.tile.cluster);
  return text;
}

}  // namespace nfp::cuda
