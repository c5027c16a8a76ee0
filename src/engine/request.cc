#include "engine/request.h"

#include <cmath>

namespace nfp {
namespace {

Error out_of_range(std::string_view field, double value, std::string_view expected) {
  return error(ErrorCode::kInvalidInput, "{} is {}; it must be {}", field, value, expected);
}

Status check_token(std::string_view field, int32_t token, int32_t vocab) {
  if (token >= 0 && token < vocab) return ok_status();
  return error(ErrorCode::kInvalidInput, "{}: token id {} is not in the vocabulary (0 to {})", field, token, vocab - 1);
}

}  // namespace

Status validate(const SamplingParams& p, int32_t vocab) {
  // Written so that NaN fails every test.
  if (!(p.temperature >= 0.0f && p.temperature <= 100.0f))
    return out_of_range("temperature", p.temperature, "0 to 100");
  if (p.top_k < 0) return out_of_range("top_k", p.top_k, "0 (off) or more");
  if (!(p.top_p > 0.0f && p.top_p <= 1.0f)) return out_of_range("top_p", p.top_p, "above 0 and at most 1");
  if (!(p.min_p >= 0.0f && p.min_p <= 1.0f)) return out_of_range("min_p", p.min_p, "0 to 1");
  if (!(p.repetition_penalty > 0.0f && p.repetition_penalty <= 100.0f)) {
    return out_of_range("repetition_penalty", p.repetition_penalty, "above 0 and at most 100");
  }
  if (!(std::abs(p.presence_penalty) <= 2.0f)) return out_of_range("presence_penalty", p.presence_penalty, "-2 to 2");
  if (!(std::abs(p.frequency_penalty) <= 2.0f))
    return out_of_range("frequency_penalty", p.frequency_penalty, "-2 to 2");
  if (p.max_tokens && *p.max_tokens < 1) return out_of_range("max_tokens", *p.max_tokens, "at least 1");
  if (p.min_tokens < 0) return out_of_range("min_tokens", p.min_tokens, "0 or more");
  if (p.max_tokens && p.min_tokens > *p.max_tokens)
    return out_of_range("min_tokens", p.min_tokens, "at most max_tokens");
  if (p.top_logprobs < 0 || p.top_logprobs > 128) return out_of_range("top_logprobs", p.top_logprobs, "0 to 128");
  if (p.prompt_logprobs && (*p.prompt_logprobs < 0 || *p.prompt_logprobs > 128)) {
    return out_of_range("prompt_logprobs", *p.prompt_logprobs, "0 to 128");
  }
  for (const auto& [token, bias] : p.logit_bias) {
    NFP_RETURN_IF_ERROR(check_token("logit_bias", token, vocab));
    if (std::isnan(bias)) return error(ErrorCode::kInvalidInput, "logit_bias of token {} is not a number", token);
  }
  for (int32_t token : p.stop_token_ids) NFP_RETURN_IF_ERROR(check_token("stop_token_ids", token, vocab));
  for (const std::string& stop : p.stop) {
    if (stop.empty()) return error(ErrorCode::kInvalidInput, "stop: a stop string is empty; leave it out");
  }
  return ok_status();
}

}  // namespace nfp
