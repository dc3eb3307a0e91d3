// SPDX-License-Identifier: Apache-2.0
// Gradients that belong to destinations, to edges, and to the vector of joint scores: each
// destination walks its in-edges, see [Note: backward] in attention.h.

#include <memory>

#include "attention/attention.h"
#include "attention/chunk.h"
#include "attention/entries.h"

namespace graphshard {
namespace {

template <typename T>
void destination_span(const Attention<T>& a, const Csr& in_edges,
                      const AttentionGradient<T>& gradient, const DestinationGradients<T>& result,
                      const Span& span, wide_t<T>* vector, wide_t<T>* slice) {
  using V = wide_t<T>;
  const int64_t score_width = a.score_width();
  // A destination's row in the type of sums, and the gradient of it.
  Workspace<V> memory(2 * Workspace<V>::size_of(score_width));
  V* row_buffer = memory.take(score_width);
  V* own = memory.take(score_width);
  const BackwardEntries<V> entries(a.heads, a.multiplies());
  const Statistics<V> statistics{nullptr, gradient.peak, gradient.total, gradient.delta};
  Chunk chunk = chunk_of(a, in_edges, span, true);
  while (chunk.next()) {
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      if (piece.first == piece.last) continue;
      // One after the other: the rows of joint scores are the values, and in the cache.
      score_rows(a, chunk, piece, a.dst, a.src, row_buffer, entries.z);
      dot_rows(chunk.rows(piece, a.values, a.dim, a.values != a.src),
               gradient.grad + piece.row * gradient.grad_step, entries.g);
    }
    if (a.score == Score::kDot) scale_scores<V>(a, chunk, entries.z);
    weigh_backward<V>(a, chunk, statistics, entries);
    find_slopes<V>(a, chunk, entries, result.edge_terms, result.factor);
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      if (piece.first == piece.last) continue;
      V* dst = own;
      if (span.slice >= 0) {
        dst = slice;
      } else if (result.dst != nullptr) {
        dst = result.dst + piece.row * score_width;
      }
      const bool begins = piece.begins && (dst == slice || dst == own);  // else it is added to
      const RunRows<T> rows = chunk.rows(piece, a.src, a.score_dim, false);
      if (a.score == Score::kDot) {
        add_rows(rows, entries.slope, RowSum<T>{dst, begins, nullptr, nullptr});
      } else {
        if (begins) std::fill(dst, dst + score_width, V{0});
        add_joint_dst(rows, {a.edge, &chunk.edges},
                      widened(a.dst + piece.row * score_width, score_width, row_buffer), a.vector,
                      a.slope, entries.slope, dst, vector, result.edge);
      }
    }
  }
}

}  // namespace

template <typename T>
void attention_destinations(const Attention<T>& a, const Csr& in_edges,
                            const AttentionGradient<T>& gradient,
                            const DestinationGradients<T>& result, int num_threads) {
  using V = wide_t<T>;
  const int64_t score_width = a.score_width();
  const Schedule schedule = fixed_schedule(in_edges, score_width);
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const auto slices = std::make_unique_for_overwrite<V[]>(schedule.num_slices * score_width);
  const auto vectors = std::make_unique<V[]>(a.vector == nullptr ? 0 : num_spans * score_width);
  run_tasks(num_spans, num_threads, [&](int64_t at) {
    const Span& span = schedule.spans[at];
    destination_span(a, in_edges, gradient, result, span,
                     vectors.get() + (a.vector == nullptr ? 0 : at * score_width),
                     slices.get() + std::max<int64_t>(span.slice, 0) * score_width);
  });
  if (result.dst != nullptr) {
    for (const LongRow& row : schedule.long_rows) {
      V* to = result.dst + row.row * score_width;
      for (int64_t slice = row.first_slice; slice < row.last_slice; ++slice) {
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

#define INSTANTIATE(T)                                                  \
  template void attention_destinations(const Attention<T>&, const Csr&, \
                                       const AttentionGradient<T>&,     \
                                       const DestinationGradients<T>&, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
