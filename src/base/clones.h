// NFP_CLONES before a function's definition compiles it for several instruction sets, and the program takes the best
// one that the machine has when it starts. For loops over rows that the compiler vectorises by itself; no clone changes
// a result, since nothing contracts or reorders floating-point arithmetic (-ffp-contract=off).
#pragma once

// Sanitizers' runtimes are not up when the choice is made; Clang 14 lacks the attribute.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define NFP_CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define NFP_CLONES
#endif
