// SPDX-License-Identifier: Apache-2.0
// Edges grouped by one of their ends, and the ids in them.

#pragma once

#include <cstdint>

#include "simd/macros.h"

namespace graphshard {

// Ids of 32 or 64 bits behind one type. Loops that spend their time on rows of features are
// compiled for this, once, and not for either width; the branch always goes the same way.
class Ids {
 public:
  Ids() = default;
  explicit Ids(const int32_t* ids) : data_(ids), wide_(false) {}
  explicit Ids(const int64_t* ids) : data_(ids), wide_(true) {}

  GRAPHSHARD_INLINE int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  GRAPHSHARD_INLINE explicit operator bool() const { return data_ != nullptr; }

  // The array, if it is of that width; null otherwise.
  GRAPHSHARD_INLINE const int64_t* wide() const {
    return wide_ ? static_cast<const int64_t*>(data_) : nullptr;
  }
  GRAPHSHARD_INLINE const int32_t* narrow() const {
    return wide_ ? nullptr : static_cast<const int32_t*>(data_);
  }
  // Where id number i is stored, to request it.
  GRAPHSHARD_INLINE const void* address(int64_t i) const {
    return static_cast<const char*>(data_) + i * (wide_ ? 8 : 4);
  }

 private:
  const void* data_ = nullptr;
  bool wide_ = false;
};

// Likewise, to write to.
class WritableIds {
 public:
  WritableIds() = default;
  explicit WritableIds(int32_t* ids) : data_(ids), wide_(false) {}
  explicit WritableIds(int64_t* ids) : data_(ids), wide_(true) {}

  GRAPHSHARD_INLINE void set(int64_t i, int64_t id) const {
    if (wide_) {
      static_cast<int64_t*>(data_)[i] = id;
    } else {
      static_cast<int32_t*>(data_)[i] = static_cast<int32_t>(id);
    }
  }
  GRAPHSHARD_INLINE int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  void* data_ = nullptr;
  bool wide_ = false;
};

// Compressed sparse rows: in-edges grouped by destination, or out-edges by source. `indices` are
// the nodes at the other end. Without `eids`, an edge's position is its id.
struct Csr {
  Ids indptr;
  Ids indices;
  Ids eids;
  int64_t num_rows;
  int64_t num_edges;

  GRAPHSHARD_INLINE int64_t begin(int64_t row) const { return indptr[row]; }
  GRAPHSHARD_INLINE int64_t end(int64_t row) const { return indptr[row + 1]; }
  GRAPHSHARD_INLINE int64_t edge_id(int64_t position) const {
    return eids ? eids[position] : position;
  }
};

// Whether indptr, of num_rows + 1 entries, runs from 0 to `end` and never falls.
bool ascends(const Ids& indptr, int64_t num_rows, int64_t end);

// From a list of edges to a Csr, by a stable counting sort. `keys` in [0, num_keys); key k's edges
// go to [indptr[k], indptr[k + 1]), by ascending position: `grouped` gets their `others`,
// `positions`, unless it is null, where they stood. Throws std::out_of_range where there is another
// key.
template <typename I>
void group_by_key(const I* keys, const I* others, int64_t num_edges, int64_t num_keys, I* indptr,
                  I* grouped, I* positions, int num_threads);

}  // namespace graphshard
