// SPDX-License-Identifier: Apache-2.0
// Entries: a number for each edge of a chunk and each head, edge by edge. What the walks compute
// with them is the same for rows of float and of bfloat16, and compiled once for both.

#pragma once

#include <cstdint>
#include <memory>

#include "attention/attention.h"
#include "attention/chunk.h"

namespace graphshard {

// Numbers per node and head, of additive scores: those of a node begin `step` after those of the
// node before.
template <typename V>
struct NodeTerms {
  const V* data;
  int64_t step;
};

// z = fixed + varying (+ edge_terms), before the leaky ReLU: `fixed` by the row of each piece,
// `varying` by the nodes at the other end.
template <typename V>
void additive_scores(const AttentionTerms<V>& a, const Chunk& chunk, const NodeTerms<V>& fixed,
                     const NodeTerms<V>& varying, V* z);

// z = scale * z (+ edge_terms), of dot products.
template <typename V>
void scale_scores(const AttentionTerms<V>& a, const Chunk& chunk, V* z);

// States of rows in the type of sums. Of a slice, or in a buffer, steps are 0.
template <typename V>
struct RowStates {
  V* peak;
  int64_t peak_step;
  V* total;
  int64_t total_step;
  V* sum;
  int64_t sum_step;
};

// What a walk forward computes in.
template <typename V>
class ForwardEntries {
 public:
  explicit ForwardEntries(int64_t heads)
      : memory_(3 * Workspace<V>::size_of(kChunkEdges * heads) + Workspace<V>::size_of(heads)),
        hashes_(std::make_unique_for_overwrite<uint32_t[]>((kChunkEdges + 1) * heads)),
        scores(memory_.take(kChunkEdges * heads)),
        multiplier(memory_.take(kChunkEdges * heads)),
        peak(memory_.take(kChunkEdges * heads)),
        folded(memory_.take(heads)),
        hashes(hashes_.get()) {}

 private:
  Workspace<V> memory_;
  std::unique_ptr<uint32_t[]> hashes_;

 public:
  V* scores;
  V* multiplier;
  V* peak;    // of each entry
  V* folded;  // a number per head
  uint32_t* hashes;
};

// scores = exp(score - peak), times their multipliers; raises peaks and totals of the rows of the
// chunk. `begins`: states begin with the first edge of each row.
template <typename V>
void weigh_forward(const AttentionTerms<V>& a, const Chunk& chunk, const RowStates<V>& states,
                   bool begins, const ForwardEntries<V>& entries);

// What sums of weighted values are multiplied by in the end; without any weight they stay zero.
template <typename V>
V scale_of(V total) {
  return total == 0 ? 0 : 1 / total;
}

// peak = max(peak, highest), with what was summed up scaled accordingly.
template <typename V>
void raise_peak(V highest, int64_t dim, V& peak, V& total, V* sum);

// exp(from - to), for `from` not above `to`.
template <typename V>
V exp_difference(V from, V to);

// What both walks backward compute in.
template <typename V>
class BackwardEntries {
 public:
  // `multiplies`: there is a mask or a factor.
  BackwardEntries(int64_t heads, bool multiplies)
      : memory_(10 * Workspace<V>::size_of(kChunkEdges * heads) + Workspace<V>::size_of(heads)),
        hashes_(std::make_unique_for_overwrite<uint32_t[]>((kChunkEdges + 1) * heads)) {
    for (V** array :
         {&z, &peak, &scale, &delta, &softmax, &g, &slope, &weight, &kept, &multiplier}) {
      *array = memory_.take(kChunkEdges * heads);
    }
    if (!multiplies) weight = softmax;
    folded = memory_.take(heads);
    hashes = hashes_.get();
  }

 private:
  Workspace<V> memory_;
  std::unique_ptr<uint32_t[]> hashes_;

 public:
  V* z;           // as the scores leave it
  V* peak;        // of the edge's destination
  V* scale;       // 1 / total of it
  V* delta;       // of it
  V* softmax;     // a
  V* g;           // <grad, values>
  V* slope;       // gradient of z
  V* weight;      // a m c; `softmax` itself where there is neither mask nor factor
  V* kept;        // a m; this and the next only where there is either
  V* multiplier;  // m c
  V* folded;      // a number per head
  uint32_t* hashes;
};

// [Note: packed statistics] A walk over out-edges reads four numbers of each destination and head:
// term (of additive scores), peak, 1 / total, delta. Those of a destination lie side by side, each
// for all heads, so that four heads take one line of the cache.
inline constexpr int64_t kPacked = 4;

// What weights are computed again from: `packed`, or if that is null, three arrays by row.
template <typename V>
struct Statistics {
  const V* packed;  // [num_dst, kPacked, heads]
  const V* peak;    // [num_dst, heads]
  const V* total;
  const V* delta;
};

template <typename V>
void pack_statistics(const AttentionTerms<V>& a, const Statistics<V>& statistics, int num_threads,
                     V* packed);

// Turns scores into weights, with the statistics of each edge's destination: of the nodes at the
// other end if they are packed, else of the row.
template <typename V>
void weigh_backward(const AttentionTerms<V>& a, const Chunk& chunk, const Statistics<V>& statistics,
                    const BackwardEntries<V>& entries);

// Turns weights and g into the gradient of scores, for dot products of the product itself. Before
// that, writes the gradients of edge terms and of the factor, unless they are null.
template <typename V>
void find_slopes(const AttentionTerms<V>& a, const Chunk& chunk, const BackwardEntries<V>& entries,
                 V* edge_terms, V* factor);

// Adds slopes to those of their nodes in `node_sums` [nodes, heads], if that is not null, and sums
// them by row: at row_sums, rows `row_step` apart.
template <typename V>
void sum_slopes(const AttentionTerms<V>& a, const Chunk& chunk, const V* slope, V* node_sums,
                V* row_sums, int64_t row_step);

}  // namespace graphshard
