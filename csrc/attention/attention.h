// SPDX-License-Identifier: Apache-2.0
// Attention over the in-edges of each destination, without a number per edge and head in memory.
//
//   out[v] = sum over edges e from u to v of  a[e] m[e] c[e] values[u],   a = softmax of s over v
//
// for each head, where m is the dropout mask over its keep probability and c a factor that the
// caller gives. Three kinds of score s:
//
//   additive  leaky_relu(src_terms[u] + dst_terms[v] (+ edge_terms[e]))
//   joint     sum over d of vector[d] * leaky_relu(values[u, d] + dst[v, d] (+ edge[e, d]))
//   dot       scale * <src[u], dst[v]> (+ edge_terms[e])
//
// [Note: online softmax] A destination's state is the largest score so far (peak), the sum of
// exp(s - peak) (total) and the weighted sum of values at that peak (sum). Some more edges at a
// time raise the peak, scale the sums by exp(old - new) and add what they bring. So the edges may
// come in any number of chunks: of 64, of 4096, or of one shard of a graph after another.
//
// [Note: backward] With g = <grad[v], values[u]> and delta[v] = <grad[v], out[v]>, the gradient of
// a score is a (m c g - delta). The weights are computed again from scores, peak and total. What
// belongs to sources is summed over out-edges, what belongs to destinations over in-edges; of
// additive scores the latter is a number per head, which the walk over out-edges brings along.

#pragma once

#include <cstdint>

#include "runtime/csr.h"
#include "runtime/types.h"

namespace graphshard {

enum class Score { kAdditive, kJoint, kDot };

// Which entries are dropped is a function of (seed, key of the edge, head): see
// ops/_attention_rule.py, which says the same in torch.
struct EdgeMask {
  uint64_t threshold;  // a hash of 32 bits below it drops the entry; 0 for no dropout
  uint32_t edge_seed;
  uint32_t head_seed;
  double kept;          // what kept entries are multiplied by
  const int32_t* keys;  // by edge id; null for the id itself
};

// What is known of an attention besides its rows: the numbers per head, in the type of sums.
template <typename V>
struct AttentionTerms {
  Score score;
  int64_t num_src;
  int64_t num_dst;
  int64_t heads;
  int64_t dim;
  int64_t score_dim;    // columns of a head in src, dst and edge
  const V* src_terms;   // [num_src, heads]
  const V* dst_terms;   // [num_dst, heads]
  const V* edge_terms;  // [num_edges, heads], or null
  const V* vector;      // [heads * score_dim]
  V slope;
  V scale;
  const V* factor;  // [num_edges, factor_width], or null
  int64_t factor_width;
  EdgeMask mask;

  bool reads_edges() const {
    return edge_terms != nullptr || factor != nullptr || mask.threshold != 0;
  }
  // Whether weights are multiplied by something before values are summed.
  bool multiplies() const { return mask.threshold != 0 || factor != nullptr; }
};

template <typename T>
struct Attention : AttentionTerms<wide_t<T>> {
  const T* values;  // [num_src, heads * dim]
  const T* src;     // [num_src, heads * score_dim]: keys; `values` itself if joint
  const T* dst;     // [num_dst, heads * score_dim]
  const T* edge;    // [num_edges, heads * score_dim], or null

  int64_t width() const { return this->heads * this->dim; }
  int64_t score_width() const { return this->heads * this->score_dim; }
};

// Where a walk over in-edges leaves its result. Either everything ends here: `out` is written, and
// `sum` may be null. Or `out` is null, and the state of each destination is begun or continued. The
// state may be that of some heads of more: its rows lie apart by the steps.
template <typename T>
struct AttentionState {
  using V = wide_t<T>;
  V* peak;   // [num_dst, heads]
  V* total;  // [num_dst, heads]
  V* sum;    // [num_dst, heads * dim]
  T* out;    // [num_dst, heads * dim]
  bool begin;
  int64_t peak_step;
  int64_t total_step;
  int64_t sum_step;
};

// What the gradients of one or more shards are computed from.
template <typename T>
struct AttentionGradient {
  using V = wide_t<T>;
  const V* peak;   // [num_dst, heads], over all edges
  const V* total;  // [num_dst, heads]
  const V* delta;  // [num_dst, heads]
  const T* grad;   // [num_dst, heads * dim], rows `grad_step` apart
  int64_t grad_step;
};

// Each is null where it is not wanted. `dst_terms` is added to, the others are written.
template <typename T>
struct SourceGradients {
  using V = wide_t<T>;
  T* values;      // [num_src, heads * dim]; of joint scores with what the scores give
  T* src;         // dot: [num_src, heads * score_dim]
  V* src_terms;   // additive: [num_src, heads]
  V* dst_terms;   // additive: [num_dst, heads]
  V* edge_terms;  // additive: [num_edges, heads]
  V* factor;      // additive: [num_edges, factor_width]
};

// Of joint and dot scores. `dst` and `vector` are added to, the others are written.
template <typename T>
struct DestinationGradients {
  using V = wide_t<T>;
  V* dst;         // [num_dst, heads * score_dim]
  V* vector;      // joint: [heads * score_dim]
  T* edge;        // joint: [num_edges, heads * score_dim]
  V* edge_terms;  // dot: [num_edges, heads]
  V* factor;      // [num_edges, factor_width]
};

// Takes the in-edges of each destination into its state.
template <typename T>
void attention_forward(const Attention<T>& attention, const Csr& in_edges,
                       const AttentionState<T>& state, int num_threads);

template <typename T>
void attention_sources(const Attention<T>& attention, const Csr& out_edges,
                       const AttentionGradient<T>& gradient, const SourceGradients<T>& result,
                       int num_threads);

template <typename T>
void attention_destinations(const Attention<T>& attention, const Csr& in_edges,
                            const AttentionGradient<T>& gradient,
                            const DestinationGradients<T>& result, int num_threads);

}  // namespace graphshard
