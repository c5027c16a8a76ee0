#include "base/cpu_topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "base/testing/scratch_folder.h"
#include "base/thread_pool.h"

namespace nfp {
namespace {

// A folder that looks like /sys/devices/system of some machine.
class Topology : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text << "\n";
  }
  // Two nodes of four cores of two threads: CPU c and c + 8 share a core, cores 0..3 are of node 0.
  std::vector<CpuPlace> two_nodes() {
    write("/node/node0/cpulist", "0-3,8-11");
    write("/node/node1/cpulist", "4-7,12-15");
    write("/node/has_cpu", "0-1");
    for (int c = 0; c < 16; ++c) {
      const std::string list = std::to_string(c % 8) + "," + std::to_string(c % 8 + 8);
      write("/cpu/cpu" + std::to_string(c) + "/topology/thread_siblings_list", list);
    }
    std::vector<int> all(16);
    std::iota(all.begin(), all.end(), 0);
    return places_of(all, root_);
  }
  const testing::ScratchFolder folder_;
  const std::string root_ = folder_.path();
};

TEST_F(Topology, NodesCoresAndHyperThreads) {
  const auto places = two_nodes();
  ASSERT_EQ(places.size(), 16u);
  EXPECT_EQ(count_cores(places), 8);
  EXPECT_EQ(count_nodes(places), 2);
  EXPECT_EQ(places[9].core, 1);
  EXPECT_EQ(places[9].node, 0);
  EXPECT_EQ(places[12].node, 1);
}

TEST_F(Topology, ThreadsFillCoresBeforeHyperThreadsAndNeighboursShareANode) {
  const auto places = two_nodes();
  EXPECT_EQ(thread_cpus(places, 8), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(thread_cpus(places, 4), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(thread_cpus(places, 16), (std::vector<int>{0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15}));
  for (int threads = 1; threads <= 40; ++threads) {
    const auto cpus = thread_cpus(places, threads);
    ASSERT_EQ(cpus.size(), static_cast<size_t>(threads));
    int switches = 0;
    for (size_t i = 1; i < cpus.size(); ++i) switches += cpus[i] % 8 / 4 != cpus[i - 1] % 8 / 4;
    EXPECT_LE(switches, 1) << threads;
    EXPECT_EQ(std::set<int>(cpus.begin(), cpus.end()).size(), std::min(cpus.size(), places.size())) << threads;
  }
}

// Two servers of four threads each: both would have the first two cores of each node.
TEST_F(Topology, FewThreadsAreBoundToTheirNodeAndNotToACpu) {
  const auto places = two_nodes();
  const std::vector<int> first = {0, 1, 2, 3, 8, 9, 10, 11}, second = {4, 5, 6, 7, 12, 13, 14, 15};
  auto bounds = thread_bounds(places, 4);
  for (auto& cpus : bounds) std::sort(cpus.begin(), cpus.end());
  EXPECT_EQ(bounds, (std::vector<std::vector<int>>{first, first, second, second}));
  for (const int threads : {8, 16}) {  // every core has one
    const auto cpus = thread_cpus(places, threads);
    const auto own = thread_bounds(places, threads);
    ASSERT_EQ(own.size(), cpus.size());
    for (size_t i = 0; i < own.size(); ++i) EXPECT_EQ(own[i], std::vector<int>{cpus[i]});
  }
}

// What a thread packs it touches first, so its pages are of its node; it must read the same part again.
TEST_F(Topology, AWeightsSharesFallIntoOnePieceANode) {
  const auto places = two_nodes();
  for (const int threads : {2, 6, 8, 16}) {
    const auto cpus = thread_cpus(places, threads);
    int64_t boundary = 0;  // where the second node's share begins
    for (int t = 0; t < threads; ++t) {
      const Range share = partition(1000, t, threads, 2);
      const int node = cpus[static_cast<size_t>(t)] % 8 / 4;
      if (node == 0) boundary = share.end;
      EXPECT_EQ(node == 0, share.begin < boundary) << threads << " thread " << t;
    }
    EXPECT_NEAR(static_cast<double>(boundary), 500, threads) << threads;  // shares differ by up to two panels
  }
}

TEST_F(Topology, WithoutSysfsEachCpuIsACore) {
  const auto places = places_of({3, 5}, root_ + "/nothing");
  ASSERT_EQ(places.size(), 2u);
  EXPECT_EQ(count_cores(places), 2);
  EXPECT_EQ(count_nodes(places), 1);
  EXPECT_EQ(thread_cpus(places, 3), (std::vector<int>{3, 5, 3}));
  EXPECT_FALSE(usable_cpus().empty());
}

TEST_F(Topology, QuotaOfTheControlGroup) {
  EXPECT_EQ(cpu_quota(root_), 0);
  write("/sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("/sys/fs/cgroup/cpu.max", "150000 100000");
  EXPECT_EQ(cpu_quota(root_), 2);
  // The group's own, and those of all above it.
  write("/proc/self/cgroup", "0::/a.slice/b.scope");
  write("/sys/fs/cgroup/cpu.max", "max 100000");
  write("/sys/fs/cgroup/a.slice/cpu.max", "300000 100000");
  write("/sys/fs/cgroup/a.slice/b.scope/cpu.max", "max 100000");
  EXPECT_EQ(cpu_quota(root_), 3);
  write("/sys/fs/cgroup/a.slice/b.scope/cpu.max", "100000 100000");
  EXPECT_EQ(cpu_quota(root_), 1);
}

TEST_F(Topology, QuotaOfVersion1) {
  write("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/b\n0::/");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "250000");
  write("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cpu_quota(root_), 3);
}

}  // namespace
}  // namespace nfp
