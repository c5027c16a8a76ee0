// GPT-2's way to write bytes as text, so that a vocabulary of byte strings can be kept in JSON: the 188 bytes that are
// printable in Latin-1 stand for themselves, the other 68 for U+0100, U+0101 ... in ascending order. A space is "Ġ".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace nfp::text {

char32_t byte_level_code_point(uint8_t byte);

// The bytes that `token` (valid UTF-8) writes; nullopt when a character of it stands for no byte.
std::optional<std::string> byte_level_decode(std::string_view token);

std::string byte_level_encode(std::string_view bytes);

}  // namespace nfp::text
