// SPDX-License-Identifier: Apache-2.0
// How the walks of attention take edges: some at a time, of a few rows or of a part of one.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "attention/attention.h"
#include "attention/rows.h"
#include "runtime/edge_ids.h"
#include "runtime/parallel.h"

namespace graphshard {

inline constexpr int kChunkEdges = 64;
inline constexpr int kStep = 16;  // entries are computed so many at a time
static_assert(kChunkEdges <= kLongestRun && kChunkEdges % kStep == 0);

// The edges [first, last) of a chunk: those of `row`, or a part of them.
struct Piece {
  int64_t row;
  int first;
  int last;
  bool begins;  // with the row's first edge
  bool ends;    // with its last
};

// [Note: chunks] A walk takes some consecutive edges at a time: those of a few rows, or a part of
// those of one row. So the loops over entries are long though most rows are short, and what they
// write is read well after.
struct Chunk {
  EdgeIds nodes;  // at the other end of the edges
  EdgeIds edges;  // ids; loaded only where something is read by edge
  int64_t heads;
  int count = 0;
  int entries = 0;  // edges times heads
  int padded = 0;   // entries, up to a multiple of kStep
  int num_pieces = 0;
  Piece pieces[kChunkEdges];  // in the order of rows, each row once

  // `row_bytes`: what is read per edge. `skips_long_rows`: those that are cut into slices.
  Chunk(const Csr& csr, const Span& span, int64_t heads, int64_t row_bytes, bool reads_edges,
        bool skips_long_rows)
      : nodes(csr.indices, csr.num_edges, row_bytes),
        edges(csr.eids, csr.num_edges, row_bytes),
        heads(heads),
        csr_(csr),
        span_(span),
        row_(span.first_row),
        position_(span.slice >= 0 ? span.begin : csr.begin(span.first_row)),
        skips_long_rows_(skips_long_rows && span.slice < 0),
        reads_edges_(reads_edges) {}

  // Turns to the next edges of the span; false if there are none.
  bool next() {
    num_pieces = 0;
    count = 0;
    int64_t begin = position_;
    while (row_ < span_.last_row && num_pieces < kChunkEdges) {
      const int64_t end = span_.slice >= 0 ? span_.end : csr_.end(row_);
      const int64_t rest = end - position_;
      if (skips_long_rows_ && is_new_ && rest > kSliceEdges) {
        if (num_pieces > 0) break;
        begin = position_ = end;
        ++row_;
        continue;
      }
      if (count > 0 && count + rest > kChunkEdges) break;
      const int taken = static_cast<int>(std::min<int64_t>(rest, kChunkEdges));
      pieces[num_pieces++] = {row_, count, count + taken, is_new_, taken == rest};
      count += taken;
      position_ += taken;
      is_new_ = taken == rest;
      if (!is_new_) break;
      ++row_;
    }
    if (num_pieces == 0) return false;
    entries = count * static_cast<int>(heads);
    padded = (entries + kStep - 1) / kStep * kStep;
    if (count == 0) return true;
    nodes.load(begin, position_);
    if (reads_edges_) edges.load(begin, position_);
    return true;
  }

  // Rows of the nodes of a piece, of `dim` columns per head, side by side or `step` apart.
  template <typename T>
  RunRows<T> rows(const Piece& piece, const T* data, int64_t dim, bool prefetch) const {
    return rows(piece, data, dim, prefetch, heads * dim);
  }
  template <typename T>
  RunRows<T> rows(const Piece& piece, const T* data, int64_t dim, bool prefetch,
                  int64_t step) const {
    return {{data, heads, dim, step}, nodes, piece.first, piece.last, prefetch};
  }

 private:
  const Csr& csr_;
  const Span& span_;
  int64_t row_;
  int64_t position_;  // of the first edge that was not taken
  bool skips_long_rows_;
  bool reads_edges_;
  bool is_new_ = true;  // nothing of row_ was taken
};

template <typename T>
Chunk chunk_of(const Attention<T>& a, const Csr& csr, const Span& span, bool skips_long_rows) {
  return Chunk(csr, span, a.heads, a.width() * static_cast<int64_t>(sizeof(T)),
               a.reads_edges() || a.edge != nullptr, skips_long_rows);
}

// Spans of rows for a walk, the same for any number of threads, so that what a walk sums per span
// is too.
inline Schedule fixed_schedule(const Csr& csr, int64_t width) {
  constexpr int kThreads = 16;
  return make_schedule(csr.indptr, csr.num_rows, width, kThreads);
}

// A row in the type of sums: itself if that is its type, else a copy in `buffer`.
template <typename T>
const wide_t<T>* widened(const T* row, int64_t width, wide_t<T>* buffer) {
  if constexpr (std::is_same_v<T, wide_t<T>>) {
    return row;
  } else {
    widen_row(row, width, buffer);
    return buffer;
  }
}

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

// The scores of a piece that are made of rows: z of each edge and head, from the row that the fixed
// end has and those of the varying one. The buffer has room for a row.
template <typename T>
void score_rows(const Attention<T>& a, const Chunk& chunk, const Piece& piece, const T* fixed,
                const T* varying, wide_t<T>* buffer, wide_t<T>* z) {
  const int64_t width = a.score_width();
  const T* row = fixed + piece.row * width;
  const RunRows<T> run = chunk.rows(piece, varying, a.score_dim, true);
  if (a.score == Score::kJoint) {
    joint_rows(run, {a.edge, &chunk.edges}, widened(row, width, buffer), a.vector, a.slope, z);
  } else {
    dot_rows(run, row, z);
  }
}

}  // namespace graphshard
