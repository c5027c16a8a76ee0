#include "backend/cuda/gemm/plan/tuning_table.h"

#include <gtest/gtest.h>

#include "backend/cuda/gemm/testing/shapes.h"
#include "base/result.h"

namespace nfp::cuda {
namespace {

TEST(TuningTable, RoundTripsAndFindsTheBucket) {
  TuningTable table;
  table.device = "NVIDIA H200";
  const Config small{Tile{16, 1, 1, 2}, 4, true}, large{Tile{256, 1, 2, 1}, 0, false};
  table.set(4096, 14336, Mode::kF16, 16, small);
  table.set(4096, 14336, Mode::kF16, 4096, large);
  table.set(5120, 4096, Mode::kE4M3Promoted, 1, small);
  const auto parsed = TuningTable::parse(table.dump(), "test");
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  EXPECT_EQ(parsed->device, "NVIDIA H200");
  EXPECT_EQ(parsed->size(), 2u);
  EXPECT_EQ(parsed->dump(), table.dump());
  EXPECT_EQ(parsed->find({9, 4096, 14336, Mode::kF16, false}), small);
  EXPECT_EQ(parsed->find({1, 4096, 14336, Mode::kF16, false}), small);  // bucket 1 is not tuned: the next
  EXPECT_EQ(parsed->find({17, 4096, 14336, Mode::kF16, false}), large);
  EXPECT_EQ(parsed->find({100000, 4096, 14336, Mode::kF16, false}), large);
  EXPECT_FALSE(parsed->find({16, 4096, 14336, Mode::kE4M3, false}).has_value());
  EXPECT_FALSE(parsed->find({16, 4096, 14337, Mode::kF16, false}).has_value());
}

TEST(TuningTable, RefusesWhatItDoesNotKnow) {
  const auto message = [](std::string_view text) {
    const auto parsed = TuningTable::parse(text, "choices.json");
    return parsed.ok() ? std::string() : parsed.error().message;
  };
  const std::string head = R"({"format": "nestedfp gemm choices 1", "device": "x", "choices": [)";
  const auto entry = [&](std::string_view body) { return head + std::string(body) + "]}"; };
  EXPECT_EQ(message(entry("")), "");
  EXPECT_EQ(message(entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": {"1": "128x8 c1 b1"}})")), "");
  for (const std::string& bad :
       {std::string("["), std::string("[]"), std::string(R"({"format": "other"})"), entry("3"), entry(R"({"n": 1})"),
        entry(R"({"n": -1, "k": 2, "mode": "f16", "by_tokens": {}})"),
        entry(R"({"n": 1.5, "k": 2, "mode": "f16", "by_tokens": {}})"),
        entry(R"({"n": 1, "k": 2, "mode": "f17", "by_tokens": {}})"),
        entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": []})"),
        entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": {"0": "128x8 c1 b1"}})"),
        entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": {"7x": "128x8 c1 b1"}})"),
        entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": {"9999999": "128x8 c1 b1"}})"),
        entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": {"1": "1x8 c1 b1"}})"),
        entry(R"({"n": 1, "k": 2, "mode": "f16", "by_tokens": {"1": 8}})"),
        entry(R"({"n": 1, "k": 2, "mode": "e4m3-promoted", "by_tokens": {"1": "128x256 c1 b1"}})")}) {
    EXPECT_NE(message(bad).find("choices.json: "), std::string::npos) << bad;
  }
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_NE(message(entry(deep)).find("choices.json: is nested too deeply"), std::string::npos);
}

TEST(TuningTable, CheckedCountsServeThoseOfAsManyTiles) {
  const Config bucket = *parse_config("128x24 c1 b2"), found = *parse_config("64x32 c1 b1"),
               wide = *parse_config("128x112 c1 b1"), wider = *parse_config("128x128 c1 b1");
  TuningTable table;
  table.set(6144, 4096, Mode::kF16, 24, bucket);
  table.set(6144, 4096, Mode::kF16, 384, wider);
  table.set(6144, 4096, Mode::kF16, 20, found);
  table.set(6144, 4096, Mode::kF16, 317, wide);
  const auto again = TuningTable::parse(table.dump(), "test");
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->dump(), table.dump());
  const auto at = [&](int64_t m) { return again->find({m, 6144, 4096, Mode::kF16}); };
  for (const int64_t m : {17, 20, 21}) EXPECT_EQ(at(m), found) << m;
  for (const int64_t m : {16, 22, 23, 24}) EXPECT_EQ(at(m), bucket) << m;  // 22 is as near to either
  EXPECT_EQ(at(25), wider);
  for (const int64_t m : {305, 317, 320}) EXPECT_EQ(at(m), wide) << m;
  for (const int64_t m : {65, 304, 321, 384}) EXPECT_EQ(at(m), wider) << m;
  EXPECT_FALSE(at(385));
  // With a model everything else beyond 64 tokens is predicted.
  const TuningTable* built_in = built_in_table("NVIDIA H200", 132);
  ASSERT_NE(built_in, nullptr);
  table.copy_models(*built_in);
  const auto chosen = [&](int64_t m) {
    const Choice choice = choose({m, 6144, 4096, Mode::kF16}, kH200, &table, Reduction::kFastest);
    return std::pair(to_string(choice.config), std::string(choice.reason));
  };
  EXPECT_EQ(chosen(20), std::pair(to_string(found), std::string("tuned")));
  EXPECT_EQ(chosen(24), std::pair(to_string(bucket), std::string("tuned")));
  EXPECT_EQ(chosen(310), std::pair(to_string(wide), std::string("tuned")));
  EXPECT_EQ(chosen(384), std::pair(to_string(wider), std::string("tuned")));
  EXPECT_EQ(chosen(304).second, "predicted");
  EXPECT_EQ(chosen(321).second, "predicted");
  // Of a kernel that another mode has not, nothing.
  table.set(6144, 4096, Mode::kE4M3, 1000, *parse_config("192x112 c1 b1"));
  EXPECT_TRUE(table.checked({1000, 6144, 4096, Mode::kE4M3}));
  EXPECT_FALSE(table.checked({1000, 6144, 4096, Mode::kE4M3Promoted}));
}

TEST(TuningTable, IsFilledFromAnother) {
  const Config given = *parse_config("128x8 c1 b1"), other = *parse_config("64x16 c1 b1");
  TuningTable table, built_in;
  table.set(256, 512, Mode::kF16, 8, given);
  built_in.set(256, 512, Mode::kF16, 8, other);
  built_in.set(256, 512, Mode::kF16, 16, other);
  built_in.set(512, 512, Mode::kF16, 8, other);
  TimeModel model;
  model.launch_us = 3;
  built_in.set_model(Mode::kF16, model);
  table.fill_from(built_in);
  EXPECT_EQ(table.find({8, 256, 512, Mode::kF16, false}), given);
  EXPECT_EQ(table.find({16, 256, 512, Mode::kF16, false}), other);
  EXPECT_EQ(table.find({8, 512, 512, Mode::kF16, false}), other);
  ASSERT_NE(table.model(Mode::kF16), nullptr);
  EXPECT_EQ(table.model(Mode::kF16)->launch_us, 3);
}

TEST(TuningTable, BuiltInChoicesAreKernelsOfThisVersion) {
  for (const auto& [text, device] : {std::pair{built_in_choices_h100(), "NVIDIA H100 80GB HBM3"},
                                     std::pair{built_in_choices_h200(), "NVIDIA H200"}}) {
    const auto parsed = TuningTable::parse(text, device);
    ASSERT_TRUE(parsed.ok()) << parsed.error().message;
    EXPECT_EQ(parsed->device, device);
    // 14 shapes in all modes that were tuned, and what steps of other models asked for.
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{6144, 4096},
                               {4096, 4096},
                               {28672, 4096},
                               {4096, 14336},
                               {6144, 5120},
                               {5120, 4096},
                               {28672, 5120},
                               {5120, 14336},
                               {7680, 5120},
                               {5120, 5120},
                               {35840, 5120},
                               {5120, 17920},
                               {65536, 5120},
                               {5120, 32768}}) {
      for (const Mode mode : {Mode::kF16, Mode::kE4M3}) {
        EXPECT_TRUE(parsed->find({16, n, k, mode, false})) << n << " x " << k << " " << name_of(mode);
      }
    }
    const TuningTable* table = built_in_table(device, 132);
    ASSERT_NE(table, nullptr);
    EXPECT_EQ(table->dump(), parsed->dump());
    for (const Mode mode : kModes) {
      for (const int64_t m : {1, 16, 50, 64, 65, 96, 1000, 4096, 10000}) {
        const Choice choice = choose({m, 4096, 14336, mode, false}, kH200, table, Reduction::kFastest);
        EXPECT_TRUE(exists(choice.config.tile, mode)) << name_of(mode) << " " << m;
        EXPECT_GE(choice.config.tile.tokens, std::min<int64_t>(m, 96)) << name_of(mode) << " " << m;
      }
    }
  }
}

TEST(TuningTable, BuiltInChoicesGoByNameAndSize) {
  const auto device = [](std::string_view name, int sms) {
    const TuningTable* table = built_in_table(name, sms);
    return table == nullptr ? std::string() : table->device;
  };
  EXPECT_EQ(device("NVIDIA H100 NVL", 132), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(device("NVIDIA H100 PCIe", 114), "");
  EXPECT_EQ(device("NVIDIA H200 NVL", 132), "NVIDIA H200");
  EXPECT_EQ(device("NVIDIA GH200 480GB", 132), "NVIDIA H200");
  EXPECT_EQ(device("NVIDIA A100-SXM4-80GB", 108), "");
}

TEST(Choice, InvariantCutsDoNotDependOnTheNumberOfTokens) {
  for (const Mode mode : {Mode::kF16, Mode::kE4M3Promoted}) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{4096, 4096}, {28672, 4096}, {5120, 32768}, {576, 1536}, {192, 576}}) {
      int splits = 0;
      for (const int64_t m : {1, 2, 17, 64, 100, 256, 1000, 4096, 4097, 8192, 20000, 100000}) {
        const Problem problem{m, n, k, mode, false};
        const Choice choice = choose(problem, kH200, nullptr, Reduction::kBatchInvariant);
        ASSERT_TRUE(exists(choice.config.tile, mode));
        const Schedule s = make_schedule(problem, choice.config, kH200);
        ASSERT_NE(choice.config.splits, 0);
        const int cuts = s.shares == 0 ? 1 : s.shares / s.tiles();
        if (splits == 0) splits = cuts;
        EXPECT_EQ(cuts, splits) << describe(problem, choice, kH200);
      }
    }
  }
}

TEST(Choice, InvariantCutsAreKeptHoweverManyTheTableWants) {
  TuningTable table;
  for (const int splits : {2, 3, 4, 5, 6, 8, 12, 16}) {
    table.set(5120, 32768, Mode::kF16, 16, {Tile{16, 1, 1, 2}, static_cast<int16_t>(splits), false});
    for (const int64_t m : {1, 64, 4096, 8192, 65536}) {
      const Problem problem{m, 5120, 32768, Mode::kF16, false};
      const Choice choice = choose(problem, kH200, &table, Reduction::kBatchInvariant);
      const Schedule s = make_schedule(problem, choice.config, kH200);
      EXPECT_EQ(s.shares, s.tiles() * std::min(splits, kMaxCluster)) << describe(problem, choice, kH200);
    }
  }
}

// The same where a model of time chooses the cut.
TEST(Choice, InvariantCutsOfAModelAreKept) {
  const TuningTable* table = built_in_table("NVIDIA H200", 132);
  ASSERT_NE(table, nullptr);
  for (const Mode mode : kModes) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {65536, 5120}, {5120, 32768}, {192, 72}}) {
      int splits = 0;
      for (const int64_t m : {1, 2, 17, 64, 100, 256, 1000, 4097, 20000, 100000}) {
        const Problem problem{m, n, k, mode, false};
        const Choice choice = choose(problem, kH200, table, Reduction::kBatchInvariant);
        ASSERT_TRUE(exists(choice.config.tile, mode));
        const Schedule s = make_schedule(problem, choice.config, kH200);
        ASSERT_NE(choice.config.splits, 0);
        const int cuts = s.shares == 0 ? 1 : s.shares / s.tiles();
        if (splits == 0) splits = cuts;
        EXPECT_EQ(cuts, splits) << describe(problem, choice, kH200);
      }
    }
  }
}

// Whatever the device, its table and the product: a kernel that is compiled.
TEST(Choice, IsAKernelThatExists) {
  const TuningTable empty;
  for (const int sms : {132, 114, 78}) {
    const DeviceShape device{.sms = sms};
    for (const TuningTable* table :
         {static_cast<const TuningTable*>(nullptr), &empty, built_in_table("NVIDIA H200", sms),
          built_in_table("NVIDIA H100 80GB HBM3", sms)}) {
      for (const Mode mode : kModes) {
        for (const Join join : {Join::kBiased, Join::kFree}) {
          for (const auto& [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {192, 448}, {152064, 3584}}) {
            for (int64_t m = 1; m < 9000; m += m < 400 ? 1 : 211) {
              const Problem problem{m, n, k, mode, false, join};
              const Choice choice = choose(problem, device, table, Reduction::kFastest);
              ASSERT_TRUE(exists(choice.config.tile, mode, join))
                  << m << " tokens, " << n << " x " << k << ", " << name_of(mode) << ": " << to_string(choice.config);
            }
          }
        }
      }
    }
  }
}

TEST(Choice, SaysWhyAndWhat) {
  const Problem problem{16, 4096, 14336, Mode::kF16, false};
  TuningTable table;
  table.set(4096, 14336, Mode::kF16, 16, {Tile{16, 1, 1, 2}, 4, true});
  const Choice tuned = choose(problem, kH200, &table, Reduction::kFastest);
  EXPECT_EQ(describe(problem, tuned, kH200),
            "m 16, n 4096, k 14336, f16: 128x16 c1 b2 exchange4 (tuned), 128 blocks for 32 tiles, 32 of them cut into "
            "128 shares of k");
  EXPECT_STREQ(choose({16, 4096, 4096, Mode::kF16, false}, kH200, &table, Reduction::kFastest).reason, "analytic");
}

// Files may hold a few numbers of tokens alone: others are predicted, where there is a model, and no larger one's.
TEST(Choice, OfACountThatWasNotTunedIsPredicted) {
  TuningTable table;
  const Config tuned{Tile{64, 1, 1, 1}, 2, false};
  table.set(3584, 18944, Mode::kF16, 32, tuned);
  const auto reason = [&](int64_t m) {
    return std::string(choose({m, 3584, 18944, Mode::kF16}, kH200, &table, Reduction::kFastest).reason);
  };
  EXPECT_EQ(reason(24), "tuned");
  table.copy_models(*built_in_table("NVIDIA H200", 132));
  EXPECT_EQ(reason(24), "predicted");
  EXPECT_EQ(reason(1), "predicted");
  EXPECT_EQ(reason(25), "tuned");
  EXPECT_EQ(reason(32), "tuned");
  EXPECT_EQ(reason(33), "predicted");
}

}  // namespace
}  // namespace nfp::cuda
