// How a block's threads share an SM's registers.
#pragma once

#include "backend/cuda/gemm/config.h"

namespace nfp::cuda {

// Registers are shared out by quarters of an SM, so a ninth warp at one block per SM would cap everyone at 168: there
// the producer is a whole warpgroup, and hands its registers over. Claiming more than was released would wait for ever.
constexpr int entry_registers(int consumers) { return 65536 / ((consumers + 1) * 128) / 8 * 8; }
// (A single consumer has 256 from the start.)
constexpr int consumer_registers(int consumers) { return consumers == 3 ? 160 : 232; }
constexpr int producer_registers(int consumers) { return consumers == 3 ? 32 : 40; }
static_assert(2 * consumer_registers(2) + producer_registers(2) <= 3 * entry_registers(2));
static_assert(3 * consumer_registers(3) + producer_registers(3) <= 4 * entry_registers(3));
// Lean kernels (config.h) need no such exchange.
constexpr int threads(const Tile& t) { return t.warpgroups * 128 + (lean(t) ? 32 : 128); }

}  // namespace nfp::cuda
