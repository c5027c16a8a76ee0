// Times single steps of any shape without computing what came before them: how long a step takes depends on how many
// tokens and keys it has and not on what they are, so a chunk behind 3,000 tokens needs a KV cache with room for them,
// and not their values.
#pragma once

#include <memory>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "base/result.h"
#include "policy/step_table.h"
#include "runtime/loaded_model.h"

namespace nfp {

class StepProbe {
 public:
  // `config` as the server has it; the KV cache gets room for `kv_tokens` tokens, of one sequence or many.
  static Result<std::unique_ptr<StepProbe>> create(LoadedModel& loaded, EngineConfig config, int64_t kv_tokens);

  // Whether the runner and its KV cache take such a step.
  bool fits(const StepTime& shape) const;
  // Seconds of each of `count` such steps at this level, run as the engine runs them: where two may be in flight, from
  // result to result. shape.level does not matter.
  Result<std::vector<double>> run(const StepTime& shape, const StepLevel& level, int32_t count);
  const EngineConfig& config() const { return runner_->config(); }
  // What a step asked for in this precision is computed in.
  Precision computed(Precision asked) const { return runner_->computed(asked); }

 private:
  StepProbe() = default;
  int32_t blocks_of(const StepTime& shape) const;
  // A sequence whose next tokens are first .. first + count - 1, with the KV blocks from `block` on.
  std::unique_ptr<Sequence> sequence(int32_t first, int32_t count, int32_t block) const;
  // Writes something into each block below `blocks`: memory that was never written may be one page for all of it, and
  // is then read from a cache.
  Status touch(int32_t blocks);
  Result<std::vector<double>> time(const StepPlan& plan, Precision precision, int32_t count);

  std::unique_ptr<ModelRunner> runner_;
  int32_t touched_ = 0;  // blocks
  bool captures_ = false;
  std::set<std::tuple<int32_t, int32_t, Precision, double>> met_;  // decode steps: sequences, context, level
};

}  // namespace nfp
