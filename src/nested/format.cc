#include "nested/format.h"

#include "base/clones.h"

namespace nfp {

NFP_CLONES void split(std::span<const uint16_t> weights, uint8_t* upper, uint8_t* lower) {
  for (size_t i = 0; i < weights.size(); ++i) {
    const NestedWeight nested = split(weights[i]);
    upper[i] = nested.upper;
    lower[i] = nested.lower;
  }
}

NFP_CLONES void join(const uint8_t* upper, const uint8_t* lower, size_t count, uint16_t* weights) {
  for (size_t i = 0; i < count; ++i) weights[i] = join(upper[i], lower[i]);
}

}  // namespace nfp
