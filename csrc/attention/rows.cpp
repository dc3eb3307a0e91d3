// SPDX-License-Identifier: Apache-2.0

#include "attention/rows.h"

#include <algorithm>
#include <type_traits>

#include "simd/columns.h"
#include "simd/dispatch.h"
#include "simd/elementwise.h"

namespace graphshard {
namespace {

// Columns [column, column + kColumns) of kHeads heads from `head` on, with the rows that are asked
// for. The passes below keep so many sums in registers while the edges of a run go by.
template <int kBytes, int kNumHeads, int kNumColumns, typename T>
struct Block {
  static constexpr int kHeads = kNumHeads;
  static constexpr int kColumns = kNumColumns;
  using Value = T;
  using Lanes = Columns<T, kColumns, kBytes>;
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

// Calls pass(block) for all columns of all heads. Where registers are short, blocks are small: four
// heads of eight float columns take eight of them.
template <int kBytes, typename T, typename Pass>
GRAPHSHARD_INLINE void in_passes(const RunRows<T>& run, const Pass& pass) {
  constexpr int kMost = kBytes > 16 ? 32 : std::is_same_v<T, double> ? 4 : 8;
  in_blocks<4, 1>(run.rows.heads, [&](auto heads, int64_t head) GRAPHSHARD_INLINE_LAMBDA {
    in_blocks<kMost, std::min(kMost, 16), std::min(kMost, 8), 4, 1>(
        run.rows.dim, [&](auto columns, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
          // The last few columns mostly lie on a line with those before them.
          const bool prefetch = run.prefetch && (columns >= 8 || column == 0);
          pass(Block<kBytes, heads, columns, T>{run, prefetch, head, column});
        });
  });
}

template <typename T>
GRAPHSHARD_INLINE void clear(const RunRows<T>& run, wide_t<T>* out) {
  const int64_t heads = run.rows.heads;
  for (int64_t i = run.first * heads; i < run.last * heads; ++i) out[i] = 0;
}

template <typename B, typename T = typename B::Value>
GRAPHSHARD_INLINE void add_block(const B& block, const wide_t<T>* weight, const RowSum<T>& to) {
  constexpr int kHeads = B::kHeads;
  const RunRows<T>& run = block.run;
  typename B::Lanes sums[kHeads];
  each<kHeads>([&](auto h) GRAPHSHARD_INLINE_LAMBDA {
    if (to.begins) {
      sums[h].clear();
    } else {
      sums[h].load(to.sum + block.at(h));
    }
  });
  for (int k = run.first; k < run.last; ++k) {
    block.request(k);
    const T* row = run[k];
    const wide_t<T>* weights = weight + k * run.rows.heads + block.head;
    each<kHeads>([&](auto h) GRAPHSHARD_INLINE_LAMBDA {
      sums[h].add_product(row + block.at(h), weights[h]);
    });
  }
  each<kHeads>([&](auto h) GRAPHSHARD_INLINE_LAMBDA {
    if (to.scale != nullptr) sums[h].multiply(to.scale[block.head + h]);
    if (to.out != nullptr) {
      sums[h].store(to.out + block.at(h));
    } else {
      sums[h].store(to.sum + block.at(h));
    }
  });
}

template <typename B, typename T = typename B::Value>
GRAPHSHARD_INLINE void dot_block(const B& block, const T* fixed, wide_t<T>* out) {
  constexpr int kHeads = B::kHeads;
  const RunRows<T>& run = block.run;
  typename B::Lanes own[kHeads];
  each<kHeads>([&](auto h) GRAPHSHARD_INLINE_LAMBDA { own[h].load(fixed + block.at(h)); });
  for (int k = run.first; k < run.last; ++k) {
    block.request(k);
    const T* row = run[k];
    add_dots<B::kColumns>(
        own, [&](int h) GRAPHSHARD_INLINE_LAMBDA { return row + block.at(h); },
        out + k * run.rows.heads + block.head);
  }
}

template <typename B, typename T = typename B::Value>
GRAPHSHARD_INLINE void joint_block(const B& block, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                                   const wide_t<T>* vector, wide_t<T> slope, wide_t<T>* out) {
  constexpr int kHeads = B::kHeads;
  using Lanes = typename B::Lanes;
  const RunRows<T>& run = block.run;
  Lanes own[kHeads];
  Lanes coefficients[kHeads];
  each<kHeads>([&](auto h) GRAPHSHARD_INLINE_LAMBDA {
    own[h].load(fixed + block.at(h));
    coefficients[h].load(vector + block.at(h));
  });
  const bool has_edges = edges.data != nullptr;
  for (int k = run.first; k < run.last; ++k) {
    block.request(k);
    const T* row = run[k];
    const T* edge = has_edges ? edges.data + (*edges.ids)[k] * run.rows.width() : nullptr;
    const auto joined = [&](int h) GRAPHSHARD_INLINE_LAMBDA {
      Lanes lanes = own[h];
      lanes.add(row + block.at(h));
      if (has_edges) lanes.add(edge + block.at(h));
      lanes.rectify(slope);
      return lanes;
    };
    add_dots<B::kColumns>(coefficients, joined, out + k * run.rows.heads + block.head);
  }
}

template <int kBytes, typename T>
GRAPHSHARD_INLINE void dot(const RunRows<T>& run, const T* fixed, wide_t<T>* out) {
  clear(run, out);
  in_passes<kBytes>(
      run, [&](const auto& block) GRAPHSHARD_INLINE_LAMBDA { dot_block(block, fixed, out); });
}

template <int kBytes, typename T>
GRAPHSHARD_INLINE void add(const RunRows<T>& run, const wide_t<T>* weight, const RowSum<T>& to) {
  in_passes<kBytes>(
      run, [&](const auto& block) GRAPHSHARD_INLINE_LAMBDA { add_block(block, weight, to); });
}

// As many edges at a time as have rows that stay in the first-level cache between the two.
template <int kBytes, typename T>
GRAPHSHARD_INLINE void dot_and_add(const RunRows<T>& run, const T* fixed, const wide_t<T>* weight,
                                   wide_t<T>* out, const RowSum<T>& to) {
  constexpr int64_t kCached = 8192;
  const int64_t row_bytes = run.rows.width() * static_cast<int64_t>(sizeof(T));
  const int few = static_cast<int>(kCached / std::clamp<int64_t>(row_bytes, 1, kCached / 4));
  RowSum<T> part = to;
  for (int first = run.first;; first += few, part.begins = false) {
    const int last = std::min(first + few, run.last);
    const bool ends = last == run.last;
    part.scale = ends ? to.scale : nullptr;
    part.out = ends ? to.out : nullptr;
    dot<kBytes>(RunRows<T>{run.rows, run.nodes, first, last, run.prefetch}, fixed, out);
    add<kBytes>(RunRows<T>{run.rows, run.nodes, first, last, false}, weight, part);
    if (ends) return;
  }
}

}  // namespace

template <typename T>
void dot_rows(const RunRows<T>& run, const T* fixed, wide_t<T>* out) {
  dispatch<kWidestRegister<T>>([&](auto bytes)
                                   GRAPHSHARD_INLINE_LAMBDA { dot<bytes>(run, fixed, out); });
}

template <typename T>
void add_rows(const RunRows<T>& run, const wide_t<T>* weight, const RowSum<T>& to) {
  dispatch<kWidestRegister<T>>([&](auto bytes)
                                   GRAPHSHARD_INLINE_LAMBDA { add<bytes>(run, weight, to); });
}

// One call and not two: most rows have few edges.
template <typename T>
void dot_and_add_rows(const RunRows<T>& run, const T* fixed, const wide_t<T>* weight,
                      wide_t<T>* out, const RowSum<T>& to) {
  dispatch<kWidestRegister<T>>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    dot_and_add<bytes>(run, fixed, weight, out, to);
  });
}

template <typename T>
void joint_rows(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                const wide_t<T>* vector, wide_t<T> slope, wide_t<T>* out) {
  dispatch<kWidestRegister<T>>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    clear(run, out);
    in_passes<bytes>(run, [&](const auto& block) GRAPHSHARD_INLINE_LAMBDA {
      joint_block(block, edges, fixed, vector, slope, out);
    });
  });
}

#define INSTANTIATE(T)                                                                      \
  template void dot_rows(const RunRows<T>&, const T*, wide_t<T>*);                          \
  template void add_rows(const RunRows<T>&, const wide_t<T>*, const RowSum<T>&);            \
  template void dot_and_add_rows(const RunRows<T>&, const T*, const wide_t<T>*, wide_t<T>*, \
                                 const RowSum<T>&);                                         \
  template void joint_rows(const RunRows<T>&, const EdgeRows<T>&, const wide_t<T>*,         \
                           const wide_t<T>*, wide_t<T>, wide_t<T>*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
