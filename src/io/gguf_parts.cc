#include "io/gguf_parts.h"

#include <fmt/format.h>

#include <charconv>

namespace nfp {
namespace {

// "-00002-of-00003.gguf": five digits each, as llama.cpp writes them.
constexpr size_t kPartSuffix = 20;

int64_t five_digits(std::string_view text) {
  int64_t value = 0;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), value).ptr;
  return end == text.data() + text.size() ? value : 0;
}

}  // namespace

std::optional<GgufPart> parse_gguf_part(std::string_view path) {
  if (path.size() <= kPartSuffix) return std::nullopt;
  GgufPart part;
  part.prefix = path.substr(0, path.size() - kPartSuffix);
  part.number = five_digits(path.substr(part.prefix.size() + 1, 5));
  part.count = five_digits(path.substr(part.prefix.size() + 10, 5));
  const bool is_part =
      part.number >= 1 && part.number <= part.count && gguf_part_path(part.prefix, part.number, part.count) == path;
  return is_part ? std::optional(part) : std::nullopt;
}

std::string gguf_part_path(std::string_view prefix, int64_t number, int64_t count) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", prefix, number, count);
}

bool is_later_gguf_part(std::string_view path) {
  const auto part = parse_gguf_part(path);
  return part && part->number > 1;
}

}  // namespace nfp
