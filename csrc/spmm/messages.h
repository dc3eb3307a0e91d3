// SPDX-License-Identifier: Apache-2.0
// What a reduction reads along an edge: a block of columns of a message.
//
// Two kinds of message have loops of their own: a row of one operand as it is, and a row of lhs
// times one number per head of rhs. All other operators and broadcasts share one.

#pragma once

#include <algorithm>

#include "runtime/edge_ids.h"
#include "runtime/parallel.h"
#include "simd/columns.h"
#include "simd/elementwise.h"
#include "spmm/spmm.h"

namespace graphshard {

template <typename T>
int64_t bytes_of(const Rows<T>& rows) {
  return rows.width * static_cast<int64_t>(sizeof(T));
}

// Rows of one operand, each as it is.
template <typename T>
struct CopiedRows {
  using Value = T;
  Rows<T> rows;
  EdgeIds run;

  CopiedRows(const SpmmArguments<T>& a, Op op)
      : rows(op == Op::kCopyLhs ? a.lhs : a.rhs),
        run(op == Op::kCopyLhs ? a.edges.indices : a.edges.eids, a.edges.num_edges,
            bytes_of(rows)) {}

  GRAPHSHARD_INLINE int64_t outer() const { return 1; }
  GRAPHSHARD_INLINE int64_t inner() const { return rows.width; }
  // Turns to the edges [first, last), which the functions below count from 0.
  GRAPHSHARD_INLINE void load(int64_t first, int64_t last) { run.load(first, last); }
  // Requests kColumns values, from `column` on, of an edge soon after edge i.
  template <int kColumns>
  GRAPHSHARD_INLINE void prefetch(int64_t i, int64_t, int64_t column) const {
    prefetch_values<kColumns>(rows[run.ahead_of(i)] + column);
  }
  // Calls store(j, value) for kColumns values of edge i's message.
  template <int kColumns, typename Store>
  GRAPHSHARD_INLINE void message(int64_t i, int64_t, int64_t column, const Store& store) const {
    const T* from = rows[run[i]] + column;
#pragma omp simd
    for (int j = 0; j < kColumns; ++j) store(j, widen(from[j]));
  }
  // Adds kColumns values of edge i's message.
  template <int kColumns, typename Sums>
  GRAPHSHARD_INLINE void add_to(Sums& sums, int64_t i, int64_t, int64_t column) const {
    sums.add(rows[run[i]] + column);
  }
};

// What messages of two operands share.
template <typename T>
struct PairedRows {
  using Value = T;
  const SpmmArguments<T>& a;
  EdgeIds src;
  EdgeIds eids;

  explicit PairedRows(const SpmmArguments<T>& arguments)
      : a(arguments),
        src(a.edges.indices, a.edges.num_edges, bytes_of(a.lhs)),
        eids(a.edges.eids, a.edges.num_edges, bytes_of(a.lhs)) {}

  GRAPHSHARD_INLINE int64_t outer() const { return a.loop.outer; }
  GRAPHSHARD_INLINE int64_t inner() const { return a.loop.inner; }
  GRAPHSHARD_INLINE void load(int64_t first, int64_t last) {
    src.load(first, last);
    eids.load(first, last);
  }
  GRAPHSHARD_INLINE const T* lhs(int64_t row, int64_t outer) const {
    return a.lhs[row] + a.loop.lhs_offsets[outer];
  }
  GRAPHSHARD_INLINE const T* rhs(int64_t row, int64_t outer) const {
    return a.rhs[row] + a.loop.rhs_offsets[outer];
  }
};

// Rows of lhs, times one number of rhs for each of `outer` heads.
template <typename T>
struct ScaledRows : PairedRows<T> {
  using PairedRows<T>::PairedRows;

  template <int kColumns>
  GRAPHSHARD_INLINE void prefetch(int64_t i, int64_t head, int64_t column) const {
    prefetch_values<kColumns>(this->lhs(this->src.ahead_of(i), head) + column);
    GRAPHSHARD_PREFETCH(this->rhs(this->eids.ahead_of(i), head));
  }
  template <int kColumns, typename Store>
  GRAPHSHARD_INLINE void message(int64_t i, int64_t head, int64_t column,
                                 const Store& store) const {
    const T* from = this->lhs(this->src[i], head) + column;
    const auto scale = widen(*this->rhs(this->eids[i], head));
#pragma omp simd
    for (int j = 0; j < kColumns; ++j) store(j, widen(from[j]) * scale);
  }
  template <int kColumns, typename Sums>
  GRAPHSHARD_INLINE void add_to(Sums& sums, int64_t i, int64_t head, int64_t column) const {
    sums.add_product(this->lhs(this->src[i], head) + column,
                     widen(*this->rhs(this->eids[i], head)));
  }
};

// Messages of any operator and any broadcast.
template <typename T>
struct OtherMessages : PairedRows<T> {
  Op op;

  OtherMessages(const SpmmArguments<T>& a, Op op) : PairedRows<T>(a), op(op) {}

  template <int kColumns>
  GRAPHSHARD_INLINE void prefetch(int64_t i, int64_t outer, int64_t column) const {
    const RowLoop& loop = this->a.loop;
    prefetch_values<kColumns>(this->lhs(this->src.ahead_of(i), outer) + column * loop.lhs_step);
    prefetch_values<kColumns>(this->rhs(this->eids.ahead_of(i), outer) + column * loop.rhs_step);
  }
  template <int kColumns, typename Store>
  GRAPHSHARD_INLINE void message(int64_t i, int64_t outer, int64_t column,
                                 const Store& store) const {
    wide_t<T> left[kColumns];
    wide_t<T> right[kColumns];
    take(this->lhs(this->src[i], outer), this->a.loop.lhs_step, column, left);
    take(this->rhs(this->eids[i], outer), this->a.loop.rhs_step, column, right);
    combine(op, left, right, store);
  }
  template <int kColumns, typename Sums>
  GRAPHSHARD_INLINE void add_to(Sums& sums, int64_t i, int64_t outer, int64_t column) const {
    wide_t<T> values[kColumns];
    message<kColumns>(i, outer, column, [&](int j, wide_t<T> value) { values[j] = value; });
    Sums messages;
    messages.load(values);
    sums.add(messages);
  }
};

// Calls block(size, outer, column) for every block of columns of a message, of the given lengths.
template <int... kLengths, typename Messages, typename Block>
GRAPHSHARD_INLINE void for_each_block(const Messages& messages, const Block& block) {
  for (int64_t outer = 0; outer < messages.outer(); ++outer) {
    in_blocks<kLengths...>(messages.inner(),
                           [&](auto size, int64_t column)
                               GRAPHSHARD_INLINE_LAMBDA { block(size, outer, column); });
  }
}

}  // namespace graphshard
