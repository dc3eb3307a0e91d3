// SPDX-License-Identifier: Apache-2.0
// Softmax over the in-edges of each destination, and its gradient.

#pragma once

#include "runtime/types.h"

namespace graphshard {

// Writes out[e, h] = exp(logits[e, h]) / sum over the edges of e's destination; all [num_edges,
// width].
template <typename T, typename I>
void edge_softmax(const Csc<I>& csc, const T* logits, int64_t width, T* out, int num_threads);

// Writes result = out * (grad - sum of out * grad over the edges of the destination).
template <typename T, typename I>
void edge_softmax_backward(const Csc<I>& csc, const T* out, const T* grad, int64_t width, T* result,
                           int num_threads);

}  // namespace graphshard
