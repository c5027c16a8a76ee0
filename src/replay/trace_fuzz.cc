// A trace file from its bytes to what is replayed.
#include <cstdint>
#include <sstream>
#include <string>

#include "replay/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream in(std::string(reinterpret_cast<const char*>(data), size));
  nfp::TraceLimits limits;
  limits.most_line_bytes = 4096;
  limits.most_rows = 10000;
  const auto trace = nfp::read_trace(in, "trace", limits);
  if (!trace.ok()) return 0;
  double last = 0;
  for (const nfp::TraceRequest& request : trace->requests) {
    if (request.arrival_s < last || request.input < 1 || request.output < 1) __builtin_trap();
    last = request.arrival_s;
  }
  (void)nfp::select(*trace, {.rate = 3, .requests = 100});
  return 0;
}
