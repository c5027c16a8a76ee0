#include <gtest/gtest.h>

#include "eval/throughput.h"

namespace nfp {
namespace {

constexpr std::string_view kTrace =
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,0\n"
    "\n"
    "2023-11-16 18:15:51.2225670,4000,97\n"
    "2023-11-16 18:15:52.3,1,1";

TEST(TraceLengths, TakesWhatFits) {
  const auto found = parse_trace(kTrace, "t.csv", 2, 4096);
  ASSERT_TRUE(found.ok()) << found.error().message;
  ASSERT_EQ(found->size(), 2u);  // nothing is generated in the second, and the third needs 4097
  EXPECT_EQ((*found)[0].input, 374);
  EXPECT_EQ((*found)[0].output, 44);
  EXPECT_EQ((*found)[1].input, 1);
  EXPECT_EQ(parse_trace(kTrace, "t.csv", 2, 4097)->back().input, 4000);
}

TEST(TraceLengths, ColumnsGoByName) {
  const auto found = parse_trace("GeneratedTokens,x,ContextTokens\n7,y,9\n", "t.csv", 1, 16);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->front().input, 9);
  EXPECT_EQ(found->front().output, 7);
  const auto spaced = parse_trace("\n\r\nContextTokens,GeneratedTokens\n9,7\n", "t.csv", 1, 16);
  ASSERT_TRUE(spaced.ok()) << spaced.error().message;
  EXPECT_EQ(spaced->front().input, 9);
}

TEST(TraceLengths, ErrorsNameTheLine) {
  EXPECT_NE(parse_trace("a,b\n1,2\n", "t.csv", 1, 16).error().message.find("t.csv: the first line"), std::string::npos);
  for (const char* row : {"1", "1,x", "1,-2", "1,2.5", "1,99999999999"}) {
    const auto bad = parse_trace(std::string("ContextTokens,GeneratedTokens\n") + row, "t.csv", 1, 16);
    ASSERT_FALSE(bad.ok()) << row;
    EXPECT_NE(bad.error().message.find("line 2"), std::string::npos) << row;
  }
  EXPECT_NE(parse_trace(kTrace, "t.csv", 4, 4096).error().message.find("2 requests fit"), std::string::npos);
  EXPECT_FALSE(parse_trace("", "t.csv", 1, 16).ok());
}

}  // namespace
}  // namespace nfp
