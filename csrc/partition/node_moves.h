// SPDX-License-Identifier: Apache-2.0
// What a partitioner does to nodes while the edges pass by: clustering by size-constrained label
// propagation, contraction, and refinement of parts (H. Meyerhenke, P. Sanders, C. Schulz,
// "Partitioning complex networks via size-constrained clustering", 2014; semi-external: Y.
// Akhremtsev, P. Sanders, C. Schulz, "(Semi-)external algorithms for graph partitioning and
// clustering", 2014). State is per node; edges come as blocks of rows of an undirected graph.
//
// [Note: repeatable moves] Nodes move in batches whose ends the caller chooses from the graph
// alone. All nodes of a batch choose by what was so at its beginning, in any number of threads;
// then they move one after another, as far as there still is room. So what comes out does not
// depend on threads.

#pragma once

#include <cstdint>

namespace graphshard {

// Consecutive rows of an undirected graph: the neighbours of nodes first_row, first_row + 1, ...
// Without weights, every edge weighs 1. V is the type of ids: uint32_t or int64_t. Where in_degrees
// is there, so many of a row's first columns are sources of its node, and the others are nodes that
// it is a source of; without it every column is both.
template <typename V>
struct RowBlock {
  const uint32_t* degrees;
  const V* cols;
  const uint32_t* weights;
  int64_t first_row;
  int64_t num_rows;
  int64_t num_nodes;  // of the whole graph, above every col
  const int64_t* batch_ends;
  int64_t num_batches;
  const uint32_t* in_degrees = nullptr;
};

// What nodes count for, of_nodes[node * num_constraints + constraint]; without of_nodes there is
// one constraint, for which every node counts 1.
struct NodeWeights {
  const uint32_t* of_nodes;
  int64_t num_constraints;
};

// One pass of label propagation: each node takes the label that most of its neighbours, by weight,
// have, among those of clusters which have room for it, one of them drawn by node and label where
// several have as many; its own where none has more. `sizes`, of
// num_nodes * num_constraints entries, is what each cluster weighs, and no more than `limits` if
// that was so before. `favourites`, unless it is null, gets the label that most neighbours had,
// room or not, and the node's own where it has no neighbours. Returns how many nodes moved.
template <typename V>
int64_t propagate_labels(const RowBlock<V>& block, const NodeWeights& weights, V* labels,
                         uint32_t* sizes, const uint32_t* limits, V* favourites, int num_threads);

// The edges of the graph whose nodes are clusters, those of a row with the same two ends as one.
// Rows, columns and weights are written, for which there is room for all edges of the block; how
// many there are is returned.
template <typename V>
int64_t contract(const RowBlock<V>& block, const V* clusters, V* rows, V* cols, uint32_t* weights,
                 int num_threads);

struct Refinement {
  int64_t num_parts;
  uint16_t* parts;        // of each node; moves
  int64_t* loads;         // [num_parts, num_constraints]; moves
  const int64_t* limits;  // [num_constraints]: the most that a part should weigh
  int64_t allowed_loss;   // how much a node may add to the cut to leave a part that is too heavy
};

// One pass of refinement: each node moves to the part with most of its neighbours, by weight, among
// those that have room for it, if that lowers the cut; or, out of a part that is too heavy, if it
// does not raise it by more than allowed_loss. Returns how many nodes moved.
template <typename V>
int64_t refine_parts(const RowBlock<V>& block, const NodeWeights& weights,
                     const Refinement& refinement, int num_threads);

// [Note: halos] The halo of a part are the nodes of others that are sources of a node in it: what
// it fetches in a layer. How many edges a node has into each part, up to 2, tells which nodes enter
// and leave halos with a move: a source leaves that of the old part if this was its only edge into
// it, and enters that of the new part if it had none. 2 bits of a node for each part are enough.

// Bytes of a node in a table of such numbers.
constexpr int64_t halo_bytes(int64_t num_parts) { return (num_parts + 3) / 4; }

// Of the nodes that are `near` a boundary, and, for those of the block, then no longer unless they
// have neighbours in another part: writes the numbers of each row's node to `table`, [num_nodes,
// halo_bytes(num_parts)], and adds to halos[part] how many of these nodes are in the halo of a
// part. Others have all neighbours in their part. Returns how many edges of these nodes lead to
// other parts.
template <typename V>
int64_t count_halos(const RowBlock<V>& block, const uint16_t* parts, int64_t num_parts,
                    uint8_t* near, uint8_t* table, int64_t* halos, int num_threads);

// What an edge that is cut costs.
constexpr int64_t kEdgePrice = 256;

struct HaloLimit {
  uint8_t* near;  // of each node whether it may have neighbours in another part; moves
  uint8_t* table;
  int64_t* halos;   // [num_parts]; as they are expected to become
  int64_t largest;  // the most that a halo may grow to
  int64_t price;    // what a node in such a halo costs; in another that times the eighth power of
                    // its share of the largest
  int64_t* budget;  // by how many edges the cut may still grow; moves that lower it add to it
};

// One pass in which nodes move where that makes edges between parts and halos together cheaper,
// within the refinement's limits; its allowed_loss is not looked at. Edges count 1. Returns how
// many moved.
template <typename V>
int64_t limit_halos(const RowBlock<V>& block, const NodeWeights& weights,
                    const Refinement& refinement, const HaloLimit& limit, int num_threads);

}  // namespace graphshard
