// What the server and its grammar processes say to each other (grammar_worker.h tells who they are), over pairs of
// stream sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/fd.h"

namespace nfp::server {

// Two ends, both closed on exec. Nothing when the process has no descriptors left.
std::optional<std::pair<Fd, Fd>> socket_pair();

// All of it, or false at the connection's end.
bool send_all(int fd, const void* data, size_t size);
bool receive_all(int fd, void* data, size_t size);

// Whether the process at the other end still lives (or another that it left this socket to).
bool connected(int fd);

// A byte with a descriptor beside it. `wait` false: fails where it cannot be sent at once.
bool send_with_fd(int channel, char what, int fd, bool wait);
// Fd without a value where none came along; nothing at the connection's end.
std::optional<std::pair<char, Fd>> receive_with_fd(int channel);

// To the first process: kHost with the socket of the one that will hold the vocabulary.
// To that one: kVocabulary and then a VocabularyHead with its data; kCompile with the socket of a new grammar.
// To a grammar's process: kMatch with the socket of a new matcher.
inline constexpr char kHost = 'H';
inline constexpr char kVocabulary = 'V';
inline constexpr char kCompile = 'C';
inline constexpr char kMatch = 'M';

struct VocabularyHead {
  uint32_t vocab = 0;    // logits
  uint32_t end_ids = 0;  // that many int32 follow, then `bytes`: each token as uint32 size and text
  uint64_t bytes = 0;
};

enum class WireGrammar : uint32_t { kObject, kSchema, kRegex, kEbnf };

struct CompileHead {
  WireGrammar kind = WireGrammar::kObject;
  uint32_t strict_schema = 0;    // objects allow only what they name
  uint64_t text_bytes = 0;       // that many follow
  uint32_t compile_ms = 0;       // wall clock
  uint32_t token_burst_ms = 0;   // CPU time of masks: what may be used at once,
  uint32_t token_refill_us = 0;  // and what each token adds to it
  uint32_t reserved = 0;
  uint64_t memory_bytes = 0;  // of address space, beyond what the process has
};

enum class WireStatus : uint32_t {
  kOk,       // compiled: `size` is the grammar's memory. A matcher: `size` bytes of mask follow
  kAll,      // a matcher: every token is allowed
  kRefused,  // compiling: `size` bytes of explanation follow. A matcher: the token was not allowed
  kTooSlow,
  kNoProcess,  // the system gives none for what was asked
};

struct Reply {
  WireStatus status = WireStatus::kOk;
  uint32_t reserved = 0;
  uint64_t size = 0;
};

}  // namespace nfp::server
