#include "base/process_memory.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "base/mapped_file.h"

namespace nfp {
namespace {

// The number at the beginning of the text, behind blanks.
std::optional<uint64_t> leading_number(std::string_view text) {
  const size_t digit = std::min(text.find_first_not_of(" \t"), text.size());
  uint64_t value = 0;
  if (std::from_chars(text.data() + digit, text.data() + text.size(), value).ec != std::errc()) return std::nullopt;
  return value;
}

std::optional<uint64_t> number_in(const std::string& path) {
  const Result<std::string> text = read_text_file(path);
  return text.ok() ? leading_number(*text) : std::nullopt;
}

// The number in the line that begins with `key`.
uint64_t number_of(std::string_view text, std::string_view key) {
  for (size_t at = 0; at < text.size(); at = std::min(text.find('\n', at), text.size() - 1) + 1) {
    if (text.substr(at).starts_with(key)) return leading_number(text.substr(at + key.size())).value_or(0);
  }
  return 0;
}

// In lines such as "VmRSS:	   12345 kB".
uint64_t kilobytes(std::string_view text, std::string_view key) { return 1024 * number_of(text, key); }

// The files of a control group: version 2, and 1. As for the CPUs' quota: a container sees its own group there.
struct MemoryGroup {
  const char *limit, *used, *stat, *inactive, *active;  // the last two: lines of `stat`, bytes of files' pages
};
constexpr std::array<MemoryGroup, 2> kMemoryGroups = {
    {{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file ",
      "active_file "},
     {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
      "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ", "total_active_file "}}};

// Nothing where there is no limit: "max", or in version 1 about 2^63.
std::optional<uint64_t> limit_of(const MemoryGroup& group, const std::string& root) {
  const auto limit = number_in(root + group.limit);
  return limit && *limit < uint64_t{1} << 62 ? limit : std::nullopt;
}

}  // namespace

ProcessMemory process_memory() {
  const Result<std::string> status = read_text_file("/proc/self/status");
  if (!status.ok()) return {};
  return {kilobytes(*status, "VmRSS:"), kilobytes(*status, "VmHWM:")};
}

uint64_t available_memory(const std::string& root) {
  const Result<std::string> memory = read_text_file(root + "/proc/meminfo");
  uint64_t bytes = memory.ok() ? kilobytes(*memory, "MemAvailable:") : 0;
  if (bytes == 0) bytes = uint64_t{8} << 30;
  for (const MemoryGroup& group : kMemoryGroups) {
    const auto limit = limit_of(group, root);
    if (!limit) continue;
    // Files' pages count as used, and the kernel drops them where memory is short: MemAvailable takes them as free too.
    const Result<std::string> stat = read_text_file(root + group.stat);
    const uint64_t files = stat.ok() ? number_of(*stat, group.inactive) + number_of(*stat, group.active) : 0;
    const uint64_t used = number_in(root + group.used).value_or(0);
    bytes = std::min(bytes, *limit - std::min(*limit, used - std::min(used, files)));
  }
  return bytes;
}

uint64_t memory_limit(const std::string& root) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const MemoryGroup& group : kMemoryGroups) least = std::min(least, limit_of(group, root).value_or(least));
  return least == std::numeric_limits<uint64_t>::max() ? 0 : least;
}

}  // namespace nfp
