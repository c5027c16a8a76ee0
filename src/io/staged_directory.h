// A directory that appears whole or not at all: it is filled under a temporary name beside its place, then renamed. An
// object that goes away without commit() removes what it had written.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "base/temporary_path.h"

namespace nfp {

class StagedDirectory {
 public:
  // kIo where `path` exists and `force` is not set; the message names --force. With `force`, what is there is replaced
  // in commit(), but only an empty directory or one with a config.json, and never one that `source` lies in, a mount
  // point or the current directory; of a link what it leads to. `needed`: bytes that will be written, checked against
  // what is free on the disk.
  static Result<StagedDirectory> create(const std::string& path, bool force, const std::string& source,
                                        uint64_t needed);
  const std::string& path() const { return temporary_.name(); }  // where to write
  // kIo too where, without `force`, something has come to be at the place since.
  Status commit();
  // Errors met while writing name the temporary; this names the place that was asked for instead.
  Error at_place(Error error) const;

 private:
  StagedDirectory() = default;
  std::string path_;
  bool force_ = false;
  TemporaryPath temporary_;
};

}  // namespace nfp
