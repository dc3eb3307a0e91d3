// SPDX-License-Identifier: Apache-2.0
// Random numbers that are functions of a key, an id and a counter. ops/counter_random.py says the
// same in torch, bit for bit: hence integers, or doubles with + - * / in a written order and
// nothing contracted (these sources are compiled with -ffp-contract=off).

#pragma once

#include <bit>
#include <cstdint>

#include "runtime/types.h"

namespace graphshard {

inline constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
inline constexpr uint64_t kRowDomain = 0x5851F42D4C957F2Du;
inline constexpr uint64_t kSourceDomain = 0xD1342543DE82EF95u;

// The finalizer of splitmix64.
GRAPHSHARD_INLINE uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

// The state of an id, given that of its key, mix(key ^ domain).
GRAPHSHARD_INLINE uint64_t state_of(uint64_t start, int64_t id) {
  return mix(start + static_cast<uint64_t>(id) * kGamma);
}

// Word number `counter` of a state.
GRAPHSHARD_INLINE uint64_t word_of(uint64_t state, uint64_t counter) {
  return mix(state + (counter + 1) * kGamma);
}

// floor(word * bound / 2^64), for bound < 2^31.
GRAPHSHARD_INLINE uint32_t below(uint64_t word, uint32_t bound) {
#if defined(__SIZEOF_INT128__)
  __extension__ using Product = unsigned __int128;
  return static_cast<uint32_t>((static_cast<Product>(word) * bound) >> 64);
#else
  const uint64_t low = (word & 0xFFFFFFFFu) * bound;
  return static_cast<uint32_t>(((word >> 32) * bound + (low >> 32)) >> 32);
#endif
}

// In [0, 1), a multiple of 2^-53.
GRAPHSHARD_INLINE double unit(uint64_t word) {
  return static_cast<double>(static_cast<int64_t>(word >> 11)) * 0x1p-53;
}

// The first step of `exponential`, apart from the second because compilers vectorize only that one:
// 2^53 u, for u in (0, 1] a multiple of 2^-53.
GRAPHSHARD_INLINE double scaled_unit(uint64_t word) {
  return static_cast<double>(static_cast<int64_t>(word >> 11) + 1);
}

// -log(u). With u = 2^e f, f in [sqrt(1/2), sqrt(2)]: log f = 2 atanh((f - 1) / (f + 1)), by its
// series, cut where the rest is below half a unit in the last place.
GRAPHSHARD_INLINE double exponential(double scaled) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: its lowest bits count ones
  const uint64_t bits = std::bit_cast<uint64_t>(scaled);
  const uint64_t mantissa = (bits & 0xFFFFFFFFFFFFFu) | 0x3FF0000000000000u;
  const double fraction = std::bit_cast<double>(mantissa);
  const bool large = fraction > 1.4142135623730951;
  const double f = large ? fraction * 0.5 : fraction;
  const uint64_t counted = std::bit_cast<uint64_t>(kMagic) + (bits >> 52);
  const double exponent =
      (std::bit_cast<double>(counted) - kMagic) - (large ? 1075.0 : 1076.0);  // 1023 + 53
  const double s = (f - 1.0) / (f + 1.0);
  const double square = s * s;
  double series = 2.0 / 23.0;
  series = series * square + 2.0 / 21.0;
  series = series * square + 2.0 / 19.0;
  series = series * square + 2.0 / 17.0;
  series = series * square + 2.0 / 15.0;
  series = series * square + 2.0 / 13.0;
  series = series * square + 2.0 / 11.0;
  series = series * square + 2.0 / 9.0;
  series = series * square + 2.0 / 7.0;
  series = series * square + 2.0 / 5.0;
  series = series * square + 2.0 / 3.0;
  series = series * square + 2.0;
  return -(exponent * 0.6931471805599453 + s * series);
}

}  // namespace graphshard
