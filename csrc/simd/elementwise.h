// SPDX-License-Identifier: Apache-2.0
// The binary operators, on blocks of columns.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "runtime/types.h"

namespace graphshard {

// Values `column` and after of an operand that advances with the inner loop, or the one value of an
// operand that stays.
template <int kColumns, typename T>
GRAPHSHARD_INLINE void take(const T* operand, int64_t step, int64_t column,
                            wide_t<T> (&values)[kColumns]) {
  if (step == 0) {
    for (int j = 0; j < kColumns; ++j) values[j] = widen(operand[0]);
  } else {
    for (int j = 0; j < kColumns; ++j) values[j] = widen(operand[column + j]);
  }
}

// Calls store(j, lhs[j] op rhs[j]) for every j. `op` is add, sub, mul or div.
template <int kColumns, typename V, typename Store>
GRAPHSHARD_INLINE void combine(Op op, const V (&lhs)[kColumns], const V (&rhs)[kColumns],
                               const Store& store) {
  switch (op) {
    case Op::kAdd:
      for (int j = 0; j < kColumns; ++j) store(j, lhs[j] + rhs[j]);
      break;
    case Op::kSub:
      for (int j = 0; j < kColumns; ++j) store(j, lhs[j] - rhs[j]);
      break;
    case Op::kMul:
      for (int j = 0; j < kColumns; ++j) store(j, lhs[j] * rhs[j]);
      break;
    default:
      for (int j = 0; j < kColumns; ++j) store(j, lhs[j] / rhs[j]);
  }
}

template <int kLonger, int kLength, int... kShorter, typename Block>
GRAPHSHARD_INLINE void in_blocks_after(int64_t first, int64_t size, const Block& block) {
  if constexpr (kLength < kLonger) {
    for (; first + kLength <= size; first += kLength) {
      block(std::integral_constant<int, kLength>{}, first);
    }
  }
  if constexpr (sizeof...(kShorter) > 0) {
    in_blocks_after<std::min(kLonger, kLength), kShorter...>(first, size, block);
  }
}

// Covers [0, size) with blocks of the given lengths, the last of which must be 1: as many of each
// as fit, in turn. Calls block(length, first); the compiler knows `length` as a constant. A length
// that is not below those before it is left out.
template <int... kLengths, typename Block>
GRAPHSHARD_INLINE void in_blocks(int64_t size, const Block& block) {
  in_blocks_after<std::numeric_limits<int>::max(), kLengths...>(0, size, block);
}

}  // namespace graphshard
