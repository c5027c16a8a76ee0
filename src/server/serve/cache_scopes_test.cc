#include "server/serve/cache_scopes.h"

#include <gtest/gtest.h>

namespace nfp::server {
namespace {

TEST(CacheScopes, AreOfAKeyAndASalt) {
  const CacheScopes scopes;
  EXPECT_EQ(scopes.of(1, "a"), scopes.of(1, "a"));
  EXPECT_NE(scopes.of(1, "a"), scopes.of(2, "a"));
  EXPECT_NE(scopes.of(1, "a"), scopes.of(1, "b"));
  EXPECT_NE(scopes.of(1, ""), scopes.of(1, "a"));
}

TEST(CacheScopes, CannotBeComputedElsewhere) {
  const CacheScopes scopes, others;
  const PrefixKey one = scopes.of(0, ""), other = others.of(0, "");
  EXPECT_NE(one.high, other.high);
  EXPECT_NE(one.low, other.low);
}

}  // namespace
}  // namespace nfp::server
