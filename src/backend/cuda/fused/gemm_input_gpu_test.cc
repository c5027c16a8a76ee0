// The row kernels against float64. Needs a Hopper GPU; skips elsewhere.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/experts/experts.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/gemm.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

template <typename T>
struct DeviceCopy {
  explicit DeviceCopy(const std::vector<T>& host) : count(host.size()) {
    EXPECT_EQ(cudaMalloc(&data, std::max<size_t>(1, count * sizeof(T))), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceCopy() { cudaFree(data); }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  T* get() const { return static_cast<T*>(data); }
  std::vector<T> host() const {
    std::vector<T> out(count);
    EXPECT_EQ(cudaMemcpy(out.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }
  void* data = nullptr;
  size_t count;
};

struct Case {
  GemmInputCall::Source source;
  bool residual;
  bool bf16;
  int64_t m, k;
  bool weight_f32 = false;
  float weight_offset = 0.0f;
};

class RowsGpu : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (auto gemm = Gemm::create(); !gemm.ok()) GTEST_SKIP() << gemm.error().message;
  }
};

TEST_P(RowsGpu, MatchesFloat64) {
  const Case c = GetParam();
  using Source = GemmInputCall::Source;
  std::mt19937 random(static_cast<uint32_t>(c.m * 100 + c.k));
  std::normal_distribution<float> normal;
  const auto bits = [&](float v) { return c.bf16 ? fp32_to_bf16(v) : fp32_to_fp16(v); };
  const auto value = [&](uint16_t b) { return double{c.bf16 ? bf16_to_fp32(b) : fp16_to_fp32(b)}; };
  const auto numbers = [&](int64_t count) {
    std::vector<uint16_t> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(bits(normal(random)));
    return out;
  };
  const bool gated = c.source == Source::kSwiglu || c.source == Source::kGeglu;
  const int64_t width = gated ? 2 * c.k : c.k;
  const auto x = numbers(c.m * width), weight = numbers(c.k), residual = numbers(c.m * c.k);
  std::vector<float> weight_f32;  // of all 24 bits
  for (int64_t i = 0; i < c.k; ++i) weight_f32.push_back(normal(random));
  const DeviceCopy<float> dw_f32(weight_f32);
  const auto weight_at = [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    return (c.weight_f32 ? double{weight_f32[at]} : value(weight[at])) + static_cast<double>(c.weight_offset);
  };
  const PlaneShape shape{0, c.k};
  // In some of the cases the sum has a place of its own.
  const bool apart = c.residual && c.k % 2 == c.m % 2;
  const DeviceCopy<uint16_t> dx(x), dw(weight), dr(residual), dh(std::vector<uint16_t>(residual.size(), 0xffff)),
      dy(std::vector<uint16_t>(static_cast<size_t>(c.m * c.k), 0xffff));
  const DeviceCopy<uint8_t> d8(std::vector<uint8_t>(static_cast<size_t>(c.m * shape.padded_k()), 0xff));
  const DeviceCopy<float> scale(std::vector<float>(static_cast<size_t>(c.m), 0.02f));
  GemmInputCall call;
  call.source = c.source;
  call.m = c.m;
  call.k = c.k;
  call.bf16 = c.bf16;
  call.x = dx.get();
  call.ldx = width;
  if (c.source == Source::kNorm) {
    call.weight = c.weight_f32 ? static_cast<const void*>(dw_f32.get()) : dw.get();
    call.weight_f32 = c.weight_f32;
    call.weight_offset = c.weight_offset;
  }
  call.residual = c.residual ? dr.get() : nullptr;
  call.ldr = c.k;
  call.h = apart ? dh.get() : nullptr;
  call.y_f16 = dy.get();
  call.ldy = c.k;
  call.y_e4m3 = d8.get();
  call.ldy_e4m3 = shape.padded_k();
  call.scales = scale.get();
  const Status status = prepare_gemm_input(call, nullptr);
  ASSERT_TRUE(status.ok()) << status.error().message;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  const auto y = dy.host(), h = apart ? dh.host() : dr.host();
  if (apart) {
    ASSERT_EQ(dr.host(), residual);
  }
  const auto codes = d8.host();
  const auto scales = scale.host();
  std::vector<double> want(static_cast<size_t>(c.m * c.k));
  for (int64_t t = 0; t < c.m; ++t) {
    double squares = 0;
    for (int64_t i = 0; i < c.k; ++i) {
      double& v = want[static_cast<size_t>(t * c.k + i)];
      const auto at = [&](int64_t column) { return value(x[static_cast<size_t>(t * width + column)]); };
      if (gated) {
        const double gate = at(swiglu_gate_row(i)), up = at(swiglu_up_row(i));
        const double cubic = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
        v = (c.source == Source::kSwiglu ? gate / (1 + std::exp(-gate)) : gate * (1 + std::tanh(cubic)) / 2) * up;
      } else {
        v = at(i);
      }
      if (c.residual) {
        const uint16_t sum = bits(static_cast<float>(v + value(residual[static_cast<size_t>(t * c.k + i)])));
        ASSERT_EQ(h[static_cast<size_t>(t * c.k + i)], sum);
        v = value(sum);
      }
      squares += v * v;
    }
    for (int64_t i = 0; i < c.k; ++i) {
      double& v = want[static_cast<size_t>(t * c.k + i)];
      if (c.source == Source::kNorm) v *= weight_at(i) / std::sqrt(squares / static_cast<double>(c.k) + 1e-5);
    }
  }
  for (int64_t t = 0; t < c.m; ++t) {
    double largest = 0;
    for (int64_t i = 0; i < c.k; ++i) largest = std::max(largest, std::abs(want[static_cast<size_t>(t * c.k + i)]));
    const double s = scales[static_cast<size_t>(t)];
    const double expected = largest / 448;
    ASSERT_NEAR(s, expected, expected * 1e-5);
    for (int64_t i = 0; i < shape.padded_k(); ++i) {
      const uint8_t code = codes[static_cast<size_t>(t * shape.padded_k() + activation_byte(i))];
      if (i >= c.k) {
        ASSERT_EQ(code & 0x7f, 0);
        continue;
      }
      const double v = want[static_cast<size_t>(t * c.k + i)];
      const double clipped = std::clamp(v, -448 * s, 448 * s);
      // Half a step of E4M3: 2^-4 of the value, or half its smallest subnormal.
      ASSERT_LE(std::abs(e4m3_to_fp32(code) * s - clipped), std::max(std::abs(clipped) * 0x1p-4, s * 0x1p-10) * 1.001)
          << t << " " << i;
      const double got = value(y[static_cast<size_t>(t * c.k + i)]);
      ASSERT_LE(std::abs(got - v), std::abs(v) * (c.bf16 ? 0x1p-8 : 0x1p-10) + 1e-6) << t << " " << i;
    }
  }
}

using S = GemmInputCall::Source;
INSTANTIATE_TEST_SUITE_P(
    Shapes, RowsGpu,
    ::testing::Values(Case{S::kPlain, false, false, 5, 4096}, Case{S::kPlain, false, true, 70, 200},
                      Case{S::kNorm, false, false, 3, 5120}, Case{S::kNorm, true, false, 9, 577},
                      Case{S::kNorm, true, true, 4, 14336}, Case{S::kNorm, true, true, 2, 63},
                      Case{S::kSwiglu, false, false, 7, 14336}, Case{S::kSwiglu, false, true, 3, 1000},
                      Case{S::kGeglu, false, false, 7, 9216}, Case{S::kGeglu, false, false, 70, 72},
                      Case{S::kPlain, false, false, 2, 32768}, Case{S::kNorm, false, true, 64, 17920},
                      Case{S::kNorm, true, true, 5, 30001}, Case{S::kSwiglu, false, true, 3, 8328},
                      Case{S::kPlain, false, true, 2, 16640}, Case{S::kPlain, false, false, 1, 1},
                      Case{S::kNorm, true, false, 1, 4096, true}, Case{S::kNorm, true, true, 3, 5120, true, 1.0f},
                      Case{S::kNorm, false, false, 70, 14336, true}, Case{S::kNorm, true, false, 66, 32768, true},
                      Case{S::kNorm, true, false, 9, 577, true, 1.0f}, Case{S::kNorm, true, false, 2, 2048, true, 1.0f},
                      // More than 64 rows: none is shared, up to eight groups of columns a thread.
                      Case{S::kNorm, true, false, 65, 14336}, Case{S::kSwiglu, false, true, 66, 17920},
                      Case{S::kNorm, true, true, 65, 32768}, Case{S::kPlain, false, false, 67, 14336},
                      // Many: blocks of half the size.
                      Case{S::kNorm, true, false, 1101, 4096, true}, Case{S::kNorm, true, true, 1024, 2000},
                      Case{S::kNorm, false, false, 1030, 5120, true, 1.0f},
                      Case{S::kNorm, true, true, 1300, 8192, true}, Case{S::kNorm, false, true, 1500, 72}));

// Whose largest number over 448 has no reciprocal, or is none: codes are worth the numbers all the same.
TEST(TinyRowsGpu, HaveNumbersForCodes) {
  if (auto gemm = Gemm::create(); !gemm.ok()) GTEST_SKIP() << gemm.error().message;
  for (const int64_t rows : {int64_t{3}, int64_t{2100}}) {  // of two kernels
    constexpr int64_t kColumns = 264;
    const int64_t width = PlaneShape{0, kColumns}.padded_k();
    std::vector<uint16_t> x;
    for (int64_t i = 0; i < rows * kColumns; ++i) {
      const int exponent = -133 + static_cast<int>(i / kColumns % 20);  // from the smallest BF16 on
      x.push_back(i % 3 == 0 ? uint16_t{0} : fp32_to_bf16(std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, exponent)));
    }
    const DeviceCopy<uint16_t> dx(x);
    const DeviceCopy<uint8_t> d8(std::vector<uint8_t>(static_cast<size_t>(rows * width), 0xff));
    const DeviceCopy<float> d_scales(std::vector<float>(static_cast<size_t>(rows), 0.0f));
    GemmInputCall call;
    call.m = rows;
    call.k = call.ldx = kColumns;
    call.bf16 = true;
    call.x = dx.get();
    call.y_e4m3 = d8.get();
    call.ldy_e4m3 = width;
    call.scales = d_scales.get();
    const Status status = prepare_gemm_input(call, nullptr);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto codes = d8.host();
    const auto scales = d_scales.host();
    for (int64_t t = 0; t < rows; ++t) {
      const double scale = scales[static_cast<size_t>(t)];
      ASSERT_TRUE(std::isfinite(scale) && std::isfinite(1.0f / scales[static_cast<size_t>(t)])) << t;
      for (int64_t i = 0; i < kColumns; ++i) {
        const double want = bf16_to_fp32(x[static_cast<size_t>(t * kColumns + i)]);
        const double got = e4m3_to_fp32(codes[static_cast<size_t>(t * width + activation_byte(i))]) * scale;
        ASSERT_LE(std::abs(got - want), std::max(std::abs(want) * 0x1p-4, scale * 0x1p-10) * 1.001) << t << " " << i;
      }
    }
  }
}

// A row's norm does not depend on how many others there are, which are another kernel's from some number on.
TEST(ManyRowsGpu, HaveTheBitsOfFew) {
  if (auto gemm = Gemm::create(); !gemm.ok()) GTEST_SKIP() << gemm.error().message;
  constexpr int64_t kRows = 2051;
  for (const bool bf16 : {false, true}) {
    for (const int64_t k : {8, 136, 1000, 2048, 4096, 4104, 5120, 8192, 8200, 16384}) {
      std::mt19937 random(static_cast<uint32_t>(k));
      std::normal_distribution<float> normal;
      const auto numbers = static_cast<size_t>(kRows * k);
      std::vector<uint16_t> x(numbers), residual(numbers);
      for (uint16_t& v : x) v = bf16 ? fp32_to_bf16(normal(random)) : fp32_to_fp16(normal(random));
      for (uint16_t& v : residual) v = bf16 ? fp32_to_bf16(normal(random)) : fp32_to_fp16(normal(random));
      std::vector<float> weights(static_cast<size_t>(k));
      for (float& v : weights) v = normal(random);
      const auto width = static_cast<size_t>(PlaneShape{0, k}.padded_k());
      const DeviceCopy<float> weight(weights);
      for (const bool with_codes : {false, true}) {
        std::vector<std::vector<uint8_t>> results;
        for (const int64_t each : {kRows, int64_t{60}, int64_t{1000}}) {
          const DeviceCopy<uint16_t> dx(x), dr(residual), dy(std::vector<uint16_t>(numbers, uint16_t{0}));
          const DeviceCopy<uint8_t> codes(std::vector<uint8_t>(static_cast<size_t>(kRows) * width, uint8_t{0}));
          const DeviceCopy<float> scales(std::vector<float>(static_cast<size_t>(kRows), 0.0f));
          for (int64_t first = 0; first < kRows; first += each) {
            GemmInputCall call;
            call.source = S::kNorm;
            call.bf16 = bf16;
            call.m = std::min(each, kRows - first);
            call.k = call.ldx = call.ldr = call.ldy = k;
            call.x = dx.get() + first * k;
            call.residual = dr.get() + first * k;
            call.weight = weight.get();
            call.weight_f32 = true;
            call.batch_invariant = k > 8192;  // up to there it always is
            if (with_codes) {
              call.y_e4m3 = codes.get() + static_cast<size_t>(first) * width;
              call.ldy_e4m3 = static_cast<int64_t>(width);
              call.scales = scales.get() + first;
            } else {
              call.y_f16 = dy.get() + first * k;
            }
            const Status status = prepare_gemm_input(call, nullptr);
            ASSERT_TRUE(status.ok()) << status.error().message;
          }
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          auto& result = results.emplace_back();
          const auto append = [&](const auto& values) {
            const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
            result.insert(result.end(), bytes, bytes + values.size() * sizeof(values[0]));
          };
          append(dr.host());
          append(dy.host());
          append(codes.host());
          append(scales.host());
        }
        EXPECT_TRUE(results[0] == results[1]) << k << " columns";
        EXPECT_TRUE(results[2] == results[1]) << k << " columns";
      }
    }
  }
}

// The sum of a row's experts, the residual and the norm in one kernel: the bits of two.
TEST(ExpertsNormGpu, IsTheSumAndThenTheNorm) {
  if (auto gemm = Gemm::create(); !gemm.ok()) GTEST_SKIP() << gemm.error().message;
  struct Shape {
    int64_t m, k;
    int32_t top;
    bool shared, gate, with_f16, codes, follows;
  };
  for (const Shape& c :
       {Shape{1, 2048, 8, false, false, false, true, true}, Shape{64, 2048, 8, false, false, true, false, true},
        Shape{128, 2048, 8, false, false, false, true, true}, Shape{1000, 2048, 8, false, false, false, true, true},
        Shape{129, 4096, 2, false, false, true, true, false}, Shape{3, 3584, 8, true, true, false, true, false},
        Shape{70, 2048, 4, true, false, true, false, false}, Shape{5, 8, 1, true, true, true, true, true},
        Shape{9, 136, 32, false, true, true, true, false}, Shape{2, 6144, 9, false, false, true, true, true},
        Shape{65, 8192, 10, true, true, true, true, false}}) {
    std::mt19937 random(static_cast<uint32_t>(c.m * 7 + c.k));
    std::normal_distribution<float> normal;
    const auto halves = [&](int64_t count) {
      std::vector<uint16_t> out(static_cast<size_t>(count));
      for (uint16_t& v : out) v = fp32_to_fp16(normal(random));
      return out;
    };
    const auto floats = [&](int64_t count) {
      std::vector<float> out(static_cast<size_t>(count));
      for (float& v : out) v = normal(random);
      return out;
    };
    const auto numbers = static_cast<size_t>(c.m * c.k);
    std::vector<int32_t> place(static_cast<size_t>(c.m * c.top));
    std::iota(place.begin(), place.end(), 0);
    std::shuffle(place.begin(), place.end(), random);
    for (size_t i = 3; i < place.size(); i += 11) place[i] = -1;
    const DeviceCopy<int32_t> d_place(place);
    const DeviceCopy<float> weight(floats(c.m * c.top)), gate(floats(c.m)), norm_weight(floats(c.k));
    const DeviceCopy<uint16_t> x(halves(c.m * c.top * c.k)), shared(halves(c.m * c.k)), residual(halves(c.m * c.k)),
        product(std::vector<uint16_t>(numbers, 0xffff));
    CombineExpertsArgs sum;
    sum.x = x.get();
    sum.routes = {1, c.top, d_place.get(), d_place.get(), d_place.get(), weight.get()};
    sum.rows = static_cast<int32_t>(c.m);
    sum.hidden = static_cast<int32_t>(c.k);
    sum.shared = c.shared ? shared.get() : nullptr;
    sum.shared_weight = c.gate ? gate.get() : nullptr;
    sum.follows = c.follows;
    sum.out = product.get();
    ASSERT_TRUE(run_combine(sum, nullptr).ok());
    const auto width = PlaneShape{0, c.k}.padded_k();
    struct Outputs {
      std::vector<uint16_t> h, y;
      std::vector<uint8_t> codes;
      std::vector<float> scales;
    };
    const auto run = [&](bool as_one) {
      const DeviceCopy<uint16_t> h(std::vector<uint16_t>(numbers, 0xffff)), y(std::vector<uint16_t>(numbers, 0xffff));
      const DeviceCopy<uint8_t> codes(std::vector<uint8_t>(static_cast<size_t>(c.m * width), 0xee));
      const DeviceCopy<float> scales(std::vector<float>(static_cast<size_t>(c.m), -1.0f));
      GemmInputCall call;
      call.source = as_one ? S::kExperts : S::kNorm;
      call.m = c.m;
      call.k = c.k;
      call.x = as_one ? nullptr : product.get();
      call.ldx = c.k;
      call.experts = as_one ? &sum : nullptr;
      call.weight = norm_weight.get();
      call.weight_f32 = true;
      call.residual = residual.get();
      call.ldr = c.k;
      call.h = h.get();
      call.y_f16 = c.with_f16 ? y.get() : nullptr;
      call.ldy = c.k;
      call.y_e4m3 = c.codes ? codes.get() : nullptr;
      call.ldy_e4m3 = width;
      call.scales = scales.get();
      const Status status = prepare_gemm_input(call, nullptr);
      EXPECT_TRUE(status.ok()) << status.error().message;
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      return Outputs{h.host(), y.host(), codes.host(), scales.host()};
    };
    const Outputs want = run(false), got = run(true);
    EXPECT_TRUE(got.h == want.h) << c.m << " rows of " << c.k;
    EXPECT_TRUE(got.y == want.y) << c.m << " rows of " << c.k;
    EXPECT_TRUE(got.codes == want.codes) << c.m << " rows of " << c.k;
    EXPECT_EQ(got.scales, want.scales) << c.m << " rows of " << c.k;
  }
}

TEST(ExpertsNormGpu, RefusesWhatDoesNotFit) {
  if (auto gemm = Gemm::create(); !gemm.ok()) GTEST_SKIP() << gemm.error().message;
  GemmInputCall call;
  call.source = S::kExperts;
  call.m = 1;
  call.k = 64;
  const DeviceCopy<float> weight(std::vector<float>(64));
  const DeviceCopy<uint16_t> rows(std::vector<uint16_t>(64));
  const DeviceCopy<int32_t> place(std::vector<int32_t>(1));
  call.weight = weight.get();
  call.weight_f32 = true;
  call.residual = rows.get();
  call.ldr = 64;
  call.y_f16 = rows.get();
  call.ldy = 64;
  const auto refused = [&](std::string_view field) {
    const Status status = prepare_gemm_input(call, nullptr);
    ASSERT_FALSE(status.ok()) << field;
    EXPECT_NE(status.error().message.find(field), std::string::npos) << status.error().message;
  };
  refused("experts");
  CombineExpertsArgs sum;
  call.experts = &sum;
  refused("experts");
  sum.x = rows.get();
  sum.rows = 1;
  sum.hidden = 64;
  sum.routes = {1, 1, place.get(), place.get(), place.get(), weight.get()};
  call.k = call.ldr = call.ldy = sum.hidden = 60;
  refused("k");
  call.k = call.ldr = call.ldy = sum.hidden = 64;
  call.residual = nullptr;
  refused("residual");
  call.residual = rows.get();
  sum.rows = 2;
  refused("experts");
}

// Codes alone of many short rows are another kernel's, to several places each: the bits that fewer rows have.
TEST(ShortRowsGpu, GoToTheirPlaces) {
  if (auto gemm = Gemm::create(); !gemm.ok()) GTEST_SKIP() << gemm.error().message;
  constexpr int64_t kRows = 2051, kCopies = 3;
  for (const bool bf16 : {false, true}) {
    for (const int64_t k : {8, 136, 768, 1000, 2048, 2056, 14336}) {
      std::mt19937 random(static_cast<uint32_t>(k));
      std::normal_distribution<float> normal;
      std::vector<uint16_t> x(static_cast<size_t>(kRows * k));
      for (uint16_t& v : x) v = bf16 ? fp32_to_bf16(normal(random)) : fp32_to_fp16(normal(random));
      std::fill_n(x.begin(), k, uint16_t{0});
      const auto width = static_cast<size_t>(PlaneShape{0, k}.padded_k());
      constexpr auto kPlaces = static_cast<size_t>(kRows * kCopies);
      std::vector<int32_t> place(kPlaces);
      std::iota(place.begin(), place.end(), 0);
      std::shuffle(place.begin(), place.end(), random);
      for (size_t i = 0; i < kPlaces; i += 7) place[i] = -1;
      const DeviceCopy<uint16_t> dx(x);
      const DeviceCopy<int32_t> d_place(place);
      const DeviceCopy<uint8_t> codes(std::vector<uint8_t>(kPlaces * width, 0xee)),
          want(std::vector<uint8_t>(static_cast<size_t>(kRows) * width));
      const DeviceCopy<float> scales(std::vector<float>(kPlaces, -1.0f)), want_scales(std::vector<float>(kRows, 0.0f));
      GemmInputCall call;
      call.k = k;
      call.bf16 = bf16;
      call.ldx = k;
      call.ldy_e4m3 = static_cast<int64_t>(width);
      for (int64_t first = 0; first < kRows; first += 1000) {
        call.m = std::min<int64_t>(1000, kRows - first);
        call.x = dx.get() + first * k;
        call.y_e4m3 = want.get() + static_cast<size_t>(first) * width;
        call.scales = want_scales.get() + first;
        ASSERT_TRUE(prepare_gemm_input(call, nullptr).ok());
      }
      const auto expected = want.host();
      const auto expected_scales = want_scales.host();
      for (const bool few : {false, true}) {
        call.m = few ? 300 : kRows;
        call.x = dx.get();
        call.y_e4m3 = codes.get();
        call.scales = scales.get();
        call.place = d_place.get();
        call.copies = kCopies;
        ASSERT_EQ(cudaMemset(codes.get(), 0xee, kPlaces * width), cudaSuccess);
        ASSERT_TRUE(prepare_gemm_input(call, nullptr).ok());
        call.place = nullptr;
        const auto got = codes.host();
        const auto got_scales = scales.host();
        std::vector<uint8_t> all(kPlaces * width, 0xee);
        for (size_t i = 0; i < static_cast<size_t>(call.m * kCopies); ++i) {
          if (place[i] < 0) continue;
          const size_t row = i / kCopies, to = static_cast<size_t>(place[i]);
          std::copy_n(expected.begin() + static_cast<std::ptrdiff_t>(row * width), width,
                      all.begin() + static_cast<std::ptrdiff_t>(to * width));
          ASSERT_EQ(got_scales[to], expected_scales[row]);
        }
        ASSERT_EQ(got, all) << k << " columns" << (few ? ", few rows" : "");
      }
    }
  }
}

}  // namespace
}  // namespace nfp::cuda
