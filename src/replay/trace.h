// Request traces: when requests came, how long their prompts and answers were. Three public formats are read:
//
//   Azure     CSV, TIMESTAMP,ContextTokens,GeneratedTokens; timestamps are dates (Patel et al., Splitwise, ISCA 2024;
//             Stojkovic et al., DynamoLLM, HPCA 2025)
//   BurstGPT  CSV, Timestamp,...,Request tokens,Response tokens,...; timestamps are seconds (Wang et al., 2024)
//   Mooncake  JSON lines, {"timestamp": ms, "input_length", "output_length", ...} (Qin et al., FAST 2025)
//
// Each may say beside that what the server takes of a request, in columns or fields of these names: `priority`, and
// `precision` (auto, exact or fast).
#pragma once

#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/request.h"

namespace nfp {

struct TraceRequest {
  double arrival_s = 0;                                    // since the first request of the trace
  int32_t input = 0;                                       // tokens
  int32_t output = 0;                                      // tokens
  int32_t priority = 0;                                    // lower goes first
  std::optional<PrecisionClass> precision = std::nullopt;  // none: as the server does by default
};

struct Trace {
  std::string format;                  // "azure", "burstgpt", "mooncake"
  std::vector<TraceRequest> requests;  // in order of arrival
  int64_t skipped = 0;                 // rows without a prompt or an answer (BurstGPT has them for failures)
  int64_t unsorted = 0;                // rows that came before the one above them; they were put in order
  double seconds() const { return requests.empty() ? 0 : requests.back().arrival_s; }
  double rate() const { return requests.size() < 2 ? 0 : static_cast<double>(requests.size() - 1) / seconds(); }
};

struct TraceLimits {
  int64_t most_rows = 20'000'000;    // beyond that the file is refused
  size_t most_line_bytes = 1 << 20;  // Mooncake's lines carry hashes of their blocks
  int32_t most_tokens = 1 << 24;     // of one prompt or answer
};

// Reads row by row. Errors name the line and the column.
Result<Trace> read_trace(std::istream& in, std::string_view where, const TraceLimits& limits = {});
Result<Trace> read_trace_file(const std::string& path);

// The longest replay: 31 years. Beyond some hundred a clock of nanoseconds overflows.
inline constexpr double kMostReplaySeconds = 1e9;

struct TraceSelection {
  double rate = 0;          // requests a second; 0 = as in the trace
  double speed = 1;         // the trace's clock runs so many times as fast, before `rate` is looked at
  int64_t requests = 0;     // the first so many of what is left; 0 = all
  int32_t most_tokens = 0;  // prompt and answer together; longer ones are left out. 0 = any
  uint64_t seed = 1;        // of which requests a lower rate keeps
};

// A rate below the trace's own keeps each request with the same chance, as if fewer users had sent them: bursts and
// lengths stay what they are. A higher one makes the clock faster. Error: nothing is left, or the last request comes
// after kMostReplaySeconds.
Result<Trace> select(const Trace& trace, const TraceSelection& selection);

}  // namespace nfp
