// clang-format off
#include "backend/cpu/simd_avx2.h"
#include "backend/cpu/kernel_table_inl.h"
// clang-format on

namespace nfp::cpu {

const KernelTable& avx2_kernels() {
  static constexpr KernelTable kTable = make_table("avx2");
  return kTable;
}

}  // namespace nfp::cpu
