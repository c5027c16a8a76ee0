// The file that holds a base model's distributions for KL divergence: a header, then one record for every scored
// position.
//
// A record is the vocabulary's log-probabilities in 16 bits each: float maximum, float step, then uint16 codes with
// log p = maximum - step * code. Codes span 24 nats; anything less likely than e^-24 of the likeliest token counts as
// that. The step is then 3.7e-4 nats, and its effect on a KL divergence is of the order of its square.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/mapped_file.h"
#include "base/result.h"

namespace nfp {

struct LogprobHeader {
  char magic[8] = {'n', 'f', 'p', 'l', 'o', 'g', 'p', '1'};
  uint32_t vocab = 0;
  uint32_t ctx = 0;
  uint64_t chunks = 0;
  uint64_t rows_per_chunk = 0;
  uint64_t tokens_hash = 0;  // of the tokens of those chunks: the same text, tokenised alike
};
static_assert(sizeof(LogprobHeader) == 40);

size_t logprob_record_bytes(uint32_t vocab);
// log_probabilities: [vocab], natural. record: logprob_record_bytes(vocab).
void encode_logprobs(std::span<const float> log_probabilities, std::byte* record);
void decode_logprobs(const std::byte* record, std::span<float> log_probabilities);

class LogprobReader {
 public:
  static Result<LogprobReader> open(const std::string& path);
  const LogprobHeader& header() const { return header_; }
  const std::byte* record(uint64_t index) const;

 private:
  MappedFile file_;
  LogprobHeader header_;
};

}  // namespace nfp
