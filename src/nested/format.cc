#include "nested/format.h"

namespace nfp {

void split(std::span<const uint16_t> weights, uint8_t* upper, uint8_t* lower) {
  for (size_t i = 0; i < weights.size(); ++i) {
    const NestedWeight nested = split(weights[i]);
    upper[i] = nested.upper;
    lower[i] = nested.lower;
  }
}

void join(const uint8_t* upper, const uint8_t* lower, size_t count, uint16_t* weights) {
  for (size_t i = 0; i < count; ++i) weights[i] = join(upper[i], lower[i]);
}

}  // namespace nfp
