// SPDX-License-Identifier: Apache-2.0

#include "sampling/id_ranges.h"

#include <algorithm>
#include <vector>

#include "runtime/types.h"

namespace graphshard {
namespace {

constexpr int64_t kFewRanges = 16;  // up to so many are compared with one after another

GRAPHSHARD_INLINE int64_t range_of(int64_t id, const int64_t* starts, int64_t num_ranges) {
  if (num_ranges <= kFewRanges) {
    int64_t range = 0;
    for (int64_t r = 1; r < num_ranges; ++r) range += id >= starts[r];
    return range;
  }
  return std::upper_bound(starts + 1, starts + num_ranges, id) - starts - 1;
}

}  // namespace

template <typename I, typename R>
bool group_by_range(const I* ids, int64_t num_ids, const int64_t* starts, int64_t num_ranges,
                    int64_t last, int64_t* order, R* rows, int64_t* sizes) {
  std::fill(sizes, sizes + num_ranges, 0);
  bool in_range = true;
  std::vector<uint16_t> range(static_cast<size_t>(num_ids));
  for (int64_t i = 0; i < num_ids; ++i) {
    const int64_t id = static_cast<int64_t>(ids[i]);
    in_range &= id >= starts[0] && id < starts[num_ranges];
    const int64_t r = range_of(id, starts, num_ranges);
    range[static_cast<size_t>(i)] = static_cast<uint16_t>(r);
    ++sizes[r];
  }
  if (!in_range) return false;
  std::vector<int64_t> next(static_cast<size_t>(num_ranges));
  int64_t begin = 0;
  for (int64_t r = 0; r < num_ranges; ++r) {
    next[static_cast<size_t>(r)] = begin;
    if (r != last) begin += sizes[r];
  }
  next[static_cast<size_t>(last)] = begin;
  for (int64_t i = 0; i < num_ids; ++i) {
    const size_t r = range[static_cast<size_t>(i)];
    const int64_t at = next[r]++;
    order[at] = i;
    rows[at] = static_cast<R>(static_cast<int64_t>(ids[i]) - starts[r]);
  }
  return true;
}

template <typename V, typename W>
bool ungroup(const int64_t* order, const int64_t* counts, int64_t num_lists, const V* values,
             int64_t num_values, int64_t* new_counts, W* new_values) {
  constexpr int64_t kFree = -1;
  std::fill(new_counts, new_counts + num_lists, kFree);
  int64_t left = num_values;
  for (int64_t i = 0; i < num_lists; ++i) {
    if (order[i] < 0 || order[i] >= num_lists || new_counts[order[i]] != kFree) return false;
    if (counts[i] < 0 || counts[i] > left) return false;
    new_counts[order[i]] = counts[i];
    left -= counts[i];
  }
  if (left != 0) return false;
  std::vector<int64_t> begins(static_cast<size_t>(num_lists));
  int64_t begin = 0;
  for (int64_t i = 0; i < num_lists; ++i) {
    begins[static_cast<size_t>(i)] = begin;
    begin += new_counts[i];
  }
  for (int64_t i = 0; i < num_lists; ++i) {
    W* out = new_values + begins[static_cast<size_t>(order[i])];
    for (int64_t k = 0; k < counts[i]; ++k) out[k] = static_cast<W>(*values++);
  }
  return true;
}

#define GRAPHSHARD_GROUPS(A, B)                                                                   \
  template bool group_by_range(const A*, int64_t, const int64_t*, int64_t, int64_t, int64_t*, B*, \
                               int64_t*);                                                         \
  template bool ungroup(const int64_t*, const int64_t*, int64_t, const A*, int64_t, int64_t*, B*);

GRAPHSHARD_GROUPS(int32_t, int32_t)
GRAPHSHARD_GROUPS(int32_t, int64_t)
GRAPHSHARD_GROUPS(int64_t, int32_t)
GRAPHSHARD_GROUPS(int64_t, int64_t)

#undef GRAPHSHARD_GROUPS

}  // namespace graphshard
