// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <type_traits>

#include "parallel.h"
#include "spmm.h"
#include "spmm_walk.h"

namespace graphshard {
namespace {

// Writes the sum of the messages of edges [begin, end), of which there is at least one; or adds it
// to what is there.
template <typename Messages, typename V>
GRAPHSHARD_INLINE void sum_edges(Messages& messages, int64_t begin, int64_t end, bool adds,
                                 V* total) {
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t count = std::min(kEdgesAtATime, end - first);
    messages.load(first, first + count);
    V* to = total;
    for_each_block<128, 64, 32, 16, 8, 4>(
        messages, [&](auto size, int64_t outer, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
          V sums[size];
          for (int j = 0; j < size; ++j) sums[j] = first == begin && !adds ? 0 : to[j];
          for (int64_t i = 0; i < count; ++i) {
            messages.template prefetch<size>(i, outer, column);
            messages.template message<size>(i, outer, column,
                                            [&](int j, V value) { sums[j] += value; });
          }
          for (int j = 0; j < size; ++j) to[j] = sums[j];
          to += size;
        });
  }
}

// Writes the result of one row; `total` may be `out` itself.
template <typename T>
GRAPHSHARD_INLINE void store(const wide_t<T>* total, int64_t width, int64_t degree,
                             SumResult result, T* out) {
  if (result == SumResult::kMean) {
    const wide_t<T> divisor = static_cast<wide_t<T>>(degree);
    for (int64_t j = 0; j < width; ++j) narrow(total[j] / divisor, out[j]);
  } else if (static_cast<const void*>(total) != out) {
    const bool adds = result == SumResult::kAdded;
    for (int64_t j = 0; j < width; ++j) narrow(total[j] + (adds ? widen(out[j]) : 0), out[j]);
  }
}

// The rows of a span, or the slice that it is; `buffer` is one row wide.
template <typename Messages, typename T>
GRAPHSHARD_INLINE void sum_span(const SpmmArguments<T>& a, Messages messages, const Span& span,
                                SumResult result, int64_t width, wide_t<T>* buffer) {
  if (span.slice >= 0) {
    sum_edges(messages, span.begin, span.end, false, buffer);
    return;
  }
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.edges.indptr[row];
    const int64_t end = a.edges.indptr[row + 1];
    T* out = a.out + row * width;
    if (end - begin > kSliceEdges) continue;
    if (begin == end) {
      if (result == SumResult::kAdded) continue;
      for (int64_t j = 0; j < width; ++j) narrow(wide_t<T>{0}, out[j]);
      continue;
    }
    wide_t<T>* total = buffer;
    if constexpr (std::is_same_v<T, wide_t<T>>) total = out;
    sum_edges(messages, begin, end, result == SumResult::kAdded && total != buffer, total);
    store(total, width, end - begin, result, out);
  }
}

template <typename T>
GRAPHSHARD_HOT_CLONES void sum_copied(const SpmmArguments<T>& a, Op op, const Span& span,
                                      SumResult result, int64_t width, wide_t<T>* buffer) {
  sum_span(a, CopiedRows<T>(a, op), span, result, width, buffer);
}

template <typename T>
GRAPHSHARD_HOT_CLONES void sum_scaled(const SpmmArguments<T>& a, Op, const Span& span,
                                      SumResult result, int64_t width, wide_t<T>* buffer) {
  sum_span(a, ScaledRows<T>(a), span, result, width, buffer);
}

template <typename T>
void sum_others(const SpmmArguments<T>& a, Op op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* buffer) {
  sum_span(a, OtherMessages<T>(a, op), span, result, width, buffer);
}

template <typename T>
auto* choose(const SpmmArguments<T>& a, Op op) {
  if (op == Op::kCopyLhs || op == Op::kCopyRhs) return sum_copied<T>;
  if (op == Op::kMul && a.loop.lhs_step == 1 && a.loop.rhs_step == 0) return sum_scaled<T>;
  return sum_others<T>;
}

}  // namespace

template <typename T>
void spmm_sum(const SpmmArguments<T>& a, Op op, SumResult result, int num_threads) {
  using V = wide_t<T>;
  const auto run_span = choose(a, op);
  const int64_t width = a.loop.outer * a.loop.inner;
  const Schedule schedule = make_schedule(a.edges.indptr, a.edges.num_rows, width, num_threads);
  const auto partial = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      run_span(a, op, span, result, width, partial.get() + span.slice * width);
    } else {
      const auto buffer = std::make_unique_for_overwrite<V[]>(width);
      run_span(a, op, span, result, width, buffer.get());
    }
  });
  run_tasks(static_cast<int64_t>(schedule.hubs.size()), num_threads, [&](int64_t i) {
    const Hub& hub = schedule.hubs[i];
    V* total = partial.get() + hub.first_slice * width;
    for (int64_t slice = hub.first_slice + 1; slice < hub.last_slice; ++slice) {
      const V* other = partial.get() + slice * width;
      for (int64_t j = 0; j < width; ++j) total[j] += other[j];
    }
    const int64_t degree = a.edges.indptr[hub.row + 1] - a.edges.indptr[hub.row];
    store(total, width, degree, result, a.out + hub.row * width);
  });
}

template void spmm_sum(const SpmmArguments<float>&, Op, SumResult, int);
template void spmm_sum(const SpmmArguments<double>&, Op, SumResult, int);
template void spmm_sum(const SpmmArguments<bfloat16>&, Op, SumResult, int);

}  // namespace graphshard
