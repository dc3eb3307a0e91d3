// SPDX-License-Identifier: Apache-2.0
// Gradients that belong to destinations, to edges, and to the vector of joint scores: each
// destination walks its in-edges, see [Note: backward] in attention.h.

#include <memory>

#include "attention/attention.h"
#include "attention/weights.h"
#include "simd/elementwise.h"

namespace graphshard {
namespace {

// Rows of one destination in the type of sums, and what is summed for it.
template <typename V>
struct RowSums {
  const V* scores;  // what its scores are made of
  V* dst;           // [heads * score_dim]
  V* vector;        // joint: [heads * score_dim]
};

// Gradients of joint scores with respect to the features that the leaky ReLU joins, of kSize
// columns from `first` on. kEdge: edges have features; `edge` is where their gradients go, or null.
template <bool kEdge, int kSize, typename T>
GRAPHSHARD_INLINE void add_joint_columns(const Attention<T>& a, const Portion<T>& portion,
                                         const Piece& piece, int64_t first, const wide_t<T>* slope,
                                         const RowSums<wide_t<T>>& row, T* edge) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.score_dim;
  const V* fixed = row.scores + first;
  const V* coefficient = a.vector + first;
  V dst[kSize];
  V vector[kSize];
  for (int j = 0; j < kSize; ++j) dst[j] = vector[j] = 0;
  for (int k = piece.first; k < piece.last; ++k) {
    const T* from = a.src + portion.nodes[k] * width + first;
    const T* edge_row = kEdge ? a.edge + portion.edges[k] * width + first : nullptr;
    const V high = slope[k * a.heads];
    const V low = high * a.slope;
#pragma omp simd
    for (int j = 0; j < kSize; ++j) {
      V joined = fixed[j] + widen(from[j]);
      if constexpr (kEdge) joined += widen(edge_row[j]);
      const V passed = joined > 0 ? high : low;
      dst[j] += passed;
      vector[j] += passed * joined;
    }
    if constexpr (kEdge) {
      if (edge == nullptr) continue;
      T* to = edge + portion.edges[k] * width + first;
      for (int j = 0; j < kSize; ++j) {
        const V joined = fixed[j] + widen(from[j]) + widen(edge_row[j]);
        narrow((joined > 0 ? high : low) * coefficient[j], to[j]);
      }
    }
  }
  for (int j = 0; j < kSize; ++j) {
    row.dst[first + j] += dst[j] * coefficient[j];
    row.vector[first + j] += vector[j];
  }
}

template <typename T>
GRAPHSHARD_INLINE void add_joint(const Attention<T>& a, const Portion<T>& portion,
                                 const Piece& piece, const wide_t<T>* slope,
                                 const RowSums<wide_t<T>>& row, T* edge) {
  for (int64_t h = 0; h < a.heads; ++h) {
    in_blocks<32, 16, 8, 4, 1>(a.score_dim, [&](auto size, int64_t at) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t first = h * a.score_dim + at;
      if (a.edge == nullptr) {
        add_joint_columns<false, size>(a, portion, piece, first, slope + h, row, edge);
      } else {
        add_joint_columns<true, size>(a, portion, piece, first, slope + h, row, edge);
      }
    });
  }
}

// Weights and gradients of scores of a portion. The buffer has room for a destination's row in the
// type of sums.
template <typename Kind, typename T>
GRAPHSHARD_INLINE void weigh_edges(const Attention<T>& a, const AttentionGradient<T>& gradient,
                                   const Portion<T>& portion, const EdgeWeights<wide_t<T>>& w,
                                   wide_t<T>* buffer) {
  const Varying<T> varying{a.src, a.src_terms, a.heads};
  for (int p = 0; p < portion.num_pieces; ++p) {
    const Piece& piece = portion.pieces[p];
    if (piece.first == piece.last) continue;
    const int64_t at = piece.row * a.heads;
    repeat(a.heads, piece, gradient.peak + at, w.peak);
    repeat(a.heads, piece, gradient.delta + at, w.delta);
    for (int64_t h = 0; h < a.heads; ++h) w.folded[h] = 1 / gradient.total[at + h];
    repeat(a.heads, piece, w.folded, w.scale);
    Kind::scores(a, Kind::fixed(a, a.dst, a.dst_terms, piece.row, buffer), varying, portion, piece,
                 w.z);
    dot_rows(portion.rows(piece, a.values, a.dim, a.values != a.src),
             gradient.grad + piece.row * gradient.grad_step, w.g);
  }
  weigh<Kind>(a, portion, w);
  find_slopes<Kind>(a, portion, w);
}

template <typename Kind, typename T>
GRAPHSHARD_CLONES void destination_span(const Attention<T>& a, const EdgeGroups& in_edges,
                                        const AttentionGradient<T>& gradient,
                                        const DestinationGradients<T>& result, const Span& span,
                                        wide_t<T>* vector, wide_t<T>* slice) {
  using V = wide_t<T>;
  const int64_t score_width = a.heads * a.score_dim;
  // A destination's row in the type of sums, and the gradient of it.
  Workspace<V> memory(2 * Workspace<V>::size_of(score_width));
  V* row_buffer = memory.take(score_width);
  V* own = memory.take(score_width);
  WeightsMemory<V> weights_memory(a.heads);
  const EdgeWeights<V> w = weights_memory.weights(multiplies(a));
  Portion<T> portion(a, in_edges, span, true);
  while (portion.next()) {
    weigh_edges<Kind>(a, gradient, portion, w, row_buffer);
    store_edge_gradients(a, portion, w, result.edge_terms, result.factor);
    if constexpr (Kind::kScore == Score::kDot) {
      for (int i = 0; i < portion.entries; ++i) w.slope[i] *= a.scale;
    }
    for (int p = 0; p < portion.num_pieces; ++p) {
      const Piece& piece = portion.pieces[p];
      if (piece.first == piece.last) continue;
      V* dst = own;
      if (span.slice >= 0) {
        dst = slice;
      } else if (result.dst != nullptr) {
        dst = result.dst + piece.row * score_width;
      }
      const bool begins = piece.begins && (dst == slice || dst == own);  // else it is added to
      if constexpr (Kind::kScore == Score::kDot) {
        add_rows(portion.rows(piece, a.src, a.score_dim, false), w.slope,
                 RowSum<T>{dst, begins, nullptr, nullptr});
      } else {
        if (begins) std::fill(dst, dst + score_width, V{0});
        const RowSums<V> row{widened(a.dst + piece.row * score_width, score_width, row_buffer), dst,
                             vector};
        add_joint(a, portion, piece, w.slope, row, result.edge);
      }
    }
  }
}

template <typename Kind, typename T>
void destinations(const Attention<T>& a, const EdgeGroups& in_edges,
                  const AttentionGradient<T>& gradient, const DestinationGradients<T>& result,
                  int num_threads) {
  using V = wide_t<T>;
  const int64_t score_width = a.heads * a.score_dim;
  const Schedule schedule = fixed_schedule(in_edges, score_width);
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const auto slices = std::make_unique_for_overwrite<V[]>(schedule.num_slices * score_width);
  const auto vectors = std::make_unique<V[]>(a.vector == nullptr ? 0 : num_spans * score_width);
  run_tasks(num_spans, num_threads, [&](int64_t at) {
    const Span& span = schedule.spans[at];
    destination_span<Kind>(a, in_edges, gradient, result, span,
                           vectors.get() + (a.vector == nullptr ? 0 : at * score_width),
                           slices.get() + std::max<int64_t>(span.slice, 0) * score_width);
  });
  if (result.dst != nullptr) {
    for (const Hub& hub : schedule.hubs) {
      V* to = result.dst + hub.row * score_width;
      for (int64_t slice = hub.first_slice; slice < hub.last_slice; ++slice) {
        for (int64_t j = 0; j < score_width; ++j) to[j] += slices[slice * score_width + j];
      }
    }
  }
  if (result.vector != nullptr) {
    for (int64_t at = 0; at < num_spans; ++at) {
      for (int64_t j = 0; j < score_width; ++j) {
        result.vector[j] += vectors[at * score_width + j];
      }
    }
  }
}

}  // namespace

template <typename T>
void attention_destinations(const Attention<T>& attention, const EdgeGroups& in_edges,
                            const AttentionGradient<T>& gradient,
                            const DestinationGradients<T>& result, int num_threads) {
  if (attention.score == Score::kJoint) {
    destinations<JointScore>(attention, in_edges, gradient, result, num_threads);
  } else {
    destinations<DotScore>(attention, in_edges, gradient, result, num_threads);
  }
}

#define INSTANTIATE(T)                                                         \
  template void attention_destinations(const Attention<T>&, const EdgeGroups&, \
                                       const AttentionGradient<T>&,            \
                                       const DestinationGradients<T>&, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
