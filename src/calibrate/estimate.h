// How long a calibration on the model's own text will take on this machine, before it is begun.
#pragma once

#include "base/thread_pool.h"
#include "calibrate/calibrate.h"
#include "model/config.h"

namespace nfp {

// Floating-point operations of calibrate() with these options: writing the text, running it, the Hessians, the choices
// and the order of sensitivity. Attention is left out: sequences are short.
double calibration_flops(const ModelConfig& config, const CalibrationOptions& options);

// Seconds: the operations over what this machine's threads reach in a short run of the same loops (about 50 ms).
double estimate_calibration(const ModelConfig& config, const CalibrationOptions& options, ThreadPool& threads);

}  // namespace nfp
