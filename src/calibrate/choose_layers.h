// The choices for all of a model's layers, one layer after the other: the text runs through the model once, all tokens'
// hidden states are kept in between, and one layer's sums are in memory at a time.
#pragma once

#include "base/result.h"
#include "calibrate/calibrate.h"
#include "calibrate/store.h"
#include "calibrate/text.h"
#include "runtime/loaded_model.h"

namespace nfp {

// Saves the choices of each layer that `store` does not have. With options.compensate a second pass, in FP8 with what
// was chosen so far, runs beside the exact one, and `loaded`'s layers are read again as they are chosen: it is left so.
// Errors: a layer whose inputs overflow; a full disk.
Status choose_layers(LoadedModel& loaded, const TokenSequences& text, const CalibrationOptions& options,
                     const CalibrationStore& store);

}  // namespace nfp
