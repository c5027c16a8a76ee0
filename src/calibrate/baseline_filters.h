// Other FP8 forms of a matrix, for comparison with the nested one.
#pragma once

#include "model/weight_loader.h"

namespace nfp {

// Every upper rounded to nearest, also where the checkpoint was calibrated.
MatrixFilter nearest_filter();

// FP8 with one absmax scale for each 128 x 128 block (as DeepSeek-V3's report, arXiv 2412.19437, section 3.3), written
// back as FP16: one FP16 rounding, 2^-11, beside E4M3's 2^-4. With activations of 16 bits only: the backend sees a
// dense matrix. Embeddings and a head are left alone.
MatrixFilter block_fp8_filter();

}  // namespace nfp
