// SPDX-License-Identifier: Apache-2.0
// exp for arguments that are not positive, in plain arithmetic, so that compilers vectorize it.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by its Taylor polynomial, cut where the rest is below
// half a unit in the last place; 2^n by writing n into the exponent bits. Adding and subtracting
// 1.5 * 2^23 (2^52) rounds to an integer. NaN stays NaN, results below the normal range become 0.

#pragma once

#include <bit>
#include <cstdint>

#include "runtime/types.h"

namespace graphshard {

GRAPHSHARD_INLINE float exp_nonpositive(float x) {
  constexpr float kMagic = 12582912.0f;
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504088896341f + kMagic;
  const float n = shifted - kMagic;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kMagic);
  const float scale = std::bit_cast<float>((exponent + 127) << 23);
  return x < -87.0f ? 0.0f : p * scale;
}

GRAPHSHARD_INLINE double exp_nonpositive(double x) {
  constexpr double kMagic = 6755399441055744.0;
  const double clamped = x < -708.0 ? -708.0 : x;
  const double shifted = clamped * 1.4426950408889634074 + kMagic;
  const double n = shifted - kMagic;
  const double r = (clamped - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const int64_t exponent = std::bit_cast<int64_t>(shifted) - std::bit_cast<int64_t>(kMagic);
  const double scale = std::bit_cast<double>((exponent + 1023) << 52);
  return x < -708.0 ? 0.0 : p * scale;
}

}  // namespace graphshard
