#include <array>

#include "backend/cuda/experts/grouped.cuh"

namespace nfp::cuda {
namespace {

template <int kTokens>
GroupedEntry entry() {
  constexpr auto kOperand = Operand::kE4M3;
  return {kOperand,
          kTokens,
          {reinterpret_cast<const void*>(&grouped_gemm<kOperand, kTokens, kSomeExperts>),
           reinterpret_cast<const void*>(&grouped_gemm<kOperand, kTokens, kMaxExperts>)},
          threads(Tile{kTokens, 1, 1, 1}),
          GroupedKernel<kOperand, kTokens>::kSharedBytes};
}

}  // namespace

std::span<const GroupedEntry> grouped_e4m3() {
  static const std::array entries{entry<32>(), entry<64>(), entry<128>(), entry<192>()};
  return entries;
}

}  // namespace nfp::cuda
