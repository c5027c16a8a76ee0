// A weight matrix in panels (panel.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/huge_pages.h"
#include "backend/cpu/panel.h"
#include "base/thread_pool.h"

namespace nfp::cpu {

class PackedWeight final : public LinearWeight {
 public:
  // Reads the parts on all threads. Errors name the matrix.
  static Result<std::unique_ptr<LinearWeight>> pack(const LinearSpec& spec, Arena& arena, ThreadPool& threads);

  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  size_t bytes_read(Precision precision) const override;
  size_t bytes_held() const override { return upper_bytes_ + lower_bytes_ + dense_bytes_; }

  // In order of columns; interleaved weights alternate between the panels of the first part and of the second.
  const std::vector<Panel>& panels() const { return panels_; }
  bool interleaved() const { return interleaved_; }
  // The part that a thread packs when the weight is loaded and multiplies with in each step: memory is taken from the
  // node of the thread that touches it first.
  Range share(int thread, int threads) const {
    return partition(static_cast<int64_t>(panels_.size()), thread, threads, interleaved_ ? 2 : 1);
  }
  bool holds_nested() const { return holds_nested_; }
  bool holds_dense() const { return dense_bytes_ > 0; }
  // Row `row` of [n, k], exactly, times `factor`.
  void read_row(int64_t row, float factor, float* out) const;

 private:
  struct PanelSource {
    const MatrixReader* reader;
    int64_t first;  // row of the panel's first
  };
  // Which rows each panel holds, and where its columns lie; no memory yet.
  std::vector<PanelSource> lay_out(const LinearSpec& spec);
  Status take_memory(Arena& arena, const std::string& name);
  void place_factors(const LinearSpec& spec, const std::vector<PanelSource>& sources);
  void share_ones();
  Status fill(const std::vector<PanelSource>& sources, ThreadPool& threads);

  int64_t n_ = 0;
  int64_t k_ = 0;
  bool interleaved_ = false;
  bool holds_nested_ = false;
  std::vector<int64_t> part_panels_;  // index of each part's first panel (kConcat)
  std::vector<int64_t> part_rows_;    // and of its first row
  std::vector<Panel> panels_;
  std::vector<float> factors_;  // [panels, 16] scales, or with biases [panels, 2, 16]
  std::vector<Arena::Piece> pieces_;
  size_t upper_bytes_ = 0, lower_bytes_ = 0, dense_bytes_ = 0;
};

}  // namespace nfp::cpu
