// SPDX-License-Identifier: Apache-2.0

#include "runtime/csr.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "runtime/large_blocks.h"
#include "runtime/parallel.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

// Not one step at a time: the loop takes as many numbers as fit in a register.
template <typename I>
bool never_falls(const I* numbers, int64_t count) {
  I falls = 0;
  dispatch<32>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    I found = 0;
    for (int64_t i = 1; i < count; ++i) found |= static_cast<I>(numbers[i] < numbers[i - 1]);
    falls = found;
  });
  return falls == 0;
}

}  // namespace

bool ascends(const Ids& indptr, int64_t num_rows, int64_t end) {
  if (indptr[0] != 0 || indptr[num_rows] != end) return false;
  return indptr.wide() != nullptr ? never_falls(indptr.wide(), num_rows + 1)
                                  : never_falls(indptr.narrow(), num_rows + 1);
}

// Each part counts its own edges' keys; a running sum over (key, part) gives every part its own
// places within a key, so that parts write side by side and the order stays that of positions.
template <typename I>
void group_by_key(const I* keys, const I* others, int64_t num_edges, int64_t num_keys, I* indptr,
                  I* grouped, I* positions, int num_threads) {
  // Rows of the result are read at random later on: fewer pages, fewer misses of their addresses.
  expect_writes(grouped, static_cast<size_t>(num_edges) * sizeof(I));
  expect_writes(indptr, static_cast<size_t>(num_keys + 1) * sizeof(I));
  if (positions) expect_writes(positions, static_cast<size_t>(num_edges) * sizeof(I));
  // Counters take parts * num_keys numbers: no more of them than there are edges.
  const int64_t most = num_edges / std::max<int64_t>(num_keys, 1 << 14);
  const int64_t parts = std::clamp<int64_t>(std::min<int64_t>(num_threads, most), 1, 64);
  std::vector<I> places(static_cast<size_t>(parts * num_keys), 0);
  run_tasks(parts, num_threads, [&](int64_t part) {
    I* count = places.data() + part * num_keys;
    const int64_t end = part_begin(num_edges, part + 1, parts);
    for (int64_t i = part_begin(num_edges, part, parts); i < end; ++i) {
      if (static_cast<uint64_t>(keys[i]) >= static_cast<uint64_t>(num_keys)) [[unlikely]] {
        throw std::out_of_range("the id of a node must be below the number of nodes");
      }
      ++count[keys[i]];
    }
  });
  I running = 0;
  for (int64_t key = 0; key < num_keys; ++key) {
    indptr[key] = running;
    for (int64_t part = 0; part < parts; ++part) {
      I& place = places[part * num_keys + key];
      const I count = place;
      place = running;
      running += count;
    }
  }
  indptr[num_keys] = running;
  run_tasks(parts, num_threads, [&](int64_t part) {
    I* place = places.data() + part * num_keys;
    const int64_t end = part_begin(num_edges, part + 1, parts);
    for (int64_t i = part_begin(num_edges, part, parts); i < end; ++i) {
      const I at = place[keys[i]]++;
      grouped[at] = others[i];
      if (positions) positions[at] = static_cast<I>(i);
    }
  });
}

template void group_by_key(const int32_t*, const int32_t*, int64_t, int64_t, int32_t*, int32_t*,
                           int32_t*, int);
template void group_by_key(const int64_t*, const int64_t*, int64_t, int64_t, int64_t*, int64_t*,
                           int64_t*, int);

}  // namespace graphshard
