// SPDX-License-Identifier: Apache-2.0
// How a reduction walks over messages: a run of edges at a time, and for each run, blocks of
// columns whose accumulators stay in registers while the run's edges pass.

#pragma once

#include <algorithm>

#include "elementwise.h"
#include "parallel.h"
#include "spmm.h"

namespace graphshard {

// So many edges are taken at a time that their rows stay in the first-level cache while blocks of
// columns pass over them.
inline constexpr int64_t kEdgesAtATime = 64;

// Where a block of columns begins in row 0 of each operand.
template <typename T>
struct Columns {
  const T* lhs;
  const T* rhs;
};

template <typename L, typename T, typename I>
GRAPHSHARD_INLINE Columns<T> columns_at(const SpmmArguments<T, I>& a, int64_t outer,
                                        int64_t column) {
  Columns<T> columns{nullptr, nullptr};
  if constexpr (L::kLhs) {
    columns.lhs = a.lhs.data + a.loop.lhs_offsets[outer] + column * L::lhs_step(a.loop);
  }
  if constexpr (L::kRhs) {
    columns.rhs = a.rhs.data + a.loop.rhs_offsets[outer] + column * L::rhs_step(a.loop);
  }
  return columns;
}

// Requests what a later edge reads of these columns.
template <typename L, int kColumns, typename T, typename I>
GRAPHSHARD_INLINE void prefetch(const SpmmArguments<T, I>& a, Columns<T> columns,
                                int64_t position) {
  constexpr int kLine = 64 / sizeof(T);
  const int64_t ahead = std::min(position + kPrefetchAhead, a.csc.num_edges - 1);
  if constexpr (L::kLhs) {
    const T* row = columns.lhs + a.csc.indices[ahead] * a.lhs.width;
    for (int64_t j = 0; j < (L::lhs_step(a.loop) ? kColumns : 1); j += kLine)
      GRAPHSHARD_PREFETCH(row + j);
  }
  if constexpr (L::kRhs) {
    const T* row = columns.rhs + a.csc.edge_id(ahead) * a.rhs.width;
    for (int64_t j = 0; j < (L::rhs_step(a.loop) ? kColumns : 1); j += kLine)
      GRAPHSHARD_PREFETCH(row + j);
  }
}

// Calls store(j, message) for kColumns elements of the message of the edge at `position`.
template <typename L, int kColumns, typename T, typename I, typename Store>
GRAPHSHARD_INLINE void message(const SpmmArguments<T, I>& a, Columns<T> columns, int64_t position,
                               const Store& store) {
  prefetch<L, kColumns>(a, columns, position);
  const T* lhs = nullptr;
  const T* rhs = nullptr;
  if constexpr (L::kLhs) lhs = columns.lhs + a.csc.indices[position] * a.lhs.width;
  if constexpr (L::kRhs) rhs = columns.rhs + a.csc.edge_id(position) * a.rhs.width;
  L::run(a.loop, lhs, rhs, kColumns, store);
}

// Calls block(size, columns, at) for every block of columns of a message, where `at` is its place
// in a row of the result. Blocks have the given lengths if L is frequent.
template <typename L, int... kLengths, typename T, typename I, typename Block>
GRAPHSHARD_INLINE void for_each_block(const SpmmArguments<T, I>& a, const Block& block) {
  for (int64_t outer = 0; outer < a.loop.outer; ++outer) {
    const auto run = [&](auto size, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
      block(size, columns_at<L>(a, outer, column), outer * a.loop.inner + column);
    };
    if constexpr (L::kFrequent) {
      in_blocks<kLengths..., 1>(a.loop.inner, run);
    } else {
      in_blocks<16, 1>(a.loop.inner, run);
    }
  }
}

}  // namespace graphshard
