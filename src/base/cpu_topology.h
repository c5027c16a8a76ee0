// Which CPUs this process may use, and which of them share a core or a memory node.
#pragma once

#include <string>
#include <vector>

namespace nfp {

struct CpuPlace {
  int cpu = 0;
  int core = 0;  // CPUs with the same number are hyper-threads of one core; unique over the machine
  int node = 0;  // NUMA node
};

// CPUs of the affinity mask. What the kernel does not tell (no sysfs) is taken as one node of single-threaded cores.
// `sysfs`: the folder that stands for /sys/devices/system.
std::vector<CpuPlace> usable_cpus(const std::string& sysfs = "/sys/devices/system");

// The same for CPUs that the caller names.
std::vector<CpuPlace> places_of(const std::vector<int>& cpus, const std::string& sysfs);

int count_cores(const std::vector<CpuPlace>& places);
int count_nodes(const std::vector<CpuPlace>& places);

// The CPU of each of `threads` threads. Neighbouring threads share a node, so that the contiguous share of the weights
// that a thread packs, and later reads, lies in memory near it; a core gets a second thread only when every core of
// its node has one. More threads than CPUs go round.
std::vector<int> thread_cpus(const std::vector<CpuPlace>& places, int threads);

// The CPUs that each of them may run on, near its share: that one where every core has a thread; else all of its node,
// as another program of few threads would choose the same ones.
std::vector<std::vector<int>> thread_bounds(const std::vector<CpuPlace>& places, int threads);

// CPUs of the affinity mask, no more than the control groups' quota: what programs should count.
int usable_cpu_count();

// CPUs' worth of time that the control group and those above it allow (cpu.max, or cpu.cfs_quota_us of version 1),
// rounded up; 0 = no limit. `root`: the folder that stands for /, for tests.
int cpu_quota(const std::string& root = "");

}  // namespace nfp
