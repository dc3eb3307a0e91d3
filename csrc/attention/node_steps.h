// SPDX-License-Identifier: Apache-2.0
// What attention computes node by node, before and after its walk over edges, each in one pass over
// the rows: products of heads with vectors, and bias, ReLU and their gradients.

#pragma once

#include <cstdint>

#include "runtime/types.h"

namespace graphshard {

// Dot products of each head of each row with a vector per head, two vectors at a time.
template <typename T>
struct HeadProducts {
  using V = wide_t<T>;
  const T* rows;  // [num_rows, heads * dim]
  int64_t num_rows;
  int64_t heads;
  int64_t dim;
  const V* vectors;  // [2, heads * dim]
};

// products[i][n, h] = <rows[n, h], vectors[i, h]>.
template <typename T>
void head_products(const HeadProducts<T>& input, wide_t<T>* first, wide_t<T>* second,
                   int num_threads);

// rows_grad[n, h] = passed[n, h] + sum over i of grad_i[n, h] * vectors[i, h], where `passed` may
// be null, and vectors_grad[i, h] = sum over n of grad_i[n, h] * rows[n, h].
template <typename T>
void head_products_backward(const HeadProducts<T>& input, const T* passed,
                            const wide_t<T>* first_grad, const wide_t<T>* second_grad, T* rows_grad,
                            wide_t<T>* vectors_grad, int num_threads);

// What follows a sum: out = relu(sum / total + bias). Rows of no edges have total 0, and sum 0.
template <typename T>
struct AttentionFinish {
  int64_t num_rows;
  int64_t heads;
  int64_t dim;
  const wide_t<T>* total;  // [num_rows, heads], or null if the sum is divided already
  const wide_t<T>* bias;   // [heads * dim], or null
  bool relu;
};

// From sums, or from an earlier result; `from` may be `out`.
template <typename T>
void attention_finish(const AttentionFinish<T>& finish, const wide_t<T>* from, T* out,
                      int num_threads);
template <typename T>
void attention_finish_again(const AttentionFinish<T>& finish, T* out, int num_threads);

// The other way: with g = grad, or 0 where `out` is not positive if there is a ReLU, writes
// delta[v, h] = <g[v, h], out[v, h] - bias[h]>, and g itself to `passed` if that is not null.
template <typename T>
void attention_delta(const AttentionFinish<T>& finish, const T* grad, const T* out, T* passed,
                     wide_t<T>* delta, int num_threads);

}  // namespace graphshard
