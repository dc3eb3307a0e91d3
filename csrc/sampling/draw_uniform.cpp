// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <atomic>

#include "runtime/parallel.h"
#include "sampling/draw.h"
#include "sampling/draw_set.h"
#include "sampling/random.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

constexpr int64_t kRowsAhead = 64;

// Rows that are drawn take longer.
constexpr int64_t kDrawnRowsAhead = 24;
constexpr int64_t kRowsPerTask = 256;

// Edges drawn before those that are looked up: drawing computes while looking up waits for memory,
// so the processor does both at once.
constexpr int64_t kLag = 128;

// More would push each other out of the cache; they are read mostly in order anyway.
constexpr int64_t kMostRequested = 1024;

struct Counted {
  int64_t total;
  int64_t bad_row;
};

Counted count_rows(const DrawArguments& a, int64_t first, int64_t last, int64_t* counts,
                   RowBounds* bounds) {
  std::vector<int64_t> skipped;
  int64_t total = 0;
  for (int64_t at = first; at < last; ++at) {
    if (at + kRowsAhead < last) prefetch_row(a, at + kRowsAhead);
    if (!find_row(a, at, bounds[at])) return {0, at};
    const DrawRow row = row_within(a, bounds[at], skipped);
    int64_t count = std::min<int64_t>(row.degree, a.fanout);
    if (a.replace) count = row.degree > 0 ? a.fanout : 0;
    counts[at] = count;
    total += count;
  }
  return {total, -1};
}

// Positions drawn for one row.
template <typename I>
GRAPHSHARD_INLINE void draw_row(const DrawArguments& a, const DrawRow& row, uint64_t state,
                                int64_t count, I* out, std::vector<uint64_t>& bits) {
  const I base = static_cast<I>(row.begin);
  if (a.replace) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t word = word_of(state, static_cast<uint64_t>(i));
      out[i] = base + static_cast<I>(below(word, static_cast<uint32_t>(row.degree)));
    }
  } else if (count == row.degree) {
    for (int64_t i = 0; i < count; ++i) out[i] = base + static_cast<I>(i);
  } else if (count > 0) {
    draw_set(state, row.degree, static_cast<int32_t>(count), base, out, bits);
  }
  if (row.skipped.size() > 0) pass_over(row, !a.replace, count, out);
}

struct SourceBase {
  uintptr_t address;
  int64_t bytes;
};

// Where drawn positions are looked up, and what is written.
template <typename I>
struct Drawn {
  const char* indices;
  int64_t index_bytes;
  const SourcePieces* pieces;
  const I* eids;
  I* edges;
  void* picked;
  void (*look_up)(const Drawn& drawn, int64_t begin, int64_t end);
  std::atomic<bool>* all_known;

  // Where an array of all sources would begin that has those of the row where they are, and the
  // bytes of one.
  GRAPHSHARD_INLINE SourceBase base_of(const RowBounds& row, size_t& guess) const {
    if (pieces == nullptr) return {reinterpret_cast<uintptr_t>(indices), index_bytes};
    const size_t piece = pieces->piece_of(row.begin, guess);
    const Ids& sources = pieces->pieces[piece].sources;
    const int64_t bytes = sources.wide() != nullptr ? 8 : 4;
    const uintptr_t before = static_cast<uintptr_t>(pieces->starts[piece] * bytes);
    return {reinterpret_cast<uintptr_t>(sources.address(0)) - before, bytes};
  }
};

template <typename I, typename J>
void look_up_indices(const Drawn<I>& drawn, int64_t begin, int64_t end) {
  look_up(begin, end, reinterpret_cast<const J*>(drawn.indices), drawn.eids, drawn.edges,
          static_cast<J*>(drawn.picked));
}

template <typename I, typename J>
void look_up_in_pieces(const Drawn<I>& drawn, int64_t begin, int64_t end) {
  if (!look_up_pieces(begin, end, *drawn.pieces, drawn.edges, static_cast<J*>(drawn.picked))) {
    drawn.all_known->store(false, std::memory_order_relaxed);
  }
}

GRAPHSHARD_INLINE const void* item_at(const SourceBase& base, int64_t at) {
  return reinterpret_cast<const void*>(base.address + static_cast<uintptr_t>(at * base.bytes));
}

// The two ends of a row, which for most rows are all of it; that there are none does not matter.
GRAPHSHARD_INLINE void request_ends(const SourceBase& base, const RowBounds& bounds) {
  GRAPHSHARD_PREFETCH_OUTER(item_at(base, bounds.begin));
  GRAPHSHARD_PREFETCH_OUTER(item_at(base, bounds.end - 1));
}

template <typename I>
GRAPHSHARD_INLINE void draw_rows(const DrawArguments& a, int64_t first, int64_t last,
                                 const int64_t* counts, const RowBounds* bounds, int64_t start,
                                 const Drawn<I>& drawn) {
  std::vector<uint64_t> bits;
  std::vector<int64_t> skipped;
  const uint64_t key_state = mix(a.key ^ kRowDomain);
  const SourceBase eids{reinterpret_cast<uintptr_t>(drawn.eids), sizeof(I)};
  int64_t looked_up = start;
  int64_t end = start;
  size_t guess = 0;
  SourceBase bases[kDrawnRowsAhead];  // of the rows that come, each in the place of one that went
  for (int64_t at = first; at < last && at < first + kDrawnRowsAhead; ++at) {
    bases[at - first] = drawn.base_of(bounds[at], guess);
  }
  int64_t slot = 0;
  for (int64_t at = first; at < last; ++at) {
    const SourceBase base = bases[slot];
    if (at + kDrawnRowsAhead < last) {
      const RowBounds& later = bounds[at + kDrawnRowsAhead];
      bases[slot] = drawn.base_of(later, guess);
      request_ends(bases[slot], later);
      if (drawn.eids != nullptr) request_ends(eids, later);
    }
    slot = slot + 1 == kDrawnRowsAhead ? 0 : slot + 1;
    const DrawRow row = row_within(a, bounds[at], skipped);
    I* out = drawn.edges + end;
    draw_row(a, row, state_of(key_state, a.row_ids[at]), counts[at], out, bits);
    const int64_t requested = counts[at] <= kMostRequested ? counts[at] : 0;
    for (int64_t i = 0; i < requested; ++i) {
      GRAPHSHARD_PREFETCH_OUTER(item_at(base, out[i]));
      if (drawn.eids != nullptr) GRAPHSHARD_PREFETCH_OUTER(drawn.eids + out[i]);
    }
    end += counts[at];
    if (end - looked_up >= 2 * kLag) {
      drawn.look_up(drawn, looked_up, end - kLag);
      looked_up = end - kLag;
    }
  }
  drawn.look_up(drawn, looked_up, end);
}

template <typename I>
void draw_part(const DrawArguments& a, int64_t first, int64_t last, const int64_t* counts,
               const RowBounds* bounds, int64_t start, const Drawn<I>& drawn) {
  dispatch<32>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    draw_rows(a, first, last, counts, bounds, start, drawn);
  });
}

}  // namespace

int64_t count_uniform(const DrawArguments& a, int64_t* counts, RowBounds* bounds, int num_threads) {
  const int64_t num_parts = graphshard::num_parts(a.num_draws, kRowsPerTask, num_threads);
  std::vector<Counted> counted(static_cast<size_t>(num_parts));
  run_tasks(num_parts, num_threads, [&](int64_t part) {
    counted[part] = count_rows(a, part_begin(a.num_draws, part, num_parts),
                               part_begin(a.num_draws, part + 1, num_parts), counts, bounds);
  });
  int64_t total = 0;
  for (const Counted& part : counted) {
    if (part.bad_row >= 0) return -1 - part.bad_row;
    total += part.total;
  }
  return total;
}

template <typename I, typename J>
bool draw_uniform(const DrawArguments& a, const int64_t* counts, const RowBounds* bounds,
                  const Sources<J>& sources, const I* eids, I* edges, J* picked, int num_threads) {
  const int64_t num_parts = graphshard::num_parts(a.num_draws, kRowsPerTask, num_threads);
  std::vector<int64_t> starts{0};
  for (int64_t part = 0; part + 1 < num_parts; ++part) {
    int64_t start = starts.back();
    const int64_t last = part_begin(a.num_draws, part + 1, num_parts);
    for (int64_t at = part_begin(a.num_draws, part, num_parts); at < last; ++at)
      start += counts[at];
    starts.push_back(start);
  }
  std::atomic<bool> all_known{true};
  const Drawn<I> drawn{reinterpret_cast<const char*>(sources.ids),
                       sizeof(J),
                       sources.pieces,
                       eids,
                       edges,
                       picked,
                       sources.pieces == nullptr ? look_up_indices<I, J> : look_up_in_pieces<I, J>,
                       &all_known};
  run_tasks(num_parts, num_threads, [&](int64_t part) {
    draw_part(a, part_begin(a.num_draws, part, num_parts),
              part_begin(a.num_draws, part + 1, num_parts), counts, bounds, starts[part], drawn);
  });
  return all_known;
}

template bool draw_uniform(const DrawArguments&, const int64_t*, const RowBounds*,
                           const Sources<int32_t>&, const int32_t*, int32_t*, int32_t*, int);
template bool draw_uniform(const DrawArguments&, const int64_t*, const RowBounds*,
                           const Sources<int64_t>&, const int32_t*, int32_t*, int64_t*, int);
template bool draw_uniform(const DrawArguments&, const int64_t*, const RowBounds*,
                           const Sources<int32_t>&, const int64_t*, int64_t*, int32_t*, int);
template bool draw_uniform(const DrawArguments&, const int64_t*, const RowBounds*,
                           const Sources<int64_t>&, const int64_t*, int64_t*, int64_t*, int);

}  // namespace graphshard
