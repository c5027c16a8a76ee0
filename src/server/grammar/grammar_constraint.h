// The server's side of the processes of grammar_worker.h: one compiled grammar, and one answer that follows it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/grammar/grammar.h"
#include "server/grammar/grammar_wire.h"

namespace nfp::server {

inline constexpr char kNoProcessForGrammar[] = "no process could be made for a grammar; try again later";

// A grammar's process, for as long as this lives.
class GrammarProcess {
 public:
  GrammarProcess(Fd socket, uint64_t memory, GrammarStats* counts)
      : bytes(memory), stats(counts), socket_(std::move(socket)) {}
  // A copy of it for one answer, behind the returned socket. Never waits; nothing where that is not possible now.
  std::optional<Fd> match() const;
  bool alive() const;

  const uint64_t bytes;  // of memory
  GrammarStats* const stats;

 private:
  mutable std::mutex mutex_;
  Fd socket_;
};

// The mask of the next token is under way from the moment that accept() returns.
class ProcessConstraint final : public TokenConstraint {
 public:
  // `param`: the field that the grammar came from, for errors.
  ProcessConstraint(std::shared_ptr<const GrammarProcess> grammar, std::string param, int32_t vocab);
  bool ready(std::chrono::microseconds wait) override;
  bool fill(std::span<uint32_t> mask) override;
  bool accept(int32_t token) override;
  std::string_view failure() const override { return failure_; }
  ErrorCode failure_code() const override { return failure_code_; }

 private:
  using Clock = std::chrono::steady_clock;
  void take_bytes();
  void fail(std::string message, ErrorCode code = ErrorCode::kInvalidInput);
  void lost();

  std::shared_ptr<const GrammarProcess> grammar_;
  std::string param_;
  const size_t words_;
  Fd socket_;
  Clock::time_point asked_;  // for the mask that is awaited
  Reply reply_;
  std::vector<uint32_t> mask_;
  size_t received_ = 0;  // bytes of reply_ and mask_
  bool complete_ = false;
  std::string failure_;
  ErrorCode failure_code_ = ErrorCode::kInvalidInput;
};

}  // namespace nfp::server
