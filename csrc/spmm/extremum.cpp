// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>
#include <memory>

#include "runtime/parallel.h"
#include "simd/dispatch.h"
#include "spmm/finish.h"
#include "spmm/messages.h"
#include "spmm/spmm.h"

namespace graphshard {
namespace {

// The maximum is a search for the greatest of 1 * message, the minimum of -1 * message.
template <typename V>
GRAPHSHARD_INLINE bool exceeds(V candidate, V best) {
  return (candidate > best) | ((candidate != candidate) & (best == best));
}

// The greatest of sign * message so far, and its place among the edges, for each column of a row.
template <typename V>
struct Best {
  V* value;
  int32_t* place;
};

// Of the messages of edges [begin, end), of which there is at least one.
template <int... kLengths, typename Messages, typename V>
GRAPHSHARD_INLINE void best_of_edges(Messages& messages, int64_t begin, int64_t end, V sign,
                                     const Best<V>& best) {
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t count = std::min(kEdgesAtATime, end - first);
    messages.load(first, first + count);
    int64_t at = 0;
    for_each_block<kLengths...>(
        messages, [&](auto size, int64_t outer, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
          V values[size];
          int32_t places[size];
          // The first edge holds the place until another exceeds it, even if all are -infinity.
          const bool is_first = first == begin;
          for (int j = 0; j < size; ++j) {
            values[j] = is_first ? -std::numeric_limits<V>::infinity() : best.value[at + j];
          }
          for (int j = 0; j < size; ++j) places[j] = is_first ? 0 : best.place[at + j];
          for (int64_t i = 0; i < count; ++i) {
            messages.template prefetch<size>(i, outer, column);
            const int32_t here = static_cast<int32_t>(first - begin + i);
            messages.template message<size>(i, outer, column, [&](int j, V value) {
              const V candidate = sign * value;
              const bool takes = exceeds(candidate, values[j]);
              values[j] = takes ? candidate : values[j];
              places[j] = takes ? here : places[j];
            });
          }
          for (int j = 0; j < size; ++j) best.value[at + j] = values[j];
          for (int j = 0; j < size; ++j) best.place[at + j] = places[j];
          at += size;
        });
  }
}

// The rows of a span, or the slice that it is; `best` is one row wide.
template <int... kLengths, typename Messages, typename T>
GRAPHSHARD_INLINE void best_of_span(const SpmmArguments<T>& a, WritableIds arg, Messages messages,
                                    const Span& span, wide_t<T> sign, const Best<wide_t<T>>& best) {
  const bool is_slice = span.slice >= 0;
  const int64_t width = a.loop.outer * a.loop.inner;
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = is_slice ? span.begin : a.edges.begin(row);
    const int64_t end = is_slice ? span.end : a.edges.end(row);
    if (!is_slice && end - begin > kSliceEdges) continue;
    T* out = a.out + row * width;
    if (begin == end) {
      for (int64_t j = 0; j < width; ++j) narrow(wide_t<T>{0}, out[j]);
      for (int64_t j = 0; j < width; ++j) arg.set(row * width + j, -1);
      continue;
    }
    best_of_edges<kLengths...>(messages, begin, end, sign, best);
    if (is_slice) return;
    for (int64_t j = 0; j < width; ++j) narrow(sign * best.value[j], out[j]);
    for (int64_t j = 0; j < width; ++j) {
      arg.set(row * width + j, a.edges.edge_id(begin + best.place[j]));
    }
  }
}

template <typename T>
void best_of_copied(const SpmmArguments<T>& a, WritableIds arg, Op op, const Span& span,
                    wide_t<T> sign, const Best<wide_t<T>>& best) {
  dispatch<std::min(32, kWidestRegister<T>)>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    best_of_span<64, 16, 4, 1>(a, arg, CopiedRows<T>(a, op), span, sign, best);
  });
}

template <typename T>
void best_of_others(const SpmmArguments<T>& a, WritableIds arg, Op op, const Span& span,
                    wide_t<T> sign, const Best<wide_t<T>>& best) {
  best_of_span<16, 1>(a, arg, OtherMessages<T>(a, op), span, sign, best);
}

// The best of the slices of a row with many edges; the first of equals.
template <typename T>
void join_slices(const SpmmArguments<T>& a, WritableIds arg, const LongRow& row, wide_t<T> sign,
                 const Best<wide_t<T>>& best) {
  using V = wide_t<T>;
  const int64_t width = a.loop.outer * a.loop.inner;
  for (int64_t j = 0; j < width; ++j) {
    int64_t found = row.first_slice;
    for (int64_t slice = found + 1; slice < row.last_slice; ++slice) {
      const V candidate = best.value[slice * width + j];
      if (exceeds(candidate, best.value[found * width + j])) found = slice;
    }
    const int64_t start = a.edges.begin(row.row) + (found - row.first_slice) * kSliceEdges;
    narrow(sign * best.value[found * width + j], a.out[row.row * width + j]);
    arg.set(row.row * width + j, a.edges.edge_id(start + best.place[found * width + j]));
  }
}

}  // namespace

template <typename T>
void spmm_extremum(const SpmmArguments<T>& a, WritableIds arg, Op op, bool smallest,
                   int num_threads) {
  using V = wide_t<T>;
  const bool copies = op == Op::kCopyLhs || op == Op::kCopyRhs;
  const auto run_span = copies ? best_of_copied<T> : best_of_others<T>;
  const V sign = smallest ? -1 : 1;
  const int64_t width = a.loop.outer * a.loop.inner;
  const Schedule schedule = make_schedule(a.edges.indptr, a.edges.num_rows, width, num_threads);
  const auto values = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  const auto places = std::make_unique_for_overwrite<int32_t[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      const int64_t at = span.slice * width;
      run_span(a, arg, op, span, sign, {values.get() + at, places.get() + at});
    } else {
      const auto value = std::make_unique_for_overwrite<V[]>(width);
      const auto place = std::make_unique_for_overwrite<int32_t[]>(width);
      run_span(a, arg, op, span, sign, {value.get(), place.get()});
    }
  });
  run_tasks(static_cast<int64_t>(schedule.long_rows.size()), num_threads, [&](int64_t i) {
    join_slices(a, arg, schedule.long_rows[i], sign, {values.get(), places.get()});
  });
}

template void spmm_extremum(const SpmmArguments<float>&, WritableIds, Op, bool, int);
template void spmm_extremum(const SpmmArguments<double>&, WritableIds, Op, bool, int);
template void spmm_extremum(const SpmmArguments<bfloat16>&, WritableIds, Op, bool, int);

}  // namespace graphshard
