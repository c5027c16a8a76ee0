#include "runtime/model_summary.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>

#include "io/model_json.h"
#include "io/model_source.h"
#include "model/config.h"
#include "runtime/loaded_model.h"

namespace nfp {
namespace {

// Of a model whose configuration is not one that we know.
std::string architecture_in(std::string_view config) {
  const auto parsed = parse_model_json<nlohmann::json>(config, "config.json");
  if (!parsed.ok()) return "";
  const nlohmann::json& root = *parsed;
  const auto list = root.find("architectures");
  return list != root.end() && list->is_array() && !list->empty() && list->front().is_string()
             ? list->front().get<std::string>()
         : root.contains("model_type") && root["model_type"].is_string() ? root["model_type"].get<std::string>()
                                                                         : "";
}

// The type that holds most bytes.
std::string form_of(const ModelSource& source) {
  std::map<std::string, uint64_t> bytes;
  for (const TensorInfo& tensor : source.tensors()) bytes[tensor.stored] += tensor.file_bytes;
  std::string most;
  for (const auto& [type, count] : bytes) {
    if (most.empty() || count > bytes[most]) most = type;
  }
  if (source.kind() == SourceKind::kNested) return "nested";
  return (source.kind() == SourceKind::kGguf ? "GGUF " : "safetensors ") + most;
}

}  // namespace

ModelSummary summarize_model(const std::string& model) {
  ModelSummary summary;
  const auto source = ModelSource::open(model);
  if (!source.ok()) {
    summary.loads = source.error();
    if (const auto config = read_model_text(model + "/config.json", size_t{16} << 20); config.ok()) {
      summary.architecture = architecture_in(*config);
    }
    return summary;
  }
  summary.form = form_of(**source);
  for (const TensorInfo& tensor : (*source)->tensors()) {
    summary.parameters += static_cast<uint64_t>(tensor.shape.elements());
  }
  summary.file_bytes = (*source)->file_bytes();
  summary.fp16_bytes = 2 * summary.parameters;
  summary.architecture = architecture_in((*source)->config_json());
  if (const auto config = parse_config((*source)->config_json(), (*source)->path() + ": config.json"); !config.ok()) {
    summary.loads = config.error();
  } else if (const auto tokenizer = load_tokenizer(**source); !tokenizer.ok()) {
    summary.loads = tokenizer.error();
  }
  return summary;
}

}  // namespace nfp
