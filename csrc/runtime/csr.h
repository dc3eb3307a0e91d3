// SPDX-License-Identifier: Apache-2.0
// From a list of edges to edges grouped by one of their ends.

#pragma once

#include <cstdint>

namespace graphshard {

// Stable counting sort. `keys` in [0, num_keys); key k's edges go to [indptr[k], indptr[k + 1]), by
// ascending position: `grouped` gets their `others`, `positions` where they stood. Throws
// std::out_of_range where there is another key.
template <typename I>
void group_by_key(const I* keys, const I* others, int64_t num_edges, int64_t num_keys, I* indptr,
                  I* grouped, I* positions, int num_threads);

}  // namespace graphshard
