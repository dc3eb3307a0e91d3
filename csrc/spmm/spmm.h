// SPDX-License-Identifier: Apache-2.0
// Messages along edges, reduced by destination. A row without edges gets zeros.

#pragma once

#include "runtime/csr.h"
#include "runtime/types.h"

namespace graphshard {

template <typename T>
struct SpmmArguments {
  Csr edges;    // in-edges
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
// of the edge that has it, or -1 where there is none. Among equals it is the edge that comes first;
// a NaN is above, and below, any number.
template <typename T>
void spmm_extremum(const SpmmArguments<T>& arguments, WritableIds arg, Op op, bool smallest,
                   int num_threads);

}  // namespace graphshard
