// What this machine has, as far as it makes a difference here: read from the kernel's files and the program itself, and
// not judged yet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace nfp {

struct SystemFacts {
  std::string cpu;              // "Intel(R) Xeon(R) Processor"
  std::string best_kernels;     // "amx" ... "scalar": what the processor runs
  std::string kernels;          // what is used: NESTEDFP_CPU may ask for others
  std::string kernels_problem;  // why NESTEDFP_CPU cannot be followed; empty = it can
  int cpus = 0;                 // usable by this process
  int cores = 0;
  int nodes = 0;        // NUMA
  int online_cpus = 0;  // of the machine
  int quota = 0;        // CPUs' worth of time that the control group allows; 0 = no limit

  uint64_t memory = 0;     // bytes, of the machine or that the control group allows
  uint64_t available = 0;  // bytes that programs may still take
  std::string huge_pages;  // "always", "madvise", "never"; empty = the kernel has none

  bool cuda_built = false;
  std::string driver;              // of NVIDIA: "580.65.06"; empty = none is loaded, or /proc has no word of it
  bool driver_library = false;     // libcuda.so.1 is there: in a container where it was given the GPUs
  std::optional<std::string> gpu;  // the usable GPU
  std::string gpu_problem;         // why there is none
  bool grammars = false;           // guided decoding was built in
  std::string curl;                // "libcurl/7.88.1 ..."; empty = there is none
  std::string curl_problem;
  uint64_t open_files = 0;  // a process may ask for, as serve does
  std::string cache;        // folder of models
  bool cache_writable = false;
  uint64_t cache_free = 0;  // bytes on its disk
};

// `grammars`: the server's library says so. `root`: the folder that stands for /, for tests.
SystemFacts read_system_facts(bool grammars, const std::string& root = "");

// The chosen word of a kernel file such as "always [madvise] never".
std::string chosen_word(const std::string& text);
// Of /proc/driver/nvidia/version; empty where it names none.
std::string driver_version(const std::string& text);

}  // namespace nfp
