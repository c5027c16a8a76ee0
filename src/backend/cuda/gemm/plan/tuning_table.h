// Tuned choices of kernels, kept as data: JSON made by `nestedfp tune` on a device, read at start-up.
//
//   {"format": "nestedfp gemm choices 2", "device": "NVIDIA H200",
//    "models": {"f16": {"launch_us": 1.2, ..., "tiles": {"128x256 c1 b1": [0.6, 2.5], ...}}},
//    "choices": [{"n": 4096, "k": 14336, "mode": "f16", "by_tokens": {"1": "128x8 c1 b1 split4", "8": ...}}]}
//
// Keys of choices are output features, input features and mode; epilogues and output types do not move the choice
// enough to be keys. "models" (TimeModel) is what any number of tokens is chosen by; format 1 has none, and a number of
// tokens between two tuned ones then takes the larger one's choice. A number of tokens that is none of kTokenBuckets
// was checked (tune/check.h), and what would have been chosen there found to be slow.
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "backend/cuda/gemm/plan/config.h"
#include "backend/cuda/gemm/plan/predict.h"
#include "base/result.h"

namespace nfp::cuda {

class TuningTable {
 public:
  // `source` names the text in messages. Unknown kernels in it are an error: the table belongs to another version.
  static Result<TuningTable> parse(std::string_view json, const std::string& source);
  // The same of a file, which names itself in messages.
  static Result<TuningTable> load(const std::string& path);
  std::string dump() const;

  void set(int64_t n, int64_t k, Mode mode, int tokens, const Config& config);
  // The tuned choice for the problem's number of tokens: what checked() has, or that of its bucket, or of the nearest
  // larger tuned bucket if that one is missing. None beyond the largest, and none of another mode's (BF16 goes by
  // FP16's, W8A16 without a model by E4M3's) that this one has no kernel for.
  std::optional<Config> find(const Problem& problem) const;
  // The choice of the nearest number of tokens that was checked, among those that are as many tiles whatever the tile:
  // widths are multiples of 8 up to 64 tokens, of 16 beyond. None where a bucket's number is as near.
  std::optional<Config> checked(const Problem& problem) const;
  // Whether the problem's own bucket was tuned.
  bool has_bucket(const Problem& problem) const;

  // Null if the table has none. BF16 kernels do the same work as FP16's; W8A16 goes by FP16's where it has none.
  const TimeModel* model(Mode mode) const;
  void set_model(Mode mode, const TimeModel& model) { models_[mode] = model; }
  // Of another table for the same device, where this one only has choices.
  void copy_models(const TuningTable& other) { models_ = other.models_; }
  // What another table for the same device has and this one does not: choices by shape, mode and tokens, and models.
  void fill_from(const TuningTable& other);
  bool has_models() const { return !models_.empty(); }

  std::string device;
  size_t size() const { return choices_.size(); }

 private:
  using Buckets = std::map<int, Config>;
  const Buckets* buckets(const Problem& problem) const;

  std::map<Mode, TimeModel> models_;
  std::map<std::tuple<int64_t, int64_t, Mode>, Buckets> choices_;
};

// The checked-in table (choices_h100.json, choices_h200.json) for a device of that name and size; null if there is
// none. Both were made on 132 SMs. An H100 PCIe has fewer, which its name does not say in every form: it gets none.
const TuningTable* built_in_table(std::string_view device, int sms);
std::string_view built_in_choices_h100();
std::string_view built_in_choices_h200();

// How sums over k may be cut.
enum class Reduction : uint8_t {
  kFastest,         // per token bucket: a token's last bits may change with the number of tokens in the step
  kBatchInvariant,  // the same cuts for every number of tokens in a step: they never do
};

struct Choice {
  Config config;
  const char* reason = "";  // "tuned", "predicted", "analytic", ...
};
// The one place where a launch's kernel is chosen. `table` may be null.
Choice choose(const Problem& problem, const DeviceShape& device, const TuningTable* table, Reduction reduction);
// "m 16, n 4096, k 14336, f16: 128x16 c1 b1 split4 (tuned), grid 128, k cut in 4"
std::string describe(const Problem& problem, const Choice& choice, const DeviceShape& device);

}  // namespace nfp::cuda
