#include "io/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "io/tensor_name.h"

namespace nfp {
namespace {

constexpr uint64_t kMostTensors = 1u << 20;
constexpr uint64_t kMostKeys = 1u << 20;
constexpr uint64_t kMostKeyBytes = 65535;  // the format's
constexpr uint64_t kMostAlignment = 1u << 20;
constexpr uint64_t kMostElements = 1u << 25;  // of all arrays; the largest vocabularies take some 1.5 million

enum class ValueType : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

size_t size_of_type(ValueType type) {
  switch (type) {
    case ValueType::kU8:
    case ValueType::kI8:
    case ValueType::kBool:
      return 1;
    case ValueType::kU16:
    case ValueType::kI16:
      return 2;
    case ValueType::kU32:
    case ValueType::kI32:
    case ValueType::kF32:
      return 4;
    case ValueType::kU64:
    case ValueType::kI64:
    case ValueType::kF64:
    case ValueType::kString:  // at least its length
      return 8;
    case ValueType::kArray:
      return 0;
  }
  return 0;
}

// Reads forward; the first thing that does not fit makes everything after it fail.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  template <typename T>
  bool read(T& value) {
    if (bytes_.size() - at_ < sizeof(T)) return false;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool read(std::string_view& text) {
    uint64_t length = 0;
    if (!read(length) || length > bytes_.size() - at_) return false;
    text = {reinterpret_cast<const char*>(bytes_.data() + at_), static_cast<size_t>(length)};
    at_ += static_cast<size_t>(length);
    return true;
  }
  size_t left() const { return bytes_.size() - at_; }
  size_t at() const { return at_; }
  Error truncated(std::string_view what) const {
    return error(ErrorCode::kInvalidInput,
                 "{}: ends, or makes no sense, at byte {} ({}); the file is truncated or damaged", name_, at_, what);
  }
  const std::string& name() const { return name_; }
  // Whether `count` more elements of arrays are as many as a file may have: a sparse file holds any number of zeros.
  bool take_elements(uint64_t count) {
    if (count > elements_left_) return false;
    elements_left_ -= count;
    return true;
  }

 private:
  uint64_t elements_left_ = kMostElements;
  std::span<const std::byte> bytes_;
  const std::string& name_;
  size_t at_ = 0;
};

template <typename T>
bool read_as(Cursor& in, int64_t& out) {
  T value{};
  if (!in.read(value)) return false;
  out = static_cast<int64_t>(value);  // NOLINT(bugprone-signed-char-misuse): an int8_t is a number here
  return true;
}

bool read_integer(Cursor& in, ValueType type, int64_t& out) {
  switch (type) {
    case ValueType::kU8:
    case ValueType::kBool:
      return read_as<uint8_t>(in, out);
    case ValueType::kI8:
      return read_as<int8_t>(in, out);
    case ValueType::kU16:
      return read_as<uint16_t>(in, out);
    case ValueType::kI16:
      return read_as<int16_t>(in, out);
    case ValueType::kU32:
      return read_as<uint32_t>(in, out);
    case ValueType::kI32:
      return read_as<int32_t>(in, out);
    case ValueType::kU64:
      return read_as<uint64_t>(in, out);
    case ValueType::kI64:
      return read_as<int64_t>(in, out);
    default:
      return false;
  }
}

bool read_float(Cursor& in, ValueType type, double& out) {
  if (type == ValueType::kF64) return in.read(out);
  float value = 0;
  if (!in.read(value)) return false;
  out = value;
  return true;
}

bool is_float(ValueType type) { return type == ValueType::kF32 || type == ValueType::kF64; }

Status read_array(Cursor& in, const std::string& key, GgufValue& value) {
  uint32_t raw = 0;
  uint64_t count = 0;
  if (!in.read(raw) || !in.read(count)) return in.truncated("array '" + key + "'");
  const auto type = static_cast<ValueType>(raw);
  if (raw > static_cast<uint32_t>(ValueType::kF64) || type == ValueType::kArray) {
    return error(ErrorCode::kUnsupported, "{}: metadata '{}' is an array of type {}, which is not supported", in.name(),
                 key, raw);
  }
  // A count is believed only as far as the file could hold that many.
  if (count > in.left() / size_of_type(type)) return in.truncated("array '" + key + "'");
  if (!in.take_elements(count)) {
    return error(ErrorCode::kInvalidInput, "{}: claims {} elements in '{}'; the file is damaged", in.name(), count,
                 key);
  }
  GgufArray array;
  const auto fill = [&](auto list, auto read_one) -> bool {
    list.resize(static_cast<size_t>(count));
    for (auto& element : list) {
      if (!read_one(element)) return false;
    }
    array.values = std::move(list);
    return true;
  };
  bool ok = false;
  if (type == ValueType::kString) {
    ok = fill(std::vector<std::string_view>(), [&](std::string_view& text) { return in.read(text); });
  } else if (is_float(type)) {
    ok = fill(std::vector<double>(), [&](double& number) { return read_float(in, type, number); });
  } else {
    ok = fill(std::vector<int64_t>(), [&](int64_t& number) { return read_integer(in, type, number); });
  }
  if (!ok) return in.truncated("array '" + key + "'");
  value = std::move(array);
  return ok_status();
}

Status read_value(Cursor& in, const std::string& key, GgufValue& value) {
  uint32_t raw = 0;
  if (!in.read(raw)) return in.truncated("metadata '" + key + "'");
  if (raw > static_cast<uint32_t>(ValueType::kF64)) {
    return error(ErrorCode::kInvalidInput, "{}: metadata '{}' has unknown type {}; the file is damaged", in.name(), key,
                 raw);
  }
  const auto type = static_cast<ValueType>(raw);
  if (type == ValueType::kArray) return read_array(in, key, value);
  if (type == ValueType::kString) {
    std::string_view text;
    if (!in.read(text)) return in.truncated("metadata '" + key + "'");
    value = text;
  } else if (is_float(type)) {
    double number = 0;
    if (!read_float(in, type, number)) return in.truncated("metadata '" + key + "'");
    value = number;
  } else {
    int64_t number = 0;
    if (!read_integer(in, type, number)) return in.truncated("metadata '" + key + "'");
    if (type == ValueType::kBool) {
      value = number != 0;
    } else {
      value = number;
    }
  }
  return ok_status();
}

Status read_tensor(Cursor& in, GgufTensor& tensor) {
  std::string_view name;
  uint32_t rank = 0;
  if (!in.read(name) || !in.read(rank)) return in.truncated("tensor list");
  if (!is_tensor_name(name)) {
    return error(ErrorCode::kInvalidInput,
                 "{}: a tensor's name, before byte {}, is no printable text; the file is damaged", in.name(), in.at());
  }
  tensor.name = std::string(name);
  if (rank > Shape::kMaxRank) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has {} dimensions; the file is damaged", in.name(),
                 tensor.name, rank);
  }
  std::vector<uint64_t> dims(rank);
  for (uint64_t& dim : dims) {
    if (!in.read(dim)) return in.truncated("tensor '" + tensor.name + "'");
  }
  uint32_t type = 0;
  if (!in.read(type) || !in.read(tensor.begin)) return in.truncated("tensor '" + tensor.name + "'");
  tensor.type = find_ggml_type(type);
  if (tensor.type == nullptr) {
    const std::string_view known = unread_ggml_type(type);
    return error(
        ErrorCode::kUnsupported,
        "{}: tensor '{}' has GGUF type {}, which is not supported; requantise it to one of F32, F16, BF16, Q8_0, "
        "Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K",
        in.name(), tensor.name, known.empty() ? std::to_string(type) : std::string(known));
  }
  uint64_t elements = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i] == 0 || dims[i] > INT64_MAX || __builtin_mul_overflow(elements, dims[i], &elements) ||
        elements > (uint64_t{1} << 48)) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has an impossible shape", in.name(), tensor.name);
    }
    tensor.shape.push_back(static_cast<int64_t>(dims[i]));
  }
  const auto block = static_cast<uint64_t>(tensor.type->block);
  // A scalar and a vector are read element by element, which is no block.
  const uint64_t row = dims.size() < 2 ? 1 : dims[0];
  if (row % block != 0) {
    return error(ErrorCode::kInvalidInput, "{}: tensor '{}' has rows of {} elements, not whole blocks of {}", in.name(),
                 tensor.name, row, block);
  }
  tensor.bytes = elements / block * static_cast<uint64_t>(tensor.type->bytes);
  return ok_status();
}

Status place_tensors(GgufFile& file, uint64_t data_begin, uint64_t size, uint64_t alignment, const std::string& name) {
  std::set<std::string_view> names;
  for (GgufTensor& tensor : file.tensors) {
    if (!names.insert(tensor.name).second) {
      return error(ErrorCode::kInvalidInput, "{}: tensor '{}' appears twice", name, tensor.name);
    }
    if (tensor.begin % alignment != 0 || tensor.begin > size - data_begin ||
        tensor.bytes > size - data_begin - tensor.begin) {
      return error(ErrorCode::kInvalidInput,
                   "{}: tensor '{}' ({} bytes at offset {}) does not lie inside the file; it is "
                   "truncated or damaged",
                   name, tensor.name, tensor.bytes, tensor.begin);
    }
    tensor.begin += data_begin;
  }
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : file.tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i]->begin < order[i - 1]->begin + order[i - 1]->bytes) {
      return error(ErrorCode::kInvalidInput, "{}: tensors '{}' and '{}' overlap", name, order[i - 1]->name,
                   order[i]->name);
    }
  }
  return ok_status();
}

}  // namespace

std::optional<int64_t> GgufFile::integer(const std::string& key) const {
  const auto place = metadata.find(key);
  if (place == metadata.end()) return std::nullopt;
  const auto* value = std::get_if<int64_t>(&place->second);
  return value != nullptr ? std::optional<int64_t>(*value) : std::nullopt;
}

Result<std::optional<int64_t>> GgufFile::whole_number(const std::string& key, const std::string& file) const {
  const auto value = integer(key);
  if (!value && metadata.contains(key)) {
    return error(ErrorCode::kInvalidInput, "{}: metadata '{}' is not a whole number", file, key);
  }
  return value;
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const auto place = metadata.find(key);
  if (place == metadata.end()) return std::nullopt;
  if (const auto* value = std::get_if<double>(&place->second)) return *value;
  const auto whole = integer(key);
  return whole ? std::optional<double>(static_cast<double>(*whole)) : std::nullopt;
}

std::optional<bool> GgufFile::boolean(const std::string& key) const {
  const auto place = metadata.find(key);
  if (place == metadata.end()) return std::nullopt;
  const auto* value = std::get_if<bool>(&place->second);
  return value != nullptr ? std::optional<bool>(*value) : std::nullopt;
}

std::optional<std::string_view> GgufFile::text(const std::string& key) const {
  const auto place = metadata.find(key);
  if (place == metadata.end()) return std::nullopt;
  const auto* value = std::get_if<std::string_view>(&place->second);
  return value != nullptr ? std::optional<std::string_view>(*value) : std::nullopt;
}

Result<GgufFile> parse_gguf(std::span<const std::byte> bytes, const std::string& name) {
  Cursor in(bytes, name);
  char magic[4] = {};
  uint32_t version = 0;
  if (!in.read(magic) || std::memcmp(magic, "GGUF", 4) != 0) {
    return error(ErrorCode::kInvalidInput, "{}: is not a GGUF file", name);
  }
  if (!in.read(version)) return in.truncated("version");
  if (version != 2 && version != 3) {
    return error(ErrorCode::kUnsupported, "{}: is GGUF version {}; supported are 2 and 3 (little endian)", name,
                 version);
  }
  uint64_t tensor_count = 0, key_count = 0;
  if (!in.read(tensor_count) || !in.read(key_count)) return in.truncated("counts");
  if (tensor_count > kMostTensors || key_count > kMostKeys) {
    return error(ErrorCode::kInvalidInput, "{}: claims {} tensors and {} metadata keys; the file is damaged", name,
                 tensor_count, key_count);
  }
  GgufFile file;
  for (uint64_t i = 0; i < key_count; ++i) {
    std::string_view key;
    if (!in.read(key) || key.size() > kMostKeyBytes) return in.truncated("metadata keys");
    GgufValue value;
    NFP_RETURN_IF_ERROR(read_value(in, std::string(key.substr(0, 200)), value));
    if (!file.metadata.emplace(std::string(key), std::move(value)).second) {
      return error(ErrorCode::kInvalidInput, "{}: metadata '{}' appears twice", name, key.substr(0, 200));
    }
  }
  file.metadata_end = in.at();
  for (uint64_t i = 0; i < tensor_count; ++i) {
    NFP_RETURN_IF_ERROR(read_tensor(in, file.tensors.emplace_back()));
  }
  NFP_ASSIGN_OR_RETURN(const std::optional<int64_t> stated, file.whole_number("general.alignment", name));
  const auto alignment = static_cast<uint64_t>(stated.value_or(32));
  if (!std::has_single_bit(alignment) || alignment > kMostAlignment) {
    return error(ErrorCode::kInvalidInput, "{}: general.alignment is {}; it must be a power of two up to {}", name,
                 stated.value_or(32), kMostAlignment);
  }
  const uint64_t data_begin = (in.at() + alignment - 1) / alignment * alignment;
  if (data_begin > bytes.size()) {
    if (file.tensors.empty()) return file;
    return in.truncated("tensor data");
  }
  NFP_RETURN_IF_ERROR(place_tensors(file, data_begin, bytes.size(), alignment, name));
  return file;
}

}  // namespace nfp
