#include "engine/block_manager.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <map>
#include <numeric>
#include <set>

namespace nfp {
namespace {

std::vector<int32_t> tokens(int32_t count, int32_t first = 0) {
  std::vector<int32_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), first);
  return all;
}

// Publishes the whole blocks of `all` and gives them back.
void remember(BlockManager& blocks, std::span<const int32_t> all, bool exact) {
  PrefixKey key;
  const auto size = static_cast<size_t>(blocks.block_size());
  std::vector<int32_t> owned;
  for (size_t first = 0; first + size <= all.size(); first += size) {
    key = extend(key, all.subspan(first, size));
    owned.push_back(*blocks.allocate());
    blocks.publish(owned.back(), key, all.subspan(first, size), exact, exact ? static_cast<int32_t>(size) : 0);
  }
  for (auto block = owned.rbegin(); block != owned.rend(); ++block) blocks.release(*block);
}

TEST(BlockManager, GivesEveryBlockOnceAndTakesItBack) {
  BlockManager blocks(4, 16, true);
  std::set<int32_t> given;
  for (int i = 0; i < 4; ++i) given.insert(*blocks.allocate());
  EXPECT_EQ(given.size(), 4u);
  EXPECT_FALSE(blocks.allocate().has_value());
  EXPECT_EQ(blocks.in_use(), 4);
  for (int32_t block : given) blocks.release(block);
  EXPECT_EQ(blocks.available(), 4);
}

TEST(BlockManager, FindsTheLongestPublishedPrefix) {
  BlockManager blocks(8, 4, true);
  const auto all = tokens(14);
  remember(blocks, all, true);  // three whole blocks
  EXPECT_EQ(blocks.available(), 8);
  PrefixMatch found = blocks.match(all, 100, false);
  EXPECT_EQ(found.blocks.size(), 3u);
  EXPECT_EQ(blocks.in_use(), 3);
  auto other = all;
  other[5] = 99;  // differs in the second block
  EXPECT_EQ(blocks.match(other, 100, false).blocks.size(), 1u);
  EXPECT_EQ(blocks.match(all, 11, false).blocks.size(), 2u);
  // The same tokens elsewhere in a sequence are another prefix.
  EXPECT_TRUE(blocks.match(std::span(all).subspan(4), 100, false).blocks.empty());
}

TEST(BlockManager, ExactRequestsMatchOnlyExactBlocks) {
  BlockManager blocks(8, 4, true);
  const auto all = tokens(12);
  remember(blocks, std::span(all).first(4), true);
  remember(blocks, all, false);  // the first block stays the exact one
  EXPECT_EQ(blocks.match(all, 100, true).blocks.size(), 1u);
  const PrefixMatch any = blocks.match(all, 100, false);
  EXPECT_EQ(any.exact, (std::vector<bool>{true, false, false}));
}

TEST(BlockManager, ExactReplacesInexact) {
  BlockManager blocks(8, 4, true);
  const auto all = tokens(8);
  remember(blocks, all, false);
  EXPECT_TRUE(blocks.match(all, 100, true).blocks.empty());
  remember(blocks, all, true);
  EXPECT_EQ(blocks.match(all, 100, true).blocks.size(), 2u);
}

TEST(BlockManager, ReusesTheLongestUnusedFirst) {
  BlockManager blocks(4, 4, true);
  const auto a = tokens(8, 0);
  const auto b = tokens(8, 100);
  remember(blocks, a, true);
  remember(blocks, b, true);
  (void)blocks.allocate();  // takes a's last block: a was freed first, its last block before its first
  EXPECT_EQ(blocks.match(a, 100, true).blocks.size(), 1u);
  EXPECT_EQ(blocks.match(b, 100, true).blocks.size(), 2u);
}

TEST(BlockManager, WithoutCachingNothingIsFound) {
  BlockManager blocks(4, 4, false);
  const auto all = tokens(8);
  remember(blocks, all, true);
  EXPECT_TRUE(blocks.match(all, 100, false).blocks.empty());
}

// Against a ledger that is too simple to be wrong: owners add up, nothing is given twice, a match is really a prefix.
RC_GTEST_PROP(BlockManagerProperty, OwnersAddUp, ()) {
  const int32_t total = *rc::gen::inRange(1, 12);
  BlockManager blocks(total, 2, true);
  std::map<int32_t, int> owners;
  std::map<int32_t, std::vector<int32_t>> contents;  // all tokens up to the block's end, by published block
  std::vector<int32_t> held;
  std::vector<PrefixKey> keys;  // all that there may be
  for (int32_t a = 0; a < 4; ++a) {
    keys.push_back(extend({}, std::array{a / 2, a % 2}));
    for (int32_t b = 0; b < 4; ++b) keys.push_back(extend(keys[static_cast<size_t>(5 * a)], std::array{b / 2, b % 2}));
  }
  const auto findable = [&] {
    std::vector<int> found;
    for (const PrefixKey& key : keys) found.push_back(blocks.findable(key, false) + blocks.findable(key, true));
    return found;
  };
  for (int step = 0; step < 200; ++step) {
    const std::vector<int> before = findable();
    blocks.forget_changes();
    const int what = *rc::gen::inRange(0, 3);
    if (what == 0) {
      const auto block = blocks.allocate();
      RC_ASSERT(block.has_value() == (static_cast<int32_t>(owners.size()) < total));
      if (block) {
        RC_ASSERT(owners.count(*block) == 0u);
        owners[*block] = 1;
        contents.erase(*block);
        held.push_back(*block);
        const auto prefix = *rc::gen::container<std::vector<int32_t>>(4, rc::gen::inRange(0, 2));
        const size_t size = *rc::gen::element(size_t{2}, size_t{4});
        PrefixKey key = extend({}, std::span(prefix).first(2));
        if (size == 4) key = extend(key, std::span(prefix).subspan(2, 2));
        blocks.publish(*block, key, std::span(prefix).subspan(size - 2, 2), *rc::gen::arbitrary<bool>(), 0);
        contents[*block] = std::vector<int32_t>(prefix.begin(), prefix.begin() + static_cast<std::ptrdiff_t>(size));
      }
    } else if (what == 1 && !held.empty()) {
      const auto at = static_cast<std::ptrdiff_t>(*rc::gen::inRange<size_t>(0, held.size()));
      const int32_t block = held[static_cast<size_t>(at)];
      held.erase(held.begin() + at);
      blocks.release(block);
      if (--owners[block] == 0) owners.erase(block);
    } else {
      const auto wanted = *rc::gen::container<std::vector<int32_t>>(5, rc::gen::inRange(0, 2));
      const PrefixMatch found = blocks.match(wanted, 5, *rc::gen::arbitrary<bool>());
      for (size_t i = 0; i < found.blocks.size(); ++i) {
        const auto& content = contents.at(found.blocks[i]);
        RC_ASSERT(content.size() == 2 * (i + 1));
        RC_ASSERT(std::equal(content.begin(), content.end(), wanted.begin()));
        ++owners[found.blocks[i]];
        held.push_back(found.blocks[i]);
      }
    }
    RC_ASSERT(blocks.in_use() == static_cast<int32_t>(owners.size()));
    const std::vector<int> after = findable();
    for (size_t i = 0; i < keys.size(); ++i) RC_ASSERT(before[i] == after[i] || blocks.changed(keys[i]));
  }
}

}  // namespace
}  // namespace nfp
