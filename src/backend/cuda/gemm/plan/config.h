// Which kernel runs a shape: the tiles that exist, how a grid divides the work, and the choice between them. Choosing
// is apart from running; everything here is plain C++, printable and tested without a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backend/cuda/gemm/plan/layout.h"

namespace nfp::cuda {

enum class Mode : uint8_t {
  kF16,           // FP16 activations, exact FP16 weights
  kBF16,          // BF16 activations, FP16 weights that are BF16 numbers
  kE4M3,          // E4M3 activations, upper bytes; wgmma accumulates all of k (22 bits on Hopper)
  kE4M3Promoted,  // the same, added to FP32 registers every 512 of k (128 in the tiles
                  // with two row blocks)
  kW8A16,         // FP16 activations, upper bytes: what FP8 means without rounding activations
};
inline constexpr std::array kModes = {Mode::kF16, Mode::kBF16, Mode::kE4M3, Mode::kE4M3Promoted, Mode::kW8A16};
std::string_view name_of(Mode mode);
// E4M3 activations too.
constexpr bool is_fp8(Mode mode) { return mode == Mode::kE4M3 || mode == Mode::kE4M3Promoted; }
constexpr bool reads_lower(Mode mode) { return mode == Mode::kF16 || mode == Mode::kBF16; }
// Of k, that one step of a schedule takes: 128 bytes of a row of weights.
constexpr int step_k(Mode mode) { return reads_lower(mode) ? 64 : 128; }

// What the FP32 sums are stored as. It does not depend on the mode, and does not move the choice of a tile.
enum class Output : uint8_t {
  kF16,
  kBF16,
  kF32,
  kLargest,  // not stored: the largest of each row's columns (row_largest.h)
};
// The 16-bit type that kernels of a mode store in whole lines; the other goes element by element.
constexpr Output bulk_store_type(Mode mode) { return mode == Mode::kBF16 ? Output::kBF16 : Output::kF16; }

// A thread block computes rows() x tokens of D^T with its consumer warpgroups.
struct Tile {
  int16_t tokens = 0;         // wgmma's N (twice, above 256)
  int16_t row_blocks = 1;     // blocks of 64 rows per warpgroup
  int16_t cluster = 1;        // thread blocks along n that share one load of X,
  int16_t blocks_per_sm = 1;  // resident at once
  int16_t warpgroups = 2;     // that multiply
  bool along_tokens = false;  // or along m, sharing one load of W
  constexpr int rows() const { return 64 * warpgroups * row_blocks; }
  constexpr int cluster_rows() const { return along_tokens ? rows() : rows() * cluster; }
  constexpr int cluster_tokens() const { return along_tokens ? tokens * cluster : tokens; }
  constexpr bool operator==(const Tile&) const = default;
};

// Sums stay in registers: 96 a thread in a lean kernel (below), 160 beside two other warpgroups, else 232 or 240.
// Rebuilding weights takes about 50 of them, and promotion keeps a second set of sums. Tiles that were never the
// fastest in a mode, or hardly, are not compiled for it.
constexpr bool exists(const Tile& t, Mode mode, Join join = Join::kBiased) {
  const bool one_row_block = t.warpgroups == 2 && t.row_blocks == 1;
  const bool plain = one_row_block && t.cluster == 1;
  const bool twins = t.blocks_per_sm == 2;
  switch (mode) {
    case Mode::kF16:
      if (join == Join::kFree) {  // matrices that need it are few: a tile of each second width
        return (plain && (t.tokens == 8 || t.tokens == 16 || (t.tokens % 32 == 0 && t.tokens <= 256))) ||
               (t.warpgroups == 1 && (t.tokens == 64 || t.tokens == 96));
      }
      if (t.cluster == 2 && (t.tokens == 224 || t.tokens <= 144)) return false;
      return (one_row_block && !(twins && t.tokens > 32)) || t.warpgroups == 1 ||
             (t.warpgroups == 3 && t.tokens >= 128 && t.tokens <= 160);
    case Mode::kBF16:  // the C interface's alone: models here run on FP16 activations
      return plain && !twins && (t.tokens == 16 || t.tokens == 64 || t.tokens == 128 || t.tokens == 256);
    case Mode::kE4M3:
      if (t.tokens > 256) return false;  // nothing is rebuilt, so little is gained
      if (t.cluster > 1) return t.along_tokens ? t.tokens == 144 : t.tokens >= 224;
      return !(twins && t.tokens > 32) && t.tokens != 240 && !(t.row_blocks == 2 && t.tokens == 128);
    case Mode::kE4M3Promoted:
      if (t.along_tokens || t.tokens > 128) return false;
      return (one_row_block && (t.tokens == 8 || t.tokens == 16 || t.tokens % 32 == 0)) ||
             (t.warpgroups == 1 && (t.tokens == 64 || t.tokens == 96 || t.tokens == 128)) ||
             (t.row_blocks == 2 && t.tokens == 128);
    case Mode::kW8A16:  // reading is all that counts up to 64 tokens; beyond, one tile for an SM and one for a pair
      return (plain && (t.tokens <= 64 || t.tokens == 128)) ||
             (one_row_block && t.tokens == 256 && t.cluster == 2 && !t.along_tokens);
  }
  return false;
}

inline constexpr std::array kTiles = {Tile{8, 1, 1, 2},
                                      Tile{8, 1, 1, 1},
                                      Tile{16, 1, 1, 2},
                                      Tile{16, 1, 1, 1},
                                      Tile{24, 1, 1, 2},
                                      Tile{32, 1, 1, 2},
                                      Tile{32, 1, 1, 1},
                                      Tile{40, 1, 1, 2},
                                      Tile{48, 1, 1, 2},
                                      Tile{48, 1, 1, 1},
                                      Tile{64, 1, 1, 1},
                                      Tile{80, 1, 1, 1},
                                      Tile{96, 1, 1, 1},
                                      Tile{112, 1, 1, 1},
                                      Tile{128, 1, 1, 1},
                                      Tile{128, 1, 2, 1},
                                      Tile{144, 1, 1, 1},
                                      Tile{144, 1, 2, 1, 2, true},
                                      Tile{160, 1, 1, 1},
                                      Tile{176, 1, 1, 1},
                                      Tile{176, 1, 2, 1, 2, true},
                                      Tile{192, 1, 1, 1},
                                      Tile{208, 1, 1, 1},
                                      Tile{224, 1, 1, 1},
                                      Tile{224, 1, 2, 1},
                                      Tile{240, 1, 1, 1},
                                      Tile{256, 1, 1, 1},
                                      Tile{256, 1, 2, 1},
                                      Tile{256, 1, 2, 1, 2, true},
                                      Tile{288, 1, 1, 1},
                                      Tile{320, 1, 1, 1},
                                      Tile{16, 1, 1, 1, 1},
                                      Tile{32, 1, 1, 1, 1},
                                      Tile{64, 1, 1, 1, 1},
                                      Tile{80, 1, 1, 1, 1},
                                      Tile{96, 1, 1, 1, 1},
                                      Tile{128, 1, 1, 1, 1},
                                      Tile{96, 1, 1, 1, 3},
                                      Tile{112, 1, 1, 1, 3},
                                      Tile{128, 1, 1, 1, 3},
                                      Tile{144, 1, 1, 1, 3},
                                      Tile{160, 1, 1, 1, 3},
                                      Tile{176, 1, 1, 1, 3},
                                      Tile{112, 2, 1, 1},
                                      Tile{128, 2, 1, 1}};

// A tile of more than 256 tokens is two halves: two instructions, and two copies of tokens.
constexpr int halves(const Tile& t) { return t.tokens > 256 ? 2 : 1; }
constexpr int load_tokens(const Tile& t) { return t.tokens / halves(t); }
// Tokens that one block of a cluster loads at once.
constexpr int loaders(const Tile& t) { return t.along_tokens ? 1 : t.cluster; }
constexpr int box_tokens(const Tile& t) { return load_tokens(t) / loaders(t); }
// The same for the last copy of m tokens. The copy engine fills rows beyond the last token with zeros, but slowly: on
// an H200 a 64 x 64 tile over 65536 x 5120 weights took 82.7 us with 60 tokens and 110.2 with 20. So they are left out
// (but where several blocks share, whose parts begin at every eighth row, as the swizzle does).
constexpr int tail_rows(const Tile& t, int64_t m) {
  const int64_t tokens = m - (m - 1) / load_tokens(t) * load_tokens(t);
  if (loaders(t) == 1) return static_cast<int>(tokens);
  const int64_t shared = int64_t{8} * loaders(t);
  return static_cast<int>((tokens + shared - 1) / shared * 8);
}

// Bytes of shared memory. One stage holds 128 bytes of k for every row and token: 64 k as two byte planes and FP16
// tokens, or 128 k of E4M3.
inline constexpr int kStagingTokens = 32;
constexpr int stage_bytes(const Tile& t) { return t.rows() * 128 + t.tokens * 128; }
// Outputs on their way to memory, for each warpgroup: 64 columns of 2 bytes for chunks of this many tokens.
// (Narrow tiles have small ones, so that blocks that hold parts of a tile can share its few tokens out.)
constexpr int staging_tokens(const Tile& t) {
  if (t.tokens <= kStagingTokens) return 8;
  return t.tokens % kStagingTokens == 0 ? kStagingTokens : t.tokens % 16 == 0 ? 16 : 8;
}
// Chunks that are handed over at one barrier.
constexpr int staging_group(const Tile& t) {
  if (t.tokens <= kStagingTokens) return t.tokens / 8;
  return staging_tokens(t) == 8 ? 2 : 1;
}
// Narrow tiles get by with 96 registers a thread, so two blocks fit an SM, or one with a deep ring beside the small
// kernels around it: those find 27 KB and half the registers free, and dependent launch can overlap them.
constexpr bool lean(const Tile& t) { return t.tokens <= 48 || t.blocks_per_sm == 2; }
constexpr int fixed_bytes(const Tile& t, int staging_slots) {
  const int staging = staging_slots * staging_group(t) * staging_tokens(t) * 128;
  return 512 /* barriers */ + t.warpgroups * (staging + t.tokens * 4 /* token scales */);
}
constexpr int most_shared_bytes(const Tile& t) {
  return t.blocks_per_sm == 2 ? 113 * 1024 : lean(t) ? 200 * 1024 : 227 * 1024;
}
constexpr int stages(const Tile& t, int staging_slots) {
  const int fit = (most_shared_bytes(t) - fixed_bytes(t, staging_slots)) / stage_bytes(t);
  return fit < 12 ? fit : 12;
}
// Wide tiles have room for several groups, so that some are filled while the copy engine empties the others: it takes
// some 600 cycles for one, however small. Four warps hand groups over in turn, and none has two under way. No stage is
// given up for more than two.
constexpr int staging_slots(const Tile& t) {
  if (t.tokens <= kStagingTokens || t.blocks_per_sm == 2) return 1;
  int slots = 4;
  while (slots > 2 && stages(t, slots) < stages(t, 2)) --slots;
  return slots;
}
constexpr int staging_bytes(const Tile& t) { return staging_slots(t) * staging_group(t) * staging_tokens(t) * 128; }
constexpr int fixed_bytes(const Tile& t) { return fixed_bytes(t, staging_slots(t)); }
constexpr int stages(const Tile& t) { return stages(t, staging_slots(t)); }

// Tokens are given out in chunks of staging_tokens() when a cluster sums its parts: chunk c of a tile to part
// chunk_owner().
constexpr int chunks(const Tile& t) { return t.tokens / staging_tokens(t); }
constexpr int chunk_owner(const Tile& t, int chunk, int splits) { return chunk * splits / chunks(t); }
constexpr int first_chunk(const Tile& t, int owner, int splits) { return (owner * chunks(t) + splits - 1) / splits; }
constexpr int owned_chunks(const Tile& t, int splits) { return (chunks(t) + splits - 1) / splits; }
// Parts received by one block: for its rows and the tokens of its chunks, from every part.
constexpr int exchange_bytes(const Tile& t, int splits) {
  return t.rows() * owned_chunks(t, splits) * staging_tokens(t) * splits * 4;
}
// Whether parts of a tile can meet in global memory: the widest has no registers left for it.
constexpr bool can_join(const Tile& t) { return t.tokens <= 288; }
// Whether each of them can then add up a slice of the tile: only whole chunks are stored.
constexpr bool can_slice(const Tile& t) { return can_join(t) && chunks(t) > 1; }
inline constexpr int kMaxCluster = 8;
constexpr bool can_exchange(const Tile& t, int splits) {
  return splits > 1 && splits * t.cluster <= kMaxCluster && exchange_bytes(t, splits) <= stages(t) * stage_bytes(t);
}

// How the k iterations of all tiles are shared out.
//   splits = 1: a tile is one block's work; blocks take tiles in turn.
//   splits > 1: every tile's k is cut into that many equal parts, which are added in order of k: where all parts run at
//   once, each block adds up a slice of the tile's tokens, else the last block to finish adds all. exchange: the same
//   cut and the same order, but the parts of a tile are a cluster and pass sums through shared memory. splits = 0:
//   stream-K: whole waves as with 1, and the rest of the tiles cut into equal shares, one a block.
// A token's result depends on m only through this: see docs/kernels.md, "What a result depends on".
struct Config {
  Tile tile;
  int16_t splits = 1;
  bool exchange = false;
  constexpr bool operator==(const Config&) const = default;
};
// "128x64 c1 b1 split4" ("exchange4" with exchange, "w2" for a cluster along tokens); parse_config() reads the same.
std::string to_string(const Config& config);
std::optional<Config> parse_config(std::string_view text);

struct Problem {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Mode mode = Mode::kF16;
  bool swiglu = false;  // the epilogue joins pairs of rows
  Join join = Join::kBiased;
};

struct DeviceShape {
  int sms = 132;
  // Clusters of so many blocks that are resident at once where an SM holds one block, and where it holds two. Clusters
  // do not span GPCs, whose SMs differ from GPU to GPU and may not divide by their size.
  using Clusters = std::array<int, kMaxCluster + 1>;
  std::array<Clusters, 2> clusters{Clusters{0, 132, 66, 39, 32, 24, 19, 16, 16},
                                   Clusters{0, 264, 132, 79, 64, 48, 39, 33, 32}};
  int resident(int cluster, int blocks_per_sm) const {
    return clusters[static_cast<size_t>(blocks_per_sm - 1)][static_cast<size_t>(cluster)];
  }
};

// Shares of the cut tiles' iterations laid end to end: share v covers [begin(v), begin(v + 1)). `length` iterations a
// share as a fraction in lowest terms, so that products stay small whatever the number of tiles.
struct ShareLength {
  int numerator = 1;
  int denominator = 1;
  constexpr int begin(int share) const {
    return static_cast<int>(static_cast<uint32_t>(share) * static_cast<uint32_t>(numerator) /
                            static_cast<uint32_t>(denominator));
  }
  // The share that holds an iteration: the largest one that begins at or before it.
  constexpr int of(int iteration) const {
    return static_cast<int>((static_cast<uint32_t>(iteration + 1) * static_cast<uint32_t>(denominator) - 1) /
                            static_cast<uint32_t>(numerator));
  }
};

// The work of one launch, in units of clusters (a unit computes cluster * rows() rows).
struct Schedule {
  int grid = 0;          // thread blocks, a multiple of the cluster
  int k_iterations = 0;  // per tile
  int m_tiles = 0;
  int n_tiles = 0;      // clusters along n
  int group_m = 1;      // m tiles that neighbours in time share, for the L2
  int split_tiles = 0;  // the first of them are cut ...
  int shares = 0;       // ... into so many equal shares of iterations
  ShareLength length;   // of a share
  bool sliced = false;  // all parts run at once, and each adds up a slice
  int exchange = 1;     // parts of a tile in one cluster
  int cluster = 1;      // thread blocks, parts included
  int tiles() const { return m_tiles * n_tiles; }
  // Floats of partial sums: two slots for each share and block of a cluster.
  size_t partial_floats(const Tile& tile) const {
    return shares > split_tiles && exchange == 1
               ? size_t{2} * static_cast<size_t>(shares) * static_cast<size_t>(tile.cluster * tile.rows() * tile.tokens)
               : 0;
  }
  // One per warpgroup of a split tile.
  size_t counters(const Tile& tile) const {
    return shares > split_tiles && exchange == 1
               ? static_cast<size_t>(split_tiles) * static_cast<size_t>(tile.cluster * tile.rows() / 64)
               : 0;
  }
};
Schedule make_schedule(const Problem& problem, const Config& config, const DeviceShape& device);

// Everything worth timing for a problem: the analytic choice, then in the order of a model of the machine.
std::vector<Config> candidates(const Problem& problem, const DeviceShape& device);
// For shapes that nobody has tuned.
Config analytic_choice(const Problem& problem, const DeviceShape& device);

// Token counts are tuned at these sizes; choose() in table.h says what a count in between takes.
inline constexpr std::array kTokenBuckets = {1,   8,   16,  24,  32,  40,   48,   64,  96,
                                             128, 192, 256, 384, 512, 1024, 2048, 4096};
int token_bucket(int64_t m);

}  // namespace nfp::cuda
