// SPDX-License-Identifier: Apache-2.0
// Which edges of a row are not there for a draw.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace graphshard {

// Excluded positions of one row, ascending.
struct Skipped {
  const int64_t* first = nullptr;
  const int64_t* last = nullptr;

  int64_t size() const { return last - first; }
};

// Given as a mask by position, as ascending positions, or not at all. Few edges are excluded from
// few rows, so a row without any must be passed by at once: the positions are indexed by their
// upper bits, with about four buckets per position.
class Exclusions {
 public:
  Exclusions(const uint8_t* mask, const int64_t* positions, int64_t count, int64_t num_edges)
      : mask_(mask), positions_(positions), count_(count) {
    if (count == 0) return;
    while ((num_edges >> shift_) > 4 * count) ++shift_;
    starts_.resize(static_cast<size_t>((num_edges >> shift_) + 2));
    int64_t at = 0;
    for (size_t bucket = 0; bucket < starts_.size(); ++bucket) {
      while (at < count && (positions[at] >> shift_) < static_cast<int64_t>(bucket)) ++at;
      starts_[bucket] = at;
    }
  }

  bool any() const { return mask_ != nullptr || count_ > 0; }

  // Those in [begin, end). `found` keeps what a mask says until the next call.
  Skipped of_row(int64_t begin, int64_t end, std::vector<int64_t>& found) const {
    if (mask_ != nullptr) {
      found.clear();
      for (int64_t at = begin; at < end;) {
        uint64_t eight = 1;
        if (end - at >= 8) std::memcpy(&eight, mask_ + at, 8);
        if (eight == 0) {
          at += 8;
          continue;
        }
        if (mask_[at] != 0) found.push_back(at);
        ++at;
      }
      return {found.data(), found.data() + found.size()};
    }
    if (count_ == 0) return {};
    const int64_t* first = lower_bound(begin);
    if (first == positions_ + count_ || *first >= end) return {};
    return {first, lower_bound(end)};
  }

 private:
  const int64_t* lower_bound(int64_t position) const {
    const size_t bucket = static_cast<size_t>(position >> shift_);
    return std::lower_bound(positions_ + starts_[bucket], positions_ + starts_[bucket + 1],
                            position);
  }

  const uint8_t* mask_;
  const int64_t* positions_;
  int64_t count_;
  int shift_ = 0;
  std::vector<int64_t> starts_;
};

}  // namespace graphshard
