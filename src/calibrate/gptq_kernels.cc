#include "calibrate/gptq_kernels.h"

#include <array>

namespace nfp::calibrate {

extern const Kernels kBaselineKernels;
#ifdef NFP_CALIBRATE_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

namespace {

using List = std::array<const Kernels*, 4>;

List available() {
  List list = {};
  size_t count = 0;
#ifdef NFP_CALIBRATE_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) list[count++] = &kAvx512Kernels;
  if (avx2) list[count++] = &kAvx2Kernels;
#endif
  list[count] = &kBaselineKernels;
  return list;
}

const List& list() {
  static const List all = available();
  return all;
}

}  // namespace

const Kernels& kernels() { return *list().front(); }
const Kernels* const* all_kernels() { return list().data(); }

}  // namespace nfp::calibrate
