// Other ways to hold the same matrix, for evaluation: what nested weights are compared with.
#pragma once

#include <memory>

#include "nested/matrix_reader.h"

namespace nfp {

// FP8 with one absmax scale a row (scale = max |w| / 448, E4M3 rounded to nearest): the usual per-channel FP8.
std::unique_ptr<MatrixReader> make_fp8_channel_reader(std::unique_ptr<MatrixReader> source);

// The plain FP16 matrix, whether or not it could be nested.
std::unique_ptr<MatrixReader> make_dense_reader(std::unique_ptr<MatrixReader> source);

}  // namespace nfp
