// The real kernels against scalar references. Needs a Hopper GPU; skips elsewhere.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/row_peaks.h"
#include "backend/cuda/testing/row_largest.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count, int fill = 0) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, fill, count * sizeof(T)), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    EXPECT_EQ(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* get() const { return static_cast<T*>(data_); }
  void poison() { cudaMemset(data_, 0xff, count_ * sizeof(T)); }  // NaN in every float format here
  std::vector<T> host() const {
    std::vector<T> out(count_);
    EXPECT_EQ(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t count_;
};

struct HostMatrix {
  int64_t n, k;
  std::vector<uint16_t> bits;  // FP16 [n, k]
  std::vector<uint8_t> upper;  // logical
  std::vector<uint8_t> planes[2];
};

uint8_t nearest_upper(uint16_t bits) { return fp32_to_e4m3(fp16_to_fp32(bits) * 256.0f); }

// Splits and packs; with `free_uppers` each inexact upper is one neighbour or the other at random.
HostMatrix nest(int64_t n, int64_t k, std::vector<uint16_t> bits, Join join, std::mt19937& random) {
  HostMatrix m{n, k, std::move(bits), {}, {}};
  std::vector<uint8_t> lower;
  for (const uint16_t b : m.bits) {
    uint8_t upper = nearest_upper(b);
    const auto truncated = static_cast<uint8_t>((b >> 7) & 0x7f);
    if (join == Join::kFree && (b & 0x7f) != 0 && random() % 2 == 0 && truncated + 1 < 0x7f) {
      const uint8_t other = (upper & 0x7f) == truncated ? static_cast<uint8_t>(truncated + 1) : truncated;
      upper = static_cast<uint8_t>((upper & 0x80) | other);
    }
    m.upper.push_back(upper);
    lower.push_back(static_cast<uint8_t>(b));
  }
  const PlaneShape shape{n, k};
  for (const Plane plane : {Plane::kUpper, Plane::kLower}) {
    auto& out = m.planes[static_cast<int>(plane)];
    out.resize(shape.bytes());
    const auto& in = plane == Plane::kUpper ? m.upper : lower;
    for (int64_t block = 0; block < shape.row_blocks(); ++block) {
      const int64_t first = block * kBlockRows;
      pack_slab(shape, plane, join, std::span(in).subspan(static_cast<size_t>(first * k)),
                static_cast<int>(std::min<int64_t>(kBlockRows, n - first)),
                out.data() + static_cast<size_t>(block) * shape.slab_bytes());
    }
  }
  return m;
}

class GemmGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    auto created = Gemm::create();
    if (!created.ok()) GTEST_SKIP() << created.error().message;
    gemm_.emplace(*created);
    workspace_ = std::make_unique<DeviceArray<uint8_t>>(Workspace::kBytes);
  }
  void TearDown() override {
    if (workspace_ == nullptr) return;
    const std::vector<uint8_t> left = workspace_->host();
    EXPECT_TRUE(std::all_of(left.begin(), left.end(), [](uint8_t byte) { return byte == 0; }));
  }
  void run(GemmCall call, const Config& config) {
    call.workspace = {workspace_->get(), Workspace::kBytes};
    const Status status = gemm_->run(call, config, nullptr);
    ASSERT_TRUE(status.ok()) << to_string(config) << ": " << status.error().message;
    const cudaError_t done = cudaDeviceSynchronize();
    ASSERT_EQ(done, cudaSuccess) << to_string(config) << ": " << cudaGetErrorString(done);
  }
  std::optional<Gemm> gemm_;
  std::unique_ptr<DeviceArray<uint8_t>> workspace_;
};

std::vector<Config> all_configs(Mode mode, Join join = Join::kBiased) {
  std::vector<Config> configs;
  for (const Tile& tile : kTiles) {
    if (!exists(tile, mode, join)) continue;
    for (const int splits : {1, 0, 2, 3}) configs.push_back({tile, static_cast<int16_t>(splits), false});
    for (const int splits : {2, 3, 4, 8}) {
      if (can_exchange(tile, splits)) configs.push_back({tile, static_cast<int16_t>(splits), true});
    }
  }
  return configs;
}

// X = identity: D is W^T, bit for bit, for all 32,258 patterns, in every tile and way of splitting.
TEST_F(GemmGpu, IdentityRestoresEveryPattern) {
  constexpr int64_t n = 136, k = 256;
  std::mt19937 random(7);
  std::vector<uint16_t> bits;
  for (uint32_t b = 0; b < 65536; ++b) {
    if (std::abs(fp16_to_fp32(static_cast<uint16_t>(b))) <= 1.75f) bits.push_back(static_cast<uint16_t>(b));
  }
  ASSERT_EQ(bits.size(), 32258u);
  while (bits.size() < n * k) bits.push_back(bits[random() % 32258]);
  std::vector<uint16_t> identity(k * k);
  for (int64_t i = 0; i < k; ++i) identity[static_cast<size_t>(i * k + i)] = 0x3c00;
  const DeviceArray<uint16_t> x(identity);
  DeviceArray<uint16_t> d(n * k);
  for (const Join join : {Join::kBiased, Join::kFree}) {
    const HostMatrix w = nest(n, k, bits, join, random);
    const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]);
    for (const Config& config : all_configs(Mode::kF16, join)) {
      d.poison();
      GemmCall call;
      call.w = {upper.get(), lower.get(), nullptr, n, k, join};
      call.m = k;
      call.x = x.get();
      call.ldx = k;
      call.d = d.get();
      call.ldd = n;
      ASSERT_NO_FATAL_FAILURE(run(call, config));
      const auto out = d.host();
      int wrong = 0;
      for (int64_t row = 0; row < n; ++row) {
        for (int64_t col = 0; col < k; ++col) {
          uint16_t want = bits[static_cast<size_t>(row * k + col)];
          if (want == 0x8000) want = 0;  // -0 + 0 is +0
          wrong += out[static_cast<size_t>(col * n + row)] != want;
        }
      }
      ASSERT_EQ(wrong, 0) << to_string(config) << " join " << static_cast<int>(join);
    }
  }
}

// The same from upper bytes alone: D is every E4M3 code's value over 256, subnormals included.
TEST_F(GemmGpu, IdentityRestoresEveryUpper) {
  constexpr int64_t n = 136, k = 256;
  std::mt19937 random(8);
  std::vector<uint16_t> bits;
  for (uint32_t b = 0; b < 65536; ++b) {
    if (std::abs(fp16_to_fp32(static_cast<uint16_t>(b))) <= 1.75f) bits.push_back(static_cast<uint16_t>(b));
  }
  while (bits.size() < n * k) bits.push_back(bits[random() % 32258]);
  std::vector<uint16_t> identity(k * k);
  for (int64_t i = 0; i < k; ++i) identity[static_cast<size_t>(i * k + i)] = 0x3c00;
  const DeviceArray<uint16_t> x(identity);
  DeviceArray<uint16_t> d(n * k);
  const HostMatrix w = nest(n, k, bits, Join::kFree, random);
  const DeviceArray<uint8_t> upper(w.planes[0]);
  for (const Config& config : all_configs(Mode::kW8A16)) {
    d.poison();
    GemmCall call;
    call.w = {upper.get(), nullptr, nullptr, n, k, Join::kFree};
    call.mode = Mode::kW8A16;
    call.m = k;
    call.x = x.get();
    call.ldx = k;
    call.d = d.get();
    call.ldd = n;
    ASSERT_NO_FATAL_FAILURE(run(call, config));
    const auto out = d.host();
    int wrong = 0;
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) {
        const float want = e4m3_to_fp32(w.upper[static_cast<size_t>(row * k + col)]) / 256.0f;
        wrong += fp16_to_fp32(out[static_cast<size_t>(col * n + row)]) != want;
      }
    }
    ASSERT_EQ(wrong, 0) << to_string(config);
  }
}

// The same into FP32 with row exponents and bias: nothing is rounded on the way but the one multiply-add.
TEST_F(GemmGpu, Fp32OutputsAreTheSumsThemselves) {
  constexpr int64_t n = 136, k = 256;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits, identity(k * k);
  for (int64_t i = 0; i < n * k; ++i) bits.push_back(fp32_to_fp16(std::clamp(normal(random) * 0.3f, -1.75f, 1.75f)));
  for (int64_t i = 0; i < k; ++i) identity[static_cast<size_t>(i * k + i)] = 0x3c00;
  std::vector<float> row_scale, bias;
  for (int64_t r = 0; r < n; ++r) {
    row_scale.push_back(std::ldexp(1.0f, static_cast<int>(random() % 9) - 4));
    bias.push_back(normal(random));
  }
  const HostMatrix w = nest(n, k, bits, Join::kBiased, random);
  const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]);
  const DeviceArray<uint16_t> x(identity);
  const DeviceArray<float> d_row(row_scale), d_bias(bias);
  DeviceArray<float> d(n * k);
  for (const Config& config : all_configs(Mode::kF16)) {
    d.poison();
    GemmCall call;
    call.w = {upper.get(), lower.get(), d_row.get(), n, k, Join::kBiased};
    call.m = k;
    call.x = x.get();
    call.ldx = k;
    call.d = d.get();
    call.ldd = n;
    call.output = Output::kF32;
    call.bias = d_bias.get();
    ASSERT_NO_FATAL_FAILURE(run(call, config));
    const auto out = d.host();
    int wrong = 0;
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) {
        const auto r = static_cast<size_t>(row);
        const float weight = fp16_to_fp32(bits[static_cast<size_t>(row * k + col)]);
        wrong += out[static_cast<size_t>(col * n + row)] != std::fma(weight, row_scale[r], bias[r]);
      }
    }
    ASSERT_EQ(wrong, 0) << to_string(config);
  }
}

struct Case {
  int64_t m, n, k;
  Mode mode;
  Join join = Join::kBiased;
  bool extras = false;  // bias, residual, row exponents, BF16 (or FP32) output
  bool swiglu = false;
  int pad = 3;       // elements after a row of d, with extras: 3 forbids the copy engine
  bool f32 = false;  // FP32 output and residual
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << "m" << c.m << " n" << c.n << " k" << c.k << " " << name_of(c.mode) << (c.extras ? " extras" : "")
       << (c.swiglu ? " swiglu" : "") << (c.f32 ? " f32" : "");
}

// Of the rows of `out`, FP16 [m, columns].
void check_peaks(const std::vector<uint32_t>& peaks, const std::vector<uint8_t>& out, int64_t m, int64_t columns) {
  for (int64_t t = 0; t < RowPeaks::kRows; ++t) {
    uint32_t want = 0, got = 0;
    for (int64_t i = t * columns; t < m && i < (t + 1) * columns; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, &out[static_cast<size_t>(i) * 2], 2);
      want = std::max(want, bits & 0x7fffu);
    }
    for (int slot = 0; slot < RowPeaks::kSlots; ++slot)
      got = std::max(got, peaks[static_cast<size_t>(int64_t{slot} * RowPeaks::kRows + t)]);
    ASSERT_EQ(got, want) << "token " << t;
  }
}

class GemmGpuRandom : public GemmGpu, public ::testing::WithParamInterface<Case> {};

TEST_P(GemmGpuRandom, MatchesFloat64InEveryConfig) {
  const Case c = GetParam();
  std::mt19937 random(static_cast<uint32_t>(c.m * 31 + c.n * 7 + c.k));
  std::normal_distribution<float> normal;
  const bool fp8 = is_fp8(c.mode);
  const bool bf16 = c.mode == Mode::kBF16;
  std::vector<uint16_t> bits;
  for (int64_t i = 0; i < c.n * c.k; ++i) {
    float v = std::clamp(normal(random) * 0.3f, -1.75f, 1.75f);
    if (bf16) v = bf16_to_fp32(static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16));
    bits.push_back(fp32_to_fp16(v));
  }
  if (bf16) {
    for (auto& b : bits) {
      if ((std::bit_cast<uint32_t>(fp16_to_fp32(b)) & 0xffffu) != 0) b = 0;  // no BF16 number
    }
  }
  const HostMatrix w = nest(c.n, c.k, bits, c.join, random);
  const PlaneShape shape{c.n, c.k};
  const int64_t ldx = fp8 ? shape.padded_k() : (c.k + 7) / 8 * 8;
  std::vector<uint8_t> x_bytes(static_cast<size_t>(c.m * ldx * (fp8 ? 1 : 2)));
  std::vector<float> x(static_cast<size_t>(c.m * c.k)), token_scale, row_scale, bias;
  for (int64_t t = 0; t < c.m; ++t) {
    for (int64_t i = 0; i < c.k; ++i) {
      const float v = normal(random);
      float& kept = x[static_cast<size_t>(t * c.k + i)];
      if (fp8) {
        const uint8_t code = fp32_to_e4m3(v * 16.0f);
        kept = e4m3_to_fp32(code);
        x_bytes[static_cast<size_t>(t * ldx + activation_byte(i))] = code;
      } else {
        const uint16_t half = bf16 ? fp32_to_bf16(v) : fp32_to_fp16(v);
        kept = bf16 ? bf16_to_fp32(half) : fp16_to_fp32(half);
        std::memcpy(&x_bytes[static_cast<size_t>(t * ldx + i) * 2], &half, 2);
      }
    }
    token_scale.push_back(fp8 ? 0.01f * (1.0f + std::abs(normal(random))) : 1.0f);
  }
  for (int64_t r = 0; r < c.n; ++r) {
    row_scale.push_back(c.extras ? std::ldexp(1.0f, static_cast<int>(random() % 5) - 2) : 1.0f);
    bias.push_back(c.extras ? normal(random) : 0.0f);
  }
  const int64_t columns = c.swiglu ? c.n / 2 : c.n;
  const Output output = c.f32 ? Output::kF32 : c.extras ? Output::kBF16 : Output::kF16;
  const size_t d_size = c.f32 ? 4 : 2;
  const auto value_at = [&](const std::vector<uint8_t>& bytes, size_t i) {
    if (c.f32) {
      float v;
      std::memcpy(&v, &bytes[i * 4], 4);
      return v;
    }
    uint16_t b;
    std::memcpy(&b, &bytes[i * 2], 2);
    return output == Output::kBF16 ? bf16_to_fp32(b) : fp16_to_fp32(b);
  };
  const int64_t ldd = columns + (c.extras ? c.pad : 0);
  std::vector<uint8_t> residual(static_cast<size_t>(c.m * ldd) * d_size);
  for (int64_t i = 0; i < c.m * ldd; ++i) {
    const float v = normal(random);
    const uint16_t half = output == Output::kBF16 ? fp32_to_bf16(v) : fp32_to_fp16(v);
    std::memcpy(&residual[static_cast<size_t>(i) * d_size], c.f32 ? static_cast<const void*>(&v) : &half, d_size);
  }

  // float64, with the sum of magnitudes that bounds rounding.
  std::vector<double> want(static_cast<size_t>(c.m * c.n)), magnitude(want.size());
  for (int64_t t = 0; t < c.m; ++t) {
    for (int64_t r = 0; r < c.n; ++r) {
      double sum = 0, total = 0;
      for (int64_t i = 0; i < c.k; ++i) {
        const auto at = static_cast<size_t>(r * c.k + i);
        const double weight = reads_lower(c.mode) ? fp16_to_fp32(w.bits[at]) : e4m3_to_fp32(w.upper[at]) / 256.0;
        const double product = weight * x[static_cast<size_t>(t * c.k + i)];
        sum += product;
        total += std::abs(product);
      }
      const double scale = double{token_scale[static_cast<size_t>(t)]} * row_scale[static_cast<size_t>(r)];
      want[static_cast<size_t>(t * c.n + r)] = sum * scale + bias[static_cast<size_t>(r)];
      magnitude[static_cast<size_t>(t * c.n + r)] = total * scale;
    }
  }

  const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]), dx(x_bytes);
  const DeviceArray<float> d_token(token_scale), d_row(row_scale), d_bias(bias);
  const DeviceArray<uint8_t> d_residual(residual);
  DeviceArray<uint8_t> d(static_cast<size_t>(c.m * ldd) * d_size);
  // FP32 sums lose 2^-24 of the running sum a step; Hopper's E4M3 sums keep 14 bits below the largest term
  // (kernels.md), a step per 32 k.
  const int64_t sums = fp8 ? c.k / 32 + 2 : c.k;
  const double loss = static_cast<double>(sums) * (fp8 ? 0x1p-13 : 0x1p-23);
  const double round = c.f32 ? 0x1p-22 : output == Output::kBF16 ? 0x1p-8 : 0x1p-10;
  for (const Config& config : all_configs(c.mode, c.join)) {
    GemmCall call;
    call.w = {upper.get(), lower.get(), c.extras ? d_row.get() : nullptr, c.n, c.k, c.join};
    call.mode = c.mode;
    call.m = c.m;
    call.x = dx.get();
    call.ldx = ldx;
    call.token_scale = fp8 ? d_token.get() : nullptr;
    call.d = d.get();
    call.ldd = ldd;
    call.output = output;
    call.bias = c.extras ? d_bias.get() : nullptr;
    call.swiglu = c.swiglu;
    call.residual = c.extras ? d_residual.get() : nullptr;
    call.ldr = ldd;
    const bool has_peaks =
        c.swiglu && fp8 && !c.extras && !c.f32 && c.m <= RowPeaks::kRows && config.tile.tokens <= RowPeaks::kTileTokens;
    std::vector<uint8_t> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      d.poison();
      const DeviceArray<uint32_t> peaks(size_t{RowPeaks::kSlots} * RowPeaks::kRows);
      call.peaks = has_peaks ? peaks.get() : nullptr;
      ASSERT_NO_FATAL_FAILURE(run(call, config));
      const auto out = d.host();
      if (has_peaks) {
        ASSERT_NO_FATAL_FAILURE(check_peaks(peaks.host(), out, c.m, ldd)) << to_string(config);
      }
      if (repeat == 1) {
        ASSERT_EQ(out, first) << to_string(config) << ": two runs differ";
        break;
      }
      first = out;
      for (int64_t t = 0; t < c.m; ++t) {
        for (int64_t col = 0; col < ldd; ++col) {
          const auto place = static_cast<size_t>(t * ldd + col);
          if (col >= columns) {
            const bool untouched = std::all_of(&out[place * d_size], &out[place * d_size] + d_size,
                                               [](uint8_t byte) { return byte == 0xff; });
            ASSERT_TRUE(untouched) << to_string(config) << ": wrote past row " << t;
            continue;
          }
          double value, slack;
          const auto at = [&](int64_t r) { return static_cast<size_t>(t * c.n + r); };
          if (c.swiglu) {
            const double gate = want[at(swiglu_gate_row(col))], up = want[at(swiglu_up_row(col))];
            const double gate_slack = magnitude[at(swiglu_gate_row(col))] * loss,
                         up_slack = magnitude[at(swiglu_up_row(col))] * loss;
            value = gate / (1.0 + std::exp(-gate)) * up;
            slack = 1.1 * gate_slack * std::abs(up) + (std::abs(gate) + gate_slack) * up_slack + std::abs(value) * 1e-5;
          } else {
            value = want[at(col)];
            slack = magnitude[at(col)] * loss;
          }
          if (c.extras) value += value_at(residual, place);
          const double got = value_at(out, place);
          ASSERT_LE(std::abs(got - value), slack + std::abs(value) * round + 1e-6)
              << to_string(config) << " token " << t << " column " << col << ": " << got << " for " << value;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GemmGpuRandom,
    ::testing::Values(
        Case{1, 64, 64, Mode::kF16}, Case{5, 200, 520, Mode::kF16}, Case{70, 330, 1030, Mode::kF16, Join::kFree},
        Case{257, 136, 256, Mode::kF16}, Case{33, 250, 321, Mode::kF16, Join::kBiased, true},
        Case{130, 256, 512, Mode::kF16, Join::kBiased, false, true},
        Case{40, 272, 300, Mode::kF16, Join::kFree, true, true}, Case{19, 200, 456, Mode::kBF16},
        Case{140, 129, 200, Mode::kBF16, Join::kFree, true}, Case{1, 64, 128, Mode::kE4M3},
        Case{66, 330, 1030, Mode::kE4M3}, Case{1, 64, 64, Mode::kW8A16}, Case{7, 200, 520, Mode::kW8A16, Join::kFree},
        Case{70, 330, 1030, Mode::kW8A16, Join::kBiased, true},
        Case{300, 272, 300, Mode::kW8A16, Join::kBiased, false, true},
        Case{33, 248, 321, Mode::kW8A16, Join::kBiased, true, false, 0, true}, Case{520, 264, 200, Mode::kF16},
        Case{500, 136, 384, Mode::kE4M3}, Case{300, 130, 700, Mode::kE4M3, Join::kBiased, true},
        Case{33, 248, 321, Mode::kF16, Join::kBiased, true, false, 8},
        Case{75, 272, 300, Mode::kF16, Join::kFree, true, true, 8},
        Case{290, 1040, 200, Mode::kF16, Join::kBiased, true, false, 8},
        Case{450, 208, 200, Mode::kF16, Join::kBiased, false, true, 8},
        Case{201, 208, 700, Mode::kE4M3, Join::kBiased, true, true, 8}, Case{66, 330, 1030, Mode::kE4M3Promoted},
        Case{150, 272, 1500, Mode::kE4M3Promoted, Join::kBiased, true, true},
        Case{1, 200, 520, Mode::kF16, Join::kBiased, false, false, 0, true},
        Case{67, 330, 321, Mode::kF16, Join::kFree, true, false, 3, true},
        Case{140, 272, 300, Mode::kBF16, Join::kBiased, true, true, 8, true},
        Case{66, 328, 1030, Mode::kE4M3, Join::kBiased, true, false, 0, true},
        Case{150, 272, 1500, Mode::kE4M3Promoted, Join::kBiased, false, true, 0, true},
        Case{1, 1040, 456, Mode::kE4M3, Join::kBiased, false, true},
        Case{7, 272, 1030, Mode::kE4M3, Join::kBiased, false, true},
        Case{8, 1360, 700, Mode::kE4M3, Join::kBiased, false, true},
        Case{5, 272, 1500, Mode::kE4M3Promoted, Join::kBiased, false, true}));

// Of what the same product would store in FP32, with equal outputs, infinities and tokens of NaN among them.
TEST_F(GemmGpu, FindsTheLargestOfEachRow) {
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  for (const Mode mode : {Mode::kF16, Mode::kBF16, Mode::kE4M3, Mode::kE4M3Promoted, Mode::kW8A16}) {
    const bool fp8 = is_fp8(mode);
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 72, 64}, {7, 200, 520}, {70, 333, 1030}, {300, 136, 256}}) {
      std::vector<uint16_t> bits;
      for (int64_t i = 0; i < n * k; ++i)  // 29 rows, over and over
        bits.push_back(i < 29 * k ? fp32_to_fp16(std::clamp(normal(random) * 0.3f, -1.75f, 1.75f)) & 0xfff8
                                  : bits[static_cast<size_t>(i - 29 * k)]);
      const HostMatrix w = nest(n, k, bits, Join::kBiased, random);
      const int64_t ldx = fp8 ? PlaneShape{n, k}.padded_k() : (k + 7) / 8 * 8;
      std::vector<uint8_t> x_bytes(static_cast<size_t>(m * ldx * (fp8 ? 1 : 2)));
      std::vector<float> bias(static_cast<size_t>(n)), token_scale(static_cast<size_t>(m), 0.25f);
      for (int64_t t = 0; t < m; ++t) {
        const bool is_nan = t % 5 == 2;
        for (int64_t i = 0; i < k; ++i) {
          const float v = is_nan ? NAN : normal(random);
          const auto at = static_cast<size_t>(t * ldx);
          if (fp8) {
            x_bytes[at + static_cast<size_t>(activation_byte(i))] = is_nan ? 0x7f : fp32_to_e4m3(v * 16);
          } else {
            const uint16_t half = mode == Mode::kBF16 ? fp32_to_bf16(v) : fp32_to_fp16(v);
            std::memcpy(&x_bytes[(at + static_cast<size_t>(i)) * 2], &half, 2);
          }
        }
      }
      bias[static_cast<size_t>(n / 2)] = -INFINITY;
      for (int64_t r = 48; r < std::min<int64_t>(64, n); ++r)
        bias[static_cast<size_t>(r)] = -INFINITY;  // a whole group
      if (m > 4) bias[static_cast<size_t>(n - 1)] = INFINITY;
      const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]), x(x_bytes);
      const DeviceArray<float> d_bias(bias), d_token(token_scale);
      DeviceArray<float> logits(static_cast<size_t>(m * n));
      DeviceArray<uint64_t> largest(RowLargest::bytes(m, n) / sizeof(uint64_t));
      for (const Config& config : all_configs(mode)) {
        GemmCall call;
        call.w = {upper.get(), lower.get(), nullptr, n, k, Join::kBiased};
        call.mode = mode;
        call.m = m;
        call.x = x.get();
        call.ldx = ldx;
        call.token_scale = fp8 ? d_token.get() : nullptr;
        call.bias = d_bias.get();
        call.d = logits.get();
        call.ldd = n;
        call.output = Output::kF32;
        logits.poison();
        ASSERT_NO_FATAL_FAILURE(run(call, config));
        call.d = largest.get();
        call.output = Output::kLargest;
        largest.poison();
        ASSERT_NO_FATAL_FAILURE(run(call, config));
        ASSERT_EQ(largest.host(), testing::largest_of(logits.host().data(), n, m, n))
            << to_string(config) << " m " << m << " " << name_of(mode);
      }
    }
  }
}

// Fixed splits: a token's result does not depend on the other tokens, on m, or on the tile.
TEST_F(GemmGpu, ResultsDoNotDependOnTheBatchWithFixedSplits) {
  constexpr int64_t n = 320, k = 2048, most = 300;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const Mode mode : {Mode::kF16, Mode::kE4M3, Mode::kW8A16, Mode::kE4M3Promoted}) {
    std::vector<uint16_t> bits;
    for (int64_t i = 0; i < n * k; ++i) bits.push_back(fp32_to_fp16(std::clamp(normal(random) * 0.1f, -1.75f, 1.75f)));
    const HostMatrix w = nest(n, k, bits, Join::kBiased, random);
    std::vector<uint8_t> x_bytes(most * k * (is_fp8(mode) ? 1 : 2));
    for (size_t i = 0; i < most * k; ++i) {
      const float v = normal(random);
      if (is_fp8(mode)) {
        x_bytes[i] = fp32_to_e4m3(v * 16);
      } else {
        const uint16_t half = fp32_to_fp16(v);
        std::memcpy(&x_bytes[i * 2], &half, 2);
      }
    }
    const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]), x(x_bytes);
    for (const int splits : {1, 2, 3}) {
      std::vector<std::vector<uint16_t>> first;  // by class: promotion intervals differ between one and two row blocks
      first.resize(2);
      for (const Tile& tile : kTiles) {
        if (!exists(tile, mode)) continue;
        auto& reference = first[mode == Mode::kE4M3Promoted ? static_cast<size_t>(tile.row_blocks - 1) : 0];
        for (const auto& [m, exchange] :
             {std::pair{most, false}, {int64_t{1}, true}, {int64_t{37}, false}, {most, true}, {int64_t{37}, true}}) {
          if (splits > 1 && !(exchange ? can_exchange(tile, splits) : can_join(tile))) continue;
          DeviceArray<uint16_t> d(static_cast<size_t>(m * n));
          GemmCall call;
          call.w = {upper.get(), lower.get(), nullptr, n, k, Join::kBiased};
          call.mode = mode;
          call.m = m;
          call.x = x.get();
          call.ldx = k;
          call.d = d.get();
          call.ldd = n;
          const Config config{tile, static_cast<int16_t>(splits), exchange};
          ASSERT_NO_FATAL_FAILURE(run(call, config));
          auto out = d.host();
          if (reference.empty()) reference = out;
          out.resize(n);
          ASSERT_TRUE(std::equal(out.begin(), out.end(), reference.begin()))
              << to_string(config) << " m " << m << " " << name_of(mode);
        }
      }
    }
  }
}

// Rows of shared memory beyond the last token are not loaded, so behind other tiles of a block they hold old ones.
TEST_F(GemmGpu, LastTokensDoNotDependOnTheTilesBefore) {
  constexpr int64_t n = 1024, k = 256;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits;
  for (int64_t i = 0; i < n * k; ++i) bits.push_back(fp32_to_fp16(std::clamp(normal(random) * 0.1f, -1.75f, 1.75f)));
  const HostMatrix w = nest(n, k, bits, Join::kBiased, random);
  const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]);
  for (const Mode mode : {Mode::kF16, Mode::kE4M3, Mode::kW8A16}) {
    const auto size = static_cast<size_t>(is_fp8(mode) ? 1 : 2);
    for (const Tile& tile : kTiles) {
      if (!exists(tile, mode)) continue;
      const int64_t last = (halves(tile) - 1) * load_tokens(tile) + 3;
      // More tiles than run at once, whatever their size.
      const int64_t m = int64_t{tile.tokens <= 64 ? 64 : 24} * tile.tokens + last;
      std::vector<uint8_t> x_bytes(static_cast<size_t>(m * k) * size);
      for (size_t i = 0; i < x_bytes.size(); i += size) {
        const float v = normal(random);
        if (is_fp8(mode)) {
          x_bytes[i] = fp32_to_e4m3(v * 16);
        } else {
          const uint16_t half = fp32_to_fp16(v);
          std::memcpy(&x_bytes[i], &half, 2);
        }
      }
      const DeviceArray<uint8_t> x(x_bytes);
      std::vector<uint16_t> both[2];
      for (const bool alone : {false, true}) {
        const int64_t first = alone ? m - last : 0;
        DeviceArray<uint16_t> d(static_cast<size_t>((m - first) * n));
        d.poison();
        GemmCall call;
        call.w = {upper.get(), lower.get(), nullptr, n, k, Join::kBiased};
        call.mode = mode;
        call.m = m - first;
        call.x = x.get() + static_cast<size_t>(first * k) * size;
        call.ldx = k;
        call.d = d.get();
        call.ldd = n;
        ASSERT_NO_FATAL_FAILURE(run(call, {tile, 1, false}));
        const auto out = d.host();
        both[alone].assign(out.end() - last * n, out.end());
      }
      ASSERT_EQ(both[0], both[1]) << to_string({tile, 1, false}) << " " << name_of(mode);
    }
  }
}

// The same beyond 4096 tokens, with the kernels that batch-invariant runs choose.
TEST_F(GemmGpu, InvariantCutsHoldForManyTokens) {
  constexpr int64_t n = 256, k = 1024, most = 8200;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits, x_bits;
  for (int64_t i = 0; i < n * k; ++i) bits.push_back(fp32_to_fp16(std::clamp(normal(random) * 0.1f, -1.75f, 1.75f)));
  for (int64_t i = 0; i < most * k; ++i) x_bits.push_back(fp32_to_fp16(normal(random)));
  const HostMatrix w = nest(n, k, bits, Join::kBiased, random);
  const DeviceArray<uint8_t> upper(w.planes[0]), lower(w.planes[1]);
  const DeviceArray<uint16_t> x(x_bits);
  std::vector<uint16_t> first;
  for (const int64_t m : {int64_t{16}, most, int64_t{4100}}) {
    const Choice choice = choose({m, n, k, Mode::kF16, false}, gemm_->device(), nullptr, Reduction::kBatchInvariant);
    ASSERT_GT(choice.config.splits, 1);
    DeviceArray<uint16_t> d(static_cast<size_t>(m * n));
    GemmCall call;
    call.w = {upper.get(), lower.get(), nullptr, n, k, Join::kBiased};
    call.m = m;
    call.x = x.get();
    call.ldx = k;
    call.d = d.get();
    call.ldd = n;
    ASSERT_NO_FATAL_FAILURE(run(call, choice.config));
    auto out = d.host();
    out.resize(16 * n);
    if (first.empty()) first = out;
    ASSERT_EQ(out, first) << to_string(choice.config) << " m " << m;
  }
}

TEST_F(GemmGpu, RefusesWhatItCannotRun) {
  DeviceArray<uint8_t> memory(1 << 20);
  GemmCall good;
  good.w = {memory.get(), memory.get(), nullptr, 64, 64, Join::kBiased};
  good.m = 4;
  good.x = memory.get();
  good.ldx = 64;
  good.d = memory.get();
  good.ldd = 64;
  const Config config{kTiles[0], 1, false};
  const auto message = [&](auto change) {
    GemmCall call = good;
    change(call);
    const Status status = gemm_->run(call, config, nullptr);
    return status.ok() ? std::string() : status.error().message;
  };
  EXPECT_EQ(message([](GemmCall&) {}), "");
  EXPECT_NE(message([](GemmCall& c) { c.x = static_cast<const uint8_t*>(c.x) + 8; }).find(" x "), std::string::npos);
  EXPECT_NE(message([](GemmCall& c) { c.w.upper = c.w.upper + 1; }).find("w.upper"), std::string::npos);
  EXPECT_NE(message([](GemmCall& c) { c.ldx = 65; }).find("ldx"), std::string::npos);
  EXPECT_NE(message([](GemmCall& c) { c.ldd = 8; }).find("ldd"), std::string::npos);
  EXPECT_NE(message([](GemmCall& c) { c.m = 0; }).find(" m "), std::string::npos);
  EXPECT_NE(message([](GemmCall& c) { c.w.lower = nullptr; }).find("w.lower"), std::string::npos);
  EXPECT_NE(message([&](GemmCall& c) { c.peaks = reinterpret_cast<uint32_t*>(memory.get()); }).find("peaks"),
            std::string::npos);
  GemmCall split = good;
  split.w.k = 512;
  split.ldx = 512;
  const Status status = gemm_->run(split, {kTiles[0], 4, false}, nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("workspace"), std::string::npos);
  cudaDeviceSynchronize();
}

}  // namespace
}  // namespace nfp::cuda
