// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <type_traits>

#include "parallel.h"
#include "spmm.h"
#include "spmm_walk.h"

namespace graphshard {
namespace {

// Writes the sum of the messages of edges [begin, end), of which there is at least one.
template <typename L, typename T, typename I>
GRAPHSHARD_INLINE void sum_edges(const SpmmArguments<T, I>& a, int64_t begin, int64_t end,
                                 wide_t<T>* total) {
  for (int64_t first = begin; first < end; first += kEdgesAtATime) {
    const int64_t last = std::min(first + kEdgesAtATime, end);
    for_each_block<L, 128, 64, 32, 16, 8, 4>(
        a, [&](auto size, Columns<T> columns, int64_t at) GRAPHSHARD_INLINE_LAMBDA {
          wide_t<T> sums[size];
          wide_t<T>* to = total + at;
          for (int j = 0; j < size; ++j) sums[j] = first == begin ? 0 : to[j];
          for (int64_t k = first; k < last; ++k) {
            message<L, size>(a, columns, k, [&](int64_t j, wide_t<T> value) { sums[j] += value; });
          }
          for (int j = 0; j < size; ++j) to[j] = sums[j];
        });
  }
}

// Writes the result of one row; `total` may be `out` itself.
template <typename T>
GRAPHSHARD_INLINE void store(const wide_t<T>* total, int64_t width, int64_t degree, bool mean,
                             T* out) {
  if (mean) {
    const wide_t<T> divisor = static_cast<wide_t<T>>(degree);
    for (int64_t j = 0; j < width; ++j) narrow(total[j] / divisor, out[j]);
  } else if (static_cast<const void*>(total) != out) {
    for (int64_t j = 0; j < width; ++j) narrow(total[j], out[j]);
  }
}

template <typename L, typename T, typename I>
GRAPHSHARD_CLONES void sum_span(const SpmmArguments<T, I>& a, const Span& span, bool mean,
                                int64_t width, wide_t<T>* buffer) {
  if (span.slice >= 0) {
    sum_edges<L>(a, span.begin, span.end, buffer);
    return;
  }
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.csc.indptr[row];
    const int64_t end = a.csc.indptr[row + 1];
    T* out = a.out + row * width;
    if (end - begin > kSliceEdges) continue;
    if (begin == end) {
      for (int64_t j = 0; j < width; ++j) narrow(wide_t<T>{0}, out[j]);
      continue;
    }
    wide_t<T>* total = buffer;
    if constexpr (std::is_same_v<T, wide_t<T>>) total = out;
    sum_edges<L>(a, begin, end, total);
    store(total, width, end - begin, mean, out);
  }
}

template <typename L, typename T, typename I>
void run(const SpmmArguments<T, I>& a, bool mean, int num_threads) {
  using V = wide_t<T>;
  const int64_t width = a.loop.outer * a.loop.inner;
  const Schedule schedule = make_schedule(a.csc.indptr, a.csc.num_rows, width, num_threads);
  const auto partial = std::make_unique_for_overwrite<V[]>(schedule.num_slices * width);
  run_tasks(static_cast<int64_t>(schedule.spans.size()), num_threads, [&](int64_t i) {
    const Span& span = schedule.spans[i];
    if (span.slice >= 0) {
      sum_span<L>(a, span, mean, width, partial.get() + span.slice * width);
    } else {
      const auto buffer = std::make_unique_for_overwrite<V[]>(width);
      sum_span<L>(a, span, mean, width, buffer.get());
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
    store(total, width, degree, mean, a.out + hub.row * width);
  });
}

}  // namespace

template <typename T, typename I>
void spmm_sum(const SpmmArguments<T, I>& arguments, Op op, bool mean, int num_threads) {
  with_loop(op, arguments.loop,
            [&](auto loop) { run<decltype(loop)>(arguments, mean, num_threads); });
}

template void spmm_sum(const SpmmArguments<float, int32_t>&, Op, bool, int);
template void spmm_sum(const SpmmArguments<float, int64_t>&, Op, bool, int);
template void spmm_sum(const SpmmArguments<double, int32_t>&, Op, bool, int);
template void spmm_sum(const SpmmArguments<double, int64_t>&, Op, bool, int);
template void spmm_sum(const SpmmArguments<bfloat16, int32_t>&, Op, bool, int);
template void spmm_sum(const SpmmArguments<bfloat16, int64_t>&, Op, bool, int);

}  // namespace graphshard
