// SPDX-License-Identifier: Apache-2.0
// What stands between the walks of an attention and its layer, each in one pass over rows.

#pragma once

#include <cstdint>

#include "runtime/types.h"

namespace graphshard {

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
