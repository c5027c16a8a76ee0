#include "server/serve/response_store.h"

#include <gtest/gtest.h>

namespace nfp::server {
namespace {

TEST(ResponseStore, KeepsWithinItsBytesWhatWasUsedLast) {
  ResponseStore store(4000);
  for (const char* id : {"a", "b", "c"}) store.put({id, 0, std::string(700, 'r'), "[]"});
  ASSERT_TRUE(store.find("a", 0));  // so that b is the one longest unused
  store.put({"d", 0, std::string(700, 'r'), "[]"});
  EXPECT_FALSE(store.find("b", 0));
  for (const char* id : {"a", "c", "d"}) EXPECT_TRUE(store.find(id, 0)) << id;
  EXPECT_LE(store.bytes(), 4000u);
  store.put({"too large", 0, std::string(5000, 'r'), "[]"});
  EXPECT_FALSE(store.find("too large", 0));
  EXPECT_TRUE(store.find("a", 0));
  store.put({"a", 0, "new", "[]"});
  EXPECT_EQ(store.find("a", 0)->response, "new");
  for (const char* id : {"a", "c", "d"}) EXPECT_TRUE(store.erase(id, 0)) << id;
  EXPECT_EQ(store.bytes(), 0u);
}

TEST(ResponseStore, BelongsToTheKey) {
  ResponseStore store(4000);
  store.put({"a", 1, "r", "[]"});
  EXPECT_FALSE(store.find("a", 2));
  EXPECT_FALSE(store.erase("a", 2));
  EXPECT_TRUE(store.erase("a", 1));
  EXPECT_FALSE(store.find("a", 1));
}

TEST(ResponseStore, NothingIsKeptWithoutBytes) {
  ResponseStore store(0);
  store.put({"a", 0, "", ""});
  EXPECT_FALSE(store.find("a", 0));
  EXPECT_NE(ResponseStore::make_id(), ResponseStore::make_id());
}

}  // namespace
}  // namespace nfp::server
