// Products on tiles of BF16 (PairArithmetic::kBf16Tiles). A tile of weights is 32 steps of a panel, two steps a row;
// one of x is 16 of its rows. Up to kTileDirectRows rows of x each panel is turned into tiles as it is read, for all
// rows at once; more rows run over blocks of kTileBlockSteps steps of two panels, turned into tiles before: 16 KB,
// which with the rows' steps leaves L1 room (512 steps: 1200 instead of 1550 GFLOP/s on Emerald Rapids).
#pragma once

#include <type_traits>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/linear_names_inl.h"

// NOLINTBEGIN(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result): as in linear_inl.h
namespace nfp {
namespace {

using cpu::kTileHeight;
using cpu::kTilePanels;
using cpu::kTileSteps;

constexpr int64_t kTileDirectRows = 4 * kTileHeight;
constexpr int kTileWords = 512;  // BF16 numbers of a tile
constexpr int64_t kChunkGroups = kTileSteps / cpu::kGroupSteps;
constexpr int64_t kTileBlock = cpu::kTileBlockSteps / kTileSteps;  // chunks
constexpr int64_t kTileStride = 64;                                // bytes of a tile's row
constexpr int64_t kSumStride = kGroupColumns * static_cast<int64_t>(sizeof(float));
// How far ahead of the group that is turned into tiles a panel is asked for, in L2 and in L1.
constexpr int64_t kTileFarGroups = 64, kTileNearGroups = 16;

// Which tile is what, with R tiles of x and P of weights.
constexpr int sum_tile(int r, int p) { return 2 * r + p; }
constexpr int x_tile(int r) { return 4 + r; }
constexpr int weight_tile(int p) { return 6 + p; }

// f(integral_constant) for 0 .. N-1.
template <int N, typename F>
inline void each_tile(F f) {
  f(std::integral_constant<int, 0>{});
  if constexpr (N > 1) f(std::integral_constant<int, 1>{});
  static_assert(N <= 2);
}

// x of a task as pair_words() lays it out.
struct TileRows {
  const char* at;
  int64_t stride;  // bytes
  // That begins at row `row`.
  const char* tile(int64_t row, int64_t chunk) const { return at + row * stride + chunk * kTileStride; }
};

// The sums of R tiles of rows, which begin at row[r], and P panels, whose tiles are at weights[p].
template <int R, int P>
inline void multiply_chunk(const TileRows& x, const int64_t* row, int64_t chunk, const uint16_t* const* weights) {
  each_tile<P>([&](auto p) { load_tile<weight_tile(p)>(weights[p], kTileStride); });
  each_tile<R>([&](auto r) {
    load_tile<x_tile(r)>(x.tile(row[r], chunk), x.stride);
    each_tile<P>([&](auto p) { multiply_tiles<sum_tile(r, p), x_tile(r), weight_tile(p)>(); });
  });
}

// Writes these sums, of each tile of rows to out[r], [16, kGroupColumns].
template <int R, int P>
inline void store_sums(float* const* out) {
  each_tile<R>(
      [&](auto r) { each_tile<P>([&](auto p) { store_tile<sum_tile(r, p)>(out[r] + p * kPanelRows, kSumStride); }); });
}

// Steps of a panel from group `first` on as a tile; zeros past its end. Calls ask(g) before each group.
template <typename Ask>
inline void fill_tile(const uint8_t* upper, int64_t first, int64_t groups, uint16_t* words, Ask ask) {
  const int64_t count = groups - first < kChunkGroups ? groups - first : kChunkGroups;
  upper += first * static_cast<int64_t>(kGroupBytes);
  if (count == kChunkGroups) {
    NFP_UNROLL for (int64_t g = 0; g < kChunkGroups; ++g) {
      ask(g);
      unpack_tile_rows(upper + g * kGroupBytes, words + g * 64);
    }
    return;
  }
  for (int64_t g = 0; g < count; ++g) unpack_tile_rows(upper + g * kGroupBytes, words + g * 64);
  for (int64_t i = count * 64; i < kTileWords; ++i) words[i] = 0;
}

// A chunk's tiles of two panels, and those that are made meanwhile of what comes next.
struct TileRoom {
  alignas(64) uint16_t words[2][2][kTileWords];
  int now = 0;         // which of them is multiplied next
  bool ready = false;  // and is there already
};

// Sums of all steps. `next`: the panels that are read after these; `following`: whose product comes after this one,
// the same panels' where there are more rows; or null.
template <int R, int P>
void direct_tiles(const Panel* panels, const Panel* const* next, const Panel* following, const TileRows& x,
                  const int64_t* row, int64_t groups, float* const* out, TileRoom& room) {
  const int64_t chunks = (groups + kChunkGroups - 1) / kChunkGroups;
  each_tile<R>([&](auto r) { each_tile<P>([&](auto p) { zero_tile<sum_tile(r, p)>(); }); });
  for (int p = 0; p < P && !room.ready; ++p) {
    fill_tile(panels[p].upper, 0, groups, room.words[room.now][p], [](int64_t) {});
  }
  for (int64_t c = 0; c < chunks; ++c) {
    // The next chunk's tiles are made while this one's are multiplied.
    if (c + 1 < chunks) {
      const int64_t first = (c + 1) * kChunkGroups;
      for (int p = 0; p < P; ++p) {
        const auto lines_at = [&](int64_t group) {
          return group < groups ? panels[p].upper + group * static_cast<int64_t>(kGroupBytes)
                                : next[p]->upper + (group - groups) * static_cast<int64_t>(kGroupBytes);
        };
        const uint8_t* far = lines_at(first + kTileFarGroups);
        const uint8_t* near = lines_at(first + kTileNearGroups);
        fill_tile(panels[p].upper, first, groups, room.words[room.now ^ 1][p], [&](int64_t g) {
          prefetch_far(far + g * static_cast<int64_t>(kGroupBytes));
          prefetch(near + g * static_cast<int64_t>(kGroupBytes));
        });
      }
    }
    if (c + 1 == chunks && following != nullptr) {
      for (int p = 0; p < P; ++p) {
        fill_tile(following[p].upper, 0, groups, room.words[room.now ^ 1][p], [](int64_t) {});
      }
    }
    const uint16_t* weights[2] = {room.words[room.now][0], room.words[room.now][P - 1]};
    multiply_chunk<R, P>(x, row, c, weights);
    room.now ^= 1;
  }
  room.ready = following != nullptr;
  store_sums<R, P>(out);
}

// Lines of the block that comes next, which are asked for while this one is multiplied.
struct LinesAhead {
  const Panel* panels = nullptr;
  int64_t count = 0;             // of panels
  int64_t group = 0, lines = 0;  // of each panel
  int64_t each = 0;              // with a chunk
  int64_t panel = 0, line = 0;   // where that stands
  void ask() {
    if (panel >= count) return;
    const uint8_t* from = panels[panel].upper + (group + line) * static_cast<int64_t>(kGroupBytes);
    const int64_t here = lines - line < each ? lines - line : each;
    for (int64_t i = 0; i < here; ++i) prefetch_far(from + i * static_cast<int64_t>(kGroupBytes));
    line += here;
    if (line == lines) line = 0, ++panel;
  }
};

// The same of `chunks` chunks from `first` on, whose tiles are at weights[p], added to `out` unless that is `fresh`.
template <int R, int P>
void block_tiles(const TileRows& x, const int64_t* row, int64_t first, int64_t chunks, const uint16_t* const* weights,
                 bool fresh, float* const* out, LinesAhead& ahead) {
  each_tile<R>([&](auto r) {
    each_tile<P>([&](auto p) {
      if (fresh) {
        zero_tile<sum_tile(r, p)>();
      } else {
        load_tile<sum_tile(r, p)>(out[r] + p * kPanelRows, kSumStride);
      }
    });
  });
  for (int64_t c = 0; c < chunks; ++c) {
    const uint16_t* here[2] = {weights[0] + c * kTileWords, weights[P - 1] + c * kTileWords};
    ahead.ask();
    multiply_chunk<R, P>(x, row, first + c, here);
  }
  store_sums<R, P>(out);
}

// The product of up to kTilePanels panels, all of E4M3. Calls done(sums, first, row, end) with the sums [.., 64] of
// four panels from `first` on, for the rows [row, end), `sums` being where row 0's would be.
template <typename Done>
void tile_panels(const LinearTask& task, const Panel* panels, int count, Done done) {
  const int64_t rows = task.rows, groups = (task.k + cpu::kGroupSteps - 1) / cpu::kGroupSteps;
  const int64_t chunks = cpu::tile_chunks(task.k);
  const TileRows x{reinterpret_cast<const char*>(task.x_pairs),
                   cpu::pair_words(cpu::PairArithmetic::kBf16Tiles, task.k) * 4};
  char* area = static_cast<char*>(task.scratch) + cpu::tile_scratch_offset(rows, task.k);
  auto* block = reinterpret_cast<uint16_t*>(area);
  auto* sums = reinterpret_cast<float*>(block + 2 * kPanelRows * cpu::kTileBlockSteps);
  // The last tile begins earlier where rows are no multiple of 16; each tile has sums of its own.
  const int64_t tiles_of_rows = (rows + kTileHeight - 1) / kTileHeight;
  const auto begin_of = [&](int64_t t) {
    return t * kTileHeight + kTileHeight <= rows || t == 0 ? t * kTileHeight : rows - kTileHeight;
  };
  const auto sums_of = [&](int quad, int64_t t) {
    return sums + (quad * tiles_of_rows + t) * kTileHeight * kGroupColumns;
  };
  const auto finish = [&](int quad, int64_t t) {
    const int64_t first = t * kTileHeight, end = first + kTileHeight < rows ? first + kTileHeight : rows;
    done(sums_of(quad, t) - begin_of(t) * kGroupColumns, quad * kGroupPanels, first, end);
  };
  // Calls run(tiles, panels, row, out) for the tiles of rows t and t + 1 and panels p and p + 1, of those that exist.
  const auto run_pair = [&](int p, int64_t t, auto run) {
    const bool pair = t + 1 < tiles_of_rows, two = p + 1 < count;
    const int64_t row[2] = {begin_of(t), pair ? begin_of(t + 1) : 0};
    float* at = sums_of(p / kGroupPanels, t) + p % kGroupPanels * kPanelRows;
    float* out[2] = {at, at + kTileHeight * kGroupColumns};
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    if (pair) {
      two ? run(Two{}, Two{}, row, out) : run(Two{}, One{}, row, out);
    } else {
      two ? run(One{}, Two{}, row, out) : run(One{}, One{}, row, out);
    }
  };

  if (rows <= kTileDirectRows) {
    TileRoom room;
    for (int p = 0; p < count; p += 2) {
      const Panel* here = panels + p;
      const bool two = p + 1 < count;
      // Where nothing is known to follow: what has been read.
      const Panel* next[2];
      for (int i = 0; i < (two ? 2 : 1); ++i) {
        const Panel* known = panel_at(task, here + (two ? 2 : 1) + i);
        next[i] = known == nullptr ? here + i : known;
      }
      for (int64_t t = 0; t < tiles_of_rows; t += 2) {
        // As many panels as these.
        const Panel* following = t + 2 < tiles_of_rows ? here : p + 3 < count ? here + 2 : nullptr;
        run_pair(p, t, [&](auto tiles, auto width, const int64_t* row, float* const* out) {
          direct_tiles<tiles, width>(here, next, following, x, row, groups, out, room);
        });
      }
    }
  } else {
    for (int64_t first = 0; first < chunks; first += kTileBlock) {
      const int64_t here = chunks - first < kTileBlock ? chunks - first : kTileBlock;
      const bool last = first + here >= chunks;
      LinesAhead ahead;
      ahead.panels = last ? panels + count : panels;
      ahead.group = last ? 0 : (first + here) * kChunkGroups;
      const int64_t left = groups - ahead.group, most = kTileBlock * kChunkGroups;
      ahead.lines = left < most ? left : most;
      const int64_t following = task.panels + task.last - (panels + count);
      ahead.count = last ? (following < kTilePanels ? following : kTilePanels) : count;
      const int64_t calls = here * ((count + 1) / 2) * ((tiles_of_rows + 1) / 2);
      ahead.each = (ahead.count * ahead.lines + calls - 1) / calls;
      for (int p = 0; p < count; p += 2) {
        const bool two = p + 1 < count;
        for (int i = 0; i < (two ? 2 : 1); ++i) {
          for (int64_t c = 0; c < here; ++c) {
            fill_tile(panels[p + i].upper, (first + c) * kChunkGroups, groups,
                      block + (i * kTileBlock + c) * kTileWords, [](int64_t) {});
          }
        }
        const uint16_t* weights[2] = {block, block + kTileBlock * kTileWords};
        for (int64_t t = 0; t < tiles_of_rows; t += 2) {
          run_pair(p, t, [&](auto tiles, auto width, const int64_t* row, float* const* out) {
            block_tiles<tiles, width>(x, row, first, here, weights, first == 0, out, ahead);
          });
        }
      }
    }
  }
  for (int quad = 0; quad * kGroupPanels < count; ++quad) {
    for (int64_t t = 0; t < tiles_of_rows; ++t) finish(quad, t);
  }
}

}  // namespace
}  // namespace nfp
// NOLINTEND(misc-definitions-in-headers,bugprone-implicit-widening-of-multiplication-result)
