#include "backend/cpu/token_history.h"

#include <cassert>

namespace nfp::cpu {

Result<std::unique_ptr<CpuTokenHistory>> CpuTokenHistory::create(int32_t slots, int32_t vocab) {
  assert(slots >= 0 && vocab > 0);
  std::unique_ptr<CpuTokenHistory> history(new CpuTokenHistory(slots, vocab));
  const size_t bytes = static_cast<size_t>(slots) * static_cast<size_t>(vocab) * sizeof(uint32_t);
  NFP_ASSIGN_OR_RETURN(history->counts_, Mapping::create(bytes, true));
  NFP_ASSIGN_OR_RETURN(history->seen_, Mapping::create(bytes, true));
  history->seen_count_.assign(static_cast<size_t>(slots), 0);
  return history;
}

std::span<const int32_t> CpuTokenHistory::seen(int32_t slot) const {
  const auto s = static_cast<size_t>(slot);
  return {seen_.as<int32_t>() + s * static_cast<size_t>(vocab_), static_cast<size_t>(seen_count_[s])};
}

void CpuTokenHistory::add(int32_t slot, int32_t token, uint32_t times) {
  uint32_t& count = count_of(slot, token);
  if (count == 0) {
    const auto s = static_cast<size_t>(slot);
    seen_.as<int32_t>()[s * static_cast<size_t>(vocab_) + static_cast<size_t>(seen_count_[s]++)] = token;
    count = 1;
  }
  count += 2 * times;
}

Status CpuTokenHistory::reset(int32_t slot, std::span<const int32_t> prompt, std::span<const int32_t> output) {
  assert(slot >= 0 && slot < slots_);
  for (const auto& tokens : {prompt, output}) {
    for (const int32_t token : tokens) {
      if (token < 0 || token >= vocab_) {
        return error(ErrorCode::kInvalidInput, "token {} is outside the vocabulary of {}", token, vocab_);
      }
    }
  }
  for (const int32_t token : seen(slot)) count_of(slot, token) = 0;
  seen_count_[static_cast<size_t>(slot)] = 0;
  for (const int32_t token : prompt) add(slot, token, 0);
  for (const int32_t token : output) add(slot, token, 1);
  return ok_status();
}

}  // namespace nfp::cpu
