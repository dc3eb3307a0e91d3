// SPDX-License-Identifier: Apache-2.0
// Value types, operator names and the shape of a row, shared by all kernels.

#pragma once

#include <bit>
#include <cstdint>

#include "simd/macros.h"

namespace graphshard {

// The upper half of a float: stored as such, computed with as float.
struct bfloat16 {
  uint16_t bits;
};

enum class Op { kAdd, kSub, kMul, kDiv, kDot, kCopyLhs, kCopyRhs };
enum class Reduce { kSum, kAdd, kMean, kMax, kMin };
enum class Target { kSrc, kDst, kEdge };

// How one row of lhs and one row of rhs combine: `outer` times a loop of `inner` steps, in which an
// operand advances or stays at its offset. One row of the result has outer * inner elements, or
// `outer` for a dot product.
struct RowLoop {
  int64_t outer;
  int64_t inner;
  const int64_t* lhs_offsets;
  const int64_t* rhs_offsets;
  int64_t lhs_step;  // 1 or 0
  int64_t rhs_step;
};

// Rows of `width` elements each.
template <typename T>
struct Rows {
  const T* data;
  int64_t width;

  GRAPHSHARD_INLINE const T* operator[](int64_t row) const { return data + row * width; }
};

// The type in which values of T are computed with and summed.
template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<bfloat16> {
  using type = float;
};
template <typename T>
using wide_t = typename Wide<T>::type;

GRAPHSHARD_INLINE float widen(float value) { return value; }
GRAPHSHARD_INLINE double widen(double value) { return value; }
GRAPHSHARD_INLINE float widen(bfloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

GRAPHSHARD_INLINE void narrow(float value, float& out) { out = value; }
GRAPHSHARD_INLINE void narrow(double value, double& out) { out = value; }
GRAPHSHARD_INLINE void narrow(float value, bfloat16& out) {
  // Round to nearest, ties to even; any NaN becomes the quiet one.
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

}  // namespace graphshard
