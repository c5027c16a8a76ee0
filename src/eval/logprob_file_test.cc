#include "eval/logprob_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "base/testing/scratch_folder.h"

namespace nfp {
namespace {

TEST(LogprobFile, RecordsRoundTripWithinHalfAStep) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(-8.0f, 3.0f);
  std::vector<float> values(1001), back(1001);
  for (float& v : values) v = normal(random);
  values[5] = -0.25f;
  values[6] = -INFINITY;
  values[7] = -200.0f;
  std::vector<std::byte> record(logprob_record_bytes(1001));
  encode_logprobs(values, record.data());
  decode_logprobs(record.data(), back);
  const float top = *std::max_element(values.begin(), values.end());
  for (size_t i = 0; i < values.size(); ++i) {
    const float expected = std::max(values[i], top - 24.0f);
    EXPECT_NEAR(back[i], expected, 0.5f * 24.0f / 65535.0f + 1e-5f) << i;
  }
}

class LogprobFiles : public ::testing::Test {
 protected:
  void write(const LogprobHeader& header, size_t body) {
    std::string bytes(sizeof(header) + body, '\0');
    std::memcpy(bytes.data(), &header, sizeof(header));
    ASSERT_TRUE(write_file(path_, bytes).ok());
  }
  const testing::ScratchFolder folder_;
  const std::string path_ = folder_.path() + "/base";
};

TEST_F(LogprobFiles, OpensWhatIsWholeAndRefusesTheRest) {
  LogprobHeader header;
  header.vocab = 10;
  header.ctx = 8;
  header.chunks = 2;
  header.rows_per_chunk = 3;
  const size_t body = 6 * logprob_record_bytes(10);
  write(header, body);
  auto reader = LogprobReader::open(path_);
  ASSERT_TRUE(reader.ok()) << reader.error().message;
  EXPECT_EQ(reader->header().chunks, 2u);
  write(header, body - 4);
  EXPECT_FALSE(LogprobReader::open(path_).ok());
  write(header, body + logprob_record_bytes(10));
  EXPECT_FALSE(LogprobReader::open(path_).ok());
  LogprobHeader hostile = header;
  hostile.chunks = UINT64_MAX / 2;
  write(hostile, body);
  EXPECT_FALSE(LogprobReader::open(path_).ok());
  hostile = header;
  hostile.rows_per_chunk = 0;
  write(hostile, body);
  EXPECT_FALSE(LogprobReader::open(path_).ok());
  hostile = header;
  hostile.magic[0] = 'x';
  write(hostile, body);
  EXPECT_FALSE(LogprobReader::open(path_).ok());
  ASSERT_TRUE(write_file(path_, "short").ok());
  EXPECT_FALSE(LogprobReader::open(path_).ok());
}

}  // namespace
}  // namespace nfp
