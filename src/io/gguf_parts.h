// GGUF models that are split over several files: PREFIX-00001-of-00003.gguf and so on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace nfp {

constexpr int64_t kMostGgufParts = 99999;

struct GgufPart {
  std::string_view prefix;  // with the folder
  int64_t number = 1;       // from 1
  int64_t count = 1;
};

// Nothing for a path that is no part's. The prefix is a view into `path`.
std::optional<GgufPart> parse_gguf_part(std::string_view path);

std::string gguf_part_path(std::string_view prefix, int64_t number, int64_t count);

// Whether it is a part, and not the first, which is the one that stands for the model.
bool is_later_gguf_part(std::string_view path);

}  // namespace nfp
