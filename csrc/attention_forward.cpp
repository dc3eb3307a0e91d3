// SPDX-License-Identifier: Apache-2.0

#include <limits>
#include <memory>

#include "attention.h"
#include "attention_walk.h"

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
  V* peak;  // of each entry
  V* folded;
  uint32_t* words;
};

// Takes the edges [begin, end) of a destination into its state.
template <typename Kind, typename T>
GRAPHSHARD_INLINE void take_edges(const Attention<T>& a, const Varying<T>& varying,
                                  const wide_t<T>* fixed, int64_t begin, int64_t end,
                                  Portion<T>& portion, const Scratch<wide_t<T>>& scratch,
                                  const RowState<wide_t<T>>& state) {
  using V = wide_t<T>;
  constexpr V kNone = -std::numeric_limits<V>::infinity();
  const int64_t first = portion.heads.first;
  const int64_t heads = portion.heads.count();
  V* scores = scratch.scores;
  for (; begin < end; begin += kPortion) {
    portion.load(a, begin, end);
    Kind::scores(a, fixed, varying, portion, scores);
    for (int i = portion.entries; i < portion.padded; ++i) scores[i] = kNone;
    if constexpr (Kind::kScore == Score::kAdditive) {
      for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
        scores[i] = leaky_relu(scores[i], a.slope);
      });
    }
    fold_entries(portion, scores, kNone, scratch.folded,
                 [](V x, V y) GRAPHSHARD_INLINE_LAMBDA { return y > x ? y : x; });
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = first + h;
      raise_peak(scratch.folded[h], a.dim, state.peak[at], state.total[at], state.sum + at * a.dim);
      // Of edges that are all ruled out by infinite terms there is no peak to compare with.
      scratch.folded[h] = state.peak[at] == kNone ? 0 : state.peak[at];
    }
    repeat(portion, scratch.folded, scratch.peak);
    for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
      scores[i] = exp_nonpositive(scores[i] - scratch.peak[i]);
    });
    fold_entries(portion, scores, V{0}, scratch.folded, add<V>);
    for (int64_t h = 0; h < heads; ++h) state.total[first + h] += scratch.folded[h];
    if (a.mask.threshold != 0) {
      load_mask(a, portion, scratch.words, scratch.multiplier);
      for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
        scores[i] *= scratch.multiplier[i];
      });
    }
    if (a.factor != nullptr) multiply_by_factor(a, portion, scores);
    const bool values_are_new = !Kind::kReadsRows || a.values != a.src;
    add_rows(portion.rows(a.values, a.heads, a.dim, values_are_new), scores,
             state.sum + first * a.dim);
  }
}

template <typename V>
GRAPHSHARD_INLINE void begin_state(const RowState<V>& state, Heads heads, int64_t dim) {
  for (int64_t h = heads.first; h < heads.last; ++h) {
    state.peak[h] = -std::numeric_limits<V>::infinity();
    state.total[h] = 0;
  }
  for (int64_t j = heads.first * dim; j < heads.last * dim; ++j) state.sum[j] = 0;
}

// out = sum / total; `sum` may be `out` itself.
template <typename T>
GRAPHSHARD_INLINE void divide(const RowState<wide_t<T>>& state, Heads heads, int64_t dim, T* out) {
  for (int64_t h = heads.first; h < heads.last; ++h) {
    const wide_t<T> total = state.total[h];
    const wide_t<T> scale = total == 0 ? 0 : 1 / total;
    for (int64_t j = h * dim; j < (h + 1) * dim; ++j) narrow(state.sum[j] * scale, out[j]);
  }
}

template <typename T>
GRAPHSHARD_INLINE RowState<wide_t<T>> state_of(const Attention<T>& a, const AttentionState<T>& s,
                                               int64_t row, wide_t<T>* buffer) {
  const int64_t width = a.heads * a.dim;
  wide_t<T>* sum = s.sum + row * width;
  if (s.out != nullptr) {
    sum = buffer;
    if constexpr (std::is_same_v<T, wide_t<T>>) sum = s.out + row * width;
  }
  return {s.peak + row * a.heads, s.total + row * a.heads, sum};
}

// What scores need of the destination: its terms or its row.
template <typename Kind, typename T>
GRAPHSHARD_INLINE const wide_t<T>* fixed_of(const Attention<T>& a, int64_t row, wide_t<T>* buffer) {
  if constexpr (!Kind::kReadsRows) {
    return a.dst_terms + row * a.heads;
  } else {
    const int64_t width = a.heads * a.score_dim;
    return widened(a.dst + row * width, width, buffer);
  }
}

// `slice` is the state of a slice.
template <typename Kind, typename T>
GRAPHSHARD_HOT_CLONES void forward_span(const Attention<T>& a, const EdgeGroups& in_edges,
                                        const AttentionState<T>& s, const Span& span, Heads heads,
                                        const RowState<wide_t<T>>& slice) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.dim;
  const int64_t score_width = a.heads * a.score_dim;
  const int64_t entries = kPortion * heads.count();
  Workspace<V> memory(3 * Workspace<V>::size_of(entries) + Workspace<V>::size_of(heads.count()) +
                      Workspace<V>::size_of(width) + Workspace<V>::size_of(score_width));
  const auto words = std::make_unique_for_overwrite<uint32_t[]>(entries + heads.count());
  const Scratch<V> scratch{memory.take(entries), memory.take(entries), memory.take(entries),
                           memory.take(heads.count()), words.get()};
  V* buffer = memory.take(width);
  V* row_buffer = memory.take(score_width);
  const Varying<T> varying{a.src, a.src_terms, a.heads};
  Portion<T> portion(a, in_edges, heads, heads.count() * a.dim * sizeof(T));
  if (span.slice >= 0) {
    begin_state(slice, heads, a.dim);
    take_edges<Kind>(a, varying, fixed_of<Kind>(a, span.first_row, row_buffer), span.begin,
                     span.end, portion, scratch, slice);
    return;
  }
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = in_edges.begin(row);
    const int64_t end = in_edges.begin(row + 1);
    if (end - begin > kSliceEdges) continue;
    const RowState<V> state = state_of(a, s, row, buffer);
    if (s.begin) begin_state(state, heads, a.dim);
    if (begin < end) {
      take_edges<Kind>(a, varying, fixed_of<Kind>(a, row, row_buffer), begin, end, portion, scratch,
                       state);
    }
    if (s.out != nullptr) divide(state, heads, a.dim, s.out + row * width);
  }
}

// Joins the slices of a destination, in order.
template <typename T>
void join_slices(const Attention<T>& a, const AttentionState<T>& s, const Hub& hub,
                 const RowState<wide_t<T>>& slices, wide_t<T>* buffer) {
  using V = wide_t<T>;
  const Heads heads{0, a.heads};
  const RowState<V> state = state_of(a, s, hub.row, buffer);
  if (s.begin) begin_state(state, heads, a.dim);
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
  if (s.out != nullptr) divide(state, heads, a.dim, s.out + hub.row * a.heads * a.dim);
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
  const int64_t columns = Kind::kReadsRows ? std::max(a.dim, a.score_dim) : a.dim;
  const int64_t step = heads_per_block(a.num_src, in_edges.num_edges, a.heads, columns * sizeof(T));
  const int64_t num_blocks = (a.heads + step - 1) / step;
  run_tasks(num_blocks * num_spans, num_threads, [&](int64_t task) {
    const int64_t first = task / num_spans * step;
    const Heads heads{first, std::min(first + step, a.heads)};
    const Span& span = schedule.spans[task % num_spans];
    const int64_t slice = std::max<int64_t>(span.slice, 0);
    forward_span<Kind>(a, in_edges, s, span, heads,
                       {slices.peak + slice * a.heads, slices.total + slice * a.heads,
                        slices.sum + slice * width});
  });
  run_tasks(static_cast<int64_t>(schedule.hubs.size()), num_threads, [&](int64_t hub) {
    const auto buffer = std::make_unique_for_overwrite<V[]>(width);
    join_slices(a, s, schedule.hubs[hub], slices, buffer.get());
  });
}

template <typename T>
GRAPHSHARD_CLONES void delta_rows(const T* grad, const T* out, int64_t begin, int64_t end,
                                  int64_t dim, wide_t<T>* delta) {
  for (int64_t row = begin; row < end; ++row) {
    wide_t<T> total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = row * dim; j < (row + 1) * dim; ++j) total += widen(grad[j]) * widen(out[j]);
    delta[row] = total;
  }
}

}  // namespace

template <typename T>
void attention_forward(const Attention<T>& attention, const EdgeGroups& in_edges,
                       const AttentionState<T>& state, int num_threads) {
  with_score(attention.score,
             [&](auto kind) { forward<decltype(kind)>(attention, in_edges, state, num_threads); });
}

template <typename T>
void attention_delta(const T* grad, const T* out, int64_t num_rows, int64_t dim, wide_t<T>* delta,
                     int num_threads) {
  const int64_t parts = num_parts(num_rows, 65536 / std::max<int64_t>(dim, 1), num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    delta_rows(grad, out, part_begin(num_rows, part, parts), part_begin(num_rows, part + 1, parts),
               dim, delta);
  });
}

#define INSTANTIATE(T)                                                    \
  template void attention_forward(const Attention<T>&, const EdgeGroups&, \
                                  const AttentionState<T>&, int);         \
  template void attention_delta(const T*, const T*, int64_t, int64_t, wide_t<T>*, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
