// SPDX-License-Identifier: Apache-2.0

#include "spmm/argmax.h"

#include <algorithm>
#include <stdexcept>

#include "runtime/parallel.h"

namespace graphshard {
namespace {

constexpr int64_t kColumnsPerTask = 16;  // a cache line of float

template <typename T, typename I>
struct Winner {
  int64_t edge;
  wide_t<T> grad;
  wide_t<T> lhs;
  wide_t<T> rhs;
};

[[noreturn]] void refuse_winner() {
  throw std::out_of_range("an id in arg must be that of an edge, or -1 for none");
}

// The winner of element j of `row`, -1 for none; what the operator does not look at is 1. An id of
// no edge is none, and noted in `is_wrong`: a comparison takes the place of that with 0.
template <typename T, typename I>
GRAPHSHARD_INLINE Winner<T, I> winner_of(const WinnersArguments<T, I>& a, int64_t row, int64_t j,
                                         bool& is_wrong) {
  const int64_t at = row * a.width + j;
  const int64_t edge = static_cast<int64_t>(a.arg[at]);
  Winner<T, I> winner{edge, widen(a.grad[at]), 1, 1};
  if (static_cast<uint64_t>(edge) >= a.num_edges) {
    is_wrong |= edge >= 0;
    winner.edge = -1;
    return winner;
  }
  if (a.lhs.data != nullptr) winner.lhs = widen(a.lhs[a.src[edge]][a.lhs_places[j]]);
  if (a.rhs.data != nullptr) winner.rhs = widen(a.rhs[edge][a.rhs_places[j]]);
  return winner;
}

template <typename T, typename I>
GRAPHSHARD_INLINE void lhs_columns(const WinnersArguments<T, I>& a, Op op, int64_t first,
                                   int64_t last, wide_t<T>* lhs_grad) {
  bool is_wrong = false;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    for (int64_t j = first; j < last; ++j) {
      const Winner<T, I> winner = winner_of(a, row, j, is_wrong);
      if (winner.edge < 0) continue;
      const wide_t<T> share = op == Op::kMul   ? winner.grad * winner.rhs
                              : op == Op::kDiv ? winner.grad / winner.rhs
                                               : winner.grad;
      lhs_grad[a.src[winner.edge] * a.width + j] += share;
    }
  }
  if (is_wrong) refuse_winner();
}

template <typename T, typename I>
void rhs_rows(const WinnersArguments<T, I>& a, Op op, int64_t first, int64_t last,
              wide_t<T>* rhs_grad, int64_t rhs_width) {
  bool is_wrong = false;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t j = 0; j < a.width; ++j) {
      const Winner<T, I> winner = winner_of(a, row, j, is_wrong);
      if (winner.edge < 0) continue;
      const wide_t<T> share = op == Op::kMul ? winner.grad * winner.lhs
                              : op == Op::kDiv
                                  ? -winner.grad * winner.lhs / (winner.rhs * winner.rhs)
                              : op == Op::kSub ? -winner.grad
                                               : winner.grad;
      rhs_grad[winner.edge * rhs_width + a.rhs_places[j]] += share;
    }
  }
  if (is_wrong) refuse_winner();
}

}  // namespace

// One source may win in many rows, so a thread takes columns of lhs_grad; an edge wins in the row
// of its destination alone, so a thread takes rows of rhs_grad. Either way sums keep their order.
template <typename T, typename I>
void winners_backward(const WinnersArguments<T, I>& a, Op op, wide_t<T>* lhs_grad,
                      wide_t<T>* rhs_grad, int64_t rhs_width, int num_threads) {
  if (lhs_grad != nullptr) {
    const int64_t tasks = num_threads > 1 ? (a.width + kColumnsPerTask - 1) / kColumnsPerTask : 1;
    run_tasks(tasks, num_threads, [&](int64_t task) {
      const int64_t first = task * kColumnsPerTask;
      lhs_columns(a, op, first, tasks == 1 ? a.width : std::min(first + kColumnsPerTask, a.width),
                  lhs_grad);
    });
  }
  if (rhs_grad != nullptr) {
    const int64_t grain = 16384 / std::max<int64_t>(a.width, 1);
    const int64_t parts = num_parts(a.num_rows, grain, num_threads);
    run_tasks(parts, num_threads, [&](int64_t part) {
      rhs_rows(a, op, part_begin(a.num_rows, part, parts), part_begin(a.num_rows, part + 1, parts),
               rhs_grad, rhs_width);
    });
  }
}

template <typename T, typename I, typename E>
void merge_best(const Candidates<T, I, E>& a, int64_t size, bool smallest, int64_t none, T* best,
                E* edge, int num_threads) {
  using V = wide_t<T>;
  constexpr int64_t kGrain = 16384;
  const V sign = smallest ? -1 : 1;
  const int64_t parts = num_parts(size, kGrain, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t last = part_begin(size, part + 1, parts);
    // Without ids, any place is one: all that is not negative.
    const uint64_t num_ids = a.ids == nullptr ? uint64_t{1} << 63 : a.num_ids;
    bool is_wrong = false;
    for (int64_t i = part_begin(size, part, parts); i < last; ++i) {
      const int64_t place = static_cast<int64_t>(a.arg[i]);
      if (static_cast<uint64_t>(place) >= num_ids) {
        is_wrong |= place >= 0;
        continue;
      }
      const V candidate = sign * widen(a.value[i]);
      const V before = sign * widen(best[i]);
      if (edge[i] != none && (candidate < before || (before != before && candidate == candidate))) {
        continue;
      }
      const E id = a.ids == nullptr ? static_cast<E>(place) : a.ids[place];
      const bool is_tie = candidate == before || (candidate != candidate && before != before);
      if (edge[i] != none && is_tie && id > edge[i]) continue;
      best[i] = a.value[i];
      edge[i] = id;
    }
    if (is_wrong) refuse_winner();
  });
}

#define GRAPHSHARD_WINNERS(T, I)                                                                   \
  template void winners_backward(const WinnersArguments<T, I>&, Op, wide_t<T>*, wide_t<T>*,        \
                                 int64_t, int);                                                    \
  template void merge_best(const Candidates<T, I, int32_t>&, int64_t, bool, int64_t, T*, int32_t*, \
                           int);                                                                   \
  template void merge_best(const Candidates<T, I, int64_t>&, int64_t, bool, int64_t, T*, int64_t*, \
                           int);
GRAPHSHARD_WINNERS(float, int32_t)
GRAPHSHARD_WINNERS(float, int64_t)
GRAPHSHARD_WINNERS(double, int32_t)
GRAPHSHARD_WINNERS(double, int64_t)
GRAPHSHARD_WINNERS(bfloat16, int32_t)
GRAPHSHARD_WINNERS(bfloat16, int64_t)
#undef GRAPHSHARD_WINNERS

}  // namespace graphshard
