#include "calibrate/gptq.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "base/float_types.h"
#include "calibrate/compensation.h"
#include "calibrate/descent.h"
#include "calibrate/gptq_kernels.h"
#include "nested/format.h"

namespace nfp {
namespace {

// Inputs with a few strong common directions and columns of very different size, as a transformer's are.
std::vector<float> inputs(int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> scale(static_cast<size_t>(cols)), mix(static_cast<size_t>(cols));
  for (float& s : scale) s = std::exp(normal(random));
  for (float& m : mix) m = normal(random);
  std::vector<float> x(static_cast<size_t>(rows * cols));
  for (int64_t t = 0; t < rows; ++t) {
    const float common = normal(random);
    for (int64_t c = 0; c < cols; ++c) {
      const auto i = static_cast<size_t>(c);
      x[static_cast<size_t>(t * cols + c)] = scale[i] * (normal(random) + 2 * mix[i] * common);
    }
  }
  return x;
}

std::vector<uint16_t> weights(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::vector<uint16_t> w(static_cast<size_t>(count));
  for (uint16_t& bits : w) bits = fp32_to_fp16(std::clamp(normal(random), -1.75f, 1.75f));
  return w;
}

bool chosen(const std::vector<uint8_t>& choice, int64_t cols, int64_t row, int64_t c) {
  return (choice[static_cast<size_t>(row * choice_row_bytes(cols) + c / 8)] >> (c % 8)) & 1;
}

uint8_t upper_of(uint16_t w, bool other) { return other ? other_neighbour(w) : split(w).upper; }

// The textbook: GPTQ's algorithm 1 with the inverse of H written out, in double.
class Textbook {
 public:
  Textbook(const std::vector<float>& x, int64_t rows, int64_t cols, double damping) : n_(cols) {
    std::vector<double> h = gram(x, rows, cols);
    double mean = 0;
    for (int64_t i = 0; i < n_; ++i) mean += h[at(i, i)] / static_cast<double>(n_);
    for (int64_t i = 0; i < n_; ++i) h[at(i, i)] += damping * mean;
    order_.resize(static_cast<size_t>(n_));
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return h[at(a, a)] > h[at(b, b)]; });
    std::vector<double> p(h.size());
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t j = 0; j < n_; ++j)
        p[at(i, j)] = h[at(order_[static_cast<size_t>(i)], order_[static_cast<size_t>(j)])];
    }
    inverse_ = invert(p);
  }

  static std::vector<double> gram(const std::vector<float>& x, int64_t rows, int64_t cols) {
    std::vector<double> h(static_cast<size_t>(cols * cols));
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < cols; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          h[static_cast<size_t>(i * cols + j)] +=
              static_cast<double>(x[static_cast<size_t>(t * cols + i)]) * x[static_cast<size_t>(t * cols + j)];
        }
      }
    }
    return h;
  }

  // For every weight of a row: which neighbour, and how far (relative to their distance) the target was from midway.
  struct Decision {
    bool other;
    double margin;
  };
  std::vector<Decision> row(const uint16_t* w, UpperRule rule) const {
    std::vector<double> value(static_cast<size_t>(n_)), inverse = inverse_;
    std::vector<Decision> out(static_cast<size_t>(n_));
    for (int64_t j = 0; j < n_; ++j)
      value[static_cast<size_t>(j)] = fp16_to_fp32(w[order_[static_cast<size_t>(j)]]) * 256.0;
    for (int64_t j = 0; j < n_; ++j) {
      const int32_t c = order_[static_cast<size_t>(j)];
      const double near = e4m3_to_fp32(split(w[c]).upper), far = e4m3_to_fp32(other_neighbour(w[c]));
      const double target = value[static_cast<size_t>(j)];
      const bool free = near != far && (rule == UpperRule::kFree || (w[c] & 0x80) == 0);
      const bool other = free && std::abs(target - far) < std::abs(target - near);
      out[static_cast<size_t>(c)] = {other, free ? std::abs(target - (near + far) / 2) / std::abs(far - near) : 1.0};
      const double e = (target - (other ? far : near)) / inverse[at(j, j)];
      for (int64_t i = j + 1; i < n_; ++i) value[static_cast<size_t>(i)] -= e * inverse[at(j, i)];
      // Removing column j from the problem (equation 3 of the paper).
      for (int64_t a = j + 1; a < n_; ++a) {
        for (int64_t b = j + 1; b < n_; ++b)
          inverse[at(a, b)] -= inverse[at(a, j)] * inverse[at(j, b)] / inverse[at(j, j)];
      }
    }
    return out;
  }

 private:
  size_t at(int64_t i, int64_t j) const { return static_cast<size_t>(i * n_ + j); }
  std::vector<double> invert(std::vector<double> m) const {  // Gauss-Jordan; positive definite needs no pivoting
    std::vector<double> inv(m.size());
    for (int64_t i = 0; i < n_; ++i) inv[at(i, i)] = 1;
    for (int64_t p = 0; p < n_; ++p) {
      const double d = m[at(p, p)];
      for (int64_t j = 0; j < n_; ++j) m[at(p, j)] /= d, inv[at(p, j)] /= d;
      for (int64_t i = 0; i < n_; ++i) {
        const double f = m[at(i, p)];
        if (i == p || f == 0) continue;
        for (int64_t j = 0; j < n_; ++j) m[at(i, j)] -= f * m[at(p, j)], inv[at(i, j)] -= f * inv[at(p, j)];
      }
    }
    return inv;
  }

  int64_t n_;
  std::vector<int32_t> order_;
  std::vector<double> inverse_;
};

std::vector<uint8_t> choose(const std::vector<float>& x, int64_t tokens, const std::vector<uint16_t>& w, int64_t rows,
                            int64_t cols, UpperRule rule, int threads) {
  ThreadPool pool(threads);
  Hessian hessian(cols);
  hessian.add(x.data(), tokens, pool);
  EXPECT_TRUE(hessian.finish(0.01, "test").ok());
  auto factor = factorise(hessian, "test", pool);
  EXPECT_TRUE(factor.ok());
  std::vector<uint8_t> choice(static_cast<size_t>(rows * choice_row_bytes(cols)), 0xff);
  choose_uppers(*factor, w, rows, rule, pool, choice);
  return choice;
}

double output_error(const std::vector<double>& h, const uint16_t* w, int64_t cols, const auto& upper) {
  std::vector<double> e(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) e[static_cast<size_t>(c)] = fp16_to_fp32(w[c]) * 256.0 - e4m3_to_fp32(upper(c));
  double sum = 0;
  for (int64_t i = 0; i < cols; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      sum += e[static_cast<size_t>(i)] * h[static_cast<size_t>(i * cols + j)] * e[static_cast<size_t>(j)];
  }
  return sum;
}

TEST(Gptq, AgreesWithTheTextbook) {
  struct Shape {
    int64_t rows, cols, tokens;
  };
  for (const auto [rows, cols, tokens] : {Shape{5, 1, 7}, Shape{33, 37, 300}, Shape{70, 96, 50}, Shape{3, 130, 1000}}) {
    for (UpperRule rule : {UpperRule::kFree, UpperRule::kRestricted}) {
      const auto x = inputs(tokens, cols, 1);
      const auto w = weights(rows * cols, 2);
      const Textbook reference(x, tokens, cols, 0.01);
      const auto choice = choose(x, tokens, w, rows, cols, rule, 2);
      int64_t compared = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const auto expected = reference.row(w.data() + r * cols, rule);
        // A target that is midway to FP32's accuracy may go either way, and all that follows with it: such a row is
        // not compared.
        const bool close = std::any_of(expected.begin(), expected.end(), [](const auto& d) { return d.margin < 1e-4; });
        if (close) continue;
        ++compared;
        for (int64_t c = 0; c < cols; ++c) {
          ASSERT_EQ(chosen(choice, cols, r, c), expected[static_cast<size_t>(c)].other)
              << "row " << r << " column " << c << " of " << cols;
        }
      }
      EXPECT_GT(compared * 2, rows);
    }
  }
}

TEST(Gptq, LowersTheErrorOfTheOutputs) {
  const int64_t rows = 16, cols = 160, tokens = 500;
  const auto x = inputs(tokens, cols, 3);
  const auto w = weights(rows * cols, 4);
  const auto h = Textbook::gram(x, tokens, cols);
  double plain = 0, restricted = 0, free = 0;
  const auto a = choose(x, tokens, w, rows, cols, UpperRule::kFree, 1);
  const auto b = choose(x, tokens, w, rows, cols, UpperRule::kRestricted, 1);
  for (int64_t r = 0; r < rows; ++r) {
    const uint16_t* row = w.data() + r * cols;
    plain += output_error(h, row, cols, [&](int64_t c) { return split(row[c]).upper; });
    free += output_error(h, row, cols, [&](int64_t c) { return upper_of(row[c], chosen(a, cols, r, c)); });
    restricted += output_error(h, row, cols, [&](int64_t c) { return upper_of(row[c], chosen(b, cols, r, c)); });
  }
  EXPECT_LT(free, 0.5 * plain);
  EXPECT_LT(restricted, 0.75 * plain);
  EXPECT_LT(free, restricted);
}

TEST(Descent, EndsWhereNoSingleFlipLowersTheError) {
  const int64_t rows = 37, cols = 75, tokens = 400;
  const auto x = inputs(tokens, cols, 14);
  const auto w = weights(rows * cols, 15);
  ThreadPool pool(2);
  Hessian hessian(cols);
  hessian.add(x.data(), tokens, pool);
  ASSERT_TRUE(hessian.finish(0.01, "test").ok());
  std::vector<double> h(static_cast<size_t>(cols * cols));
  for (int64_t i = 0; i < cols * cols; ++i) h[static_cast<size_t>(i)] = hessian.row(i / cols)[i % cols];
  for (UpperRule rule : {UpperRule::kFree, UpperRule::kRestricted}) {
    const auto factor = factorise(hessian, "test", pool);
    ASSERT_TRUE(factor.ok());
    std::vector<uint8_t> swept(static_cast<size_t>(rows * choice_row_bytes(cols)));
    choose_uppers(*factor, w, rows, rule, pool, swept);
    auto choice = swept;
    EXPECT_GT(descend(hessian, w, rows, rule, pool, choice), 0);
    double before = 0, after = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* row = w.data() + r * cols;
      const auto error_of = [&](const std::vector<uint8_t>& bits, int64_t flipped) {
        return output_error(h, row, cols,
                            [&](int64_t c) { return upper_of(row[c], chosen(bits, cols, r, c) != (c == flipped)); });
      };
      const double mine = error_of(choice, -1);
      before += error_of(swept, -1);
      after += mine;
      for (int64_t c = 0; c < cols; ++c) {
        const bool fixed = rule == UpperRule::kRestricted && (row[c] & 0x80) != 0;
        if (fixed) {
          ASSERT_FALSE(chosen(choice, cols, r, c));
        } else {
          ASSERT_GE(error_of(choice, c), mine * (1 - 1e-4)) << "row " << r << " column " << c;
        }
      }
    }
    EXPECT_LT(after, 0.99 * before);
    ThreadPool other(3);
    auto again = swept;
    descend(hessian, w, rows, rule, other, again);
    EXPECT_EQ(again, choice);
    EXPECT_EQ(descend(hessian, w, rows, rule, pool, choice), 0);  // nothing is left to do
  }
}

// x as the layers before leave it: part of the error goes with x, part does not.
std::vector<float> with_errors(const std::vector<float>& x, int64_t tokens, int64_t cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(x);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < cols; ++c) {
      const float neighbour = x[static_cast<size_t>(t * cols + (c + 1) % cols)];
      out[static_cast<size_t>(t * cols + c)] += 0.05f * neighbour + 0.01f * normal(random);
    }
  }
  return out;
}

// Least squares written out, in double: shift H = w D + E.
TEST(Compensation, ShiftsAreTheLeastSquaresOnes) {
  struct Shape {
    int64_t rows, cols, tokens;
  };
  for (const auto [rows, cols, tokens] : {Shape{3, 1, 9}, Shape{37, 45, 300}, Shape{70, 96, 200}}) {
    const auto x = inputs(tokens, cols, 20), fp8 = with_errors(x, tokens, cols, 21);
    const auto residual = inputs(tokens, rows, 22);  // r - r'
    const auto w = weights(rows * cols, 23);
    std::vector<int8_t> exponent(static_cast<size_t>(rows));
    for (size_t r = 0; r < exponent.size(); ++r) exponent[r] = static_cast<int8_t>(r % 4);
    ThreadPool pool(2);
    Hessian hessian(cols);
    hessian.add(fp8.data(), tokens, pool);
    ASSERT_TRUE(hessian.finish(0.01, "test").ok());
    const auto factor = factorise(hessian, "test", pool);
    ASSERT_TRUE(factor.ok());
    std::vector<float> difference(x.size());
    for (size_t i = 0; i < x.size(); ++i) difference[i] = x[i] - fp8[i];
    CrossSum d(cols, cols), e(rows, cols);
    d.add(difference.data(), fp8.data(), tokens, pool);
    e.add(residual.data(), fp8.data(), tokens, pool);
    const auto shift = find_shifts(*factor, {&d, &e}, w, exponent, pool);
    for (int threads : {1, 3}) {
      ThreadPool other(threads);
      ASSERT_EQ(find_shifts(*factor, {&d, &e}, w, exponent, other), shift);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const double unit = std::ldexp(1.0, 8 - exponent[static_cast<size_t>(r)]);
      std::vector<double> side(static_cast<size_t>(cols)), left(side.size());
      double size = 0, miss = 0;
      for (int64_t c = 0; c < cols; ++c) {
        const auto at = static_cast<size_t>(c);
        for (int64_t t = 0; t < tokens; ++t) {
          double sum = unit * residual[static_cast<size_t>(t * rows + r)];
          for (int64_t i = 0; i < cols; ++i) {
            sum += 256.0 * fp16_to_fp32(w[static_cast<size_t>(r * cols + i)]) *
                   difference[static_cast<size_t>(t * cols + i)];
          }
          side[at] += sum * fp8[static_cast<size_t>(t * cols + c)];
        }
        for (int64_t i = 0; i < cols; ++i) {
          left[at] += static_cast<double>(shift[static_cast<size_t>(r * cols + i)]) / kShiftTaken * hessian.row(i)[c];
        }
        size += side[at] * side[at];
        miss += (left[at] - side[at]) * (left[at] - side[at]);
      }
      // FP32 sums of `tokens` and `cols` products, and a solution that leaves a residue of some cols * 2^-24 of H's
      // size times its own.
      ASSERT_LT(std::sqrt(miss), 1e-3 * std::sqrt(size)) << "row " << r << " of " << rows << " by " << cols;
    }
  }
}

TEST(Compensation, OutputsComeCloserToTheExactOnes) {
  const int64_t rows = 32, cols = 160, tokens = 2000;
  const auto x = inputs(tokens, cols, 24), fp8 = with_errors(x, tokens, cols, 25);
  const auto w = weights(rows * cols, 26);
  ThreadPool pool(2);
  Hessian hessian(cols);
  hessian.add(fp8.data(), tokens, pool);
  ASSERT_TRUE(hessian.finish(0.01, "test").ok());
  const auto factor = factorise(hessian, "test", pool);
  ASSERT_TRUE(factor.ok());
  std::vector<float> difference(x.size());
  for (size_t i = 0; i < x.size(); ++i) difference[i] = x[i] - fp8[i];
  CrossSum d(cols, cols);
  d.add(difference.data(), fp8.data(), tokens, pool);
  const std::vector<int8_t> exponent(static_cast<size_t>(rows));
  const auto error = [&](std::span<const float> shift) {
    std::vector<uint8_t> choice(static_cast<size_t>(rows * choice_row_bytes(cols)));
    choose_uppers(*factor, w, rows, UpperRule::kFree, pool, choice, shift);
    descend(hessian, w, rows, UpperRule::kFree, pool, choice, shift);
    double sum = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t r = 0; r < rows; ++r) {
        double y = 0;
        for (int64_t c = 0; c < cols; ++c) {
          const uint16_t bits = w[static_cast<size_t>(r * cols + c)];
          const auto at = static_cast<size_t>(t * cols + c);
          y += fp16_to_fp32(bits) * 256.0 * x[at] - e4m3_to_fp32(upper_of(bits, chosen(choice, cols, r, c))) * fp8[at];
        }
        sum += y * y;
      }
    }
    return sum;
  };
  EXPECT_LT(error(find_shifts(*factor, {&d, nullptr}, w, exponent, pool)), 0.8 * error({}));
}

TEST(Compensation, WithoutErrorsNothingChanges) {
  const int64_t rows = 40, cols = 70, tokens = 300;
  const auto x = inputs(tokens, cols, 27);
  const auto w = weights(rows * cols, 28);
  ThreadPool pool(2);
  Hessian hessian(cols);
  hessian.add(x.data(), tokens, pool);
  ASSERT_TRUE(hessian.finish(0.01, "test").ok());
  const auto factor = factorise(hessian, "test", pool);
  ASSERT_TRUE(factor.ok());
  const CrossSum d(cols, cols), e(rows, cols);
  const auto shift = find_shifts(*factor, {&d, &e}, w, std::vector<int8_t>(static_cast<size_t>(rows)), pool);
  EXPECT_EQ(shift, std::vector<float>(shift.size()));
  std::vector<uint8_t> with(static_cast<size_t>(rows * choice_row_bytes(cols))), without(with);
  choose_uppers(*factor, w, rows, UpperRule::kFree, pool, with, shift);
  choose_uppers(*factor, w, rows, UpperRule::kFree, pool, without);
  descend(hessian, w, rows, UpperRule::kFree, pool, with, shift);
  descend(hessian, w, rows, UpperRule::kFree, pool, without);
  EXPECT_EQ(with, without);
}

TEST(CrossSum, IsTheSumOfAllOuterProducts) {
  const int64_t tokens = 517, rows = 41, cols = 75;
  const auto a = inputs(tokens, rows, 29), b = inputs(tokens, cols, 30);
  ThreadPool pool(2);
  CrossSum sum(rows, cols);
  sum.add(a.data(), b.data(), 300, pool);
  sum.add(a.data() + 300 * rows, b.data() + 300 * cols, tokens - 300, pool);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      double expected = 0, size = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        const double product =
            static_cast<double>(a[static_cast<size_t>(t * rows + i)]) * b[static_cast<size_t>(t * cols + j)];
        expected += product;
        size += std::abs(product);
      }
      ASSERT_NEAR(sum.row(i)[j], expected, size * tokens * 0x1p-24);
    }
  }
}

TEST(Gptq, TheSameForAnyNumberOfThreads) {
  const int64_t rows = 101, cols = 131, tokens = 700;
  const auto x = inputs(tokens, cols, 5);
  const auto w = weights(rows * cols, 6);
  const auto one = choose(x, tokens, w, rows, cols, UpperRule::kFree, 1);
  for (int threads : {2, 3, 7}) EXPECT_EQ(choose(x, tokens, w, rows, cols, UpperRule::kFree, threads), one);
}

TEST(Gptq, RestrictedLeavesRoundedUpWeightsAlone) {
  const int64_t rows = 40, cols = 64, tokens = 200;
  const auto w = weights(rows * cols, 7);
  const auto choice = choose(inputs(tokens, cols, 8), tokens, w, rows, cols, UpperRule::kRestricted, 1);
  int64_t taken = 0;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const bool other = chosen(choice, cols, i / cols, i % cols);
    taken += other;
    EXPECT_FALSE(other && (w[static_cast<size_t>(i)] & 0x80) != 0);
  }
  EXPECT_GT(taken, rows * cols / 20);
}

TEST(Gptq, EveryPatternKeepsItsFp16Bits) {
  // All nestable patterns in a matrix, calibrated: join restores each from the byte that was chosen.
  std::vector<uint16_t> w;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    if (is_nestable(static_cast<uint16_t>(bits))) w.push_back(static_cast<uint16_t>(bits));
  }
  ASSERT_EQ(w.size(), 32258u);
  const int64_t cols = 254, rows = 127;
  std::shuffle(w.begin(), w.end(), std::mt19937(9));
  const auto choice = choose(inputs(400, cols, 10), 400, w, rows, cols, UpperRule::kFree, 2);
  for (size_t i = 0; i < w.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    const uint8_t upper = upper_of(w[i], chosen(choice, cols, at / cols, at % cols));
    ASSERT_EQ(join(upper, split(w[i]).lower), w[i]);
  }
}

TEST(Gptq, InputsThatAreZeroChooseTheNearest) {
  const int64_t cols = 40;
  const auto w = weights(cols, 11);
  const auto choice = choose(std::vector<float>(static_cast<size_t>(3 * cols)), 3, w, 1, cols, UpperRule::kFree, 1);
  for (uint8_t byte : choice) EXPECT_EQ(byte, 0);
}

TEST(Gptq, OverflowingInputsAreAnErrorThatNamesTheLayer) {
  ThreadPool pool(1);
  Hessian hessian(8);
  std::vector<float> x(8, 1.0f);
  x[3] = INFINITY;
  hessian.add(x.data(), 1, pool);
  const Status finished = hessian.finish(0.01, "model.layers.3.mlp.down_proj");
  ASSERT_FALSE(finished.ok());
  EXPECT_NE(finished.error().message.find("model.layers.3.mlp.down_proj"), std::string::npos);
}

TEST(Hessian, IsTheGramMatrixOfAllItsInputs) {
  const int64_t rows = 517, cols = 75;
  const auto x = inputs(rows, cols, 12);
  ThreadPool pool(2);
  Hessian hessian(cols);
  hessian.add(x.data(), 300, pool);
  hessian.add(x.data() + 300 * cols, rows - 300, pool);
  const auto h = Textbook::gram(x, rows, cols);
  for (int64_t i = 0; i < cols; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const double scale = std::sqrt(h[static_cast<size_t>(i * cols + i)] * h[static_cast<size_t>(j * cols + j)]);
      // FP32 sums of `rows` products: at most rows * 2^-24 of the sum of magnitudes, which Cauchy-Schwarz bounds.
      ASSERT_NEAR(hessian.at(i, j), h[static_cast<size_t>(i * cols + j)], scale * rows * 0x1p-24);
    }
  }
}

TEST(Kernels, AllInstructionSetsAgree) {
  std::mt19937 random(13);
  std::uniform_int_distribution<int> small(-8, 8);  // integers: every sum is exact, so all must be equal
  const int64_t depth = 19;
  std::vector<float> a(depth * calibrate::kPanel), b(a.size());
  std::vector<double> c(a.size());
  for (size_t i = 0; i < a.size(); ++i)
    a[i] = static_cast<float>(small(random)), b[i] = static_cast<float>(small(random)), c[i] = a[i];
  std::vector<float> expected, descended;
  for (const InstructionSet set : instruction_sets(detect_features())) {
    const calibrate::Kernels& k = calibrate::kernels_of(set);
    std::vector<float> out(size_t{calibrate::kPanel} * calibrate::kPanel, 1.0f);
    k.add_product_f32(a.data(), b.data(), depth, out.data(), calibrate::kPanel);
    if (expected.empty()) {
      for (int i = 0; i < calibrate::kPanel; ++i) {
        for (int j = 0; j < calibrate::kPanel; ++j) {
          float sum = 1.0f;
          for (int64_t t = 0; t < depth; ++t)
            sum +=
                a[static_cast<size_t>(t * calibrate::kPanel + i)] * b[static_cast<size_t>(t * calibrate::kPanel + j)];
          expected.push_back(sum);
        }
      }
    }
    EXPECT_EQ(out, expected) << k.name;
    std::vector<double> square(size_t{calibrate::kPanel} * calibrate::kPanel, 1.0);
    k.add_product_f64(c.data(), c.data(), depth, square.data(), calibrate::kPanel);
    EXPECT_EQ(square[1], square[calibrate::kPanel]) << k.name;
    // One row's descent on whole numbers: the same flips, gradients and errors from every instruction set.
    std::vector<float> error(b.begin(), b.begin() + 30), flip(a.begin(), a.begin() + 30), gradient(calibrate::kPanel);
    std::vector<float> h(out);
    for (int i = 0; i < calibrate::kPanel; ++i) h[static_cast<size_t>(i) * (calibrate::kPanel + 1)] += 500.0f;
    for (int i = 0; i < 30; ++i) {
      for (int j = 0; j < calibrate::kPanel; ++j)
        gradient[static_cast<size_t>(j)] +=
            error[static_cast<size_t>(i)] * h[static_cast<size_t>(i) * calibrate::kPanel + static_cast<size_t>(j)];
    }
    const int64_t taken = k.descend({30, h.data(), calibrate::kPanel, error.data(), flip.data(), gradient.data()});
    EXPECT_GT(taken, 0) << k.name;
    if (descended.empty()) descended = gradient;
    EXPECT_EQ(gradient, descended) << k.name;
  }
}

TEST(Kernels, AllInstructionSetsSolve) {
  constexpr int64_t cols = 20;
  std::mt19937 random(31);
  std::uniform_real_distribution<float> number(-0.5f, 0.5f);
  std::vector<float> factor(cols * cols), inverse(cols), b(cols * calibrate::kMaxLanes);
  std::vector<double> u(cols * cols);  // U, whole
  for (int64_t j = 0; j < cols; ++j) {
    u[static_cast<size_t>(j * cols + j)] = 1;
    inverse[static_cast<size_t>(j)] = 1.0f + number(random);
    for (int64_t i = 0; i < j; ++i) {
      const float value = number(random);
      u[static_cast<size_t>(i * cols + j)] = value;
      const int64_t block = j / calibrate::kSweepBlock, t = j % calibrate::kSweepBlock;
      factor[static_cast<size_t>((block * cols + i) * calibrate::kSweepBlock + t)] = value;
    }
  }
  for (float& value : b) value = number(random);
  for (const InstructionSet set : instruction_sets(detect_features())) {
    const calibrate::Kernels& k = calibrate::kernels_of(set);
    const int lanes = k.lanes;
    std::vector<float> y(b.begin(), b.begin() + cols * lanes);
    k.solve({cols, factor.data(), inverse.data(), y.data()});
    for (int64_t lane = 0; lane < lanes; ++lane) {
      std::vector<double> p(cols);  // P U^T y
      for (int64_t j = 0; j < cols; ++j) {
        for (int64_t i = 0; i <= j; ++i) {
          p[static_cast<size_t>(j)] +=
              u[static_cast<size_t>(i * cols + j)] * static_cast<double>(y[static_cast<size_t>(i * lanes + lane)]);
        }
        p[static_cast<size_t>(j)] /= static_cast<double>(inverse[static_cast<size_t>(j)]);
      }
      for (int64_t i = 0; i < cols; ++i) {
        double sum = 0, size = 0;
        for (int64_t j = i; j < cols; ++j) {
          const double term = u[static_cast<size_t>(i * cols + j)] * p[static_cast<size_t>(j)];
          sum += term;
          size += std::abs(term);
        }
        // Substitution in FP32 is exact for a U some cols * 2^-24 away (Higham, theorem 8.5), twice.
        ASSERT_NEAR(sum, b[static_cast<size_t>(i * lanes + lane)], 4 * cols * 0x1p-24 * (size + 1)) << k.name;
      }
    }
  }
}

}  // namespace
}  // namespace nfp
