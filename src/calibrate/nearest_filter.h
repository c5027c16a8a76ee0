// Uppers as they are without calibration, to compare calibrated ones with.
#pragma once

#include "model/weight_loader.h"

namespace nfp {

// Every upper rounded to nearest, also where the checkpoint was calibrated.
MatrixFilter nearest_filter();

}  // namespace nfp
