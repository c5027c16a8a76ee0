// What is said where a model's results are infinite or no numbers.
#pragma once

#include <string_view>

#include "base/result.h"
#include "model/model.h"

namespace nfp {

// `results` ("logits") of a forward whose queries, keys and values the backend found finite in every layer.
Error overflow_error(const Model& model, std::string_view results);

}  // namespace nfp
