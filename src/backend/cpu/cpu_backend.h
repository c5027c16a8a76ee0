// The CPU backend: scalar, AVX2 and AVX-512 kernels behind one choice made at start.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "base/result.h"

namespace nfp {

struct CpuOptions {
  int threads = 0;   // 0 = what measuring finds best (thread_count.h), of the CPUs that this process may use
  bool pin = false;  // bind threads to CPUs; with several memory nodes they always are
  // "scalar", "avx2", "avx512", "avx512gfni", "avx512bf16", "avx512fp16", "amx" or "" for the best this machine has;
  // the environment variable NESTEDFP_CPU overrides it. Asking for one that the machine lacks is an error. All give the
  // same bits, except that avx512bf16 (the best on AMD from Zen 4) rounds activations to BF16 in Precision::kFp8,
  // that avx512fp16 computes FP8 steps in FP16, and amx (the best on Intel from Sapphire Rapids, where the operating
  // system lets the process have tiles) FP8 and FP16 steps in tiles of BF16 (PairArithmetic).
  std::string kernels = {};
};

Result<std::unique_ptr<Backend>> make_cpu_backend(const CpuOptions& options);

}  // namespace nfp
