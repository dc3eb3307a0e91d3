// SPDX-License-Identifier: Apache-2.0
// Edges sorted by one of their ends without being held in memory: a distribution sort in two steps.
//
// First, batches of edges are distributed to buckets, each of which is a range of rows (the end
// that is sorted by); the caller appends what a batch has for a bucket to a file. Then a bucket at
// a time is read back and sorted by counting. Both steps keep the order in which edges arrive, so
// that the result depends on the edges alone: not on batches, buckets or threads.
//
// A record is a row, counted from the first of its bucket (32 bits), a column (32 or 64 bits), and,
// where there is one, a value (32 or 64 bits): the id of the edge, or its weight. Records have no
// padding, and no alignment.

#pragma once

#include <cstddef>
#include <cstdint>

namespace graphshard {

// What ends of edges are renumbered to: `id` becomes ids[first + id], or first + id without ids.
// What must hold is id < num_ids.
template <typename V>
struct Renumbering {
  const V* ids;
  int64_t first;
  int64_t num_ids;
};

// The values that go with edges: values[i], or first + i without values.
struct EdgeValues {
  const uint32_t* values;
  int64_t first;
};

// Distributes edges to buckets of 2^shift rows each. `records` gets those of bucket 0 first, has
// room for all edges, and `counts`, of num_buckets entries, how many there are of each. V is the
// type of columns in records, E that of values, or void. Loops are left out if `drops_loops`.
// Throws std::out_of_range where an id is not below its number of ids, or a row is in no bucket.
template <typename I, typename V, typename E>
void bucket_edges(const I* rows, const I* cols, int64_t num_edges, const Renumbering<V>& of_rows,
                  const Renumbering<V>& of_cols, const EdgeValues& values, bool drops_loops,
                  int shift, int64_t num_buckets, std::byte* records, int64_t* counts,
                  int num_threads);

// Adds to degrees[row] how many of the records are of each row. Throws std::out_of_range where a
// row is not below num_rows, std::overflow_error where a degree takes more than 32 bits.
void count_rows(const std::byte* records, int64_t num_records, int64_t record_bytes,
                uint32_t* degrees, int64_t num_rows);

// Puts records in their places: places[row] is that of the next record of a row, and goes up. Only
// what belongs to places in [begin, end) is written, to cols[place - begin] and
// values[place - begin]: what does not fit in memory is sorted a window at a time.
template <typename V, typename E>
void place_rows(const std::byte* records, int64_t num_records, int64_t* places, int64_t num_rows,
                int64_t begin, int64_t end, V* cols, E* values);

// Sorts each row by column, and makes edges with the same two ends one with the sum of their
// weights, or 2^32 - 1 if that is less. Rows move together: how many edges are left is returned.
template <typename V>
int64_t merge_repeated(uint32_t* degrees, int64_t num_rows, V* cols, uint32_t* weights);

// Numbers that depend on the edges of a graph and their order, with edges numbered from `first`.
struct EdgeHashes {
  uint64_t in_order;   // of edges in their order
  uint64_t asymmetry;  // 0 if every edge is there as often as its reverse, and hardly ever else
};
template <typename I>
EdgeHashes hash_edges(const I* rows, const I* cols, int64_t num_edges, int64_t first_row,
                      int64_t first_col, int64_t first, int num_threads);

}  // namespace graphshard
