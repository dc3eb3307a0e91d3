// SPDX-License-Identifier: Apache-2.0

#include "edge/edge_softmax.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "runtime/parallel.h"
#include "simd/dispatch.h"
#include "simd/exp.h"

namespace graphshard {
namespace {

// The steps below work on edge positions [begin, end) and `width` columns. `shifted` holds one row
// per position, contiguous, in the order of positions. What a later step will write is requested
// along with what the first one reads, unless positions are ids: then memory is read and written
// from one end to the other.
//
// [Note: one column] Edges that lie side by side, each with one number, are taken several at a
// time, as lanes. Their sums are added in another order than one edge after the other, but always
// in the same: it depends on the number of edges alone.

GRAPHSHARD_INLINE bool one_column(const Csr& in_edges, int64_t width) {
  return width == 1 && !in_edges.eids;
}

template <typename T>
GRAPHSHARD_INLINE void load(const Csr& in_edges, const T* logits, int64_t begin, int64_t end,
                            int64_t width, const T* out, wide_t<T>* __restrict shifted,
                            wide_t<T>* __restrict highest) {
  using V = wide_t<T>;
  if (one_column(in_edges, width)) {
    const T* from = logits + begin;
    V best = -std::numeric_limits<V>::infinity();
#pragma omp simd reduction(max : best)
    for (int64_t i = 0; i < end - begin; ++i) {
      shifted[i] = widen(from[i]);
      best = shifted[i] > best ? shifted[i] : best;
    }
    highest[0] = best;
    return;
  }
  for (int64_t h = 0; h < width; ++h) highest[h] = -std::numeric_limits<V>::infinity();
  for (int64_t k = begin; k < end; ++k) {
    const int64_t ahead = k + kPrefetchAhead;
    if (in_edges.eids && ahead < in_edges.num_edges) {
      GRAPHSHARD_PREFETCH(logits + in_edges.edge_id(ahead) * width);
      GRAPHSHARD_PREFETCH_WRITE(out + in_edges.edge_id(ahead) * width);
    }
    const T* from = logits + in_edges.edge_id(k) * width;
    wide_t<T>* to = shifted + (k - begin) * width;
    for (int64_t h = 0; h < width; ++h) {
      const wide_t<T> value = widen(from[h]);
      to[h] = value;
      highest[h] = value > highest[h] ? value : highest[h];
    }
  }
}

template <typename V>
GRAPHSHARD_INLINE void exponentiate(int64_t count, int64_t width, const V* __restrict highest,
                                    V* __restrict shifted, V* __restrict total) {
  if (width == 1) {
    const V best = highest[0];
    V sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
      shifted[i] = exp_nonpositive(shifted[i] - best);
      sum += shifted[i];
    }
    total[0] = sum;
    return;
  }
  for (int64_t h = 0; h < width; ++h) total[h] = 0;
  for (int64_t k = 0; k < count; ++k) {
    V* row = shifted + k * width;
    for (int64_t h = 0; h < width; ++h) row[h] -= highest[h];
  }
#pragma omp simd
  for (int64_t j = 0; j < count * width; ++j) shifted[j] = exp_nonpositive(shifted[j]);
  for (int64_t k = 0; k < count; ++k) {
    const V* row = shifted + k * width;
    for (int64_t h = 0; h < width; ++h) total[h] += row[h];
  }
}

template <typename T>
GRAPHSHARD_INLINE void store(const Csr& in_edges, int64_t begin, int64_t end, int64_t width,
                             const wide_t<T>* __restrict shifted, const wide_t<T>* __restrict total,
                             T* __restrict out) {
  if (one_column(in_edges, width)) {
    const wide_t<T> sum = total[0];
    T* to = out + begin;
    for (int64_t i = 0; i < end - begin; ++i) narrow(shifted[i] / sum, to[i]);
    return;
  }
  for (int64_t k = begin; k < end; ++k) {
    const wide_t<T>* from = shifted + (k - begin) * width;
    T* to = out + in_edges.edge_id(k) * width;
    for (int64_t h = 0; h < width; ++h) narrow(from[h] / total[h], to[h]);
  }
}

template <typename T>
GRAPHSHARD_INLINE void dot(const Csr& in_edges, const T* out, const T* grad, int64_t begin,
                           int64_t end, int64_t width, const T* result,
                           wide_t<T>* __restrict total) {
  if (one_column(in_edges, width)) {
    wide_t<T> sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = begin; k < end; ++k) sum += widen(out[k]) * widen(grad[k]);
    total[0] = sum;
    return;
  }
  for (int64_t h = 0; h < width; ++h) total[h] = 0;
  for (int64_t k = begin; k < end; ++k) {
    const int64_t ahead = k + kPrefetchAhead;
    if (in_edges.eids && ahead < in_edges.num_edges) {
      GRAPHSHARD_PREFETCH(out + in_edges.edge_id(ahead) * width);
      GRAPHSHARD_PREFETCH(grad + in_edges.edge_id(ahead) * width);
      GRAPHSHARD_PREFETCH_WRITE(result + in_edges.edge_id(ahead) * width);
    }
    const int64_t at = in_edges.edge_id(k) * width;
    for (int64_t h = 0; h < width; ++h) total[h] += widen(out[at + h]) * widen(grad[at + h]);
  }
}

template <typename T>
GRAPHSHARD_INLINE void subtract(const Csr& in_edges, const T* out, const T* grad, int64_t begin,
                                int64_t end, int64_t width, const wide_t<T>* total,
                                T* __restrict result) {
  if (one_column(in_edges, width)) {
    const wide_t<T> sum = total[0];
    for (int64_t k = begin; k < end; ++k) narrow(widen(out[k]) * (widen(grad[k]) - sum), result[k]);
    return;
  }
  for (int64_t k = begin; k < end; ++k) {
    const int64_t at = in_edges.edge_id(k) * width;
    for (int64_t h = 0; h < width; ++h) {
      narrow(widen(out[at + h]) * (widen(grad[at + h]) - total[h]), result[at + h]);
    }
  }
}

// Calls function(width) with what the compiler knows of it: a frequent width, or 0 for any.
template <typename T, typename Function>
GRAPHSHARD_INLINE void with_width(int64_t width, const Function& function) {
  if constexpr (!std::is_same_v<T, double>) {
    if (width == 1) return function(std::integral_constant<int, 1>{});
    if (width == 4) return function(std::integral_constant<int, 4>{});
    if (width == 8) return function(std::integral_constant<int, 8>{});
  }
  function(std::integral_constant<int, 0>{});
}

template <int kWidth, typename T>
GRAPHSHARD_INLINE void softmax_rows(const Csr& in_edges, const T* logits, int64_t any_width,
                                    const Span& span, wide_t<T>* shifted, wide_t<T>* highest,
                                    wide_t<T>* total, T* out) {
  const int64_t width = kWidth > 0 ? kWidth : any_width;
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = in_edges.begin(row);
    const int64_t end = in_edges.end(row);
    if (end - begin > kSliceEdges) continue;
    load(in_edges, logits, begin, end, width, out, shifted, highest);
    exponentiate(end - begin, width, highest, shifted, total);
    store(in_edges, begin, end, width, shifted, total, out);
  }
}

template <int kWidth, typename T>
GRAPHSHARD_INLINE void backward_rows(const Csr& in_edges, const T* out, const T* grad,
                                     int64_t any_width, const Span& span, wide_t<T>* total,
                                     T* result) {
  const int64_t width = kWidth > 0 ? kWidth : any_width;
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = in_edges.begin(row);
    const int64_t end = in_edges.end(row);
    if (end - begin > kSliceEdges) continue;
    dot(in_edges, out, grad, begin, end, width, result, total);
    subtract(in_edges, out, grad, begin, end, width, total, result);
  }
}

template <typename T>
inline constexpr int kWidest = std::min(32, kWidestRegister<T>);

template <typename V>
std::unique_ptr<V[]> scratch(int64_t size) {
  return std::make_unique_for_overwrite<V[]>(static_cast<size_t>(size));
}

// The slices of destinations with many edges, in the order of their numbers.
std::vector<Span> slices_of(const Schedule& schedule) {
  std::vector<Span> slices;
  for (const Span& span : schedule.spans) {
    if (span.slice >= 0) slices.push_back(span);
  }
  return slices;
}

int64_t longest_row(const Schedule& schedule, const Ids& indptr) {
  int64_t longest = 0;
  for (const Span& span : schedule.spans) {
    if (span.slice >= 0) continue;
    for (int64_t row = span.first_row; row < span.last_row; ++row) {
      const int64_t degree = indptr[row + 1] - indptr[row];
      if (degree <= kSliceEdges) longest = std::max(longest, degree);
    }
  }
  return longest;
}

// Combines the slices of each long row into its first, then hands that to its other slices.
template <typename V, typename Combine>
void combine_slices(const Schedule& schedule, int64_t width, V* values, const Combine& combine) {
  for (const LongRow& row : schedule.long_rows) {
    V* first = values + row.first_slice * width;
    for (int64_t slice = row.first_slice + 1; slice < row.last_slice; ++slice) {
      for (int64_t h = 0; h < width; ++h) first[h] = combine(first[h], values[slice * width + h]);
    }
    for (int64_t slice = row.first_slice + 1; slice < row.last_slice; ++slice) {
      std::copy(first, first + width, values + slice * width);
    }
  }
}

template <typename T>
void softmax_long_rows(const Csr& in_edges, const T* logits, int64_t width,
                       const Schedule& schedule, T* out, int num_threads) {
  using V = wide_t<T>;
  const std::vector<Span> slices = slices_of(schedule);
  const int64_t count = schedule.num_slices;
  const auto shifted = scratch<V>(count * kSliceEdges * width);
  const auto highest = scratch<V>(count * width);
  const auto total = scratch<V>(count * width);
  const auto rows = [&](int64_t i) { return shifted.get() + i * kSliceEdges * width; };
  run_tasks(count, num_threads, [&](int64_t i) {
    load(in_edges, logits, slices[i].begin, slices[i].end, width, out, rows(i),
         highest.get() + i * width);
  });
  combine_slices(schedule, width, highest.get(), [](V a, V b) { return b > a ? b : a; });
  run_tasks(count, num_threads, [&](int64_t i) {
    exponentiate(slices[i].end - slices[i].begin, width, highest.get() + i * width, rows(i),
                 total.get() + i * width);
  });
  combine_slices(schedule, width, total.get(), [](V a, V b) { return a + b; });
  run_tasks(count, num_threads, [&](int64_t i) {
    store(in_edges, slices[i].begin, slices[i].end, width, rows(i), total.get() + i * width, out);
  });
}

template <typename T>
void backward_long_rows(const Csr& in_edges, const T* out, const T* grad, int64_t width,
                        const Schedule& schedule, T* result, int num_threads) {
  using V = wide_t<T>;
  const std::vector<Span> slices = slices_of(schedule);
  const auto total = scratch<V>(schedule.num_slices * width);
  run_tasks(schedule.num_slices, num_threads, [&](int64_t i) {
    dot(in_edges, out, grad, slices[i].begin, slices[i].end, width, result,
        total.get() + i * width);
  });
  combine_slices(schedule, width, total.get(), [](V a, V b) { return a + b; });
  run_tasks(schedule.num_slices, num_threads, [&](int64_t i) {
    subtract(in_edges, out, grad, slices[i].begin, slices[i].end, width, total.get() + i * width,
             result);
  });
}

}  // namespace

template <typename T>
void edge_softmax(const Csr& in_edges, const T* logits, int64_t width, T* out, int num_threads) {
  using V = wide_t<T>;
  const Schedule schedule = make_schedule(in_edges.indptr, in_edges.num_rows, width, num_threads);
  const int64_t longest = longest_row(schedule, in_edges.indptr);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    if (schedule.spans[i].slice >= 0) return;
    const auto shifted = scratch<V>(longest * width);
    const auto highest = scratch<V>(width);
    const auto total = scratch<V>(width);
    with_width<T>(width, [&](auto known) {
      dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
        softmax_rows<known>(in_edges, logits, width, schedule.spans[i], shifted.get(),
                            highest.get(), total.get(), out);
      });
    });
  });
  if (!schedule.long_rows.empty())
    softmax_long_rows(in_edges, logits, width, schedule, out, num_threads);
}

template <typename T>
void edge_softmax_backward(const Csr& in_edges, const T* out, const T* grad, int64_t width,
                           T* result, int num_threads) {
  const Schedule schedule = make_schedule(in_edges.indptr, in_edges.num_rows, width, num_threads);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    if (schedule.spans[i].slice >= 0) return;
    const auto total = scratch<wide_t<T>>(width);
    with_width<T>(width, [&](auto known) {
      dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
        backward_rows<known>(in_edges, out, grad, width, schedule.spans[i], total.get(), result);
      });
    });
  });
  if (!schedule.long_rows.empty())
    backward_long_rows(in_edges, out, grad, width, schedule, result, num_threads);
}

#define INSTANTIATE(T)                                                \
  template void edge_softmax(const Csr&, const T*, int64_t, T*, int); \
  template void edge_softmax_backward(const Csr&, const T*, const T*, int64_t, T*, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
