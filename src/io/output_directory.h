// A directory that appears whole or not at all: written under a temporary name beside its place, then renamed.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace nfp {

class OutputDirectory {
 public:
  // Refuses a `path` that exists, unless `force`; and then still one that is not a model's directory (has no
  // config.json and is not empty) or that `source` lies in. `needed`: bytes that will be written, checked against the
  // disk's free space.
  static Result<OutputDirectory> create(const std::string& path, bool force, const std::string& source,
                                        uint64_t needed);
  ~OutputDirectory();  // removes what was written, unless committed
  OutputDirectory(OutputDirectory&& other) noexcept;
  OutputDirectory& operator=(OutputDirectory&&) = delete;
  OutputDirectory(const OutputDirectory&) = delete;
  OutputDirectory& operator=(const OutputDirectory&) = delete;

  std::string file(const std::string& name) const { return temporary_ + "/" + name; }
  Status make_folder(const std::string& name) const;
  // Puts the directory into its place; what was there before goes away after that.
  Status commit();
  // Errors met while writing name the temporary; this names the place that the caller asked for.
  Error at_place(Error error) const;

 private:
  OutputDirectory(std::string path, std::string temporary) : path_(std::move(path)), temporary_(std::move(temporary)) {}
  std::string path_;
  std::string temporary_;  // empty once committed
};

}  // namespace nfp
