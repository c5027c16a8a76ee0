#include "backend/cuda/gemm/tune/tune_plan.h"

#include <gtest/gtest.h>

namespace nfp::cuda {
namespace {

TEST(TunePlan, ShapesOfALayer) {
  // Llama-3.1-8B.
  EXPECT_EQ(layer_shapes({4096, 32, 8, 128, 14336}),
            (std::vector<GemmShape>{{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}}));
  // Query, key and value as wide as gate and up: one shape, once.
  EXPECT_EQ(layer_shapes({512, 8, 4, 64, 512}), (std::vector<GemmShape>{{1024, 512}, {512, 512}}));
}

TEST(TunePlan, ReadsShapes) {
  EXPECT_EQ(*parse_shape("4096,14336"), (GemmShape{4096, 14336}));
  for (const char* bad : {"", "4096", "4096,", ",4096", "0,4096", "4096,-1", "4096,1x", "4096, 1", "1,2,3",
                          "1073741825,64", "99999999999999999999,64"}) {
    const auto shape = parse_shape(bad);
    ASSERT_FALSE(shape.ok()) << bad;
    EXPECT_EQ(shape.error().code, ErrorCode::kUsage);
    EXPECT_NE(shape.error().message.find("'" + std::string(bad) + "'"), std::string::npos);
  }
}

TEST(TunePlan, ReadsModesAndBuckets) {
  EXPECT_EQ(*parse_modes("e4m3,f16,e4m3"), (std::vector<Mode>{Mode::kE4M3, Mode::kF16}));
  EXPECT_EQ(parse_modes("f16,fp8").error().message, "--modes: 'fp8' is none of f16, bf16, e4m3, e4m3-promoted, w8a16");
  EXPECT_FALSE(parse_modes("").ok());
  EXPECT_EQ(*parse_buckets("4096,1,16,1"), (std::vector<int>{1, 16, 4096}));
  for (const char* bad : {"", "2", "1,", "1,5000", "x"}) EXPECT_FALSE(parse_buckets(bad).ok()) << bad;
}

}  // namespace
}  // namespace nfp::cuda
