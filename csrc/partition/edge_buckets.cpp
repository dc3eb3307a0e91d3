// SPDX-License-Identifier: Apache-2.0

#include "partition/edge_buckets.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/team.h"
#include "simd/macros.h"

namespace graphshard {
namespace {

// Records of a bucket that are put together next to the core before they are written: otherwise
// each record would fetch a line of its bucket's memory.
constexpr int64_t kCombined = 16;

// Edges ahead of the current one whose ends' new numbers are requested from memory.
constexpr int64_t kAhead = 32;

template <typename E>
constexpr int64_t size_of() {
  if constexpr (std::is_void_v<E>) {
    return 0;
  } else {
    return static_cast<int64_t>(sizeof(E));
  }
}

template <typename V>
GRAPHSHARD_INLINE int64_t renumbered(const Renumbering<V>& numbers, int64_t id) {
  if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(numbers.num_ids)) [[unlikely]] {
    throw std::out_of_range("the id of a node must be below the number of nodes");
  }
  const int64_t place = numbers.first + id;
  return numbers.ids ? static_cast<int64_t>(numbers.ids[place]) : place;
}

}  // namespace

template <typename I, typename V, typename E>
void bucket_edges(const I* rows, const I* cols, int64_t num_edges, const Renumbering<V>& of_rows,
                  const Renumbering<V>& of_cols, const EdgeValues& values, bool drops_loops,
                  int shift, int64_t num_buckets, std::byte* records, int64_t* counts,
                  int num_threads) {
  constexpr int64_t kBytes = 4 + static_cast<int64_t>(sizeof(V)) + size_of<E>();
  const int64_t parts = num_parts(num_edges, 1 << 17, num_threads);
  // Not filled with zeros: pages are first touched by all threads.
  const auto new_rows = std::make_unique_for_overwrite<V[]>(static_cast<size_t>(num_edges));
  const auto dropped =
      std::make_unique_for_overwrite<uint8_t[]>(drops_loops ? static_cast<size_t>(num_edges) : 0);
  std::vector<int64_t> starts(static_cast<size_t>(parts * num_buckets), 0);
  run_once(parts, num_threads, [&](int64_t part) {
    int64_t* count = starts.data() + part * num_buckets;
    const int64_t end = part_begin(num_edges, part + 1, parts);
    for (int64_t i = part_begin(num_edges, part, parts); i < end; ++i) {
      if (of_rows.ids && i + kAhead < end) {
        prefetch_entry(of_rows.ids + of_rows.first, static_cast<int64_t>(rows[i + kAhead]));
      }
      const int64_t row = renumbered(of_rows, rows[i]);
      const int64_t bucket = row >> shift;
      if (static_cast<uint64_t>(bucket) >= static_cast<uint64_t>(num_buckets)) [[unlikely]] {
        throw std::out_of_range("every row must belong to a bucket");
      }
      new_rows[i] = static_cast<V>(row);
      if (drops_loops) {
        dropped[i] = static_cast<uint64_t>(of_rows.first) + static_cast<uint64_t>(rows[i]) ==
                     static_cast<uint64_t>(of_cols.first) + static_cast<uint64_t>(cols[i]);
        if (dropped[i]) continue;
      }
      ++count[bucket];
    }
  });
  int64_t running = 0;
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    const int64_t begin = running;
    for (int64_t part = 0; part < parts; ++part) {
      running += std::exchange(starts[part * num_buckets + bucket], running);
    }
    counts[bucket] = running - begin;
  }
  const int64_t mask = (int64_t{1} << shift) - 1;
  run_once(parts, num_threads, [&](int64_t part) {
    int64_t* place = starts.data() + part * num_buckets;
    std::vector<std::byte> combined(static_cast<size_t>(num_buckets * kCombined * kBytes));
    std::vector<uint8_t> filled(static_cast<size_t>(num_buckets), 0);
    const int64_t end = part_begin(num_edges, part + 1, parts);
    for (int64_t i = part_begin(num_edges, part, parts); i < end; ++i) {
      if (of_cols.ids && i + kAhead < end) {
        prefetch_entry(of_cols.ids + of_cols.first, static_cast<int64_t>(cols[i + kAhead]));
      }
      const int64_t col = renumbered(of_cols, cols[i]);
      if (drops_loops && dropped[i]) continue;
      const int64_t row = static_cast<int64_t>(new_rows[i]);
      const int64_t bucket = row >> shift;
      std::byte* buffer = combined.data() + bucket * kCombined * kBytes;
      std::byte* record = buffer + filled[bucket] * kBytes;
      const uint32_t inside = static_cast<uint32_t>(row & mask);
      const V narrow_col = static_cast<V>(col);
      std::memcpy(record, &inside, 4);
      std::memcpy(record + 4, &narrow_col, sizeof(V));
      if constexpr (!std::is_void_v<E>) {
        const E value = static_cast<E>(values.values ? values.values[i]
                                                     : static_cast<uint64_t>(values.first) +
                                                           static_cast<uint64_t>(i));
        std::memcpy(record + 4 + sizeof(V), &value, sizeof(E));
      }
      if (++filled[bucket] == kCombined) {
        std::memcpy(records + place[bucket] * kBytes, buffer, kCombined * kBytes);
        place[bucket] += kCombined;
        filled[bucket] = 0;
      }
    }
    for (int64_t bucket = 0; bucket < num_buckets; ++bucket) {
      if (filled[bucket] == 0) continue;
      std::memcpy(records + place[bucket] * kBytes, combined.data() + bucket * kCombined * kBytes,
                  static_cast<size_t>(filled[bucket] * kBytes));
    }
  });
}

void count_rows(const std::byte* records, int64_t num_records, int64_t record_bytes,
                uint32_t* degrees, int64_t num_rows) {
  for (int64_t i = 0; i < num_records; ++i) {
    uint32_t row;
    std::memcpy(&row, records + i * record_bytes, 4);
    if (row >= static_cast<uint64_t>(num_rows)) [[unlikely]] {
      throw std::out_of_range("the row of a record must be in its bucket");
    }
    if (++degrees[row] == 0) [[unlikely]] {
      throw std::overflow_error("a node must have fewer than 2^32 edges");
    }
  }
}

template <typename V, typename E>
void place_rows(const std::byte* records, int64_t num_records, int64_t* places, int64_t num_rows,
                int64_t begin, int64_t end, V* cols, E* values) {
  constexpr int64_t kBytes = 4 + static_cast<int64_t>(sizeof(V)) + size_of<E>();
  for (int64_t i = 0; i < num_records; ++i) {
    const std::byte* record = records + i * kBytes;
    uint32_t row;
    std::memcpy(&row, record, 4);
    if (row >= static_cast<uint64_t>(num_rows)) [[unlikely]] {
      throw std::out_of_range("the row of a record must be in its bucket");
    }
    const int64_t place = places[row]++;
    if (place < begin || place >= end) continue;
    std::memcpy(cols + (place - begin), record + 4, sizeof(V));
    if constexpr (!std::is_void_v<E>) {
      std::memcpy(values + (place - begin), record + 4 + sizeof(V), sizeof(E));
    }
  }
}

template <typename V>
int64_t merge_repeated(uint32_t* degrees, int64_t num_rows, V* cols, uint32_t* weights) {
  std::vector<std::pair<V, uint32_t>> row;
  int64_t read = 0;
  int64_t written = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    row.clear();
    for (const int64_t end = read + degrees[r]; read < end; ++read) {
      row.emplace_back(cols[read], weights[read]);
    }
    std::sort(row.begin(), row.end());
    const int64_t first = written;
    for (const auto& [col, weight] : row) {
      if (written > first && cols[written - 1] == col) {
        const uint64_t sum = uint64_t{weights[written - 1]} + weight;
        weights[written - 1] =
            static_cast<uint32_t>(std::min<uint64_t>(sum, std::numeric_limits<uint32_t>::max()));
      } else {
        cols[written] = col;
        weights[written++] = weight;
      }
    }
    degrees[r] = static_cast<uint32_t>(written - first);
  }
  return written;
}

namespace {

// The end of MurmurHash3 (A. Appleby, 2011), which spreads every bit over all.
GRAPHSHARD_INLINE uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

}  // namespace

template <typename I>
EdgeHashes hash_edges(const I* rows, const I* cols, int64_t num_edges, int64_t first_row,
                      int64_t first_col, int64_t first, int num_threads) {
  const int64_t parts = num_parts(num_edges, 1 << 17, num_threads);
  std::vector<EdgeHashes> sums(static_cast<size_t>(parts), EdgeHashes{0, 0});
  run_once(parts, num_threads, [&](int64_t part) {
    EdgeHashes sum{0, 0};
    const int64_t end = part_begin(num_edges, part + 1, parts);
    for (int64_t i = part_begin(num_edges, part, parts); i < end; ++i) {
      const uint64_t row = static_cast<uint64_t>(rows[i]) + static_cast<uint64_t>(first_row);
      const uint64_t col = static_cast<uint64_t>(cols[i]) + static_cast<uint64_t>(first_col);
      const uint64_t there = mixed(row * 0x9e3779b97f4a7c15ULL + col);
      const uint64_t back = mixed(col * 0x9e3779b97f4a7c15ULL + row);
      sum.asymmetry += there - back;
      sum.in_order += there * (2 * (static_cast<uint64_t>(first) + static_cast<uint64_t>(i)) + 1);
    }
    sums[part] = sum;
  });
  EdgeHashes all{0, 0};
  for (const EdgeHashes& sum : sums) {
    all.in_order += sum.in_order;
    all.asymmetry += sum.asymmetry;
  }
  return all;
}

#define GRAPHSHARD_BUCKET(I, V, E)                                                         \
  template void bucket_edges<I, V, E>(const I*, const I*, int64_t, const Renumbering<V>&,  \
                                      const Renumbering<V>&, const EdgeValues&, bool, int, \
                                      int64_t, std::byte*, int64_t*, int);
#define GRAPHSHARD_PLACE(V, E)                                                                   \
  GRAPHSHARD_BUCKET(uint32_t, V, E)                                                              \
  GRAPHSHARD_BUCKET(int32_t, V, E)                                                               \
  GRAPHSHARD_BUCKET(int64_t, V, E)                                                               \
  template void place_rows<V, E>(const std::byte*, int64_t, int64_t*, int64_t, int64_t, int64_t, \
                                 V*, E*);
GRAPHSHARD_PLACE(uint32_t, void)
GRAPHSHARD_PLACE(uint32_t, uint32_t)
GRAPHSHARD_PLACE(uint32_t, int64_t)
GRAPHSHARD_PLACE(int64_t, void)
GRAPHSHARD_PLACE(int64_t, uint32_t)
GRAPHSHARD_PLACE(int64_t, int64_t)
#undef GRAPHSHARD_PLACE
#undef GRAPHSHARD_BUCKET

template int64_t merge_repeated(uint32_t*, int64_t, uint32_t*, uint32_t*);
template int64_t merge_repeated(uint32_t*, int64_t, int64_t*, uint32_t*);
template EdgeHashes hash_edges(const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                               int);
template EdgeHashes hash_edges(const int64_t*, const int64_t*, int64_t, int64_t, int64_t, int64_t,
                               int);

}  // namespace graphshard
