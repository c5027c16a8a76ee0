// What Prometheus's own client libraries tell of a process.
#pragma once

#include <cstdint>

namespace nfp::server {

struct ProcessFacts {
  uint64_t virtual_bytes = 0;
  double start_s = 0;  // since 1970
  uint64_t open_files = 0;
  uint64_t most_files = 0;
};

// Of /proc; zeros where that cannot be read.
ProcessFacts process_facts();

}  // namespace nfp::server
