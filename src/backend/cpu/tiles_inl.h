// Products on tiles of BF16 (PairArithmetic::kBf16Tiles). A tile of weights is 32 steps of a panel, two steps a row;
// one of x is 16 of its rows. Up to kTileDirectRows rows of x each panel is turned into tiles as it is read, for all
// rows at once; more rows run over blocks of steps of two panels, turned into tiles before: 16 KB, which with the rows'
// steps leaves L1 room (FP8 512 steps: 1200 instead of 1550 GFLOP/s on Emerald Rapids).
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
constexpr int64_t kLine = static_cast<int64_t>(kGroupBytes);
constexpr int64_t kTileStride = 64;  // bytes of a tile's row
constexpr int64_t kSumStride = kGroupColumns * static_cast<int64_t>(sizeof(float));
// Up to so many rows of x are asked for before each chunk.
constexpr int64_t kMostRowsAhead = 8;

// Which tile is what: of a block, with two tiles of x and two of weights, and where panels are multiplied as they are
// read, with up to four sums of R tiles of x.
constexpr int sum_tile(int r, int p) { return 2 * r + p; }
constexpr int direct_sum_tile(int tiles, int r, int p) { return p * tiles + r; }
constexpr int x_tile(int r) { return 4 + r; }
constexpr int weight_tile(int p) { return 6 + p; }

// f(integral_constant) for 0 .. N-1.
template <int N, typename F>
inline void each_tile(F f) {
  f(std::integral_constant<int, 0>{});
  if constexpr (N > 1) f(std::integral_constant<int, 1>{});
  if constexpr (N > 2) f(std::integral_constant<int, 2>{});
  if constexpr (N > 3) f(std::integral_constant<int, 3>{});
  static_assert(N <= 4);
}

// x of a task as to_pairs() or to_split() lays it out.
struct TileRows {
  const char* at;
  int64_t stride;  // bytes of a row
  int64_t rest;    // bytes from a row's first parts to its second ones
  int64_t wanted;  // how many rows are asked for ahead
  // That begins at row `row`.
  const char* tile(int64_t row, int64_t chunk) const { return at + row * stride + chunk * kTileStride; }
};

// Weights of E4M3, which are one number of BF16 each.
struct UpperTiles {
  static constexpr int kParts = 1;
  static constexpr int64_t kBlock = cpu::kTileBlockWords / kTileWords / 2;  // chunks of a panel
  static constexpr int64_t kAhead = 32;  // groups between what is turned into tiles and what is asked for
  template <typename Ask>
  static void each_line(const Panel& panel, int64_t group, Ask ask) {
    ask(panel.upper + group * kLine);
  }
  static void unpack(const Panel& panel, int64_t group, uint16_t* words) {
    unpack_tile_rows(panel.upper + group * kLine, words);
  }
};

// Weights of FP16, which are two: a tile of the first parts and, kTileWords after it, one of the second.
struct SplitTiles {
  static constexpr int kParts = 2;
  static constexpr int64_t kBlock = cpu::kTileBlockWords / kTileWords / 4;
  static constexpr int64_t kAhead = 8;
  template <typename Ask>
  static void each_line(const Panel& panel, int64_t group, Ask ask) {
    ask(panel.upper + group * kLine);
    ask(panel.lower + group * kLine);
  }
  static void unpack(const Panel& panel, int64_t group, uint16_t* words) {
    unpack_split_rows(panel.upper + group * kLine, panel.lower + group * kLine, words, words + kTileWords);
  }
};

// The same of panels that hold FP16 itself.
struct DenseTiles {
  static constexpr int kParts = 2;
  static constexpr int64_t kBlock = SplitTiles::kBlock;
  static constexpr int64_t kAhead = SplitTiles::kAhead;
  template <typename Ask>
  static void each_line(const Panel& panel, int64_t group, Ask ask) {
    ask(panel.upper + 2 * group * kLine);
    ask(panel.upper + (2 * group + 1) * kLine);
  }
  static void unpack(const Panel& panel, int64_t group, uint16_t* words) {
    unpack_dense_split_rows(panel.upper + 2 * group * kLine, words, words + kTileWords);
  }
};

// The sums of R tiles of rows, which begin at row[r], and P panels, whose tiles are at weights[p].
template <typename Weights, int R, int P>
inline void multiply_chunk(const TileRows& x, const int64_t* row, int64_t chunk, const uint16_t* const* weights) {
  const auto load_weights = [&](int part) {
    each_tile<P>([&](auto p) { load_tile<weight_tile(p)>(weights[p] + part * kTileWords, kTileStride); });
  };
  const auto multiply = [&](int64_t part) {
    each_tile<R>([&](auto r) {
      load_tile<x_tile(r)>(x.tile(row[r], chunk) + part * x.rest, x.stride);
      each_tile<P>([&](auto p) { multiply_tiles<sum_tile(r, p), x_tile(r), weight_tile(p)>(); });
    });
  };
  load_weights(0);
  multiply(0);
  if constexpr (Weights::kParts == 2) {
    multiply(1);
    load_weights(1);
    multiply(0);
  }
}

// Writes these sums, of each tile of rows to out[r], [16, kGroupColumns].
template <int R, int P>
inline void store_sums(float* const* out) {
  each_tile<R>(
      [&](auto r) { each_tile<P>([&](auto p) { store_tile<sum_tile(r, p)>(out[r] + p * kPanelRows, kSumStride); }); });
}

// Steps of a panel from group `first` on as a tile, or one for each part; zeros past its end. Calls ask(g) before each
// group.
template <typename Weights, typename Ask>
inline void fill_tile(const Panel& panel, int64_t first, int64_t groups, uint16_t* words, Ask ask) {
  const int64_t count = groups - first < kChunkGroups ? groups - first : kChunkGroups;
  if (count == kChunkGroups) {
    NFP_UNROLL for (int64_t g = 0; g < kChunkGroups; ++g) {
      ask(g);
      Weights::unpack(panel, first + g, words + g * 64);
    }
    return;
  }
  for (int64_t g = 0; g < count; ++g) Weights::unpack(panel, first + g, words + g * 64);
  for (int part = 0; part < Weights::kParts; ++part) {
    for (int64_t i = count * 64; i < kTileWords; ++i) words[part * kTileWords + i] = 0;
  }
}

// A chunk's tiles of a panel, and those that are made meanwhile of what comes next.
template <typename Weights>
struct TileRoom {
  alignas(64) uint16_t words[2][Weights::kParts * kTileWords];
  int now = 0;         // which of them is multiplied next
  bool ready = false;  // and is there already
};

// So many panels are read side by side: memory delivers several streams faster than one.
constexpr int direct_width(int64_t tiles) { return tiles == 1 ? 4 : tiles == 2 ? 2 : 1; }

// Which of `count` panels is the i-th to be read: each of W streams goes through neighbours in memory.
template <int W>
inline int place_in_streams(int i, int count) {
  const int each = count / W;
  return i < each * W ? i % W * each + i / W : i;
}

// The sums of all steps of P panels and R tiles of rows, which begin at row[r], to out[p] + r * kTileHeight rows.
// `next`: the panels that are read after these; `following`: the one whose product comes after these; or null.
template <typename Weights, int R, int P>
void direct_tiles(const Panel* const* panels, const Panel* const* next, const Panel* following, const TileRows& x,
                  const int64_t* row, int64_t groups, float* const* out, TileRoom<Weights>& room) {
  const int64_t chunks = (groups + kChunkGroups - 1) / kChunkGroups;
  Panel here[P], after[P];  // copies: nothing that is written could change them
  NFP_UNROLL for (int p = 0; p < P; ++p) here[p] = *panels[p], after[p] = *next[p];
  each_tile<R>([&](auto r) { each_tile<P>([&](auto p) { zero_tile<direct_sum_tile(R, r, p)>(); }); });
  if (!room.ready) fill_tile<Weights>(here[0], 0, groups, room.words[room.now], [](int64_t) {});
  for (int64_t c = 0; c < chunks; ++c) {
    each_tile<P>([&](auto p) {
      // The next tiles are made while these are multiplied.
      uint16_t* made = room.words[room.now ^ 1];
      const int64_t next_chunk = p + 1 < P ? c : c + 1;
      constexpr int kNext = p + 1 < P ? p + 1 : 0;
      if (next_chunk < chunks) {
        const int64_t first = next_chunk * kChunkGroups, ahead = first + Weights::kAhead;
        const Panel& wanted = ahead < groups ? here[kNext] : after[kNext];
        const int64_t group = ahead < groups ? ahead : ahead - groups;
        // Weights have pushed few rows out of L1 by now; of more, L2 is as quick as asking.
        if constexpr (R == 1 && kNext == 0) {
          for (int64_t m = 0; m < x.wanted; ++m) {
            prefetch(x.tile(m, next_chunk));
            if constexpr (Weights::kParts == 2) prefetch(x.tile(m, next_chunk) + x.rest);
          }
        }
        fill_tile<Weights>(here[kNext], first, groups, made, [&](int64_t g) {
          Weights::each_line(wanted, group + g, [](const uint8_t* line) { prefetch(line); });
        });
      } else if (following != nullptr) {
        fill_tile<Weights>(*following, 0, groups, made, [](int64_t) {});
      }
      const uint16_t* weights = room.words[room.now];
      load_tile<weight_tile(0)>(weights, kTileStride);
      if constexpr (Weights::kParts == 2) load_tile<weight_tile(1)>(weights + kTileWords, kTileStride);
      each_tile<R>([&](auto r) {
        constexpr int kSums = direct_sum_tile(R, r, p), kFirst = x_tile(Weights::kParts == 2 ? 0 : r % 2);
        constexpr bool kLoads = R > 1 || p == 0;
        if constexpr (kLoads) load_tile<kFirst>(x.tile(row[r], c), x.stride);
        multiply_tiles<kSums, kFirst, weight_tile(0)>();
        if constexpr (Weights::kParts == 2) {
          if constexpr (kLoads) load_tile<x_tile(1)>(x.tile(row[r], c) + x.rest, x.stride);
          multiply_tiles<kSums, x_tile(1), weight_tile(0)>();
          multiply_tiles<kSums, kFirst, weight_tile(1)>();
        }
      });
      room.now ^= 1;
    });
  }
  room.ready = following != nullptr;
  each_tile<R>([&](auto r) {
    each_tile<P>(
        [&](auto p) { store_tile<direct_sum_tile(R, r, p)>(out[p] + r * kTileHeight * kGroupColumns, kSumStride); });
  });
}

// Lines of the block that comes next, which are asked for while this one is multiplied.
template <typename Weights>
struct LinesAhead {
  const Panel* panels = nullptr;
  int64_t count = 0;             // of panels
  int64_t group = 0, lines = 0;  // of each panel, or of its planes
  int64_t each = 0;              // with a chunk
  int64_t panel = 0, line = 0;   // where that stands
  void ask() {
    if (panel >= count) return;
    const int64_t here = lines - line < each ? lines - line : each;
    for (int64_t i = 0; i < here; ++i) {
      Weights::each_line(panels[panel], group + line + i, [](const uint8_t* at) { prefetch_far(at); });
    }
    line += here;
    if (line == lines) line = 0, ++panel;
  }
};

// The same of `chunks` chunks from `first` on, whose tiles are at weights[p], added to `out` unless that is `fresh`.
template <typename Weights, int R, int P>
void block_tiles(const TileRows& x, const int64_t* row, int64_t first, int64_t chunks, const uint16_t* const* weights,
                 bool fresh, float* const* out, LinesAhead<Weights>& ahead) {
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
    const int64_t at = c * Weights::kParts * kTileWords;
    const uint16_t* here[2] = {weights[0] + at, weights[P - 1] + at};
    ahead.ask();
    multiply_chunk<Weights, R, P>(x, row, first + c, here);
  }
  store_sums<R, P>(out);
}

// How many panels of the first one's kind there are from `panels` on, before the task's end; `most` at most.
inline int64_t panels_alike(const LinearTask& task, const Panel* panels, int64_t most) {
  const int64_t left = task.panels + task.last - panels;
  int64_t count = 0;
  while (count < left && count < most && panels[count].kind == panels->kind) ++count;
  return count;
}

// The sums of up to kTilePanels panels of one kind and R tiles of rows, which begin at row[r], to `sums`, of four
// panels after each other: [R * 16, kGroupColumns].
template <typename Weights, int R>
void direct_group(const LinearTask& task, const Panel* panels, int count, const TileRows& x, const int64_t* row,
                  int64_t groups, float* sums) {
  constexpr int kWidth = direct_width(R);
  const int64_t left = task.panels + task.last - (panels + count), then = left > 0 ? left : task.next_count;
  const int next_count = static_cast<int>(then < kTilePanels ? then : kTilePanels);
  // The i-th panel, or of what is multiplied then; null: not known.
  const auto nth = [&](int i) -> const Panel* {
    if (i < count) return panels + place_in_streams<kWidth>(i, count);
    i -= count;
    return i < next_count ? panel_at(task, panels + count + place_in_streams<kWidth>(i, next_count)) : nullptr;
  };
  TileRoom<Weights> room;
  int p = 0;
  while (p < count) {
    const auto run = [&](auto width) {
      const Panel *here[width], *next[width];
      float* out[width];
      for (int i = 0; i < width; ++i) {
        // Neither what a panel is nor its scales are in a cache when they are needed.
        if (const Panel* later = nth(p + 2 * width + i); later != nullptr) prefetch(later);
        here[i] = nth(p + i);
        prefetch(here[i]->scale);
        // Where nothing is known to follow: what has been read.
        const Panel* known = nth(p + width + i);
        next[i] = known == nullptr || known->kind != panels->kind ? here[i] : known;
        const int64_t at = here[i] - panels;
        out[i] = sums + at / kGroupPanels * R * kTileHeight * kGroupColumns + at % kGroupPanels * kPanelRows;
      }
      const Panel* following = p + width < count ? nth(p + width) : nullptr;
      direct_tiles<Weights, R, width>(here, next, following, x, row, groups, out, room);
      p += width;
    };
    if (count - p >= kWidth) {
      run(std::integral_constant<int, kWidth>{});
      continue;
    }
    if constexpr (kWidth == 4) {
      if (count - p >= 2) {
        run(std::integral_constant<int, 2>{});
        continue;
      }
    }
    run(std::integral_constant<int, 1>{});
  }
}

// The product of up to kTilePanels panels of one kind. Calls done(sums, first, row, end) with the sums [.., 64] of four
// panels from `first` on, for the rows [row, end), `sums` being where row 0's would be.
template <typename Weights, typename Done>
void tile_panels(const LinearTask& task, const Panel* panels, int count, Done done) {
  const int64_t rows = task.rows, groups = (task.k + cpu::kGroupSteps - 1) / cpu::kGroupSteps;
  const int64_t chunks = cpu::tile_chunks(task.k);
  const TileRows x{reinterpret_cast<const char*>(task.x_pairs), cpu::tile_row_words(Weights::kParts, task.k) * 4,
                   chunks * kTileStride, rows <= kMostRowsAhead ? rows : 0};
  char* area = static_cast<char*>(task.scratch) + cpu::tile_scratch_offset(rows, task.k);
  auto* block = reinterpret_cast<uint16_t*>(area);
  auto* sums = reinterpret_cast<float*>(block + cpu::kTileBlockWords);
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

  if (rows <= kTileDirectRows) {
    int64_t row[kTileDirectRows / kTileHeight] = {};
    for (int64_t t = 0; t < tiles_of_rows; ++t) row[t] = begin_of(t);
    const auto run = [&](auto tiles) { direct_group<Weights, tiles>(task, panels, count, x, row, groups, sums); };
    switch (tiles_of_rows) {
      case 1:
        run(std::integral_constant<int, 1>{});
        break;
      case 2:
        run(std::integral_constant<int, 2>{});
        break;
      case 3:
        run(std::integral_constant<int, 3>{});
        break;
      default:
        run(std::integral_constant<int, 4>{});
    }
  } else {
    constexpr int64_t kBlock = Weights::kBlock;
    for (int64_t first = 0; first < chunks; first += kBlock) {
      const int64_t here = chunks - first < kBlock ? chunks - first : kBlock;
      const bool last = first + here >= chunks;
      LinesAhead<Weights> ahead;
      ahead.panels = last ? panels + count : panels;
      ahead.group = last ? 0 : (first + here) * kChunkGroups;
      const int64_t left = groups - ahead.group, most = kBlock * kChunkGroups;
      ahead.lines = left < most ? left : most;
      const int64_t following = panels_alike(task, panels + count, kTilePanels);
      ahead.count = !last ? count : following > 0 && panels[count].kind == panels->kind ? following : 0;
      const int64_t calls = here * ((count + 1) / 2) * ((tiles_of_rows + 1) / 2);
      ahead.each = (ahead.count * ahead.lines + calls - 1) / calls;
      for (int p = 0; p < count; p += 2) {
        const bool two = p + 1 < count;
        uint16_t* of_panel[2] = {block, block + cpu::kTileBlockWords / 2};
        for (int i = 0; i < (two ? 2 : 1); ++i) {
          for (int64_t c = 0; c < here; ++c) {
            fill_tile<Weights>(panels[p + i], (first + c) * kChunkGroups, groups,
                               of_panel[i] + c * Weights::kParts * kTileWords, [](int64_t) {});
          }
        }
        const uint16_t* weights[2] = {of_panel[0], of_panel[1]};
        for (int64_t t = 0; t < tiles_of_rows; t += 2) {
          const bool pair = t + 1 < tiles_of_rows;
          const int64_t row[2] = {begin_of(t), pair ? begin_of(t + 1) : 0};
          float* at = sums_of(p / kGroupPanels, t) + p % kGroupPanels * kPanelRows;
          float* out[2] = {at, at + kTileHeight * kGroupColumns};
          const auto run = [&](auto tiles, auto width) {
            block_tiles<Weights, tiles, width>(x, row, first, here, weights, first == 0, out, ahead);
          };
          using One = std::integral_constant<int, 1>;
          using Two = std::integral_constant<int, 2>;
          if (pair) {
            two ? run(Two{}, Two{}) : run(Two{}, One{});
          } else {
            two ? run(One{}, Two{}) : run(One{}, One{});
          }
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
