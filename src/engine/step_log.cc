#include "engine/step_log.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>

namespace nfp {

Result<std::unique_ptr<StepLog>> StepLog::create(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return error(ErrorCode::kUsage, "--step-log {}: {}", path, std::strerror(errno));
  std::setvbuf(file, nullptr, _IOLBF, 1 << 12);  // whoever follows the file sees whole lines
  fmt::print(file,
             "start_s,precision,fp8_share,change,tokens,prefill_tokens,sequences,waiting,prefill_pairs,prefill_keys,"
             "decode_keys,predicted_ms,table_ms,ms\n");
  return std::unique_ptr<StepLog>(new StepLog(file));
}

void StepLog::add(const StepRecord& step) {
  const double start_s = std::chrono::duration<double>(step.start.time_since_epoch()).count();
  if (first_s_ < 0) first_s_ = start_s;
  const StepWork& work = step.work;
  fmt::print(file_, "{:.4f},{},{:.3f},{},{},{},{},{},{:.0f},{:.0f},{:.0f},{:.3f},{:.3f},{:.3f}\n", start_s - first_s_,
             name_of(step.precision), step.fp8_share, kLevelChangeNames[static_cast<size_t>(step.change)], step.tokens,
             step.prefill_tokens, step.sequences, step.waiting, work.prefill_pairs, work.prefill_keys, work.decode_keys,
             1e3 * step.predicted_s, 1e3 * step.table_s, 1e3 * step.seconds);
}

}  // namespace nfp
