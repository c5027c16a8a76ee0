#include "base/process_memory.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "base/byte_size.h"
#include "base/control_group.h"
#include "base/log.h"
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

// Files of control groups, of version 2 and of 1.
struct MemoryFiles {
  const char *controller, *limit, *used, *stat;
  const char *inactive, *active;  // lines of `stat`, bytes of files' pages
};
constexpr std::array<MemoryFiles, 2> kMemoryFiles = {
    {{"", "/memory.max", "/memory.current", "/memory.stat", "inactive_file ", "active_file "},
     {"memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "/memory.stat", "total_inactive_file ",
      "total_active_file "}}};

// Calls visit(files, folder, limit) for each control group that has a limit.
template <typename Visit>
void for_each_limit(const std::string& root, Visit visit) {
  for (const MemoryFiles& files : kMemoryFiles) {
    for (const std::string& folder : control_groups(files.controller, root)) {
      // No limit is "max", or in version 1 about 2^63.
      const auto limit = number_in(folder + files.limit);
      if (limit && *limit < uint64_t{1} << 62) visit(files, folder, *limit);
    }
  }
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
  for_each_limit(root, [&](const MemoryFiles& files, const std::string& folder, uint64_t limit) {
    // Files' pages count as used, and the kernel drops them where memory is short: MemAvailable takes them as free too.
    const Result<std::string> stat = read_text_file(folder + files.stat);
    const uint64_t pages = stat.ok() ? number_of(*stat, files.inactive) + number_of(*stat, files.active) : 0;
    const uint64_t used = number_in(folder + files.used).value_or(0);
    bytes = std::min(bytes, limit - std::min(limit, used - std::min(used, pages)));
  });
  return bytes;
}

void warn_of_memory(std::string_view taker, uint64_t bytes, std::string_view remedy) {
  const uint64_t free = available_memory();
  if (bytes <= free) return;
  log::warn(
      "{} {}, and {} of memory are free here: the system may end this program without a word; {}, or "
      "use more memory (a container's limit counts)",
      taker, human_bytes(bytes), human_bytes(free), remedy);
}

uint64_t memory_limit(const std::string& root) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for_each_limit(root, [&](const MemoryFiles&, const std::string&, uint64_t limit) { least = std::min(least, limit); });
  return least == std::numeric_limits<uint64_t>::max() ? 0 : least;
}

}  // namespace nfp
