// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>
#include <memory>

#include "runtime/parallel.h"
#include "spmm/finish.h"
#include "spmm/messages.h"
#include "spmm/spmm.h"

namespace graphshard {
namespace {

// The maximum is a search for the greatest of 1 * message, the minimum of -1 * message.
template <typename V>
GRAPHSHARD_INLINE bool beats(V candidate, V best) {
  return (candidate > best) | ((candidate != candidate) & (best == best));
}

// Writes the greatest of sign * message, and its place among the edges [begin, end), of which there
// is at least one.
template <typename Messages, typename V>
GRAPHSHARD_INLINE void best_edges(Messages& messages, int64_t begin, int64_t end, V sign, V* best,
                                  int32_t* place) {
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t count = std::min(kEdgesAtATime, end - first);
    messages.load(first, first + count);
    int64_t at = 0;
    for_each_block<64, 16, 4>(
        messages, [&](auto size, int64_t outer, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
          V bests[size];
          int32_t places[size];
          // The first edge holds the place until another beats it, even if all are -infinity.
          const bool fresh = first == begin;
          for (int j = 0; j < size; ++j) {
            bests[j] = fresh ? -std::numeric_limits<V>::infinity() : best[at + j];
          }
          for (int j = 0; j < size; ++j) places[j] = fresh ? 0 : place[at + j];
          for (int64_t i = 0; i < count; ++i) {
            messages.template prefetch<size>(i, outer, column);
            const int32_t here = static_cast<int32_t>(first - begin + i);
            messages.template message<size>(i, outer, column, [&](int j, V value) {
              const V candidate = sign * value;
              const bool wins = beats(candidate, bests[j]);
              bests[j] = wins ? candidate : bests[j];
              places[j] = wins ? here : places[j];
            });
          }
          for (int j = 0; j < size; ++j) best[at + j] = bests[j];
          for (int j = 0; j < size; ++j) place[at + j] = places[j];
          at += size;
        });
  }
}

// The rows of a span, or the slice that it is; `best` and `place` are one row wide.
template <typename Messages, typename T>
GRAPHSHARD_INLINE void best_span(const SpmmArguments<T>& a, WritableIds arg, Messages messages,
                                 const Span& span, wide_t<T> sign, wide_t<T>* best,
                                 int32_t* place) {
  if (span.slice >= 0) {
    best_edges(messages, span.begin, span.end, sign, best, place);
    return;
  }
  const int64_t width = a.loop.outer * a.loop.inner;
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.edges.indptr[row];
    const int64_t end = a.edges.indptr[row + 1];
    if (end - begin > kSliceEdges) continue;
    T* out = a.out + row * width;
    if (begin == end) {
      for (int64_t j = 0; j < width; ++j) narrow(wide_t<T>{0}, out[j]);
      for (int64_t j = 0; j < width; ++j) arg.set(row * width + j, -1);
      continue;
    }
    best_edges(messages, begin, end, sign, best, place);
    for (int64_t j = 0; j < width; ++j) narrow(sign * best[j], out[j]);
    for (int64_t j = 0; j < width; ++j) {
      arg.set(row * width + j, a.edges.edge_id(begin + place[j]));
    }
  }
}

template <typename T>
GRAPHSHARD_CLONES void best_copied(const SpmmArguments<T>& a, WritableIds arg, Op op,
                                   const Span& span, wide_t<T> sign, wide_t<T>* best,
                                   int32_t* place) {
  best_span(a, arg, CopiedRows<T>(a, op), span, sign, best, place);
}

template <typename T>
void best_others(const SpmmArguments<T>& a, WritableIds arg, Op op, const Span& span,
                 wide_t<T> sign, wide_t<T>* best, int32_t* place) {
  best_span(a, arg, OtherMessages<T>(a, op), span, sign, best, place);
}

}  // namespace

template <typename T>
void spmm_best(const SpmmArguments<T>& a, WritableIds arg, Op op, bool smallest, int num_threads) {
  using V = wide_t<T>;
  const bool copies = op == Op::kCopyLhs || op == Op::kCopyRhs;
  const auto run_span = copies ? best_copied<T> : best_others<T>;
  const V sign = smallest ? -1 : 1;
  const int64_t width = a.loop.outer * a.loop.inner;
  const Schedule schedule = make_schedule(a.edges.indptr, a.edges.num_rows, width, num_threads);
  const auto bests = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  const auto places = std::make_unique_for_overwrite<int32_t[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      const int64_t at = span.slice * width;
      run_span(a, arg, op, span, sign, bests.get() + at, places.get() + at);
    } else {
      const auto best = std::make_unique_for_overwrite<V[]>(width);
      const auto place = std::make_unique_for_overwrite<int32_t[]>(width);
      run_span(a, arg, op, span, sign, best.get(), place.get());
    }
  });
  run_tasks(static_cast<int64_t>(schedule.hubs.size()), num_threads, [&](int64_t i) {
    const Hub& hub = schedule.hubs[i];
    const int64_t begin = a.edges.indptr[hub.row];
    for (int64_t j = 0; j < width; ++j) {
      int64_t winner = hub.first_slice;
      for (int64_t slice = winner + 1; slice < hub.last_slice; ++slice) {
        const V best = bests[winner * width + j];
        const V candidate = bests[slice * width + j];
        if (beats(candidate, best)) winner = slice;
      }
      const int64_t start = begin + (winner - hub.first_slice) * kSliceEdges;
      narrow(sign * bests[winner * width + j], a.out[hub.row * width + j]);
      arg.set(hub.row * width + j, a.edges.edge_id(start + places[winner * width + j]));
    }
  });
}

template void spmm_best(const SpmmArguments<float>&, WritableIds, Op, bool, int);
template void spmm_best(const SpmmArguments<double>&, WritableIds, Op, bool, int);
template void spmm_best(const SpmmArguments<bfloat16>&, WritableIds, Op, bool, int);

}  // namespace graphshard
