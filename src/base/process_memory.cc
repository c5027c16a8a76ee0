#include "base/process_memory.h"

#include <charconv>
#include <string>
#include <string_view>

#include "base/mapped_file.h"

namespace nfp {
namespace {

// The number after `key` in lines such as "VmRSS:	   12345 kB".
uint64_t kilobytes(std::string_view status, std::string_view key) {
  const size_t at = status.find(key);
  if (at == std::string_view::npos) return 0;
  const size_t digit = status.find_first_of("0123456789", at + key.size());
  if (digit == std::string_view::npos) return 0;
  uint64_t value = 0;
  std::from_chars(status.data() + digit, status.data() + status.size(), value);
  return value * 1024;
}

}  // namespace

ProcessMemory process_memory() {
  const Result<std::string> status = read_text_file("/proc/self/status");
  if (!status.ok()) return {};
  return {kilobytes(*status, "VmRSS:"), kilobytes(*status, "VmHWM:")};
}

uint64_t available_memory() {
  const Result<std::string> memory = read_text_file("/proc/meminfo");
  const uint64_t bytes = memory.ok() ? kilobytes(*memory, "MemAvailable:") : 0;
  return bytes > 0 ? bytes : uint64_t{8} << 30;
}

}  // namespace nfp
