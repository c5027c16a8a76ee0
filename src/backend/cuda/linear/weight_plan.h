// From the matrices of a LinearSpec to the device's form of a weight, on the host: which segments there are, and the
// bytes of each piece of them. Nothing here needs CUDA.
//
// A weight [n, k] is a list of segments that follow each other along n. Parts in a row that are nested become one
// segment, two byte planes in the layout of gemm/plan/layout.h over all their rows: one product computes them. Parts
// that are not become row-major FP16 segments. Where a plain rule cannot hold, the whole weight is FP16:
//   * k is not a multiple of 8: the copy engine fetches activations by rows of whole 16 bytes;
//   * interleaved parts of which one is not nested.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/gemm/plan/layout.h"
#include "base/result.h"

namespace nfp::cuda {

struct SegmentPlan {
  bool nested = false;
  Join join = Join::kBiased;  // kFree as soon as one part needs it
  int64_t first_column = 0;   // of y
  int64_t rows = 0;

  // Bytes of one plane, or of the FP16 matrix.
  size_t matrix_bytes(int64_t k) const {
    return nested ? PlaneShape{rows, k}.bytes() : static_cast<size_t>(rows * k) * sizeof(uint16_t);
  }
};

// A piece of a segment that one thread fills: a slab of 64 rows of both planes, or some rows of FP16.
struct WeightPiece {
  int segment = 0;
  int64_t first_row = 0;  // in the segment
  int64_t rows = 0;
};

class WeightPlan {
 public:
  // kUnsupported for per-channel FP8, and for interleaved parts whose rows are not a multiple of 8. The readers must
  // outlive the plan.
  static Result<WeightPlan> make(const LinearSpec& spec);

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  bool interleaved() const { return interleaved_; }  // rows in the order of swiglu_gate_row(), swiglu_up_row()
  std::span<const SegmentPlan> segments() const { return segments_; }
  std::span<const WeightPiece> pieces() const { return pieces_; }
  const std::string& name() const { return parts_.front()->name(); }

  // The bias in the order of the weight's rows; empty if there is none.
  std::vector<float> bias() const;

  // Where a piece goes in its segment's plane (or FP16 matrix), and how many bytes of each it has.
  size_t piece_offset(const WeightPiece& piece) const;
  size_t piece_bytes(const WeightPiece& piece) const;

  // Reads and packs one piece. Nested: upper and lower [piece_bytes], scales [piece.rows] (2^e of each row). Dense:
  // the rows go to upper; lower and scales are not touched. `staging` keeps its memory between calls. Thread-safe.
  struct Staging {
    std::vector<uint8_t> upper, lower;
  };
  Status fill(const WeightPiece& piece, uint8_t* upper, uint8_t* lower, float* scales, Staging& staging) const;

 private:
  // Rows of one part that lie together in the weight.
  struct Run {
    const MatrixReader* part = nullptr;
    int64_t part_row = 0;
    int64_t rows = 0;
  };
  // Of rows first .. first + count - 1 of a segment, in order.
  std::vector<Run> runs(const SegmentPlan& segment, int64_t first, int64_t count) const;

  std::vector<const MatrixReader*> parts_;
  std::vector<int64_t> part_column_;  // [parts] of the concatenation
  std::span<const float> spec_bias_;
  int64_t n_ = 0, k_ = 0;
  bool interleaved_ = false;
  std::vector<SegmentPlan> segments_;
  std::vector<WeightPiece> pieces_;
};

}  // namespace nfp::cuda
