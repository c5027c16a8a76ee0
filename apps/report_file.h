// Files that a verb writes at its end, opened before its long work: a place that cannot be written to is told at once.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/atomic_file.h"
#include "base/result.h"

namespace nfp {

// A flag and the path that was given with it; "" = none.
struct FlagPath {
  std::string_view flag;
  std::string path;
};
// Error: an output would take the place of an input, or of another output.
Status check_no_overlap(const std::vector<FlagPath>& outputs, const std::vector<FlagPath>& inputs);

// Nothing where the path is empty: the flag was not given.
Result<std::optional<AtomicFile>> open_report(const std::string& path);

// Whether open_report() will succeed, for what is opened only after long work. Pipes and devices are not asked: opening
// them may mean something to who reads.
Status check_report(const std::string& path);

// Writes the whole of it; nothing where none was opened.
Status write_report(std::optional<AtomicFile>& file, std::string_view text);

}  // namespace nfp
