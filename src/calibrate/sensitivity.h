// How much each linear layer is harmed by FP8, and which set of them an FP8 step runs in FP8.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/result.h"
#include "base/thread_pool.h"
#include "calibrate/text.h"
#include "model/model.h"

namespace nfp {

// One linear layer as it computes (q, k and v are one; so are gate and up).
struct Sensitivity {
  std::vector<std::string> matrices;  // Linear::names
  int64_t weights = 0;
  double kld = 0;  // mean KL(FP16 || FP16 but this one in FP8), nats a token
};

struct SensitivityOptions {
  Precision precision = Precision::kFp8;
  int32_t scored = 32;  // positions scored of each sequence, evenly spread over its second half
};

// Least harm a weight first: a prefix of it is the FP8 set that costs least. `text` should not be what the uppers were
// chosen on. Everything before a layer is computed once, and its hidden states kept: [layers, tokens, hidden] in
// memory. The head is left out: it is in FP8 or not by an option of its own.
Result<std::vector<Sensitivity>> measure_sensitivity(Model& model, const TokenSequences& text,
                                                     const SensitivityOptions& options, ThreadPool& threads,
                                                     const ProgressCallback& progress);

// Where nothing was measured (kld is 0): gate and up, then down, o, and q, k, v, each from the first layer to the last.
// That is the order of their mean places in what was measured of SmolLM2-135M and Qwen2.5-0.5B
// (bench/results/quality-*.json); in both the last layers suffer most.
std::vector<Sensitivity> default_fp8_order(Model& model);

// Sets every linear layer's fp8_from, so that a step's share (ForwardArgs::fp8_share) runs a prefix of `order` in FP8.
// Layers that the order does not name come last. Error: an order for another model.
Status set_fp8_order(Model& model, std::span<const Sensitivity> order);

// The same, and no step has more than `share` (0..1) in FP8: the longest prefix of that share at most is the FP8 set,
// and all other layers but the head are out of it. Returns the share reached.
Result<double> set_fp8_share(Model& model, std::span<const Sensitivity> order, double share);

// [{"matrices": [...], "weights": n, "kld": x}, ...]
std::string sensitivity_to_json(std::span<const Sensitivity> order);
// Errors name `where`.
Result<std::vector<Sensitivity>> sensitivity_from_json(std::string_view json, const std::string& where);

}  // namespace nfp
