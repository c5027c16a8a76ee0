// Products and the rows around them through the C interface, against float64. Needs a Hopper GPU; skips elsewhere.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/gemm/plan/layout.h"
#include "capi/testing/gpu.h"

namespace nfp::cuda {
namespace {

class CApiProducts : public CApiGpuTest {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(CApiGpuTest::SetUp());
    if (!gpu_) return;
    for (Stream& stream : streams_) {
      ASSERT_EQ(cudaStreamCreate(&stream.stream), cudaSuccess);
      stream.workspace = std::make_unique<DeviceVector<uint8_t>>(nfp_gpu_workspace_bytes());
      ASSERT_EQ(cudaMemset(stream.workspace->get(), 0, nfp_gpu_workspace_bytes()), cudaSuccess);
    }
  }
  void TearDown() override {
    for (const Stream& stream : streams_) cudaStreamDestroy(stream.stream);
  }
  int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_); }
  bool flip() { return integer(0, 1) == 1; }
  float normal(float sigma) { return std::normal_distribution<float>(0.0f, sigma)(random_); }
  std::vector<float> normals(int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& v : out) v = normal(1.0f);
    return out;
  }

  // Each with a workspace of its own.
  struct Stream {
    cudaStream_t stream = nullptr;
    std::unique_ptr<DeviceVector<uint8_t>> workspace;
  };
  std::array<Stream, 2> streams_;
  std::mt19937 random_{17};
};

// W[n, k] nested on the device, and what the modes multiply by.
struct Weight {
  template <typename Draw>
  Weight(nfp_gpu* gpu, int64_t n, int64_t k, nfp_type type, nfp_join_kind join, bool scaled, const Draw& draw)
      : upper(nfp_plane_bytes(n, k)), lower(nfp_plane_bytes(n, k)), row_scale(static_cast<size_t>(n)) {
    std::vector<uint16_t> bits(static_cast<size_t>(n * k));
    for (size_t i = 0; i < bits.size(); ++i) {
      const bool large = scaled && i / static_cast<size_t>(k) % 7 == 2;  // a row with an exponent
      const float v = draw() * (large ? 64.0f : 1.0f);
      // Nesting rounds BF16's smallest numbers, and FP16's where a row has an exponent.
      bits[i] = narrow(type, std::abs(v) < 0x1p-8f ? 0.0f : v);
    }
    const DeviceVector<uint16_t> given(bits);
    const DeviceVector<nfp_gpu_report> report(1);
    EXPECT_EQ(nfp_gpu_nest(gpu, given.get(), k, n, k, type, join, upper.get(), lower.get(), row_scale.get(),
                           report.get(), nullptr),
              NFP_OK)
        << nfp_last_error();
    EXPECT_EQ(report.host()[0].bad_rows, 0);
    const auto scales = row_scale.host();
    for (size_t i = 0; i < bits.size(); ++i) {
      const float v = widen(type, bits[i]), scale = scales[i / static_cast<size_t>(k)];
      exact.push_back(v);
      narrowed.push_back(e4m3_to_fp32(fp32_to_e4m3(v / scale * 256.0f)) / 256.0f * scale);
    }
    described = {sizeof(nfp_weight), upper.get(), lower.get(), scaled ? row_scale.get() : nullptr, n, k, join};
  }
  DeviceVector<uint8_t> upper, lower;
  DeviceVector<float> row_scale;
  std::vector<float> exact, narrowed;
  nfp_weight described{};
};

double number_at(nfp_output type, const std::vector<uint8_t>& bytes, size_t i) {
  if (type == NFP_OUT_F32) {
    float v = 0;
    std::memcpy(&v, &bytes[i * 4], 4);
    return v;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, &bytes[i * 2], 2);
  return widen(type == NFP_OUT_BF16 ? NFP_BF16 : NFP_F16, bits);
}

TEST_F(CApiProducts, EveryModeIsFloat64) {
  for (const nfp_mode mode : {NFP_MODE_F16, NFP_MODE_BF16, NFP_MODE_E4M3, NFP_MODE_E4M3_PROMOTED}) {
    for (int round = 0; round < 9; ++round) {
      const bool fp8 = mode >= NFP_MODE_E4M3, swiglu = round % 3 == 2;
      const int64_t m = round == 0 ? 1 : integer(1, 200), n = swiglu ? 16 * integer(1, 20) : integer(1, 320),
                    k = integer(1, 700), columns = swiglu ? n / 2 : n;
      const nfp_type type = mode == NFP_MODE_BF16 ? NFP_BF16 : NFP_F16;
      const Weight w(gpu_.get(), n, k, type, flip() ? NFP_JOIN_FREE : NFP_JOIN_BIASED,
                     !swiglu && flip(),  // products of two large numbers are no FP16 numbers
                     [&] { return normal(0.05f); });
      // Numbers of x beyond k are NaN: they must not count. Codes' padding is zeros, as nfp_rows() leaves it.
      const int64_t ldx = fp8 ? nfp_e4m3_row_bytes(k) + 16 * integer(0, 2) : (k + 7) / 8 * 8 + 8 * integer(0, 2);
      std::vector<uint8_t> x_bytes(static_cast<size_t>(m * ldx) * (fp8 ? 1 : 2), 0xff);
      std::vector<float> x;
      for (int64_t t = 0; t < m; ++t) {
        if (fp8) {
          std::vector<uint8_t> codes(static_cast<size_t>(k));
          for (uint8_t& code : codes) x.push_back(e4m3_to_fp32(code = fp32_to_e4m3(normal(16.0f))));
          permute_activations(
              k, codes,
              std::span(x_bytes).subspan(static_cast<size_t>(t * ldx), static_cast<size_t>(nfp_e4m3_row_bytes(k))));
        } else {
          for (int64_t i = 0; i < k; ++i) {
            const uint16_t bits = narrow(type, normal(1.0f));
            x.push_back(widen(type, bits));
            std::memcpy(&x_bytes[static_cast<size_t>(t * ldx + i) * 2], &bits, 2);
          }
        }
      }
      std::vector<float> token_scale = normals(m);
      for (float& scale : token_scale) scale = 0.01f * (1.0f + std::abs(scale));
      const bool has_scale = fp8 && round % 4 != 1, has_bias = flip(), has_residual = flip();
      const auto bias = normals(n);
      const nfp_output output = static_cast<nfp_output>(integer(0, 2));
      const size_t size = output == NFP_OUT_F32 ? 4 : 2;
      const int64_t ldd = columns + integer(0, 9), ldr = columns + integer(0, 9);
      std::vector<uint8_t> residual(static_cast<size_t>(m * ldr) * size);
      for (size_t i = 0; i < residual.size() / size; ++i) {
        const float v = normal(1.0f);
        const uint16_t bits = narrow(output == NFP_OUT_BF16 ? NFP_BF16 : NFP_F16, v);
        std::memcpy(&residual[i * size], size == 4 ? static_cast<const void*>(&v) : &bits, size);
      }
      const DeviceVector<uint8_t> d_x(x_bytes), d_residual(residual), d(static_cast<size_t>(m * ldd) * size);
      const DeviceVector<float> d_scale(token_scale), d_bias(bias);
      const Stream& stream = streams_[static_cast<size_t>(round % 2)];
      nfp_gemm_call call{};
      call.size = sizeof(call);
      call.weight = w.described;
      if (fp8) call.weight.lower = nullptr;
      call.mode = mode;
      call.output = output;
      call.m = m;
      call.x = d_x.get();
      call.ldx = ldx;
      call.token_scale = has_scale ? d_scale.get() : nullptr;
      call.swiglu = swiglu;
      call.batch_invariant = round % 5 == 3;
      call.independent_start = flip();
      call.d = d.get();
      call.ldd = ldd;
      call.bias = has_bias ? d_bias.get() : nullptr;
      call.residual = has_residual ? d_residual.get() : nullptr;
      call.ldr = ldr;
      call.workspace = stream.workspace->get();
      call.workspace_bytes = nfp_gpu_workspace_bytes();
      ASSERT_EQ(nfp_gemm(gpu_.get(), &call, stream.stream), NFP_OK) << nfp_last_error();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const auto got = d.host();

      // FP32 sums lose 2^-24 of the running sum a step; Hopper's E4M3 sums keep 14 bits below the largest term, a step
      // per 32 k.
      const int64_t steps = k / 32 + 2;
      const double loss = fp8 ? static_cast<double>(steps) * 0x1p-13 : static_cast<double>(k) * 0x1p-23;
      const double half = output == NFP_OUT_F32 ? 0x1p-22 : output == NFP_OUT_BF16 ? 0x1p-8 : 0x1p-10;
      struct Sum {
        double value, off;
      };
      const auto sum = [&](int64_t token, int64_t row) {
        const float* weights = (fp8 ? w.narrowed : w.exact).data() + row * k;
        double value = 0, magnitude = 0;
        for (int64_t i = 0; i < k; ++i) {
          const double product = double{weights[i]} * double{x[static_cast<size_t>(token * k + i)]};
          value += product;
          magnitude += std::abs(product);
        }
        const double scale = has_scale ? token_scale[static_cast<size_t>(token)] : 1.0f;
        return Sum{value * scale + (has_bias ? double{bias[static_cast<size_t>(row)]} : 0.0), magnitude * scale * loss};
      };
      for (int64_t t = 0; t < m; ++t) {
        for (int64_t col = 0; col < ldd; ++col) {
          const auto at = static_cast<size_t>(t * ldd + col);
          if (col >= columns) {
            ASSERT_TRUE(std::all_of(&got[at * size], &got[at * size] + size, [](uint8_t b) { return b == 0xff; }));
            continue;
          }
          Sum want = sum(t, swiglu ? swiglu_gate_row(col) : col);
          if (swiglu) {
            const Sum up = sum(t, swiglu_up_row(col));
            const double gate = want.value, gate_off = want.off;
            want.value = gate / (1.0 + std::exp(-gate)) * up.value;
            want.off = 1.1 * gate_off * std::abs(up.value) + (std::abs(gate) + gate_off) * up.off +
                       std::abs(want.value) * 1e-5;
          }
          if (has_residual) want.value += number_at(output, residual, static_cast<size_t>(t * ldr + col));
          const double value = number_at(output, got, at);
          ASSERT_LE(std::abs(value - want.value), want.off + std::abs(want.value) * half + 1e-6)
              << "mode " << mode << ", m " << m << ", n " << n << ", k " << k << ", output " << output << ", token "
              << t << ", column " << col << ": " << value << " for " << want.value;
        }
      }
    }
  }
}

TEST_F(CApiProducts, BatchInvariantTokensDoNotDependOnTheOthers) {
  constexpr int64_t n = 264, k = 1096, m = 150;
  const Weight w(gpu_.get(), n, k, NFP_F16, NFP_JOIN_BIASED, true, [&] { return normal(0.05f); });
  std::vector<uint16_t> x(m * k);
  for (uint16_t& v : x) v = narrow(NFP_F16, normal(1.0f));
  const DeviceVector<uint16_t> d_x(x), all(m * n), some(m * n);
  const auto run = [&](int64_t tokens, const DeviceVector<uint16_t>& d) {
    nfp_gemm_call call{};
    call.size = sizeof(call);
    call.weight = w.described;
    call.m = tokens;
    call.x = d_x.get();
    call.ldx = k;
    call.batch_invariant = 1;
    call.d = d.get();
    call.ldd = n;
    call.workspace = streams_[0].workspace->get();
    call.workspace_bytes = nfp_gpu_workspace_bytes();
    EXPECT_EQ(nfp_gemm(gpu_.get(), &call, streams_[0].stream), NFP_OK) << nfp_last_error();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  };
  run(m, all);
  const auto want = all.host();
  for (const int64_t tokens : {1, 7, 64, 129}) {
    run(tokens, some);
    const auto got = some.host();
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + tokens * n, want.begin())) << tokens << " tokens";
  }
}

TEST_F(CApiProducts, RowsAreFloat64) {
  struct Case {
    nfp_rows_source source;
    bool residual;
    int64_t m, k;
  };
  for (const nfp_type type : {NFP_F16, NFP_BF16}) {
    for (const Case& c :
         {Case{NFP_ROWS_PLAIN, false, 5, 4096}, Case{NFP_ROWS_PLAIN, false, 71, 333},
          Case{NFP_ROWS_NORM, false, 3, 777}, Case{NFP_ROWS_NORM, true, 67, 1032}, Case{NFP_ROWS_NORM, true, 9, 577},
          Case{NFP_ROWS_SWIGLU, false, 7, 1000}, Case{NFP_ROWS_SWIGLU, false, 301, 64}}) {
      const int64_t width = c.source == NFP_ROWS_SWIGLU ? 2 * c.k : c.k;
      const int64_t ldx = width + integer(0, 9), ldr = c.k + integer(0, 9), ldy = c.k + integer(0, 9);
      const int64_t row_bytes = nfp_e4m3_row_bytes(c.k), ld_codes = row_bytes + 16 * integer(0, 2);
      const auto numbers = [&](int64_t count) {
        std::vector<uint16_t> out(static_cast<size_t>(count));
        for (uint16_t& v : out) v = narrow(type, normal(1.0f));
        return out;
      };
      const auto x = numbers(c.m * ldx), weight = numbers(c.k), residual = numbers(c.m * ldr);
      const DeviceVector<uint16_t> d_x(x), d_weight(weight), h(residual), y(static_cast<size_t>(c.m * ldy));
      const DeviceVector<uint8_t> codes(static_cast<size_t>(c.m * ld_codes));
      const DeviceVector<float> scale(static_cast<size_t>(c.m));
      const bool norm = c.source == NFP_ROWS_NORM;
      nfp_rows_call call{};
      call.size = sizeof(call);
      call.source = c.source;
      call.type = type;
      call.m = c.m;
      call.k = c.k;
      call.x = d_x.get();
      call.ldx = ldx;
      call.weight = norm ? d_weight.get() : nullptr;
      call.epsilon = 1e-5f;
      call.independent_start = flip();
      call.residual = c.residual ? h.get() : nullptr;
      call.ldr = ldr;
      call.y = y.get();
      call.ldy = ldy;
      call.y_e4m3 = codes.get();
      call.ldy_e4m3 = ld_codes;
      call.token_scale = scale.get();
      ASSERT_EQ(nfp_rows(gpu_.get(), &call, streams_[1].stream), NFP_OK) << nfp_last_error();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const auto got = y.host(), sums = h.host();
      const auto got_codes = codes.host();
      const auto got_scale = scale.host();
      for (int64_t t = 0; t < c.m; ++t) {
        std::vector<double> want(static_cast<size_t>(c.k));
        double squares = 0, largest = 0;
        for (int64_t i = 0; i < c.k; ++i) {
          double& v = want[static_cast<size_t>(i)];
          const auto at = [&](int64_t column) { return double{widen(type, x[static_cast<size_t>(t * ldx + column)])}; };
          v = at(c.source == NFP_ROWS_SWIGLU ? swiglu_gate_row(i) : i);
          if (c.source == NFP_ROWS_SWIGLU) v = v / (1 + std::exp(-v)) * at(swiglu_up_row(i));
          if (c.residual) {
            const auto place = static_cast<size_t>(t * ldr + i);
            v = widen(type, narrow(type, static_cast<float>(v + double{widen(type, residual[place])})));
            ASSERT_EQ(double{widen(type, sums[place])}, v);
          }
          squares += v * v;
        }
        for (int64_t i = 0; i < c.k; ++i) {
          double& v = want[static_cast<size_t>(i)];
          if (norm) {
            v *= double{widen(type, weight[static_cast<size_t>(i)])} /
                 std::sqrt(squares / static_cast<double>(c.k) + 1e-5);
          }
          largest = std::max(largest, std::abs(v));
        }
        const double s = got_scale[static_cast<size_t>(t)];
        ASSERT_NEAR(s, largest / 448, largest / 448 * 1e-5);
        for (int64_t i = 0; i < row_bytes; ++i) {
          const uint8_t code = got_codes[static_cast<size_t>(t * ld_codes + activation_byte(i))];
          if (i >= c.k) {
            ASSERT_EQ(code & 0x7f, 0);
            continue;
          }
          const double v = want[static_cast<size_t>(i)], clipped = std::clamp(v, -448 * s, 448 * s);
          // Half a step of E4M3: 2^-4 of the value, or half its smallest subnormal.
          ASSERT_LE(std::abs(e4m3_to_fp32(code) * s - clipped),
                    std::max(std::abs(clipped) * 0x1p-4, s * 0x1p-10) * 1.001);
          const double rounded = widen(type, got[static_cast<size_t>(t * ldy + i)]);
          ASSERT_LE(std::abs(rounded - v), std::abs(v) * (type == NFP_BF16 ? 0x1p-8 : 0x1p-10) + 1e-6);
        }
      }
    }
  }
}

TEST_F(CApiProducts, CodesOfAnotherQuantiserAreMovedIntoOrder) {
  for (const bool one_scale : {false, true}) {
    for (const auto& [m, k, ldx] : {std::array<int64_t, 3>{1, 4096, 4096}, {35, 1040, 1072}, {9, 333, 335}}) {
      const int64_t row_bytes = nfp_e4m3_row_bytes(k);
      std::vector<uint8_t> codes(static_cast<size_t>(m * ldx)), want(static_cast<size_t>(m * row_bytes));
      for (uint8_t& code : codes) code = static_cast<uint8_t>(integer(0, 255));
      for (int64_t t = 0; t < m; ++t) {
        permute_activations(
            k, std::span(codes).subspan(static_cast<size_t>(t * ldx), static_cast<size_t>(k)),
            std::span(want).subspan(static_cast<size_t>(t * row_bytes), static_cast<size_t>(row_bytes)));
      }
      const auto scales = normals(one_scale ? 1 : m);
      const DeviceVector<uint8_t> d_codes(codes), y(want.size());
      const DeviceVector<float> d_scales(scales), token_scale(static_cast<size_t>(m));
      nfp_rows_call call{};
      call.size = sizeof(call);
      call.source = NFP_ROWS_E4M3;
      call.m = m;
      call.k = k;
      call.x = d_codes.get();
      call.ldx = ldx;
      call.y_e4m3 = y.get();
      call.ldy_e4m3 = row_bytes;
      call.token_scale = token_scale.get();
      call.x_scale = d_scales.get();
      call.one_scale = one_scale;
      ASSERT_EQ(nfp_rows(gpu_.get(), &call, streams_[0].stream), NFP_OK) << nfp_last_error();
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_TRUE(y.host() == want) << m << " rows of " << k;
      const auto got = token_scale.host();
      for (size_t t = 0; t < got.size(); ++t) ASSERT_EQ(got[t], scales[one_scale ? 0 : t]);
    }
  }
}

TEST_F(CApiProducts, WrongArgumentsAreRefusedByName) {
  constexpr int64_t n = 32, k = 64;
  const Weight w(gpu_.get(), n, k, NFP_F16, NFP_JOIN_BIASED, false, [&] { return normal(0.05f); });
  const DeviceVector<uint8_t> memory(4096);
  const DeviceVector<float> scale(16);
  const auto refused = [](nfp_status status, const std::string& what) {
    EXPECT_EQ(status, NFP_USAGE) << what;
    EXPECT_NE(std::string(nfp_last_error()).find(what), std::string::npos) << nfp_last_error();
  };
  const auto gemm = [&](auto change, const std::string& what) {
    nfp_gemm_call call{};
    call.size = sizeof(call);
    call.weight = w.described;
    call.m = 2;
    call.x = memory.get();
    call.ldx = k;
    call.d = memory.get() + 1024;
    call.ldd = n;
    call.workspace = streams_[0].workspace->get();
    call.workspace_bytes = nfp_gpu_workspace_bytes();
    change(call);
    refused(nfp_gemm(gpu_.get(), &call, nullptr), what);
  };
  gemm([](nfp_gemm_call& c) { c.weight.upper = nullptr; }, "w.upper");
  gemm([](nfp_gemm_call& c) { c.weight.lower = nullptr; }, "w.lower");
  gemm([](nfp_gemm_call& c) { c.x = static_cast<const uint8_t*>(c.x) + 8; }, "x must be");
  gemm([](nfp_gemm_call& c) { c.ldx = 56; }, "ldx is smaller");
  gemm([](nfp_gemm_call& c) { c.ldx = 65; }, "ldx must be a multiple");
  gemm([](nfp_gemm_call& c) { c.mode = NFP_MODE_E4M3; }, "ldx is smaller");  // than nfp_e4m3_row_bytes()
  gemm([&](nfp_gemm_call& c) { c.token_scale = scale.get(); }, "token_scale");
  gemm([](nfp_gemm_call& c) { c.d = nullptr; }, "d must be");
  gemm([](nfp_gemm_call& c) { c.ldd = 31; }, "ldd");
  gemm([](nfp_gemm_call& c) { c.weight.n = c.ldd = 24, c.swiglu = 1; }, "multiple of 16 with swiglu");
  // Which kernel runs sizes that no memory holds is not asked.
  constexpr int64_t kHuge = int64_t{1} << 62;
  const std::string sizes = "m, n and k must be 1 to 2^30";
  gemm([](nfp_gemm_call& c) { c.m = 0; }, sizes);
  gemm([](nfp_gemm_call& c) { c.m = kHuge; }, sizes);
  gemm([](nfp_gemm_call& c) { c.weight.n = c.ldd = kHuge; }, sizes);
  gemm([](nfp_gemm_call& c) { c.weight.k = c.ldx = kHuge; }, sizes);
  void* const workspace = streams_[0].workspace->get();
  nfp_linear* linear = nullptr;
  nfp_weight huge = w.described;
  huge.n = kHuge;
  refused(nfp_linear_create(gpu_.get(), &huge, workspace, nfp_gpu_workspace_bytes(), &linear), "n and k must be");
  ASSERT_EQ(nfp_linear_create(gpu_.get(), &w.described, workspace, nfp_gpu_workspace_bytes(), &linear), NFP_OK);
  const auto run = [&](int64_t m) {
    return nfp_linear_run(linear, NFP_PRECISION_FP16, NFP_F16, m, memory.get(), k, memory.get() + 1024, n, nullptr,
                          nullptr, nullptr);
  };
  char text[128];
  refused(run(0), "m must be 1 to 2^30");
  refused(run(kHuge), "m must be 1 to 2^30");
  refused(nfp_linear_describe(linear, NFP_PRECISION_FP16, NFP_F16, kHuge, text, sizeof(text)), "m not 1 to 2^30");
  refused(nfp_linear_describe(linear, static_cast<nfp_precision>(2), NFP_F16, 1, text, sizeof(text)), "is unknown");
  EXPECT_EQ(nfp_linear_scratch_bytes(linear, kHuge), 0u);
  EXPECT_EQ(nfp_linear_norm_scratch_bytes(linear, kHuge), 0u);
  nfp_linear_destroy(linear);
  const auto rows = [&](auto change, const std::string& what) {
    nfp_rows_call call{};
    call.size = sizeof(call);
    call.m = 2;
    call.k = call.ldx = call.ldr = call.ldy = 64;
    call.x = memory.get();
    call.y_e4m3 = memory.get() + 1024;
    call.ldy_e4m3 = 128;
    call.token_scale = scale.get();
    change(call);
    refused(nfp_rows(gpu_.get(), &call, nullptr), what);
  };
  rows([](nfp_rows_call& c) { c.m = 0; }, "m must be");
  rows([](nfp_rows_call& c) { c.k = nfp_max_quantised_columns() + 1; }, "k must be");
  rows([](nfp_rows_call& c) { c.ldx = 63; }, "x is null");
  rows([](nfp_rows_call& c) { c.y_e4m3 = nullptr; }, "y_f16 and y_e4m3");
  rows([](nfp_rows_call& c) { c.ldy_e4m3 = 112; }, "y_e4m3");
  rows([](nfp_rows_call& c) { c.token_scale = nullptr; }, "scales");
  rows([](nfp_rows_call& c) { c.source = NFP_ROWS_NORM; }, "weight");
  rows([](nfp_rows_call& c) { c.source = NFP_ROWS_SWIGLU, c.k = 60, c.ldx = 120; }, "multiple of 8");
  rows([](nfp_rows_call& c) { c.source = NFP_ROWS_E4M3; }, "token_scale without x_scale");
  rows([&](nfp_rows_call& c) { c.source = NFP_ROWS_E4M3, c.x_scale = scale.get(), c.y = memory.get(); }, "y does not");
  rows([&](nfp_rows_call& c) { c.source = NFP_ROWS_E4M3, c.x_scale = scale.get(), c.ldx = 63; }, "codes is null");
  // Of a caller that was compiled before E4M3 rows were added, whose memory ends there.
  rows(
      [&](nfp_rows_call& c) {
        c.source = NFP_ROWS_E4M3, c.x_scale = scale.get(), c.size = offsetof(nfp_rows_call, x_scale);
      },
      "token_scale without x_scale");
}

// Two ranks on one GPU, each with a part of x: the bits of a norm of the sum (of so few columns, which one block adds
// up).
TEST_F(CApiProducts, NormsSumOverRanks) {
  constexpr int64_t m = 5, n = 96, k = 256;
  constexpr int32_t kRanks = 2;
  const Weight w(gpu_.get(), n, k, NFP_F16, NFP_JOIN_BIASED, false, [&] { return normal(0.05f); });
  std::array<std::vector<uint16_t>, 4> numbers;  // a part for each rank, the residual, the norm's weight
  for (auto& bits : numbers) {
    for (const float v : normals(m * k)) bits.push_back(narrow(NFP_F16, v));
  }
  std::vector<uint16_t> sum;
  for (size_t i = 0; i < numbers[0].size(); ++i) {
    sum.push_back(narrow(NFP_F16, widen(NFP_F16, numbers[0][i]) + widen(NFP_F16, numbers[1][i])));
  }
  const size_t bytes = nfp_all_reduce_buffer_bytes(kRanks, size_t{m * k * 2});
  const DeviceVector<uint8_t> first(bytes), second(bytes);
  const std::array<void*, kRanks> buffers{first.get(), second.get()};
  std::array<nfp_all_reduce*, kRanks> reduces{};
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(nfp_all_reduce_create(gpu_.get(), rank, kRanks, buffers.data(), bytes, &reduces[rank]), NFP_OK)
        << nfp_last_error();
  }
  EXPECT_EQ(nfp_all_reduce_max_rows(reduces[0], k), m);
  EXPECT_EQ(nfp_all_reduce_max_rows(nullptr, k), 0);
  const DeviceVector<uint16_t> residual(numbers[2]), norm_weight(numbers[3]), whole(sum), part_0(numbers[0]),
      part_1(numbers[1]);
  struct Run {
    nfp_linear* linear = nullptr;
    DeviceVector<uint16_t> h{m * k}, y{m * n};
    std::unique_ptr<DeviceVector<uint8_t>> scratch;
  };
  std::array<Run, 3> runs;  // the ranks, and without any
  for (size_t i = 0; i < runs.size(); ++i) {
    void* const workspace = streams_[i % 2].workspace->get();
    ASSERT_EQ(nfp_linear_create(gpu_.get(), &w.described, workspace, nfp_gpu_workspace_bytes(), &runs[i].linear),
              NFP_OK);
    const size_t scratch_bytes = nfp_linear_norm_scratch_bytes(runs[i].linear, m);
    runs[i].scratch = std::make_unique<DeviceVector<uint8_t>>(scratch_bytes);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto run = [&](nfp_precision precision, size_t i, const DeviceVector<uint16_t>& x) {
    nfp_norm norm{sizeof(nfp_norm), norm_weight.get(), 1e-5f, residual.get(), runs[i].h.get(), k, nullptr};
    if (i < reduces.size()) norm.all_reduce = reduces[i];
    return nfp_linear_run_norm(runs[i].linear, precision, NFP_F16, m, x.get(), k, &norm, runs[i].y.get(), n, nullptr, 0,
                               runs[i].scratch->get(), streams_[i % 2].stream);
  };
  for (const nfp_precision precision : {NFP_PRECISION_FP16, NFP_PRECISION_FP8}) {
    ASSERT_EQ(run(precision, 2, whole), NFP_OK) << nfp_last_error();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(run(precision, 0, part_0), NFP_OK) << nfp_last_error();
    ASSERT_EQ(run(precision, 1, part_1), NFP_OK) << nfp_last_error();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t rank = 0; rank < reduces.size(); ++rank) {
      EXPECT_EQ(runs[rank].h.host(), runs[2].h.host());
      EXPECT_EQ(runs[rank].y.host(), runs[2].y.host());
    }
  }
  // Of a caller that was compiled before sums were added, whose memory ends there.
  nfp_norm old{offsetof(nfp_norm, all_reduce), norm_weight.get(), 1e-5f, residual.get(), runs[2].h.get(), k, nullptr};
  std::memset(&old.all_reduce, 0xff, sizeof(old.all_reduce));
  EXPECT_EQ(nfp_linear_run_norm(runs[2].linear, NFP_PRECISION_FP16, NFP_F16, m, whole.get(), k, &old, runs[2].y.get(),
                                n, nullptr, 0, runs[2].scratch->get(), streams_[0].stream),
            NFP_OK);
  nfp_all_reduce* none = nullptr;
  EXPECT_EQ(nfp_all_reduce_create(gpu_.get(), 2, kRanks, buffers.data(), bytes, &none), NFP_USAGE);
  EXPECT_EQ(nfp_all_reduce_create(gpu_.get(), 0, 9, buffers.data(), bytes, &none), NFP_USAGE);
  EXPECT_EQ(nfp_all_reduce_create(gpu_.get(), 0, kRanks, buffers.data(), 64, &none), NFP_USAGE);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (const Run& each : runs) nfp_linear_destroy(each.linear);
  for (nfp_all_reduce* const each : reduces) nfp_all_reduce_destroy(each);
}

// In a thread that has another GPU's context, or another of the same one, current.
TEST_F(CApiProducts, RunOnTheirOwnDevice) {
  constexpr int64_t m = 3, n = 64, k = 128;
  const Weight w(gpu_.get(), n, k, NFP_F16, NFP_JOIN_BIASED, false, [&] { return normal(0.05f); });
  std::vector<uint16_t> x_bits;
  for (const float v : normals(m * k)) x_bits.push_back(narrow(NFP_F16, v));
  const DeviceVector<uint16_t> x(x_bits), here(m * n), there(m * n), weights(n * k);
  const DeviceVector<uint8_t> packed(nfp_plane_bytes(n, k)), bytes(std::vector<uint8_t>(n * k, 7));
  nfp_linear* linear = nullptr;
  ASSERT_EQ(
      nfp_linear_create(gpu_.get(), &w.described, streams_[0].workspace->get(), nfp_gpu_workspace_bytes(), &linear),
      NFP_OK);
  const auto multiply = [&](const DeviceVector<uint16_t>& y) {
    EXPECT_EQ(nfp_linear_run(linear, NFP_PRECISION_FP16, NFP_F16, m, x.get(), k, y.get(), n, nullptr, nullptr,
                             streams_[0].stream),
              NFP_OK)
        << nfp_last_error();
  };
  multiply(here);
  std::thread([&] {
    const OtherContext other;
    multiply(there);
    EXPECT_EQ(nfp_gpu_pack(gpu_.get(), bytes.get(), k, n, k, NFP_UPPER, NFP_JOIN_BIASED, packed.get(), nullptr), NFP_OK)
        << nfp_last_error();
    EXPECT_EQ(nfp_gpu_unnest(gpu_.get(), w.upper.get(), w.lower.get(), nullptr, n, k, NFP_JOIN_BIASED, NFP_F16,
                             weights.get(), k, nullptr),
              NFP_OK)
        << nfp_last_error();
    EXPECT_TRUE(other.is_current());
  }).join();
  nfp_linear_destroy(linear);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(there.host(), here.host());
  EXPECT_EQ(packed.host()[0], 7);
  const std::vector<uint16_t> restored = weights.host();
  for (size_t i = 0; i < restored.size(); ++i) ASSERT_EQ(widen(NFP_F16, restored[i]), w.exact[i]) << i;
}

}  // namespace
}  // namespace nfp::cuda
