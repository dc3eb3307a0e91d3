// SPDX-License-Identifier: Apache-2.0
// How the sums of a destination become its row of the result.

#pragma once

#include <type_traits>

#include "simd/columns.h"
#include "spmm/spmm.h"

namespace graphshard {

// So many edges are taken at a time that their rows stay in the second-level cache while blocks of
// columns pass over them.
inline constexpr int64_t kEdgesAtATime = 64;

// The most columns that are summed at once: eight registers of sums.
template <typename T, int kBytes>
inline constexpr int kMostColumns = 8 * kBytes / static_cast<int>(sizeof(wide_t<T>));

// Whether the sums of a row begin with what is in the result: only there nothing is rounded.
template <typename T>
GRAPHSHARD_INLINE bool continues(SumResult result) {
  return std::is_same_v<T, wide_t<T>> && result == SumResult::kAdded;
}

// Writes the result of some columns of a row, given the sums of its `degree` messages.
template <typename T, typename Sums>
GRAPHSHARD_INLINE void write(Sums& sums, int64_t degree, SumResult result, T* out) {
  if (result == SumResult::kMean) sums.divide(static_cast<wide_t<T>>(degree));
  if (result == SumResult::kAdded && !continues<T>(result)) sums.add(out);
  sums.store(out);
}

}  // namespace graphshard
