// The tokenizer's part of a GGUF file's metadata.
#pragma once

#include <optional>
#include <string>

#include "io/gguf.h"
#include "io/model_source.h"

namespace nfp {

// Nothing where the file has no tokenizer. The views point into the file.
std::optional<GgufTokenizer> read_gguf_tokenizer(const GgufFile& gguf);

// The bytes of a GGUF file (v3) with the keys tokenizer.* of `gguf` and no tensors.
std::string write_gguf_tokenizer(const GgufFile& gguf);

}  // namespace nfp
