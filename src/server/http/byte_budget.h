// One number of bytes that all requests of a server may hold together: bodies being read, what is parsed of them, and
// what waits. A request's share is its lease.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace nfp::http {

class ByteBudget {
 public:
  explicit ByteBudget(uint64_t most) : most_(most) {}
  bool take(uint64_t bytes) {
    uint64_t used = used_.load(std::memory_order_relaxed);
    do {
      if (bytes > most_ - used) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
    return true;
  }
  void give_back(uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }
  uint64_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  const uint64_t most_;
  std::atomic<uint64_t> used_{0};
};

class ByteLease {
 public:
  ByteLease() = default;  // of no budget: everything is granted
  explicit ByteLease(std::shared_ptr<ByteBudget> budget) : budget_(std::move(budget)) {}
  ByteLease(ByteLease&& other) noexcept : budget_(std::move(other.budget_)), bytes_(std::exchange(other.bytes_, 0)) {}
  ByteLease& operator=(ByteLease&& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~ByteLease() { resize(0); }

  // Holds `bytes` from now on. False, and as before, where the budget does not have them.
  bool resize(uint64_t bytes) {
    if (budget_ && bytes > bytes_ && !budget_->take(bytes - bytes_)) return false;
    if (budget_ && bytes < bytes_) budget_->give_back(bytes_ - bytes);
    bytes_ = bytes;
    return true;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<ByteBudget> budget_;
  uint64_t bytes_ = 0;
};

}  // namespace nfp::http
