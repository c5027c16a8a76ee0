#include "calibrate/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <set>

#include "base/atomic_file.h"
#include "base/testing/scratch_folder.h"

namespace nfp {
namespace {

// Two matrices whose values can be set.
class TwoMatrices final : public ModelSource {
 public:
  static constexpr int64_t kRows = 700, kColumns = 1000;  // more than is hashed at a time

  TwoMatrices() : ModelSource(SourceKind::kHuggingFace, "two") {
    config_json_ = "{}";
    for (const char* name : {"first", "second"}) {
      add_tensor({.name = name, .dtype = DType::kF16, .stored = "F16", .shape = {kRows, kColumns}, .file_bytes = 0});
    }
  }
  std::vector<uint16_t> values = std::vector<uint16_t>(2 * kRows * kColumns, 0x3c00);

  Status read_rows(const TensorInfo& tensor, int64_t first, int64_t count, std::byte* out) const override {
    const int64_t row = first + (tensor.name == "second" ? kRows : 0);
    std::memcpy(out, values.data() + row * kColumns, static_cast<size_t>(count * kColumns) * sizeof(uint16_t));
    return ok_status();
  }
  void release(const TensorInfo&) const override {}
};

TEST(ContentKey, ModelsThatDifferInAnyValueAreTwo) {
  TwoMatrices model;
  ThreadPool one(1), three(3);
  const auto key = [&] {
    const auto made = content_key(model, one, {});
    EXPECT_TRUE(made.ok());
    return *made;
  };
  const uint64_t plain = key();
  EXPECT_EQ(*content_key(model, three, {}), plain);
  std::set<uint64_t> keys = {plain};
  for (const size_t at : {size_t{3}, size_t{123456}, size_t{400000}, size_t{1399998}}) {
    for (const uint16_t flipped : {0x8000, 0x0001}) {
      model.values[at] ^= flipped;
      EXPECT_TRUE(keys.insert(key()).second) << at << " ^ " << flipped;
      model.values[at + 1] ^= flipped;
      EXPECT_TRUE(keys.insert(key()).second) << at << ", two ^ " << flipped;
      model.values[at] ^= flipped;
      model.values[at + 1] ^= flipped;
    }
  }
  // The signs of the last of two words that follow each other in a chain.
  model.values[403] ^= 0x8000;
  model.values[403 + 16] ^= 0x8000;
  EXPECT_TRUE(keys.insert(key()).second);
}

// What --calibrate FILE read may be a file that only its owner may read. So may be what is kept of it.
TEST(CalibrationStore, TheTextIsItsOwnersOnly) {
  const testing::ScratchFolder scratch;
  const mode_t before = umask(0);
  const auto store = CalibrationStore::open(scratch.path(), 7);
  ASSERT_TRUE(store.ok()) << store.error().message;
  const TokenSequences text = {{1, 2, 3}, {4}};
  const Status saved = store->save_text(text);
  umask(before);
  ASSERT_TRUE(saved.ok()) << saved.error().message;
  EXPECT_EQ(store->text(), text);
  using Perms = std::filesystem::perms;
  int files = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(scratch.path())) {
    if (!file.is_regular_file()) continue;
    ++files;
    EXPECT_EQ(file.status().permissions() & (Perms::group_all | Perms::others_all), Perms::none) << file.path();
  }
  EXPECT_EQ(files, 1);
}

TEST(CalibrationStore, WhatIsNoTextOrOrderIsMadeAgain) {
  const testing::ScratchFolder scratch;
  const auto store = CalibrationStore::open(scratch.path(), 7);
  ASSERT_TRUE(store.ok()) << store.error().message;
  ASSERT_TRUE(store->save_text({{1}}).ok());
  for (const char* text : {"[[1, 99999999999]]", "[[-1]]", "[[1.5]]", "[1", "[1]"}) {
    ASSERT_TRUE(write_file(store->folder() + "/text.json", text).ok());
    EXPECT_FALSE(store->text()) << text;
  }
  ASSERT_TRUE(write_file(store->folder() + "/order.json", "[]").ok());  // of no layer
  EXPECT_FALSE(store->sensitivities());
}

}  // namespace
}  // namespace nfp
