// The C interface as other programs see it: through the shared library, with nothing but its header.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/gemm/plan/layout.h"
#include "base/float_types.h"
#include "nested/format.h"
#include "nested/matrix_analysis.h"
#include "nestedfp.h"

extern "C" int nfp_header_in_c(void);

namespace {

std::vector<uint16_t> random_weights(int64_t rows, int64_t columns, nfp_type type, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.1f);
  std::vector<uint16_t> out;
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = r % 5 == 3 ? 32.0f : 1.0f;
    for (int64_t c = 0; c < columns; ++c) {
      const float v = normal(random) * factor;
      out.push_back(type == NFP_BF16 ? nfp::fp32_to_bf16(v) : nfp::fp32_to_fp16(v));
    }
  }
  return out;
}

nfp_matrix_report report_for_call() {
  nfp_matrix_report report{};
  report.size = sizeof(report);
  return report;
}

TEST(CApi, VersionsAgree) {
  EXPECT_EQ(nfp_abi_version(), NFP_ABI_VERSION);
  EXPECT_NE(std::string(nfp_version()), "");
  EXPECT_EQ(nfp_header_in_c(), NFP_ABI_VERSION);
}

TEST(CApi, SplitsAndJoinsEveryNestableNumber) {
  std::vector<uint16_t> weights;
  for (uint32_t w = 0; w < 0x10000; ++w) {
    if (nfp::is_nestable(static_cast<uint16_t>(w))) weights.push_back(static_cast<uint16_t>(w));
  }
  std::vector<uint8_t> upper(weights.size()), lower(weights.size());
  ASSERT_EQ(nfp_split(weights.data(), weights.size(), upper.data(), lower.data()), NFP_OK);
  std::vector<uint16_t> back(weights.size());
  ASSERT_EQ(nfp_join(upper.data(), lower.data(), weights.size(), back.data()), NFP_OK);
  EXPECT_TRUE(back == weights);
  weights[77] = 0x4000;  // 2
  EXPECT_EQ(nfp_split(weights.data(), weights.size(), upper.data(), lower.data()), NFP_INVALID_INPUT);
  EXPECT_NE(std::string(nfp_last_error()).find("weight 77 is 2"), std::string::npos) << nfp_last_error();
}

TEST(CApi, NestsAndComesBackBitForBit) {
  for (const nfp_type type : {NFP_F16, NFP_BF16}) {
    for (const auto& [rows, columns] : {std::pair{1, 1}, std::pair{7, 33}, std::pair{130, 257}}) {
      const auto weights = random_weights(rows, columns, type, 3);
      for (const int threads : {1, 3}) {
        std::vector<int8_t> exponents(static_cast<size_t>(rows), 99);
        auto report = report_for_call();
        ASSERT_EQ(nfp_analyse(weights.data(), rows, columns, type, threads, exponents.data(), &report), NFP_OK)
            << nfp_last_error();
        if (report.nests == 0) {  // an FP16 row with a bit below the shifted range
          EXPECT_NE(std::string(report.reason), "");
          continue;
        }
        std::vector<uint8_t> upper(weights.size()), lower(weights.size());
        ASSERT_EQ(nfp_nest(weights.data(), rows, columns, type, exponents.data(), threads, upper.data(), lower.data()),
                  NFP_OK);
        std::vector<uint16_t> back(weights.size());
        ASSERT_EQ(nfp_unnest(upper.data(), lower.data(), rows, columns, type, exponents.data(), threads, back.data()),
                  NFP_OK);
        if (report.inexact == 0) {
          EXPECT_TRUE(back == weights);
        }
        for (int64_t r = 0; r < rows; ++r) {
          const auto row = std::span(weights).subspan(static_cast<size_t>(r * columns), static_cast<size_t>(columns));
          EXPECT_EQ(exponents[static_cast<size_t>(r)],
                    nfp::analyse_row(row, type == NFP_BF16 ? nfp::WeightType::kBF16 : nfp::WeightType::kF16).exponent);
        }
      }
    }
  }
}

TEST(CApi, SaysWhyAMatrixStaysDense) {
  std::vector<uint16_t> weights(64, 0x2c00);
  weights[32] = nfp::fp32_to_fp16(6.0f);
  weights[33] = 0x0001;
  std::vector<int8_t> exponents(2, 99);
  auto report = report_for_call();
  ASSERT_EQ(nfp_analyse(weights.data(), 2, 32, NFP_F16, 1, exponents.data(), &report), NFP_OK);
  EXPECT_EQ(report.nests, 0);
  EXPECT_NE(std::string(report.reason).find("row 1"), std::string::npos) << report.reason;
  EXPECT_EQ(exponents, (std::vector<int8_t>{0, 0}));
  weights[5] = 0x7e00;
  EXPECT_EQ(nfp_analyse(weights.data(), 2, 32, NFP_F16, 1, exponents.data(), &report), NFP_INVALID_INPUT);
  EXPECT_NE(std::string(nfp_last_error()).find("column 5"), std::string::npos) << nfp_last_error();
  std::vector<uint8_t> bytes(64);
  weights[5] = 0x2c00;
  EXPECT_EQ(nfp_nest(weights.data(), 2, 32, NFP_F16, nullptr, 1, bytes.data(), bytes.data()), NFP_INVALID_INPUT);
}

TEST(CApi, PacksAsTheScalarReferenceDoes) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{64, 128}, {65, 127}, {1, 1}, {200, 320}}) {
    const nfp::cuda::PlaneShape shape{n, k};
    ASSERT_EQ(nfp_plane_bytes(n, k), shape.bytes());
    std::mt19937 random(5);
    std::vector<uint8_t> bytes(static_cast<size_t>(n * k));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    for (const nfp_plane plane : {NFP_UPPER, NFP_LOWER}) {
      for (const nfp_join_kind join : {NFP_JOIN_BIASED, NFP_JOIN_FREE}) {
        std::vector<uint8_t> packed(shape.bytes(), 0xcc), want(shape.bytes(), 0);
        ASSERT_EQ(nfp_pack(bytes.data(), n, k, plane, join, 2, packed.data()), NFP_OK);
        for (int64_t block = 0; block < shape.row_blocks(); ++block) {
          const int64_t first = block * nfp::cuda::kBlockRows;
          nfp::cuda::pack_slab(shape, plane == NFP_LOWER ? nfp::cuda::Plane::kLower : nfp::cuda::Plane::kUpper,
                               join == NFP_JOIN_FREE ? nfp::cuda::Join::kFree : nfp::cuda::Join::kBiased,
                               std::span(bytes).subspan(static_cast<size_t>(first * k)),
                               static_cast<int>(std::min<int64_t>(nfp::cuda::kBlockRows, n - first)),
                               want.data() + static_cast<size_t>(block) * shape.slab_bytes());
        }
        EXPECT_TRUE(packed == want);
      }
    }
  }
}

TEST(CApi, PoliciesDecideByLoad) {
  nfp_policy* policy = nullptr;
  ASSERT_EQ(nfp_policy_create("threshold:100", &policy), NFP_OK) << nfp_last_error();
  nfp_step_load load{};
  load.size = sizeof(load);
  nfp_precision precision = NFP_PRECISION_FP8;
  load.step_tokens = 100;
  ASSERT_EQ(nfp_policy_choose(policy, &load, &precision), NFP_OK);
  EXPECT_EQ(precision, NFP_PRECISION_FP16);
  load.step_tokens = 101;
  ASSERT_EQ(nfp_policy_choose(policy, &load, &precision), NFP_OK);
  EXPECT_EQ(precision, NFP_PRECISION_FP8);
  load.size = 8;  // of a caller that knows less
  EXPECT_EQ(nfp_policy_choose(policy, &load, &precision), NFP_USAGE);
  nfp_policy_destroy(policy);
  EXPECT_EQ(nfp_policy_create("sometimes", &policy), NFP_USAGE);
  EXPECT_NE(std::string(nfp_last_error()).find("threshold:TOKENS"), std::string::npos);
  EXPECT_EQ(std::string(nfp_last_error()).find("graded"), std::string::npos);  // is refused here
}

TEST(CApi, WrongArgumentsAreRefusedByName) {
  auto report = report_for_call();
  EXPECT_EQ(nfp_analyse(nullptr, 2, 2, NFP_F16, 1, nullptr, &report), NFP_USAGE);
  EXPECT_EQ(nfp_pack(nullptr, 0, 2, NFP_UPPER, NFP_JOIN_FREE, 1, nullptr), NFP_USAGE);
  EXPECT_NE(std::string(nfp_last_error()).find("nfp_pack"), std::string::npos);
  EXPECT_EQ(nfp_policy_create(nullptr, nullptr), NFP_USAGE);

  const auto refused = [](nfp_status status, const std::string& what) {
    EXPECT_EQ(status, NFP_USAGE) << what;
    EXPECT_NE(std::string(nfp_last_error()).find(what), std::string::npos) << nfp_last_error();
  };
  std::array<uint16_t, 4> weights{};
  std::array<uint8_t, 4> upper{}, lower{};
  std::array<int8_t, 2> exponents{};
  for (const int wrong : {-1, 2}) {
    const auto type = static_cast<nfp_type>(wrong);
    refused(nfp_analyse(weights.data(), 2, 2, type, 1, exponents.data(), &report), "nfp_analyse: type is unknown");
    refused(nfp_nest(weights.data(), 2, 2, type, nullptr, 1, upper.data(), lower.data()), "nfp_nest: type is unknown");
    refused(nfp_unnest(upper.data(), lower.data(), 2, 2, type, nullptr, 1, weights.data()),
            "nfp_unnest: type is unknown");
    std::vector<uint8_t> packed(nfp_plane_bytes(2, 2));
    refused(nfp_pack(upper.data(), 2, 2, static_cast<nfp_plane>(wrong), NFP_JOIN_FREE, 1, packed.data()),
            "nfp_pack: plane is unknown");
    refused(nfp_pack(upper.data(), 2, 2, NFP_UPPER, static_cast<nfp_join_kind>(wrong), 1, packed.data()),
            "nfp_pack: join is unknown");
  }
  for (const int threads : {-1, 1025, INT32_MAX}) {
    refused(nfp_nest(weights.data(), 2, 2, NFP_F16, nullptr, threads, upper.data(), lower.data()),
            "threads is " + std::to_string(threads));
  }
  refused(nfp_nest(weights.data(), -2, 2, NFP_F16, nullptr, 1, upper.data(), lower.data()),
          "nfp_nest: the matrix is [-2, 2]");
}

TEST(CApi, SizesThatOverflow) {
  constexpr int64_t kMost = INT64_MAX, kHalf = int64_t{1} << 32;
  uint16_t weight = 0;
  uint8_t upper = 0, lower = 0;
  for (const auto& [n, k] :
       {std::pair{kMost, kMost}, {kMost, int64_t{1}}, {int64_t{1}, kMost}, {kHalf + 64, kHalf + 128}}) {
    EXPECT_EQ(nfp_plane_bytes(n, k), 0U) << n << " " << k;
    EXPECT_EQ(nfp_expert_bytes(n, k), 0U) << n << " " << k;
    EXPECT_EQ(nfp_nest(&weight, n, k, NFP_F16, nullptr, 1, &upper, &lower), NFP_USAGE);
    EXPECT_EQ(nfp_pack(&upper, n, k, NFP_UPPER, NFP_JOIN_FREE, 1, &lower), NFP_USAGE);
  }
  EXPECT_EQ(nfp_e4m3_row_bytes(kMost), 0);
  EXPECT_EQ(nfp_plane_bytes(-1, -1), 0U);
}

TEST(CApi, MessagesAreOneLine) {
  nfp_policy* policy = nullptr;
  EXPECT_EQ(nfp_policy_create("threshold:1\n", &policy), NFP_USAGE);
  EXPECT_EQ(std::string(nfp_last_error()).find('\n'), std::string::npos) << nfp_last_error();
}

// What is wrong with a call is said before a GPU is needed.
TEST(CApi, WrongProductsAndRowsAreRefusedByName) {
  const auto refused = [](nfp_status status, const char* what) {
    const bool has_kernels = std::string(nfp_build()) == "cuda";
    EXPECT_EQ(status, has_kernels ? NFP_USAGE : NFP_UNSUPPORTED) << what;
    if (has_kernels) {
      EXPECT_NE(std::string(nfp_last_error()).find(what), std::string::npos) << nfp_last_error();
    }
  };
  const auto gemm = [&](auto change, const char* what) {
    nfp_gemm_call call{};
    call.size = sizeof(call);
    call.weight.size = sizeof(call.weight);
    call.weight.n = call.weight.k = call.m = 8;
    change(call);
    refused(nfp_gemm(nullptr, &call, nullptr), what);
  };
  refused(nfp_gemm(nullptr, nullptr, nullptr), "nfp_gemm: call is null");
  gemm([](nfp_gemm_call& call) { call.size = sizeof(call) - 1; }, "size is not set");
  gemm([](nfp_gemm_call& call) { call.weight.size = 0; }, "size is not set");
  gemm([](nfp_gemm_call& call) { call.mode = static_cast<nfp_mode>(4); }, "mode is unknown");
  gemm([](nfp_gemm_call& call) { call.output = static_cast<nfp_output>(3); }, "output is unknown");
  gemm([](nfp_gemm_call& call) { call.m = 0; }, "m, n and k");
  gemm([](nfp_gemm_call& call) { call.weight.k = -1; }, "m, n and k");
  gemm([](nfp_gemm_call&) {}, "nfp_gemm: gpu is null");
  const auto rows = [&](auto change, const char* what) {
    nfp_rows_call call{};
    call.size = sizeof(call);
    change(call);
    refused(nfp_rows(nullptr, &call, nullptr), what);
  };
  refused(nfp_rows(nullptr, nullptr, nullptr), "nfp_rows: call is null");
  rows([](nfp_rows_call& call) { call.size = offsetof(nfp_rows_call, x_scale) - 1; }, "size is not set");
  rows([](nfp_rows_call& call) { call.source = static_cast<nfp_rows_source>(4); }, "source is unknown");
  // Of a caller that was compiled before E4M3 rows were added.
  rows([](nfp_rows_call& call) { call.size = offsetof(nfp_rows_call, x_scale); }, "nfp_rows: gpu is null");
}

TEST(CApi, EachThreadHasItsOwnMessage) {
  EXPECT_EQ(nfp_policy_create("mine", nullptr), NFP_USAGE);
  const std::string mine = nfp_last_error();
  std::thread([] { EXPECT_EQ(std::string(nfp_last_error()), ""); }).join();
  EXPECT_EQ(nfp_last_error(), mine);
}

TEST(CApi, WithoutAHopperGpuDeviceFunctionsSaySo) {
  nfp_gpu* gpu = nullptr;
  const nfp_status status = nfp_gpu_create(&gpu);
  if (status == NFP_OK) {
    nfp_gpu_destroy(gpu);
    GTEST_SKIP() << "there is one";
  }
  EXPECT_NE(std::string(nfp_last_error()), "");
}

}  // namespace
