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

#include "types.h"

namespace graphshard {

// One number, or as many where the compiler has no vectors.
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

  GRAPHSHARD_INLINE void add(const PlainLanes& other) {
    for (int j = 0; j < kCount; ++j) values_[j] += other.values_[j];
  }
  GRAPHSHARD_INLINE void add_product(const PlainLanes& other, V factor) {
    for (int j = 0; j < kCount; ++j) values_[j] += other.values_[j] * factor;
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
  template <typename E>
  struct Of {
    typedef E Type __attribute__((vector_size(sizeof(E) * kCount)));
  };
  typedef typename Of<V>::Type Vector;
  typedef typename Of<uint16_t>::Type Halves;
  typedef typename Of<uint32_t>::Type Words;

 public:
  GRAPHSHARD_INLINE VectorLanes() : values_{} {}  // zeros

  GRAPHSHARD_INLINE void load(const V* from) { std::memcpy(&values_, from, sizeof(values_)); }
  GRAPHSHARD_INLINE void load(const bfloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&values_, &words, sizeof(words));
  }
  GRAPHSHARD_INLINE void store(V* out) const { std::memcpy(out, &values_, sizeof(values_)); }
  // As `narrow` rounds.
  GRAPHSHARD_INLINE void store(bfloat16* out) const {
    Words words;
    std::memcpy(&words, &values_, sizeof(words));
    const Words rounded = (words + 0x7fffu + ((words >> 16) & 1u)) >> 16;
    const Words is_nan = reinterpret_cast<Words>(values_ != values_);
    const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), Halves);
    std::memcpy(out, &halves, sizeof(halves));
  }

  GRAPHSHARD_INLINE void add(const VectorLanes& other) { values_ += other.values_; }
  GRAPHSHARD_INLINE void add_product(const VectorLanes& other, V factor) {
    values_ += other.values_ * factor;
  }
  GRAPHSHARD_INLINE void divide(V divisor) { values_ /= divisor; }

 private:
  Vector values_;
};

template <typename V, int kCount>
using Lanes = std::conditional_t<kCount == 1, PlainLanes<V, 1>, VectorLanes<V, kCount>>;
#else
template <typename V, int kCount>
using Lanes = PlainLanes<V, kCount>;
#endif

// A block of kColumns numbers, as registers' worth of them.
template <typename V, int kColumns>
struct LaneBlock {
  static constexpr int kWidth = std::min<int>(kColumns, 64 / sizeof(V));
  static constexpr int kParts = kColumns / kWidth;
  static_assert(kParts * kWidth == kColumns);

  Lanes<V, kWidth> parts[kParts];

  // Calls visit(lanes, first column) for each.
  template <typename Visit>
  GRAPHSHARD_INLINE void for_each(const Visit& visit) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 16
#endif
    for (int part = 0; part < kParts; ++part) visit(parts[part], part * kWidth);
  }
};

}  // namespace graphshard
