#include "eval/perplexity.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <vector>

namespace nfp {
namespace {

TEST(CheckPerplexity, ATextShorterThanAChunkIsTold) {
  const std::vector<int32_t> tokens(511);
  PerplexityOptions options;
  const Status checked = check_perplexity(1000, tokens, options);
  ASSERT_FALSE(checked.ok());
  EXPECT_NE(checked.error().message.find("511 tokens"), std::string::npos) << checked.error().message;
  options.ctx = 511;
  EXPECT_TRUE(check_perplexity(1000, tokens, options).ok());
}

TEST(CheckPerplexity, ADiskWithoutRoomForTheDistributionsIsTold) {
  const std::vector<int32_t> tokens(1 << 20);
  PerplexityOptions options;
  options.save_base = ::testing::TempDir() + "nfp_perplexity_test_base";
  constexpr int32_t kHuge = std::numeric_limits<int32_t>::max();  // 2 PB in all
  const Status checked = check_perplexity(kHuge, tokens, options);
  ASSERT_FALSE(checked.ok());
  EXPECT_EQ(checked.error().code, ErrorCode::kIo);
  EXPECT_EQ(checked.error().message.find(options.save_base), 0u) << checked.error().message;
  EXPECT_FALSE(std::filesystem::exists(options.save_base));
  options.chunks = 1;
  EXPECT_TRUE(check_perplexity(1000, tokens, options).ok());
}

}  // namespace
}  // namespace nfp
