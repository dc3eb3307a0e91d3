// SPDX-License-Identifier: Apache-2.0
// [Note: short loops] While rows are on their way from memory, a core goes on with the next few
// hundred instructions, and asks for more of them. So the fewer instructions an edge and a row
// take, the more rows are on their way at once. With a width that the compiler knows the sum over
// the edges of a graph of 200,000 nodes takes a seventh less.

#include "spmm/fixed_width.h"

#include <algorithm>
#include <type_traits>

#include "runtime/edge_ids.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

template <typename T, typename I>
struct RowsOfEdges {
  const I* ids;
  const T* data;
  int64_t num_edges;
};

// Adds kColumns columns, from `column` on, of the rows of edges [begin, end).
template <int kWidth, int kColumns, typename T, typename I, typename Sums>
GRAPHSHARD_INLINE void add_rows(const RowsOfEdges<T, I>& rows, int64_t begin, int64_t end,
                                int column, Sums& sums) {
  constexpr int64_t kAhead = prefetch_distance(kWidth * sizeof(T));
  const auto add = [&](int64_t i) GRAPHSHARD_INLINE_LAMBDA {
    const T* from = rows.data + static_cast<int64_t>(rows.ids[i]) * kWidth + column;
    sums.add(from);
  };
  int64_t i = begin;
  for (const int64_t stop = std::min(end, rows.num_edges - kAhead); i < stop; ++i) {
    const int64_t later = static_cast<int64_t>(rows.ids[i + kAhead]);
    prefetch_values<kColumns>(rows.data + later * kWidth + column);
    add(i);
  }
  for (; i < end; ++i) add(i);
}

template <int kWidth, int kBytes, typename T, typename I>
GRAPHSHARD_INLINE void sum_rows(const SpmmArguments<T>& a, const RowsOfEdges<T, I>& rows,
                                const Span& span, SumResult result, wide_t<T>* buffer) {
  using V = wide_t<T>;
  constexpr int kColumns = std::min(kWidth, kMostColumns<T, kBytes>);
  for (int64_t row = span.first_row; row < span.last_row; ++row) {
    const int64_t begin = a.edges.begin(row);
    const int64_t end = a.edges.end(row);
    if (end - begin > kSliceEdges) continue;
    T* out = a.out + row * kWidth;
    if (begin == end && result == SumResult::kAdded) continue;
    const V* start = nullptr;
    if constexpr (std::is_same_v<T, V>) start = continues<T>(result) ? out : nullptr;
    const int64_t degree = std::max<int64_t>(end - begin, 1);
    int64_t first = begin;
    do {
      const int64_t last = std::min(first + kEdgesAtATime, end);
      for (int column = 0; column < kWidth; column += kColumns) {
        Columns<T, kColumns, kBytes> sums;
        if (start != nullptr) {
          sums.load(start + column);
        } else {
          sums.clear();
        }
        add_rows<kWidth, kColumns>(rows, first, last, column, sums);
        if (last == end) {
          write(sums, degree, result, out + column);
        } else {
          sums.store(buffer + column);
        }
      }
      start = buffer;
      first = last;
    } while (first < end);
  }
}

template <int kWidth, typename T, typename I>
void sum_ids(const SpmmArguments<T>& a, const RowsOfEdges<T, I>& rows, const Span& span,
             SumResult result, wide_t<T>* buffer) {
  dispatch<64>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
    // Narrow registers have other limits than instructions, and machines with them another loop.
    if constexpr (bytes > 16) sum_rows<kWidth, bytes>(a, rows, span, result, buffer);
  });
}

template <int kWidth, typename T>
void sum_fixed(const SpmmArguments<T>& a, Op op, const Span& span, SumResult result, int64_t,
               wide_t<T>* buffer) {
  const Ids& ids = op == Op::kCopyLhs ? a.edges.indices : a.edges.eids;
  const T* data = (op == Op::kCopyLhs ? a.lhs : a.rhs).data;
  if (const int64_t* wide = ids.wide()) {
    sum_ids<kWidth>(a, RowsOfEdges<T, int64_t>{wide, data, a.edges.num_edges}, span, result,
                    buffer);
  } else {
    sum_ids<kWidth>(a, RowsOfEdges<T, int32_t>{ids.narrow(), data, a.edges.num_edges}, span, result,
                    buffer);
  }
}

template <typename T>
SumRows<T> choose(int64_t width) {
  if (register_bytes() <= 16) return nullptr;
  if (width == 64) return sum_fixed<64, T>;
  if (width == 128) return sum_fixed<128, T>;
  if (width == 256) return sum_fixed<256, T>;
  return nullptr;
}

}  // namespace

template <>
SumRows<float> sum_rows_of_width(int64_t width) {
  return choose<float>(width);
}
template <>
SumRows<bfloat16> sum_rows_of_width(int64_t width) {
  return choose<bfloat16>(width);
}
template <>
SumRows<double> sum_rows_of_width(int64_t) {
  return nullptr;
}

}  // namespace graphshard
