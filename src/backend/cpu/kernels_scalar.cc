// The reference: plain C++, and the same with VDPBF16PS emulated.
#define NFP_HAVE_PAIRS 1
// clang-format off
#include "backend/cpu/simd_scalar.h"
#include "backend/cpu/kernel_table_inl.h"
// clang-format on

namespace nfp::cpu {

const KernelTable& scalar_kernels() {
  static constexpr KernelTable kTable = make_table("scalar", false);
  return kTable;
}

const KernelTable& scalar_bf16_kernels() {
  static constexpr KernelTable kTable = make_table("scalar-bf16", true);
  return kTable;
}

}  // namespace nfp::cpu
