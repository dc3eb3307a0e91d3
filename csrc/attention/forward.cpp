// SPDX-License-Identifier: Apache-2.0

#include <limits>
#include <memory>

#include "attention/attention.h"
#include "attention/walk.h"

namespace graphshard {
namespace {

// The state of one destination.
template <typename V>
struct RowState {
  V* peak;
  V* total;
  V* sum;
};

// peak = max(peak, highest), with what was summed up scaled accordingly.
template <typename V>
GRAPHSHARD_INLINE void raise_peak(V highest, int64_t dim, V& peak, V& total, V* sum) {
  if (!(highest > peak)) return;
  const V before = peak;
  peak = highest;
  if (before == -std::numeric_limits<V>::infinity()) return;  // nothing was summed up
  const V scale = exp_nonpositive(before - highest);
  total *= scale;
  for (int64_t j = 0; j < dim; ++j) sum[j] *= scale;
}

// What a task computes in: entries of a portion, and numbers per head.
template <typename V>
struct Scratch {
  V* scores;
  V* multiplier;
  V* peak;    // of each entry
  V* folded;  // a number per head
  V* row;     // a destination's row in the type of sums
  uint32_t* words;
};

template <typename V>
GRAPHSHARD_INLINE void begin_state(const RowState<V>& state, int64_t heads) {
  for (int64_t h = 0; h < heads; ++h) {
    state.peak[h] = -std::numeric_limits<V>::infinity();
    state.total[h] = 0;
  }
}

// Raises the peaks of a piece's destination to the piece's scores, and leaves them with each entry.
template <typename T, typename V>
GRAPHSHARD_INLINE void raise_peaks(const Attention<T>& a, const Piece& piece,
                                   const Scratch<V>& scratch, const RowState<V>& state) {
  constexpr V kNone = -std::numeric_limits<V>::infinity();
  V* folded = scratch.folded;
  for (int64_t h = 0; h < a.heads; ++h) folded[h] = kNone;
  fold_entries(a.heads, piece, scratch.scores, folded,
               [](V x, V y) GRAPHSHARD_INLINE_LAMBDA { return y > x ? y : x; });
  for (int64_t h = 0; h < a.heads; ++h) {
    raise_peak(folded[h], a.dim, state.peak[h], state.total[h], state.sum + h * a.dim);
    // Of edges that are all ruled out by infinite terms there is no peak to compare with.
    folded[h] = state.peak[h] == kNone ? 0 : state.peak[h];
  }
  repeat(a.heads, piece, folded, scratch.peak);
}

// scores[entry] = exp(score - peak), times its multiplier; raises peaks and totals of the portion's
// destinations. state_of_row(row) finds their states.
template <typename Kind, typename T, typename States>
GRAPHSHARD_INLINE void weigh_edges(const Attention<T>& a, const Portion<T>& portion, bool begin,
                                   const Scratch<wide_t<T>>& scratch, const States& state_of_row) {
  using V = wide_t<T>;
  const Varying<T> varying{a.src, a.src_terms, a.heads};
  V* scores = scratch.scores;
  for (int p = 0; p < portion.num_pieces; ++p) {
    const Piece& piece = portion.pieces[p];
    Kind::scores(a, Kind::fixed(a, a.dst, a.dst_terms, piece.row, scratch.row), varying, portion,
                 piece, scores);
  }
  for (int i = portion.entries; i < portion.padded; ++i) scores[i] = scratch.peak[i] = 0;
  if constexpr (Kind::kScore == Score::kAdditive) {
    for_lanes(portion,
              [&](int i) GRAPHSHARD_INLINE_LAMBDA { scores[i] = leaky_relu(scores[i], a.slope); });
  }
  for (int p = 0; p < portion.num_pieces; ++p) {
    const Piece& piece = portion.pieces[p];
    const RowState<V> state = state_of_row(piece.row);
    if (begin && piece.begins) begin_state(state, a.heads);
    raise_peaks(a, piece, scratch, state);
  }
  for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    scores[i] = exp_nonpositive(scores[i] - scratch.peak[i]);
  });
  for (int p = 0; p < portion.num_pieces; ++p) {
    const Piece& piece = portion.pieces[p];
    fold_entries(a.heads, piece, scores, state_of_row(piece.row).total, add<V>);
  }
  if (a.mask.threshold != 0) {
    load_mask(a, portion, scratch.words, scratch.multiplier);
    for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA { scores[i] *= scratch.multiplier[i]; });
  }
  if (a.factor != nullptr) multiply_by_factor(a, portion, scores);
}

// What sums of weighted values are multiplied by in the end; without any weight they stay zero.
template <typename V>
GRAPHSHARD_INLINE V scale_of(V total) {
  return total == 0 ? 0 : 1 / total;
}

// out = sum / total; `sum` may be `out` itself.
template <typename T>
GRAPHSHARD_INLINE void divide(const RowState<wide_t<T>>& state, int64_t heads, int64_t dim,
                              T* out) {
  for (int64_t h = 0; h < heads; ++h) {
    const wide_t<T> scale = scale_of(state.total[h]);
    for (int64_t j = h * dim; j < (h + 1) * dim; ++j) narrow(state.sum[j] * scale, out[j]);
  }
}

template <typename T>
GRAPHSHARD_INLINE RowState<wide_t<T>> state_of(const Attention<T>& a, const AttentionState<T>& s,
                                               int64_t row, wide_t<T>* buffer) {
  wide_t<T>* sum = s.sum + row * s.sum_step;
  if (s.out != nullptr) {
    sum = buffer;
    if constexpr (std::is_same_v<T, wide_t<T>>) sum = s.out + row * a.heads * a.dim;
  }
  return {s.peak + row * s.peak_step, s.total + row * s.total_step, sum};
}

// `slice` is the state of a slice.
template <typename Kind, typename T>
GRAPHSHARD_CLONES void forward_span(const Attention<T>& a, const EdgeGroups& in_edges,
                                    const AttentionState<T>& s, const Span& span,
                                    const RowState<wide_t<T>>& slice) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.dim;
  const int64_t score_width = a.heads * a.score_dim;
  const int64_t entries = kPortion * a.heads;
  Workspace<V> memory(3 * Workspace<V>::size_of(entries) + Workspace<V>::size_of(a.heads) +
                      Workspace<V>::size_of(width) + Workspace<V>::size_of(score_width));
  const auto words = std::make_unique_for_overwrite<uint32_t[]>(entries + a.heads);
  const Scratch<V> scratch{memory.take(entries), memory.take(entries),     memory.take(entries),
                           memory.take(a.heads), memory.take(score_width), words.get()};
  V* buffer = memory.take(width);
  const bool is_slice = span.slice >= 0;
  const bool begin = is_slice || s.begin;
  const bool values_are_new = !Kind::kReadsRows || a.values != a.src;
  const auto state_of_row = [&](int64_t row) GRAPHSHARD_INLINE_LAMBDA {
    return is_slice ? slice : state_of(a, s, row, buffer);
  };
  Portion<T> portion(a, in_edges, span, true);
  while (portion.next()) {
    weigh_edges<Kind>(a, portion, begin, scratch, state_of_row);
    for (int p = 0; p < portion.num_pieces; ++p) {
      const Piece& piece = portion.pieces[p];
      const RowState<V> state = state_of_row(piece.row);
      RowSum<T> to{state.sum, begin && piece.begins, nullptr, nullptr};
      if (piece.ends && !is_slice && s.out != nullptr) {
        for (int64_t h = 0; h < a.heads; ++h) scratch.folded[h] = scale_of(state.total[h]);
        to.out = s.out + piece.row * width;
        to.scale = scratch.folded;
      }
      add_rows(portion.rows(piece, a.values, a.dim, values_are_new), scratch.scores, to);
    }
  }
}

// Joins the slices of a destination, in order.
template <typename T>
void join_slices(const Attention<T>& a, const AttentionState<T>& s, const Hub& hub,
                 const RowState<wide_t<T>>& slices, wide_t<T>* buffer) {
  using V = wide_t<T>;
  const RowState<V> state = state_of(a, s, hub.row, buffer);
  if (s.begin) {
    begin_state(state, a.heads);
    for (int64_t j = 0; j < a.heads * a.dim; ++j) state.sum[j] = 0;
  }
  for (int64_t slice = hub.first_slice; slice < hub.last_slice; ++slice) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t at = slice * a.heads + h;
      if (slices.total[at] == 0) continue;
      V* sum = state.sum + h * a.dim;
      raise_peak(slices.peak[at], a.dim, state.peak[h], state.total[h], sum);
      const V scale = exp_nonpositive(slices.peak[at] - state.peak[h]);
      state.total[h] += scale * slices.total[at];
      for (int64_t j = 0; j < a.dim; ++j) sum[j] += scale * slices.sum[at * a.dim + j];
    }
  }
  if (s.out != nullptr) divide(state, a.heads, a.dim, s.out + hub.row * a.heads * a.dim);
}

template <typename Kind, typename T>
void forward(const Attention<T>& a, const EdgeGroups& in_edges, const AttentionState<T>& s,
             int num_threads) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.dim;
  const Schedule schedule = fixed_schedule(in_edges, width);
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const auto partial =
      std::make_unique_for_overwrite<V[]>(schedule.num_slices * (width + 2 * a.heads));
  const RowState<V> slices{partial.get(), partial.get() + schedule.num_slices * a.heads,
                           partial.get() + 2 * schedule.num_slices * a.heads};
  run_tasks(num_spans, num_threads, [&](int64_t task) {
    const Span& span = schedule.spans[task];
    const int64_t slice = std::max<int64_t>(span.slice, 0);
    forward_span<Kind>(a, in_edges, s, span,
                       {slices.peak + slice * a.heads, slices.total + slice * a.heads,
                        slices.sum + slice * width});
  });
  run_tasks(static_cast<int64_t>(schedule.hubs.size()), num_threads, [&](int64_t hub) {
    const auto buffer = std::make_unique_for_overwrite<V[]>(width);
    join_slices(a, s, schedule.hubs[hub], slices, buffer.get());
  });
}

}  // namespace

template <typename T>
void attention_forward(const Attention<T>& attention, const EdgeGroups& in_edges,
                       const AttentionState<T>& state, int num_threads) {
  with_score(attention.score,
             [&](auto kind) { forward<decltype(kind)>(attention, in_edges, state, num_threads); });
}

#define INSTANTIATE(T)                                                    \
  template void attention_forward(const Attention<T>&, const EdgeGroups&, \
                                  const AttentionState<T>&, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
