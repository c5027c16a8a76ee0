#include "base/cpu_topology.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <tuple>

#include "base/control_group.h"

namespace nfp {
namespace {

// "0-3,8" as 0 1 2 3 8; what is not a list gives nothing.
std::vector<int> parse_cpu_list(const std::string& path) {
  std::ifstream file(path);
  std::vector<int> cpus;
  for (int first = 0; file >> first;) {
    int last = first;
    if (file.peek() == '-') {
      file.get();
      if (!(file >> last)) break;
    }
    for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) cpus.push_back(cpu);
    if (file.peek() != ',') break;
    file.get();
  }
  return cpus;
}

std::vector<int> affinity_mask() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

}  // namespace

std::vector<CpuPlace> places_of(const std::vector<int>& cpus, const std::string& sysfs) {
  std::map<int, int> node_of;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(sysfs + "/node", ignored)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node") || name.size() == 4 || name.find_first_not_of("0123456789", 4) != std::string::npos) {
      continue;
    }
    for (const int cpu : parse_cpu_list(entry.path().string() + "/cpulist")) node_of[cpu] = std::stoi(name.substr(4));
  }
  std::vector<CpuPlace> places;
  for (const int cpu : cpus) {
    // A core is named by the first of its hyper-threads.
    const auto siblings = parse_cpu_list(fmt::format("{}/cpu/cpu{}/topology/thread_siblings_list", sysfs, cpu));
    const auto node = node_of.find(cpu);
    places.push_back({cpu, siblings.empty() ? cpu : *std::min_element(siblings.begin(), siblings.end()),
                      node == node_of.end() ? 0 : node->second});
  }
  return places;
}

std::vector<CpuPlace> usable_cpus(const std::string& sysfs) { return places_of(affinity_mask(), sysfs); }

int count_cores(const std::vector<CpuPlace>& places) {
  std::set<int> cores;
  for (const CpuPlace& place : places) cores.insert(place.core);
  return static_cast<int>(cores.size());
}

int count_nodes(const std::vector<CpuPlace>& places) {
  std::set<int> nodes;
  for (const CpuPlace& place : places) nodes.insert(place.node);
  return static_cast<int>(nodes.size());
}

std::vector<int> thread_cpus(const std::vector<CpuPlace>& places, int threads) {
  if (places.empty()) return {};
  // Of each node: first threads of cores, then second ones, ...
  std::map<int, std::vector<int>> nodes;
  std::vector<std::tuple<int, int, int, int>> order;  // node, how many of the core came before, core, cpu
  order.reserve(places.size());
  std::map<int, int> seen;
  for (const CpuPlace& place : places) order.emplace_back(place.node, seen[place.core]++, place.core, place.cpu);
  std::sort(order.begin(), order.end());
  for (const auto& [node, turn, core, cpu] : order) nodes[node].push_back(cpu);
  // Threads go to nodes in proportion to their CPUs.
  std::vector<int> chosen;
  size_t before = 0;
  for (const auto& [node, cpus] : nodes) {
    const size_t begin = before * static_cast<size_t>(threads) / places.size();
    before += cpus.size();
    const size_t end = before * static_cast<size_t>(threads) / places.size();
    for (size_t i = 0; i < end - begin; ++i) chosen.push_back(cpus[i % cpus.size()]);
  }
  return chosen;
}

std::vector<std::vector<int>> thread_bounds(const std::vector<CpuPlace>& places, int threads) {
  const bool own = threads >= count_cores(places);
  std::map<int, int> node_of;
  std::map<int, std::vector<int>> nodes;
  for (const CpuPlace& place : places) {
    node_of[place.cpu] = place.node;
    nodes[place.node].push_back(place.cpu);
  }
  std::vector<std::vector<int>> bounds;
  for (const int cpu : thread_cpus(places, threads)) {
    bounds.push_back(own ? std::vector<int>{cpu} : nodes[node_of[cpu]]);
  }
  return bounds;
}

int usable_cpu_count() {
  const auto cpus = static_cast<int>(affinity_mask().size());
  const int quota = cpu_quota();
  return quota > 0 ? std::min(quota, cpus) : cpus;
}

int cpu_quota(const std::string& root) {
  double least = 0;
  // "max 100000" where there is no limit, so that reading the number fails; in version 1 -1.
  const auto take = [&](std::istream& quota_from, std::istream& period_from) {
    double quota = 0, period = 0;
    if (!(quota_from >> quota) || !(period_from >> period) || quota <= 0 || period <= 0) return;
    least = least > 0 ? std::min(least, quota / period) : quota / period;
  };
  for (const std::string& folder : control_groups("", root)) {
    std::ifstream both(folder + "/cpu.max");
    take(both, both);
  }
  for (const std::string& folder : control_groups("cpu", root)) {
    std::ifstream quota(folder + "/cpu.cfs_quota_us"), period(folder + "/cpu.cfs_period_us");
    take(quota, period);
  }
  return static_cast<int>(std::ceil(least));
}

}  // namespace nfp
