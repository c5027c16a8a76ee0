// A folder of its own for each test of a fixture.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/testing/scratch_folder.h"

namespace nfp::testing {

class ScratchTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
  const ScratchFolder scratch_;
  const std::string dir_ = scratch_.path();
};

}  // namespace nfp::testing
