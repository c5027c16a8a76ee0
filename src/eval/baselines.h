// Other ways to hold the matrices of a model, for evaluation: what nested weights are compared with.
#pragma once

#include "model/weight_loader.h"

namespace nfp {

// FP8 with one absmax scale a row (fp8_channel.h): the usual per-channel FP8. Without `head`, head and embedding stay
// as they are, as those who ship per-channel FP8 leave them. Has no FP16 form.
MatrixFilter fp8_channel_filter(bool head);

// FP8 with one absmax scale for each 128 x 128 block (as DeepSeek-V3's report, arXiv 2412.19437, section 3.3), written
// back as FP16: one FP16 rounding, 2^-11, beside E4M3's 2^-4. With activations of 16 bits only: the backend sees a
// dense matrix. Embedding and head are left alone.
MatrixFilter block_fp8_filter();

// The plain FP16 matrix, whether or not it could be nested.
MatrixFilter dense_filter();

}  // namespace nfp
