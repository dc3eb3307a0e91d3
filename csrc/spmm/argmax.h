// SPDX-License-Identifier: Apache-2.0
// Maxima and minima by their argmax: which edge an element came from.

#pragma once

#include "runtime/csr.h"
#include "runtime/types.h"

namespace graphshard {

template <typename T>
struct ArgmaxArguments {
  Ids arg;        // [num_rows, width] id of the edge with the maximum, -1 where there is none
  const T* grad;  // [num_rows, width]
  int64_t num_rows;
  int64_t width;
  Ids src;  // [num_edges] source of each edge, in the type of arg
  uint64_t num_edges;
  Rows<T> lhs;  // null data unless the operator multiplies or divides
  Rows<T> rhs;
  const int64_t* lhs_places;  // [width] where in a row of lhs each element comes from
  const int64_t* rhs_places;
};

// Adds to lhs_grad [num_src, width], one column per element of the result, and to rhs_grad
// [num_edges, rhs_width]: each element's gradient goes to its edge in `arg`. Both must hold zeros;
// either may be null. Throws std::out_of_range where an id is that of no edge.
template <typename T>
void argmax_backward(const ArgmaxArguments<T>& arguments, Op op, wide_t<T>* lhs_grad,
                     wide_t<T>* rhs_grad, int64_t rhs_width, int num_threads);

// What one set of edges contributes to a maximum or minimum over several.
template <typename T>
struct Candidates {
  const T* value;  // [size] its own maximum or minimum
  Ids arg;         // [size] which of its edges has it, -1 where there is none
  Ids ids;         // the ids of its edges among those of all sets; null where they are the same
  uint64_t num_ids;
};

// Takes over into best [size] and edge [size] each candidate that is better, or equal and of a
// smaller id; edge holds `none` where there is nothing yet. Throws std::out_of_range where a
// candidate is no edge; others may have been taken over then.
template <typename T>
void merge_best(const Candidates<T>& candidates, int64_t size, bool smallest, int64_t none, T* best,
                WritableIds edge, int num_threads);

}  // namespace graphshard
