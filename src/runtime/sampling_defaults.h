// How a model's authors say that it is to be sampled: generation_config.json, or a GGUF file's general.sampling.* keys
// (which ModelSource shows as that file).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "engine/request.h"
#include "io/model_source.h"

namespace nfp {

struct SamplingDefaults {
  std::optional<float> temperature;
  std::optional<int32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<int32_t> max_tokens;  // max_new_tokens there

  bool empty() const { return !says_how_to_draw() && !max_tokens; }
  // Something beside a length.
  bool says_how_to_draw() const { return temperature || top_k || top_p || min_p || repetition_penalty; }
  // Sets what is known; leaves the rest as it is.
  void apply(SamplingParams& params) const;
  // "temperature 0.6, top_p 0.95"; empty when there are none.
  std::string text() const;
  // {"temperature":0.6,"top_p":0.95}
  std::string json() const;
};

// What makes SamplingDefaults of other files than the model's, as an error calls it.
inline constexpr std::string_view kGenerationConfigFlag = "--generation-config";

// Of the text of a generation_config.json; `name` appears in errors. As in vLLM, do_sample has no say: many models'
// files leave it out, and transformers' default for it is not what their authors recommend.
Result<SamplingDefaults> parse_sampling_defaults(std::string_view json, const std::string& name,
                                                 std::string_view flag = kGenerationConfigFlag);

// `where`: "auto" (the model's own), "none" ("vllm" likewise), or a directory with a generation_config.json.
Result<SamplingDefaults> load_sampling_defaults(const ModelSource& source, const std::string& where,
                                                std::string_view flag = kGenerationConfigFlag);

}  // namespace nfp
