// How much memory this process has resident and how much is free, from the kernel's own books.
#pragma once

#include <cstdint>

namespace nfp {

struct ProcessMemory {
  uint64_t resident = 0;  // bytes now (VmRSS)
  uint64_t peak = 0;      // bytes at most so far (VmHWM)
};

// Zeros where the kernel does not tell (no /proc).
ProcessMemory process_memory();

// Bytes that programs may still take without swapping (MemAvailable); 8 GiB where the kernel does not tell.
uint64_t available_memory();

}  // namespace nfp
