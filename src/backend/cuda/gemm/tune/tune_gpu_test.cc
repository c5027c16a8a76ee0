// Tuning of a shape, and the check after it. Needs a Hopper GPU; skips elsewhere.
#include <array>
#include <string>
#include <vector>

#include "backend/cuda/gemm/tune/tune.h"
#include "backend/cuda/testing/device.h"

namespace nfp::cuda {
namespace {

TEST(TuneGpu, ChecksCountsThatItDidNotTune) {
  if (!has_hopper()) GTEST_SKIP() << "no Hopper GPU";
  const auto gemm = Gemm::create();
  ASSERT_TRUE(gemm.ok()) << gemm.error().message;
  constexpr std::array kShapes = {GemmShape{4096, 4096}};
  constexpr std::array kOf = {Mode::kF16, Mode::kE4M3};
  constexpr std::array kTuned = {8, 64};
  constexpr std::array kChecked = {5, 33, 100, 701};
  TuneOptions options;
  options.modes = kOf;
  options.tokens = kTuned;
  options.checked = kChecked;
  options.most_candidates = 6;
  size_t told = 0, replaced = 0;
  options.progress = [&](const std::string& line) {
    ++told;
    replaced += line.ends_with(": replaced");
  };
  const auto tuned = tune(*gemm, kShapes, options);
  ASSERT_TRUE(tuned.ok()) << tuned.error().message;
  EXPECT_EQ(told, kOf.size() * (kTuned.size() + kChecked.size()));
  size_t kept = 0;
  for (const Mode mode : kOf) {
    for (const int m : kTuned) EXPECT_TRUE(tuned->table.has_bucket({m, 4096, 4096, mode})) << name_of(mode) << " " << m;
    for (const int m : kChecked) kept += tuned->table.checked({m, 4096, 4096, mode}).has_value();
  }
  EXPECT_EQ(kept, replaced);
  const auto lines = tuned->check.lines();
  ASSERT_EQ(lines.size(), kOf.size());
  for (const std::string& line : lines) {
    EXPECT_NE(line.find(" of 4 choices replaced"), std::string::npos) << line;
    printf("%s\n", line.c_str());
  }
  const auto again = TuningTable::parse(tuned->table.dump(), "choices");
  ASSERT_TRUE(again.ok()) << again.error().message;
}

}  // namespace
}  // namespace nfp::cuda
