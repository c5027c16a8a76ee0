// Lines from a person: with editing and history on a terminal (libedit), plainly from a pipe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/result.h"

namespace nfp {

class LineReader {
 public:
  explicit LineReader(std::string prompt);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  // Without the newline; nothing at the end of input. Ctrl-C gives an empty line.
  Result<std::optional<std::string>> next();

 private:
  Result<std::optional<std::string>> next_from_pipe();

  struct Terminal;
  std::string prompt_;
  std::unique_ptr<Terminal> terminal_;  // null when input is not a terminal
};

}  // namespace nfp
