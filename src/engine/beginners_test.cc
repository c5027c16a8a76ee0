#include "engine/beginners.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace nfp {
namespace {

TEST(Beginners, NamesTheFirstOfEachKeyAndExactOnesBeforeOthers) {
  std::mt19937 random(1);
  const auto draw = [&](uint32_t below) { return static_cast<uint32_t>(random() % below); };
  std::vector<Sequence> sequences(300);
  Beginners beginners;
  for (int round = 0; round < 500; ++round) {
    const size_t count = 1 + draw(300);
    const uint32_t range = 1 + draw(20);
    beginners.clear(count);
    std::map<std::pair<uint64_t, uint64_t>, std::pair<const Sequence*, bool>> expected;
    for (size_t i = 0; i < count; ++i) {
      // Of places, and of what is compared first, many are equal.
      const PrefixKey key = {draw(range) + (uint64_t{draw(2)} << 32), draw(range) + (uint64_t{draw(2)} << 40)};
      const bool exact = draw(3) == 0;
      auto& [first, is_exact] = expected.try_emplace({key.high, key.low}, &sequences[i], exact).first->second;
      ASSERT_EQ(&beginners.enter(key, sequences[i], exact), first);
      if (exact && !is_exact) first = &sequences[i], is_exact = true;
    }
  }
}

}  // namespace
}  // namespace nfp
