// What a GGUF file's name says: parts of a model that is split over several (PREFIX-00001-of-00003.gguf and so on), and
// files that are no model.
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

// A GGUF file with the part for images and sound of a multimodal model, which stands beside that.
bool names_gguf_projector(std::string_view path);

// Whether a path among others is one to choose a model by: a GGUF file that is no later part of one, no projector and
// not tokenizer.gguf.
bool names_gguf_model(std::string_view path);

}  // namespace nfp
