// SPDX-License-Identifier: Apache-2.0

#include <limits>
#include <memory>

#include "attention/attention.h"
#include "attention/chunk.h"
#include "attention/entries.h"

namespace graphshard {
namespace {

// out = sum / total; `sum` may be `out` itself.
template <typename T>
void divide(const wide_t<T>* sum, const wide_t<T>* total, int64_t heads, int64_t dim, T* out) {
  for (int64_t h = 0; h < heads; ++h) {
    const wide_t<T> scale = scale_of(total[h]);
    for (int64_t j = h * dim; j < (h + 1) * dim; ++j) narrow(sum[j] * scale, out[j]);
  }
}

// Where the states of rows are. If everything ends here, sums are in `buffer`, one row wide, until
// their row's end, or in `out` if it is as wide as they are.
template <typename T>
RowStates<wide_t<T>> states_of(const Attention<T>& a, const AttentionState<T>& s,
                               wide_t<T>* buffer) {
  RowStates<wide_t<T>> states{s.peak, s.peak_step, s.total, s.total_step, s.sum, s.sum_step};
  if (s.out == nullptr) return states;
  states.sum = buffer;
  states.sum_step = 0;
  if constexpr (std::is_same_v<T, wide_t<T>>) {
    states.sum = s.out;
    states.sum_step = a.width();
  }
  return states;
}

// `slice` is the state of a slice.
template <typename T>
void forward_span(const Attention<T>& a, const Csr& in_edges, const AttentionState<T>& s,
                  const Span& span, const RowStates<wide_t<T>>& slice) {
  using V = wide_t<T>;
  Workspace<V> memory(Workspace<V>::size_of(a.width()) + Workspace<V>::size_of(a.score_width()) +
                      Workspace<V>::size_of(a.heads));
  V* scales = memory.take(a.heads);
  V* row_buffer = memory.take(a.score_width());
  const bool is_slice = span.slice >= 0;
  const bool begins = is_slice || s.begin;
  const bool values_are_new = a.score == Score::kAdditive || a.values != a.src;
  const RowStates<V> states = is_slice ? slice : states_of(a, s, memory.take(a.width()));
  const ForwardEntries<V> entries(a.heads);
  Chunk chunk = chunk_of(a, in_edges, span, true);
  while (chunk.next()) {
    if (a.score == Score::kAdditive) {
      additive_scores<V>(a, chunk, {a.dst_terms, a.heads}, {a.src_terms, a.heads}, entries.scores);
    } else {
      for (int p = 0; p < chunk.num_pieces; ++p) {
        score_rows(a, chunk, chunk.pieces[p], a.dst, a.src, row_buffer, entries.scores);
      }
      if (a.score == Score::kDot) scale_scores<V>(a, chunk, entries.scores);
    }
    weigh_forward<V>(a, chunk, states, begins, entries);
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      V* sum = states.sum + piece.row * states.sum_step;
      RowSum<T> to{sum, begins && piece.begins, nullptr, nullptr};
      if (piece.ends && !is_slice && s.out != nullptr) {
        const V* total = states.total + piece.row * states.total_step;
        for (int64_t h = 0; h < a.heads; ++h) scales[h] = scale_of(total[h]);
        to.out = s.out + piece.row * a.width();
        to.scale = scales;
      }
      add_rows(chunk.rows(piece, a.values, a.dim, values_are_new), entries.scores, to);
    }
  }
}

// The state of slice number `slice`, of arrays of them.
template <typename V>
RowStates<V> state_of_slice(const RowStates<V>& slices, int64_t slice, int64_t heads,
                            int64_t width) {
  return {slices.peak + slice * heads, 0, slices.total + slice * heads, 0,
          slices.sum + slice * width,  0};
}

// Joins the slices of a destination, in order.
template <typename T>
void join_slices(const Attention<T>& a, const AttentionState<T>& s, const LongRow& row,
                 const RowStates<wide_t<T>>& slices, wide_t<T>* buffer) {
  using V = wide_t<T>;
  const RowStates<V> states = states_of(a, s, buffer);
  V* peak = states.peak + row.row * states.peak_step;
  V* total = states.total + row.row * states.total_step;
  V* sum = states.sum + row.row * states.sum_step;
  if (s.begin) {
    for (int64_t h = 0; h < a.heads; ++h) {
      peak[h] = -std::numeric_limits<V>::infinity();
      total[h] = 0;
    }
    for (int64_t j = 0; j < a.width(); ++j) sum[j] = 0;
  }
  for (int64_t slice = row.first_slice; slice < row.last_slice; ++slice) {
    const RowStates<V> other = state_of_slice(slices, slice, a.heads, a.width());
    for (int64_t h = 0; h < a.heads; ++h) {
      if (other.total[h] == 0) continue;
      V* to = sum + h * a.dim;
      raise_peak(other.peak[h], a.dim, peak[h], total[h], to);
      const V scale = exp_difference(other.peak[h], peak[h]);
      total[h] += scale * other.total[h];
      for (int64_t j = 0; j < a.dim; ++j) to[j] += scale * other.sum[h * a.dim + j];
    }
  }
  if (s.out != nullptr) divide(sum, total, a.heads, a.dim, s.out + row.row * a.width());
}

}  // namespace

template <typename T>
void attention_forward(const Attention<T>& a, const Csr& in_edges, const AttentionState<T>& s,
                       int num_threads) {
  using V = wide_t<T>;
  const Schedule schedule = fixed_schedule(in_edges, a.width());
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const int64_t num_slices = schedule.num_slices;
  const auto partial = std::make_unique_for_overwrite<V[]>(num_slices * (a.width() + 2 * a.heads));
  V* peaks = partial.get();
  V* totals = peaks + num_slices * a.heads;
  const RowStates<V> slices{peaks, 0, totals, 0, totals + num_slices * a.heads, 0};
  run_tasks(num_spans, num_threads, [&](int64_t task) {
    const Span& span = schedule.spans[task];
    const int64_t slice = std::max<int64_t>(span.slice, 0);
    forward_span(a, in_edges, s, span, state_of_slice(slices, slice, a.heads, a.width()));
  });
  run_tasks(static_cast<int64_t>(schedule.long_rows.size()), num_threads, [&](int64_t i) {
    const auto buffer = std::make_unique_for_overwrite<V[]>(a.width());
    join_slices(a, s, schedule.long_rows[i], slices, buffer.get());
  });
}

#define INSTANTIATE(T) \
  template void attention_forward(const Attention<T>&, const Csr&, const AttentionState<T>&, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
