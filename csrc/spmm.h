// SPDX-License-Identifier: Apache-2.0
// Messages along edges, reduced by destination. A row without edges gets zeros.

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

// Writes the sum or mean of each row's messages into every element of `out`.
template <typename T, typename I>
void spmm_sum(const SpmmArguments<T, I>& arguments, Op op, bool mean, int num_threads);

// Writes the maximum or minimum into every element of `out`, and who won into `arg`. Among equals
// the edge that comes first wins; a NaN wins over any number.
template <typename T, typename I>
void spmm_best(const SpmmArguments<T, I>& arguments, Op op, bool smallest, int num_threads);

}  // namespace graphshard
