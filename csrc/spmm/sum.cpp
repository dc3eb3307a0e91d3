// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <memory>
#include <type_traits>

#include "runtime/parallel.h"
#include "simd/dispatch.h"
#include "spmm/finish.h"
#include "spmm/fixed_width.h"
#include "spmm/messages.h"
#include "spmm/spmm.h"

namespace graphshard {
namespace {

// Sums the messages of edges [begin, end), of which there is at least one, to what is at `start`,
// or to zero where that is null. Calls finish(size, column, sums) for each block of columns.
// `partial` has room for a row.
template <int kBytes, typename Messages, typename V, typename Finisher>
GRAPHSHARD_INLINE void sum_edges(Messages& messages, int64_t begin, int64_t end, const V* start,
                                 V* partial, const Finisher& finish) {
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t count = std::min(kEdgesAtATime, end - first);
    const bool is_last = first + count == end;
    const V* from = first == begin ? start : partial;
    messages.load(first, first + count);
    int64_t at = 0;
    for_each_block<128, 64, 32, 16, 8, 4>(messages, [&](auto size, int64_t outer,
                                                        int64_t column) GRAPHSHARD_INLINE_LAMBDA {
      LaneBlock<typename Messages::Value, size, kBytes> sums;
      if (from != nullptr) {
        sums.for_each([&](auto& sum, int j) GRAPHSHARD_INLINE_LAMBDA { sum.load(from + at + j); });
      }
      for (int64_t i = 0; i < count; ++i) {
        messages.template prefetch<size>(i, outer, column);
        messages.template add_to<size>(sums, i, outer, column);
      }
      if (is_last) {
        finish(size, at, sums);
      } else {
        sums.for_each([&](auto& sum, int j)
                          GRAPHSHARD_INLINE_LAMBDA { sum.store(partial + at + j); });
      }
      at += size;
    });
  }
}

// The rows of a span, or the slice that it is; `buffer` is one row wide.
template <int kBytes, typename Messages, typename T>
GRAPHSHARD_INLINE void sum_span(const SpmmArguments<T>& a, Messages messages, const Span& span,
                                SumResult result, int64_t width, wide_t<T>* buffer) {
  using V = wide_t<T>;
  const V* const zero = nullptr;
  if (span.slice >= 0) {
    sum_edges<kBytes>(messages, span.begin, span.end, zero, buffer,
                      [&](auto, int64_t at, auto& sums) GRAPHSHARD_INLINE_LAMBDA {
                        sums.for_each([&](auto& sum, int j)
                                          GRAPHSHARD_INLINE_LAMBDA { sum.store(buffer + at + j); });
                      });
    return;
  }
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.edges.indptr[row];
    const int64_t end = a.edges.indptr[row + 1];
    T* out = a.out + row * width;
    if (end - begin > kSliceEdges) continue;
    if (begin == end) {
      if (result == SumResult::kAdded) continue;
      for (int64_t j = 0; j < width; ++j) narrow(V{0}, out[j]);
      continue;
    }
    const V* start = zero;
    if constexpr (std::is_same_v<T, V>) start = continues<T>(result) ? out : zero;
    const bool adds = result == SumResult::kAdded && !continues<T>(result);
    sum_edges<kBytes>(messages, begin, end, start, buffer,
                      [&](auto, int64_t at, auto& sums) GRAPHSHARD_INLINE_LAMBDA {
                        write(sums, end - begin, result, adds, out + at);
                      });
  }
}

template <typename T>
void sum_copied(const SpmmArguments<T>& a, Op op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* buffer) {
  in_registers([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    sum_span<bytes>(a, CopiedRows<T>(a, op), span, result, width, buffer);
  });
}

template <typename T>
void sum_scaled(const SpmmArguments<T>& a, Op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* buffer) {
  in_registers([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    sum_span<bytes>(a, ScaledRows<T>(a), span, result, width, buffer);
  });
}

template <typename T>
void sum_others(const SpmmArguments<T>& a, Op op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* buffer) {
  sum_span<kLeastRegisterBytes>(a, OtherMessages<T>(a, op), span, result, width, buffer);
}

template <typename T>
auto* choose(const SpmmArguments<T>& a, Op op, int64_t width) {
  if (op == Op::kCopyLhs || op == Op::kCopyRhs) {
    const auto sum_known = sum_rows_of_width<T>(width);
    const bool has_ids = op == Op::kCopyLhs || a.edges.eids;
    return sum_known != nullptr && has_ids ? sum_known : sum_copied<T>;
  }
  if (op == Op::kMul && a.loop.lhs_step == 1 && a.loop.rhs_step == 0) return sum_scaled<T>;
  return sum_others<T>;
}

}  // namespace

template <typename T>
void spmm_sum(const SpmmArguments<T>& a, Op op, SumResult result, int num_threads) {
  using V = wide_t<T>;
  const int64_t width = a.loop.outer * a.loop.inner;
  const auto run_rows = choose(a, op, width);
  const auto run_slice = choose(a, op, 0);
  const Schedule schedule = make_schedule(a.edges.indptr, a.edges.num_rows, width, num_threads);
  const auto partial = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      run_slice(a, op, span, result, width, partial.get() + span.slice * width);
    } else {
      const auto buffer = std::make_unique_for_overwrite<V[]>(width);
      run_rows(a, op, span, result, width, buffer.get());
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
    T* out = a.out + hub.row * width;
    in_blocks<16, 1>(width, [&](auto size, int64_t at) {
      LaneBlock<T, size, kLeastRegisterBytes> sums;
      sums.for_each([&](auto& sum, int j) { sum.load(total + at + j); });
      write(sums, degree, result, result == SumResult::kAdded, out + at);
    });
  });
}

template void spmm_sum(const SpmmArguments<float>&, Op, SumResult, int);
template void spmm_sum(const SpmmArguments<double>&, Op, SumResult, int);
template void spmm_sum(const SpmmArguments<bfloat16>&, Op, SumResult, int);

}  // namespace graphshard
