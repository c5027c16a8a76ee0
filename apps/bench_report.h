// What `nestedfp bench` prints.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <vector>

#include "backend/cpu/ceilings.h"
#include "eval/benchmark.h"
#include "eval/device_limits.h"

namespace nfp {

using Ceilings = std::optional<cpu::MachineCeilings>;

void print_json(const BenchmarkOptions& options, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows,
                size_t peak_memory, const Ceilings& ceilings);
void print_table(const BenchmarkOptions& options, const LoadedModel& loaded, const std::vector<BenchmarkRow>& rows,
                 size_t peak_memory, const Ceilings& ceilings);

// What the JSON of every mode begins with.
nlohmann::ordered_json report_head(const LoadedModel& loaded, const std::optional<DeviceLimits>& limits);

// As measured, or where nothing was, from the data sheet of a device that is known.
std::optional<DeviceLimits> device_limits(const LoadedModel& loaded, const Ceilings& ceilings);

}  // namespace nfp
