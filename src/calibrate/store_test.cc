#include "calibrate/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

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

}  // namespace
}  // namespace nfp
