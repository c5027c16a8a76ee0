// Smoothing: powers of two that bring the channels of a linear layer's inputs closer to each other in size, so that one
// E4M3 scale for all of them clips and flushes less (the idea of SmoothQuant, arXiv 2211.10438, with factors that keep
// FP16 exact).
//
// Where y = W n(x) and n(x)_c = norm_c x_c / rms(x), the norm's weight c is multiplied by 2^-e_c and column c of every
// matrix that reads it by 2^e_c; where y = W_down (act(W_gate x) * W_up x), row c of up (and its bias) by 2^-e_c and
// column c of down by 2^e_c. Every product stays the same number. The values between v and o are left alone: they pass
// through the KV cache, whose FP16 loses bits of small ones, other bits for other sizes.
//
// e_c is limited to what the formats hold: every value stays exactly representable in its tensor's dtype, every row
// that nests goes on nesting with at most the row exponent that it had, and BF16 weights that FP16 rounds never get
// coarser. Weights of FP16 with many significant bits leave almost no room downwards, and |w| <= 1.75 bounds it
// upwards.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/thread_pool.h"
#include "calibrate/smoothing_limits.h"
#include "calibrate/text.h"
#include "io/scaled_source.h"
#include "model/model.h"

namespace nfp {

// The largest |x| of each input channel, by the linear layer's first matrix (without ".weight").
using ChannelMaxima = std::map<std::string, std::vector<float>, std::less<>>;

// Over at most kChannelTokens tokens of `text`, spread evenly, in exact FP16. Error: a layer's inputs overflow.
inline constexpr int64_t kChannelTokens = 8192;
Result<ChannelMaxima> measure_channels(Model& model, const TokenSequences& text);

// e for channels of these sizes: those larger than the common size come down to it, those smaller come up, as far as
// their limits go; channels that are zero stay. The common size is the geometric mean, or what the largest channel
// comes down to where that is more.
std::vector<int8_t> choose_exponents(const std::vector<float>& maxima, const ExponentLimits& limits);

// For every place of the model that has all its tensors; groups whose exponents are all 0 are left out.
Result<TensorScalings> choose_smoothing(const ModelSource& source, const ModelConfig& config,
                                        const ChannelMaxima& maxima, ThreadPool& threads);

// Written to and read from the cache. Errors name `name`.
std::string scalings_to_json(const TensorScalings& scalings);
Result<TensorScalings> scalings_from_json(const std::string& text, const std::string& name);

}  // namespace nfp
