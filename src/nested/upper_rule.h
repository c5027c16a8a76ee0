// How the upper bytes of a matrix were chosen (docs/format.md, docs/quality.md).
#pragma once

#include <cstdint>

namespace nfp {

enum class UpperRule : uint8_t {
  kFree,        // calibrated; either neighbour for every weight
  kRestricted,  // calibrated; rounded to nearest where the top bit of lower is set (MatrixReader::uppers_restricted)
  kNearest,     // plain rounding
};

}  // namespace nfp
