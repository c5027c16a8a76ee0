// Counts of bytes as people read them.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace nfp {

// "1.23 GiB"
inline std::string human_bytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= (uint64_t{1} << 30)) return fmt::format("{:.2f} GiB", value / (1 << 30));
  if (bytes >= (1 << 20)) return fmt::format("{:.1f} MiB", value / (1 << 20));
  return fmt::format("{:.1f} KiB", value / 1024);
}

}  // namespace nfp
