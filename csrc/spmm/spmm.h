// SPDX-License-Identifier: Apache-2.0
// Messages along edges, reduced by destination. A row without edges gets zeros.

#pragma once

#include "runtime/types.h"

namespace graphshard {

// In-edges grouped by destination, of either id type. Without `eids`, an edge's position is its id.
struct Edges {
  Ids indptr;
  Ids indices;
  Ids eids;
  int64_t num_rows;
  int64_t num_edges;

  template <typename I>
  explicit Edges(const Csc<I>& csc)
      : indptr(csc.indptr),
        indices(csc.indices),
        eids(csc.eids),
        num_rows(csc.num_rows),
        num_edges(csc.num_edges) {}

  GRAPHSHARD_INLINE int64_t edge_id(int64_t position) const {
    return eids ? eids[position] : position;
  }
};

template <typename T>
struct SpmmArguments {
  Edges edges;
  Rows<T> lhs;  // one row per source; null data where the operator does not look at it
  Rows<T> rhs;  // one row per edge id; likewise
  RowLoop loop;
  T* out;  // [num_rows, outer * inner]
};

// What becomes of the sum of a row's messages.
enum class SumResult { kSum, kMean, kAdded };

// Writes the sum or mean of each row's messages into every element of `out`, or adds the sum to
// what is there.
template <typename T>
void spmm_sum(const SpmmArguments<T>& arguments, Op op, SumResult result, int num_threads);

// Writes the maximum or minimum into every element of `out`, and into `arg`, of that shape, the id
// of the edge that won, or -1 where there is none. Among equals the edge that comes first wins; a
// NaN wins over any number.
template <typename T>
void spmm_best(const SpmmArguments<T>& arguments, WritableIds arg, Op op, bool smallest,
               int num_threads);

}  // namespace graphshard
