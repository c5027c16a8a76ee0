// How much memory this process has resident and how much is free, from the kernel's own books.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace nfp {

struct ProcessMemory {
  uint64_t resident = 0;  // bytes now (VmRSS)
  uint64_t peak = 0;      // bytes at most so far (VmHWM)
};

// Zeros where the kernel does not tell (no /proc).
ProcessMemory process_memory();

// Bytes that programs may still take without swapping (MemAvailable), no more than the limits of the control group and
// of those above it leave; 8 GiB where the kernel does not tell. `root`: the folder that stands for /, for tests.
uint64_t available_memory(const std::string& root = "");

// Warns where so many bytes are not free: swapped out they are slow, and where they cannot be, the kernel ends the
// program without a word. `taker` is whose they are, with a verb; `remedy` what to do, but for more memory.
void warn_of_memory(std::string_view taker, uint64_t bytes, std::string_view remedy);

// Bytes that the control group and those above it allow (memory.max, or memory.limit_in_bytes of version 1); 0 = no
// limit.
uint64_t memory_limit(const std::string& root = "");

}  // namespace nfp
