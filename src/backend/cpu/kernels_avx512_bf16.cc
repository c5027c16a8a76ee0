#define NFP_HAVE_BF16_PAIRS 1
#define NFP_AVX512_GFNI 1
#define NFP_TUNED_FOR_ZEN5 1  // of the processors that have no FP16 multiply-adds the one with fast dot products
// clang-format off
#include "backend/cpu/simd_avx512.h"
#include "backend/cpu/kernel_table_inl.h"
// clang-format on

namespace nfp::cpu {

const KernelTable& avx512_bf16_kernels() {
  static constexpr KernelTable kTable = make_table<PairArithmetic::kBf16>("avx512bf16");
  return kTable;
}

}  // namespace nfp::cpu
