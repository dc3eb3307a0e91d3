// SPDX-License-Identifier: Apache-2.0
// Some columns of a row in registers: sums of rows, their products, and totals of these.
//
// [Note: sums in registers] Sums over edges are kept in these and not in an array of numbers: the
// compiler moves an array to registers for the loop over edges only; before and after it the sums
// would go through memory, for every row.
//
// [Note: pairs of columns] Two bfloat16 side by side are the halves of a word: one shift and one
// mask make floats of whole vectors of them, but those of even columns come together, and those of
// odd ones. So columns are kept in this order while edges pass: a row needs no shuffle, neither to
// be read nor to be written.
//
// [Note: totals] Adding up the lanes of one vector takes about as many steps as the products did.
// Of four heads at once, half of each vector is added to half of another until four lanes are left,
// a total in each.
//
// Vectors are those of GCC and clang, on any processor. (Google Highway does the same behind
// intrinsics; pip has no package of its headers to build against.)

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "runtime/types.h"

namespace graphshard {

// Calls function(i) for i in [0, kCount), each a constant.
template <int kCount, typename Function>
GRAPHSHARD_INLINE void each(const Function& function) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) GRAPHSHARD_INLINE_LAMBDA {
    (function(std::integral_constant<int, kIndices>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// An array: for one or two columns, and where the compiler has no vectors.
template <typename T, int kColumns>
class PlainColumns {
  using V = wide_t<T>;

 public:
  GRAPHSHARD_INLINE void clear() {
    for (int j = 0; j < kColumns; ++j) values_[j] = 0;
  }
  // A row as it is stored, or as it is summed.
  template <typename From>
  GRAPHSHARD_INLINE void load(const From* row) {
    for (int j = 0; j < kColumns; ++j) values_[j] = widen(row[j]);
  }
  template <typename To>
  GRAPHSHARD_INLINE void store(To* row) const {
    for (int j = 0; j < kColumns; ++j) narrow(values_[j], row[j]);
  }
  GRAPHSHARD_INLINE void add(const T* row) {
    for (int j = 0; j < kColumns; ++j) values_[j] += widen(row[j]);
  }
  GRAPHSHARD_INLINE void add(const PlainColumns& other) {
    for (int j = 0; j < kColumns; ++j) values_[j] += other.values_[j];
  }
  GRAPHSHARD_INLINE void add_product(const T* row, V factor) {
#pragma omp simd
    for (int j = 0; j < kColumns; ++j) values_[j] += widen(row[j]) * factor;
  }
  GRAPHSHARD_INLINE void multiply(V factor) {
    for (int j = 0; j < kColumns; ++j) values_[j] *= factor;
  }
  GRAPHSHARD_INLINE void divide(V divisor) {
    for (int j = 0; j < kColumns; ++j) values_[j] /= divisor;
  }
  // The leaky ReLU.
  GRAPHSHARD_INLINE void rectify(V slope) {
    for (int j = 0; j < kColumns; ++j)
      values_[j] = values_[j] > 0 ? values_[j] : slope * values_[j];
  }
  GRAPHSHARD_INLINE V dot(const T* row) const {
    V total = 0;
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < kColumns; ++j) total += values_[j] * widen(row[j]);
    return total;
  }
  GRAPHSHARD_INLINE V dot(const PlainColumns& other) const {
    V total = 0;
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < kColumns; ++j) total += values_[j] * other.values_[j];
    return total;
  }

 private:
  V values_[kColumns];
};

#if defined(__GNUC__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define GRAPHSHARD_HAS_VECTORS
#endif
#endif

#if defined(GRAPHSHARD_HAS_VECTORS)
// Vectors are passed between functions that are all inlined: no ABI is concerned.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"

template <typename V, int kCount>
struct VectorOf {
  typedef V type __attribute__((vector_size(sizeof(V) * kCount)));
};
template <typename V, int kCount>
using Vector = typename VectorOf<V, kCount>::type;

// The sum of its two halves.
template <typename V, int kCount>
GRAPHSHARD_INLINE Vector<V, kCount / 2> folded(const Vector<V, kCount>& v) {
  return [&]<int... k>(std::integer_sequence<int, k...>) GRAPHSHARD_INLINE_LAMBDA {
    return __builtin_shufflevector(v, v, k...) + __builtin_shufflevector(v, v, (kCount / 2 + k)...);
  }(std::make_integer_sequence<int, kCount / 2>{});
}

template <typename V, int kCount>
GRAPHSHARD_INLINE V total(const Vector<V, kCount>& v) {
  if constexpr (kCount == 2) {
    return v[0] + v[1];
  } else {
    return total<V, kCount / 2>(folded<V, kCount>(v));
  }
}

// The totals of four vectors, see [Note: totals]. The shuffles of eight lanes stay within the
// halves of a vector, as processors have them.
template <typename V, int kCount>
GRAPHSHARD_INLINE Vector<V, 4> totals(const Vector<V, kCount>& a, const Vector<V, kCount>& b,
                                      const Vector<V, kCount>& c, const Vector<V, kCount>& d) {
  using W = Vector<V, kCount>;
  if constexpr (kCount * sizeof(V) > 32) {
    constexpr int kHalf = kCount / 2;
    return totals<V, kHalf>(folded<V, kCount>(a), folded<V, kCount>(b), folded<V, kCount>(c),
                            folded<V, kCount>(d));
  } else if constexpr (kCount == 8) {
    const W ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                 __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const W cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                 __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const W all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                  __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return folded<V, 8>(all);
  } else if constexpr (kCount == 4) {
    const W ab =
        __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const W cd =
        __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  } else {
    static_assert(kCount == 2);
    const W ab = __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
    const W cd = __builtin_shufflevector(c, d, 0, 2) + __builtin_shufflevector(c, d, 1, 3);
    return __builtin_shufflevector(ab, cd, 0, 1, 2, 3);
  }
}

// Vectors; of bfloat16 those of even columns, then those of odd ones.
template <typename T, int kColumns, int kBytes>
class VectorColumns {
 public:
  using V = wide_t<T>;
  static constexpr bool kInPairs = std::is_same_v<T, bfloat16>;
  // Columns whose numbers are next to each other in the lanes.
  static constexpr int kRun = kInPairs ? kColumns / 2 : kColumns;
  static constexpr int kLanes = std::min<int>(kRun, kBytes / sizeof(V));
  static constexpr int kParts = kColumns / kLanes;
  using Lanes = Vector<V, kLanes>;

  GRAPHSHARD_INLINE void clear() {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { parts_[part] = Lanes{}; });
  }
  // A row as it is stored.
  GRAPHSHARD_INLINE void load(const T* row) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { parts_[part] = part_of<part>(row); });
  }
  GRAPHSHARD_INLINE void store(T* row) const {
    if constexpr (!kInPairs) {
      each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
        std::memcpy(row + part * kLanes, &parts_[part], sizeof(Lanes));
      });
    } else {
      each<kParts / 2>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
        const Words even = rounded(parts_[part]);
        const Words odd = rounded(parts_[kParts / 2 + part]);
        const Words words =
            kFirstIsLow ? (even >> 16) | (odd & kUpper) : (odd >> 16) | (even & kUpper);
        std::memcpy(row + 2 * part * kLanes, &words, sizeof(words));
      });
    }
  }
  // A row as it is summed.
  GRAPHSHARD_INLINE void load(const V* row)
    requires(kInPairs)
  {
    each<kParts / 2>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
      Lanes first;
      Lanes second;
      std::memcpy(&first, row + 2 * part * kLanes, sizeof(Lanes));
      std::memcpy(&second, row + (2 * part + 1) * kLanes, sizeof(Lanes));
      [&]<int... k>(std::integer_sequence<int, k...>) GRAPHSHARD_INLINE_LAMBDA {
        parts_[part] = __builtin_shufflevector(first, second, (2 * k)...);
        parts_[kParts / 2 + part] = __builtin_shufflevector(first, second, (2 * k + 1)...);
      }(std::make_integer_sequence<int, kLanes>{});
    });
  }
  GRAPHSHARD_INLINE void store(V* row) const
    requires(kInPairs)
  {
    each<kParts / 2>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
      const Lanes& even = parts_[part];
      const Lanes& odd = parts_[kParts / 2 + part];
      [&]<int... k>(std::integer_sequence<int, k...>) GRAPHSHARD_INLINE_LAMBDA {
        const Lanes first = __builtin_shufflevector(even, odd, (k / 2 + k % 2 * kLanes)...);
        const Lanes second =
            __builtin_shufflevector(even, odd, (kLanes / 2 + k / 2 + k % 2 * kLanes)...);
        std::memcpy(row + 2 * part * kLanes, &first, sizeof(Lanes));
        std::memcpy(row + (2 * part + 1) * kLanes, &second, sizeof(Lanes));
      }(std::make_integer_sequence<int, kLanes>{});
    });
  }
  GRAPHSHARD_INLINE void add_product(const T* row, V factor) {
    each<kParts>([&](auto part)
                     GRAPHSHARD_INLINE_LAMBDA { parts_[part] += part_of<part>(row) * factor; });
  }
  GRAPHSHARD_INLINE void multiply(V factor) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { parts_[part] *= factor; });
  }
  GRAPHSHARD_INLINE void divide(V divisor) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { parts_[part] /= divisor; });
  }
  GRAPHSHARD_INLINE void add(const T* row) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { parts_[part] += part_of<part>(row); });
  }
  GRAPHSHARD_INLINE void add(const VectorColumns& other) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA { parts_[part] += other.parts_[part]; });
  }
  // The leaky ReLU.
  GRAPHSHARD_INLINE void rectify(V slope) {
    each<kParts>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
      const Lanes& lanes = parts_[part];
      parts_[part] = lanes > 0 ? lanes : lanes * slope;
    });
  }
  // What a dot product adds up, some of it added up already.
  GRAPHSHARD_INLINE Lanes products(const T* row) const {
    Lanes sum = parts_[0] * part_of<0>(row);
    each<kParts - 1>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
      sum += parts_[part + 1] * part_of<part + 1>(row);
    });
    return sum;
  }
  GRAPHSHARD_INLINE Lanes products(const VectorColumns& other) const {
    Lanes sum = parts_[0] * other.parts_[0];
    each<kParts - 1>([&](auto part) GRAPHSHARD_INLINE_LAMBDA {
      sum += parts_[part + 1] * other.parts_[part + 1];
    });
    return sum;
  }
  template <typename Other>
  GRAPHSHARD_INLINE V dot(const Other& other) const {
    return total<V, kLanes>(products(other));
  }

 private:
  using Words = Vector<uint32_t, kLanes>;
  static constexpr uint32_t kUpper = 0xffff0000u;
  static constexpr bool kFirstIsLow = std::endian::native == std::endian::little;

  template <int kPart>
  static GRAPHSHARD_INLINE Lanes part_of(const T* row) {
    if constexpr (!kInPairs) {
      Lanes lanes;
      std::memcpy(&lanes, row + kPart * kLanes, sizeof(lanes));
      return lanes;
    } else {
      constexpr bool kIsOdd = kPart >= kParts / 2;
      Words words;
      std::memcpy(&words, row + 2 * (kPart % (kParts / 2)) * kLanes, sizeof(words));
      return (Lanes)(kIsOdd == kFirstIsLow ? words & kUpper : words << 16);
    }
  }
  // What `narrow` makes of them, in the upper halves of words; the lower halves are any.
  static GRAPHSHARD_INLINE Words rounded(const Lanes& lanes) {
    const Words bits = (Words)lanes;
    const Words nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Words is_nan = (Words)(lanes != lanes);
    return (nearest & ~is_nan) | (is_nan & 0x7fc00000u);
  }

  Lanes parts_[kParts];
};

// kColumns columns of a row of T, in vectors of at most kBytes; see PlainColumns for what they do.
template <typename T, int kColumns, int kBytes>
using Columns = std::conditional_t<(kColumns > 2), VectorColumns<T, kColumns, kBytes>,
                                   PlainColumns<T, kColumns>>;

#else
template <typename T, int kColumns, int>
using Columns = PlainColumns<T, kColumns>;
#endif

// to[h] += <own[h], other(h)> for some heads, where other(h) is a row, or columns.
template <int kColumns, typename Lanes, int kHeads, typename V, typename Other>
GRAPHSHARD_INLINE void add_dots(const Lanes (&own)[kHeads], const Other& other, V* to) {
#if defined(GRAPHSHARD_HAS_VECTORS)
  if constexpr (kHeads == 4 && kColumns > 2) {
    Vector<V, 4> sums;
    std::memcpy(&sums, to, sizeof(sums));
    sums += totals<V, Lanes::kLanes>(own[0].products(other(0)), own[1].products(other(1)),
                                     own[2].products(other(2)), own[3].products(other(3)));
    std::memcpy(to, &sums, sizeof(sums));
    return;
  }
#endif
  each<kHeads>([&](auto h) GRAPHSHARD_INLINE_LAMBDA { to[h] += own[h].dot(other(h)); });
}

#if defined(GRAPHSHARD_HAS_VECTORS)
#pragma GCC diagnostic pop
#endif

}  // namespace graphshard
