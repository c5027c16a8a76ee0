// Runs lists of recorded operations on the thread pool: one fork for the whole list, a barrier after each operation,
// each operation split over the threads, matrix products in pieces that whoever is done first takes (WorkPieces). In
// steps of a few rows what prepares a matrix product's input (norm, rounding) is done by every thread for itself, which
// is cheaper than waiting for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/huge_pages.h"
#include "backend/cpu/kernel_table.h"
#include "backend/cpu/sampler.h"
#include "backend/cpu/work_pieces.h"
#include "backend/operation_cost.h"
#include "base/instruction_set.h"
#include "base/thread_pool.h"

namespace nfp::cpu {

using Operation = std::variant<EmbedArgs, RmsNormArgs, LinearArgs, RopeArgs, AttentionArgs, GatherRowsArgs, SampleArgs,
                               ScoreArgs, CopyArgs, RouteArgs, ExpertLinearArgs, CombineExpertsArgs>;

struct AttentionSplit;  // executor_attention.cc
struct Product;         // executor_parts.h
struct ProductPiece;    // likewise

// Rows of an expert that are multiplied together: routes.row[first ..].
struct ExpertRows {
  int32_t expert;
  int32_t first;
  int32_t count;
};

// What a thread counts over one run.
struct RunCounts {
  int32_t readers = 0;      // that the products so far had in all
  uint32_t work_turns = 0;  // see WorkPieces::share
};

class Executor {
 public:
  // `nodes`: memory nodes that the threads are on.
  Executor(const KernelTable& kernels, ThreadPool& threads, int nodes = 1);

  Status run(std::span<const Operation> operations);

  void set_profiling(bool on);
  const std::vector<StageTime>& profile() const { return times_.all(); }

 private:
  struct Needs {
    size_t per_thread = 0;
    size_t input = 0;  // per thread: its own copy of a matrix product's input
    size_t shared = 0;
    size_t parts = 0;  // of the rows of all experts
    int32_t vocab = 0;
  };
  Needs needs_of(const Operation& operation) const;
  Status reserve(std::span<const Operation> operations);
  // `norm`: what was computed on the way into the product; or null.
  void account(const Operation& operation, const RmsNormArgs* norm, double seconds);

  void execute(const EmbedArgs& args, int thread);
  void execute(const RmsNormArgs& args, int thread);
  void execute(const LinearArgs& args, int thread, RunCounts& counts);
  void normed_linear(const RmsNormArgs& norm, const LinearArgs& linear, int thread, RunCounts& counts);
  void multiply(const LinearArgs& args, const float* x, char* prepared, int thread, RunCounts& counts);
  void multiply(const Product& product, const ProductPiece& piece, int thread);
  void execute(const RopeArgs& args, int thread);
  void execute(const AttentionArgs& args, int thread);
  void split_attention(const AttentionArgs& args, const AttentionSplit& split, int thread);
  void execute(const GatherRowsArgs& args, int thread);
  void execute(const SampleArgs& args, int thread);
  void execute(const ScoreArgs& args, int thread);
  void execute(const CopyArgs& args, int thread);
  void execute(const RouteArgs& args, int thread);
  void execute(const ExpertLinearArgs& args, int thread, RunCounts& counts);
  void execute(const CombineExpertsArgs& args, int thread);

  const KernelTable& kernels_;
  const bool cheap_subnormals_ = detect_features().cheap_subnormals;
  ThreadPool& threads_;
  const int nodes_;
  std::vector<Mapping> scratch_;  // one a thread
  std::vector<Mapping> inputs_;   // one a thread
  Mapping shared_;
  WorkPieces pieces_;
  std::vector<std::vector<ExpertRows>> expert_rows_;  // one a thread
  std::vector<SampleScratch> sampling_;               // one a thread
  // Counts, over one run, threads that are done with reading a product's residual stream: none may write it before.
  alignas(64) std::atomic<int32_t> readers_done_{0};
  std::atomic<int32_t> overflowed_layer_{-1};  // whose keys or values FP16 does not hold
  std::atomic<int32_t> infinite_layer_{-1};    // whose keys or values FP32 does not hold, nor a cache of FP32 or E4M3
  bool profiling_ = false;
  StageTimes times_;
};

}  // namespace nfp::cpu
