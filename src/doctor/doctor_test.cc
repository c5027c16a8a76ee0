#include "doctor/doctor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>

namespace nfp {
namespace {

SystemFacts good_machine() {
  SystemFacts f;
  f.cpu = "a CPU";
  f.best_kernels = f.kernels = "avx512";
  f.cpus = f.online_cpus = 8;
  f.cores = 4;
  f.nodes = 1;
  f.memory = uint64_t{64} << 30;
  f.available = uint64_t{40} << 30;
  f.huge_pages = "madvise";
  f.cuda_built = true;
  f.driver = "580.65.06";
  f.driver_library = true;
  f.gpu = "NVIDIA H200";
  f.grammars = true;
  f.curl = "libcurl/7.88.1";
  f.open_files = 65536;
  f.cache = "/models";
  f.cache_writable = true;
  f.cache_free = uint64_t{50} << 30;
  return f;
}

Finding finding(const SystemFacts& facts, std::string_view id) {
  for (const Finding& f : diagnose(facts)) {
    if (f.id == id) return f;
  }
  ADD_FAILURE() << "there is no finding " << id;
  return {};
}

TEST(Doctor, AGoodMachineHasNothingToTell) {
  const auto all = diagnose(good_machine());
  EXPECT_EQ(all.size(), 10u);
  for (const Finding& f : all) {
    EXPECT_EQ(f.health, Health::kGood) << f.id;
    EXPECT_TRUE(f.cost.empty()) << f.id;
    EXPECT_FALSE(f.found.empty()) << f.id;
  }
}

TEST(Doctor, EveryLackHasItsCost) {
  struct Case {
    std::string_view id;
    Health health;
    void (*lose)(SystemFacts&);
    std::string_view cost;
  };
  const Case cases[] = {
      {"cpu_kernels", Health::kSlower, [](SystemFacts& f) { f.kernels = f.best_kernels = "avx2"; }, "AVX-512"},
      {"cpu_kernels", Health::kSlower, [](SystemFacts& f) { f.kernels = f.best_kernels = "scalar"; }, "no AVX2"},
      {"cpu_kernels", Health::kSlower, [](SystemFacts& f) { f.kernels = "avx2"; }, "runs avx512 kernels"},
      {"cpu_kernels", Health::kMissing, [](SystemFacts& f) { f.kernels_problem = "unknown"; }, "refused: unknown"},
      {"cpus", Health::kSlower, [](SystemFacts& f) { f.quota = 2; }, "the time of 2"},
      {"cpus", Health::kSlower, [](SystemFacts& f) { f.cpus = 3; }, "the machine has 8"},
      {"gpu", Health::kSlower,
       [](SystemFacts& f) {
         f.gpu.reset();
         f.gpu_problem = "no GPU";
       },
       "on the CPU"},
      {"gpu_driver", Health::kSlower,
       [](SystemFacts& f) {
         f.gpu.reset();
         f.driver = "";
       },
       "no GPU can be used"},
      {"gpu_driver", Health::kSlower,
       [](SystemFacts& f) {
         f.gpu.reset();
         f.driver = "535.1";
       },
       "580 or newer"},
      {"memory", Health::kMissing, [](SystemFacts& f) { f.available = 1000; }, "less than 1 GiB"},
      {"huge_pages", Health::kSlower, [](SystemFacts& f) { f.huge_pages = "never"; }, "twice as fast"},
      {"huge_pages", Health::kSlower, [](SystemFacts& f) { f.huge_pages = ""; }, "twice as fast"},
      {"grammars", Health::kMissing, [](SystemFacts& f) { f.grammars = false; }, "JSON schemas"},
      {"libcurl", Health::kMissing,
       [](SystemFacts& f) {
         f.curl = "";
         f.curl_problem = "none";
       },
       "pull cannot download: none"},
      {"model_cache", Health::kMissing, [](SystemFacts& f) { f.cache_writable = false; }, "cannot write"},
      {"model_cache", Health::kMissing, [](SystemFacts& f) { f.cache_free = 1000; }, "less than 1 GiB"},
      {"open_files", Health::kSlower, [](SystemFacts& f) { f.open_files = 1024; }, "1024 connections"},
  };
  for (const Case& c : cases) {
    SystemFacts facts = good_machine();
    c.lose(facts);
    const Finding f = finding(facts, c.id);
    EXPECT_EQ(f.health, c.health) << c.id;
    EXPECT_NE(f.cost.find(c.cost), std::string::npos) << f.cost;
  }
}

// A container's /proc has the host's driver, or no word of it where a sandbox has a /proc of its own.
TEST(Doctor, DriversOfContainers) {
  SystemFacts facts = good_machine();
  facts.driver = "";
  Finding f = finding(facts, "gpu_driver");
  EXPECT_EQ(f.health, Health::kGood);
  EXPECT_EQ(f.found.find("none"), std::string::npos) << f.found;  // beside a GPU that computes
  facts = good_machine();
  facts.gpu.reset();
  facts.gpu_problem = "no driver";
  facts.driver_library = false;
  f = finding(facts, "gpu_driver");
  EXPECT_EQ(f.health, Health::kSlower);
  EXPECT_EQ(f.found, "580.65.06");
  EXPECT_NE(f.cost.find("libcuda.so.1"), std::string::npos) << f.cost;
  EXPECT_NE(f.remedy.find("--gpus"), std::string::npos) << f.remedy;
}

TEST(Doctor, TheKernelsFilesAreRead) {
  EXPECT_EQ(chosen_word("always [madvise] never\n"), "madvise");
  EXPECT_EQ(chosen_word("nothing"), "");
  EXPECT_EQ(chosen_word("]["), "");
  EXPECT_EQ(driver_version(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\nGCC 12.3"),
            "580.65.06");
  EXPECT_EQ(driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22"), "550.54.14");
  EXPECT_EQ(driver_version(""), "");
}

// serve takes as many as the limit can be raised to.
TEST(Doctor, ALimitOfOpenFilesThatServeRaisesIsNone) {
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit low = before;
  low.rlim_cur = 128;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(read_system_facts(true).open_files, before.rlim_max);
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(Doctor, ThisMachine) {
  const SystemFacts facts = read_system_facts(true);
  EXPECT_GT(facts.cpus, 0);
  EXPECT_GT(facts.memory, facts.available / 2);
  EXPECT_FALSE(facts.kernels.empty());
  EXPECT_TRUE(facts.gpu || !facts.gpu_problem.empty());
  EXPECT_TRUE(facts.grammars);
}

}  // namespace
}  // namespace nfp
