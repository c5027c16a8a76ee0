// A directory that appears whole or not at all: it is filled under a temporary name beside its place, then renamed. An
// object that goes away without commit() removes what it had written.
#pragma once

#include <string>

#include "base/result.h"

namespace nfp {

class StagedDirectory {
 public:
  // kIo where `path` exists and `force` is not set; the message names --force. With `force`, what is there is replaced
  // in commit().
  static Result<StagedDirectory> create(const std::string& path, bool force);
  ~StagedDirectory();
  StagedDirectory(StagedDirectory&& other) noexcept;
  StagedDirectory& operator=(StagedDirectory&&) = delete;
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  const std::string& path() const { return temporary_; }  // where to write
  Status commit();

 private:
  StagedDirectory() = default;
  std::string path_;
  std::string temporary_;
};

}  // namespace nfp
