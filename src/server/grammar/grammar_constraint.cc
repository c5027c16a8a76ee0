#include "server/grammar/grammar_constraint.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace nfp::server {
namespace {

// A process stops itself far earlier, by its CPU time; this is for one that the machine does not let run.
constexpr std::chrono::seconds kLongest{60};

}  // namespace

std::optional<Fd> GrammarProcess::match() const {
  auto pair = socket_pair();
  if (!pair) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (!send_with_fd(socket_.get(), kMatch, pair->second.get(), /*wait=*/false)) return std::nullopt;
  return std::move(pair->first);
}

bool GrammarProcess::alive() const {
  const std::lock_guard lock(mutex_);
  return connected(socket_.get());
}

ProcessConstraint::ProcessConstraint(std::shared_ptr<const GrammarProcess> grammar, std::string param, int32_t vocab)
    : grammar_(std::move(grammar)),
      param_(std::move(param)),
      words_((static_cast<size_t>(vocab) + 31) / 32),
      mask_(words_) {}

void ProcessConstraint::fail(std::string message, ErrorCode code) {
  failure_ = std::move(message);
  failure_code_ = code;
  socket_.reset();
}

void ProcessConstraint::lost() {
  if (!grammar_->alive()) {
    return fail(fmt::format("the process of the grammar in '{}' has ended; try again", param_), ErrorCode::kIo);
  }
  fail(fmt::format("the grammar in '{}' needs more memory than it may have, or cannot be followed", param_));
}

void ProcessConstraint::take_bytes() {
  while (!complete_ && failure_.empty()) {
    const size_t head = sizeof(reply_);
    char* to = received_ < head ? reinterpret_cast<char*>(&reply_) + received_
                                : reinterpret_cast<char*>(mask_.data()) + (received_ - head);
    const size_t wanted = received_ < head ? head - received_ : head + reply_.size - received_;
    const ssize_t n = wanted == 0 ? 0 : recv(socket_.get(), to, wanted, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) return lost();
    received_ += static_cast<size_t>(n);
    if (received_ < head) continue;
    if (reply_.status == WireStatus::kNoProcess) return fail(kNoProcessForGrammar, ErrorCode::kResource);
    if (reply_.status == WireStatus::kTooSlow) {
      grammar_->stats->answers_stopped.fetch_add(1, std::memory_order_relaxed);
      return fail(
          fmt::format("the grammar in '{}' takes too long to follow here; simplify it (fewer nested or "
                      "ambiguous repetitions)",
                      param_));
    }
    if (reply_.status == WireStatus::kRefused) {
      return fail(fmt::format("the grammar in '{}' allows nothing here", param_));
    }
    const size_t expected = reply_.status == WireStatus::kOk ? words_ * sizeof(uint32_t) : 0;
    if (reply_.size != expected) return fail("the grammar's process answered with a mask of another size");
    complete_ = received_ == head + reply_.size;
  }
}

bool ProcessConstraint::ready(std::chrono::microseconds wait) {
  if (complete_ || !failure_.empty()) return true;
  if (!socket_) {
    auto made = grammar_->match();
    if (made) {
      socket_ = std::move(*made);
      asked_ = Clock::now();
    } else {
      if (asked_ == Clock::time_point()) asked_ = Clock::now();
      if (!grammar_->alive()) lost();
      if (failure_.empty() && Clock::now() - asked_ > kLongest) fail(kNoProcessForGrammar, ErrorCode::kResource);
      return !failure_.empty();
    }
  }
  take_bytes();
  if (!complete_ && failure_.empty() && wait.count() > 0) {
    pollfd peer{socket_.get(), POLLIN, 0};
    const timespec most{wait.count() / 1'000'000, wait.count() % 1'000'000 * 1000};
    if (ppoll(&peer, 1, &most, nullptr) > 0) take_bytes();
  }
  if (!complete_ && failure_.empty() && Clock::now() - asked_ > kLongest) {
    fail(fmt::format("the grammar in '{}' had no time to be followed; try again later", param_), ErrorCode::kResource);
  }
  return complete_ || !failure_.empty();
}

bool ProcessConstraint::fill(std::span<uint32_t> mask) {
  while (!ready(std::chrono::milliseconds(20))) {
  }
  if (!failure_.empty() || reply_.status != WireStatus::kOk || mask.size() < words_) return false;
  std::copy(mask_.begin(), mask_.end(), mask.begin());
  return true;
}

bool ProcessConstraint::accept(int32_t token) {
  while (!ready(std::chrono::milliseconds(20))) {
  }
  if (!failure_.empty()) return false;
  const auto bit = static_cast<uint32_t>(token);
  if (reply_.status == WireStatus::kOk && (bit / 32 >= words_ || (mask_[bit / 32] >> (bit % 32) & 1u) == 0)) {
    return false;
  }
  complete_ = false;
  received_ = 0;
  asked_ = Clock::now();
  // A process that has ended meanwhile shows when its answer is read.
  (void)send_all(socket_.get(), &token, sizeof(token));
  return true;
}

}  // namespace nfp::server
