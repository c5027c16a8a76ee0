#include "text/detokenizer.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "text/testing/small_tokenizers.h"
#include "text/utf8.h"

namespace nfp {
namespace {

using text::byte_id;
using text::byte_level_json;
using text::load;
using text::sentencepiece_json;
using Ids = std::vector<int32_t>;

std::string stream(const std::shared_ptr<const Tokenizer>& tokenizer, const Ids& ids, DetokenizerOptions options = {}) {
  StreamingDetokenizer detokenizer(tokenizer, options);
  std::string all;
  for (const int32_t id : ids) {
    const std::string part = detokenizer.append(id);
    EXPECT_TRUE(text::is_utf8(part));
    all += part;
  }
  return all + detokenizer.finish();
}

TEST(StreamingDetokenizer, HoldsBackUnfinishedSequences) {
  StreamingDetokenizer detokenizer(load(byte_level_json()));
  EXPECT_EQ(detokenizer.append(byte_id(0xF0)), "");
  EXPECT_EQ(detokenizer.append(byte_id(0x9F)), "");
  EXPECT_EQ(detokenizer.append(byte_id(0x99)), "");
  EXPECT_EQ(detokenizer.append(2), "");  // a special token does not cut it
  EXPECT_EQ(detokenizer.append(byte_id(0x82)), "\xF0\x9F\x99\x82");
  EXPECT_EQ(detokenizer.append(byte_id(0xE4)), "");
  EXPECT_EQ(detokenizer.append(byte_id('a')),
            "\xEF\xBF\xBD"
            "a");
  EXPECT_EQ(detokenizer.append(byte_id(0xFF)), "\xEF\xBF\xBD");
  EXPECT_EQ(detokenizer.append(byte_id(0xC3)), "");
  EXPECT_EQ(detokenizer.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(detokenizer.finish(), "");
}

TEST(StreamingDetokenizer, EqualsDecodeOnRandomIds) {
  const auto tokenizer = load(byte_level_json());
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    Ids ids;
    for (unsigned i = random() % 20; i > 0; --i) {
      ids.push_back(random() % 4 == 0 ? static_cast<int32_t>(random() % 270) - 2 : byte_id(0x80 + random() % 128));
    }
    for (const bool skip : {true, false}) {
      ASSERT_EQ(stream(tokenizer, ids, {.skip_special = skip, .continues = false}), tokenizer->decode(ids, skip));
    }
  }
}

TEST(StreamingDetokenizer, SentencePiece) {
  const auto tokenizer = load(sentencepiece_json());
  const int32_t mark_a = *tokenizer->token_to_id(
      "\xE2\x96\x81"
      "a");
  const int32_t b = *tokenizer->token_to_id("b");
  EXPECT_EQ(stream(tokenizer, {mark_a, mark_a}), " a a");
  EXPECT_EQ(stream(tokenizer, {1, mark_a, mark_a}, {.continues = false}), "a a");
  EXPECT_EQ(stream(tokenizer, {3 + 0xC3, 3 + 0xA8, b}),
            "\xC3\xA8"
            "b");
  EXPECT_EQ(stream(tokenizer, {3 + 0xE4, 3 + 0xB8, b}),
            "\xEF\xBF\xBD\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(stream(tokenizer, {b, 3 + 0xC3}), "b\xEF\xBF\xBD");
  StreamingDetokenizer whole(tokenizer, {.continues = false});
  EXPECT_EQ(whole.append(mark_a), "a");
  EXPECT_EQ(whole.finish(), "");
  EXPECT_EQ(whole.append(mark_a), "a");  // a new text
}

}  // namespace
}  // namespace nfp
