// clang-format off
#include "backend/cpu/simd_avx512.h"
#include "backend/cpu/kernel_table_inl.h"
// clang-format on

namespace nfp::cpu {

const KernelTable& avx512_kernels() {
  static constexpr KernelTable kTable = make_table("avx512");
  return kTable;
}

}  // namespace nfp::cpu
