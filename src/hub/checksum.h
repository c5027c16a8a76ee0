// The checksums that the hub names files by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace nfp {

// By the length of the expected one: 64 hexadecimal digits are a SHA-256 of the bytes, 40 a Git SHA-1 (of
// "blob SIZE\0" and the bytes).
class Checksum {
 public:
  // `size`: bytes in all.
  Checksum(const std::string& expected, uint64_t size);
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  void reset();
  void add(std::span<const std::byte> bytes);
  std::string hex();         // of all that was added since the last reset; call once
  const char* kind() const;  // "SHA-256"

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nfp
