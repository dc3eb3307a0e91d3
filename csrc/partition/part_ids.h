// SPDX-License-Identifier: Apache-2.0
// Ids in the parts of a graph, whose edges pass by in blocks: who reads a node, which nodes of
// others a part holds, what their local ids are, and which edges are cut.

#pragma once

#include <cstddef>
#include <cstdint>

namespace graphshard {

// Adds 1 to degrees[first + id] for each id. Throws std::out_of_range where an id is not below
// num_ids.
template <typename I>
void count_ids(const I* ids, int64_t count, int64_t first, int64_t num_ids, uint32_t* degrees,
               int num_threads);

// Orders nodes by keys below num_keys; those with the same key stay in the order of `order`, or of
// their ids where it is null. Throws std::out_of_range where a key, or a node, is out of range.
template <typename K, typename V>
void order_by_key(const K* keys, int64_t num_nodes, int64_t num_keys, const V* order, V* ordered,
                  int num_threads);

// The parts of nodes, and the ids of the two ends of edges in them: first_* is the node with id 0.
struct Owners {
  const uint16_t* parts;
  int64_t num_parts;
  int64_t first_src;
  int64_t num_src;
  int64_t first_dst;
  int64_t num_dst;
};

// Adds to pairs[owner * num_parts + reader] how many edges lead from a node of `owner` to one of
// another part, `reader`.
template <typename I>
void count_cut(const I* src, const I* dst, int64_t num_edges, const Owners& owners, int64_t* pairs,
               int num_threads);

// Sets bit digits[owner * num_parts + reader] of masks[source] for each such edge, if it is
// below 8.
template <typename I>
void mark_readers(const I* src, const I* dst, int64_t num_edges, const Owners& owners,
                  const uint8_t* digits, uint8_t* masks, int num_threads);

// Sets the bits of ids outside [first, last), of which there are num_ids; returns how many ids were
// outside, repeated ones counted each time.
template <typename V>
int64_t mark_outside(const V* ids, int64_t count, int64_t first, int64_t last, int64_t num_ids,
                     uint64_t* bits);

// Writes how many bits are set before each word; returns how many are set.
int64_t rank_words(const uint64_t* bits, int64_t num_words, int64_t* ranks);

// Writes the ids whose bits are set in [first_word, last_word), ascending; returns how many.
int64_t list_marked(const uint64_t* bits, int64_t first_word, int64_t last_word, int64_t* ids);

// Local ids: those of ids in [first, last) count from 0, those of others, whose bits must be set,
// come after them, ascending. Throws std::out_of_range for others whose bits are not set.
template <typename V, typename I>
void find_local_ids(const V* ids, int64_t count, int64_t first, int64_t last, int64_t num_ids,
                    const uint64_t* bits, const int64_t* ranks, I* local_ids);

// The edges of consecutive rows whose columns belong to other parts than `part`, those from part 0
// first: as records of the column, the row (both V) and the edge's number, from first_edge on
// (int64). Part p owns the ids from ends[p - 1] (0 for part 0) up to ends[p]. There must be room
// for all edges; counts[p] gets how many records there are from each part.
template <typename V>
void find_cut_edges(const uint32_t* degrees, int64_t num_rows, const V* cols, int64_t first_row,
                    int64_t first_edge, const int64_t* ends, int64_t num_parts, int64_t part,
                    std::byte* records, int64_t* counts);

}  // namespace graphshard
