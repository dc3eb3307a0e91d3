// SPDX-License-Identifier: Apache-2.0

#include "spmm/argmax.h"

#include <algorithm>
#include <stdexcept>

#include "runtime/parallel.h"

namespace graphshard {
namespace {

constexpr int64_t kColumnsPerTask = 16;  // a cache line of float

// The edge that an element of the result came from, -1 for none; what the operator does not look at
// is 1.
template <typename T>
struct Origin {
  int64_t edge;
  wide_t<T> grad;
  wide_t<T> lhs;
  wide_t<T> rhs;
};

[[noreturn]] void refuse_arg() {
  throw std::out_of_range("an id in arg must be that of an edge, or -1 for none");
}

// Ids of one type, which are read element by element.
template <typename I>
struct TypedIds {
  const I* arg;
  const I* src;
};

// Of element j of `row`. An id of no edge is none, and noted in `is_wrong`: a comparison takes the
// place of that with 0.
template <typename T, typename I>
GRAPHSHARD_INLINE Origin<T> origin_of(const ArgmaxArguments<T>& a, const TypedIds<I>& ids,
                                      int64_t row, int64_t j, bool& is_wrong) {
  const int64_t at = row * a.width + j;
  const int64_t edge = static_cast<int64_t>(ids.arg[at]);
  Origin<T> origin{edge, widen(a.grad[at]), 1, 1};
  if (static_cast<uint64_t>(edge) >= a.num_edges) {
    is_wrong |= edge >= 0;
    origin.edge = -1;
    return origin;
  }
  if (a.lhs.data != nullptr) origin.lhs = widen(a.lhs[ids.src[edge]][a.lhs_places[j]]);
  if (a.rhs.data != nullptr) origin.rhs = widen(a.rhs[edge][a.rhs_places[j]]);
  return origin;
}

template <typename T, typename I>
void lhs_columns(const ArgmaxArguments<T>& a, const TypedIds<I>& ids, Op op, int64_t first,
                 int64_t last, wide_t<T>* lhs_grad) {
  bool is_wrong = false;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    for (int64_t j = first; j < last; ++j) {
      const Origin<T> origin = origin_of(a, ids, row, j, is_wrong);
      if (origin.edge < 0) continue;
      const wide_t<T> share = op == Op::kMul   ? origin.grad * origin.rhs
                              : op == Op::kDiv ? origin.grad / origin.rhs
                                               : origin.grad;
      lhs_grad[ids.src[origin.edge] * a.width + j] += share;
    }
  }
  if (is_wrong) refuse_arg();
}

template <typename T, typename I>
void rhs_rows(const ArgmaxArguments<T>& a, const TypedIds<I>& ids, Op op, int64_t first,
              int64_t last, wide_t<T>* rhs_grad, int64_t rhs_width) {
  bool is_wrong = false;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t j = 0; j < a.width; ++j) {
      const Origin<T> origin = origin_of(a, ids, row, j, is_wrong);
      if (origin.edge < 0) continue;
      const wide_t<T> share = op == Op::kMul ? origin.grad * origin.lhs
                              : op == Op::kDiv
                                  ? -origin.grad * origin.lhs / (origin.rhs * origin.rhs)
                              : op == Op::kSub ? -origin.grad
                                               : origin.grad;
      rhs_grad[origin.edge * rhs_width + a.rhs_places[j]] += share;
    }
  }
  if (is_wrong) refuse_arg();
}

// One source may have the maximum of many rows, so a thread takes columns of lhs_grad; an edge has
// maxima in the row of its destination alone, so a thread takes rows of rhs_grad. Either way sums
// keep their order.
template <typename T, typename I>
void add_gradients(const ArgmaxArguments<T>& a, const TypedIds<I>& ids, Op op, wide_t<T>* lhs_grad,
                   wide_t<T>* rhs_grad, int64_t rhs_width, int num_threads) {
  if (lhs_grad != nullptr) {
    const int64_t tasks = num_threads > 1 ? (a.width + kColumnsPerTask - 1) / kColumnsPerTask : 1;
    run_tasks(tasks, num_threads, [&](int64_t task) {
      const int64_t first = task * kColumnsPerTask;
      const int64_t last = tasks == 1 ? a.width : std::min(first + kColumnsPerTask, a.width);
      lhs_columns(a, ids, op, first, last, lhs_grad);
    });
  }
  if (rhs_grad != nullptr) {
    const int64_t grain = 16384 / std::max<int64_t>(a.width, 1);
    const int64_t parts = num_parts(a.num_rows, grain, num_threads);
    run_tasks(parts, num_threads, [&](int64_t part) {
      rhs_rows(a, ids, op, part_begin(a.num_rows, part, parts),
               part_begin(a.num_rows, part + 1, parts), rhs_grad, rhs_width);
    });
  }
}

}  // namespace

template <typename T>
void argmax_backward(const ArgmaxArguments<T>& a, Op op, wide_t<T>* lhs_grad, wide_t<T>* rhs_grad,
                     int64_t rhs_width, int num_threads) {
  if (a.arg.wide() != nullptr) {
    const TypedIds<int64_t> ids{a.arg.wide(), a.src.wide()};
    add_gradients(a, ids, op, lhs_grad, rhs_grad, rhs_width, num_threads);
  } else {
    const TypedIds<int32_t> ids{a.arg.narrow(), a.src.narrow()};
    add_gradients(a, ids, op, lhs_grad, rhs_grad, rhs_width, num_threads);
  }
}

template <typename T>
void merge_best(const Candidates<T>& a, int64_t size, bool smallest, int64_t none, T* best,
                WritableIds edge, int num_threads) {
  using V = wide_t<T>;
  constexpr int64_t kGrain = 16384;
  const V sign = smallest ? -1 : 1;
  const int64_t parts = num_parts(size, kGrain, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t last = part_begin(size, part + 1, parts);
    // Without ids, any place is one: all that is not negative.
    const uint64_t num_ids = a.ids ? a.num_ids : uint64_t{1} << 63;
    bool is_wrong = false;
    for (int64_t i = part_begin(size, part, parts); i < last; ++i) {
      const int64_t place = a.arg[i];
      if (static_cast<uint64_t>(place) >= num_ids) {
        is_wrong |= place >= 0;
        continue;
      }
      const V candidate = sign * widen(a.value[i]);
      const V before = sign * widen(best[i]);
      const int64_t held = edge[i];
      if (held != none && (candidate < before || (before != before && candidate == candidate))) {
        continue;
      }
      const int64_t id = a.ids ? a.ids[place] : place;
      const bool is_tie = candidate == before || (candidate != candidate && before != before);
      if (held != none && is_tie && id > held) continue;
      best[i] = a.value[i];
      edge.set(i, id);
    }
    if (is_wrong) refuse_arg();
  });
}

#define INSTANTIATE(T)                                                                          \
  template void argmax_backward(const ArgmaxArguments<T>&, Op, wide_t<T>*, wide_t<T>*, int64_t, \
                                int);                                                           \
  template void merge_best(const Candidates<T>&, int64_t, bool, int64_t, T*, WritableIds, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
