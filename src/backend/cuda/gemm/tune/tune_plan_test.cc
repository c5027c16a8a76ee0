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

TEST(TunePlan, ReadsWhatToCheck) {
  const auto random = parse_random_tokens("7,16");
  ASSERT_TRUE(random.ok());
  EXPECT_EQ(random->seed, 7u);
  EXPECT_EQ(random->count, 16);
  EXPECT_EQ(parse_random_tokens("0,0")->count, 0);
  for (const char* bad : {"", "7", "7,", ",7", "-1,4", "1,-4", "1,1001", "1,2,3", "1,2x"}) {
    const auto read = parse_random_tokens(bad);
    ASSERT_FALSE(read.ok()) << bad;
    EXPECT_NE(read.error().message.find("--check '" + std::string(bad) + "'"), std::string::npos);
  }
}

TEST(TunePlan, LikeliestBeginsWithTheChoice) {
  const DeviceShape device;
  const TuningTable& h200 = *built_in_table("NVIDIA H200", 132);
  for (const TuningTable& table : {h200, TuningTable()}) {  // by predicted times, and without a model
    for (const Mode mode : {Mode::kF16, Mode::kE4M3, Mode::kW8A16}) {
      for (const int m : {1, 24, 128, 1000}) {
        const Problem problem{m, 4096, 4096, mode};
        const std::vector<Config> found = likeliest(problem, device, table, 8);
        ASSERT_LE(found.size(), 8u);
        EXPECT_GE(found.size(), 4u);  // W8A16 has few tiles for many tokens
        EXPECT_EQ(found[0], choose(problem, device, &table, Reduction::kFastest).config);
        double before = 0;
        for (size_t i = 0; i < found.size(); ++i) {
          EXPECT_TRUE(exists(found[i].tile, mode));
          for (size_t j = 0; j < i; ++j) EXPECT_NE(found[i], found[j]) << to_string(found[i]);
          const TimeModel* model = table.model(mode);
          if (i == 0 || model == nullptr) continue;
          const double us = predict_us(*model, problem, found[i], device);
          EXPECT_GE(us, before);
          before = us;
        }
      }
    }
  }
  EXPECT_EQ(likeliest({16, 4096, 4096, Mode::kF16}, device, h200, 1).size(), 1u);
  EXPECT_GT(likeliest({16, 4096, 4096, Mode::kF16}, device, h200, 1000).size(), 20u);
}

}  // namespace
}  // namespace nfp::cuda
