// Which tokens each sequence slot has seen, for penalties.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/huge_pages.h"

namespace nfp::cpu {

class CpuTokenHistory final : public TokenHistory {
 public:
  static Result<std::unique_ptr<CpuTokenHistory>> create(int32_t slots, int32_t vocab);

  int32_t slots() const override { return slots_; }
  int32_t vocab() const { return vocab_; }
  Status reset(int32_t slot, std::span<const int32_t> prompt, std::span<const int32_t> output);
  // Never allocates, so that it may be called inside a step.
  void append(int32_t slot, int32_t token) { add(slot, token, 1); }

  // Tokens that the slot has seen, each once.
  std::span<const int32_t> seen(int32_t slot) const;
  // How often the slot has generated the token.
  uint32_t generated(int32_t slot, int32_t token) const { return count_of(slot, token) >> 1; }

 private:
  CpuTokenHistory(int32_t slots, int32_t vocab) : slots_(slots), vocab_(vocab) {}
  uint32_t& count_of(int32_t slot, int32_t token) const {
    return counts_.as<uint32_t>()[static_cast<size_t>(slot) * static_cast<size_t>(vocab_) + static_cast<size_t>(token)];
  }
  void add(int32_t slot, int32_t token, uint32_t times);

  int32_t slots_;
  int32_t vocab_;
  // Both are [slots, vocab] of address space that costs memory only where a slot was used.
  Mapping counts_;  // twice the number of times generated, plus one where seen at all
  Mapping seen_;    // tokens in order of first sight
  std::vector<int32_t> seen_count_;
};

}  // namespace nfp::cpu
