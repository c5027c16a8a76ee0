// A model whose fused matrices are read as those that they were made of: q, k and v of qkv_proj, gate and up of
// gate_up_proj. `inspect` counts matrices so, whatever a checkpoint keeps as one.
#pragma once

#include <memory>

#include "base/result.h"
#include "io/model_source.h"

namespace nfp {

// The parts have the names that they have in Llama's layers. A matrix whose rows are not what the configuration's heads
// make stays as it is, and so does all of a checkpoint that is FP8 already (its readers are of whole matrices). An
// error where the checkpoint has a tensor of a part's name too, or a matrix to split without rows.
Result<std::shared_ptr<const ModelSource>> split_fused(std::shared_ptr<const ModelSource> source);

}  // namespace nfp
