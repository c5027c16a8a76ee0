// Any bytes as a file of choices. The checksum and key are put right first, so that what is behind them is reached.
#include <cstring>
#include <vector>

#include "calibrate/upper_choice.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  (void)nfp::parse_choices(bytes, "fuzz", 0);
  if (size < 24) return 0;
  std::vector<std::byte> fixed(bytes.begin(), bytes.end());
  std::memcpy(fixed.data(), "NFPCHOI1", 8);
  uint64_t key = 0;
  std::memcpy(&key, fixed.data() + 8, sizeof(key));
  const uint64_t checksum = nfp::hash_bytes(std::span(fixed).first(size - 8));
  std::memcpy(fixed.data() + size - 8, &checksum, sizeof(checksum));
  (void)nfp::parse_choices(fixed, "fuzz", key);
  return 0;
}
