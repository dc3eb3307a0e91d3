// SPDX-License-Identifier: Apache-2.0
// What both backward walks compute for a portion of edges: weights, and gradients of scores.

#pragma once

#include <memory>

#include "attention.h"
#include "attention_walk.h"

namespace graphshard {

// Numbers of one head for the edges of a portion.
template <typename V>
struct EdgeWeights {
  alignas(64) V z[kPortion];       // as the scores leave it
  alignas(64) V peak[kPortion];    // of the edge's destination
  alignas(64) V scale[kPortion];   // 1 / total of it
  alignas(64) V delta[kPortion];   // of it
  alignas(64) V g[kPortion];       // <grad, values>
  alignas(64) V weight[kPortion];  // a m c
  alignas(64) V slope[kPortion];   // gradient of z
  alignas(64) V kept[kPortion];    // a m, where the gradient of c is wanted
};

// Turns scores, g and what belongs to the destination into weights and the gradient of z.
template <typename Kind, typename T>
GRAPHSHARD_INLINE void weigh(const Attention<T>& a, const Portion& portion, int64_t head,
                             EdgeWeights<wide_t<T>>& w) {
  using V = wide_t<T>;
  for (int k = 0; k < portion.count; ++k) {
    V score = w.z[k];
    if constexpr (Kind::kScore == Score::kAdditive) score = leaky_relu(score, a.slope);
    w.weight[k] = score - w.peak[k];
  }
  for (int k = portion.count; k < portion.padded; ++k) w.weight[k] = 0;
#pragma omp simd
  for (int k = 0; k < portion.padded; ++k) w.weight[k] = exp_nonpositive(w.weight[k]);
  for (int k = 0; k < portion.count; ++k) w.weight[k] *= w.scale[k];
  if (a.mask.threshold == 0 && a.factor == nullptr) {
    for (int k = 0; k < portion.count; ++k) {
      w.kept[k] = w.weight[k];
      w.slope[k] = w.weight[k] * (w.g[k] - w.delta[k]);
    }
  } else {
    alignas(64) V multiplier[kPortion];
    load_multipliers(a, portion, head, false, multiplier);
    for (int k = 0; k < portion.count; ++k) w.kept[k] = w.weight[k] * multiplier[k];
    if (a.factor != nullptr) {
      const V* factor = a.factor + (a.factor_width == 1 ? 0 : head);
      for (int k = 0; k < portion.count; ++k) {
        multiplier[k] *= factor[portion.edges[k] * a.factor_width];
      }
    }
    for (int k = 0; k < portion.count; ++k) {
      w.slope[k] = w.weight[k] * (multiplier[k] * w.g[k] - w.delta[k]);
      w.weight[k] *= multiplier[k];
    }
  }
  if constexpr (Kind::kScore == Score::kAdditive) {
    for (int k = 0; k < portion.count; ++k) w.slope[k] *= w.z[k] > 0 ? V{1} : a.slope;
  }
}

// Writes the gradients of edge terms and of the factor, each where it is wanted. A factor that all
// heads share sums up in `factor_grad` until the last head.
template <typename T>
GRAPHSHARD_INLINE void store_edge_gradients(const Attention<T>& a, const Portion& portion,
                                            Heads heads, int64_t head,
                                            const EdgeWeights<wide_t<T>>& w, wide_t<T>* factor_grad,
                                            wide_t<T>* edge_terms, wide_t<T>* factor) {
  if (edge_terms != nullptr) {
    for (int k = 0; k < portion.count; ++k) {
      edge_terms[portion.edges[k] * a.heads + head] = w.slope[k];
    }
  }
  if (factor == nullptr) return;
  if (a.factor_width != 1) {
    for (int k = 0; k < portion.count; ++k) {
      factor[portion.edges[k] * a.factor_width + head] = w.kept[k] * w.g[k];
    }
    return;
  }
  for (int k = 0; k < portion.count; ++k) {
    const wide_t<T> before = head == heads.first ? 0 : factor_grad[k];
    factor_grad[k] = before + w.kept[k] * w.g[k];
  }
  if (head + 1 < heads.last) return;
  for (int k = 0; k < portion.count; ++k) factor[portion.edges[k]] = factor_grad[k];
}

// [Note: packed statistics] A walk over out-edges reads four numbers of each destination and head;
// side by side, head after head, they are one access to a small array: term, peak, 1 / total,
// delta.
inline constexpr int64_t kPacked = 4;

template <typename T>
std::unique_ptr<wide_t<T>[]> pack_statistics(const Attention<T>& a,
                                             const AttentionGradient<T>& gradient,
                                             int num_threads) {
  using V = wide_t<T>;
  auto packed = std::make_unique_for_overwrite<V[]>(kPacked * a.heads * a.num_dst);
  const int64_t parts = num_parts(a.num_dst, 4096, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t last = part_begin(a.num_dst, part + 1, parts);
    for (int64_t v = part_begin(a.num_dst, part, parts); v < last; ++v) {
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t from = v * a.heads + h;
        V* to = packed.get() + (h * a.num_dst + v) * kPacked;
        to[0] = a.dst_terms == nullptr ? 0 : a.dst_terms[from];
        to[1] = gradient.peak[from];
        to[2] = 1 / gradient.total[from];
        to[3] = gradient.delta[from];
      }
    }
  });
  return packed;
}

template <typename V>
GRAPHSHARD_INLINE void gather_statistics(const V* packed, const Portion& portion,
                                         EdgeWeights<V>& w) {
  for (int k = 0; k < portion.count; ++k) {
    const V* of = packed + portion.nodes[k] * kPacked;
    w.peak[k] = of[1];
    w.scale[k] = of[2];
    w.delta[k] = of[3];
  }
}

}  // namespace graphshard
