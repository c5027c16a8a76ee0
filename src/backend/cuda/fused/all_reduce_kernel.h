// A buffer of AllReduce (all_reduce.h): a header, and for each of two slots a part from every other rank. Calls take
// the slots in turns. Who has read a part makes it empty again; a rank that stores for the second call after this one
// has seen every rank's part of the call between, or a sum that has it, so that rank is done with this one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nfp::cuda {

inline constexpr int kMaxRanks = 8;
inline constexpr size_t kAllReduceAlignment = 256;
inline constexpr size_t kAllReduceHeader = 256;
inline constexpr size_t kAllReduceSlots = 2;
// A word of nothing but these is no part's: two NaNs that no arithmetic makes. A part that has them gets other NaNs.
inline constexpr int kAllReduceEmptyByte = 0xff;
inline constexpr uint32_t kAllReduceEmpty = 0xffffffff;
inline constexpr uint32_t kAllReduceNans = 0x7fff7fff;

struct AllReduceHeader {
  uint32_t calls;         // that have ended
  uint32_t blocks_ended;  // of the current one
};
static_assert(sizeof(AllReduceHeader) <= kAllReduceHeader);

struct AllReduceParams {
  uint8_t* buffers[kMaxRanks];
  int64_t part_bytes;  // from one part to the next; a slot has ranks - 1
  int rank, ranks;
  bool by_owner;  // two exchanges, not one: row r's parts go to rank r % ranks, and from there comes the sum
};

}  // namespace nfp::cuda
