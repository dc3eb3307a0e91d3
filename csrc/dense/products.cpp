// SPDX-License-Identifier: Apache-2.0
#include "dense/products.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "runtime/parallel.h"
#include "simd/columns.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

// Of the inner dimension: a block of a panel stays in the caches for a block of rows, and sums of
// blocks that are added up are more exact than one long sum.
constexpr int64_t kInnerBlock = 256;
constexpr int64_t kRowBlock = 144;  // a multiple of the rows of any tile
constexpr int64_t kTaskRows = 4 * kRowBlock;
constexpr int64_t kSlabBlock = 128;  // rows that are laid out at a time
constexpr int64_t kSlabRows = 2048;  // of a slab at least
constexpr int64_t kMostSlabs = 64;
constexpr int64_t kSlabFloats = int64_t{1} << 22;  // of all slabs' sums together, at most

// Rows of a tile with so many vectors each: at most 24 of 32 registers hold sums.
constexpr int tile_rows(int vectors) { return vectors == 3 ? 8 : 12; }

inline int64_t rounded_up(int64_t number, int64_t unit) {
  return (number + unit - 1) / unit * unit;
}

#if defined(GRAPHSHARD_HAS_VECTORS)

// Memory that begins at a cache line.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t count)
      : data_(static_cast<float*>(
            ::operator new(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(float),
                           std::align_val_t{64}))) {}
  AlignedFloats(const AlignedFloats&) = delete;
  AlignedFloats& operator=(const AlignedFloats&) = delete;
  ~AlignedFloats() { ::operator delete(data_, std::align_val_t{64}); }
  float* get() const { return data_; }

 private:
  float* data_;
};

// Panels of so many columns, one after another, [inner, panel] each; the last is filled with zeros.
void lay_out(const DenseProduct& product, int64_t width, int64_t panel, float* to) {
  for (int64_t column = 0; column < width; column += panel) {
    const int64_t count = std::min(panel, width - column);
    for (int64_t k = 0; k < product.inner; ++k, to += panel) {
      const float* from = product.matrix + k * product.matrix_step + column * product.matrix_column;
      for (int64_t j = 0; j < count; ++j) to[j] = from[j * product.matrix_column];
      std::fill(to + count, to + panel, 0.0f);
    }
  }
}

// A row in pieces of kPiece entries, each kSlabBlock pieces after the one before.
template <int kPiece>
GRAPHSHARD_INLINE void lay_out_row(const float* from, int64_t width, float* to) {
  int64_t at = 0;
  for (; at + kPiece <= width; at += kPiece, to += kPiece * kSlabBlock) {
    std::memcpy(to, from + at, kPiece * sizeof(float));
  }
  if (at < width) {
    std::memcpy(to, from + at, static_cast<size_t>(width - at) * sizeof(float));
    std::fill(to + (width - at), to + kPiece, 0.0f);
  }
}

template <int kRows, int kVectors, int kBytes>
struct Tile {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(float));
  static constexpr int kPanel = kLanes * kVectors;
  using Lanes = Vector<float, kLanes>;

  Lanes sums[kRows][kVectors];

  GRAPHSHARD_INLINE void clear() {
    each<kRows>([&](auto i) GRAPHSHARD_INLINE_LAMBDA {
      each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA { sums[i][v] = Lanes{}; });
    });
  }
  // Columns [0, count) of rows that are `step` apart, added to.
  GRAPHSHARD_INLINE void add_rows(const float* from, int64_t step, int64_t count) {
    each<kRows>([&](auto i) GRAPHSHARD_INLINE_LAMBDA {
      const float* row = from + i * step;
      float whole[kPanel];
      if (count != kPanel) {
        std::fill(whole, whole + kPanel, 0.0f);
        std::memcpy(whole, row, static_cast<size_t>(count) * sizeof(float));
        row = whole;
      }
      each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA {
        Lanes lanes;
        std::memcpy(&lanes, row + v * kLanes, sizeof(Lanes));
        sums[i][v] = lanes + sums[i][v];
      });
    });
  }
  GRAPHSHARD_INLINE void store(float* to, int64_t step, int64_t count) const {
    each<kRows>([&](auto i) GRAPHSHARD_INLINE_LAMBDA {
      float* row = to + i * step;
      if (count == kPanel) {
        each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA {
          std::memcpy(row + v * kLanes, &sums[i][v], sizeof(Lanes));
        });
      } else {
        float whole[kPanel];
        each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA {
          std::memcpy(whole + v * kLanes, &sums[i][v], sizeof(Lanes));
        });
        std::memcpy(row, whole, static_cast<size_t>(count) * sizeof(float));
      }
    });
  }
  GRAPHSHARD_INLINE void cut_negative() {
    each<kRows>([&](auto i) GRAPHSHARD_INLINE_LAMBDA {
      each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA {
        const Lanes zero{};
        sums[i][v] = sums[i][v] < zero ? zero : sums[i][v];  // NaN stays
      });
    });
  }
  // One step: an entry of each row times a row of the panel.
  template <typename Entry>
  GRAPHSHARD_INLINE void add(const float* panel, const Entry& entry) {
    Lanes row[kVectors];
    each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA {
      std::memcpy(&row[v], panel + v * kLanes, sizeof(Lanes));
    });
    each<kRows>([&](auto i) GRAPHSHARD_INLINE_LAMBDA {
      const float factor = entry(i);
      each<kVectors>([&](auto v) GRAPHSHARD_INLINE_LAMBDA { sums[i][v] += row[v] * factor; });
    });
  }
};

// Rows [0, kRows) of a block times one panel.
template <int kRows, int kVectors, int kBytes>
GRAPHSHARD_INLINE void multiply_tile(const float* rows, int64_t step, int64_t inner,
                                     const float* panel, const float* first, int64_t first_step,
                                     float* out, int64_t out_step, int64_t count, bool relu) {
  using T = Tile<kRows, kVectors, kBytes>;
  T tile;
  tile.clear();
  for (int64_t k = 0; k < inner; ++k, panel += T::kPanel) {
    tile.add(panel, [&](auto i) GRAPHSHARD_INLINE_LAMBDA { return rows[i * step + k]; });
  }
  if (first != nullptr) tile.add_rows(first, first_step, count);
  if (relu) tile.cut_negative();
  tile.store(out, out_step, count);
}

template <int kVectors, int kBytes>
GRAPHSHARD_INLINE void multiply_block(const RowProducts& a, const std::vector<const float*>& panels,
                                      int64_t begin, int64_t end) {
  constexpr int kTileRows = tile_rows(kVectors);
  constexpr int kPanel = Tile<1, kVectors, kBytes>::kPanel;
  bool is_first = true;
  const size_t number = a.products.size();
  for (size_t p = 0; p < number; ++p) {
    const DenseProduct& product = a.products[p];
    int64_t k = 0;
    do {
      const int64_t inner = std::min(kInnerBlock, product.inner - k);
      const bool is_last = p + 1 == number && k + inner == product.inner;
      for (int64_t column = 0; column < a.width; column += kPanel) {
        const int64_t count = std::min<int64_t>(kPanel, a.width - column);
        const float* panel = panels[p] + column * product.inner + k * kPanel;
        for (int64_t row = begin; row < end;) {
          const float* rows = product.rows[row] + k;
          float* out = a.out + row * a.out_step + column;
          const float* first = out;
          int64_t first_step = a.out_step;
          if (is_first) {
            first = a.first.data == nullptr ? nullptr : a.first[row] + column;
            first_step = a.first.step;
          }
          const auto tile = [&](auto count_of_rows) GRAPHSHARD_INLINE_LAMBDA {
            constexpr int kRows = decltype(count_of_rows)::value;
            multiply_tile<kRows, kVectors, kBytes>(rows, product.rows.step, inner, panel, first,
                                                   first_step, out, a.out_step, count,
                                                   a.relu && is_last);
            row += kRows;
          };
          if (end - row >= kTileRows) {
            tile(std::integral_constant<int, kTileRows>{});
          } else if (end - row >= 4) {
            tile(std::integral_constant<int, 4>{});
          } else {
            tile(std::integral_constant<int, 1>{});
          }
        }
      }
      is_first = false;
      k += inner;
    } while (k < product.inner);
  }
}

// What a slab of rows adds to rows [first, last) of the result, which is in tiles one after
// another. Entries of rows are laid out like those of grads, so that a step reads both as they
// come.
template <int kVectors, int kBytes>
GRAPHSHARD_INLINE void multiply_slab(const TransposedProduct& a, int64_t begin, int64_t end,
                                     int64_t first, int64_t last, float* scratch, float* out) {
  constexpr int kRows = tile_rows(kVectors);
  using T = Tile<kRows, kVectors, kBytes>;
  constexpr int kPanel = T::kPanel;
  const int64_t width = rounded_up(a.width, kPanel);
  float* const entries = scratch + width * kSlabBlock;
  for (int64_t at = begin; at < end; at += kSlabBlock) {
    const int64_t count = std::min(kSlabBlock, end - at);
    for (int64_t i = 0; i < count; ++i) {
      lay_out_row<kPanel>(a.grads[at + i], a.width, scratch + i * kPanel);
      lay_out_row<kRows>(a.rows[at + i] + first, last - first, entries + i * kRows);
    }
    for (int64_t row = first; row < last; row += kRows) {
      for (int64_t column = 0; column < width; column += kPanel) {
        const float* grad = scratch + column * kSlabBlock;
        const float* entry = entries + (row - first) * kSlabBlock;
        float* const to = out + row * width + column * kRows;
        T tile;
        tile.clear();
        for (int64_t i = 0; i < count; ++i, grad += kPanel, entry += kRows) {
          tile.add(grad, [&](auto j) GRAPHSHARD_INLINE_LAMBDA { return entry[j]; });
        }
        if (at > begin) tile.add_rows(to, kPanel, kPanel);
        tile.store(to, kPanel, kPanel);
      }
    }
  }
}

// Vectors of a panel: as many as leave least of the last panel empty.
int panel_vectors(int64_t width) {
  const int64_t lanes = register_bytes() / static_cast<int64_t>(sizeof(float));
  int best = 2;
  for (const int vectors : {3, 1}) {
    if (rounded_up(width, vectors * lanes) < rounded_up(width, best * lanes)) best = vectors;
  }
  return best;
}

// Calls function(vectors, bytes) with both as constants.
template <typename Function>
void with_tile(int vectors, const Function& function) {
  dispatch<64>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    if (vectors == 1) {
      function(std::integral_constant<int, 1>{}, bytes);
    } else if (vectors == 2) {
      function(std::integral_constant<int, 2>{}, bytes);
    } else {
      function(std::integral_constant<int, 3>{}, bytes);
    }
  });
}

}  // namespace

void multiply_rows(const RowProducts& a, int num_threads) {
  if (a.num_rows == 0 || a.width == 0) return;
  const int vectors = panel_vectors(a.width);
  const int64_t panel = vectors * register_bytes() / static_cast<int64_t>(sizeof(float));
  const int64_t width = rounded_up(a.width, panel);
  int64_t size = 0;
  for (const DenseProduct& product : a.products) size += width * product.inner;
  const AlignedFloats memory(size);
  std::vector<const float*> panels;
  float* at = memory.get();
  for (const DenseProduct& product : a.products) {
    lay_out(product, a.width, panel, at);
    panels.push_back(at);
    at += width * product.inner;
  }
  run_tasks((a.num_rows + kTaskRows - 1) / kTaskRows, num_threads, [&](int64_t task) {
    const int64_t last = std::min(a.num_rows, (task + 1) * kTaskRows);
    with_tile(vectors, [&](auto count, auto bytes) GRAPHSHARD_INLINE_LAMBDA {
      for (int64_t row = task * kTaskRows; row < last; row += kRowBlock) {
        multiply_block<decltype(count)::value, decltype(bytes)::value>(
            a, panels, row, std::min(last, row + kRowBlock));
      }
    });
  });
}

void multiply_transposed(const TransposedProduct& a, int num_threads) {
  if (a.num_rows == 0) std::fill_n(a.out, a.inner * a.width, 0.0f);
  if (a.num_rows == 0 || a.inner == 0 || a.width == 0) return;
  const int vectors = panel_vectors(a.width);
  const int64_t panel = vectors * register_bytes() / static_cast<int64_t>(sizeof(float));
  const int64_t width = rounded_up(a.width, panel);
  const int64_t rows = tile_rows(vectors);
  const int64_t num_tiles = (a.inner + rows - 1) / rows;
  const int64_t size = num_tiles * rows * width;
  const int64_t slabs =
      std::clamp<int64_t>(std::min(a.num_rows / kSlabRows, kSlabFloats / size), 1, kMostSlabs);
  // Rows of the result are shared among threads where slabs are few: that changes no sum.
  const int64_t tasks = 4 * std::min<int64_t>(num_threads, kMostThreads);
  const int64_t groups = std::min(num_tiles, std::max<int64_t>(1, tasks / slabs));
  const AlignedFloats sums(slabs * size);
  run_tasks(slabs * groups, num_threads, [&](int64_t task) {
    const int64_t slab = task / groups;
    const int64_t begin = part_begin(num_tiles, task % groups, groups) * rows;
    const int64_t end = part_begin(num_tiles, task % groups + 1, groups) * rows;
    const AlignedFloats scratch((width + end - begin) * kSlabBlock);
    with_tile(vectors, [&](auto count, auto bytes) GRAPHSHARD_INLINE_LAMBDA {
      multiply_slab<decltype(count)::value, decltype(bytes)::value>(
          a, part_begin(a.num_rows, slab, slabs), part_begin(a.num_rows, slab + 1, slabs), begin,
          std::min(a.inner, end), scratch.get(), sums.get() + slab * size);
    });
  });
  run_tasks(num_tiles, num_threads, [&](int64_t tile) {
    float* const total = sums.get() + tile * rows * width;
    for (int64_t slab = 1; slab < slabs; ++slab) {
      const float* const other = total + slab * size;
      for (int64_t i = 0; i < rows * width; ++i) total[i] += other[i];
    }
    const int64_t count = std::min(rows, a.inner - tile * rows);
    for (int64_t i = 0; i < count; ++i) {
      float* const to = a.out + (tile * rows + i) * a.width;
      for (int64_t column = 0; column < a.width; column += panel) {
        std::copy_n(total + column * rows + i * panel, std::min(panel, a.width - column),
                    to + column);
      }
    }
  });
}

#else

void multiply_rows(const RowProducts& a, int) {
  for (int64_t row = 0; row < a.num_rows; ++row) {
    float* const out = a.out + row * a.out_step;
    for (int64_t j = 0; j < a.width; ++j) out[j] = a.first.data == nullptr ? 0 : a.first[row][j];
    for (const DenseProduct& product : a.products) {
      for (int64_t k = 0; k < product.inner; ++k) {
        const float* const from = product.matrix + k * product.matrix_step;
        for (int64_t j = 0; j < a.width; ++j) {
          out[j] += product.rows[row][k] * from[j * product.matrix_column];
        }
      }
    }
    for (int64_t j = 0; j < a.width && a.relu; ++j) out[j] = out[j] < 0 ? 0 : out[j];
  }
}

void multiply_transposed(const TransposedProduct& a, int) {
  std::fill_n(a.out, a.inner * a.width, 0.0f);
  for (int64_t row = 0; row < a.num_rows; ++row) {
    for (int64_t i = 0; i < a.inner; ++i) {
      for (int64_t j = 0; j < a.width; ++j) {
        a.out[i * a.width + j] += a.rows[row][i] * a.grads[row][j];
      }
    }
  }
}

#endif

bool gains_from_products() {
#if defined(GRAPHSHARD_HAS_VECTORS) && defined(GRAPHSHARD_HAS_DISPATCH)
  return register_bytes() >= 64 && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace graphshard
