#include "base/instruction_set.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace nfp {

#if defined(__x86_64__)
namespace {

struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // zeros where the leaf does not exist
  return r;
}

bool bit(uint32_t value, int index) { return ((value >> index) & 1u) != 0; }

// XCR0: which register states the operating system saves (Intel SDM volume 1, 13.3).
uint32_t saved_states() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Whether this process may use AMX's tiles: Linux saves their 8 KB for those processes only that asked.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

CpuFeatures detect_features() {
  CpuFeatures f;
  const Registers one = cpuid(1, 0);
  if (!bit(one.c, 27)) return f;  // OSXSAVE
  const uint32_t states = saved_states();
  const bool saves_ymm = (states & 0x6u) == 0x6u;
  const bool saves_zmm = (states & 0xe6u) == 0xe6u;
  const Registers seven = cpuid(7, 0);
  const Registers seven_one = cpuid(7, 1);
  f.avx2 = saves_ymm && bit(one.c, 28) && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5);
  f.avx512 = f.avx2 && saves_zmm && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);
  f.avx512_gfni = f.avx512 && bit(seven.c, 8);
  f.avx512_bf16 = f.avx512_gfni && bit(seven_one.a, 5) && bit(seven.c, 1);
  f.avx512_fp16 = f.avx512_gfni && bit(seven.c, 1) && bit(seven.d, 23);
  const bool saves_tiles = (states & 0x60000u) == 0x60000u;
  f.amx = f.avx512_fp16 && bit(seven.d, 24) && bit(seven.d, 22) && saves_tiles && may_use_tiles();
  const Registers zero = cpuid(0, 0);
  const bool is_amd = zero.b == 0x68747541u;  // "AuthenticAMD"
  f.fast_bf16 = f.avx512_bf16 && is_amd;
  f.cheap_subnormals = is_amd;
  return f;
}

std::string cpu_name() {
  std::array<char, 49> name{};
  for (uint32_t i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i, 0);
    const uint32_t words[4] = {r.a, r.b, r.c, r.d};
    std::memcpy(name.data() + size_t{16} * i, words, 16);
  }
  std::string text(name.data());
  text.erase(0, text.find_first_not_of(' '));
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text.empty() ? "unknown CPU" : text;
}
#else
CpuFeatures detect_features() { return {}; }
std::string cpu_name() { return "unknown CPU"; }
#endif

namespace {

struct Row {
  std::string_view name;
  InstructionSet set;
  bool present;
  bool best;  // to be taken when nothing is asked for, if no earlier one is
};

// The best first.
std::array<Row, kInstructionSets> rows(const CpuFeatures& f) {
  return {{{"amx", InstructionSet::kAmx, f.amx, f.amx},
           {"avx512fp16", InstructionSet::kAvx512Fp16, f.avx512_fp16, f.avx512_fp16},
           {"avx512bf16", InstructionSet::kAvx512Bf16, f.avx512_bf16, f.avx512_bf16 && f.fast_bf16},
           {"avx512gfni", InstructionSet::kAvx512Gfni, f.avx512_gfni, f.avx512_gfni},
           {"avx512", InstructionSet::kAvx512, f.avx512, f.avx512},
           {"avx2", InstructionSet::kAvx2, f.avx2, f.avx2},
           {"scalar", InstructionSet::kScalar, true, true}}};
}

}  // namespace

std::vector<InstructionSet> instruction_sets(const CpuFeatures& features) {
  std::vector<InstructionSet> present;
  for (const Row& row : rows(features)) {
    if (row.present) present.insert(present.begin(), row.set);
  }
  return present;
}

Result<InstructionSet> choose_instruction_set(std::string_view name, const CpuFeatures& features) {
  for (const Row& row : rows(features)) {
    if (name.empty() ? !row.best : name != row.name) continue;
    if (row.present) return row.set;
    return error(ErrorCode::kUnsupported,
                 "CPU kernels '{}' were asked for (option or NESTEDFP_CPU), but this machine lacks them", name);
  }
  return error(ErrorCode::kUsage,
               "CPU kernels '{}' are unknown (option or NESTEDFP_CPU): use scalar, avx2, avx512, avx512gfni, "
               "avx512bf16, avx512fp16, amx or nothing",
               name);
}

Result<InstructionSet> choose_instruction_set(std::string_view option) {
  const char* environment = std::getenv("NESTEDFP_CPU");
  const bool overridden = environment != nullptr && *environment != '\0';
  return choose_instruction_set(overridden ? std::string_view(environment) : option, detect_features());
}

}  // namespace nfp
