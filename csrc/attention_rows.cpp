// SPDX-License-Identifier: Apache-2.0

#include "attention_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "elementwise.h"

namespace graphshard {
namespace {

// Columns [column, column + kColumns) of kHeads heads from `head` on, with the rows that are asked
// for. The passes below keep so many sums in registers while the edges of a run go by.
template <int kHeads, int kColumns, typename T>
struct Block {
  const RunRows<T>& run;
  bool prefetch;
  int64_t head;
  int64_t column;

  GRAPHSHARD_INLINE int64_t at(int h) const { return (head + h) * run.rows.dim + column; }
  GRAPHSHARD_INLINE void request(int64_t k) const {
    if (!prefetch) return;
    const T* later = run.ahead_of(k);
    for (int h = 0; h < kHeads; ++h) prefetch_values<kColumns>(later + at(h));
  }
};

// Calls pass(block) for all columns of all heads.
template <typename T, typename Pass>
GRAPHSHARD_INLINE void in_passes(const RunRows<T>& run, const Pass& pass) {
  in_blocks<4, 1>(run.rows.heads, [&](auto heads, int64_t head) GRAPHSHARD_INLINE_LAMBDA {
    in_blocks<32, 16, 8, 4, 1>(
        run.rows.dim, [&](auto columns, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
          // The last few columns mostly lie on a line with those before them.
          const bool prefetch = run.prefetch && (columns >= 8 || column == 0);
          pass(Block<heads, columns, T>{run, prefetch, head, column});
        });
  });
}

template <typename T>
GRAPHSHARD_INLINE void clear(const RunRows<T>& run, wide_t<T>* out) {
  const int64_t heads = run.rows.heads;
  for (int64_t i = run.first * heads; i < run.last * heads; ++i) out[i] = 0;
}

// [Note: pairs of columns] Two bfloat16 side by side are the halves of a word: one shift and one
// mask make floats of whole vectors of them, but those of even columns come together, and those of
// odd ones. So sums and factors of a block of columns are kept in this order, as lanes, while edges
// pass.
template <typename T, int kColumns>
inline constexpr bool kInPairs =
    std::is_same_v<T, bfloat16> && kColumns % 2 == 0 && std::endian::native == std::endian::little;

// lanes[lane] = columns[column] for all of them, and the other way.
template <typename T, int kColumns>
GRAPHSHARD_INLINE void load_lanes(const wide_t<T>* columns, wide_t<T>* lanes) {
  if constexpr (kInPairs<T, kColumns>) {
    for (int j = 0; j < kColumns / 2; ++j) {
      lanes[j] = columns[2 * j];
      lanes[kColumns / 2 + j] = columns[2 * j + 1];
    }
  } else {
    for (int j = 0; j < kColumns; ++j) lanes[j] = columns[j];
  }
}
template <typename T, int kColumns>
GRAPHSHARD_INLINE void store_lanes(const wide_t<T>* lanes, wide_t<T>* columns) {
  if constexpr (kInPairs<T, kColumns>) {
    for (int j = 0; j < kColumns / 2; ++j) {
      columns[2 * j] = lanes[j];
      columns[2 * j + 1] = lanes[kColumns / 2 + j];
    }
  } else {
    for (int j = 0; j < kColumns; ++j) columns[j] = lanes[j];
  }
}

GRAPHSHARD_INLINE uint32_t word_of(const bfloat16* pair) {
  uint32_t word;
  std::memcpy(&word, pair, sizeof(word));
  return word;
}
GRAPHSHARD_INLINE float lower(uint32_t word) { return std::bit_cast<float>(word << 16); }
GRAPHSHARD_INLINE float upper(uint32_t word) { return std::bit_cast<float>(word & 0xffff0000u); }

// sums[lane] += by * columns.
template <int kColumns, typename T>
GRAPHSHARD_INLINE void add_lanes(wide_t<T> by, const T* from, wide_t<T>* sums) {
  if constexpr (kInPairs<T, kColumns>) {
#pragma omp simd
    for (int j = 0; j < kColumns / 2; ++j) {
      const uint32_t word = word_of(from + 2 * j);
      sums[j] += by * lower(word);
      sums[kColumns / 2 + j] += by * upper(word);
    }
  } else {
#pragma omp simd
    for (int j = 0; j < kColumns; ++j) sums[j] += by * widen(from[j]);
  }
}

// <own, columns>, `own` by lane.
template <int kColumns, typename T>
GRAPHSHARD_INLINE wide_t<T> dot_lanes(const wide_t<T>* own, const T* from) {
  wide_t<T> total = 0;
  if constexpr (kInPairs<T, kColumns>) {
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < kColumns / 2; ++j) {
      const uint32_t word = word_of(from + 2 * j);
      total += own[j] * lower(word) + own[kColumns / 2 + j] * upper(word);
    }
  } else {
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < kColumns; ++j) total += own[j] * widen(from[j]);
  }
  return total;
}

template <int kHeads, int kColumns, typename T>
GRAPHSHARD_INLINE void add_block(const Block<kHeads, kColumns, T>& block, const wide_t<T>* weight,
                                 wide_t<T>* sum) {
  using V = wide_t<T>;
  const RunRows<T>& run = block.run;
  V sums[kHeads * kColumns];
  for (int h = 0; h < kHeads; ++h) {
    load_lanes<T, kColumns>(sum + block.at(h), sums + h * kColumns);
  }
  for (int k = run.first; k < run.last; ++k) {
    block.request(k);
    const T* row = run[k];
    const V* weights = weight + k * run.rows.heads + block.head;
    for (int h = 0; h < kHeads; ++h) {
      add_lanes<kColumns>(weights[h], row + block.at(h), sums + h * kColumns);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    store_lanes<T, kColumns>(sums + h * kColumns, sum + block.at(h));
  }
}

template <int kHeads, int kColumns, typename T>
GRAPHSHARD_INLINE void dot_block(const Block<kHeads, kColumns, T>& block, const wide_t<T>* fixed,
                                 wide_t<T>* out) {
  using V = wide_t<T>;
  const RunRows<T>& run = block.run;
  V own[kHeads * kColumns];
  for (int h = 0; h < kHeads; ++h) {
    load_lanes<T, kColumns>(fixed + block.at(h), own + h * kColumns);
  }
  for (int k = run.first; k < run.last; ++k) {
    block.request(k);
    const T* row = run[k];
    V* to = out + k * run.rows.heads + block.head;
    for (int h = 0; h < kHeads; ++h) {
      to[h] += dot_lanes<kColumns>(own + h * kColumns, row + block.at(h));
    }
  }
}

template <typename T>
GRAPHSHARD_INLINE void dot(const RunRows<T>& run, const wide_t<T>* fixed, wide_t<T>* out) {
  clear(run, out);
  in_passes(run, [&](const auto& block) GRAPHSHARD_INLINE_LAMBDA { dot_block(block, fixed, out); });
}

template <typename T>
GRAPHSHARD_INLINE void add(const RunRows<T>& run, const wide_t<T>* weight, wide_t<T>* sum) {
  in_passes(run,
            [&](const auto& block) GRAPHSHARD_INLINE_LAMBDA { add_block(block, weight, sum); });
}

template <typename T>
GRAPHSHARD_HOT_CLONES void add_clones(const RunRows<T>& run, const wide_t<T>* weight,
                                      wide_t<T>* sum) {
  add(run, weight, sum);
}

// As many edges at a time as have rows that stay in the first-level cache between the two.
template <typename T>
GRAPHSHARD_HOT_CLONES void dot_and_add_clones(const RunRows<T>& run, const wide_t<T>* fixed,
                                              const wide_t<T>* weight, wide_t<T>* out,
                                              wide_t<T>* sum) {
  constexpr int64_t kBytes = 8192;
  const int64_t row_bytes = run.rows.width() * static_cast<int64_t>(sizeof(T));
  const int few = static_cast<int>(kBytes / std::clamp<int64_t>(row_bytes, 1, kBytes / 4));
  for (int first = run.first; first < run.last; first += few) {
    const int last = std::min(first + few, run.last);
    dot(RunRows<T>{run.rows, run.nodes, first, last, run.prefetch}, fixed, out);
    add(RunRows<T>{run.rows, run.nodes, first, last, false}, weight, sum);
  }
}

template <typename T>
GRAPHSHARD_HOT_CLONES void dot_clones(const RunRows<T>& run, const wide_t<T>* fixed,
                                      wide_t<T>* out) {
  dot(run, fixed, out);
}

// out[k, h] = sum over the columns j of head h of term(h * dim + j, row k, k).
template <typename T, typename Term>
GRAPHSHARD_INLINE void reduce_rows(const RunRows<T>& run, wide_t<T>* out, const Term& term) {
  clear(run, out);
  in_passes(run, [&]<int kHeads, int kColumns>(const Block<kHeads, kColumns, T>& block)
                     GRAPHSHARD_INLINE_LAMBDA {
                       for (int k = run.first; k < run.last; ++k) {
                         block.request(k);
                         const T* row = run[k];
                         wide_t<T>* to = out + k * run.rows.heads + block.head;
                         for (int h = 0; h < kHeads; ++h) {
                           const int64_t first = block.at(h);
                           wide_t<T> total = 0;
#pragma omp simd reduction(+ : total)
                           for (int j = 0; j < kColumns; ++j) total += term(first + j, row, k);
                           to[h] += total;
                         }
                       }
                     });
}

template <typename T>
GRAPHSHARD_HOT_CLONES void joint_clones(const RunRows<T>& run, const EdgeRows<T>& edges,
                                        const wide_t<T>* fixed, const wide_t<T>* vector,
                                        wide_t<T> slope, wide_t<T>* out) {
  if (edges.data == nullptr) {
    reduce_rows(run, out, [&](int64_t j, const T* row, int) GRAPHSHARD_INLINE_LAMBDA {
      return vector[j] * leaky_relu(fixed[j] + widen(row[j]), slope);
    });
    return;
  }
  reduce_rows(run, out, [&](int64_t j, const T* row, int k) GRAPHSHARD_INLINE_LAMBDA {
    const T* edge = edges.data + (*edges.ids)[k] * run.rows.width();
    return vector[j] * leaky_relu(fixed[j] + widen(row[j]) + widen(edge[j]), slope);
  });
}

}  // namespace

template <typename T>
void dot_rows(const RunRows<T>& run, const wide_t<T>* fixed, wide_t<T>* out) {
  dot_clones(run, fixed, out);
}

template <typename T>
void add_rows(const RunRows<T>& run, const wide_t<T>* weight, wide_t<T>* sum) {
  add_clones(run, weight, sum);
}

template <typename T>
void dot_and_add_rows(const RunRows<T>& run, const wide_t<T>* fixed, const wide_t<T>* weight,
                      wide_t<T>* out, wide_t<T>* sum) {
  dot_and_add_clones(run, fixed, weight, out, sum);
}

template <typename T>
void joint_rows(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                const wide_t<T>* vector, wide_t<T> slope, wide_t<T>* out) {
  joint_clones(run, edges, fixed, vector, slope, out);
}

#define INSTANTIATE(T)                                                                  \
  template void dot_rows(const RunRows<T>&, const wide_t<T>*, wide_t<T>*);              \
  template void add_rows(const RunRows<T>&, const wide_t<T>*, wide_t<T>*);              \
  template void dot_and_add_rows(const RunRows<T>&, const wide_t<T>*, const wide_t<T>*, \
                                 wide_t<T>*, wide_t<T>*);                               \
  template void joint_rows(const RunRows<T>&, const EdgeRows<T>&, const wide_t<T>*,     \
                           const wide_t<T>*, wide_t<T>, wide_t<T>*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
