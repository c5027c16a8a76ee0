#include <array>

#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {
namespace {

template <int kTokens>
GroupedEntry entry() {
  constexpr auto kOperand = Operand::kW8ABF16;
  return {kOperand,
          kTokens,
          {reinterpret_cast<const void*>(&grouped_gemm<kOperand, kTokens, kSomeExperts>),
           reinterpret_cast<const void*>(&grouped_gemm<kOperand, kTokens, kMaxExperts>)},
          threads(Tile{kTokens, 1, 1, 1}),
          GroupedKernel<kOperand, kTokens>::kSharedBytes};
}

}  // namespace

std::span<const GroupedEntry> grouped_w8abf16() {
  static const std::array entries{entry<8>(), entry<16>(), entry<32>(), entry<64>(), entry<128>()};
  return entries;
}

}  // namespace nfp::cuda
