#include "io/gguf_parts.h"

#include <fmt/format.h>

#include <charconv>

#include "io/gguf_tokenizer.h"

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

bool names_gguf_projector(std::string_view path) {
  return path.ends_with(".gguf") && path.substr(path.rfind('/') + 1).find("mmproj") != std::string_view::npos;
}

bool names_gguf_model(std::string_view path) {
  if (!path.ends_with(".gguf") || names_gguf_projector(path)) return false;
  if (path.substr(path.rfind('/') + 1) == kTokenizerGguf) return false;
  const auto part = parse_gguf_part(path);
  return !part || part->number == 1;
}

}  // namespace nfp
