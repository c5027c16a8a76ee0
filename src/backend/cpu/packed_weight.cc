#include "backend/cpu/packed_weight.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/clones.h"
#include "base/float_types.h"

namespace nfp::cpu {
namespace {

PanelKind kind_of(Storage storage) { return storage == Storage::kNested ? PanelKind::kNested : PanelKind::kDense; }

// Rows [count, k] of bytes into a panel's groups.
NFP_CLONES void scatter_bytes(const uint8_t* rows, int64_t k, int count, uint8_t* plane) {
  const int64_t groups = (k + kGroupSteps - 1) / kGroupSteps;
  for (int r = 0; r < count; ++r) {
    const uint8_t* row = rows + r * k;
    uint8_t* out = plane + group_position(r, 0);
    const size_t step1 = group_position(0, 1), step2 = group_position(0, 2), step3 = group_position(0, 3);
    int64_t g = 0;
    for (; (g + 1) * kGroupSteps <= k; ++g) {
      out[0] = row[0];
      out[step1] = row[1];
      out[step2] = row[2];
      out[step3] = row[3];
      out += kGroupBytes;
      row += kGroupSteps;
    }
    for (int step = 0; g < groups && g * kGroupSteps + step < k; ++step) out[group_position(0, step)] = row[step];
  }
}

void scatter_words(const uint16_t* rows, int64_t k, int count, uint8_t* plane) {
  auto* out = reinterpret_cast<uint16_t*>(plane);
  for (int r = 0; r < count; ++r) {
    for (int64_t i = 0; i < k; ++i) out[i * kPanelRows + r] = rows[r * k + i];
  }
}

struct Staging {
  std::vector<uint8_t> upper, lower;
  std::vector<uint16_t> words;
};

Status fill_panel(const MatrixReader& reader, int64_t first, const Panel& panel, Staging& staging) {
  const int64_t k = reader.cols();
  const int count = panel.rows;
  auto* upper = const_cast<uint8_t*>(panel.upper);
  auto* scale = const_cast<float*>(panel.scale);
  std::fill(scale, scale + kPanelRows, 1.0f);
  switch (panel.kind) {
    case PanelKind::kDense: {
      staging.words.resize(static_cast<size_t>(count * k));
      NFP_RETURN_IF_ERROR(reader.read_fp16(first, count, staging.words.data()));
      scatter_words(staging.words.data(), k, count, upper);
      break;
    }
    case PanelKind::kNested: {
      staging.upper.resize(static_cast<size_t>(count * k));
      staging.lower.resize(static_cast<size_t>(count * k));
      int8_t exponent[kPanelRows];
      NFP_RETURN_IF_ERROR(reader.read_nested(first, count, staging.upper.data(), staging.lower.data(), exponent));
      scatter_bytes(staging.upper.data(), k, count, upper);
      scatter_bytes(staging.lower.data(), k, count, const_cast<uint8_t*>(panel.lower));
      NFP_RETURN_IF_ERROR(reader.row_factors(first, count, scale));
      for (int r = 0; r < count; ++r) scale[r] = std::ldexp(scale[r], exponent[r]);
      break;
    }
  }
  return ok_status();
}

}  // namespace

Result<std::unique_ptr<LinearWeight>> PackedWeight::pack(const LinearSpec& spec, Arena& arena, ThreadPool& threads) {
  assert(!spec.parts.empty());
  assert(spec.order == RowOrder::kConcat || spec.parts.size() == 2);
  auto weight = std::make_unique<PackedWeight>();
  const std::vector<PanelSource> sources = weight->lay_out(spec);
  NFP_RETURN_IF_ERROR(weight->take_memory(arena, spec.parts.front()->name()));
  weight->place_factors(spec, sources);
  NFP_RETURN_IF_ERROR(weight->fill(sources, threads));
  weight->share_ones();
  return std::unique_ptr<LinearWeight>(std::move(weight));
}

std::vector<PackedWeight::PanelSource> PackedWeight::lay_out(const LinearSpec& spec) {
  k_ = spec.parts.front()->cols();
  interleaved_ = spec.order == RowOrder::kInterleave;
  std::vector<PanelSource> sources;
  for (const MatrixReader* part : spec.parts) {
    assert(part->cols() == k_);
    assert(!interleaved_ || part->rows() == spec.parts.front()->rows());
    part_rows_.push_back(n_);
    part_panels_.push_back(static_cast<int64_t>(sources.size()));
    for (int64_t row = 0; row < part->rows(); row += kPanelRows) {
      sources.push_back({part, row});
      Panel panel;
      panel.kind = kind_of(part->storage());
      panel.rows = static_cast<uint8_t>(std::min<int64_t>(kPanelRows, part->rows() - row));
      panel.column = static_cast<int32_t>(n_ + row);
      panels_.push_back(panel);
    }
    n_ += part->rows();
  }
  if (!interleaved_) return sources;
  // Panels alternate; row r of part p is column 2r + p.
  const size_t half = panels_.size() / 2;
  std::vector<Panel> mixed;
  std::vector<PanelSource> mixed_sources;
  for (size_t i = 0; i < half; ++i) {
    for (size_t part = 0; part < 2; ++part) {
      mixed.push_back(panels_[part * half + i]);
      mixed.back().column = static_cast<int32_t>(size_t{2} * kPanelRows * i + part);
      mixed.back().stride = 2;
      mixed_sources.push_back(sources[part * half + i]);
    }
  }
  panels_ = std::move(mixed);
  return mixed_sources;
}

Status PackedWeight::take_memory(Arena& arena, const std::string& name) {
  const auto k_padded = static_cast<size_t>((k_ + kGroupSteps - 1) / kGroupSteps * kGroupSteps);
  const size_t plane = k_padded * kPanelRows;
  const auto nested = static_cast<size_t>(std::count_if(
      panels_.begin(), panels_.end(), [](const Panel& panel) { return panel.kind == PanelKind::kNested; }));
  const size_t dense = panels_.size() - nested;
  holds_nested_ = nested > 0;
  upper_bytes_ = lower_bytes_ = plane * nested;
  dense_bytes_ = 2 * plane * dense;
  uint8_t* bases[3] = {};
  const size_t sizes[3] = {upper_bytes_, lower_bytes_, dense_bytes_};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 0) continue;
    auto piece = arena.allocate(sizes[i]);
    if (!piece.ok()) return error(piece.error().code, "{}: {}", name, piece.error().message);
    bases[i] = static_cast<uint8_t*>(piece->data);
    pieces_.push_back(std::move(piece).value());
  }
  const auto take = [&](int which, size_t bytes) {
    uint8_t* at = bases[which];
    bases[which] += bytes;
    return at;
  };
  for (Panel& panel : panels_) {
    panel.upper = panel.kind == PanelKind::kDense ? take(2, 2 * plane) : take(0, plane);
    if (panel.kind == PanelKind::kNested) panel.lower = take(1, plane);
  }
  return ok_status();
}

void PackedWeight::place_factors(const LinearSpec& spec, const std::vector<PanelSource>& sources) {
  const bool biased = !spec.bias.empty();
  const size_t each = size_t{biased ? 2u : 1u} * kPanelRows;
  factors_.assign(panels_.size() * each, 0.0f);
  for (size_t i = 0; i < panels_.size(); ++i) panels_[i].scale = factors_.data() + i * each, panels_[i].biased = biased;
  if (!biased) return;
  assert(static_cast<int64_t>(spec.bias.size()) == n_);
  const int64_t first_rows = spec.parts.front()->rows();
  for (size_t i = 0; i < panels_.size(); ++i) {
    auto* bias = const_cast<float*>(panels_[i].bias());
    const int64_t start =
        interleaved_ ? static_cast<int64_t>(i % 2) * first_rows + sources[i].first : panels_[i].column;
    std::copy_n(spec.bias.data() + start, panels_[i].rows, bias);
  }
}

Status PackedWeight::fill(const std::vector<PanelSource>& sources, ThreadPool& threads) {
  std::mutex mutex;
  std::optional<Error> failure;
  threads.run([&](int thread) {
    const Range range = share(thread, threads.size());
    Staging staging;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto at = static_cast<size_t>(i);
      Status status = fill_panel(*sources[at].reader, sources[at].first, panels_[at], staging);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::move(status).error();
      return;
    }
  });
  if (failure) return *std::move(failure);
  return ok_status();
}

// Most matrices have no scales: those of their panels are the same line, which stays in a cache.
void PackedWeight::share_ones() {
  static constexpr auto kOnes = [] {
    std::array<float, kPanelRows> ones{};
    ones.fill(1.0f);
    return ones;
  }();
  const bool ones = std::all_of(factors_.begin(), factors_.end(), [](float factor) { return factor == 1.0f; });
  if (!ones || panels_.front().biased) return;
  for (Panel& panel : panels_) panel.scale = kOnes.data();
  factors_ = {};
}

size_t PackedWeight::bytes_read(Precision precision) const {
  return upper_bytes_ + dense_bytes_ + (is_exact(precision) ? lower_bytes_ : 0);
}

void PackedWeight::read_row(int64_t row, float factor, float* out) const {
  assert(row >= 0 && row < n_);
  int64_t index = 0;
  int lane = 0;
  if (interleaved_) {
    index = row / 2 / kPanelRows * 2 + row % 2;
    lane = static_cast<int>(row / 2 % kPanelRows);
  } else {
    const size_t part =
        static_cast<size_t>(std::upper_bound(part_rows_.begin(), part_rows_.end(), row) - part_rows_.begin()) - 1;
    const int64_t inside = row - part_rows_[part];
    index = part_panels_[part] + inside / kPanelRows;
    lane = static_cast<int>(inside % kPanelRows);
  }
  const Panel& panel = panels_[static_cast<size_t>(index)];
  const float scale = panel.scale[lane] * factor;
  if (panel.kind == PanelKind::kDense) {
    const auto* words = reinterpret_cast<const uint16_t*>(panel.upper);
    for (int64_t i = 0; i < k_; ++i) out[i] = fp16_to_fp32(words[i * kPanelRows + lane]) * scale;
    return;
  }
  for (int64_t i = 0; i < k_; ++i) {
    const size_t at =
        static_cast<size_t>(i / kGroupSteps) * kGroupBytes + group_position(lane, static_cast<int>(i % kGroupSteps));
    const uint32_t u = panel.upper[at];
    uint32_t half = ((u & 0x80u) << 8) | ((u & 0x7fu) << 7);
    if (panel.kind == PanelKind::kNested) {
      const uint32_t l = panel.lower[at];
      const uint32_t t = u - (l >> 7);  // Algorithm 1 of NestedFP
      half = ((t & 0x80u) << 8) | ((t & 0x7eu) << 7) | l;
    }
    out[i] = fp16_to_fp32(static_cast<uint16_t>(half)) * scale;
  }
}

}  // namespace nfp::cpu
