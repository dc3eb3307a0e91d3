// SPDX-License-Identifier: Apache-2.0

#include "spmm.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "elementwise.h"
#include "parallel.h"

namespace graphshard {
namespace {

// Edges of a destination are taken this many at a time, so that their rows stay in the first-level
// cache while blocks of columns pass over them.
constexpr int64_t kEdgesAtATime = 64;

// Where the columns [column, column + kColumns) of inner loop `outer` begin in row 0 of an operand.
template <typename T>
struct Columns {
  const T* lhs;
  const T* rhs;
};

template <typename L, typename T, typename I>
GRAPHSHARD_INLINE Columns<T> columns_at(const SpmmArguments<T, I>& a, int64_t outer,
                                        int64_t column) {
  Columns<T> columns{nullptr, nullptr};
  if constexpr (L::operation::kLhs) {
    columns.lhs = a.lhs.data + a.loop.lhs_offsets[outer] + (L::lhs_advances ? column : 0);
  }
  if constexpr (L::operation::kRhs) {
    columns.rhs = a.rhs.data + a.loop.rhs_offsets[outer] + (L::rhs_advances ? column : 0);
  }
  return columns;
}

// Requests what a later edge reads of these columns.
template <typename L, int kColumns, typename T, typename I>
GRAPHSHARD_INLINE void prefetch(const SpmmArguments<T, I>& a, Columns<T> columns,
                                int64_t position) {
  constexpr int kLine = 64 / sizeof(T);
  const int64_t ahead = std::min(position + kPrefetchAhead, a.csc.num_edges - 1);
  if constexpr (L::operation::kLhs) {
    const T* row = columns.lhs + a.csc.indices[ahead] * a.lhs.width;
    for (int j = 0; j < (L::lhs_advances ? kColumns : 1); j += kLine) GRAPHSHARD_PREFETCH(row + j);
  }
  if constexpr (L::operation::kRhs) {
    const T* row = columns.rhs + a.csc.edge_id(ahead) * a.rhs.width;
    for (int j = 0; j < (L::rhs_advances ? kColumns : 1); j += kLine) GRAPHSHARD_PREFETCH(row + j);
  }
}

// Calls store(j, message) for kColumns elements of the message of the edge at `position`.
template <typename L, int kColumns, typename T, typename I, typename Store>
GRAPHSHARD_INLINE void message(const SpmmArguments<T, I>& a, Columns<T> columns, int64_t position,
                               const Store& store) {
  prefetch<L, kColumns>(a, columns, position);
  const T* lhs = nullptr;
  const T* rhs = nullptr;
  if constexpr (L::operation::kLhs) lhs = columns.lhs + a.csc.indices[position] * a.lhs.width;
  if constexpr (L::operation::kRhs) rhs = columns.rhs + a.csc.edge_id(position) * a.rhs.width;
  inner_loop<typename L::operation, L::lhs_advances, L::rhs_advances>(lhs, rhs, kColumns, store);
}

template <typename L, int kColumns, typename T, typename I>
GRAPHSHARD_INLINE void sum_block(const SpmmArguments<T, I>& a, Columns<T> columns, int64_t begin,
                                 int64_t end, wide_t<T>* total) {
  wide_t<T> sums[kColumns];
  for (int j = 0; j < kColumns; ++j) sums[j] = total[j];
  for (int64_t k = begin; k < end; ++k) {
    message<L, kColumns>(a, columns, k, [&](int64_t j, wide_t<T> value) { sums[j] += value; });
  }
  for (int j = 0; j < kColumns; ++j) total[j] = sums[j];
}

template <typename L, typename T, typename I>
GRAPHSHARD_INLINE void sum_edges(const SpmmArguments<T, I>& a, int64_t begin, int64_t end,
                                 int64_t width, wide_t<T>* total) {
  for (int64_t j = 0; j < width; ++j) total[j] = 0;
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t last = std::min(first + kEdgesAtATime, end);
    for (int64_t outer = 0; outer < a.loop.outer; ++outer) {
      wide_t<T>* to = total + outer * a.loop.inner;
      in_blocks(a.loop.inner, [&](auto size, int64_t column) {
        sum_block<L, size>(a, columns_at<L>(a, outer, column), first, last, to + column);
      });
    }
  }
}

template <typename L, int kColumns, typename T, typename I>
GRAPHSHARD_INLINE void best_block(const SpmmArguments<T, I>& a, Columns<T> columns, int64_t begin,
                                  int64_t end, int32_t first_place, wide_t<T> sign, wide_t<T>* best,
                                  int32_t* place) {
  using V = wide_t<T>;
  V bests[kColumns];
  int32_t places[kColumns];
  for (int j = 0; j < kColumns; ++j) bests[j] = best[j];
  for (int j = 0; j < kColumns; ++j) places[j] = place[j];
  for (int64_t k = begin; k < end; ++k) {
    const int32_t here = first_place + static_cast<int32_t>(k - begin);
    message<L, kColumns>(a, columns, k, [&](int64_t j, V value) {
      const V candidate = sign * value;
      const bool wins =
          (candidate > bests[j]) | ((candidate != candidate) & (bests[j] == bests[j]));
      bests[j] = wins ? candidate : bests[j];
      places[j] = wins ? here : places[j];
    });
  }
  for (int j = 0; j < kColumns; ++j) best[j] = bests[j];
  for (int j = 0; j < kColumns; ++j) place[j] = places[j];
}

// Finds the greatest of sign * message, and its place among the edges from `begin` on.
template <typename L, typename T, typename I>
GRAPHSHARD_INLINE void best_edges(const SpmmArguments<T, I>& a, int64_t begin, int64_t end,
                                  int64_t width, wide_t<T> sign, wide_t<T>* best, int32_t* place) {
  // The first edge holds the place until a later one beats it: even if all are -infinity.
  for (int64_t j = 0; j < width; ++j) best[j] = -std::numeric_limits<wide_t<T>>::infinity();
  for (int64_t j = 0; j < width; ++j) place[j] = 0;
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t last = std::min(first + kEdgesAtATime, end);
    for (int64_t outer = 0; outer < a.loop.outer; ++outer) {
      const int64_t at = outer * a.loop.inner;
      in_blocks(a.loop.inner, [&](auto size, int64_t column) {
        best_block<L, size>(a, columns_at<L>(a, outer, column), first, last,
                            static_cast<int32_t>(first - begin), sign, best + at + column,
                            place + at + column);
      });
    }
  }
}

template <typename T>
GRAPHSHARD_INLINE void store_total(const wide_t<T>* total, int64_t width, int64_t degree, bool mean,
                                   T* out) {
  const wide_t<T> divisor = mean && degree > 0 ? static_cast<wide_t<T>>(degree) : 1;
  for (int64_t j = 0; j < width; ++j) narrow(total[j] / divisor, out[j]);
}

template <typename L, typename T, typename I>
GRAPHSHARD_CLONES void sum_span(const SpmmArguments<T, I>& a, const Span& span, bool mean,
                                int64_t width, wide_t<T>* total) {
  if (span.slice >= 0) {
    sum_edges<L>(a, span.begin, span.end, width, total);
    return;
  }
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.csc.indptr[row];
    const int64_t end = a.csc.indptr[row + 1];
    if (end - begin > kSliceEdges) continue;
    sum_edges<L>(a, begin, end, width, total);
    store_total(total, width, end - begin, mean, a.out + row * width);
  }
}

template <typename L, typename T, typename I>
GRAPHSHARD_CLONES void best_span(const SpmmArguments<T, I>& a, const Span& span, wide_t<T> sign,
                                 int64_t width, wide_t<T>* best, int32_t* place) {
  if (span.slice >= 0) {
    best_edges<L>(a, span.begin, span.end, width, sign, best, place);
    return;
  }
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.csc.indptr[row];
    const int64_t end = a.csc.indptr[row + 1];
    if (end - begin > kSliceEdges) continue;
    T* out = a.out + row * width;
    I* arg = a.arg + row * width;
    if (begin == end) {
      for (int64_t j = 0; j < width; ++j) narrow(wide_t<T>{0}, out[j]);
      std::fill(arg, arg + width, I{-1});
      continue;
    }
    best_edges<L>(a, begin, end, width, sign, best, place);
    for (int64_t j = 0; j < width; ++j) narrow(sign * best[j], out[j]);
    for (int64_t j = 0; j < width; ++j) {
      arg[j] = static_cast<I>(a.csc.edge_id(begin + place[j]));
    }
  }
}

template <typename L, typename T, typename I>
void spmm_sum(const SpmmArguments<T, I>& a, bool mean, int num_threads) {
  using V = wide_t<T>;
  const int64_t width = a.loop.outer * a.loop.inner;
  const Schedule schedule = make_schedule(a.csc.indptr, a.csc.num_rows, width, num_threads);
  const auto partial = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      sum_span<L>(a, span, mean, width, partial.get() + span.slice * width);
    } else {
      const auto total = std::make_unique_for_overwrite<V[]>(width);
      sum_span<L>(a, span, mean, width, total.get());
    }
  });
  run_tasks(static_cast<int64_t>(schedule.hubs.size()), num_threads, [&](int64_t i) {
    const Hub& hub = schedule.hubs[i];
    V* total = partial.get() + hub.first_slice * width;
    for (int64_t slice = hub.first_slice + 1; slice < hub.last_slice; ++slice) {
      const V* other = partial.get() + slice * width;
      for (int64_t j = 0; j < width; ++j) total[j] += other[j];
    }
    const int64_t degree = a.csc.indptr[hub.row + 1] - a.csc.indptr[hub.row];
    store_total(total, width, degree, mean, a.out + hub.row * width);
  });
}

template <typename L, typename T, typename I>
void spmm_best(const SpmmArguments<T, I>& a, wide_t<T> sign, int num_threads) {
  using V = wide_t<T>;
  const int64_t width = a.loop.outer * a.loop.inner;
  const Schedule schedule = make_schedule(a.csc.indptr, a.csc.num_rows, width, num_threads);
  const auto bests = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  const auto places = std::make_unique_for_overwrite<int32_t[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      const int64_t at = span.slice * width;
      best_span<L>(a, span, sign, width, bests.get() + at, places.get() + at);
    } else {
      const auto best = std::make_unique_for_overwrite<V[]>(width);
      const auto place = std::make_unique_for_overwrite<int32_t[]>(width);
      best_span<L>(a, span, sign, width, best.get(), place.get());
    }
  });
  run_tasks(static_cast<int64_t>(schedule.hubs.size()), num_threads, [&](int64_t i) {
    const Hub& hub = schedule.hubs[i];
    const int64_t begin = a.csc.indptr[hub.row];
    for (int64_t j = 0; j < width; ++j) {
      int64_t winner = hub.first_slice;
      for (int64_t slice = winner + 1; slice < hub.last_slice; ++slice) {
        const V best = bests[winner * width + j];
        const V candidate = bests[slice * width + j];
        if (candidate > best || (candidate != candidate && best == best)) winner = slice;
      }
      const int64_t start = begin + (winner - hub.first_slice) * kSliceEdges;
      narrow(sign * bests[winner * width + j], a.out[hub.row * width + j]);
      a.arg[hub.row * width + j] =
          static_cast<I>(a.csc.edge_id(start + places[winner * width + j]));
    }
  });
}

}  // namespace

template <typename T, typename I>
void spmm(const SpmmArguments<T, I>& arguments, Op op, Reduce reduce, int num_threads) {
  with_loop(op, arguments.loop, [&](auto loop) {
    using L = decltype(loop);
    if (reduce == Reduce::kSum || reduce == Reduce::kMean) {
      spmm_sum<L>(arguments, reduce == Reduce::kMean, num_threads);
    } else {
      spmm_best<L>(arguments, static_cast<wide_t<T>>(reduce == Reduce::kMax ? 1 : -1), num_threads);
    }
  });
}

template void spmm(const SpmmArguments<float, int32_t>&, Op, Reduce, int);
template void spmm(const SpmmArguments<float, int64_t>&, Op, Reduce, int);
template void spmm(const SpmmArguments<double, int32_t>&, Op, Reduce, int);
template void spmm(const SpmmArguments<double, int64_t>&, Op, Reduce, int);
template void spmm(const SpmmArguments<bfloat16, int32_t>&, Op, Reduce, int);
template void spmm(const SpmmArguments<bfloat16, int64_t>&, Op, Reduce, int);

}  // namespace graphshard
