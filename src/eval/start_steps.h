// The step times that a server needs before its first request: few steps, chosen so that measuring them takes seconds,
// kept in the user's cache folder for the next start. Each kind is measured in several rounds, of which the fastest
// counts; where they differ much (StepTable::spread), they are measured again at the next start, until they do not.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/engine_config.h"
#include "policy/step_table.h"
#include "runtime/loaded_model.h"

namespace nfp {

struct StartStepsOptions {
  double seconds = 8;   // about as long as measuring may take; a device, whose steps are short, takes at most 1.5
  EngineConfig engine;  // as it will serve
  std::string variant;  // flags that change what a step costs; part of the file's name
  std::function<void()> measures;  // called before measuring, where nothing is kept that will do
  // The folder; empty = $XDG_CACHE_HOME/nestedfp/step-times or ~/.cache/nestedfp/step-times.
  std::string folder;
};

struct StartSteps {
  StepTable table;
  std::string path;    // where it is kept; empty = nowhere
  double seconds = 0;  // that measuring took; 0 = it was there
  bool busy = false;   // the machine had other work meanwhile
};

// The steps that are measured, without their times: the fastest first but for a chunk of a prompt before all, each
// once, no more tokens than the limits of `engine` allow, and at least two at each of the levels 0 (FP16) and 1,
// without which nothing can be predicted. All limits must be set.
std::vector<StepTime> start_step_kinds(const EngineConfig& engine);

// Of `kinds`, ordered as start_step_kinds() has them, those that there is time for: together `seconds`, by what each
// takes, and none a third of it with its other level. First the shortest and the longest chunk and decode step, between
// and beyond which others are predicted; then one in the middle, and what tells attention and mixed steps; then the
// rest. Kinds stay in order and with their other level. Eight are always taken, the first ones where time is short.
std::vector<StepTime> start_steps_within(std::span<const StepTime> kinds,
                                         const std::function<double(const StepTime&)>& seconds_of, double seconds);

Result<StartSteps> start_step_times(LoadedModel& loaded, const StartStepsOptions& options);

}  // namespace nfp
