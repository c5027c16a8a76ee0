#include "io/safetensors.h"

#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "io/tensor_name.h"

namespace nfp {
namespace {

constexpr uint64_t kMostHeader = 100u << 20;  // what the reference implementation accepts
constexpr size_t kMostEntries = 1u << 20;
constexpr uint64_t kMostEmptyRows = 1u << 20;

class HeaderParser {
 public:
  HeaderParser(const std::string& name, uint64_t data_begin, uint64_t file_size)
      : name_(name), data_begin_(data_begin), file_size_(file_size) {}

  Status run(std::string_view json, SafetensorsHeader& header) {
    simdjson::dom::parser parser;
    simdjson::dom::element root;
    if (parser.parse(json.data(), json.size()).get(root) != simdjson::SUCCESS)
      return bad("the header is not valid JSON");
    simdjson::dom::object object;
    if (root.get(object) != simdjson::SUCCESS) return bad("the header is not a JSON object");
    std::set<std::string_view> seen;
    for (const auto& [key, value] : object) {
      if (!is_tensor_name(key)) return bad(fmt::format("the name of tensor {} is no printable text", seen.size() + 1));
      if (!seen.insert(key).second) return bad(fmt::format("tensor '{}' appears twice", key));
      if (key == "__metadata__") {
        NFP_RETURN_IF_ERROR(metadata(value, header));
        continue;
      }
      if (header.tensors.size() >= kMostEntries) return bad("the header lists too many tensors");
      SafetensorsEntry entry;
      entry.name = std::string(key);
      NFP_RETURN_IF_ERROR(tensor(value, entry));
      header.tensors.push_back(std::move(entry));
    }
    return check_overlap(header);
  }

 private:
  Error bad(const std::string& what) const {
    return error(ErrorCode::kInvalidInput, "{}: {}; the file is damaged or not safetensors", name_, what);
  }

  Status metadata(simdjson::dom::element value, SafetensorsHeader& header) const {
    simdjson::dom::object object;
    if (value.get(object) != simdjson::SUCCESS) return bad("__metadata__ is not an object");
    for (const auto& [key, text] : object) {
      std::string_view string;
      if (text.get(string) != simdjson::SUCCESS) {
        return bad(is_tensor_name(key) ? fmt::format("__metadata__ '{}' is not a string", key)
                                       : "a value of __metadata__ is not a string");
      }
      header.metadata[std::string(key)] = std::string(string);
    }
    return ok_status();
  }

  Status tensor(simdjson::dom::element value, SafetensorsEntry& entry) const {
    std::string_view dtype;
    if (value["dtype"].get(dtype) != simdjson::SUCCESS) return bad(fmt::format("tensor '{}' has no dtype", entry.name));
    if (!is_tensor_name(dtype)) {
      return bad(fmt::format("tensor '{}' has a dtype that is no printable text", entry.name));
    }
    const auto known = dtype_from_safetensors(dtype);
    entry.dtype = known.value_or(DType::kU8);
    entry.stored = dtype;
    simdjson::dom::array shape;
    if (value["shape"].get(shape) != simdjson::SUCCESS) return bad(fmt::format("tensor '{}' has no shape", entry.name));
    uint64_t bytes = size_of(entry.dtype), largest = 0;
    for (simdjson::dom::element dim : shape) {
      uint64_t size = 0;
      if (dim.get(size) != simdjson::SUCCESS || size > INT64_MAX || __builtin_mul_overflow(bytes, size, &bytes) ||
          entry.shape.rank() >= Shape::kMaxRank) {
        return bad(fmt::format("tensor '{}' has an impossible shape", entry.name));
      }
      largest = std::max(largest, size);
      entry.shape.push_back(static_cast<int64_t>(size));
    }
    // What has no elements needs no bytes in the file, and readers take memory for each row.
    if (bytes == 0 && largest > kMostEmptyRows) {
      return bad(fmt::format("tensor '{}' has an impossible shape", entry.name));
    }
    simdjson::dom::array offsets;
    uint64_t ends[2] = {};
    size_t count = 0;
    if (value["data_offsets"].get(offsets) != simdjson::SUCCESS) {
      return bad(fmt::format("tensor '{}' has no data_offsets", entry.name));
    }
    for (simdjson::dom::element offset : offsets) {
      if (count >= 2 || offset.get(ends[count]) != simdjson::SUCCESS) count = 2;
      ++count;
    }
    const uint64_t room = file_size_ - data_begin_;
    if (count != 2 || ends[0] > ends[1] || ends[1] > room) {
      return bad(fmt::format("tensor '{}' lies outside the file ({} bytes of data)", entry.name, room));
    }
    if (!known) {
      entry.shape = {static_cast<int64_t>(ends[1] - ends[0])};
    } else if (ends[1] - ends[0] != bytes) {
      return bad(fmt::format("tensor '{}' has {} bytes, but its shape and dtype need {}", entry.name, ends[1] - ends[0],
                             bytes));
    }
    entry.begin = data_begin_ + ends[0];
    entry.end = data_begin_ + ends[1];
    return ok_status();
  }

  Status check_overlap(SafetensorsHeader& header) const {
    std::sort(header.tensors.begin(), header.tensors.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    for (size_t i = 1; i < header.tensors.size(); ++i) {
      if (header.tensors[i].begin < header.tensors[i - 1].end) {
        return bad(fmt::format("tensors '{}' and '{}' overlap", header.tensors[i - 1].name, header.tensors[i].name));
      }
    }
    return ok_status();
  }

  const std::string& name_;
  uint64_t data_begin_;
  uint64_t file_size_;
};

}  // namespace

Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file, const std::string& name) {
  uint64_t length = 0;
  if (file.size() < sizeof(length)) {
    return error(ErrorCode::kInvalidInput, "{}: has {} bytes, too few for a safetensors file", name, file.size());
  }
  std::memcpy(&length, file.data(), sizeof(length));
  if (length > kMostHeader || length > file.size() - sizeof(length)) {
    return error(ErrorCode::kInvalidInput,
                 "{}: says that its header has {} bytes, but the file has {}; it is truncated or not safetensors", name,
                 length, file.size());
  }
  // simdjson reads a little past the end of its input: a padded copy.
  const simdjson::padded_string json(reinterpret_cast<const char*>(file.data() + sizeof(length)),
                                     static_cast<size_t>(length));
  SafetensorsHeader header;
  HeaderParser parser(name, sizeof(length) + length, file.size());
  NFP_RETURN_IF_ERROR(parser.run(std::string_view(json.data(), json.size()), header));
  return header;
}

}  // namespace nfp
