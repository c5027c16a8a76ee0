#include "backend/cuda/gemm/tune/tune_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

namespace nfp::cuda {
namespace {

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t comma = text.find(',');
    parts.push_back(text.substr(0, comma));
    if (comma == std::string_view::npos) return parts;
    text.remove_prefix(comma + 1);
  }
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::vector<GemmShape> layer_shapes(const LayerSizes& s) {
  std::vector<GemmShape> out;
  for (const GemmShape& shape :
       {GemmShape{(s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden}, GemmShape{s.hidden, s.heads * s.head_dim},
        GemmShape{2 * s.intermediate, s.hidden}, GemmShape{s.hidden, s.intermediate}}) {
    if (std::find(out.begin(), out.end(), shape) == out.end()) out.push_back(shape);
  }
  return out;
}

std::vector<Config> likeliest(const Problem& problem, const DeviceShape& device, const TuningTable& table,
                              size_t most) {
  std::vector<Config> others;
  if (const TimeModel* model = table.model(problem.mode); model == nullptr) {
    others = candidates(problem, device);
  } else {
    std::vector<std::pair<double, Config>> timed;
    for_each_candidate(problem, device, [&](const Config& config) {
      const double us = predict_us(*model, problem, config, device);
      if (std::isfinite(us)) timed.emplace_back(us, config);
    });
    std::stable_sort(timed.begin(), timed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [us, config] : timed) others.push_back(config);
  }
  std::vector<Config> out = {choose(problem, device, &table, Reduction::kFastest).config};
  for (const Config& config : others) {
    if (out.size() >= most) break;
    if (config != out.front()) out.push_back(config);
  }
  return out;
}

Result<GemmShape> parse_shape(std::string_view text) {
  const auto parts = split(text);
  constexpr int64_t kMost = int64_t{1} << 30;
  if (parts.size() == 2) {
    const auto n = whole_number(parts[0]), k = whole_number(parts[1]);
    if (n && k && *n > 0 && *k > 0 && *n <= kMost && *k <= kMost) return GemmShape{*n, *k};
  }
  return error(ErrorCode::kUsage,
               "--shape '{}' is not N,K (output and input features, 1 to 2^30 each; for example 4096,14336)", text);
}

Result<std::vector<Mode>> parse_modes(std::string_view text) {
  std::vector<Mode> out;
  for (const std::string_view part : split(text)) {
    const auto at = std::find_if(kModes.begin(), kModes.end(), [&](Mode mode) { return name_of(mode) == part; });
    if (at == kModes.end()) {
      return error(ErrorCode::kUsage, "--modes: '{}' is none of f16, bf16, e4m3, e4m3-promoted, w8a16", part);
    }
    if (std::find(out.begin(), out.end(), *at) == out.end()) out.push_back(*at);
  }
  return out;
}

Result<std::vector<int>> parse_buckets(std::string_view text) {
  std::vector<int> out;
  for (const std::string_view part : split(text)) {
    const auto value = whole_number(part);
    const auto at = value ? std::find(kTokenBuckets.begin(), kTokenBuckets.end(), *value) : kTokenBuckets.end();
    if (at == kTokenBuckets.end()) {
      return error(ErrorCode::kUsage, "--tokens: '{}' is none of the sizes that are tuned: {}", part,
                   fmt::join(kTokenBuckets, ", "));
    }
    out.push_back(*at);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

Result<RandomTokens> parse_random_tokens(std::string_view text) {
  const auto parts = split(text);
  if (parts.size() == 2) {
    const auto seed = whole_number(parts[0]), count = whole_number(parts[1]);
    if (seed && count && *seed >= 0 && *count >= 0 && *count <= 1000)
      return RandomTokens{static_cast<uint64_t>(*seed), static_cast<int>(*count)};
  }
  return error(ErrorCode::kUsage,
               "--check '{}' is not SEED,COUNT (whole numbers from 0, COUNT at most 1000; for example 1,16)", text);
}

}  // namespace nfp::cuda
