// A folder of its own for a test or a fuzzer, in memory where the system has such a place; gone with the object.
#pragma once

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

namespace nfp::testing {

class ScratchFolder {
 public:
  ScratchFolder() {
    for (const std::string_view parent : {"/dev/shm", "/tmp"}) {
      path_ = std::string(parent) + "/nfp_scratch_XXXXXX";
      if (mkdtemp(path_.data()) != nullptr) return;
    }
    std::abort();
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace nfp::testing
