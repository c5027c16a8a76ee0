// A CSV file with a line for each step of the engine: what it computed, at which level, how long that was predicted to
// take and took. For whoever wants to see what the policy did, or to improve the predictions. What was in the file
// before goes with the first step: a start that fails, as another server has the port and perhaps the log, loses
// nothing. Where the file takes no more (a full disk), a warning says so, and it ends with its last whole line.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/result.h"
#include "engine/engine.h"

namespace nfp {

class StepLog {
 public:
  static Result<std::unique_ptr<StepLog>> create(const std::string& path);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  void add(const StepRecord& step);

 private:
  StepLog(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;              // -1: it took no more
  bool keeps_ = false;  // what was there before
  double first_s_ = -1;
};

}  // namespace nfp
