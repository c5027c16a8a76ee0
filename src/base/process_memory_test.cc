#include "base/process_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/testing/scratch_test.h"

namespace nfp {
namespace {

// A folder that looks like / of some machine, as far as it tells of memory.
class MemoryOfAGroup : public testing::ScratchTest {
 protected:
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name)) << text << "\n";
  }
  // 64 GiB of which 40 are free.
  void machine() { write("proc/meminfo", "MemTotal:       67108864 kB\nMemAvailable:   41943040 kB"); }
};

constexpr uint64_t kGiB = uint64_t{1} << 30;

TEST_F(MemoryOfAGroup, WithoutALimitTheMachines) {
  EXPECT_EQ(available_memory(dir_), 8 * kGiB);  // the kernel does not tell
  machine();
  EXPECT_EQ(available_memory(dir_), 40 * kGiB);
  EXPECT_EQ(memory_limit(dir_), 0u);
  write("sys/fs/cgroup/memory.max", "max");
  write("sys/fs/cgroup/memory.current", std::to_string(3 * kGiB));
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(3 * kGiB));
  EXPECT_EQ(available_memory(dir_), 40 * kGiB);
  EXPECT_EQ(memory_limit(dir_), 0u);
}

TEST_F(MemoryOfAGroup, Version2) {
  machine();
  write("sys/fs/cgroup/memory.max", std::to_string(10 * kGiB));
  EXPECT_EQ(memory_limit(dir_), 10 * kGiB);
  write("sys/fs/cgroup/memory.current", std::to_string(7 * kGiB));
  EXPECT_EQ(available_memory(dir_), 3 * kGiB);
  // 4 GiB of it are pages of files.
  write("sys/fs/cgroup/memory.stat",
        "anon 3221225472\nfile 4294967296\ninactive_file 3221225472\nactive_file 1073741824");
  EXPECT_EQ(available_memory(dir_), 7 * kGiB);
  write("sys/fs/cgroup/memory.current", std::to_string(15 * kGiB));  // the limit was lowered
  EXPECT_EQ(available_memory(dir_), 0u);
  write("sys/fs/cgroup/memory.max", std::to_string(1000 * kGiB));  // more than the machine has free
  EXPECT_EQ(available_memory(dir_), 40 * kGiB);
}

TEST_F(MemoryOfAGroup, Version1) {
  machine();
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(10 * kGiB));
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(7 * kGiB));
  write("sys/fs/cgroup/memory/memory.stat",
        "inactive_file 1\nactive_file 1\ntotal_inactive_file 1073741824\ntotal_active_file 0");
  EXPECT_EQ(memory_limit(dir_), 10 * kGiB);
  EXPECT_EQ(available_memory(dir_), 4 * kGiB);
}

TEST_F(MemoryOfAGroup, GroupsAboveHaveLimitsToo) {
  machine();
  write("proc/self/cgroup", "1:name=systemd:/\n0::/user.slice/job.scope");
  write("sys/fs/cgroup/user.slice/job.scope/memory.max", "max");
  write("sys/fs/cgroup/user.slice/memory.max", std::to_string(12 * kGiB));
  write("sys/fs/cgroup/user.slice/memory.current", std::to_string(9 * kGiB));
  write("sys/fs/cgroup/user.slice/memory.stat", "inactive_file 1073741824\nactive_file 0");
  EXPECT_EQ(memory_limit(dir_), 12 * kGiB);
  EXPECT_EQ(available_memory(dir_), 4 * kGiB);
  // The lowest limit, and the least that one of them leaves.
  write("sys/fs/cgroup/user.slice/job.scope/memory.max", std::to_string(10 * kGiB));
  write("sys/fs/cgroup/user.slice/job.scope/memory.current", std::to_string(1 * kGiB));
  EXPECT_EQ(memory_limit(dir_), 10 * kGiB);
  EXPECT_EQ(available_memory(dir_), 4 * kGiB);
}

TEST_F(MemoryOfAGroup, GroupsThatAContainerDoesNotSee) {
  machine();
  write("sys/fs/cgroup/memory.max", std::to_string(10 * kGiB));
  write("sys/fs/job/memory.max", std::to_string(5 * kGiB));
  for (const char* path : {"/../job", "/docker/0123", "/", "", "docker"}) {
    write("proc/self/cgroup", std::string("0::") + path);
    EXPECT_EQ(memory_limit(dir_), 10 * kGiB) << path;
  }
}

TEST_F(MemoryOfAGroup, Version1BelowOthers) {
  machine();
  write("proc/self/cgroup", "7:memory,hugetlb:/a/b\n0::/c");
  write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712");
  write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", std::to_string(6 * kGiB));
  EXPECT_EQ(memory_limit(dir_), 6 * kGiB);
  EXPECT_EQ(available_memory(dir_), 6 * kGiB);
}

TEST(ProcessMemory, OfThisProcess) {
  const ProcessMemory memory = process_memory();
  EXPECT_GT(memory.resident, 0u);
  EXPECT_GE(memory.peak, memory.resident);
  EXPECT_GT(available_memory(), 0u);
}

}  // namespace
}  // namespace nfp
