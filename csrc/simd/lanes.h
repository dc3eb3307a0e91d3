// SPDX-License-Identifier: Apache-2.0
// Numbers side by side in a register.
//
// [Note: sums in registers] Sums over edges are kept in these and not in an array of numbers: the
// compiler moves an array to registers for the loop over edges only; before and after it the sums
// would go by memory, for every row.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "runtime/types.h"

namespace graphshard {

// An array: for one number, for bfloat16, whose widening compilers do best in loops over whole
// blocks, and where the compiler has no vectors.
template <typename V, int kCount>
class PlainLanes {
 public:
  template <typename T>
  GRAPHSHARD_INLINE void load(const T* from) {
    for (int j = 0; j < kCount; ++j) values_[j] = widen(from[j]);
  }
  template <typename T>
  GRAPHSHARD_INLINE void store(T* out) const {
    for (int j = 0; j < kCount; ++j) narrow(values_[j], out[j]);
  }
  template <typename T>
  GRAPHSHARD_INLINE void add(const T* from) {
#pragma omp simd
    for (int j = 0; j < kCount; ++j) values_[j] += widen(from[j]);
  }
  template <typename T>
  GRAPHSHARD_INLINE void add_product(const T* from, V factor) {
#pragma omp simd
    for (int j = 0; j < kCount; ++j) values_[j] += widen(from[j]) * factor;
  }
  GRAPHSHARD_INLINE void divide(V divisor) {
    for (int j = 0; j < kCount; ++j) values_[j] /= divisor;
  }

 private:
  V values_[kCount] = {};
};

#if defined(__GNUC__)
template <typename V, int kCount>
class VectorLanes {
  typedef V Vector __attribute__((vector_size(sizeof(V) * kCount)));

 public:
  GRAPHSHARD_INLINE VectorLanes() : values_{} {}  // zeros

  GRAPHSHARD_INLINE void load(const V* from) { std::memcpy(&values_, from, sizeof(values_)); }
  GRAPHSHARD_INLINE void store(V* out) const { std::memcpy(out, &values_, sizeof(values_)); }
  GRAPHSHARD_INLINE void add(const V* from) {
    Vector values;
    std::memcpy(&values, from, sizeof(values));
    values_ += values;
  }
  GRAPHSHARD_INLINE void add_product(const V* from, V factor) {
    Vector values;
    std::memcpy(&values, from, sizeof(values));
    values_ += values * factor;
  }
  GRAPHSHARD_INLINE void divide(V divisor) { values_ /= divisor; }

 private:
  Vector values_;
};
template <typename T, int kCount>
inline constexpr bool kHasVector = kCount > 1 && std::is_same_v<T, wide_t<T>>;
#else
template <typename V, int kCount>
using VectorLanes = PlainLanes<V, kCount>;
template <typename T, int kCount>
inline constexpr bool kHasVector = false;
#endif

// Calls function(i) for i in [0, kCount), each a constant.
template <int kCount, typename Function>
GRAPHSHARD_INLINE void each(const Function& function) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) GRAPHSHARD_INLINE_LAMBDA {
    (function(std::integral_constant<int, kIndices>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Sums of kColumns numbers of type T: as many registers of kBytes as they take, or one array.
template <typename T, int kColumns, int kBytes>
struct LaneBlock {
  using V = wide_t<T>;
  static constexpr int kWidth =
      kHasVector<T, kColumns> ? std::min<int>(kColumns, kBytes / sizeof(V)) : kColumns;
  static constexpr int kParts = kColumns / kWidth;
  static_assert(kParts * kWidth == kColumns);
  using Part =
      std::conditional_t<kHasVector<T, kColumns>, VectorLanes<V, kWidth>, PlainLanes<V, kWidth>>;

  Part parts[kParts];

  // Calls visit(lanes, first column) for each.
  template <typename Visit>
  GRAPHSHARD_INLINE void for_each(const Visit& visit) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { visit(parts[part], part * kWidth); });
  }
};

}  // namespace graphshard
