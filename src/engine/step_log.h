// A CSV file with a line for each step of the engine: what it computed, at which level, how long that was predicted to
// take and took. For whoever wants to see what the policy did, or to improve the predictions.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "base/result.h"
#include "engine/engine.h"

namespace nfp {

class StepLog {
 public:
  static Result<std::unique_ptr<StepLog>> create(const std::string& path);
  ~StepLog() { std::fclose(file_); }
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  void add(const StepRecord& step);

 private:
  explicit StepLog(std::FILE* file) : file_(file) {}

  std::FILE* file_;
  double first_s_ = -1;
};

}  // namespace nfp
