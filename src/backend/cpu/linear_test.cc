#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "backend/cpu/executor.h"
#include "backend/cpu/packed_weight.h"
#include "backend/cpu/testing/reference.h"

namespace nfp::cpu {
namespace {

struct Parts {
  std::vector<std::unique_ptr<TestMatrix>> matrices;
  LinearSpec spec;
};

Parts make_parts(const std::vector<Storage>& storages, const std::vector<int64_t>& rows, int64_t k, RowOrder order,
                 bool bias, Random& random, bool calibrated = false) {
  Parts parts;
  parts.spec.order = order;
  size_t n = 0;
  for (size_t i = 0; i < storages.size(); ++i) {
    parts.matrices.push_back(std::make_unique<TestMatrix>(storages[i], rows[i], k, random, calibrated));
    parts.spec.parts.push_back(parts.matrices.back().get());
    n += static_cast<size_t>(rows[i]);
  }
  if (bias) parts.spec.bias = random.normals(n);
  return parts;
}

std::unique_ptr<LinearWeight> pack(const Parts& parts) {
  static Arena* arena = new Arena;
  ThreadPool threads(3);
  auto weight = PackedWeight::pack(parts.spec, *arena, threads);
  EXPECT_TRUE(weight.ok());
  return std::move(weight).value();
}

std::vector<float> run_linear(const KernelTable& table, const LinearWeight& weight, const std::vector<float>& x,
                              int32_t rows, Precision precision, Epilogue epilogue = Epilogue::kStore,
                              Activation activation = Activation::kSilu, int threads = 2, float soft_cap = 0.0f) {
  ThreadPool pool(threads);
  Executor executor(table, pool);
  const size_t width = static_cast<size_t>(epilogue == Epilogue::kGatedActivation ? weight.n() / 2 : weight.n());
  std::vector<float> y(width * static_cast<size_t>(rows) + 16, 0.5f);  // 16 guards
  LinearArgs args;
  args.weight = &weight;
  args.x = x.data();
  args.rows = rows;
  args.precision = precision;
  args.epilogue = epilogue;
  args.activation = activation;
  args.soft_cap = soft_cap;
  args.y = y.data();
  const Operation operation = args;
  EXPECT_TRUE(executor.run({&operation, 1}).ok());
  for (size_t i = y.size() - 16; i < y.size(); ++i) EXPECT_EQ(y[i], 0.5f);
  y.resize(y.size() - 16);
  return y;
}

// a * b + c rounded to FP16 once, where all are FP16 numbers: of the numbers around it the nearest, or the even one.
float fma_fp16(float a, float b, float c) {
  // FP80's 64 bits hold the sum unless the product is far under c's last bit, and then it decides nothing.
  const long double exact = static_cast<long double>(a) * b + c;
  const uint16_t near = fp32_to_fp16(static_cast<float>(exact));
  uint16_t best = near;
  for (const int step : {-1, 1}) {
    const auto other = static_cast<uint16_t>(near + step);
    const long double d = std::fabs(fp16_to_fp32(other) - exact), least = std::fabs(fp16_to_fp32(best) - exact);
    if (d < least || (d == least && (other & 1u) == 0)) best = other;
  }
  return fp16_to_fp32(best);
}

// FP8 on a table of FP16 pairs, as PairArithmetic says.
float defined_in_fp16(const TestMatrix& matrix, int64_t row, const float* x, bool codes, float largest) {
  const float inverse = largest > 0 ? 448.0f / largest : 0.0f;
  const float rounded = codes && largest > 0 ? 448.0f : largest;
  const int exponent = rounded > 0 ? std::max(std::ilogb(rounded), -119) : -119;
  float total = 0;
  for (int64_t begin = 0; begin < matrix.cols(); begin += kHalfChunk) {
    float sums[2] = {};
    for (int64_t i = begin; i < std::min(begin + kHalfChunk, matrix.cols()); ++i) {
      const float value = codes ? e4m3_to_fp32(fp32_to_e4m3(x[i] * inverse)) : x[i];
      const float half = fp16_to_fp32(fp32_to_fp16(std::ldexp(value, 7 - exponent)));
      sums[i % 2] = fma_fp16(half, matrix.value(row, i, true), sums[i % 2]);
    }
    total += sums[0] + sums[1];
  }
  return total * matrix.scale(row) * std::ldexp(codes ? largest / 448.0f : 1.0f, exponent - 7);
}

// What processors' BF16 products take a subnormal number for.
float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }

// On a table of tiles, as PairArithmetic says: FP8 where `upper`.
float defined_in_tiles(const TestMatrix& matrix, int64_t row, const float* x, bool upper, bool codes, float largest) {
  const float inverse = largest > 0 ? 448.0f / largest : 0.0f;
  const auto value = [&](int64_t i) { return codes ? e4m3_to_fp32(fp32_to_e4m3(x[i] * inverse)) : x[i]; };
  float most = 0;
  for (int64_t i = 0; i < matrix.cols(); ++i) most = std::max(most, std::fabs(value(i)));
  const int exponent = most > 0 ? std::max(std::ilogb(most), -29) : -29;
  const auto bf16 = [](float v) { return bf16_to_fp32(fp32_to_bf16(v)); };
  float total = 0;
  for (int64_t begin = 0; begin < matrix.cols(); begin += kTileSteps) {
    const int64_t end = std::min(begin + kTileSteps, matrix.cols());
    const auto product = [&](auto of_x, auto of_w) {
      float sums[2] = {};
      for (int64_t i = begin; i < end; ++i) sums[i % 2] = flushed(std::fma(of_x(i), of_w(i), sums[i % 2]));
      total = flushed(total + flushed(sums[0] + sums[1]));
    };
    const auto scaled = [&](int64_t i) { return std::ldexp(value(i), 98 - exponent); };
    const auto x1 = [&](int64_t i) { return flushed(bf16(scaled(i))); };
    const auto x2 = [&](int64_t i) { return flushed(bf16(scaled(i) - bf16(scaled(i)))); };
    const auto whole = [&](int64_t i) { return matrix.value(row, i, upper); };
    const auto w1 = [&](int64_t i) {
      return std::bit_cast<float>((std::bit_cast<uint32_t>(whole(i)) + 0x8000u) & 0xffff0000u);
    };
    product(x1, [&](int64_t i) { return (upper ? whole(i) : w1(i)) * 0x1p-98f; });
    if (upper) continue;
    product(x2, [&](int64_t i) { return w1(i) * 0x1p-98f; });
    product(x1, [&](int64_t i) { return (whole(i) - w1(i)) * 0x1p-98f; });
  }
  return total * matrix.scale(row) * std::ldexp(codes ? largest / 448.0f : 1.0f, exponent);
}

// What the kernels are defined to compute, one output at a time, straight from the definition.
float defined(const TestMatrix& matrix, int64_t row, const float* x, Precision precision, PairArithmetic pairs) {
  const bool upper = matrix.storage() == Storage::kNested && precision != Precision::kFp16;
  const bool codes = upper && precision == Precision::kFp8W8A8;
  const bool bf16 = pairs == PairArithmetic::kBf16;
  const auto flush = [&](float v) { return upper && bf16 ? flushed(v) : v; };
  float largest = 0;
  for (int64_t i = 0; i < matrix.cols(); ++i) largest = std::max(largest, std::fabs(x[i]));
  if (upper && pairs == PairArithmetic::kFp16) return defined_in_fp16(matrix, row, x, codes, largest);
  if ((upper || precision == Precision::kFp16) && pairs == PairArithmetic::kBf16Tiles) {
    return defined_in_tiles(matrix, row, x, upper, codes, largest);
  }
  const float inverse = largest > 0 ? 448.0f / largest : 0.0f;
  float acc = 0;
  for (int64_t i = 0; i < matrix.cols(); ++i) {
    float v = codes ? e4m3_to_fp32(fp32_to_e4m3(x[i] * inverse)) : x[i];
    if (upper && bf16) v = flush(bf16_to_fp32(fp32_to_bf16(v)));
    acc = flush(std::fma(v, matrix.value(row, i, upper), acc));
  }
  acc *= matrix.scale(row);
  return codes ? acc * (largest / 448.0f) : acc;
}

void expect_same(const std::vector<float>& got, const std::vector<float>& want, const char* table) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << table << " differs at " << i << " of " << got.size();
  }
}

// Adversarial activations: zeros, subnormals, large values.
std::vector<float> activations(size_t count, Random& random) {
  std::vector<float> x = random.normals(count);
  for (size_t i = 0; i < count; i += 37) x[i] = 0.0f;
  for (size_t i = 5; i < count; i += 41) x[i] = -0x1p-130f;
  for (size_t i = 9; i < count; i += 53) x[i] = 3e4f;
  return x;
}

TEST(Linear, EqualsItsDefinitionOnEveryTableStorageAndPrecision) {
  Random random(1);
  for (const Storage storage : {Storage::kNested, Storage::kDenseF16}) {
    for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {16, 4}, {37, 67}, {130, 301}}) {
      const Parts parts = make_parts({storage}, {n}, k, RowOrder::kConcat, true, random, n == 37);
      const auto weight = pack(parts);
      for (const int32_t rows : {1, 3, 7, 13}) {
        const std::vector<float> x = activations(static_cast<size_t>(rows * k), random);
        for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
          for (const KernelTable* table : runnable_tables()) {
            std::vector<float> want;
            for (int32_t m = 0; m < rows; ++m) {
              for (int64_t i = 0; i < n; ++i) {
                want.push_back(defined(*parts.matrices[0], i, x.data() + m * k, precision, table->pairs) +
                               parts.spec.bias[static_cast<size_t>(i)]);
              }
            }
            expect_same(run_linear(*table, *weight, x, rows, precision), want, table->name);
          }
        }
      }
    }
  }
}

TEST(Linear, EveryTableEqualsScalarForAnyNumberOfRows) {
  Random random(2);
  const int64_t n = 83, k = 291;  // more than a chunk, and odd
  const Parts parts = make_parts({Storage::kNested}, {n}, k, RowOrder::kConcat, false, random);
  const auto weight = pack(parts);
  for (int32_t rows = 1; rows <= 70; ++rows) {
    const std::vector<float> x = activations(static_cast<size_t>(rows * k), random);
    for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
      for (const KernelTable* table : runnable_tables()) {
        if (table == &reference_of(*table)) continue;
        const auto run = [&](const KernelTable& t) {  // on one thread: 70 sizes of two pools each are many threads
          return run_linear(t, *weight, x, rows, precision, Epilogue::kStore, Activation::kSilu, 1);
        };
        expect_same(run(*table), run(reference_of(*table)), table->name);
      }
    }
  }
}

TEST(Linear, ARowDoesNotDependOnItsBatchOrOnThreads) {
  Random random(3);
  const int64_t n = 200, k = 333;
  const Parts parts = make_parts({Storage::kNested}, {n}, k, RowOrder::kConcat, false, random);
  const auto weight = pack(parts);
  const int32_t rows = 600;  // over one task's rows
  const std::vector<float> x = activations(static_cast<size_t>(rows * k), random);
  for (const KernelTable* table : runnable_tables()) {
    if (table == &reference_of(*table)) continue;
    for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
      const std::vector<float> all = run_linear(*table, *weight, x, rows, precision);
      for (const int32_t row : {0, 5, 300, 599}) {
        const std::vector<float> one(x.begin() + row * k, x.begin() + (row + 1) * k);
        for (const int threads : {1, 3, 7}) {
          expect_same(run_linear(*table, *weight, one, 1, precision, Epilogue::kStore, Activation::kSilu, threads),
                      {all.begin() + row * n, all.begin() + (row + 1) * n}, table->name);
        }
      }
    }
  }
}

TEST(Linear, W8A8IsTheSameOnEveryTableWhoseSumsRunInOrderInFp32) {
  Random random(4);
  const Parts parts = make_parts({Storage::kNested}, {100}, 260, RowOrder::kConcat, false, random);
  const auto weight = pack(parts);
  const std::vector<float> x = random.normals(int64_t{9} * 260);
  const std::vector<float> want = run_linear(scalar_kernels(), *weight, x, 9, Precision::kFp8W8A8);
  for (const KernelTable* table : runnable_tables()) {
    if (table->pairs == PairArithmetic::kFp16 || table->pairs == PairArithmetic::kBf16Tiles) continue;
    expect_same(run_linear(*table, *weight, x, 9, Precision::kFp8W8A8), want, table->name);
  }
}

TEST(Linear, Fp16PairsAreWithinTheirBoundOfFp32) {
  Random random(9);
  const int64_t n = 48, k = 1000;
  const Parts parts = make_parts({Storage::kNested}, {n}, k, RowOrder::kConcat, false, random);
  const auto weight = pack(parts);
  for (const bool outliers : {false, true}) {
    std::vector<float> x = random.normals(static_cast<size_t>(k));
    for (size_t i = 0; outliers && i < x.size(); i += 300) x[i] = 1000.0f;
    float largest = 0;
    for (const float v : x) largest = std::max(largest, std::fabs(v));
    const std::vector<float> got = run_linear(scalar_fp16_kernels(), *weight, x, 1, Precision::kFp8);
    double errors = 0, squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      double exact = 0, magnitudes = 0, weights = 0;
      for (int64_t c = 0; c < k; ++c) {
        const double w = double{parts.matrices[0]->value(i, c, true)}, product = w * x[static_cast<size_t>(c)];
        exact += product;
        magnitudes += std::fabs(product);
        squares += product * product;
        weights += std::fabs(w);
      }
      const double error = got[static_cast<size_t>(i)] / double{parts.matrices[0]->scale(i)} - exact;
      // A rounding of each x and half a chunk's of the sums that it is in, each to the number's last bit or to that of
      // FP16's subnormals (2^-24 where the largest x is 2^7); then FP32's.
      const double unit = 0x1p-25 * largest / 0x1p7;
      constexpr int64_t kRoundings = kHalfChunk / 2 + 1;
      EXPECT_LE(std::fabs(error), (kRoundings * 0x1p-11 * 1.07 + 0x1p-19) * magnitudes + unit * (weights + k));
      errors += error * error;
    }
    // Of random signs: so many roundings whose variance is at most (2^-11)^2 / 3 of that of the chunk's products, and
    // thrice as much for chance.
    EXPECT_LE(std::sqrt(errors), 3 * 0x1p-11 * std::sqrt(kHalfChunk / 2.0 / 3.0) * std::sqrt(squares));
  }
}

TEST(Linear, Fp16OnTilesIsWithinItsBoundOfFp64) {
  Random random(12);
  for (const int64_t k : {31, 1000}) {
    const int64_t n = 48;
    const Parts parts = make_parts({Storage::kNested}, {n}, k, RowOrder::kConcat, false, random);
    const auto weight = pack(parts);
    for (const bool outliers : {false, true}) {
      std::vector<float> x = random.normals(static_cast<size_t>(k));
      for (size_t i = 0; outliers && i < x.size(); i += 300) x[i] = 1000.3f;
      const std::vector<float> got = run_linear(scalar_tile_kernels(), *weight, x, 1, Precision::kFp16);
      double errors = 0, rounded = 0;
      for (int64_t i = 0; i < n; ++i) {
        double exact = 0, magnitudes = 0, of_fp16 = 0;
        for (int64_t c = 0; c < k; ++c) {
          const float v = x[static_cast<size_t>(c)];
          const double w = double{parts.matrices[0]->value(i, c, false)};
          exact += w * v;
          of_fp16 += w * double{fp16_to_fp32(fp32_to_fp16(v))};
          magnitudes += std::fabs(w * v);
        }
        const double error = got[static_cast<size_t>(i)] / double{parts.matrices[0]->scale(i)} - exact;
        // What the products leave out (kBf16Tiles), and a rounding to FP32 for each of a chunk's 16 steps, for each
        // sum of three products a chunk, and for the scale.
        const auto chunks = static_cast<double>(tile_chunks(k));
        EXPECT_LE(std::fabs(error), (2 * 0x1p-16 + (16 + 2 * 3 * chunks + 1) * 0x1p-24) * magnitudes);
        errors += error * error;
        rounded += (of_fp16 - exact) * (of_fp16 - exact);
      }
      // Rounding activations to FP16 costs more: 2^-11 beside 2^-15.
      EXPECT_LT(std::sqrt(errors), std::sqrt(rounded) / 8) << k;
    }
  }
}

// Of every size that FP32 has: nothing overflows, and a power of two changes nothing but itself.
TEST(Linear, ScaledActivationsMayBeOfAnySize) {
  Random random(10);
  const int64_t k = 300;
  const Parts parts = make_parts({Storage::kNested}, {32}, k, RowOrder::kConcat, false, random);
  const auto weight = pack(parts);
  std::vector<float> x = random.normals(static_cast<size_t>(k));
  // The largest products of one sign, in whole chunks.
  Parts most = make_parts({Storage::kNested}, {16}, k, RowOrder::kConcat, false, random);
  most.matrices[0]->fill_largest();
  const auto largest = pack(most);
  const std::vector<float> ones(static_cast<size_t>(k), std::nextafter(2.0f, 0.0f));
  for (const KernelTable* table : runnable_tables()) {
    for (const Precision precision : {Precision::kFp16, Precision::kFp8}) {
      const bool tiles = table->pairs == PairArithmetic::kBf16Tiles;
      if (!tiles && (precision == Precision::kFp16 || table->pairs != PairArithmetic::kFp16)) continue;
      const std::vector<float> want = run_linear(reference_of(*table), *weight, x, 1, precision);
      for (const int exponent : {-90, -40, -31, -1, 1, 15, 40, 110}) {
        std::vector<float> scaled = x;
        for (float& v : scaled) v = std::ldexp(v, exponent);
        const std::vector<float> got = run_linear(*table, *weight, scaled, 1, precision);
        for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], std::ldexp(want[i], exponent)) << exponent;
      }
      for (const float v : run_linear(*table, *largest, ones, 1, precision)) EXPECT_TRUE(std::isfinite(v));
    }
  }
}

TEST(Linear, WhatIsNotFiniteStaysSo) {
  Random random(11);
  const int64_t k = 200;
  const Parts parts = make_parts({Storage::kNested}, {40}, k, RowOrder::kConcat, false, random);
  const auto weight = pack(parts);
  for (const int32_t rows : {1, 5, 30}) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> x = random.normals(static_cast<size_t>(rows * k));
      std::fill_n(x.begin(), k, 0.0f);                      // a row of zeros
      if (rows > 1) x[static_cast<size_t>(k + 130)] = bad;  // beside one that is not finite
      for (const Precision precision : {Precision::kFp16, Precision::kFp8, Precision::kFp8W8A8}) {
        for (const KernelTable* table : runnable_tables()) {
          const std::vector<float> y = run_linear(*table, *weight, x, rows, precision);
          for (size_t i = 0; i < y.size(); ++i) {
            if (i < 40) {
              EXPECT_EQ(y[i], 0.0f) << table->name;
            } else {
              EXPECT_EQ(std::isfinite(y[i]), i >= 80) << table->name << " " << name_of(precision) << " " << bad;
            }
          }
        }
      }
    }
  }
}

TEST(Linear, ATinyRowHasE4m3CodesToo) {
  for (const KernelTable* table : runnable_tables()) {
    for (const float largest : {1e-35f, 3e-36f, 1e-36f, 1e-38f, 1e-44f}) {  // 448 / largest may be no number
      const std::vector<float> x = {largest, 0.0f, -largest / 2, largest / 3, -0.0f};
      std::vector<float> codes(x.size());
      const float scale = table->quantize_e4m3(x.data(), static_cast<int64_t>(x.size()), codes.data());
      for (size_t i = 0; i < x.size(); ++i) {
        const double bound = std::max(std::fabs(double{x[i]}) * 0x1p-4, double{scale} * 0x1p-10);
        EXPECT_NEAR(double{codes[i]} * double{scale}, x[i], bound * 1.001) << table->name << " " << largest;
        EXPECT_EQ(e4m3_to_fp32(fp32_to_e4m3(codes[i])), codes[i]) << table->name << " " << largest;
      }
    }
  }
}

TEST(Linear, EpiloguesAndMixedStorages) {
  Random random(5);
  const int64_t k = 70;
  for (const int32_t rows : {1, 4, 20}) {
    const std::vector<float> x = random.normals(static_cast<size_t>(rows * k));
    for (const Precision precision : {Precision::kFp16, Precision::kFp8W8A8}) {
      // q nested, k dense, v nested; odd sizes.
      const Parts qkv = make_parts({Storage::kNested, Storage::kDenseF16, Storage::kNested}, {33, 7, 20}, k,
                                   RowOrder::kConcat, true, random);
      const auto qkv_weight = pack(qkv);
      // gate nested, up dense.
      const Parts mlp =
          make_parts({Storage::kNested, Storage::kDenseF16}, {43, 43}, k, RowOrder::kInterleave, true, random);
      const auto mlp_weight = pack(mlp);
      for (const KernelTable* table : runnable_tables()) {
        const auto at = [&](const Parts& parts, size_t part, int64_t row, int32_t m, size_t bias) {
          return defined(*parts.matrices[part], row, x.data() + m * k, precision, table->pairs) + parts.spec.bias[bias];
        };
        std::vector<float> stored, gated, interleaved;
        for (int32_t m = 0; m < rows; ++m) {
          size_t bias = 0;
          for (size_t part = 0; part < 3; ++part) {
            for (int64_t i = 0; i < qkv.matrices[part]->rows(); ++i) stored.push_back(at(qkv, part, i, m, bias++));
          }
          for (size_t i = 0; i < 43; ++i) {
            const float gate = at(mlp, 0, static_cast<int64_t>(i), m, i);
            const float up = at(mlp, 1, static_cast<int64_t>(i), m, 43 + i);
            interleaved.push_back(gate);
            interleaved.push_back(up);
            gated.push_back(gate / (1.0f + std::exp(-gate)) * up);
          }
        }
        expect_same(run_linear(*table, *qkv_weight, x, rows, precision), stored, table->name);
        expect_same(run_linear(*table, *mlp_weight, x, rows, precision), interleaved, table->name);
        const auto capped =
            run_linear(*table, *qkv_weight, x, rows, precision, Epilogue::kStore, Activation::kSilu, 2, 1.5f);
        for (size_t i = 0; i < stored.size(); ++i) {
          EXPECT_NEAR(capped[i], 1.5 * std::tanh(static_cast<double>(stored[i]) / 1.5), 4e-6) << table->name;
        }
        const auto silu = run_linear(*table, *mlp_weight, x, rows, precision, Epilogue::kGatedActivation);
        expect_same(silu, run_linear(reference_of(*table), *mlp_weight, x, rows, precision, Epilogue::kGatedActivation),
                    table->name);
        for (size_t i = 0; i < gated.size(); ++i) {
          EXPECT_NEAR(silu[i], gated[i], 4e-6f * std::max(1.0f, std::fabs(gated[i]))) << table->name;
        }
        const auto gelu =
            run_linear(*table, *mlp_weight, x, rows, precision, Epilogue::kGatedActivation, Activation::kGeluTanh);
        for (size_t i = 0; i < gelu.size(); ++i) {
          const double g = static_cast<double>(interleaved[2 * i]);
          const double want = 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) *
                              static_cast<double>(interleaved[2 * i + 1]);
          EXPECT_NEAR(gelu[i], want, 4e-6 * std::max(1.0, std::fabs(want))) << table->name;
        }
      }
    }
  }
}

TEST(Linear, EveryUpperCodeAndEveryNestablePatternIsExact) {
  // Weights times one: k = 1 and x = 1 give the weight itself.
  std::vector<uint16_t> patterns;
  for (uint32_t w = 0; w < 0x10000; ++w) {
    if ((w & 0x7fffu) <= 0x3f00u) patterns.push_back(static_cast<uint16_t>(w));
  }
  ASSERT_EQ(patterns.size(), 32258u);
  const size_t panels = (patterns.size() + 63) / 64;
  for (const bool other : {false, true}) {
    std::vector<uint8_t> upper(panels * 64), lower(panels * 64);
    std::vector<float> exact(panels * 64), coarse(panels * 64);
    const auto place = [](size_t i) { return i / 64 * 64 + group_position(i % 16, (i / 16) % 4); };
    for (size_t i = 0; i < patterns.size(); ++i) {
      const uint32_t w = patterns[i], magnitude = w & 0x7fffu;
      uint32_t u = (magnitude + 0x3fu + ((magnitude >> 7) & 1u)) >> 7;
      if (other && (magnitude & 0x7fu) != 0) u = u == magnitude >> 7 ? u + 1 : u - 1;
      upper[place(i)] = static_cast<uint8_t>(((w >> 8) & 0x80u) | u);
      lower[place(i)] = static_cast<uint8_t>(w);
      exact[i] = fp16_to_fp32(patterns[i]);
      coarse[i] = e4m3_to_fp32(upper[place(i)]) * 0x1p-8f;
    }
    const std::vector<float> ones(16, 1.0f);
    for (const KernelTable* table : runnable_tables()) {
      // Four steps with x = one of the unit vectors pick each weight.
      for (int step = 0; step < 4; ++step) {
        float x[4] = {};
        x[step] = 1.0f;
        std::vector<uint32_t> pairs(static_cast<size_t>(pair_words(table->pairs, 4)));
        std::vector<uint32_t> split(static_cast<size_t>(split_words(4)));
        float scale = 1.0f, split_scale = 1.0f;
        if (table->to_pairs != nullptr) scale = table->to_pairs(x, 4, pairs.data());
        if (table->to_split != nullptr) split_scale = table->to_split(x, 4, split.data());
        std::vector<Panel> list(panels);
        for (size_t p = 0; p < panels; ++p) {
          list[p].upper = upper.data() + 64 * p;
          list[p].lower = lower.data() + 64 * p;
          list[p].scale = ones.data();
          list[p].column = static_cast<int32_t>(16 * p);
        }
        std::vector<float> y(panels * 16), scratch(linear_scratch_bytes(table->pairs, 1, 4) / 4 + 16);
        for (const auto& [upper_only, cheap_subnormals] : {std::pair{false, false}, {true, false}, {true, true}}) {
          LinearTask task;
          task.cheap_subnormals = cheap_subnormals;
          task.panels = list.data();
          task.last = static_cast<int64_t>(panels);
          task.k = 4;
          task.x = x;
          task.x_stride = 4;
          task.rows = 1;
          task.upper_only = upper_only;
          if (upper_only && table->to_pairs != nullptr) task.x_pairs = pairs.data(), task.token_scale = &scale;
          if (!upper_only && table->to_split != nullptr) task.x_pairs = split.data(), task.token_scale = &split_scale;
          task.y = y.data();
          task.y_stride = static_cast<int64_t>(y.size());
          task.scratch = scratch.data();
          table->linear(task);
          for (size_t i = 0; i < patterns.size(); ++i) {
            if (static_cast<int>((i / 16) % 4) != step) continue;
            const float want = upper_only ? coarse[i] : exact[i];
            ASSERT_EQ(y[i / 64 * 16 + i % 16], want) << table->name << " pattern " << patterns[i];
          }
        }
      }
    }
  }
}

TEST(Linear, SubnormalsThatCostNothingChangeNothing) {
  std::mt19937 random(25);
  constexpr int64_t kMostK = 70;
  constexpr int kPanels = 3;
  for (const KernelTable* table : runnable_tables()) {
    for (int round = 0; round < 200; ++round) {
      const auto k = static_cast<int64_t>(1 + random() % kMostK);
      const auto rows = static_cast<int32_t>(1 + random() % 14);
      const auto groups = static_cast<size_t>((k + 3) / 4);
      std::vector<uint8_t> upper(kPanels * groups * 64);
      for (uint8_t& code : upper) {  // many of them zero or subnormal
        const uint32_t magnitude = random() % 3 == 0 ? random() % 8 : random() % 0x7f;
        code = static_cast<uint8_t>(magnitude | (random() % 2 == 0 ? 0x80u : 0u));
      }
      // Of the usual size, or down to the ends of what FP32 holds, which other products have to take.
      std::uniform_real_distribution<float> exponent(round % 2 == 0 ? -30.0f : -148.0f,
                                                     round % 2 == 0 ? 30.0f : 127.0f);
      std::vector<float> x(static_cast<size_t>(rows * k));
      for (float& v : x) {
        v = random() % 5 == 0 ? 0.0f : std::exp2(exponent(random)) * (random() % 2 == 0 ? 1.0f : -1.0f);
        if (round % 50 == 49 && random() % 8 == 0) v = std::numeric_limits<float>::infinity();
      }
      const std::vector<float> ones(16, 1.0f);
      std::vector<Panel> panels(kPanels);
      for (size_t p = 0; p < kPanels; ++p) {
        panels[p].upper = upper.data() + 64 * groups * p;
        panels[p].scale = ones.data();
        panels[p].column = static_cast<int32_t>(16 * p);
      }
      std::vector<uint32_t> y[2];
      for (const bool cheap : {false, true}) {
        std::vector<float> out(static_cast<size_t>(rows) * kPanels * 16);
        std::vector<float> scratch(linear_scratch_bytes(table->pairs, rows, k) / 4 + 16);
        LinearTask task;
        task.panels = panels.data();
        task.last = kPanels;
        task.k = k;
        task.x = x.data();
        task.x_stride = k;
        task.rows = rows;
        task.upper_only = true;
        task.cheap_subnormals = cheap;
        task.y = out.data();
        task.y_stride = int64_t{kPanels} * 16;
        task.scratch = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        table->linear(task);
        for (const float v : out) y[cheap ? 1 : 0].push_back(std::isnan(v) ? 0x7fc00000u : std::bit_cast<uint32_t>(v));
      }
      ASSERT_EQ(y[0], y[1]) << table->name << " k " << k << " rows " << rows << " round " << round;
    }
  }
}

TEST(PackedWeight, RowsReadBackExactly) {
  Random random(6);
  for (const Storage storage : {Storage::kNested, Storage::kDenseF16}) {
    for (const RowOrder order : {RowOrder::kConcat, RowOrder::kInterleave}) {
      const Parts parts = make_parts({storage, Storage::kNested}, {21, 21}, 13, order, false, random, true);
      const auto weight = pack(parts);
      std::vector<float> row(13);
      for (int64_t i = 0; i < 42; ++i) {
        static_cast<const PackedWeight&>(*weight).read_row(i, 2.0f, row.data());
        const auto part = static_cast<size_t>(order == RowOrder::kConcat ? i / 21 : i % 2);
        const int64_t inside = order == RowOrder::kConcat ? i % 21 : i / 2;
        const TestMatrix& matrix = *parts.matrices[part];
        for (int64_t c = 0; c < 13; ++c) {
          EXPECT_EQ(row[static_cast<size_t>(c)], matrix.value(inside, c, false) * (matrix.scale(inside) * 2.0f));
        }
      }
    }
  }
}

TEST(PackedWeight, AReadErrorIsReturned) {
  Random random(7);
  Parts parts = make_parts({Storage::kNested}, {100}, 8, RowOrder::kConcat, false, random);
  parts.matrices[0]->fails_at = 77;
  Arena arena;
  ThreadPool threads(3);
  const auto weight = PackedWeight::pack(parts.spec, arena, threads);
  ASSERT_FALSE(weight.ok());
  EXPECT_EQ(weight.error().message, "test.weight: row 77 holds a NaN");
}

TEST(PackedWeight, BytesAreThoseOfThePlanes) {
  Random random(8);
  const auto weight = pack(make_parts({Storage::kNested}, {64}, 32, RowOrder::kConcat, false, random));
  EXPECT_EQ(weight->bytes_held(), 2u * 64 * 32);
  EXPECT_EQ(weight->bytes_read(Precision::kFp16), 2u * 64 * 32);
  EXPECT_EQ(weight->bytes_read(Precision::kFp8), 64u * 32);
}

}  // namespace
}  // namespace nfp::cpu
