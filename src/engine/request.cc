#include "engine/request.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/allowed_tokens.h"

namespace nfp {
namespace {

using Found = std::optional<RequestError>;

// `value` in the type it is kept in: 0.1f as a double is 0.10000000149011612.
template <typename T>
Found out_of_range(std::string_view field, T value, std::string_view expected) {
  return RequestError{std::string(field), fmt::format("{} is {}; it must be {}", field, value, expected)};
}

Found check_sampling(const SamplingParams& p, int32_t vocab) {
  // Written so that NaN fails every test.
  if (!(p.temperature >= 0.0f && p.temperature <= 100.0f))
    return out_of_range("temperature", p.temperature, "0 to 100");
  if (p.top_k < 0) return out_of_range("top_k", p.top_k, "0 (off) or more");
  if (!(p.top_p >= 0.0f && p.top_p <= 1.0f)) return out_of_range("top_p", p.top_p, "0 to 1");
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
    if (auto bad = check_token("logit_bias", token, vocab)) return bad;
    // Minus infinity forbids a token; with infinity beside it in one row the sum is NaN.
    if (std::isnan(bias) || bias == INFINITY)
      return RequestError{"logit_bias",
                          fmt::format("logit_bias of token {} is {}; it must be finite, or minus infinity "
                                      "to forbid the token",
                                      token, bias)};
  }
  for (int32_t token : p.stop_token_ids) {
    if (auto bad = check_token("stop_token_ids", token, vocab)) return bad;
  }
  for (const std::string& stop : p.stop) {
    if (stop.empty()) return RequestError{"stop", "stop: a stop string is empty; leave it out"};
  }
  return std::nullopt;
}

// Whether any token may come first.
Found check_choice(const SamplingParams& p, const RequestBounds& bounds) {
  if (!p.allowed) return std::nullopt;
  std::vector<uint32_t> left(p.allowed->mask().begin(), p.allowed->mask().end());
  for (const auto& [token, bias] : p.logit_bias) {
    if (bias == -INFINITY) forbid_token(left, token);
  }
  if (p.min_tokens > 0) {
    for (const int32_t token : p.stop_token_ids) forbid_token(left, token);
    for (const int32_t token : bounds.end_ids) {
      if (!p.ignore_eos) forbid_token(left, token);
    }
  }
  if (std::any_of(left.begin(), left.end(), [](uint32_t word) { return word != 0; })) return std::nullopt;
  if (!p.allowed->has_ids()) {
    return RequestError{"bad_words",
                        "bad_words, with logit_bias and min_tokens, forbids every token of the vocabulary"};
  }
  return RequestError{"allowed_token_ids",
                      "allowed_token_ids has no token that bad_words, logit_bias and min_tokens do not forbid"};
}

Found check_tokens(std::span<const int32_t> prompt, const RequestBounds& bounds) {
  for (const int32_t token : prompt) {
    if (auto bad = check_token("prompt", token, bounds.vocab)) return bad;
  }
  return std::nullopt;
}

Found check_whole(std::span<const int32_t> prompt, const RequestBounds& bounds) {
  if (prompt.empty()) return RequestError{"prompt", "the prompt is empty; it needs at least one token"};
  if (prompt.size() > static_cast<size_t>(std::max(0, bounds.max_context))) {
    return RequestError{"prompt",
                        fmt::format("the prompt has {} tokens and the context holds {}; shorten it or allow a longer "
                                    "context",
                                    prompt.size(), bounds.max_context),
                        true};
  }
  return check_tokens(prompt, bounds);
}

Found check_prompt(std::span<const int32_t> prompt, const SamplingParams& p, const RequestBounds& bounds) {
  if (prompt.empty()) return RequestError{"prompt", "the prompt is empty; it needs at least one token"};
  const int64_t room = int64_t{bounds.max_context} - static_cast<int64_t>(prompt.size());
  if (room < 1) {
    return RequestError{"prompt",
                        fmt::format("the prompt has {} tokens and the context holds {}, of which at least one must be "
                                    "left for the answer; shorten the prompt or allow a longer context",
                                    prompt.size(), bounds.max_context),
                        true};
  }
  if (p.max_tokens && *p.max_tokens > room) {
    return RequestError{"max_tokens",
                        fmt::format("max_tokens is {}, but the prompt's {} tokens leave room for {} in a context of {}",
                                    *p.max_tokens, prompt.size(), room, bounds.max_context),
                        true};
  }
  return check_tokens(prompt, bounds);
}

}  // namespace

Found check_token(std::string_view field, int32_t token, int32_t vocab) {
  if (token >= 0 && token < vocab) return std::nullopt;
  return RequestError{std::string(field),
                      fmt::format("{}: token id {} is not in the vocabulary (0 to {})", field, token, vocab - 1)};
}

std::string_view name_of(FinishReason reason) {
  constexpr std::string_view kNames[] = {"stop", "length", "abort", "error"};
  return kNames[static_cast<size_t>(reason)];
}

Found validate(std::span<const int32_t> prompt, const SamplingParams& sampling, const RequestBounds& bounds,
               Pooling pooling, bool prompt_only) {
  if (auto bad = check_sampling(sampling, bounds.vocab)) return bad;
  if (pooling != Pooling::kNone) {
    if (bounds.hidden < 1) return RequestError{"pooling", "pooling: this runner gives no hidden states"};
    return check_whole(prompt, bounds);
  }
  if (auto bad = check_choice(sampling, bounds)) return bad;
  return prompt_only ? check_whole(prompt, bounds) : check_prompt(prompt, sampling, bounds);
}

std::string_view name_of(PrecisionClass precision) {
  return kPrecisionClassNames[static_cast<size_t>(precision)].first;
}

std::optional<PrecisionClass> precision_class_from_name(std::string_view name) {
  for (const auto& [known, precision] : kPrecisionClassNames) {
    if (known == name) return precision;
  }
  return std::nullopt;
}

}  // namespace nfp
