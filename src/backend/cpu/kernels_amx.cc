#define NFP_HAVE_TILES 1
#define NFP_AVX512_GFNI 1
// clang-format off
#include "backend/cpu/simd_avx512.h"
#include "backend/cpu/tiles_amx.h"
#include "backend/cpu/kernel_table_inl.h"
// clang-format on

namespace nfp::cpu {

const KernelTable& amx_kernels() {
  static constexpr KernelTable kTable = make_table<PairArithmetic::kBf16Tiles>("amx");
  return kTable;
}

}  // namespace nfp::cpu
