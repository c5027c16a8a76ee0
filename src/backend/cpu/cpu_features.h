// Which kernel table this machine runs, chosen once.
#pragma once

#include <string>
#include <string_view>

#include "backend/cpu/kernel_table.h"
#include "base/result.h"

namespace nfp::cpu {

struct Features {
  bool avx2 = false;         // with FMA and F16C
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_gfni = false;  // and GFNI
  bool avx512_bf16 = false;  // and BF16 and VBMI
  // Whether BF16 dot products do more arithmetic a cycle than FP32 multiply-adds: twice as much on AMD (Zen 4, 5), half
  // as much on Intel (measured on Emerald Rapids: 97 against 207 GFLOP/s a thread), whose BF16 unit is AMX.
  bool fast_bf16 = false;
};

// What the processor has and the operating system saves.
Features detect_features();

// "Intel(R) Xeon(R) Processor"; "unknown CPU" where the processor does not say.
std::string cpu_name();

// The table called `name` ("scalar", "avx2", "avx512", "avx512gfni", "avx512bf16"), or the best for "". kUsage for an
// unknown name, kUnsupported for one that this machine lacks.
Result<const KernelTable*> choose_kernels(std::string_view name, const Features& features);

}  // namespace nfp::cpu
