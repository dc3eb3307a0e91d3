// SPDX-License-Identifier: Apache-2.0
// What attention does with the rows at the other end of a run of edges, for all heads in one go:
// this is where its time goes.

#pragma once

#include <cstdint>

#include "runtime/edge_ids.h"
#include "runtime/types.h"

namespace graphshard {

// Rows of `dim` columns for each of some heads; one begins `step` numbers after the one before.
template <typename T>
struct HeadRows {
  const T* data;
  int64_t heads;
  int64_t dim;
  int64_t step;

  GRAPHSHARD_INLINE int64_t width() const { return heads * dim; }
};

// The rows at the other end of the edges [first, last) of a run. The first to read them requests
// those of later edges.
template <typename T>
struct RunRows {
  HeadRows<T> rows;
  const EdgeIds& nodes;
  int first;
  int last;
  bool prefetch;

  GRAPHSHARD_INLINE const T* operator[](int64_t k) const {
    return rows.data + nodes[k] * rows.step;
  }
  GRAPHSHARD_INLINE const T* ahead_of(int64_t k) const {
    return rows.data + nodes.ahead_of(k) * rows.step;
  }
};

// Rows of features of the edges of a run, if `data` is not null.
template <typename T>
struct EdgeRows {
  const T* data;
  const EdgeIds* ids;
};

// Where weighted rows are summed: `sum` holds the sum so far unless it begins here, and the sum
// from here on; if `out` is not null, this is the end, and `out` gets it instead, each head
// multiplied by its scale if that is not null.
template <typename T>
struct RowSum {
  wide_t<T>* sum;
  bool begins;
  T* out;
  const wide_t<T>* scale;
};

// Numbers per edge and head are entries: edge k of a run has its heads' at [k * heads, (k + 1) *
// heads) of an array.

// out[k, h] = <fixed[h], row k[h]>.
template <typename T>
void dot_rows(const RunRows<T>& run, const T* fixed, wide_t<T>* out);

// sum[h] += sum over k of weight[k, h] * row k[h].
template <typename T>
void add_rows(const RunRows<T>& run, const wide_t<T>* weight, const RowSum<T>& to);

// Both, of rows that are read once.
template <typename T>
void dot_and_add_rows(const RunRows<T>& run, const T* fixed, const wide_t<T>* weight,
                      wide_t<T>* out, const RowSum<T>& to);

// out[k, h] = <vector[h], leaky_relu(fixed[h] + row k[h] (+ edge row k[h]))>.
template <typename T>
void joint_rows(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                const wide_t<T>* vector, wide_t<T> slope, wide_t<T>* out);

// A row in the type of sums, and one that was summed in the type of rows.
template <typename T>
void widen_row(const T* row, int64_t width, wide_t<T>* to);
template <typename T>
void narrow_row(const wide_t<T>* sums, int64_t width, T* to);

// Gradients of joint scores with respect to the features that the leaky ReLU joins, given those of
// the scores. With w = slope_grad[k, h] times the slope of the ReLU where the joined feature is:
//   sum[h] += vector[h] * sum over k of w.
template <typename T>
void add_joint_src(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                   const wide_t<T>* vector, wide_t<T> slope, const wide_t<T>* slope_grad,
                   wide_t<T>* sum);

// Likewise, with the gradients of the vector, and of the edges' features unless that is null:
//   vector_sum[h] += sum over k of w * joined,  edge_grad[edge] = vector[h] * w.
template <typename T>
void add_joint_dst(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                   const wide_t<T>* vector, wide_t<T> slope, const wide_t<T>* slope_grad,
                   wide_t<T>* sum, wide_t<T>* vector_sum, T* edge_grad);

}  // namespace graphshard
