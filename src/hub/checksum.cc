#include "hub/checksum.h"

#include <fmt/format.h>
#include <sha1.h>
#include <sha2.h>

namespace nfp {

struct Checksum::State {
  bool git = false;
  uint64_t size = 0;
  SHA1_CTX sha1 = {};
  SHA2_CTX sha256 = {};
};

Checksum::Checksum(const std::string& expected, uint64_t size) : state_(std::make_unique<State>()) {
  state_->git = expected.size() == 40;
  state_->size = size;
  reset();
}

Checksum::~Checksum() = default;

void Checksum::reset() {
  if (!state_->git) return SHA256Init(&state_->sha256);
  SHA1Init(&state_->sha1);
  const std::string header = fmt::format("blob {}", state_->size);
  SHA1Update(&state_->sha1, reinterpret_cast<const uint8_t*>(header.c_str()), header.size() + 1);
}

void Checksum::add(std::span<const std::byte> bytes) {
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  if (state_->git) {
    SHA1Update(&state_->sha1, data, bytes.size());
  } else {
    SHA256Update(&state_->sha256, data, bytes.size());
  }
}

std::string Checksum::hex() {
  uint8_t digest[SHA256_DIGEST_LENGTH] = {};
  size_t length = SHA256_DIGEST_LENGTH;
  if (state_->git) {
    length = SHA1_DIGEST_LENGTH;
    SHA1Final(digest, &state_->sha1);
  } else {
    SHA256Final(digest, &state_->sha256);
  }
  std::string text;
  for (size_t i = 0; i < length; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

const char* Checksum::kind() const { return state_->git ? "Git SHA-1" : "SHA-256"; }

}  // namespace nfp
