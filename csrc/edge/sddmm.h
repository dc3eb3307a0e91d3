// SPDX-License-Identifier: Apache-2.0
// One value per edge, from two rows that belong to its source, its destination or itself.

#pragma once

#include "runtime/csr.h"
#include "runtime/types.h"

namespace graphshard {

// Edges either grouped by destination, or one by one: position is then the id.
struct SddmmEdges {
  Ids indptr;        // [num_rows + 1], null for the second
  Ids eids;          // [num_edges], null where position is the id
  Ids src;           // [num_edges]
  Ids dst;           // [num_edges], null for the first
  int64_t num_rows;  // destinations
  int64_t num_src;
  int64_t num_edges;
};

template <typename T>
struct SddmmArguments {
  SddmmEdges edges;
  Rows<T> lhs;
  Rows<T> rhs;
  Target lhs_target;
  Target rhs_target;
  RowLoop loop;
  T* out;  // [num_edges, outer * inner], or [num_edges, outer] for a dot product
};

// Writes every element of `out`. `op` is add, sub, mul, div or dot.
template <typename T>
void sddmm(const SddmmArguments<T>& arguments, Op op, int num_threads);

}  // namespace graphshard
