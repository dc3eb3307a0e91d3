// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <limits>
#include <memory>

#include "parallel.h"
#include "spmm.h"
#include "spmm_walk.h"

namespace graphshard {
namespace {

// The maximum is a search for the greatest of 1 * message, the minimum of -1 * message.
template <typename V>
GRAPHSHARD_INLINE bool beats(V candidate, V best) {
  return (candidate > best) | ((candidate != candidate) & (best == best));
}

// Writes the greatest of sign * message, and its place among the edges [begin, end), of which there
// is at least one.
template <typename L, typename T, typename I>
GRAPHSHARD_INLINE void best_edges(const SpmmArguments<T, I>& a, int64_t begin, int64_t end,
                                  wide_t<T> sign, wide_t<T>* best, int32_t* place) {
  using V = wide_t<T>;
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t last = std::min(first + kEdgesAtATime, end);
    for_each_block<L, 64, 16, 4>(
        a, [&](auto size, Columns<T> columns, int64_t at) GRAPHSHARD_INLINE_LAMBDA {
          V bests[size];
          int32_t places[size];
          // The first edge holds the place until another beats it, even if all are -infinity.
          const bool fresh = first == begin;
          for (int j = 0; j < size; ++j) {
            bests[j] = fresh ? -std::numeric_limits<V>::infinity() : best[at + j];
          }
          for (int j = 0; j < size; ++j) places[j] = fresh ? 0 : place[at + j];
          for (int64_t k = first; k < last; ++k) {
            const int32_t here = static_cast<int32_t>(k - begin);
            message<L, size>(a, columns, k, [&](int64_t j, V value) {
              const V candidate = sign * value;
              const bool wins = beats(candidate, bests[j]);
              bests[j] = wins ? candidate : bests[j];
              places[j] = wins ? here : places[j];
            });
          }
          for (int j = 0; j < size; ++j) best[at + j] = bests[j];
          for (int j = 0; j < size; ++j) place[at + j] = places[j];
        });
  }
}

template <typename L, typename T, typename I>
GRAPHSHARD_CLONES void best_span(const SpmmArguments<T, I>& a, const Span& span, wide_t<T> sign,
                                 int64_t width, wide_t<T>* best, int32_t* place) {
  if (span.slice >= 0) {
    best_edges<L>(a, span.begin, span.end, sign, best, place);
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
    best_edges<L>(a, begin, end, sign, best, place);
    for (int64_t j = 0; j < width; ++j) narrow(sign * best[j], out[j]);
    for (int64_t j = 0; j < width; ++j) {
      arg[j] = static_cast<I>(a.csc.edge_id(begin + place[j]));
    }
  }
}

template <typename L, typename T, typename I>
void run(const SpmmArguments<T, I>& a, wide_t<T> sign, int num_threads) {
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
        if (beats(candidate, best)) winner = slice;
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
void spmm_best(const SpmmArguments<T, I>& arguments, Op op, bool smallest, int num_threads) {
  with_loop(op, arguments.loop, [&](auto loop) {
    run<decltype(loop)>(arguments, static_cast<wide_t<T>>(smallest ? -1 : 1), num_threads);
  });
}

template void spmm_best(const SpmmArguments<float, int32_t>&, Op, bool, int);
template void spmm_best(const SpmmArguments<float, int64_t>&, Op, bool, int);
template void spmm_best(const SpmmArguments<double, int32_t>&, Op, bool, int);
template void spmm_best(const SpmmArguments<double, int64_t>&, Op, bool, int);
template void spmm_best(const SpmmArguments<bfloat16, int32_t>&, Op, bool, int);
template void spmm_best(const SpmmArguments<bfloat16, int64_t>&, Op, bool, int);

}  // namespace graphshard
