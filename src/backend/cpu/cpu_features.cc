#include "backend/cpu/cpu_features.h"

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace nfp::cpu {

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

}  // namespace

Features detect_features() {
  Features f;
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
  const Registers zero = cpuid(0, 0);
  f.fast_bf16 = f.avx512_bf16 && zero.b == 0x68747541u;  // "AuthenticAMD"
  return f;
}

std::string cpu_name() {
  std::array<char, 49> name{};
  for (uint32_t i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i, 0);
    const uint32_t words[4] = {r.a, r.b, r.c, r.d};
    std::memcpy(name.data() + 16 * i, words, 16);
  }
  std::string text(name.data());
  text.erase(0, text.find_first_not_of(' '));
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text.empty() ? "unknown CPU" : text;
}
#else
Features detect_features() { return {}; }
std::string cpu_name() { return "unknown CPU"; }
#endif

Result<const KernelTable*> choose_kernels(std::string_view name, const Features& features) {
  struct Choice {
    std::string_view name;
    bool present;
    bool best;  // to be taken when nothing is asked for, if no earlier one is
    const KernelTable& (*table)();
  };
#if defined(__x86_64__)
  const Choice choices[] = {
      {"avx512bf16", features.avx512_bf16, features.avx512_bf16 && features.fast_bf16, avx512_bf16_kernels},
      {"avx512gfni", features.avx512_gfni, features.avx512_gfni, avx512_gfni_kernels},
      {"avx512", features.avx512, features.avx512, avx512_kernels},
      {"avx2", features.avx2, features.avx2, avx2_kernels},
      {"scalar", true, true, scalar_kernels}};
#else
  (void)features;
  const Choice choices[] = {{"scalar", true, true, scalar_kernels}};
#endif
  for (const Choice& choice : choices) {
    if (name.empty() ? choice.best : name == choice.name) {
      if (!choice.present) {
        return error(ErrorCode::kUnsupported,
                     "CPU kernels '{}' were asked for (option or NESTEDFP_CPU), but this machine lacks them", name);
      }
      return &choice.table();
    }
  }
  return error(ErrorCode::kUsage,
               "CPU kernels '{}' are unknown (option or NESTEDFP_CPU): use scalar, avx2, avx512, avx512gfni, "
               "avx512bf16 or nothing",
               name);
}

}  // namespace nfp::cpu
