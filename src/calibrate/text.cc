#include "calibrate/text.h"

#include <algorithm>
#include <random>
#include <unordered_map>

#include "engine/engine.h"
#include "engine/model_runner.h"
#include "text/utf8.h"

namespace nfp {
int64_t count_tokens(const TokenSequences& text) {
  int64_t count = 0;
  for (const auto& sequence : text) count += static_cast<int64_t>(sequence.size());
  return count;
}

int32_t longest_sequence(const TokenSequences& text) {
  size_t longest = 1;
  for (const auto& sequence : text) longest = std::max(longest, sequence.size());
  return static_cast<int32_t>(longest);
}

Result<TokenSequences> write_self_text(Model& model, const SelfTextOptions& options, const ProgressCallback& progress) {
  EngineConfig config;
  config.max_context = std::min(options.length, model.config().max_context);
  config.limits.max_sequences = options.sequences;
  config.limits.max_step_tokens = std::max(options.sequences * 2, 64);
  config.limits.max_queue = options.sequences;
  config.kv_blocks = full_kv_blocks(config);
  config.prefix_caching = false;
  config.steps_in_flight = 1;
  config.graphs = false;
  NFP_ASSIGN_OR_RETURN(const auto runner, ModelRunner::create(model, config));
  NFP_ASSIGN_OR_RETURN(auto policy, parse_policy("fp16"));
  Engine engine(runner->config(), runner.get(), nullptr, std::move(policy));

  TokenSequences text(static_cast<size_t>(options.sequences));
  std::unordered_map<std::string, size_t> index;
  std::mt19937_64 random(options.seed);
  for (size_t i = 0; i < text.size(); ++i) {
    if (options.bos) text[i].push_back(*options.bos);
    text[i].push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(model.config().vocab)));
    Request request;
    request.id = std::to_string(i);
    request.prompt = text[i];
    request.sampling.temperature = 1.0f;
    request.sampling.seed = random();
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = config.max_context - static_cast<int32_t>(text[i].size());
    request.precision = PrecisionClass::kExact;
    index[request.id] = i;
    NFP_RETURN_IF_ERROR(engine.submit(std::move(request)));
  }
  const auto total = static_cast<uint64_t>(options.sequences) * static_cast<uint64_t>(config.max_context);
  uint64_t done = 0;
  while (!engine.idle()) {
    for (const RequestOutput& output : engine.step()) {
      if (output.finish && *output.finish == FinishReason::kError) {
        return error(ErrorCode::kInvalidInput, "the model could not write its calibration text: {}", output.error);
      }
      for (const OutputToken& token : output.tokens) text[index[output.id]].push_back(token.token);
      done += output.tokens.size();
    }
    if (progress) progress({"writing calibration text", std::min(done, total), total});
  }
  return text;
}

Result<TokenSequences> cut_text(const Tokenizer& tokenizer, const std::string& text, const std::string& file,
                                int32_t length, int64_t most) {
  if (!text::is_utf8(text)) {
    return error(ErrorCode::kInvalidInput, "{}: is not UTF-8; calibration reads plain text", file);
  }
  auto encoded = tokenizer.encode(text, {.parse_special = false});
  if (!encoded.ok()) return error(encoded.error().code, "{}: {}", file, encoded.error().message);
  const std::vector<int32_t>& tokens = *encoded;
  const auto whole = static_cast<int64_t>(tokens.size()) / length;
  if (whole < 1) {
    return error(ErrorCode::kInvalidInput,
                 "{}: has {} tokens; calibration needs at least {}: use a longer text or --calibrate self", file,
                 tokens.size(), length);
  }
  const int64_t count = std::clamp<int64_t>(most / length, 1, whole);
  TokenSequences sequences;
  for (int64_t i = 0; i < count; ++i) {
    const auto first = tokens.begin() + (i * whole / count) * length;
    sequences.emplace_back(first, first + length);
    if (tokenizer.adds_bos() && tokenizer.bos_id()) sequences.back().front() = *tokenizer.bos_id();
  }
  return sequences;
}

}  // namespace nfp
