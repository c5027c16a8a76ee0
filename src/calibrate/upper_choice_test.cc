#include "calibrate/upper_choice.h"

#include <gtest/gtest.h>

#include <random>

#include "base/mapped_file.h"
#include "base/testing/scratch_folder.h"
#include "nested/format.h"

namespace nfp {
namespace {

class Matrix final : public MatrixReader {
 public:
  Matrix(std::vector<uint16_t> w, int64_t cols, Storage storage = Storage::kNested)
      : w_(std::move(w)), cols_(cols), storage_(storage) {}
  int64_t rows() const override { return static_cast<int64_t>(w_.size()) / cols_; }
  int64_t cols() const override { return cols_; }
  Storage storage() const override { return storage_; }
  const std::string& name() const override { return name_; }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    std::copy_n(w_.begin() + first * cols_, count * cols_, out);
    return ok_status();
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    for (int64_t i = 0; i < count * cols_; ++i) {
      const NestedWeight n = split(w_[static_cast<size_t>(first * cols_ + i)]);
      upper[i] = n.upper, lower[i] = n.lower;
    }
    std::fill_n(exponent, count, int8_t{0});
    return ok_status();
  }

 private:
  std::vector<uint16_t> w_;
  int64_t cols_;
  Storage storage_;
  std::string name_ = "a.weight";
};

std::vector<uint16_t> nestable(size_t count) {
  std::mt19937 random(1);
  std::vector<uint16_t> w(count);
  for (uint16_t& bits : w) bits = static_cast<uint16_t>(((random() & 1) << 15) | (random() % (kNestableMaxBits + 1)));
  return w;
}

UpperChoice random_choice(int64_t rows, int64_t cols) {
  std::mt19937 random(2);
  UpperChoice choice{"a.weight", rows, cols, UpperRule::kFree, {}};
  choice.bits.resize(static_cast<size_t>(rows * choice_row_bytes(cols)));
  for (uint8_t& byte : choice.bits) byte = static_cast<uint8_t>(random());
  return choice;
}

TEST(ChosenReader, TakesTheChosenNeighbourAndKeepsTheWeight) {
  const int64_t rows = 21, cols = 13;
  const auto w = nestable(static_cast<size_t>(rows * cols));
  const auto choice = std::make_shared<UpperChoice>(random_choice(rows, cols));
  auto reader = make_chosen_reader(std::make_unique<Matrix>(w, cols), choice);
  ASSERT_TRUE(reader.ok());
  EXPECT_FALSE((*reader)->uppers_restricted());
  const int64_t first = 3, count = 15;
  std::vector<uint8_t> upper(count * cols), lower(count * cols);
  std::vector<int8_t> exponent(count);
  ASSERT_TRUE((*reader)->read_nested(first, count, upper.data(), lower.data(), exponent.data()).ok());
  for (int64_t i = 0; i < count * cols; ++i) {
    const uint16_t bits = w[static_cast<size_t>(first * cols + i)];
    const int64_t row = first + i / cols, c = i % cols;
    const bool other = (choice->bits[static_cast<size_t>(row * choice_row_bytes(cols) + c / 8)] >> (c % 8)) & 1;
    EXPECT_EQ(upper[static_cast<size_t>(i)], other ? other_neighbour(bits) : split(bits).upper);
    EXPECT_EQ(join(upper[static_cast<size_t>(i)], lower[static_cast<size_t>(i)]), bits);
  }
}

TEST(ChosenReader, RefusesAnotherShapeAndLeavesDenseMatricesAlone) {
  const auto choice = std::make_shared<UpperChoice>(random_choice(4, 8));
  const auto wrong = make_chosen_reader(std::make_unique<Matrix>(nestable(40), 8), choice);
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.error().message.find("another model"), std::string::npos);
  const auto dense = make_chosen_reader(std::make_unique<Matrix>(nestable(40), 8, Storage::kDenseF16), choice);
  ASSERT_TRUE(dense.ok());
  EXPECT_EQ((*dense)->storage(), Storage::kDenseF16);
}

TEST(Choices, ReadBackAsWritten) {
  const testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/choices.bin";
  std::vector<UpperChoice> choices = {random_choice(5, 9), random_choice(3, 16)};
  choices[1].rule = UpperRule::kRestricted;
  choices[1].name = "b.weight";
  ASSERT_TRUE(write_choices(path, 77, choices).ok());
  auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  const auto back = parse_choices(file->bytes(), path, 77);
  ASSERT_TRUE(back.ok());
  ASSERT_EQ(back->size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*back)[i].name, choices[i].name);
    EXPECT_EQ((*back)[i].rule, choices[i].rule);
    EXPECT_EQ((*back)[i].rows, choices[i].rows);
    EXPECT_EQ((*back)[i].cols, choices[i].cols);
    EXPECT_EQ((*back)[i].bits, choices[i].bits);
  }
  const auto other = parse_choices(file->bytes(), path, 78);
  ASSERT_FALSE(other.ok());
  EXPECT_NE(other.error().message.find("another model"), std::string::npos);
}

TEST(Choices, EveryDamageIsAnErrorThatNamesTheFile) {
  const testing::ScratchFolder scratch;
  const std::string path = scratch.path() + "/choices.bin";
  const std::vector<UpperChoice> choices = {random_choice(5, 9)};
  ASSERT_TRUE(write_choices(path, 77, choices).ok());
  const auto file = MappedFile::open(path);
  ASSERT_TRUE(file.ok());
  const std::vector<std::byte> whole(file->bytes().begin(), file->bytes().end());
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto cut = parse_choices(std::span(whole).first(size), path, 77);
    ASSERT_FALSE(cut.ok()) << size;
    EXPECT_NE(cut.error().message.find(path), std::string::npos);
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    auto flipped = whole;
    flipped[i] ^= std::byte{1};
    EXPECT_FALSE(parse_choices(flipped, path, 77).ok()) << i;
  }
}

}  // namespace
}  // namespace nfp
