// What Prometheus's own client libraries tell of a process.
#pragma once

#include <cstdint>
#include <optional>

namespace nfp::server {

struct ProcessFacts {
  std::optional<uint64_t> virtual_bytes;
  std::optional<double> start_s;  // since 1970
  std::optional<uint64_t> open_files;
  std::optional<uint64_t> most_files;
};

// Of /proc, and nothing where that cannot be read, as with no descriptor left.
ProcessFacts process_facts();

}  // namespace nfp::server
