// SPDX-License-Identifier: Apache-2.0
// What the three walks over edges have in common: portions of edges, their scores, and the mask.

#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "attention/attention.h"
#include "attention/rows.h"
#include "runtime/edge_ids.h"
#include "runtime/parallel.h"
#include "simd/exp.h"

namespace graphshard {

inline constexpr int kPortion = 64;  // edges at a time
inline constexpr int kLanes = 16;    // entries are computed so many at a time
static_assert(kPortion <= kLongestRun && kPortion % kLanes == 0);

GRAPHSHARD_INLINE uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The edges [first, last) of a portion, those of `row` or a part of them.
struct Piece {
  int64_t row;
  int first;
  int last;
  bool begins;  // with the row's first edge
  bool ends;    // with its last
};

// [Note: portions] A walk takes some consecutive edges at a time: those of a few rows, or a part of
// those of one row. So the loops over entries are long though most rows are short, and what they
// write is read well after.
template <typename T>
struct Portion {
  RunIds nodes;  // at the other end of the edges
  RunIds edges;  // ids; loaded only where something is read by edge
  int64_t heads;
  int count = 0;
  int entries = 0;  // edges times heads
  int padded = 0;   // entries, up to a multiple of kLanes
  int num_pieces = 0;
  Piece pieces[kPortion];  // in the order of rows, each row once
  uint32_t words[kPortion];

  Portion(const Attention<T>& attention, const EdgeGroups& groups, const Span& span,
          bool skips_hubs)
      : nodes(groups.indices, groups.num_edges, row_bytes(attention)),
        edges(groups.eids, groups.num_edges, row_bytes(attention)),
        heads(attention.heads),
        a_(attention),
        groups_(groups),
        span_(span),
        row_(span.first_row),
        position_(span.slice >= 0 ? span.begin : groups.begin(span.first_row)),
        skips_hubs_(skips_hubs && span.slice < 0),
        reads_edges_(a_.edge != nullptr || a_.edge_terms != nullptr || a_.factor != nullptr ||
                     a_.mask.threshold != 0) {}

  // Turns to the next edges of the span; false if there are none.
  GRAPHSHARD_INLINE bool next() {
    num_pieces = 0;
    count = 0;
    int64_t begin = position_;
    while (row_ < span_.last_row && num_pieces < kPortion) {
      const int64_t end = span_.slice >= 0 ? span_.end : groups_.begin(row_ + 1);
      const int64_t rest = end - position_;
      if (skips_hubs_ && is_new_ && rest > kSliceEdges) {
        if (num_pieces > 0) break;
        begin = position_ = end;
        ++row_;
        continue;
      }
      if (count > 0 && count + rest > kPortion) break;
      const int taken = static_cast<int>(std::min<int64_t>(rest, kPortion));
      pieces[num_pieces++] = {row_, count, count + taken, is_new_, taken == rest};
      count += taken;
      position_ += taken;
      is_new_ = taken == rest;
      if (!is_new_) break;
      ++row_;
    }
    if (num_pieces == 0) return false;
    entries = count * static_cast<int>(heads);
    padded = (entries + kLanes - 1) / kLanes * kLanes;
    if (count == 0) return true;
    nodes.load(begin, position_);
    if (reads_edges_) edges.load(begin, position_);
    if (a_.mask.threshold != 0) load_words(a_.mask);
    return true;
  }

  // Rows of the nodes of a piece, of `dim` columns per head, side by side or `step` apart.
  GRAPHSHARD_INLINE RunRows<T> rows(const Piece& piece, const T* data, int64_t dim,
                                    bool prefetch) const {
    return rows(piece, data, dim, prefetch, heads * dim);
  }
  GRAPHSHARD_INLINE RunRows<T> rows(const Piece& piece, const T* data, int64_t dim, bool prefetch,
                                    int64_t step) const {
    return {{data, heads, dim, step}, nodes, piece.first, piece.last, prefetch};
  }

 private:
  static int64_t row_bytes(const Attention<T>& a) {
    return a.heads * a.dim * static_cast<int64_t>(sizeof(T));
  }

  GRAPHSHARD_INLINE void load_words(const EdgeMask& mask) {
    for (int k = 0; k < count; ++k) {
      uint32_t key;
      if (mask.keys != nullptr) {
        key = static_cast<uint32_t>(mask.keys[edges[k]]);
      } else {
        const uint64_t id = static_cast<uint64_t>(edges[k]);
        key = static_cast<uint32_t>(id) ^ mixed(static_cast<uint32_t>(id >> 32));
      }
      words[k] = mixed(key + mask.edge_seed);
    }
  }

  const Attention<T>& a_;
  const EdgeGroups& groups_;
  const Span& span_;
  int64_t row_;
  int64_t position_;  // of the first edge that was not taken
  bool skips_hubs_;
  bool reads_edges_;
  bool is_new_ = true;  // nothing of row_ was taken
};

// Calls function(n) where n is the number of heads, known to the compiler if it is a frequent one.
template <typename Function>
GRAPHSHARD_INLINE void with_heads(int64_t heads, const Function& function) {
  if (heads == 4) return function(std::integral_constant<int, 4>{});
  if (heads == 1) return function(std::integral_constant<int, 1>{});
  if (heads == 8) return function(std::integral_constant<int, 8>{});
  function(static_cast<int>(heads));
}

// Calls function(k, h, entry) for each edge in [first, last) and head; the heads of an edge at once
// where their number is known.
template <typename Function>
GRAPHSHARD_INLINE void for_each_entry(int64_t num_heads, int first, int last,
                                      const Function& function) {
  with_heads(num_heads, [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    for (int k = first; k < last; ++k) {
      if constexpr (std::is_same_v<decltype(heads), int>) {
        for (int h = 0; h < heads; ++h) function(k, h, k * heads + h);
      } else {
#pragma omp simd
        for (int h = 0; h < heads; ++h) function(k, h, k * heads + h);
      }
    }
  });
}

template <typename T, typename Function>
GRAPHSHARD_INLINE void for_each_entry(const Portion<T>& portion, const Function& function) {
  for_each_entry(portion.heads, 0, portion.count, function);
}

// Calls function(i) for entries [0, padded), in vectors.
template <typename T, typename Function>
GRAPHSHARD_INLINE void for_lanes(const Portion<T>& portion, const Function& function) {
  for (int i = 0; i < portion.padded; i += kLanes) {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) function(i + j);
  }
}

// out[h] = join(... join(out[h], first entry of head h in the piece) ..., last).
template <typename V, typename Join>
GRAPHSHARD_INLINE void fold_entries(int64_t num_heads, const Piece& piece, const V* entries, V* out,
                                    const Join& join) {
  with_heads(num_heads, [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    if constexpr (std::is_same_v<decltype(heads), int>) {
      for (int k = piece.first; k < piece.last; ++k) {
        for (int h = 0; h < heads; ++h) out[h] = join(out[h], entries[k * heads + h]);
      }
    } else {
      V folded[heads];
      for (int h = 0; h < heads; ++h) folded[h] = out[h];
      for (int k = piece.first; k < piece.last; ++k) {
#pragma omp simd
        for (int h = 0; h < heads; ++h) folded[h] = join(folded[h], entries[k * heads + h]);
      }
      for (int h = 0; h < heads; ++h) out[h] = folded[h];
    }
  });
}

// to[entry] = from[h] for the edges of the piece.
template <typename V>
GRAPHSHARD_INLINE void repeat(int64_t heads, const Piece& piece, const V* from, V* to) {
  for_each_entry(heads, piece.first, piece.last,
                 [&](int, int h, int entry) GRAPHSHARD_INLINE_LAMBDA { to[entry] = from[h]; });
}

template <typename V>
GRAPHSHARD_INLINE V add(V a, V b) {
  return a + b;
}

// m of each entry, without its c; call only where there is a mask.
template <typename T>
GRAPHSHARD_INLINE void load_mask(const Attention<T>& a, const Portion<T>& portion, uint32_t* buffer,
                                 wide_t<T>* multiplier) {
  const uint32_t last_dropped = static_cast<uint32_t>(a.mask.threshold - 1);
  const wide_t<T> kept = static_cast<wide_t<T>>(a.mask.kept);
  for (int64_t h = 0; h < portion.heads; ++h) {
    const uint32_t head = static_cast<uint32_t>(h);
    buffer[portion.entries + h] = mixed(a.mask.head_seed + head * 0x9e3779b9u);
  }
  const uint32_t* words = buffer + portion.entries;
  for_each_entry(portion, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    buffer[entry] = portion.words[k] ^ words[h];
  });
  for_lanes(portion, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    multiplier[i] = mixed(buffer[i]) <= last_dropped ? 0 : kept;
  });
}

// Multiplies each entry by its c.
template <typename T>
GRAPHSHARD_INLINE void multiply_by_factor(const Attention<T>& a, const Portion<T>& portion,
                                          wide_t<T>* entries) {
  const int64_t step = a.factor_width == 1 ? 0 : 1;
  for_each_entry(portion, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    entries[entry] *= a.factor[portion.edges[k] * a.factor_width + h * step];
  });
}

// One end of the edges as a walk sees it: the end that varies within a row.
template <typename T>
struct Varying {
  const T* rows;           // [nodes, heads * score_dim]
  const wide_t<T>* terms;  // a number per node and head, of additive scores
  int64_t terms_per_node;  // distance between nodes
};

template <typename T>
GRAPHSHARD_INLINE void add_edge_terms(const Attention<T>& a, const Portion<T>& portion,
                                      const Piece& piece, wide_t<T>* z) {
  if (a.edge_terms == nullptr) return;
  for_each_entry(portion.heads, piece.first, piece.last,
                 [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
                   z[entry] += a.edge_terms[portion.edges[k] * a.heads + h];
                 });
}

// A row in the type of sums: itself if that is its type, else a copy in `buffer`.
template <typename T>
GRAPHSHARD_INLINE const wide_t<T>* widened(const T* row, int64_t width, wide_t<T>* buffer) {
  if constexpr (std::is_same_v<T, wide_t<T>>) {
    return row;
  } else {
    for (int64_t j = 0; j < width; ++j) buffer[j] = widen(row[j]);
    return buffer;
  }
}

// How each kind of score is computed: an entry z per edge and head of a piece, from what the fixed
// end of the edges has (a number per head, or a row) and the varying one. `z` of additive scores
// still has to go through the leaky ReLU. The buffer of `fixed` has room for a row.
struct AdditiveScore {
  static constexpr Score kScore = Score::kAdditive;
  static constexpr bool kReadsRows = false;

  template <typename T>
  static GRAPHSHARD_INLINE const wide_t<T>* fixed(const Attention<T>& a, const T*,
                                                  const wide_t<T>* terms, int64_t row, wide_t<T>*) {
    return terms + row * a.heads;
  }

  template <typename T>
  static GRAPHSHARD_INLINE void scores(const Attention<T>& a, const wide_t<T>* fixed,
                                       const Varying<T>& varying, const Portion<T>& portion,
                                       const Piece& piece, wide_t<T>* z) {
    const wide_t<T>* terms = varying.terms;
    for (int k = piece.first; k < piece.last; ++k) {
      GRAPHSHARD_PREFETCH(terms + portion.nodes.far_ahead_of(k) * varying.terms_per_node);
    }
    for_each_entry(portion.heads, piece.first, piece.last,
                   [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
                     z[entry] = fixed[h] + terms[portion.nodes[k] * varying.terms_per_node + h];
                   });
    add_edge_terms(a, portion, piece, z);
  }
};

struct JointScore {
  static constexpr Score kScore = Score::kJoint;
  static constexpr bool kReadsRows = true;

  template <typename T>
  static GRAPHSHARD_INLINE const wide_t<T>* fixed(const Attention<T>& a, const T* rows,
                                                  const wide_t<T>*, int64_t row,
                                                  wide_t<T>* buffer) {
    const int64_t width = a.heads * a.score_dim;
    return widened(rows + row * width, width, buffer);
  }

  template <typename T>
  static GRAPHSHARD_INLINE void scores(const Attention<T>& a, const wide_t<T>* fixed,
                                       const Varying<T>& varying, const Portion<T>& portion,
                                       const Piece& piece, wide_t<T>* z) {
    joint_rows(portion.rows(piece, varying.rows, a.score_dim, true), {a.edge, &portion.edges},
               fixed, a.vector, a.slope, z);
  }
};

struct DotScore {
  static constexpr Score kScore = Score::kDot;
  static constexpr bool kReadsRows = true;

  template <typename T>
  static GRAPHSHARD_INLINE const T* fixed(const Attention<T>& a, const T* rows, const wide_t<T>*,
                                          int64_t row, wide_t<T>*) {
    return rows + row * a.heads * a.score_dim;
  }

  template <typename T>
  static GRAPHSHARD_INLINE void scores(const Attention<T>& a, const T* fixed,
                                       const Varying<T>& varying, const Portion<T>& portion,
                                       const Piece& piece, wide_t<T>* z) {
    dot_rows(portion.rows(piece, varying.rows, a.score_dim, true), fixed, z);
    for (int64_t i = piece.first * a.heads; i < piece.last * a.heads; ++i) z[i] *= a.scale;
    add_edge_terms(a, portion, piece, z);
  }
};

// Memory of a task, zeros at first, taken piece by piece, each on a line of its own.
template <typename V>
class Workspace {
 public:
  explicit Workspace(int64_t size)
      : memory_(std::make_unique<V[]>(size + kLine)), next_(memory_.get()) {
    const uintptr_t beyond = reinterpret_cast<uintptr_t>(next_) % 64;
    if (beyond != 0) next_ += (64 - beyond) / sizeof(V);
  }
  static int64_t size_of(int64_t piece) { return (piece + kLine - 1) / kLine * kLine; }

  V* take(int64_t piece) {
    V* taken = next_;
    next_ += size_of(piece);
    return taken;
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(V);
  std::unique_ptr<V[]> memory_;
  V* next_;
};

template <typename Function>
void with_score(Score score, const Function& function) {
  switch (score) {
    case Score::kAdditive:
      return function(AdditiveScore{});
    case Score::kJoint:
      return function(JointScore{});
    case Score::kDot:
      return function(DotScore{});
  }
}

// Spans of rows for a walk, the same for any number of threads, so that what a walk sums per span
// is too.
inline Schedule fixed_schedule(const EdgeGroups& edges, int64_t width) {
  constexpr int kThreads = 16;
  return make_schedule(edges.indptr, edges.num_rows, width, kThreads);
}

}  // namespace graphshard
