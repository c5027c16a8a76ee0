// The kinds of ModelSource, each in a file of its own.
#pragma once

#include <memory>
#include <string>

#include "io/model_source.h"

namespace nfp {

Result<std::unique_ptr<ModelSource>> open_plain_directory(const std::string& path, std::string config_json);
Result<std::unique_ptr<ModelSource>> open_nested(const std::string& path, std::string config_json);
Result<std::unique_ptr<ModelSource>> open_gguf(const std::string& path);

}  // namespace nfp
