#include "doctor/system_facts.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "backend/devices/devices.h"
#include "base/cpu_topology.h"
#include "base/instruction_set.h"
#include "base/mapped_file.h"
#include "base/process_memory.h"
#include "hub/libcurl.h"
#include "io/hub_cache.h"

namespace nfp {

namespace fs = std::filesystem;

namespace {

constexpr std::array<std::string_view, kInstructionSets> kSetNames = {
    "scalar", "avx2", "avx512", "avx512gfni", "avx512bf16", "avx512fp16", "amx"};

std::string name_of(InstructionSet set) { return std::string(kSetNames[static_cast<size_t>(set)]); }

std::string file_text(const std::string& path) {
  auto text = read_text_file(path, size_t{1} << 20);
  return text.ok() ? std::move(text).value() : "";
}

void read_cpu(SystemFacts& facts, const std::string& root) {
  facts.cpu = cpu_name();
  const auto best = choose_instruction_set("", detect_features());
  facts.best_kernels = best.ok() ? name_of(*best) : "scalar";
  const auto used = choose_instruction_set("");
  facts.kernels = used.ok() ? name_of(*used) : facts.best_kernels;
  if (!used.ok()) facts.kernels_problem = used.error().message;
  const auto places = usable_cpus(root + "/sys/devices/system");
  facts.cpus = static_cast<int>(places.size());
  facts.cores = count_cores(places);
  facts.nodes = count_nodes(places);
  facts.online_cpus = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.quota = cpu_quota(root);
}

void read_gpu(SystemFacts& facts, const std::string& root) {
#ifdef NFP_HAVE_CUDA
  facts.cuda_built = true;
#endif
  facts.driver = driver_version(file_text(root + "/proc/driver/nvidia/version"));
  const auto backend = make_backend("cuda", {});
  if (backend.ok()) {
    facts.gpu = (*backend)->info().device;
  } else {
    facts.gpu_problem = backend.error().message;
  }
  facts.driver_library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr;
}

void read_cache(SystemFacts& facts) {
  facts.cache = hub_cache();
  // The folder may be made when the first model comes: what counts is the nearest one that is there.
  std::error_code code;
  fs::path there = fs::absolute(facts.cache, code);
  while (!there.empty() && !fs::exists(there, code) && there != there.parent_path()) there = there.parent_path();
  facts.cache_writable = ::access(there.c_str(), W_OK | X_OK) == 0;
  if (const auto space = fs::space(there, code); !code) facts.cache_free = space.available;
}

}  // namespace

std::string chosen_word(const std::string& text) {
  const size_t open = text.find('['), close = text.find(']');
  return open == std::string::npos || close == std::string::npos || close < open
             ? ""
             : text.substr(open + 1, close - open - 1);
}

std::string driver_version(const std::string& text) {
  // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (...)"
  const std::string line = text.substr(0, text.find('\n'));
  for (size_t begin = 0; begin < line.size();) {
    const size_t end = std::min(line.find(' ', begin), line.size());
    std::string word = line.substr(begin, end - begin);
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
    begin = end + 1;
  }
  return "";
}

SystemFacts read_system_facts(bool grammars, const std::string& root) {
  SystemFacts facts;
  read_cpu(facts, root);
  const auto pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGESIZE);
  if (pages > 0 && page > 0) facts.memory = static_cast<uint64_t>(pages) * static_cast<uint64_t>(page);
  if (const uint64_t limit = memory_limit(root); limit > 0) facts.memory = std::min(facts.memory, limit);
  facts.available = available_memory(root);
  facts.huge_pages = chosen_word(file_text(root + "/sys/kernel/mm/transparent_hugepage/enabled"));
  read_gpu(facts, root);
  facts.grammars = grammars;
  if (const auto curl = libcurl(); curl.ok()) {
    const std::string version = (*curl)->version();
    facts.curl = version.substr(0, version.find(' '));
  } else {
    facts.curl_problem = curl.error().message;
  }
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) facts.open_files = limit.rlim_max;
  read_cache(facts);
  return facts;
}

}  // namespace nfp
