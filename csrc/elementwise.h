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

// A loop with an operator and steps that the compiler knows: 1 for an operand that advances, 0 for
// one that stays. kAnyStep leaves the step to the RowLoop: one loop for all that is seldom used.
inline constexpr int kAnyStep = -1;

template <typename Operation_, int kLhsStep, int kRhsStep>
struct Loop {
  using Operation = Operation_;
  static constexpr bool kLhs = Operation::kLhs;
  static constexpr bool kRhs = Operation::kRhs;
  static constexpr bool kFrequent = kLhsStep != kAnyStep;

  static GRAPHSHARD_INLINE int64_t lhs_step(const RowLoop& loop) {
    return kLhsStep == kAnyStep ? loop.lhs_step : kLhsStep;
  }
  static GRAPHSHARD_INLINE int64_t rhs_step(const RowLoop& loop) {
    return kRhsStep == kAnyStep ? loop.rhs_step : kRhsStep;
  }

  // Calls store(j, value) for each of `size` steps. An operand that the operator does not look at
  // may be null.
  template <typename T, typename Store>
  static GRAPHSHARD_INLINE void run(const RowLoop& loop, const T* lhs, const T* rhs, int64_t size,
                                    const Store& store) {
    using V = wide_t<T>;
    const int64_t left_step = lhs_step(loop);
    const int64_t right_step = rhs_step(loop);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) {
      V left{};
      V right{};
      if constexpr (kLhs) left = widen(lhs[j * left_step]);
      if constexpr (kRhs) right = widen(rhs[j * right_step]);
      store(j, Operation::template apply<V>(left, right));
    }
  }
};

// Covers [0, size) with blocks of the given lengths, the last of which must be 1: as many of each
// as fit, in turn. Calls block(length, first); the compiler knows `length` as a constant.
template <int... kLengths, typename Block>
GRAPHSHARD_INLINE void in_blocks(int64_t size, const Block& block) {
  int64_t first = 0;
  const auto repeat = [&](auto length) GRAPHSHARD_INLINE_LAMBDA {
    for (; first + length <= size; first += length) block(length, first);
  };
  (repeat(std::integral_constant<int, kLengths>{}), ...);
}

// Calls function(Loop<...>{}) for a binary elementwise operator.
template <typename Function>
void with_binary_loop(Op op, const RowLoop& loop, const Function& function) {
  const bool both_advance = loop.lhs_step == 1 && loop.rhs_step == 1;
  switch (op) {
    case Op::kAdd:
      return function(Loop<Add, kAnyStep, kAnyStep>{});
    case Op::kSub:
      return function(Loop<Sub, kAnyStep, kAnyStep>{});
    case Op::kMul:
      if (both_advance) return function(Loop<Mul, 1, 1>{});
      if (loop.lhs_step == 1) return function(Loop<Mul, 1, 0>{});
      return function(Loop<Mul, kAnyStep, kAnyStep>{});
    case Op::kDiv:
      return function(Loop<Div, kAnyStep, kAnyStep>{});
    default:
      throw std::logic_error("not a binary elementwise operator");
  }
}

// Likewise, for the copies too.
template <typename Function>
void with_loop(Op op, const RowLoop& loop, const Function& function) {
  if (op == Op::kCopyLhs) return function(Loop<CopyLhs, 1, 1>{});
  if (op == Op::kCopyRhs) return function(Loop<CopyRhs, 1, 1>{});
  with_binary_loop(op, loop, function);
}

}  // namespace graphshard
