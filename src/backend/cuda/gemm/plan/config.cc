#include "backend/cuda/gemm/plan/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "backend/cuda/gemm/plan/predict.h"

namespace nfp::cuda {
namespace {

// Limits of the workspace (gemm.h) and of the kernel's 32-bit products.
constexpr size_t kMaxPartialBytes = size_t{96} << 20;
constexpr size_t kMaxCounters = 65536;

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

bool fits(const Schedule& s, const Tile& tile) {
  return s.partial_floats(tile) * sizeof(float) <= kMaxPartialBytes && s.counters(tile) <= kMaxCounters &&
         int64_t{s.split_tiles} * s.k_iterations < (int64_t{1} << 31) &&
         int64_t{s.shares + 1} * s.length.numerator < (int64_t{1} << 32) &&
         int64_t{s.split_tiles} * s.k_iterations * s.length.denominator < (int64_t{1} << 32);
}

void cut(Schedule& s, int tiles, int shares) {
  s.split_tiles = tiles;
  s.shares = shares;
  const int64_t iterations = int64_t{tiles} * s.k_iterations;
  const int64_t divisor = std::max<int64_t>(1, std::gcd(iterations, int64_t{shares}));
  s.length = {static_cast<int>(std::max<int64_t>(1, iterations / divisor)),
              static_cast<int>(std::max<int64_t>(1, shares / divisor))};
}

}  // namespace

int slots(const Tile& tile, const DeviceShape& device) {
  return std::max(1, device.resident(tile.cluster, tile.blocks_per_sm));
}

std::string_view name_of(Mode mode) {
  switch (mode) {
    case Mode::kF16:
      return "f16";
    case Mode::kBF16:
      return "bf16";
    case Mode::kE4M3:
      return "e4m3";
    case Mode::kE4M3Promoted:
      return "e4m3-promoted";
    case Mode::kW8A16:
      return "w8a16";
  }
  return "?";
}

std::string to_string(const Config& c) {
  std::string text = fmt::format("{}x{} {}{} b{}", c.tile.rows(), c.tile.tokens, c.tile.along_tokens ? 'w' : 'c',
                                 c.tile.cluster, c.tile.blocks_per_sm);
  if (c.splits == 0) text += " stream";
  if (c.splits > 1) text += fmt::format(" {}{}", c.exchange ? "exchange" : "split", c.splits);
  return text;
}

std::optional<Config> parse_config(std::string_view text) {
  for (const Tile& tile : kTiles) {
    const std::string whole = to_string({tile, 1, false});
    if (text.substr(0, whole.size()) != whole) continue;
    const std::string_view rest = text.substr(whole.size());
    if (rest.empty()) return Config{tile, 1, false};
    if (rest == " stream") return Config{tile, 0, false};
    const bool exchange = rest.substr(0, 9) == " exchange";
    if (!exchange && rest.substr(0, 6) != " split") continue;
    int splits = 0;
    const auto [end, status] = std::from_chars(rest.data() + (exchange ? 9 : 6), rest.data() + rest.size(), splits);
    if (status != std::errc() || end != rest.data() + rest.size() || splits < 2 || splits > 64) return std::nullopt;
    if (exchange && !can_exchange(tile, splits)) return std::nullopt;
    return Config{tile, static_cast<int16_t>(splits), exchange};
  }
  return std::nullopt;
}

Schedule make_schedule(const Problem& problem, const Config& config, const DeviceShape& device) {
  const Tile& tile = config.tile;
  Schedule s;
  s.k_iterations = ceil_div(problem.k, step_k(problem.mode));
  s.m_tiles = ceil_div(problem.m, tile.cluster_tokens());
  s.n_tiles = ceil_div(problem.n, tile.cluster_rows());
  const int room = slots(tile, device);
  const int tiles = s.tiles();
  if (config.splits > 1) {
    const int splits = std::min<int>(config.splits, s.k_iterations);
    if (config.exchange && splits > 1 && can_exchange(tile, splits)) s.exchange = splits;
    if (s.exchange > 1 || can_join(tile)) cut(s, tiles, tiles * splits);
  } else if (config.splits == 0 && can_join(tile) && tiles % room != 0) {
    // Whole waves first stay whole, but for one: a share is then between one and two tiles' worth.
    const int rest = tiles < room ? tiles : tiles % room + room;
    const int iterations = rest * s.k_iterations;
    cut(s, rest, std::clamp(iterations / 4, 1, room));
  }
  if (!fits(s, tile)) {
    cut(s, 0, 0);
    s.exchange = 1;
  }
  s.cluster = tile.cluster * s.exchange;
  s.sliced = config.splits > 1 && s.exchange == 1 && s.shares > s.split_tiles && s.shares <= room && can_slice(tile);
  // Parts that meet in a cluster are one block's only work.
  s.grid =
      s.exchange > 1 ? tiles * s.cluster : std::min(room, std::max(s.shares, tiles - s.split_tiles)) * tile.cluster;
  const double wave = std::min(room, tiles);
  s.group_m = std::clamp(static_cast<int>(std::lround(std::sqrt(wave * tile.cluster_rows() / tile.cluster_tokens()))),
                         1, s.m_tiles);
  return s;
}

int token_bucket(int64_t m) {
  for (const int bucket : kTokenBuckets) {
    if (m <= bucket) return bucket;
  }
  return kTokenBuckets.back();
}

// The rule that the tuned choices of docs/kernels.md follow: the narrowest tile that holds all tokens (256 repeat), a
// single block of rows per warpgroup, and k cut so far that every SM has work; stream-K where whole waves would leave
// the last one half empty.
Config analytic_choice(const Problem& problem, const DeviceShape& device) {
  const bool fp8 = is_fp8(problem.mode);
  const bool narrow = problem.mode == Mode::kE4M3Promoted || (fp8 && problem.m <= 512);
  const int widest = narrow ? 128 : problem.m > 256 && problem.m <= 384 ? 192 : 256;
  Tile tile{static_cast<int16_t>(widest), 1, 1, 1};
  for (const int tokens : {8, 16, 32, 64, 96, 128, 192}) {
    const Tile narrower{static_cast<int16_t>(tokens), 1, 1, 1};
    if (tokens >= problem.m && tokens < widest && exists(narrower, problem.mode, problem.join)) {
      tile = narrower;
      break;
    }
  }
  for (const Tile& wide : {Tile{256, 1, 1, 1}, Tile{256, 1, 2, 1}}) {
    if (!exists(tile, problem.mode, problem.join)) tile = wide;
  }
  const int64_t tiles = int64_t{ceil_div(problem.m, tile.tokens)} * ceil_div(problem.n, tile.rows());
  const int64_t iterations = ceil_div(problem.k, step_k(problem.mode));
  const int64_t splits = std::min<int64_t>({device.sms / tiles, iterations / 4, 8});
  if (splits > 1) {
    return {tile, static_cast<int16_t>(splits), splits <= 3 && can_exchange(tile, static_cast<int>(splits))};
  }
  const double waves = static_cast<double>(tiles) / device.sms;
  const bool ragged = waves > 1 && std::ceil(waves) / waves > 1.1;
  return {tile, static_cast<int16_t>(ragged && !fp8 ? 0 : 1), false};
}

namespace {

// Seconds that a launch should take, to order what the tuner tries: the slowest of arithmetic on the busiest SM, its
// traffic from the L2, and device memory, and a fixed cost for joining parts. Rates are those measured on an H200
// (docs/kernels.md); only their ratios decide.
double estimate(const Problem& problem, const Config& config, const DeviceShape& device) {
  const Tile& tile = config.tile;
  const Schedule s = make_schedule(problem, config, device);
  const double stage_k = step_k(problem.mode);
  const double rate = (is_fp8(problem.mode) ? 1.35e15 : 7.0e14) / device.sms;  // sustained, power limit included
  const int room = slots(tile, device);
  const int whole = s.tiles() - s.split_tiles;
  double iterations = std::ceil(static_cast<double>(whole) / room) * s.k_iterations;  // of the busiest slot
  if (s.shares > 0) {
    iterations += std::ceil(static_cast<double>(s.shares) / room) *
                  std::ceil(static_cast<double>(s.split_tiles) * s.k_iterations / s.shares);
  }
  // Rebuilding takes a warpgroup's share of an SM about as long as multiplying by 100 tokens.
  const double tokens = is_fp8(problem.mode) ? tile.tokens : std::max<double>(tile.tokens, 100);
  const double arithmetic = iterations * tile.blocks_per_sm * 2.0 * tile.rows() * tokens * stage_k / rate;
  const double stage = tile.rows() * 128.0 + tile.tokens * (tile.cluster > 1 ? 100.0 : 128.0);
  const double ingest = iterations * tile.blocks_per_sm * stage / (9e12 / device.sms);
  const double memory =
      (static_cast<double>(problem.n) * static_cast<double>(problem.k) * (reads_lower(problem.mode) ? 2 : 1)) / 4.2e12;
  double overhead = 1e-6 + static_cast<double>(s.tiles()) / room * tile.rows() * tile.tokens * 4e-11;
  if (s.shares > s.split_tiles) {
    const double parts = static_cast<double>(s.shares) / std::max(1, s.split_tiles);
    const double part_bytes = tile.rows() * tile.tokens * 4.0;
    overhead += s.exchange > 1 ? 1.5e-6 + part_bytes / 45e9 : 2e-6 + (parts > 2 ? parts + 1 : 1.5) * part_bytes / 55e9;
  }
  return std::max({arithmetic, ingest, memory}) + 0.15 * (arithmetic + ingest + memory) / 3 + overhead;
}

}  // namespace

std::vector<Config> candidates(const Problem& problem, const DeviceShape& device) {
  std::vector<Config> all;
  for_each_candidate(problem, device, [&](const Config& config) { all.push_back(config); });
  std::stable_sort(all.begin(), all.end(), [&](const Config& a, const Config& b) {
    return estimate(problem, a, device) < estimate(problem, b, device);
  });
  const Config rule = analytic_choice(problem, device);
  std::erase(all, rule);
  all.insert(all.begin(), rule);
  return all;
}

}  // namespace nfp::cuda
