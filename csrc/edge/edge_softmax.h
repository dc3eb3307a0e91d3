// SPDX-License-Identifier: Apache-2.0
// Softmax over the in-edges of each destination, and its gradient.

#pragma once

#include "runtime/csr.h"
#include "runtime/types.h"

namespace graphshard {

// Writes out[e, h] = exp(logits[e, h]) / sum over the edges of e's destination; all [num_edges,
// width].
template <typename T>
void edge_softmax(const Csr& in_edges, const T* logits, int64_t width, T* out, int num_threads);

// Writes result = out * (grad - sum of out * grad over the edges of the destination).
template <typename T>
void edge_softmax_backward(const Csr& in_edges, const T* out, const T* grad, int64_t width,
                           T* result, int num_threads);

}  // namespace graphshard
