// SPDX-License-Identifier: Apache-2.0
// What both backward walks compute for a portion of edges: weights, and gradients of scores.

#pragma once

#include <memory>

#include "attention/attention.h"
#include "attention/walk.h"

namespace graphshard {

// Entries of a portion.
template <typename V>
struct EdgeWeights {
  V* z;           // as the scores leave it
  V* peak;        // of the edge's destination
  V* scale;       // 1 / total of it
  V* delta;       // of it
  V* softmax;     // a
  V* g;           // <grad, values>
  V* slope;       // gradient of z
  V* weight;      // a m c; `softmax` itself where there is neither mask nor factor
  V* kept;        // a m; this and the next only where there is either
  V* multiplier;  // m c
  V* folded;      // a number per head
  uint32_t* words;
};

template <typename V>
class WeightsMemory {
 public:
  explicit WeightsMemory(int64_t heads)
      : heads_(heads),
        memory_(kArrays * Workspace<V>::size_of(kPortion * heads) + Workspace<V>::size_of(heads)),
        words_(std::make_unique_for_overwrite<uint32_t[]>((kPortion + 1) * heads)) {}

  // `multiplies`: there is a mask or a factor.
  EdgeWeights<V> weights(bool multiplies) {
    V* arrays[kArrays];
    for (V*& array : arrays) array = memory_.take(kPortion * heads_);
    return {arrays[0],
            arrays[1],
            arrays[2],
            arrays[3],
            arrays[4],
            arrays[5],
            arrays[6],
            multiplies ? arrays[7] : arrays[4],
            arrays[8],
            arrays[9],
            memory_.take(heads_),
            words_.get()};
  }

 private:
  static constexpr int kArrays = 10;
  int64_t heads_;
  Workspace<V> memory_;
  std::unique_ptr<uint32_t[]> words_;
};

template <typename T>
bool multiplies(const Attention<T>& a) {
  return a.mask.threshold != 0 || a.factor != nullptr;
}

// Turns scores and what belongs to the destination into weights.
template <typename Kind, typename T>
GRAPHSHARD_INLINE void weigh(const Attention<T>& a, const Portion<T>& portion,
                             const EdgeWeights<wide_t<T>>& w) {
  using V = wide_t<T>;
  for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    const V z = w.z[i];
    const V score = Kind::kScore == Score::kAdditive ? leaky_relu(z, a.slope) : z;
    w.softmax[i] = exp_nonpositive(score - w.peak[i]) * w.scale[i];
  });
  if (w.weight == w.softmax) return;
  if (a.mask.threshold != 0) {
    load_mask(a, portion, w.words, w.kept);
  } else {
    for (int i = 0; i < portion.padded; ++i) w.kept[i] = 1;
  }
  for (int i = 0; i < portion.padded; ++i) w.multiplier[i] = w.kept[i];
  if (a.factor != nullptr) multiply_by_factor(a, portion, w.multiplier);
  for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    w.kept[i] *= w.softmax[i];
    w.weight[i] = w.softmax[i] * w.multiplier[i];
  });
}

// Turns weights and g into the gradient of z.
template <typename Kind, typename T>
GRAPHSHARD_INLINE void find_slopes(const Attention<T>& a, const Portion<T>& portion,
                                   const EdgeWeights<wide_t<T>>& w) {
  using V = wide_t<T>;
  const V below = Kind::kScore == Score::kAdditive ? a.slope : V{1};  // where z is not positive
  if (w.weight == w.softmax) {
    for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
      const V slope = w.softmax[i] * (w.g[i] - w.delta[i]);
      w.slope[i] = w.z[i] > 0 ? slope : slope * below;
    });
  } else {
    for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
      const V slope = w.softmax[i] * (w.multiplier[i] * w.g[i] - w.delta[i]);
      w.slope[i] = w.z[i] > 0 ? slope : slope * below;
    });
  }
}

// Writes the gradients of edge terms and of the factor, each where it is wanted.
template <typename T>
GRAPHSHARD_INLINE void store_edge_gradients(const Attention<T>& a, const Portion<T>& portion,
                                            const EdgeWeights<wide_t<T>>& w, wide_t<T>* edge_terms,
                                            wide_t<T>* factor) {
  if (edge_terms != nullptr) {
    for_each_entry(portion, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
      edge_terms[portion.edges[k] * a.heads + h] = w.slope[entry];
    });
  }
  if (factor == nullptr) return;
  if (a.factor_width == 1) {
    for (int k = 0; k < portion.count; ++k) {
      wide_t<T> grad = 0;
      for (int64_t i = k * a.heads; i < (k + 1) * a.heads; ++i) {
        grad += w.kept[i] * w.g[i];
      }
      factor[portion.edges[k]] = grad;
    }
    return;
  }
  for_each_entry(portion, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    factor[portion.edges[k] * a.factor_width + h] = w.kept[entry] * w.g[entry];
  });
}

// [Note: packed statistics] A walk over out-edges reads four numbers of each destination and head:
// term (of additive scores), peak, 1 / total, delta. Those of a destination lie side by side, each
// for all heads, so that four heads take one line of the cache.
inline constexpr int64_t kPacked = 4;

template <typename T>
void pack_statistics(const Attention<T>& a, const AttentionGradient<T>& gradient, int num_threads,
                     wide_t<T>* packed) {
  using V = wide_t<T>;
  const int64_t parts = num_parts(a.num_dst, 4096, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t last = part_begin(a.num_dst, part + 1, parts);
    for (int64_t v = part_begin(a.num_dst, part, parts); v < last; ++v) {
      V* to = packed + v * kPacked * a.heads;
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t from = v * a.heads + h;
        to[h] = a.dst_terms == nullptr ? 0 : a.dst_terms[from];
        to[a.heads + h] = gradient.peak[from];
        to[2 * a.heads + h] = 1 / gradient.total[from];
        to[3 * a.heads + h] = gradient.delta[from];
      }
    }
  });
}

template <typename T>
GRAPHSHARD_INLINE void gather_statistics(const Attention<T>& a, const wide_t<T>* packed,
                                         const Portion<T>& portion,
                                         const EdgeWeights<wide_t<T>>& w) {
  for_each_entry(portion, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    const wide_t<T>* of = packed + portion.nodes[k] * kPacked * a.heads;
    w.peak[entry] = of[a.heads + h];
    w.scale[entry] = of[2 * a.heads + h];
    w.delta[entry] = of[3 * a.heads + h];
  });
}

}  // namespace graphshard
