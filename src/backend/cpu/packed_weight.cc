#include "backend/cpu/packed_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>

#include "base/clones.h"
#include "base/float_types.h"

namespace nfp::cpu {
namespace {

PanelKind kind_of(Storage storage) {
  switch (storage) {
    case Storage::kNested:
      return PanelKind::kNested;
    case Storage::kDenseF16:
      return PanelKind::kDense;
    case Storage::kFp8Channel:
      return PanelKind::kCodes;
  }
  return PanelKind::kDense;
}

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

Status fill_panel(const MatrixReader& reader, int64_t first, const Panel& panel, float* scale, Staging& staging) {
  const int64_t k = reader.cols();
  const int count = panel.rows;
  auto* upper = const_cast<uint8_t*>(panel.upper);
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
      for (int r = 0; r < count; ++r) scale[r] = std::ldexp(1.0f, exponent[r]);
      break;
    }
    case PanelKind::kCodes: {
      staging.upper.resize(static_cast<size_t>(count * k));
      NFP_RETURN_IF_ERROR(reader.read_fp8_channel(first, count, staging.upper.data(), scale));
      for (const uint8_t code : staging.upper) {
        if ((code & 0x7fu) == 0x7fu) {
          return error(ErrorCode::kInvalidInput, "{}: holds a NaN in its FP8 codes", reader.name());
        }
      }
      scatter_bytes(staging.upper.data(), k, count, upper);
      for (int r = 0; r < count; ++r) scale[r] *= 256.0f;  // the kernels take a code as E4M3 * 2^-8
      break;
    }
  }
  return ok_status();
}

}  // namespace

Result<std::unique_ptr<LinearWeight>> pack_weight(const LinearSpec& spec, Arena& arena, ThreadPool& threads) {
  assert(!spec.parts.empty());
  assert(spec.order == RowOrder::kConcat || spec.parts.size() == 2);
  auto weight = std::make_unique<PackedWeight>();
  weight->k_ = spec.parts.front()->cols();
  weight->interleaved_ = spec.order == RowOrder::kInterleave;
  struct Source {
    const MatrixReader* reader;
    int64_t first;
  };
  std::vector<Source> sources;
  for (const MatrixReader* part : spec.parts) {
    assert(part->cols() == weight->k_);
    assert(!weight->interleaved_ || part->rows() == spec.parts.front()->rows());
    weight->part_rows_.push_back(weight->n_);
    weight->part_panels_.push_back(static_cast<int64_t>(sources.size()));
    for (int64_t row = 0; row < part->rows(); row += kPanelRows) {
      sources.push_back({part, row});
      Panel panel;
      panel.kind = kind_of(part->storage());
      panel.rows = static_cast<int32_t>(std::min<int64_t>(kPanelRows, part->rows() - row));
      panel.column = weight->n_ + row;
      weight->panels_.push_back(panel);
    }
    weight->n_ += part->rows();
  }
  std::vector<Panel>& panels = weight->panels_;
  const int64_t first_rows = spec.parts.front()->rows();
  if (weight->interleaved_) {  // panels alternate; row r of part p is column 2r + p
    const size_t half = panels.size() / 2;
    std::vector<Panel> mixed;
    std::vector<Source> mixed_sources;
    for (size_t i = 0; i < half; ++i) {
      for (size_t part = 0; part < 2; ++part) {
        mixed.push_back(panels[part * half + i]);
        mixed.back().column = static_cast<int64_t>(2 * kPanelRows * i + part);
        mixed.back().stride = 2;
        mixed_sources.push_back(sources[part * half + i]);
      }
    }
    panels = std::move(mixed);
    sources = std::move(mixed_sources);
  }

  const auto k_padded = static_cast<size_t>((weight->k_ + kGroupSteps - 1) / kGroupSteps * kGroupSteps);
  const size_t plane = k_padded * kPanelRows;
  size_t nested = 0, dense = 0, codes = 0;
  for (const Panel& panel : panels) {
    nested += panel.kind == PanelKind::kNested;
    dense += panel.kind == PanelKind::kDense;
    codes += panel.kind == PanelKind::kCodes;
  }
  weight->holds_[static_cast<size_t>(PanelKind::kNested)] = nested > 0;
  weight->holds_[static_cast<size_t>(PanelKind::kDense)] = dense > 0;
  weight->holds_[static_cast<size_t>(PanelKind::kCodes)] = codes > 0;
  weight->upper_bytes_ = plane * (nested + codes);
  weight->lower_bytes_ = plane * nested;
  weight->dense_bytes_ = 2 * plane * dense;
  weight->held_ = weight->upper_bytes_ + weight->lower_bytes_ + weight->dense_bytes_;
  uint8_t* bases[3] = {};
  const size_t sizes[3] = {weight->upper_bytes_, weight->lower_bytes_, weight->dense_bytes_};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 0) continue;
    auto piece = arena.allocate(sizes[i]);
    if (!piece.ok()) return error(piece.error().code, "{}: {}", spec.parts.front()->name(), piece.error().message);
    bases[i] = static_cast<uint8_t*>(piece->data);
    weight->pieces_.push_back(std::move(piece).value());
  }
  weight->scales_.assign(panels.size() * kPanelRows, 1.0f);
  if (!spec.bias.empty()) {
    assert(static_cast<int64_t>(spec.bias.size()) == weight->n_);
    weight->bias_.assign(panels.size() * kPanelRows, 0.0f);
  }
  for (size_t i = 0; i < panels.size(); ++i) {
    Panel& panel = panels[i];
    const auto take = [&](int which, size_t bytes) {
      uint8_t* at = bases[which];
      bases[which] += bytes;
      return at;
    };
    panel.upper = panel.kind == PanelKind::kDense ? take(2, 2 * plane) : take(0, plane);
    if (panel.kind == PanelKind::kNested) panel.lower = take(1, plane);
    panel.scale = weight->scales_.data() + i * kPanelRows;
    if (!spec.bias.empty()) {
      float* bias = weight->bias_.data() + i * kPanelRows;
      const int64_t part_start =
          weight->interleaved_ ? static_cast<int64_t>(i % 2) * first_rows + sources[i].first : panel.column;
      std::copy_n(spec.bias.data() + part_start, panel.rows, bias);
      panel.bias = bias;
    }
  }

  std::mutex mutex;
  std::optional<Error> failure;
  threads.run([&](int thread) {
    const Range range = weight->share(thread, threads.size());
    Staging staging;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto at = static_cast<size_t>(i);
      Status status = fill_panel(*sources[at].reader, sources[at].first, panels[at],
                                 weight->scales_.data() + at * kPanelRows, staging);
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::move(status).error();
      return;
    }
  });
  if (failure) return *std::move(failure);
  return std::unique_ptr<LinearWeight>(std::move(weight));
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
