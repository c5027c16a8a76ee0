#include "eval/logprob_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nfp {
namespace {

constexpr float kSpan = 24.0f;  // nats
constexpr float kCodes = 65535.0f;

}  // namespace

size_t logprob_record_bytes(uint32_t vocab) { return 2 * sizeof(float) + (size_t{vocab} * 2 + 3) / 4 * 4; }

void encode_logprobs(std::span<const float> log_probabilities, std::byte* record) {
  const float top = *std::max_element(log_probabilities.begin(), log_probabilities.end());
  const float step = kSpan / kCodes;
  std::memcpy(record, &top, sizeof(top));
  std::memcpy(record + sizeof(top), &step, sizeof(step));
  std::byte* out = record + 2 * sizeof(float);
  for (float value : log_probabilities) {
    const float code = std::clamp((top - value) / step, 0.0f, kCodes);
    const auto rounded = static_cast<uint16_t>(std::lrintf(std::isnan(code) ? kCodes : code));
    std::memcpy(out, &rounded, sizeof(rounded));
    out += sizeof(rounded);
  }
}

void decode_logprobs(const std::byte* record, std::span<float> log_probabilities) {
  float top = 0, step = 0;
  std::memcpy(&top, record, sizeof(top));
  std::memcpy(&step, record + sizeof(top), sizeof(step));
  const std::byte* in = record + 2 * sizeof(float);
  for (float& value : log_probabilities) {
    uint16_t code = 0;
    std::memcpy(&code, in, sizeof(code));
    value = top - step * static_cast<float>(code);
    in += sizeof(code);
  }
}

Result<LogprobReader> LogprobReader::open(const std::string& path) {
  LogprobReader reader;
  NFP_ASSIGN_OR_RETURN(reader.file_, MappedFile::open(path));
  const auto bytes = reader.file_.bytes();
  if (bytes.size() < sizeof(LogprobHeader) || std::memcmp(bytes.data(), LogprobHeader().magic, 8) != 0) {
    return error(ErrorCode::kInvalidInput, "{}: is not a base file written by --save-base", path);
  }
  std::memcpy(&reader.header_, bytes.data(), sizeof(LogprobHeader));
  const LogprobHeader& h = reader.header_;
  const size_t body = bytes.size() - sizeof(LogprobHeader);
  const size_t record = logprob_record_bytes(h.vocab);
  // Divisions, so that no hostile count overflows.
  if (h.vocab == 0 || h.vocab > (1u << 24) || h.rows_per_chunk == 0 || body % record != 0 ||
      body / record / h.rows_per_chunk != h.chunks || (body / record) % h.rows_per_chunk != 0) {
    return error(ErrorCode::kInvalidInput, "{}: its size does not match its header; it is incomplete or damaged", path);
  }
  return reader;
}

const std::byte* LogprobReader::record(uint64_t index) const {
  return file_.bytes().data() + sizeof(LogprobHeader) + index * logprob_record_bytes(header_.vocab);
}

}  // namespace nfp
