#include "doctor/doctor.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/byte_size.h"

namespace nfp {
namespace {

// Connections of serve's --max-connections, and what else a server has open.
constexpr uint64_t kWantedFiles = 4096 + 256;
constexpr uint64_t kLittle = uint64_t{1} << 30;  // bytes: the smallest models alone fit

Finding cpu_kernels(const SystemFacts& f) {
  Finding out{"cpu_kernels", "CPU kernels", Health::kGood, fmt::format("{} on {}", f.kernels, f.cpu), "", ""};
  if (!f.kernels_problem.empty()) {
    out.health = Health::kMissing;
    out.cost = "every verb that computes is refused: " + f.kernels_problem;
    out.remedy = "unset NESTEDFP_CPU";
  } else if (f.kernels != f.best_kernels) {
    out.health = Health::kSlower;
    out.cost = fmt::format("this processor runs {} kernels", f.best_kernels);
    out.remedy = "unset NESTEDFP_CPU";
  } else if (f.kernels == "scalar") {
    out.health = Health::kSlower;
    out.cost = "no AVX2: the portable loops compute, which are there to be right and not to be fast";
  } else if (f.kernels == "avx2") {
    out.health = Health::kSlower;
    // docs/cpu.md: the demo model on one machine, with AVX-512 and with NESTEDFP_CPU=avx2.
    out.cost =
        "no AVX-512: where both were measured, AVX2 gave 0.76 of its decode and 0.57 of its prefill speed in FP16";
  }
  return out;
}

Finding cpus(const SystemFacts& f) {
  Finding out{"cpus", "CPUs", Health::kGood, "", "", ""};
  out.found = fmt::format("{} usable, {} cores, {} memory node{}", f.cpus, f.cores, f.nodes, f.nodes == 1 ? "" : "s");
  if (f.quota > 0 && f.quota < f.cpus) {
    out.health = Health::kSlower;
    out.cost = fmt::format("the control group allows the time of {} of them", f.quota);
    out.remedy = "raise the container's CPU limit";
  } else if (f.cpus < f.online_cpus) {
    out.health = Health::kSlower;
    out.cost = fmt::format("the machine has {}; this process may use {} of them", f.online_cpus, f.cpus);
    out.remedy = "see taskset, or the container's cpuset";
  }
  return out;
}

Finding gpu(const SystemFacts& f) {
  Finding out{"gpu", "GPU", Health::kGood, "", "", ""};
  if (f.gpu) {
    out.found = *f.gpu;
    return out;
  }
  out.health = Health::kSlower;
  out.found = f.gpu_problem;
  // docs/gpu.md
  out.cost =
      "everything computes on the CPU; an H200 decodes a model of 8 billion parameters at 3.8 ms a token in FP16, "
      "2.3 ms in FP8";
  if (!f.cuda_built && !f.driver.empty()) out.remedy = "build with the CUDA 13 toolkit (nvcc on the path)";
  return out;
}

Finding driver(const SystemFacts& f) {
  Finding out{"gpu_driver", "NVIDIA driver", Health::kGood, f.driver, "", ""};
  if (f.driver.empty()) out.found = f.gpu ? "there, of a version that is not shown here" : "none loaded";
  if (f.gpu) return out;
  if (f.driver.empty()) {
    out.health = Health::kSlower;
    out.cost = "no GPU can be used";
    return out;
  }
  if (!f.driver_library) {
    out.health = Health::kSlower;
    out.cost = "its library, libcuda.so.1, is not here: no GPU can be used";
    out.remedy = "start the container with its GPUs (docker run --gpus all); outside of one, install that library";
    return out;
  }
  const int major = std::atoi(f.driver.c_str());
  if (f.cuda_built && major < 580) {  // CUDA 13's release notes
    out.health = Health::kSlower;
    out.cost = "CUDA 13 programs need 580 or newer: no GPU can be used";
    out.remedy = "install a newer driver";
  }
  return out;
}

Finding memory(const SystemFacts& f) {
  Finding out{"memory", "memory", Health::kGood, "", "", ""};
  out.found = fmt::format("{}, {} free", human_bytes(f.memory), human_bytes(f.available));
  // Two bytes a weight in both precisions; a quarter is left for the KV cache and everything else.
  const double billions = static_cast<double>(f.available) * 0.75 / 2 / 1e9;
  out.found += fmt::format(": room for about {:.1f} billion parameters in both precisions", billions);
  if (f.available < kLittle) {
    out.health = Health::kMissing;
    out.cost = "less than 1 GiB is free: only the smallest models load";
    out.remedy = "end other programs, or raise the container's memory limit";
  }
  return out;
}

Finding huge_pages(const SystemFacts& f) {
  Finding out{"huge_pages", "huge pages", Health::kGood, "", "", ""};
  out.found = f.huge_pages.empty() ? "the kernel has none" : fmt::format("transparent, '{}'", f.huge_pages);
  if (f.huge_pages == "always" || f.huge_pages == "madvise") return out;
  out.health = Health::kSlower;
  // src/backend/cpu/huge_pages.h
  out.cost = "on the machines measured, weights are read from 2 MB pages twice as fast as from 4 KB pages";
  if (!f.huge_pages.empty()) {
    out.remedy = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
  }
  return out;
}

Finding grammars(const SystemFacts& f) {
  Finding out{"grammars", "grammars (xgrammar)", Health::kGood, f.grammars ? "built in" : "not built in", "", ""};
  if (f.grammars) return out;
  out.health = Health::kMissing;
  out.cost =
      "serve answers requests for JSON schemas, regular expressions, grammars and forced tool calls with an error";
  out.remedy = "run scripts/build-xgrammar, configure and build again";
  return out;
}

Finding downloads(const SystemFacts& f) {
  Finding out{"libcurl", "downloads (libcurl)", Health::kGood, f.curl.empty() ? "not found" : f.curl, "", ""};
  if (!f.curl.empty()) return out;
  out.health = Health::kMissing;
  out.cost = "nestedfp pull cannot download: " + f.curl_problem;
  out.remedy = "apt-get install libcurl4";
  return out;
}

Finding cache(const SystemFacts& f) {
  Finding out{"model_cache",
              "model cache",
              Health::kGood,
              fmt::format("{}, {} free", f.cache, human_bytes(f.cache_free)),
              "",
              ""};
  if (!f.cache_writable) {
    out.health = Health::kMissing;
    out.cost = "nestedfp pull cannot write there";
    out.remedy = "set HF_HUB_CACHE or HF_HOME to a folder of yours";
  } else if (f.cache_free < kLittle) {
    out.health = Health::kMissing;
    out.cost = "less than 1 GiB is free: nestedfp pull has room for the smallest models only";
    out.remedy = "make room there, or set HF_HUB_CACHE or HF_HOME to a folder on another disk";
  }
  return out;
}

Finding open_files(const SystemFacts& f) {
  Finding out{"open_files", "open files", Health::kGood, fmt::format("{} at most", f.open_files), "", ""};
  if (f.open_files >= kWantedFiles) return out;
  out.health = Health::kSlower;
  out.cost = fmt::format("serve holds fewer than {} connections at once", f.open_files);
  out.remedy = "ulimit -n 65536, or LimitNOFILE= in the service's unit";
  return out;
}

}  // namespace

std::string_view name_of(Health health) {
  constexpr std::string_view kNames[] = {"good", "slower", "missing"};
  return kNames[static_cast<size_t>(health)];
}

std::vector<Finding> diagnose(const SystemFacts& facts) {
  return {cpu_kernels(facts), cpus(facts),     gpu(facts),       driver(facts), memory(facts),
          huge_pages(facts),  grammars(facts), downloads(facts), cache(facts),  open_files(facts)};
}

}  // namespace nfp
