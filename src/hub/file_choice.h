// Which files of a repository are needed to serve the model in it: not its other formats, pictures and optimizer
// states.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/result.h"
#include "hub/hub_api.h"

namespace nfp {

// The small files that say what the model is: configuration, tokenizer, chat template, and the index of its weights.
// Of a GGUF file (`file`, or all that the repository has), none: it holds all that.
std::vector<HubFile> descriptive_files(const HubModel& model, const std::string& file);

// The text of a descriptive file that is there by now.
using ReadFile = std::function<Result<std::string>(const std::string& path)>;

// The weights: safetensors as the index names them; with `file` that GGUF file and, where it is one of several parts,
// all of them, the first at the front; else, in a repository that holds only GGUF files, the only one of them. Errors
// list what there is.
Result<std::vector<HubFile>> weight_files(const HubModel& model, const HubName& name, const ReadFile& read);

}  // namespace nfp
