#include "io/text_model.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

#include "io/family.h"
#include "io/model_json.h"

namespace nfp {
namespace {

struct Multimodal {
  std::string_view architecture;
  std::string_view text_architecture, text_model_type;
};
constexpr Multimodal kMultimodal[] = {
    {"Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "gemma3_text"},
    {"Mistral3ForConditionalGeneration", "MistralForCausalLM", "mistral"},
};

}  // namespace

Result<std::optional<std::string>> text_model_config(std::string_view config_json, const std::string& name) {
  using Json = nlohmann::ordered_json;
  NFP_ASSIGN_OR_RETURN(const auto root, parse_model_json<Json>(config_json, name));
  const auto architectures = root.find("architectures");
  const bool named = architectures != root.end() && architectures->is_array() && !architectures->empty();
  const auto known = std::find_if(std::begin(kMultimodal), std::end(kMultimodal), [&](const Multimodal& model) {
    return named && architectures->front() == model.architecture;
  });
  if (known == std::end(kMultimodal)) return std::optional<std::string>();
  const auto text = root.find("text_config");
  if (text == root.end() || !text->is_object()) {
    return error(ErrorCode::kInvalidInput, "{}: field 'text_config' is missing; {} is read as the text model in it",
                 name, known->architecture);
  }
  Json config = *text;
  if (config.value("model_type", Json(known->text_model_type)) != known->text_model_type) {
    return error(ErrorCode::kUnsupported, "{}: text_config: field 'model_type' is {}; of {} only {} is supported", name,
                 config["model_type"].dump(), known->architecture, known->text_model_type);
  }
  config["architectures"] = {known->text_architecture};
  config["model_type"] = known->text_model_type;
  // The whole model's head is tied or not; transformers 5 writes text_config's own default beside that.
  if (root.contains("tie_word_embeddings")) config["tie_word_embeddings"] = root["tie_word_embeddings"];
  for (const char* field :
       {"bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "quantization_config"}) {
    if (root.contains(field) && !config.contains(field)) config[field] = root[field];
  }
  return std::optional(dump_model_json(std::move(config)));
}

Result<std::optional<std::string>> headless_config(std::string_view config_json, const std::string& name) {
  using Json = nlohmann::ordered_json;
  NFP_ASSIGN_OR_RETURN(auto root, parse_model_json<Json>(config_json, name));
  const auto text = [&](const Json& value) { return value.is_string() ? value.get<std::string>() : std::string(); };
  const auto architectures = root.find("architectures");
  const bool named = architectures != root.end() && architectures->is_array() && !architectures->empty();
  const auto found = find_family(named ? text(architectures->front()) : "", text(root.value("model_type", Json())));
  if (!found.ok() || !found->has_head || root.value("tie_word_embeddings", Json()) != false) {
    return std::optional<std::string>();
  }
  root["architectures"] = {found->family->headless_architecture()};
  return std::optional(dump_model_json(std::move(root)));
}

std::optional<std::string> text_model_tensor(std::string_view name) {
  // As Hugging Face's files have it, and as transformers 4.52 and later name it in memory.
  constexpr std::string_view kOutside = "language_model.", kInside = "model.language_model.";
  if (name.starts_with(kOutside)) return std::string(name.substr(kOutside.size()));
  if (name.starts_with(kInside)) return "model." + std::string(name.substr(kInside.size()));
  if (name.starts_with("lm_head.")) return std::string(name);
  return std::nullopt;
}

}  // namespace nfp
