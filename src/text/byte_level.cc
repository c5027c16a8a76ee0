#include "text/byte_level.h"

#include <array>

#include "text/utf8.h"

namespace nfp::text {
namespace {

constexpr bool stands_for_itself(unsigned byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Tables {
  std::array<char16_t, 256> code_point{};
  std::array<int16_t, 256 + 68> byte{};  // -1: stands for no byte
};

constexpr Tables make_tables() {
  Tables tables;
  tables.byte.fill(-1);
  char16_t next = 256;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char16_t code_point = stands_for_itself(byte) ? static_cast<char16_t>(byte) : next++;
    tables.code_point[byte] = code_point;
    tables.byte[code_point] = static_cast<int16_t>(byte);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

char32_t byte_level_code_point(uint8_t byte) { return kTables.code_point[byte]; }

std::optional<std::string> byte_level_decode(std::string_view token) {
  std::string bytes;
  bytes.reserve(token.size());
  for (size_t i = 0; i < token.size();) {
    const char32_t code_point = next_code_point(token, i);
    if (code_point >= kTables.byte.size() || kTables.byte[code_point] < 0) return std::nullopt;
    bytes += static_cast<char>(kTables.byte[code_point]);
  }
  return bytes;
}

std::string byte_level_encode(std::string_view bytes) {
  std::string token;
  token.reserve(bytes.size() * 2);
  for (const char byte : bytes) append_utf8(token, byte_level_code_point(static_cast<uint8_t>(byte)));
  return token;
}

}  // namespace nfp::text
