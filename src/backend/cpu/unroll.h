// NFP_UNROLL for (...): a loop that is unrolled whole, up to 24 rounds.
#pragma once

// Sanitizers make thousands of unrolled lines slow to compile, and have no use for them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NFP_UNROLL
#else
#define NFP_UNROLL _Pragma("GCC unroll 24")
#endif
