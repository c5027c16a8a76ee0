// H = X^T X over the inputs x of a linear layer: what an error in its weights costs. For a row w of the matrix and a
// change d of it, the output changes by d x at each token, and the squares of that sum to d H d^T.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"

namespace nfp {

class Hessian {
 public:
  explicit Hessian(int64_t cols);

  // Adds `rows` inputs. x: [rows, cols]. The result does not depend on the number of threads.
  void add(const float* x, int64_t rows, ThreadPool& threads);

  // Once all inputs are added: adds `damping` times the mean diagonal to the diagonal (all zeros become the identity),
  // so that H can be factorised, and fills the half above it. Error: H is not finite (`name` says of what).
  Status finish(double damping, const std::string& name);

  int64_t cols() const { return cols_; }
  int64_t padded() const { return padded_; }                                // cols rounded up to whole panels
  const float* row(int64_t i) const { return sums_.data() + i * padded_; }  // [padded], whole once finished
  int64_t tokens() const { return tokens_; }
  float at(int64_t i, int64_t j) const;  // before finish too
  size_t bytes() const { return sums_.size() * sizeof(float); }

 private:
  int64_t cols_ = 0;
  int64_t padded_ = 0;
  int64_t tokens_ = 0;
  std::vector<float> sums_;  // [padded, padded]; before finish only tiles at and below the diagonal
  std::vector<float> panels_;
};

// The sum over tokens of a b^T, for two sides of the tokens: how the errors of a layer's inputs, or of the residual
// stream, go with the inputs themselves (compensation.h).
class CrossSum {
 public:
  CrossSum(int64_t rows, int64_t cols);
  // a: [tokens, rows], b: [tokens, cols]. The result does not depend on the number of threads.
  void add(const float* a, const float* b, int64_t tokens, ThreadPool& threads);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t padded() const { return stride_; }                                // cols rounded up to whole panels
  const float* row(int64_t i) const { return sums_.data() + i * stride_; }  // [padded]

 private:
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  int64_t stride_ = 0;
  std::vector<float> sums_;          // [rows rounded up to whole panels, padded]
  std::vector<float> left_, right_;  // packed
};

// Floating-point operations a second that the threads reach together in a short run (about 50 ms) of add's inner loop.
double hessian_flops_a_second(ThreadPool& threads);

}  // namespace nfp
