// SPDX-License-Identifier: Apache-2.0
// Sums take a run of edges at a time, and for each run, blocks of columns whose sums stay in
// registers while the run's edges pass.

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

// The messages of some edges of one row, at least one, and where their sum goes.
template <typename T>
struct RowTask {
  int64_t begin;
  int64_t end;
  const wide_t<T>* start;  // what is added to; null for zero
  wide_t<T>* partial;      // room for a row
  T* out;                  // null if the sum is to be left in `partial`
};

template <int kBytes, int... kLengths, typename Messages, typename T>
GRAPHSHARD_INLINE void sum_row(Messages& messages, const RowTask<T>& task, SumResult result) {
  for (int64_t first = task.begin; first < task.end; first += kEdgesAtATime) {
    const int64_t count = std::min(kEdgesAtATime, task.end - first);
    const bool is_last = first + count == task.end && task.out != nullptr;
    const wide_t<T>* from = first == task.begin ? task.start : task.partial;
    messages.load(first, first + count);
    int64_t at = 0;
    for_each_block<kLengths...>(
        messages, [&](auto size, int64_t outer, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
          Columns<typename Messages::Value, size, kBytes> sums;
          if (from != nullptr) {
            sums.load(from + at);
          } else {
            sums.clear();
          }
          for (int64_t i = 0; i < count; ++i) {
            messages.template prefetch<size>(i, outer, column);
            messages.template add_to<size>(sums, i, outer, column);
          }
          if (is_last) {
            write(sums, task.end - task.begin, result, task.out + at);
          } else {
            sums.store(task.partial + at);
          }
          at += size;
        });
  }
}

// The rows of a span, or the slice that it is; `partial` is one row wide.
template <int kBytes, int... kLengths, typename Messages, typename T>
GRAPHSHARD_INLINE void sum_span(const SpmmArguments<T>& a, Messages messages, const Span& span,
                                SumResult result, int64_t width, wide_t<T>* partial) {
  using V = wide_t<T>;
  const bool is_slice = span.slice >= 0;
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    T* out = a.out + row * width;
    RowTask<T> task{a.edges.begin(row), a.edges.end(row), nullptr, partial, out};
    if (is_slice) {
      task = {span.begin, span.end, nullptr, partial, nullptr};
    } else if (task.end - task.begin > kSliceEdges) {
      continue;
    } else if (task.begin == task.end) {
      if (result == SumResult::kAdded) continue;
      for (int64_t j = 0; j < width; ++j) narrow(V{0}, out[j]);
      continue;
    }
    if constexpr (std::is_same_v<T, V>) {
      if (!is_slice && continues<T>(result)) task.start = out;
    }
    sum_row<kBytes, kLengths...>(messages, task, result);
  }
}

template <int kBytes, typename Messages, typename T>
GRAPHSHARD_INLINE void sum_frequent(const SpmmArguments<T>& a, const Messages& messages,
                                    const Span& span, SumResult result, int64_t width,
                                    wide_t<T>* partial) {
  constexpr int kMost = kMostColumns<T, kBytes>;
  sum_span<kBytes, kMost, kMost / 2, std::max(kMost / 4, 4), std::max(kMost / 8, 4), 8, 4, 1>(
      a, messages, span, result, width, partial);
}

template <typename T>
void sum_copied(const SpmmArguments<T>& a, Op op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* partial) {
  dispatch<kWidestRegister<T>>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    sum_frequent<bytes>(a, CopiedRows<T>(a, op), span, result, width, partial);
  });
}

template <typename T>
void sum_scaled(const SpmmArguments<T>& a, Op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* partial) {
  dispatch<kWidestRegister<T>>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    sum_frequent<bytes>(a, ScaledRows<T>(a), span, result, width, partial);
  });
}

template <typename T>
void sum_others(const SpmmArguments<T>& a, Op op, const Span& span, SumResult result, int64_t width,
                wide_t<T>* partial) {
  sum_span<kLeastRegisterBytes, 16, 1>(a, OtherMessages<T>(a, op), span, result, width, partial);
}

template <typename T>
auto* choose(const SpmmArguments<T>& a, Op op, int64_t width) {
  if (op == Op::kCopyLhs || op == Op::kCopyRhs) {
    const auto sum_fixed = sum_rows_of_width<T>(width);
    const bool has_ids = op == Op::kCopyLhs || a.edges.eids;
    return sum_fixed != nullptr && has_ids ? sum_fixed : sum_copied<T>;
  }
  if (op == Op::kMul && a.loop.lhs_step == 1 && a.loop.rhs_step == 0) return sum_scaled<T>;
  return sum_others<T>;
}

// The sums of the slices of a row with many edges, added in order.
template <typename T>
void join_slices(const SpmmArguments<T>& a, const LongRow& row, SumResult result, int64_t width,
                 wide_t<T>* partial) {
  using V = wide_t<T>;
  V* total = partial + row.first_slice * width;
  for (int64_t slice = row.first_slice + 1; slice < row.last_slice; ++slice) {
    const V* other = partial + slice * width;
    for (int64_t j = 0; j < width; ++j) total[j] += other[j];
  }
  const int64_t degree = a.edges.end(row.row) - a.edges.begin(row.row);
  T* out = a.out + row.row * width;
  for (int64_t j = 0; j < width; ++j) {
    PlainColumns<T, 1> sum;
    sum.load(total + j);
    if (continues<T>(result)) sum.add(out + j);
    write(sum, degree, result, out + j);
  }
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
  run_tasks(static_cast<int64_t>(schedule.long_rows.size()), num_threads, [&](int64_t i) {
    join_slices(a, schedule.long_rows[i], result, width, partial.get());
  });
}

template void spmm_sum(const SpmmArguments<float>&, Op, SumResult, int);
template void spmm_sum(const SpmmArguments<double>&, Op, SumResult, int);
template void spmm_sum(const SpmmArguments<bfloat16>&, Op, SumResult, int);

}  // namespace graphshard
