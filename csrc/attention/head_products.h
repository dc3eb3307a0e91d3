// SPDX-License-Identifier: Apache-2.0
// Dot products of each head of each row with a vector per head, two vectors at a time.

#pragma once

#include "runtime/types.h"

namespace graphshard {

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

}  // namespace graphshard
