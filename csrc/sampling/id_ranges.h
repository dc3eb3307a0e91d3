// SPDX-License-Identifier: Apache-2.0
// Ids grouped by the range they are in, and answers for groups put back in order.

#pragma once

#include <cstdint>

namespace graphshard {

// Groups ids by range: range r is [starts[r], starts[r + 1]), and `last` comes after all others,
// which stay in order, as ids do within a range. Writes, for each grouped id, its position in ids
// and its distance from the start of its range; and the size of each range. `starts` ascend.
// Returns whether all ids are in some range; nothing is certain of what was written if not.
template <typename I, typename R>
bool group_by_range(const I* ids, int64_t num_ids, const int64_t* starts, int64_t num_ranges,
                    int64_t last, int64_t* order, R* rows, int64_t* sizes);

// Lists of values, of counts[i] elements each, one after another, are put in another order: list i
// becomes number order[i], which is a permutation. Writes the new counts, and all elements.
// Returns whether order is a permutation and counts add up to num_values.
template <typename V, typename W>
bool ungroup(const int64_t* order, const int64_t* counts, int64_t num_lists, const V* values,
             int64_t num_values, int64_t* new_counts, W* new_values);

}  // namespace graphshard
