// The tokenizer inside GGUF metadata, and the file tokenizer.gguf that carries it on: a GGUF file without tensors,
// written beside the weights when a GGUF model is converted, since such a model has no tokenizer.json.
#pragma once

#include <optional>
#include <string>

#include "base/mapped_file.h"
#include "base/result.h"
#include "io/gguf.h"
#include "io/model_source.h"

namespace nfp {

inline constexpr const char* kTokenizerGguf = "tokenizer.gguf";

// Nothing where the metadata holds no tokenizer. Views point into the file that `gguf` was parsed from.
std::optional<GgufTokenizer> gguf_tokenizer_of(const GgufFile& gguf);

// The bytes of a GGUF file with all of `file`'s metadata and none of its tensors.
std::string metadata_only(std::span<const std::byte> file, const GgufFile& gguf);

// Reads DIRECTORY/tokenizer.gguf where it exists. The returned mapping must live as long as `tokenizer`.
Result<MappedFile> read_tokenizer_gguf(const std::string& directory, std::optional<GgufTokenizer>& tokenizer);

}  // namespace nfp
