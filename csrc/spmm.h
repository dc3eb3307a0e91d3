// SPDX-License-Identifier: Apache-2.0
// Messages along edges, reduced by destination.

#pragma once

#include "types.h"

namespace graphshard {

template <typename T, typename I>
struct SpmmArguments {
  Csc<I> csc;
  Rows<T> lhs;  // one row per source; null data where the operator does not look at it
  Rows<T> rhs;  // one row per edge id; likewise
  RowLoop loop;
  T* out;  // [num_rows, outer * inner]
  I* arg;  // of that shape, for max and min: the winning edge id, -1 where there is none
};

// Writes every element of `out`, and of `arg` for max and min. A row without edges gets zeros.
// Among equals the edge that comes first wins; a NaN wins over any number.
template <typename T, typename I>
void spmm(const SpmmArguments<T, I>& arguments, Op op, Reduce reduce, int num_threads);

}  // namespace graphshard
