// SPDX-License-Identifier: Apache-2.0
// How the sums of a destination become its row of the result.

#pragma once

#include <type_traits>

#include "simd/lanes.h"
#include "spmm/spmm.h"

namespace graphshard {

// So many edges are taken at a time that their rows stay in the second-level cache while blocks of
// columns pass over them.
inline constexpr int64_t kEdgesAtATime = 64;

// Whether the sums of a row begin with what is in the result: only there nothing is rounded.
template <typename T>
GRAPHSHARD_INLINE bool continues(SumResult result) {
  return std::is_same_v<T, wide_t<T>> && result == SumResult::kAdded;
}

// Writes the result of kColumns columns of a row, given the sums of its `degree` messages. `adds`
// tells that what is at `out` is not among the sums and belongs to them.
template <int kColumns, int kBytes, typename T>
GRAPHSHARD_INLINE void write(LaneBlock<T, kColumns, kBytes>& sums, int64_t degree, SumResult result,
                             bool adds, T* out) {
  using V = wide_t<T>;
  if (result == SumResult::kMean) {
    const V divisor = static_cast<V>(degree);
    sums.for_each([&](auto& sum, int) GRAPHSHARD_INLINE_LAMBDA { sum.divide(divisor); });
  }
  if (adds) {
    sums.for_each([&](auto& sum, int first) GRAPHSHARD_INLINE_LAMBDA { sum.add(out + first); });
  }
  sums.for_each([&](auto& sum, int first) GRAPHSHARD_INLINE_LAMBDA { sum.store(out + first); });
}

}  // namespace graphshard
