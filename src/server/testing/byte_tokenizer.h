// A tokenizer of bytes for tests and load programs: ids 0 to 255 are the bytes; ids 256 and 257 are <|im_start|> and
// <|im_end|>, and the latter ends a generation.
#pragma once

#include <memory>

#include "base/result.h"
#include "text/tokenizer.h"

namespace nfp::server {

inline constexpr int32_t kByteVocab = 259;
inline constexpr int32_t kByteEnd = 257;

Result<std::shared_ptr<const Tokenizer>> make_byte_tokenizer();

// ChatML: what SmolLM2 and Qwen use, with tools shown as JSON.
extern const char kChatMlTemplate[];

}  // namespace nfp::server
