// SPDX-License-Identifier: Apache-2.0
// The binary operators, and the choice of a compiled loop for an operator and a RowLoop.

#pragma once

#include <stdexcept>
#include <type_traits>

#include "types.h"

namespace graphshard {

struct Add {
  static constexpr bool kLhs = true, kRhs = true;
  template <typename V>
  static GRAPHSHARD_INLINE V apply(V lhs, V rhs) {
    return lhs + rhs;
  }
};

struct Sub {
  static constexpr bool kLhs = true, kRhs = true;
  template <typename V>
  static GRAPHSHARD_INLINE V apply(V lhs, V rhs) {
    return lhs - rhs;
  }
};

struct Mul {
  static constexpr bool kLhs = true, kRhs = true;
  template <typename V>
  static GRAPHSHARD_INLINE V apply(V lhs, V rhs) {
    return lhs * rhs;
  }
};

struct Div {
  static constexpr bool kLhs = true, kRhs = true;
  template <typename V>
  static GRAPHSHARD_INLINE V apply(V lhs, V rhs) {
    return lhs / rhs;
  }
};

struct CopyLhs {
  static constexpr bool kLhs = true, kRhs = false;
  template <typename V>
  static GRAPHSHARD_INLINE V apply(V lhs, V) {
    return lhs;
  }
};

struct CopyRhs {
  static constexpr bool kLhs = false, kRhs = true;
  template <typename V>
  static GRAPHSHARD_INLINE V apply(V, V rhs) {
    return rhs;
  }
};

// One inner loop: calls store(j, value) for each step. `Operation` may ignore an operand, whose
// pointer may then be null.
template <typename Operation, bool kLhsAdvances, bool kRhsAdvances, typename T, typename Store>
GRAPHSHARD_INLINE void inner_loop(const T* lhs, const T* rhs, int64_t inner, const Store& store) {
  using V = wide_t<T>;
  const V lhs_still = Operation::kLhs && !kLhsAdvances ? widen(lhs[0]) : V{};
  const V rhs_still = Operation::kRhs && !kRhsAdvances ? widen(rhs[0]) : V{};
#pragma omp simd
  for (int64_t j = 0; j < inner; ++j) {
    V left = lhs_still;
    V right = rhs_still;
    if constexpr (Operation::kLhs && kLhsAdvances) left = widen(lhs[j]);
    if constexpr (Operation::kRhs && kRhsAdvances) right = widen(rhs[j]);
    store(j, Operation::template apply<V>(left, right));
  }
}

// Covers [0, size) with blocks whose length the compiler knows: calls block(length, first), where
// `length` converts to a constant.
template <typename Block>
GRAPHSHARD_INLINE void in_blocks(int64_t size, const Block& block) {
  int64_t first = 0;
  for (; first + 64 <= size; first += 64) block(std::integral_constant<int, 64>{}, first);
  for (; first + 16 <= size; first += 16) block(std::integral_constant<int, 16>{}, first);
  for (; first + 4 <= size; first += 4) block(std::integral_constant<int, 4>{}, first);
  for (; first < size; ++first) block(std::integral_constant<int, 1>{}, first);
}

template <typename Operation, bool kLhsAdvances, bool kRhsAdvances>
struct Loop {
  using operation = Operation;
  static constexpr bool lhs_advances = kLhsAdvances;
  static constexpr bool rhs_advances = kRhsAdvances;
};

template <typename Operation, typename Function>
void with_advances(const RowLoop& loop, const Function& function) {
  if (loop.lhs_advances && loop.rhs_advances) return function(Loop<Operation, true, true>{});
  if (loop.lhs_advances) return function(Loop<Operation, true, false>{});
  if (loop.rhs_advances) return function(Loop<Operation, false, true>{});
  throw std::logic_error("a row loop in which no operand advances");
}

// Calls function(Loop<...>{}) for a binary elementwise operator.
template <typename Function>
void with_binary_loop(Op op, const RowLoop& loop, const Function& function) {
  switch (op) {
    case Op::kAdd:
      return with_advances<Add>(loop, function);
    case Op::kSub:
      return with_advances<Sub>(loop, function);
    case Op::kMul:
      return with_advances<Mul>(loop, function);
    case Op::kDiv:
      return with_advances<Div>(loop, function);
    default:
      throw std::logic_error("not a binary elementwise operator");
  }
}

// Likewise, for the copies too.
template <typename Function>
void with_loop(Op op, const RowLoop& loop, const Function& function) {
  if (op == Op::kCopyLhs) return function(Loop<CopyLhs, true, true>{});
  if (op == Op::kCopyRhs) return function(Loop<CopyRhs, true, true>{});
  with_binary_loop(op, loop, function);
}

}  // namespace graphshard
