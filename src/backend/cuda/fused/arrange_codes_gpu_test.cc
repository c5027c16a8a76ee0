// Codes of another quantiser against the layout's scalar reference, and through a product. Needs a Hopper GPU; skips
// elsewhere.
#include <algorithm>
#include <random>
#include <string>

#include "backend/cuda/fused/arrange_codes.h"
#include "backend/cuda/fused/gemm_input.h"
#include "backend/cuda/gemm/gemm.h"
#include "backend/cuda/gemm/plan/tuning_table.h"
#include "backend/cuda/gemm/tune/test_data.h"
#include "backend/cuda/testing/device.h"
#include "base/float_types.h"

namespace nfp::cuda {
namespace {

class ArrangeCodesGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  }
  std::vector<uint8_t> bytes(size_t count) {
    std::vector<uint8_t> out(count);
    for (uint8_t& byte : out) byte = static_cast<uint8_t>(random_());
    return out;
  }
  std::mt19937 random_{23};
};

struct Case {
  int64_t m, k;
  int64_t gap, gap_y;  // from the end of a row to the next
  int64_t first;       // where codes begin
  bool one_scale;
};

TEST_F(ArrangeCodesGpu, AreTheBytesOfTheReference) {
  for (const Case& c : {Case{1, 16, 0, 0, 0, false}, Case{3, 48, 0, 16, 0, true}, Case{7, 64, 32, 0, 16, false},
                        Case{5, 80, 16, 48, 0, true}, Case{129, 128, 0, 0, 0, false}, Case{33, 4096, 0, 0, 0, false},
                        Case{9, 4112, 48, 32, 0, true}, Case{2051, 1040, 0, 0, 0, false},
                        Case{3, 32768, 4096, 0, 0, false}, Case{5, 40976, 0, 0, 0, true},
                        // Rows that are not of 16 bytes.
                        Case{1, 1, 0, 0, 0, false}, Case{5, 577, 0, 0, 0, false}, Case{3, 4096, 1, 0, 0, true},
                        Case{7, 144, 0, 16, 5, false}, Case{65, 5121, 6, 0, 3, false}}) {
    const int64_t ld = c.k + c.gap, width = PlaneShape{0, c.k}.padded_k(), ldy = width + c.gap_y;
    const auto rows = static_cast<size_t>(c.m);
    const auto codes = bytes(static_cast<size_t>(c.first + c.m * ld));
    std::vector<float> scales(c.one_scale ? 1 : rows);
    for (float& scale : scales) scale = std::uniform_real_distribution<float>(0.001f, 2.0f)(random_);
    const DeviceVector<uint8_t> d_codes(codes), y(static_cast<size_t>(c.m * ldy));
    const DeviceVector<float> d_scales(scales), y_scales(rows);
    ArrangeCodesCall call;
    call.m = c.m;
    call.k = c.k;
    call.codes = d_codes.get() + c.first;
    call.ld = ld;
    call.scales = d_scales.get();
    call.one_scale = c.one_scale;
    call.y = y.get();
    call.ldy = ldy;
    call.y_scales = y_scales.get();
    const Status status = arrange_codes(call, nullptr);
    ASSERT_TRUE(status.ok()) << status.error().message;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<uint8_t> want(static_cast<size_t>(c.m * ldy), 0xff);  // what DeviceVector is poisoned with
    for (int64_t row = 0; row < c.m; ++row) {
      permute_activations(c.k,
                          std::span(codes).subspan(static_cast<size_t>(c.first + row * ld), static_cast<size_t>(c.k)),
                          std::span(want).subspan(static_cast<size_t>(row * ldy), static_cast<size_t>(width)));
    }
    ASSERT_TRUE(y.host() == want) << c.m << " rows of " << c.k;
    const auto got = y_scales.host();
    for (size_t row = 0; row < rows; ++row) ASSERT_EQ(got[row], scales[c.one_scale ? 0 : row]) << row;
  }
}

// What our own rounding gives, taken apart and given back as another quantiser would.
TEST_F(ArrangeCodesGpu, ProductsAreThoseOfOurOwnRounding) {
  const auto gemm = Gemm::create();
  ASSERT_TRUE(gemm.ok()) << gemm.error().message;
  const DeviceVector<uint8_t> workspace(Workspace::kBytes);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, Workspace::kBytes), cudaSuccess);
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 136, 128}, {37, 200, 592}, {130, 1024, 2064}}) {
    const PlaneShape planes{n, k};
    const int64_t width = planes.padded_k();
    const auto rows = static_cast<size_t>(m), numbers = static_cast<size_t>(m * k), row_bytes = static_cast<size_t>(k);
    const DeviceVector<uint8_t> upper(std::vector<uint8_t>(planes.bytes(), 0));
    fill_weights(planes, 3, upper.get(), nullptr, nullptr, nullptr, nullptr);
    const DeviceVector<uint16_t> x(numbers), want(static_cast<size_t>(m * n)), got(static_cast<size_t>(m * n));
    fill_f16(m * k, 4, x.get(), nullptr);
    const DeviceVector<uint8_t> ours(static_cast<size_t>(m * width)), theirs(static_cast<size_t>(m * width));
    const DeviceVector<float> scales(rows), their_scales(rows);
    GemmInputCall round;
    round.m = m;
    round.k = round.ldx = k;
    round.x = x.get();
    round.y_e4m3 = ours.get();
    round.ldy_e4m3 = width;
    round.scales = scales.get();
    ASSERT_TRUE(prepare_gemm_input(round, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto arranged = ours.host();
    std::vector<uint8_t> codes(numbers);
    for (size_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        codes[row * row_bytes + static_cast<size_t>(i)] =
            arranged[row * static_cast<size_t>(width) + static_cast<size_t>(activation_byte(i))];
      }
    }
    const DeviceVector<uint8_t> d_codes(codes);

    GemmCall product;
    product.w = {upper.get(), nullptr, nullptr, n, k, Join::kBiased};
    product.mode = Mode::kE4M3;
    product.m = m;
    product.x = ours.get();
    product.ldx = width;
    product.token_scale = scales.get();
    product.d = want.get();
    product.ldd = n;
    product.workspace = {workspace.get(), Workspace::kBytes};
    const Config config = choose(product.problem(), gemm->device(), nullptr, Reduction::kFastest).config;
    ASSERT_TRUE(gemm->run(product, config, nullptr).ok());
    ArrangeCodesCall call;
    call.m = m;
    call.k = call.ld = k;
    call.codes = d_codes.get();
    call.scales = scales.get();
    call.y = theirs.get();
    call.ldy = width;
    call.y_scales = their_scales.get();
    ASSERT_TRUE(arrange_codes(call, nullptr).ok());
    product.x = theirs.get();  // the product may begin before the codes are arranged
    product.token_scale = their_scales.get();
    product.d = got.get();
    ASSERT_TRUE(gemm->run(product, config, nullptr).ok());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(theirs.host() == arranged) << m << " rows of " << k;
    const auto sums = want.host();
    EXPECT_TRUE(got.host() == sums) << m << " rows of " << k;
    EXPECT_TRUE(std::none_of(sums.begin(), sums.end(), [](uint16_t bits) { return bits == 0xffff; }));
  }
}

TEST(ArrangeCodes, RefusesWhatDoesNotFit) {
  alignas(16) static uint8_t memory[512];
  static float scale = 1.0f;
  const auto refused = [](auto change, const std::string& field) {
    ArrangeCodesCall call;
    call.m = 1;
    call.k = call.ld = 100;
    call.codes = memory;
    call.y = memory + 256;
    call.ldy = 128;
    change(call);
    const Status status = arrange_codes(call, nullptr);
    ASSERT_FALSE(status.ok()) << field;
    EXPECT_EQ(status.error().code, ErrorCode::kUsage);
    EXPECT_NE(status.error().message.find("arrange_codes: " + field), std::string::npos) << status.error().message;
  };
  refused([](ArrangeCodesCall& c) { c.m = 0; }, "m ");
  refused([](ArrangeCodesCall& c) { c.k = 0; }, "k ");
  refused([](ArrangeCodesCall& c) { c.ld = 99; }, "codes ");
  refused([](ArrangeCodesCall& c) { c.codes = nullptr; }, "codes ");
  refused([](ArrangeCodesCall& c) { c.y += 8; }, "y ");
  refused([](ArrangeCodesCall& c) { c.ldy = 112; }, "y ");
  refused([](ArrangeCodesCall& c) { c.y_scales = &scale; }, "scales ");
}

}  // namespace
}  // namespace nfp::cuda
