#include "calibrate/upper_choice.h"

#include <cstring>
#include <limits>
#include <utility>

#include "base/atomic_file.h"
#include "nested/format.h"

namespace nfp {
namespace {

class ChosenReader final : public MatrixReader {
 public:
  ChosenReader(std::unique_ptr<MatrixReader> inner, std::shared_ptr<const UpperChoice> choice)
      : inner_(std::move(inner)), choice_(std::move(choice)) {}

  int64_t rows() const override { return inner_->rows(); }
  int64_t cols() const override { return inner_->cols(); }
  Storage storage() const override { return inner_->storage(); }
  const std::string& name() const override { return inner_->name(); }
  bool uppers_restricted() const override { return choice_->rule == UpperRule::kRestricted; }
  Status read_fp16(int64_t first, int64_t count, uint16_t* out) const override {
    return inner_->read_fp16(first, count, out);
  }

  Status row_factors(int64_t first, int64_t count, float* factor) const override {
    return inner_->row_factors(first, count, factor);
  }
  Status read_nested(int64_t first, int64_t count, uint8_t* upper, uint8_t* lower, int8_t* exponent) const override {
    NFP_RETURN_IF_ERROR(inner_->read_nested(first, count, upper, lower, exponent));
    const int64_t cols = inner_->cols();
    const int64_t row_bytes = choice_row_bytes(cols);
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* bits = choice_->bits.data() + (first + r) * row_bytes;
      for (int64_t c = 0; c < cols; ++c) {
        uint8_t& byte = upper[r * cols + c];
        const uint16_t w = join(byte, lower[r * cols + c]);
        const bool other = ((bits[c / 8] >> (c % 8)) & 1u) != 0;
        byte = other ? other_neighbour(w) : split(w).upper;
      }
    }
    return ok_status();
  }

 private:
  std::unique_ptr<MatrixReader> inner_;
  std::shared_ptr<const UpperChoice> choice_;
};

constexpr char kMagic[8] = {'N', 'F', 'P', 'C', 'H', 'O', 'I', '1'};

template <typename T>
void append(std::vector<std::byte>& out, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof(T));
}

// Takes values off the front of a file, never past its end.
class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) : left_(bytes) {}
  template <typename T>
  bool take(T& value) {
    std::span<const std::byte> part;
    if (!take_bytes(sizeof(T), part)) return false;
    std::memcpy(&value, part.data(), sizeof(T));
    return true;
  }
  bool take_bytes(uint64_t count, std::span<const std::byte>& part) {
    if (count > left_.size()) return false;
    part = left_.first(static_cast<size_t>(count));
    left_ = left_.subspan(static_cast<size_t>(count));
    return true;
  }
  bool empty() const { return left_.empty(); }

 private:
  std::span<const std::byte> left_;
};

bool take_choice(Cursor& cursor, UpperChoice& choice) {
  uint32_t name_size = 0;
  uint8_t rule = 0;
  uint64_t rows = 0, cols = 0;
  std::span<const std::byte> name, bits;
  constexpr uint64_t kMost = std::numeric_limits<int32_t>::max();  // so that no product below overflows
  if (!cursor.take(name_size) || !cursor.take_bytes(name_size, name) || !cursor.take(rule) || rule > 1 ||
      !cursor.take(rows) || !cursor.take(cols) || rows > kMost || cols > kMost ||
      !cursor.take_bytes(rows * static_cast<uint64_t>(choice_row_bytes(static_cast<int64_t>(cols))), bits)) {
    return false;
  }
  choice.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  choice.rule = static_cast<UpperRule>(rule);
  choice.rows = static_cast<int64_t>(rows);
  choice.cols = static_cast<int64_t>(cols);
  const auto* data = reinterpret_cast<const uint8_t*>(bits.data());
  choice.bits.assign(data, data + bits.size());
  return true;
}

}  // namespace

uint64_t hash_bytes(std::span<const std::byte> bytes, uint64_t hash) {
  for (std::byte b : bytes) hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001b3ull;
  return hash;
}

Result<std::unique_ptr<MatrixReader>> make_chosen_reader(std::unique_ptr<MatrixReader> reader,
                                                         std::shared_ptr<const UpperChoice> choice) {
  if (reader->storage() != Storage::kNested) return reader;
  if (reader->rows() != choice->rows || reader->cols() != choice->cols) {
    return error(ErrorCode::kInvalidInput,
                 "{}: is [{}, {}], but the calibration is for [{}, {}]: it is another model's", reader->name(),
                 reader->rows(), reader->cols(), choice->rows, choice->cols);
  }
  return std::unique_ptr<MatrixReader>(std::make_unique<ChosenReader>(std::move(reader), std::move(choice)));
}

Status write_choices(const std::string& path, uint64_t key, std::span<const UpperChoice> choices) {
  std::vector<std::byte> out;
  for (char c : kMagic) append(out, c);
  append(out, key);
  append(out, static_cast<uint32_t>(choices.size()));
  for (const UpperChoice& choice : choices) {
    append(out, static_cast<uint32_t>(choice.name.size()));
    const auto name = std::as_bytes(std::span(choice.name));
    out.insert(out.end(), name.begin(), name.end());
    append(out, static_cast<uint8_t>(choice.rule));
    append(out, static_cast<uint64_t>(choice.rows));
    append(out, static_cast<uint64_t>(choice.cols));
    const auto bits = std::as_bytes(std::span(choice.bits));
    out.insert(out.end(), bits.begin(), bits.end());
  }
  append(out, hash_bytes(out));
  NFP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  NFP_RETURN_IF_ERROR(file.write(out));
  return file.commit();
}

Result<std::vector<UpperChoice>> parse_choices(std::span<const std::byte> bytes, const std::string& path,
                                               uint64_t key) {
  const auto damaged = [&] {
    return error(ErrorCode::kInvalidInput, "{}: is not a whole file of calibration choices", path);
  };
  if (bytes.size() < sizeof(kMagic) + sizeof(uint64_t) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0) {
    return damaged();
  }
  const auto body = bytes.first(bytes.size() - sizeof(uint64_t));
  uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + body.size(), sizeof(checksum));
  if (checksum != hash_bytes(body)) return damaged();
  Cursor cursor(body.subspan(sizeof(kMagic)));
  uint64_t file_key = 0;
  uint32_t count = 0;
  if (!cursor.take(file_key) || !cursor.take(count)) return damaged();
  if (file_key != key) {
    return error(ErrorCode::kInvalidInput, "{}: was made for another model or with other settings", path);
  }
  std::vector<UpperChoice> choices;
  for (uint32_t i = 0; i < count; ++i) {
    UpperChoice choice;
    if (!take_choice(cursor, choice)) return damaged();
    choices.push_back(std::move(choice));
  }
  if (!cursor.empty()) return damaged();
  return choices;
}

}  // namespace nfp
