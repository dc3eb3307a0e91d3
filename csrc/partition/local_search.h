// SPDX-License-Identifier: Apache-2.0
// Refinement of parts by local searches, of graphs in memory: P. Sanders, C. Schulz, "Engineering
// multilevel graph partitioning algorithms" (2011), section 4.2, after C. Fiduccia and R.
// Mattheyses (1982). A search begins at one node on a boundary and moves the node near it that
// gains most, again and again, also where that loses; what it moved after its best moment moves
// back. So a boundary gets over what stops moves that each must gain.

#pragma once

#include <cstdint>

#include "partition/node_moves.h"

namespace graphshard {

// Neighbours of every node; without weights, every edge weighs 1.
struct GraphInMemory {
  const int64_t* indptr;
  const uint32_t* cols;
  const uint32_t* weights;
  int64_t num_nodes;
  int64_t num_edges;  // entries of cols
};

struct SearchLimits {
  int64_t num_free;  // nodes from here on stay where they are
  int64_t patience;  // a search ends after so many moves without a better moment
  int64_t rounds;    // at most
  int64_t share;  // and no other round after one that gained no more than the first one's / share
};

// Rounds of searches, each from all nodes on boundaries, in an order that is drawn. In a round a
// node moves at most once, into parts with room for it; the refinement's allowed_loss is not looked
// at. Searches come in batches: all of a batch begin with the same parts, in any number of threads;
// then their moves are made one after another, as far as they still gain (node_moves.h, note on
// repeatable moves). Returns by how much the cut got smaller, each edge counted once.
int64_t search_moves(const GraphInMemory& graph, const NodeWeights& weights,
                     const Refinement& refinement, const SearchLimits& limits, int num_threads);

}  // namespace graphshard
