#include "eval/start_steps.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "base/atomic_file.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "eval/step_times.h"

namespace nfp {
namespace {

namespace fs = std::filesystem;

fs::path folder_of(const StartStepsOptions& options) {
  if (!options.folder.empty()) return options.folder;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return fs::path(cache) / "nestedfp" / "step-times";
  const char* home = std::getenv("HOME");
  return home != nullptr && *home != '\0' ? fs::path(home) / ".cache" / "nestedfp" / "step-times" : fs::path();
}

// Everything that a step's time depends on and that may differ between two starts.
std::string key_of(const LoadedModel& loaded, const StartStepsOptions& options) {
  return fmt::format("{}|{}|{}|{}|{}|{}|{}", loaded.name, loaded.model->weight_bytes(), loaded.backend->info().device,
                     loaded.backend->info().threads, name_of(options.engine.kv_dtype), name_of(options.engine.fp8),
                     options.variant);
}

// Sizes of what is measured; `longest` bounds both time and memory.
StepTimesOptions plan(int32_t longest, const StartStepsOptions& options) {
  StepTimesOptions steps;
  steps.levels = {{Precision::kFp16}, {options.engine.fp8}};
  steps.prefill.clear();
  for (int32_t tokens = longest; tokens >= 16 && steps.prefill.size() < 4; tokens /= 4) steps.prefill.push_back(tokens);
  steps.sequences = {1, 4, 16};
  steps.contexts = {std::max(8, longest / 16)};
  steps.mixed = {};
  steps.repeats = 1;
  steps.decode_steps = 6;
  return steps;
}

// Prompt tokens that plan(longest) computes: each prompt twice at two levels, then the batches that decode.
int64_t tokens_of(int32_t longest) {
  return int64_t{4} * longest * 4 / 3 + 21 * std::max(8, longest / 16) + 2 * longest;
}

Result<StepTable> measure(LoadedModel& loaded, const StartStepsOptions& options) {
  const int32_t context = loaded.config.max_context;
  EngineConfig engine = options.engine;
  engine.limits.max_sequences = 17;
  engine.kv_blocks = 0;
  engine.kv_bytes = 0;  // a cache that holds what is measured; the server's own may be far smaller

  // How fast the machine is, to know what there is time for.
  engine.limits.max_step_tokens = std::min(64, options.engine.limits.max_step_tokens);
  engine.max_context = std::min(context, 128);
  double tokens_per_s = 0;
  {
    NFP_ASSIGN_OR_RETURN(const auto probe, BenchEngine::create(loaded, engine));
    const std::vector<BenchRequest> request = {{std::min(64, engine.max_context - 1), 1}};
    for (int i = 0; i < 2; ++i) {  // the first run warms up
      NFP_ASSIGN_OR_RETURN(const BenchRun run, probe->run(request, {Precision::kFp16}, 1));
      tokens_per_s = request.front().input / std::max(run.seconds, 1e-6);
    }
  }
  int32_t longest = 32;
  while (longest < 4096 && 2 * longest + 256 <= context &&
         static_cast<double>(tokens_of(2 * longest)) < tokens_per_s * options.seconds) {
    longest *= 2;
  }
  const StepTimesOptions steps = plan(longest, options);
  // Prompts in at least two steps: what attention to tokens in the cache costs is told by the second.
  engine.limits.max_step_tokens = std::clamp(longest / 2, 1, options.engine.limits.max_step_tokens);
  StepTimesOptions late = steps;  // two sequences with long contexts
  late.prefill = {};
  late.sequences = {2};
  late.contexts = {longest};
  engine.max_context = std::min(context, std::max(steps.context_needed(), late.context_needed()));
  if (engine.max_context < late.context_needed()) late.contexts = {std::max(1, longest / 2)};
  NFP_ASSIGN_OR_RETURN(const auto bench, BenchEngine::create(loaded, engine));
  NFP_ASSIGN_OR_RETURN(StepTable table, measure_step_times(*bench, steps, {}));
  NFP_ASSIGN_OR_RETURN(const StepTable more, measure_step_times(*bench, late, {}));
  table.steps.insert(table.steps.end(), more.steps.begin(), more.steps.end());
  return table;
}

Status keep(const fs::path& path, const std::string& text) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);  // where it fails, so does the file, and says why
  return write_file(path.string(), text);
}

}  // namespace

Result<StartSteps> start_step_times(LoadedModel& loaded, const StartStepsOptions& options) {
  StartSteps found;
  const fs::path folder = folder_of(options);
  if (!folder.empty()) {
    found.path = (folder / fmt::format("{:016x}.json", std::hash<std::string>{}(key_of(loaded, options)))).string();
    const auto text = read_text_file(found.path);
    if (text.ok()) {
      auto table = parse_step_table(*text, found.path);
      // The file's name is a hash: what it holds must be of this model and device all the same.
      if (table.ok() && table->model == loaded.name && table->device == loaded.backend->info().device) {
        found.table = std::move(table).value();
        return found;
      }
    }
  }
  const auto start = std::chrono::steady_clock::now();
  NFP_ASSIGN_OR_RETURN(found.table, measure(loaded, options));
  found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // A machine that was so busy with something else is measured again at the next start; until then the steps that run
  // correct the table.
  if (folder.empty() || found.seconds > 3 * options.seconds) {
    found.path.clear();
    return found;
  }
  if (const Status kept = keep(found.path, to_json_text(found.table)); !kept.ok()) {
    log::warn("step times are measured again at the next start: {}", kept.error().message);
    found.path.clear();
  }
  return found;
}

}  // namespace nfp
