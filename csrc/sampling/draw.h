// SPDX-License-Identifier: Apache-2.0
// Drawing edges of rows at random. What is drawn for a row does not depend on the other rows or on
// the number of threads; ops/reference.py says the same in torch, bit for bit.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/csr.h"
#include "sampling/exclude.h"

namespace graphshard {

enum class WeightType { kFloat, kDouble, kByte };

// Weights of edges, read where the caller has them; no data where all edges are alike.
struct Weights {
  const void* data;
  WeightType type;
  int64_t size;
  Ids ids;  // by position which weight an edge has; null where weights are by position
};

// A fanout, and a degree, are below this; as a fanout it means all.
inline constexpr int64_t kNoLimit = 0x7FFFFFFF;

struct DrawArguments {
  Ids indptr;
  int64_t num_rows;
  int64_t num_edges;
  Ids rows;
  Ids row_ids;
  int64_t num_draws;
  int64_t fanout;
  uint64_t key;
  bool replace;  // not with kNoLimit
  Weights prob;
  Ids labor_ids;  // null unless LABOR
  Exclusions excluded;
};

// Where the edges of a row are.
struct RowBounds {
  int64_t begin;
  int64_t end;
};

// One row. Its edges that are not excluded are `degree` edges, at offsets [0, degree).
struct DrawRow {
  int64_t begin;
  int64_t end;
  int32_t degree;
  Skipped skipped;
};

GRAPHSHARD_INLINE void prefetch_row(const DrawArguments& a, int64_t at) {
  const int64_t number = a.rows[at];
  if (number < 0 || number >= a.num_rows) return;
  // The two entries that are read, of which one in eight pairs is in two lines.
  GRAPHSHARD_PREFETCH(a.indptr.address(number));
  GRAPHSHARD_PREFETCH(a.indptr.address(number + 1));
}

// Row number `at` of a.rows; false if it is out of range or has no legal degree.
GRAPHSHARD_INLINE bool find_row(const DrawArguments& a, int64_t at, RowBounds& bounds) {
  const int64_t number = a.rows[at];
  if (number < 0 || number >= a.num_rows) return false;
  bounds = {a.indptr[number], a.indptr[number + 1]};
  if (bounds.begin < 0 || bounds.begin > bounds.end || bounds.end > a.num_edges) return false;
  return bounds.end - bounds.begin < kNoLimit;
}

// `skipped` keeps excluded positions until the next call.
GRAPHSHARD_INLINE DrawRow row_within(const DrawArguments& a, const RowBounds& bounds,
                                     std::vector<int64_t>& skipped) {
  DrawRow row{bounds.begin, bounds.end, static_cast<int32_t>(bounds.end - bounds.begin), {}};
  if (a.excluded.any()) {
    row.skipped = a.excluded.of_row(row.begin, row.end, skipped);
    row.degree -= static_cast<int32_t>(row.skipped.size());
  }
  return row;
}

// Both; false as from find_row.
GRAPHSHARD_INLINE bool read_row(const DrawArguments& a, int64_t at, std::vector<int64_t>& skipped,
                                DrawRow& row) {
  RowBounds bounds;
  if (!find_row(a, at, bounds)) return false;
  row = row_within(a, bounds, skipped);
  return true;
}

// Turns begin + offset into the position of the edge, in place.
template <typename I>
void pass_over(const DrawRow& row, bool ascending, int64_t count, I* out) {
  const int64_t size = row.skipped.size();
  int64_t passed = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (ascending) {
      while (passed < size && row.skipped.first[passed] <= out[i] + passed) ++passed;
    } else {
      int64_t high = size;
      for (passed = 0; passed < high;) {
        const int64_t middle = passed + (high - passed) / 2;
        if (row.skipped.first[middle] <= out[i] + middle) {
          passed = middle + 1;
        } else {
          high = middle;
        }
      }
    }
    out[i] += static_cast<I>(passed);
  }
}

// Sources of edges at consecutive positions, in numbers of their own: one below `own` is the id
// that is `shift` more, others say which of `others` is the id.
struct SourcePiece {
  Ids sources;
  int64_t own;
  int64_t shift;
  Ids others;
  int64_t num_others;
};

// Pieces whose positions follow one another: piece i has those in [starts[i], starts[i + 1]).
struct SourcePieces {
  std::vector<int64_t> starts;
  std::vector<SourcePiece> pieces;

  // Which piece a position is in; `guess` is where the one before was, and becomes the answer.
  GRAPHSHARD_INLINE size_t piece_of(int64_t position, size_t& guess) const {
    if (position >= starts[guess] && position < starts[guess + 1]) return guess;
    const size_t count = pieces.size();
    if (count <= kFewPieces) {  // rows of a batch are anywhere: a branch would be a coin toss
      guess = 0;
      for (size_t i = 1; i < count; ++i) guess += position >= starts[i] ? 1 : 0;
    } else {
      const auto after = std::upper_bound(starts.begin() + 1, starts.end() - 1, position);
      guess = static_cast<size_t>(after - starts.begin()) - 1;
    }
    return guess;
  }

 private:
  static constexpr size_t kFewPieces = 16;
};

// Where the source of each edge is: in an array, or in pieces.
template <typename J>
struct Sources {
  const J* ids;
  const SourcePieces* pieces;  // null where there is an array
};

// Ids of the sources at positions in edges[begin, end) that are in a piece, whose own positions are
// in [first, last). Returns where the first is that is not; all_known is false once a source has no
// id. A branch on whose node a source is would be a coin toss.
template <typename S, typename O, typename I, typename J>
GRAPHSHARD_INLINE int64_t pick_ids(int64_t begin, int64_t end, const SourcePiece& piece,
                                   const S* sources, const O* others, int64_t first, int64_t last,
                                   const I* edges, J* picked, bool& all_known) {
  static constexpr O kNone = 0;
  if (piece.num_others == 0) others = &kNone;
  bool known = true;
  int64_t i = begin;
  for (; i < end && edges[i] >= first && edges[i] < last; ++i) {
    const int64_t number = sources[edges[i] - first];
    const int64_t other = number - piece.own;
    known &= other < piece.num_others || other < 0;
    const int64_t there = others[other >= 0 && other < piece.num_others ? other : 0];
    const int64_t id = other < 0 ? number + piece.shift : there;
    known &= id >= 0;
    picked[i] = static_cast<J>(id);
  }
  all_known &= known;
  return i;
}

// For positions in edges[begin, end): picked = the source there; false if one has no id.
template <typename I, typename J>
bool look_up_pieces(int64_t begin, int64_t end, const SourcePieces& from, const I* edges,
                    J* picked) {
  bool all_known = true;
  size_t guess = 0;
  for (int64_t i = begin; i < end;) {
    const size_t at = from.piece_of(edges[i], guess);
    const SourcePiece& piece = from.pieces[at];
    const auto pick = [&](const auto* sources, const auto* others) {
      return pick_ids(i, end, piece, sources, others, from.starts[at], from.starts[at + 1], edges,
                      picked, all_known);
    };
    const auto with_others = [&](const auto* sources) {
      const int32_t* narrow = piece.others.narrow();
      return narrow != nullptr ? pick(sources, narrow) : pick(sources, piece.others.wide());
    };
    const int32_t* narrow = piece.sources.narrow();
    i = narrow != nullptr ? with_others(narrow) : with_others(piece.sources.wide());
  }
  return all_known;
}

// For positions in edges[begin, end): picked = indices[position], and edges = eids[position] in
// their place, unless eids is nullptr.
template <typename I, typename J>
GRAPHSHARD_INLINE void look_up(int64_t begin, int64_t end, const J* indices, const I* eids,
                               I* edges, J* picked) {
  if (eids == nullptr) {
    for (int64_t i = begin; i < end; ++i) picked[i] = indices[edges[i]];
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    const I position = edges[i];
    picked[i] = indices[position];
    edges[i] = eids[position];
  }
}

// Without weights and LABOR. Writes how many edges each row draws to counts, and where they are to
// bounds, and returns their sum, or -1 - i for the first of the rows, i, that find_row refuses.
int64_t count_uniform(const DrawArguments& a, int64_t* counts, RowBounds* bounds, int num_threads);

// Draws what count_uniform has counted; edges and picked have an entry for each. There are no eids
// with pieces. False if a source has no id.
template <typename I, typename J>
bool draw_uniform(const DrawArguments& a, const int64_t* counts, const RowBounds* bounds,
                  const Sources<J>& sources, const I* eids, I* edges, J* picked, int num_threads);

// Edges drawn with weights or LABOR. Their number is known only when they are drawn, so they are
// held here until there are arrays for them.
class Draft {
 public:
  // Writes the number of edges drawn for each row to counts.
  Draft(const DrawArguments& a, int64_t* counts, int num_threads);

  // How many there are in all, or -1 - i for a row i that read_row refuses.
  int64_t total() const { return total_; }

  // As draw_uniform.
  template <typename I, typename J>
  bool write(const Sources<J>& sources, const I* eids, I* edges, J* picked, int num_threads) const;

 private:
  std::vector<std::vector<int64_t>> parts_;  // positions
  std::vector<int64_t> starts_;
  int64_t total_ = 0;
};

}  // namespace graphshard
