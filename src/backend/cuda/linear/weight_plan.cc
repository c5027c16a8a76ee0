#include "backend/cuda/linear/weight_plan.h"

#include <algorithm>
#include <cmath>

#include "backend/cuda/gemm/plan/pack.h"

namespace nfp::cuda {
namespace {

constexpr int64_t kSwigluRows = 8;               // rows of gate, then of up, that lie together
constexpr int64_t kDensePieceBytes = 512 << 10;  // about a slab of two planes with k 4096
// Rows read and packed at a time: what they need on the way stays in a core's L2.
constexpr int64_t kStrip = 16;

}  // namespace

Result<WeightPlan> WeightPlan::make(const LinearSpec& spec) {
  assert(!spec.parts.empty());
  assert(spec.order == RowOrder::kConcat || spec.parts.size() == 2);
  WeightPlan plan;
  plan.parts_ = spec.parts;
  plan.interleaved_ = spec.order == RowOrder::kInterleave;
  plan.k_ = spec.parts.front()->cols();
  plan.spec_bias_ = spec.bias;
  bool any_dense = plan.k_ % 8 != 0;
  for (const MatrixReader* part : spec.parts) {
    assert(part->cols() == plan.k_);
    assert(!plan.interleaved_ || part->rows() == spec.parts.front()->rows());
    if (plan.interleaved_ && part->rows() % kSwigluRows != 0) {
      return error(ErrorCode::kUnsupported, "{}: has {} rows; the CUDA backend wants a multiple of {} in gate and up",
                   part->name(), part->rows(), kSwigluRows);
    }
    any_dense = any_dense || (plan.interleaved_ && part->storage() == Storage::kDenseF16);
    plan.part_column_.push_back(plan.n_);
    plan.n_ += part->rows();
  }
  assert(spec.bias.empty() || static_cast<int64_t>(spec.bias.size()) == plan.n_);

  const bool whole = any_dense && (plan.interleaved_ || plan.k_ % 8 != 0);
  for (size_t i = 0; i < spec.parts.size(); ++i) {
    const MatrixReader& part = *spec.parts[i];
    const bool nested = !whole && part.storage() == Storage::kNested;
    if (plan.segments_.empty() || plan.segments_.back().nested != nested) {
      plan.segments_.push_back({nested, Join::kBiased, plan.part_column_[i], 0});
    }
    SegmentPlan& segment = plan.segments_.back();
    if (nested && !part.uppers_restricted()) segment.join = Join::kFree;
    segment.rows += part.rows();
  }
  for (size_t s = 0; s < plan.segments_.size(); ++s) {
    const SegmentPlan& segment = plan.segments_[s];
    const int64_t fit = kDensePieceBytes / (2 * plan.k_) / (2 * kSwigluRows) * (2 * kSwigluRows);
    const int64_t step = segment.nested ? kBlockRows : std::max<int64_t>(fit, 2 * kSwigluRows);
    for (int64_t row = 0; row < segment.rows; row += step) {
      plan.pieces_.push_back({static_cast<int>(s), row, std::min(step, segment.rows - row)});
    }
  }
  return plan;
}

std::vector<float> WeightPlan::bias() const {
  std::vector<float> out(spec_bias_.begin(), spec_bias_.end());
  if (interleaved_ && !out.empty()) {
    for (int64_t i = 0; i < n_ / 2; ++i) {
      out[static_cast<size_t>(swiglu_gate_row(i))] = spec_bias_[static_cast<size_t>(i)];
      out[static_cast<size_t>(swiglu_up_row(i))] = spec_bias_[static_cast<size_t>(n_ / 2 + i)];
    }
  }
  return out;
}

size_t WeightPlan::piece_offset(const WeightPiece& piece) const {
  const SegmentPlan& segment = segments_[static_cast<size_t>(piece.segment)];
  if (segment.nested) {
    return static_cast<size_t>(piece.first_row / kBlockRows) * PlaneShape{segment.rows, k_}.slab_bytes();
  }
  return static_cast<size_t>(piece.first_row * k_) * sizeof(uint16_t);
}

size_t WeightPlan::piece_bytes(const WeightPiece& piece) const {
  const SegmentPlan& segment = segments_[static_cast<size_t>(piece.segment)];
  if (segment.nested) return PlaneShape{segment.rows, k_}.slab_bytes();
  return static_cast<size_t>(piece.rows * k_) * sizeof(uint16_t);
}

std::vector<WeightPlan::Run> WeightPlan::runs(const SegmentPlan& segment, int64_t first, int64_t count) const {
  std::vector<Run> out;
  if (interleaved_) {
    for (int64_t row = first; row < first + count; row += kSwigluRows) {
      const int64_t block = row / kSwigluRows;  // gate and up take turns
      out.push_back({parts_[static_cast<size_t>(block % 2)], block / 2 * kSwigluRows, kSwigluRows});
    }
    return out;
  }
  int64_t column = segment.first_column + first;
  const int64_t end = column + count;
  while (column < end) {
    const auto part = static_cast<size_t>(std::upper_bound(part_column_.begin(), part_column_.end(), column) -
                                          part_column_.begin() - 1);
    const int64_t inside = column - part_column_[part];
    out.push_back({parts_[part], inside, std::min(end - column, parts_[part]->rows() - inside)});
    column += out.back().rows;
  }
  return out;
}

Status WeightPlan::fill(const WeightPiece& piece, uint8_t* upper, uint8_t* lower, float* scales,
                        Staging& staging) const {
  const SegmentPlan& segment = segments_[static_cast<size_t>(piece.segment)];
  if (!segment.nested) {
    auto* out = reinterpret_cast<uint16_t*>(upper);
    for (const Run& run : runs(segment, piece.first_row, piece.rows)) {
      NFP_RETURN_IF_ERROR(run.part->read_fp16(run.part_row, run.rows, out));
      out += run.rows * k_;
    }
    return ok_status();
  }
  const PlaneShape shape{segment.rows, k_};
  staging.upper.resize(static_cast<size_t>(kStrip * k_));
  staging.lower.resize(static_cast<size_t>(kStrip * k_));
  for (int64_t strip = 0; strip < piece.rows; strip += kStrip) {
    const int64_t rows = std::min(kStrip, piece.rows - strip);
    int8_t exponents[kStrip];
    float factors[kStrip];
    int64_t done = 0;
    for (const Run& run : runs(segment, piece.first_row + strip, rows)) {
      const int64_t at = done * k_;
      NFP_RETURN_IF_ERROR(run.part->read_nested(run.part_row, run.rows, staging.upper.data() + at,
                                                staging.lower.data() + at, exponents + done));
      NFP_RETURN_IF_ERROR(run.part->row_factors(run.part_row, run.rows, factors + done));
      done += run.rows;
    }
    const auto pack = [&](Plane plane, const std::vector<uint8_t>& bytes, uint8_t* slab) {
      pack_rows(shape, plane, segment.join, bytes, static_cast<int>(strip), static_cast<int>(rows), slab);
    };
    pack(Plane::kUpper, staging.upper, upper);
    pack(Plane::kLower, staging.lower, lower);
    for (int64_t r = 0; r < rows; ++r) scales[strip + r] = std::ldexp(factors[r], exponents[r]);
  }
  const int used = static_cast<int>(piece.rows);
  pack_zero_rows(shape, Plane::kUpper, segment.join, used, kBlockRows - used, upper);
  pack_zero_rows(shape, Plane::kLower, segment.join, used, kBlockRows - used, lower);
  return ok_status();
}

}  // namespace nfp::cuda
