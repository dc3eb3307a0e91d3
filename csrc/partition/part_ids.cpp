// SPDX-License-Identifier: Apache-2.0

#include "partition/part_ids.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/team.h"
#include "simd/macros.h"

namespace graphshard {
namespace {

constexpr int64_t kAhead = 32;

// Pairs of parts that each task may count.
constexpr int64_t kFewPairs = 1 << 12;

GRAPHSHARD_INLINE void check_id(int64_t id, int64_t num_ids) {
  if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(num_ids)) [[unlikely]] {
    throw std::out_of_range("the id of a node must be below the number of nodes");
  }
}

int64_t tasks_for(int64_t count, int num_threads) {
  return std::clamp<int64_t>(std::min<int64_t>(num_threads, count / (1 << 14)), 1, 64);
}

// More tasks than threads: others may want the cores, too.
int64_t even_tasks_for(int64_t count, int num_threads) {
  return graphshard::num_parts(count, 1 << 15, num_threads);
}

// Calls function(src, owner, reader) for each cut edge of some, in a task of its own.
template <typename I, typename Function>
void for_cut_edges(const I* src, const I* dst, int64_t begin, int64_t end, const Owners& owners,
                   const Function& function) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) {
      prefetch_entry(owners.parts + owners.first_src, src[i + kAhead]);
      prefetch_entry(owners.parts + owners.first_dst, dst[i + kAhead]);
    }
    check_id(src[i], owners.num_src);
    check_id(dst[i], owners.num_dst);
    const int64_t source = owners.first_src + src[i];
    const uint16_t owner = owners.parts[source];
    const uint16_t reader = owners.parts[owners.first_dst + dst[i]];
    if (owner >= owners.num_parts || reader >= owners.num_parts) [[unlikely]] {
      throw std::out_of_range("parts must be below the number of parts");
    }
    if (owner != reader) function(source, owner, reader);
  }
}

}  // namespace

template <typename I>
void count_ids(const I* ids, int64_t count, int64_t first, int64_t num_ids, uint32_t* degrees,
               int num_threads) {
  const int64_t tasks = tasks_for(count, num_threads);
  run_once(tasks, num_threads, [&](int64_t task) {
    const int64_t end = part_begin(count, task + 1, tasks);
    for (int64_t i = part_begin(count, task, tasks); i < end; ++i) {
      check_id(ids[i], num_ids);
      uint32_t& degree = degrees[first + ids[i]];
      if (tasks == 1) {
        ++degree;
      } else {
        std::atomic_ref<uint32_t>(degree).fetch_add(1, std::memory_order_relaxed);
      }
    }
  });
}

template <typename K, typename V>
void order_by_key(const K* keys, int64_t num_nodes, int64_t num_keys, const V* order, V* ordered,
                  int num_threads) {
  // Counts of all tasks together are no more than the nodes, if there are several.
  const int64_t tasks = std::min(tasks_for(num_nodes, num_threads),
                                 std::max<int64_t>(num_nodes / std::max<int64_t>(num_keys, 1), 1));
  // Counts in the order serve tasks that share it; keys are kept then, not fetched twice.
  const bool is_shared = order && tasks > 1;
  const auto ordered_keys =
      std::make_unique_for_overwrite<K[]>(is_shared ? static_cast<size_t>(num_nodes) : 0);
  const auto count = [&](int64_t task, const V* nodes, int64_t* counts) {
    const int64_t end = part_begin(num_nodes, task + 1, tasks);
    for (int64_t i = part_begin(num_nodes, task, tasks); i < end; ++i) {
      if (nodes && i + kAhead < end) {
        prefetch_entry(keys, static_cast<int64_t>(nodes[i + kAhead]));
      }
      const int64_t node = nodes ? static_cast<int64_t>(nodes[i]) : i;
      check_id(node, num_nodes);
      if (static_cast<uint64_t>(keys[node]) >= static_cast<uint64_t>(num_keys)) [[unlikely]] {
        throw std::out_of_range("keys must be below num_keys");
      }
      ++counts[keys[node]];
      if (nodes) ordered_keys[i] = keys[node];
    }
  };
  Team team(static_cast<int>(std::min<int64_t>(num_threads, tasks)));
  const size_t size = static_cast<size_t>(tasks * num_keys);
  std::vector<int64_t> places(size, 0);
  std::vector<int64_t> of_ids(is_shared ? size : 0, 0);
  team.run(tasks, [&](int64_t task) {
    count(task, is_shared ? order : nullptr, places.data() + task * num_keys);
    if (is_shared) count(task, nullptr, of_ids.data() + task * num_keys);
  });
  int64_t running = 0;
  for (int64_t key = 0; key < num_keys; ++key) {
    const int64_t begin = running;
    int64_t expected = 0;
    for (int64_t i = key; i < static_cast<int64_t>(size); i += num_keys) {
      running += std::exchange(places[i], running);
      if (is_shared) expected += of_ids[i];
    }
    if (is_shared && running - begin != expected) [[unlikely]] {
      throw std::out_of_range("an order must name every node once");
    }
  }
  team.run(tasks, [&](int64_t task) {
    int64_t* const place = places.data() + task * num_keys;
    const int64_t end = part_begin(num_nodes, task + 1, tasks);
    for (int64_t i = part_begin(num_nodes, task, tasks); i < end; ++i) {
      if (order && !is_shared && i + kAhead < end) {
        prefetch_entry(keys, static_cast<int64_t>(order[i + kAhead]));
      }
      const int64_t node = order ? static_cast<int64_t>(order[i]) : i;
      check_id(node, num_nodes);
      int64_t& to = place[is_shared ? ordered_keys[i] : keys[node]];
      check_id(to, num_nodes);  // `order` may name a node twice
      ordered[to++] = static_cast<V>(node);
    }
  });
}

template <typename I>
void count_cut(const I* src, const I* dst, int64_t num_edges, const Owners& owners, int64_t* pairs,
               int num_threads) {
  const int64_t size = owners.num_parts * owners.num_parts;
  const int64_t tasks = size <= kFewPairs ? even_tasks_for(num_edges, num_threads)
                                          : tasks_for(num_edges, num_threads);
  std::vector<int64_t> sums(static_cast<size_t>(tasks * size), 0);
  run_once(tasks, num_threads, [&](int64_t task) {
    int64_t* const sum = sums.data() + task * size;
    for_cut_edges(
        src, dst, part_begin(num_edges, task, tasks), part_begin(num_edges, task + 1, tasks),
        owners,
        [&](int64_t, int64_t owner, int64_t reader) { ++sum[owner * owners.num_parts + reader]; });
  });
  for (int64_t i = 0; i < tasks * size; ++i) pairs[i % size] += sums[i];
}

template <typename I>
void mark_readers(const I* src, const I* dst, int64_t num_edges, const Owners& owners,
                  const uint8_t* digits, uint8_t* masks, int num_threads) {
  const int64_t tasks = even_tasks_for(num_edges, num_threads);
  run_once(tasks, num_threads, [&](int64_t task) {
    for_cut_edges(src, dst, part_begin(num_edges, task, tasks),
                  part_begin(num_edges, task + 1, tasks), owners,
                  [&](int64_t source, int64_t owner, int64_t reader) {
                    const uint8_t digit = digits[owner * owners.num_parts + reader];
                    if (digit >= 8) return;
                    const uint8_t bit = static_cast<uint8_t>(0x80u >> digit);
                    if (tasks == 1) {
                      masks[source] |= bit;
                    } else {
                      std::atomic_ref<uint8_t> mask(masks[source]);
                      if (!(mask.load(std::memory_order_relaxed) & bit)) {
                        mask.fetch_or(bit, std::memory_order_relaxed);
                      }
                    }
                  });
  });
}

template <typename V>
int64_t mark_outside(const V* ids, int64_t count, int64_t first, int64_t last, int64_t num_ids,
                     uint64_t* bits) {
  int64_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = static_cast<int64_t>(ids[i]);
    if (id >= first && id < last) continue;
    check_id(id, num_ids);
    bits[id >> 6] |= uint64_t{1} << (id & 63);
    ++outside;
  }
  return outside;
}

int64_t rank_words(const uint64_t* bits, int64_t num_words, int64_t* ranks) {
  int64_t rank = 0;
  for (int64_t word = 0; word < num_words; ++word) {
    ranks[word] = rank;
    rank += std::popcount(bits[word]);
  }
  return rank;
}

int64_t list_marked(const uint64_t* bits, int64_t first_word, int64_t last_word, int64_t* ids) {
  int64_t listed = 0;
  for (int64_t word = first_word; word < last_word; ++word) {
    for (uint64_t rest = bits[word]; rest != 0; rest &= rest - 1) {
      ids[listed++] = word * 64 + std::countr_zero(rest);
    }
  }
  return listed;
}

template <typename V, typename I>
void find_local_ids(const V* ids, int64_t count, int64_t first, int64_t last, int64_t num_ids,
                    const uint64_t* bits, const int64_t* ranks, I* local_ids) {
  const int64_t num_inner = last - first;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = static_cast<int64_t>(ids[i]);
    if (id >= first && id < last) {
      local_ids[i] = static_cast<I>(id - first);
      continue;
    }
    check_id(id, num_ids);
    const uint64_t word = bits[id >> 6];
    const uint64_t bit = uint64_t{1} << (id & 63);
    if (!(word & bit)) [[unlikely]] {
      throw std::out_of_range("an id outside of the part must be marked");
    }
    local_ids[i] = static_cast<I>(num_inner + ranks[id >> 6] + std::popcount(word & (bit - 1)));
  }
}

template <typename V>
void find_cut_edges(const uint32_t* degrees, int64_t num_rows, const V* cols, int64_t first_row,
                    int64_t first_edge, const int64_t* ends, int64_t num_parts, int64_t part,
                    std::byte* records, int64_t* counts) {
  constexpr int64_t kBytes = 2 * static_cast<int64_t>(sizeof(V)) + 8;
  const int64_t begin = part == 0 ? 0 : ends[part - 1];
  const int64_t end = ends[part];
  const auto owner_of = [&](int64_t id) {
    check_id(id, ends[num_parts - 1]);
    return std::upper_bound(ends, ends + num_parts, id) - ends;
  };
  std::fill_n(counts, num_parts, 0);
  int64_t i = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (const int64_t stop = i + degrees[r]; i < stop; ++i) {
      const int64_t col = static_cast<int64_t>(cols[i]);
      if (col < begin || col >= end) ++counts[owner_of(col)];
    }
  }
  std::vector<int64_t> places(static_cast<size_t>(num_parts));
  int64_t running = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    places[p] = running;
    running += counts[p];
  }
  i = 0;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (const int64_t stop = i + degrees[r]; i < stop; ++i) {
      const int64_t col = static_cast<int64_t>(cols[i]);
      if (col >= begin && col < end) continue;
      std::byte* const record = records + places[owner_of(col)]++ * kBytes;
      const V row = static_cast<V>(first_row + r);
      const int64_t edge = first_edge + i;
      std::memcpy(record, cols + i, sizeof(V));
      std::memcpy(record + sizeof(V), &row, sizeof(V));
      std::memcpy(record + 2 * sizeof(V), &edge, 8);
    }
  }
}

#define GRAPHSHARD_OWNERS(I)                                                                       \
  template void count_ids(const I*, int64_t, int64_t, int64_t, uint32_t*, int);                    \
  template void count_cut(const I*, const I*, int64_t, const Owners&, int64_t*, int);              \
  template void mark_readers(const I*, const I*, int64_t, const Owners&, const uint8_t*, uint8_t*, \
                             int);
GRAPHSHARD_OWNERS(int32_t)
GRAPHSHARD_OWNERS(int64_t)
#undef GRAPHSHARD_OWNERS

#define GRAPHSHARD_ORDER(K)                                                                \
  template void order_by_key(const K*, int64_t, int64_t, const uint32_t*, uint32_t*, int); \
  template void order_by_key(const K*, int64_t, int64_t, const int64_t*, int64_t*, int);
GRAPHSHARD_ORDER(uint8_t)
GRAPHSHARD_ORDER(uint16_t)
GRAPHSHARD_ORDER(uint32_t)
GRAPHSHARD_ORDER(int64_t)
#undef GRAPHSHARD_ORDER

#define GRAPHSHARD_LOCAL(V)                                                                   \
  template int64_t mark_outside(const V*, int64_t, int64_t, int64_t, int64_t, uint64_t*);     \
  template void find_local_ids(const V*, int64_t, int64_t, int64_t, int64_t, const uint64_t*, \
                               const int64_t*, int32_t*);                                     \
  template void find_local_ids(const V*, int64_t, int64_t, int64_t, int64_t, const uint64_t*, \
                               const int64_t*, int64_t*);                                     \
  template void find_cut_edges(const uint32_t*, int64_t, const V*, int64_t, int64_t,          \
                               const int64_t*, int64_t, int64_t, std::byte*, int64_t*);
GRAPHSHARD_LOCAL(uint32_t)
GRAPHSHARD_LOCAL(int64_t)
#undef GRAPHSHARD_LOCAL

}  // namespace graphshard
