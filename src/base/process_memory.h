// How much memory this process has resident, from the kernel's own books.
#pragma once

#include <cstdint>

namespace nfp {

struct ProcessMemory {
  uint64_t resident = 0;  // bytes now (VmRSS)
  uint64_t peak = 0;      // bytes at most so far (VmHWM)
};

// Zeros where the kernel does not tell (no /proc).
ProcessMemory process_memory();

}  // namespace nfp
