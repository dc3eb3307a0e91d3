// SPDX-License-Identifier: Apache-2.0
// Gradients of an embedding: which of them are of the same row, and their sums.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime/types.h"

namespace graphshard {

// Finds equal ids. `order` gets the places of ids so that those of each group of equal ones are
// next to each other, in their order, and groups ascend; `distinct` the id of each group, and
// `starts` where it begins in `order`, and the end of the last. All have room for num_ids, starts
// for one more. Returns the number of groups.
template <typename I>
int64_t group_equal(const I* ids, int64_t num_ids, I* distinct, int64_t* starts, int64_t* order);

// Rows of some tables, numbered one table after another, in groups that are to be added up.
struct RowGroups {
  struct Table {
    const float* data;
    int64_t stride;  // from a row to the next, in columns
    int64_t first;   // the number of its first row
  };
  std::vector<Table> tables;  // at least one
  int64_t num_rows;           // of all tables
  int64_t width;              // columns
  const int64_t* order;       // numbers of rows
  const int64_t* starts;      // where each group begins in `order`, and the end of the last
  int64_t num_groups;
  // Rows of a group with numbers in [first_inner, last_inner), which are next to each other, are
  // added up before they are added to others.
  int64_t first_inner;
  int64_t last_inner;
};

// Throws std::out_of_range unless there are such rows, which takes `num_numbers` of `order`.
void check_groups(const RowGroups& groups, int64_t num_numbers);

// Writes the sum of each group to a row of `out`, rows of which are `out_stride` columns apart.
void sum_groups(float* out, int64_t out_stride, const RowGroups& groups, int num_threads);

// Where a row lies.
GRAPHSHARD_INLINE const float* row_at(const RowGroups& groups, int64_t number) {
  const RowGroups::Table* table = groups.tables.data() + groups.tables.size() - 1;
  while (number < table->first) --table;
  return table->data + (number - table->first) * table->stride;
}

// Requests the first row of a group from memory.
GRAPHSHARD_INLINE void prefetch_group(const RowGroups& groups, int64_t group) {
  const int64_t at = groups.starts[group];
  if (at == groups.starts[group + 1]) return;
  prefetch_bytes(row_at(groups, groups.order[at]), groups.width * sizeof(float));
}

GRAPHSHARD_INLINE void add_to(float* __restrict sum, const float* __restrict row, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) sum[j] += row[j];
}

// The sum of a group: in `room`, or the row itself where it is one. There is room for two rows.
GRAPHSHARD_INLINE const float* sum_of(const RowGroups& groups, int64_t group, float* room) {
  const int64_t width = groups.width;
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
  const auto is_inner = [&](int64_t number) {
    return number >= groups.first_inner && number < groups.last_inner;
  };
  int64_t at = groups.starts[group];
  const int64_t end = groups.starts[group + 1];
  if (end - at == 1) return row_at(groups, groups.order[at]);
  if (at == end) {
    std::memset(room, 0, row_bytes);
    return room;
  }
  bool was_inner = is_inner(groups.order[at]);
  std::memcpy(room, row_at(groups, groups.order[at]), row_bytes);
  for (++at; at < end;) {
    const float* row = row_at(groups, groups.order[at]);
    const bool begins_inner = is_inner(groups.order[at]) && !was_inner;
    ++at;
    if (begins_inner && at < end && is_inner(groups.order[at])) {
      float* const inner = room + width;
      std::memcpy(inner, row, row_bytes);
      for (; at < end && is_inner(groups.order[at]); ++at) {
        add_to(inner, row_at(groups, groups.order[at]), width);
      }
      row = inner;
    }
    add_to(room, row, width);
  }
  return room;
}

}  // namespace graphshard
