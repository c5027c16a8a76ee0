// The reference: plain C++, and the same with VDPBF16PS, with VFMADDPH and with AMX's tiles emulated.
#define NFP_HAVE_BF16_PAIRS 1
#define NFP_HAVE_FP16_PAIRS 1
#define NFP_HAVE_TILES 1
// clang-format off
#include "backend/cpu/simd_scalar.h"
#include "backend/cpu/tiles_scalar.h"
#include "backend/cpu/kernel_table_inl.h"
// clang-format on

namespace nfp::cpu {

const KernelTable& scalar_kernels() {
  static constexpr KernelTable kTable = make_table("scalar");
  return kTable;
}

const KernelTable& scalar_bf16_kernels() {
  static constexpr KernelTable kTable = make_table<PairArithmetic::kBf16>("scalar-bf16");
  return kTable;
}

const KernelTable& scalar_fp16_kernels() {
  static constexpr KernelTable kTable = make_table<PairArithmetic::kFp16>("scalar-fp16");
  return kTable;
}

const KernelTable& scalar_tile_kernels() {
  static constexpr KernelTable kTable = make_table<PairArithmetic::kBf16Tiles>("scalar-tiles");
  return kTable;
}

}  // namespace nfp::cpu
