#include "server/metrics/process_facts.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace nfp::server {
namespace {

// Seconds since 1970 at which the machine started (/proc/stat, btime).
std::optional<double> boot_time() {
  std::ifstream file("/proc/stat");
  for (std::string word; file >> word;) {
    double seconds = 0;
    if (word == "btime" && file >> seconds) return seconds;
  }
  return std::nullopt;
}

}  // namespace

ProcessFacts process_facts() {
  ProcessFacts facts;
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  // The name, in parentheses, may hold anything; the state is the third field of proc(5), and the first behind it.
  if (const size_t name_end = text.rfind(')'); name_end != std::string::npos) {
    constexpr int kStartTime = 22, kVirtualSize = 23;
    std::istringstream rest(text.substr(name_end + 1));
    std::string field;
    for (int number = 3; rest >> field; ++number) {
      if (number == kStartTime) {
        const auto boot = boot_time();
        if (boot) facts.start_s = *boot + std::stod(field) / static_cast<double>(::sysconf(_SC_CLK_TCK));
      } else if (number == kVirtualSize) {
        facts.virtual_bytes = std::stoull(field);
        break;
      }
    }
  }
  std::error_code failed;
  uint64_t files = 0;
  for (auto entry = std::filesystem::directory_iterator("/proc/self/fd", failed);
       !failed && entry != std::filesystem::directory_iterator(); entry.increment(failed)) {
    ++files;
  }
  if (!failed) facts.open_files = files;
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) facts.most_files = limit.rlim_cur;
  return facts;
}

}  // namespace nfp::server
