#include "calibrate/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "base/atomic_file.h"

namespace nfp {
namespace {

// What --calibrate FILE read may be a file that only its owner may read. So may be what is kept of it.
TEST(CalibrationStore, TheTextIsItsOwnersOnly) {
  const std::string folder = ::testing::TempDir() + "nfp_store_test";
  std::filesystem::remove_all(folder);
  const mode_t before = umask(0);
  const auto store = CalibrationStore::open(folder, 7);
  ASSERT_TRUE(store.ok()) << store.error().message;
  const TokenSequences text = {{1, 2, 3}, {4}};
  const Status saved = store->save_text(text);
  umask(before);
  ASSERT_TRUE(saved.ok()) << saved.error().message;
  EXPECT_EQ(store->text(), text);
  using Perms = std::filesystem::perms;
  int files = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder)) {
    if (!file.is_regular_file()) continue;
    ++files;
    EXPECT_EQ(file.status().permissions() & (Perms::group_all | Perms::others_all), Perms::none) << file.path();
  }
  EXPECT_EQ(files, 1);
  std::filesystem::remove_all(folder);
}

TEST(CalibrationStore, WhatIsNoTextOrOrderIsMadeAgain) {
  const std::string folder = ::testing::TempDir() + "nfp_store_damaged_test";
  std::filesystem::remove_all(folder);
  const auto store = CalibrationStore::open(folder, 7);
  ASSERT_TRUE(store.ok()) << store.error().message;
  ASSERT_TRUE(store->save_text({{1}}).ok());
  for (const char* text : {"[[1, 99999999999]]", "[[-1]]", "[[1.5]]", "[1", "[1]"}) {
    ASSERT_TRUE(write_file(store->folder() + "/text.json", text).ok());
    EXPECT_FALSE(store->text()) << text;
  }
  ASSERT_TRUE(write_file(store->folder() + "/order.json", "[]").ok());  // of no layer
  EXPECT_FALSE(store->sensitivities());
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace nfp
