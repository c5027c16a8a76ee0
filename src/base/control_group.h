// The control groups that this process is in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace nfp {

// The folders of its group and of those above it, up to the topmost that it sees: limits of all of them hold.
// `controller`: of version 1 ("memory"); empty = version 2. `root`: the folder that stands for /, for tests.
std::vector<std::string> control_groups(std::string_view controller, const std::string& root = "");

}  // namespace nfp
