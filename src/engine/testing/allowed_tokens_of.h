// Lists of tokens that tests know to be right.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/allowed_tokens.h"

namespace nfp {

inline std::shared_ptr<const AllowedTokens> allowed_tokens_of(int32_t vocab, const std::vector<int32_t>& ids,
                                                              std::vector<std::vector<int32_t>> bad_words = {}) {
  std::shared_ptr<const AllowedTokens> made;
  const auto bad = AllowedTokens::make(ids, std::move(bad_words), vocab, &made);
  EXPECT_FALSE(bad) << bad->message;
  return made;
}

}  // namespace nfp
