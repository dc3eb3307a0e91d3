// SPDX-License-Identifier: Apache-2.0
// Max and min over several sets of edges, and their gradient: each element goes to the edge that
// won.

#pragma once

#include "runtime/types.h"

namespace graphshard {

template <typename T, typename I>
struct WinnersArguments {
  const I* arg;   // [num_rows, width] the winning edge id, -1 where there is none
  const T* grad;  // [num_rows, width]
  int64_t num_rows;
  int64_t width;
  const I* src;  // [num_edges] source of each edge
  uint64_t num_edges;
  Rows<T> lhs;  // null data unless the operator multiplies or divides
  Rows<T> rhs;
  const int64_t* lhs_places;  // [width] where in a row of lhs each element comes from
  const int64_t* rhs_places;
};

// Adds to lhs_grad [num_src, width], one column per element of the result, and to rhs_grad
// [num_edges, rhs_width]. Both must hold zeros; either may be null. Throws std::out_of_range where
// a winner is no edge.
template <typename T, typename I>
void winners_backward(const WinnersArguments<T, I>& arguments, Op op, wide_t<T>* lhs_grad,
                      wide_t<T>* rhs_grad, int64_t rhs_width, int num_threads);

// What one set of edges contributes to a maximum or minimum over several.
template <typename T, typename I, typename E>
struct Candidates {
  const T* value;  // [size] its own maximum or minimum
  const I* arg;    // [size] which of its edges won, -1 where there is none
  const E* ids;    // the ids of its edges among those of all sets; null where they are the same
  uint64_t num_ids;
};

// Takes over into best [size] and edge [size] each candidate that is better, or equal and of a
// smaller id; edge holds `none` where there is nothing yet. Throws std::out_of_range where a
// candidate is no edge; others may have been taken over then.
template <typename T, typename I, typename E>
void merge_best(const Candidates<T, I, E>& candidates, int64_t size, bool smallest, int64_t none,
                T* best, E* edge, int num_threads);

}  // namespace graphshard
