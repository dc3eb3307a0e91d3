// SPDX-License-Identifier: Apache-2.0
// Ids of a run of edges, and of those that follow it soon enough to be requested from memory.

#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/csr.h"
#include "runtime/parallel.h"

namespace graphshard {

// Positions ahead at which rows of so many bytes are requested: wide rows soon fill what the cache
// can have on its way, of narrow ones more must be on their way.
inline constexpr int64_t kFarthestAhead = 64;
constexpr int64_t prefetch_distance(int64_t row_bytes) {
  return std::clamp(12288 / std::max<int64_t>(row_bytes, 1), kPrefetchAhead, kFarthestAhead);
}

// A run is a row's edges, or at most so many of them.
inline constexpr int64_t kLongestRun = 64;

// What an array of ids says about the edges of a run, and about those that follow it soon enough to
// be requested from memory: 64-bit numbers, whatever the array holds.
class EdgeIds {
 public:
  EdgeIds(const Ids& ids, int64_t num_edges, int64_t row_bytes)
      : ids_(ids), num_edges_(num_edges), ahead_(prefetch_distance(row_bytes)) {}

  // Turns to positions [first, last). Null ids are the positions themselves.
  GRAPHSHARD_INLINE void load(int64_t first, int64_t last) {
    const int64_t stop = std::min(last + kFarthestAhead, num_edges_);
    last_ = stop - first - 1;
    if (const int64_t* wide = ids_.wide()) {
      at_ = wide + first;
      return;
    }
    if (first < begin_ || stop > end_) widen_from(first);
    at_ = buffer_ + (first - begin_);
  }
  GRAPHSHARD_INLINE int64_t operator[](int64_t i) const { return at_[i]; }
  GRAPHSHARD_INLINE int64_t ahead_of(int64_t i) const { return at_[std::min(i + ahead_, last_)]; }
  // As far ahead as there are ids: for what is read for all edges of a run before their rows are.
  GRAPHSHARD_INLINE int64_t far_ahead_of(int64_t i) const {
    return at_[std::min(i + kFarthestAhead, last_)];
  }

 private:
  // Many rows' worth at a time, so that no position is converted again for each row.
  static constexpr int64_t kWindow = 512;
  static_assert(kWindow >= kLongestRun + kFarthestAhead);

  GRAPHSHARD_INLINE void widen_from(int64_t first) {
    begin_ = first;
    end_ = std::min(first + kWindow, num_edges_);
    const int64_t count = end_ - begin_;
    if (const int32_t* narrow = ids_.narrow()) {
      for (int64_t i = 0; i < count; ++i) buffer_[i] = narrow[first + i];
    } else {
      for (int64_t i = 0; i < count; ++i) buffer_[i] = first + i;
    }
  }

  Ids ids_;
  int64_t num_edges_;
  int64_t ahead_;
  const int64_t* at_ = nullptr;
  int64_t last_ = 0;
  int64_t begin_ = 0;  // positions that the buffer holds
  int64_t end_ = 0;
  int64_t buffer_[kWindow];
};

}  // namespace graphshard
