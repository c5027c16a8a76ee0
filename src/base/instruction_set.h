// Which of the instruction sets that we have code for this machine runs, decided in one place. What is compiled for
// several of them (backend/cpu, calibrate) has a table of functions for each and asks here which one to take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace nfp {

enum class InstructionSet : uint8_t {
  kScalar,      // what the compiler assumes of every machine
  kAvx2,        // with FMA and F16C
  kAvx512,      // F, BW, DQ, VL
  kAvx512Gfni,  // and GFNI
  kAvx512Bf16,  // and BF16 and VBMI
  kAvx512Fp16,  // GFNI, VBMI and FP16
  kAmx,         // and AMX tiles of BF16
};
inline constexpr size_t kInstructionSets = 7;

struct CpuFeatures {
  bool avx2 = false;  // as the sets above
  bool avx512 = false;
  bool avx512_gfni = false;
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  bool amx = false;  // and the operating system lets this process have tiles
  // Whether BF16 dot products do more arithmetic a cycle than FP32 multiply-adds: twice as much on AMD (measured on Zen
  // 4 and Zen 5), half as much on Intel (measured on Emerald Rapids: 97 against 207 GFLOP/s a
  // thread), whose BF16 unit is AMX. By vendor: no CPUID bit says it, and timing it at the start would let a busy
  // moment choose the arithmetic, and with it the answers.
  bool fast_bf16 = false;
  // Whether multiply-adds take subnormal numbers at full speed: AMD's do (measured on Zen 3), Intel's go through
  // microcode. By vendor too.
  bool cheap_subnormals = false;
};

// What the processor has and the operating system saves. Asks Linux for the process's leave to use AMX's tiles, where
// there are any.
CpuFeatures detect_features();

// Those that such a machine runs, kScalar first.
std::vector<InstructionSet> instruction_sets(const CpuFeatures& features);

// The one called `name` ("scalar", "avx2", "avx512", "avx512gfni", "avx512bf16", "avx512fp16", "amx"), or the best for
// "". kUsage for an unknown name, kUnsupported for one that the machine lacks.
Result<InstructionSet> choose_instruction_set(std::string_view name, const CpuFeatures& features);
// Of this machine. The environment variable NESTEDFP_CPU overrides the option.
Result<InstructionSet> choose_instruction_set(std::string_view option);

// "Intel(R) Xeon(R) Processor"; "unknown CPU" where the processor does not say.
std::string cpu_name();

}  // namespace nfp
