// SPDX-License-Identifier: Apache-2.0
// Partitioning of graphs whose edges pass by in blocks; see module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "bindings/arrays.h"
#include "partition/edge_buckets.h"
#include "partition/local_search.h"
#include "partition/node_moves.h"
#include "partition/part_ids.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

constexpr int64_t kMostNodes = int64_t{1} << 62;
constexpr int64_t kMostParts = 1 << 16;

// Calls function(V{}) for the type of numbers of nodes with this dtype.
template <typename Function>
auto with_node_type(const nb::dlpack::dtype& dtype, const Function& function) {
  if (dtype == nb::dtype<uint32_t>()) return function(uint32_t{});
  if (dtype == nb::dtype<int64_t>()) return function(int64_t{});
  throw nb::type_error("numbers of nodes must be uint32 or int64");
}

// Likewise for ids as they come: of users, or numbers of nodes.
template <typename Function>
auto with_any_id_type(const nb::dlpack::dtype& dtype, const Function& function) {
  if (dtype == nb::dtype<uint32_t>()) return function(uint32_t{});
  return with_id_type(dtype, function);
}

// Calls function(size) for the bytes of a value in a record: 0, 4 or 8, and its type as a pointer.
template <typename Function>
auto with_value_bytes(int64_t bytes, const Function& function) {
  if (bytes == 0) return function(static_cast<void*>(nullptr));
  if (bytes == 4) return function(static_cast<uint32_t*>(nullptr));
  if (bytes == 8) return function(static_cast<int64_t*>(nullptr));
  throw std::invalid_argument("values must have 0, 4 or 8 bytes");
}

// Records as bytes.
auto records_of(const OutVector& records) {
  return reinterpret_cast<std::byte*>(data_of<uint8_t>(records));
}
auto records_of(const InVector& records) {
  return reinterpret_cast<const std::byte*>(data_of<uint8_t>(records));
}

// A range of numbers of nodes: (first, how many), within [0, end).
struct NodeRange {
  int64_t first;
  int64_t size;
  NodeRange(int64_t first, int64_t size, int64_t end) : first(first), size(size) {
    require(first >= 0 && size >= 0 && end <= kMostNodes && first <= end && size <= end - first,
            "a range of nodes must lie within them");
  }
};

void bucket(const InVector& rows, const InVector& cols, const std::optional<InVector>& numbers,
            int64_t num_nodes, int64_t first_row, int64_t num_rows, int64_t first_col,
            int64_t num_cols, const std::optional<InVector>& values, int64_t first_value,
            int64_t value_bytes, int64_t col_bytes, bool drops_loops, int shift,
            const OutVector& records, const OutVector& counts, int num_threads) {
  require(rows.shape(0) == cols.shape(0), "rows and cols must have one length");
  require(col_bytes == 4 || col_bytes == 8, "columns must have 4 or 8 bytes");
  require(!numbers || rows_in(*numbers) == num_nodes, "numbers must have num_nodes entries");
  require(!values || (values->shape(0) == rows.shape(0) && value_bytes == 4),
          "values must have one entry of 4 bytes per row");
  require(shift >= 0 && shift <= 32, "shift must be in [0, 32]");
  const NodeRange row_range(first_row, num_rows, num_nodes);
  const NodeRange col_range(first_col, num_cols, num_nodes);
  const int64_t num_edges = rows_in(rows);
  require(records.shape(0) / static_cast<size_t>(4 + col_bytes + value_bytes) >=
              static_cast<size_t>(num_edges),
          "records must have room for all edges");
  require(col_bytes == 8 || num_nodes <= int64_t{1} << 32, "columns of 4 bytes must hold all ids");
  require_apart({records, counts}, {rows, cols, numbers, values});
  std::byte* const to = records_of(records);
  int64_t* const sizes = data_of<int64_t>(counts);
  const EdgeValues of_edges{data_of<uint32_t>(values), first_value};
  with_any_id_type(rows.dtype(), [&](auto id) {
    using I = decltype(id);
    const I* from_rows = data_of<I>(rows);
    const I* from_cols = data_of<I>(cols);
    const auto run = [&](auto node) {
      using V = decltype(node);
      const V* ids = data_of<V>(numbers);
      with_value_bytes(value_bytes, [&](auto* value) {
        using E = std::remove_pointer_t<decltype(value)>;
        const nb::gil_scoped_release release;
        bucket_edges<I, V, E>(from_rows, from_cols, num_edges, {ids, first_row, num_rows},
                              {ids, first_col, num_cols}, of_edges, drops_loops, shift,
                              rows_in(counts), to, sizes, num_threads);
      });
    };
    if (col_bytes == 4) {
      run(uint32_t{});
    } else {
      run(int64_t{});
    }
  });
}

int64_t record_bytes(const InVector& records, int64_t bytes) {
  require(bytes >= 8 && bytes <= 20 && rows_in(records) % bytes == 0,
          "records must be whole ones of 8 to 20 bytes");
  return rows_in(records) / bytes;
}

void count(const InVector& records, int64_t bytes, const OutVector& degrees) {
  const int64_t num_records = record_bytes(records, bytes);
  require_apart({degrees}, {records});
  const std::byte* from = records_of(records);
  uint32_t* to = data_of<uint32_t>(degrees);
  const nb::gil_scoped_release release;
  count_rows(from, num_records, bytes, to, rows_in(degrees));
}

void place(const InVector& records, const OutVector& places, int64_t begin, const OutVector& cols,
           const std::optional<OutVector>& values) {
  require(!values || values->shape(0) == cols.shape(0), "values must have one entry per column");
  require(begin >= 0 && begin <= kMostNodes, "begin must be in [0, 2^62]");
  require_apart({places, cols, values}, {records});
  const std::byte* from = records_of(records);
  int64_t* to = data_of<int64_t>(places);
  const int64_t end = begin + rows_in(cols);
  const int64_t value_size = values ? static_cast<int64_t>(values->itemsize()) : 0;
  with_node_type(cols.dtype(), [&](auto node) {
    using V = decltype(node);
    V* columns = data_of<V>(cols);
    with_value_bytes(value_size, [&](auto* value) {
      using E = std::remove_pointer_t<decltype(value)>;
      const int64_t bytes = 4 + static_cast<int64_t>(sizeof(V)) + value_size;
      const int64_t num_records = record_bytes(records, bytes);
      E* numbers = nullptr;
      if constexpr (!std::is_void_v<E>) numbers = data_of<E>(*values);
      const nb::gil_scoped_release release;
      place_rows<V, E>(from, num_records, to, rows_in(places), begin, end, columns, numbers);
    });
  });
}

// Whether degrees add up to the number of edges.
void require_degrees(const uint32_t* degrees, int64_t num_rows, int64_t num_edges) {
  uint64_t sum = 0;
  for (int64_t r = 0; r < num_rows; ++r) sum += degrees[r];
  require(sum == static_cast<uint64_t>(num_edges), "degrees must add up to the number of edges");
}

int64_t merge(const OutVector& degrees, const OutVector& cols, const OutVector& weights) {
  require(cols.shape(0) == weights.shape(0), "weights must have one entry per column");
  require_apart({degrees, cols, weights}, {});
  uint32_t* of_rows = data_of<uint32_t>(degrees);
  uint32_t* of_edges = data_of<uint32_t>(weights);
  return with_node_type(cols.dtype(), [&](auto node) {
    using V = decltype(node);
    V* columns = data_of<V>(cols);
    const nb::gil_scoped_release release;
    require_degrees(of_rows, rows_in(degrees), rows_in(cols));
    return merge_repeated<V>(of_rows, rows_in(degrees), columns, of_edges);
  });
}

nb::tuple hashes(const InVector& rows, const InVector& cols, int64_t first_row, int64_t first_col,
                 int64_t first, int num_threads) {
  require(rows.shape(0) == cols.shape(0), "rows and cols must have one length");
  const EdgeHashes made = with_id_type(rows.dtype(), [&](auto id) {
    using I = decltype(id);
    const I* from_rows = data_of<I>(rows);
    const I* from_cols = data_of<I>(cols);
    const nb::gil_scoped_release release;
    return hash_edges<I>(from_rows, from_cols, rows_in(rows), first_row, first_col, first,
                         num_threads);
  });
  return nb::make_tuple(made.in_order, made.asymmetry);
}

// A block of rows as kernels take it, after checking all but its columns.
template <typename V>
RowBlock<V> block_of(const InVector& degrees, const InVector& cols,
                     const std::optional<InVector>& weights, const InVector& batch_ends,
                     int64_t first_row, int64_t num_nodes) {
  require(!weights || weights->shape(0) == cols.shape(0), "weights must have one entry per column");
  const NodeRange range(first_row, rows_in(degrees), num_nodes);
  const RowBlock<V> block{data_of<uint32_t>(degrees),
                          data_of<V>(cols),
                          data_of<uint32_t>(weights),
                          range.first,
                          range.size,
                          num_nodes,
                          data_of<int64_t>(batch_ends),
                          rows_in(batch_ends)};
  require_degrees(block.degrees, block.num_rows, rows_in(cols));
  int64_t last = 0;
  for (int64_t i = 0; i < block.num_batches; ++i) {
    require(block.batch_ends[i] >= last, "batch_ends must ascend");
    last = block.batch_ends[i];
  }
  require(last == block.num_rows, "the last batch must end with the rows");
  return block;
}

NodeWeights weights_of(const std::optional<InMatrix>& node_weights, int64_t num_nodes,
                       size_t num_constraints) {
  require(num_constraints > 0 && num_constraints <= 1 << 16, "there must be a constraint");
  require(node_weights
              ? rows_in(*node_weights) == num_nodes && node_weights->shape(1) == num_constraints
              : num_constraints == 1,
          "node_weights must be [num_nodes, num_constraints]");
  return {data_of<uint32_t>(node_weights), static_cast<int64_t>(num_constraints)};
}

int64_t propagate(const InVector& degrees, const InVector& cols,
                  const std::optional<InVector>& weights, const InVector& batch_ends,
                  int64_t first_row, const std::optional<InMatrix>& node_weights,
                  const OutVector& labels, const OutMatrix& sizes, const InVector& limits,
                  const std::optional<OutVector>& favourites, int num_threads) {
  const int64_t num_nodes = rows_in(labels);
  require(rows_in(sizes) == num_nodes && sizes.shape(1) == limits.shape(0),
          "sizes must be [num_nodes, num_constraints]");
  require(!favourites || rows_in(*favourites) == num_nodes,
          "favourites must have one entry per node");
  require_apart({labels, sizes, favourites},
                {degrees, cols, weights, batch_ends, node_weights, limits});
  const NodeWeights of_nodes = weights_of(node_weights, num_nodes, limits.shape(0));
  return with_node_type(labels.dtype(), [&](auto node) {
    using V = decltype(node);
    const RowBlock<V> block = block_of<V>(degrees, cols, weights, batch_ends, first_row, num_nodes);
    V* of_labels = data_of<V>(labels);
    uint32_t* of_sizes = data_of<uint32_t>(sizes);
    const uint32_t* most = data_of<uint32_t>(limits);
    V* best = data_of<V>(favourites);
    const nb::gil_scoped_release release;
    return propagate_labels<V>(block, of_nodes, of_labels, of_sizes, most, best, num_threads);
  });
}

int64_t contract_block(const InVector& degrees, const InVector& cols,
                       const std::optional<InVector>& weights, int64_t first_row,
                       const InVector& clusters, const OutVector& rows, const OutVector& new_cols,
                       const OutVector& new_weights, int num_threads) {
  require(rows.shape(0) >= cols.shape(0) && new_cols.shape(0) >= cols.shape(0) &&
              new_weights.shape(0) >= cols.shape(0),
          "there must be room for all edges");
  require_apart({rows, new_cols, new_weights}, {degrees, cols, weights, clusters});
  const int64_t num_nodes = rows_in(clusters);
  const NodeRange range(first_row, rows_in(degrees), num_nodes);
  require(!weights || weights->shape(0) == cols.shape(0), "weights must have one entry per column");
  return with_node_type(clusters.dtype(), [&](auto node) {
    using V = decltype(node);
    const RowBlock<V> block{data_of<uint32_t>(degrees),
                            data_of<V>(cols),
                            data_of<uint32_t>(weights),
                            range.first,
                            range.size,
                            num_nodes,
                            nullptr,
                            0};
    const V* of_nodes = data_of<V>(clusters);
    V* to_rows = data_of<V>(rows);
    V* to_cols = data_of<V>(new_cols);
    uint32_t* to_weights = data_of<uint32_t>(new_weights);
    const nb::gil_scoped_release release;
    require_degrees(block.degrees, block.num_rows, rows_in(cols));
    return contract<V>(block, of_nodes, to_rows, to_cols, to_weights, num_threads);
  });
}

// Numbers of int64, to read or to write, that are far from the ends of their type.
template <typename A>
auto bounded(const A& numbers) {
  auto* const values = data_of<int64_t>(numbers);
  bool is_bounded = true;
  for (size_t i = 0; i < numbers.size(); ++i) {
    is_bounded &= values[i] > -kMostNodes && values[i] < kMostNodes;
  }
  require(is_bounded, "loads, limits and halos must be below 2^62");
  return values;
}

Refinement refinement_of(const OutVector& parts, const OutMatrix& loads, const InVector& limits,
                         int64_t allowed_loss) {
  require(rows_in(loads) > 0 && rows_in(loads) <= kMostParts && loads.shape(1) == limits.shape(0),
          "loads must be [num_parts, num_constraints]");
  require(allowed_loss >= 0 && allowed_loss < kMostNodes, "a loss must be in [0, 2^62)");
  return {rows_in(loads), data_of<uint16_t>(parts), bounded(loads), bounded(limits), allowed_loss};
}

int64_t refine(const InVector& degrees, const InVector& cols,
               const std::optional<InVector>& weights, const InVector& batch_ends,
               int64_t first_row, const std::optional<InMatrix>& node_weights,
               const OutVector& parts, const OutMatrix& loads, const InVector& limits,
               int64_t allowed_loss, int num_threads) {
  const int64_t num_nodes = rows_in(parts);
  require_apart({parts, loads}, {degrees, cols, weights, batch_ends, node_weights, limits});
  const NodeWeights of_nodes = weights_of(node_weights, num_nodes, limits.shape(0));
  const Refinement refinement = refinement_of(parts, loads, limits, allowed_loss);
  return with_node_type(cols.dtype(), [&](auto node) {
    using V = decltype(node);
    const RowBlock<V> block = block_of<V>(degrees, cols, weights, batch_ends, first_row, num_nodes);
    const nb::gil_scoped_release release;
    return refine_parts<V>(block, of_nodes, refinement, num_threads);
  });
}

int64_t search(const InVector& indptr, const InVector& cols, const std::optional<InVector>& weights,
               const std::optional<InMatrix>& node_weights, const OutVector& parts,
               const OutMatrix& loads, const InVector& limits, int64_t num_free, int64_t patience,
               int64_t rounds, int64_t share, int num_threads) {
  const int64_t num_nodes = rows_in(parts);
  require(rows_in(indptr) == num_nodes + 1, "indptr must have num_nodes + 1 entries");
  require(!weights || weights->shape(0) == cols.shape(0), "weights must have one entry per column");
  require(num_nodes < int64_t{1} << 32, "numbers of nodes must fit 32 bits");
  require(num_free >= 0 && num_free <= num_nodes, "num_free must be in [0, num_nodes]");
  require(patience > 0 && rounds > 0, "patience and rounds must be positive");
  require(share > 0 && share < 1 << 20, "share must be in [1, 2^20)");
  require_apart({parts, loads}, {indptr, cols, weights, node_weights, limits});
  const NodeWeights of_nodes = weights_of(node_weights, num_nodes, limits.shape(0));
  const Refinement refinement = refinement_of(parts, loads, limits, 0);
  const GraphInMemory graph{data_of<int64_t>(indptr), data_of<uint32_t>(cols),
                            data_of<uint32_t>(weights), num_nodes, rows_in(cols)};
  const nb::gil_scoped_release release;
  return search_moves(graph, of_nodes, refinement, {num_free, patience, rounds, share},
                      num_threads);
}

uint8_t* table_of(const OutMatrix& table, int64_t num_nodes, int64_t num_parts) {
  require(rows_in(table) == num_nodes && columns_in(table) == halo_bytes(num_parts),
          "table must have 2 bits of each node for each part");
  return data_of<uint8_t>(table);
}

const uint32_t* in_degrees_of(const std::optional<InVector>& in_degrees, const InVector& degrees) {
  require(!in_degrees || in_degrees->shape(0) == degrees.shape(0),
          "in_degrees must have one entry per row");
  return data_of<uint32_t>(in_degrees);
}

int64_t count_of_halos(const InVector& degrees, const InVector& cols,
                       const std::optional<InVector>& in_degrees, int64_t first_row,
                       const InVector& parts, const OutVector& near, const OutMatrix& table,
                       const OutVector& halos, int num_threads) {
  const int64_t num_nodes = rows_in(parts);
  require(rows_in(halos) > 0 && rows_in(halos) <= kMostParts, "there must be 1 to 2^16 parts");
  require(rows_in(near) == num_nodes, "near must have one entry per node");
  require_apart({near, table, halos}, {degrees, cols, in_degrees, parts});
  const NodeRange range(first_row, rows_in(degrees), num_nodes);
  uint8_t* marks = data_of<uint8_t>(near);
  uint8_t* to = table_of(table, num_nodes, rows_in(halos));
  int64_t* counts = data_of<int64_t>(halos);
  const uint16_t* of_nodes = data_of<uint16_t>(parts);
  return with_node_type(cols.dtype(), [&](auto node) {
    using V = decltype(node);
    const RowBlock<V> block{data_of<uint32_t>(degrees),
                            data_of<V>(cols),
                            nullptr,
                            range.first,
                            range.size,
                            num_nodes,
                            nullptr,
                            0,
                            in_degrees_of(in_degrees, degrees)};
    const nb::gil_scoped_release release;
    require_degrees(block.degrees, block.num_rows, rows_in(cols));
    return count_halos<V>(block, of_nodes, rows_in(halos), marks, to, counts, num_threads);
  });
}

int64_t limit_of_halos(const InVector& degrees, const InVector& cols,
                       const std::optional<InVector>& in_degrees, const InVector& batch_ends,
                       int64_t first_row, const std::optional<InMatrix>& node_weights,
                       const OutVector& parts, const OutMatrix& loads, const InVector& limits,
                       const OutVector& near, const OutMatrix& table, const OutVector& halos,
                       int64_t largest, int64_t price, const OutVector& budget, int num_threads) {
  const int64_t num_nodes = rows_in(parts);
  require(rows_in(near) == num_nodes, "near must have one entry per node");
  require_apart({parts, loads, near, table, halos, budget},
                {degrees, cols, in_degrees, batch_ends, node_weights, limits});
  require(price >= 0 && price < 1 << 20, "price must be in [0, 2^20)");
  require(largest >= 0 && largest <= num_nodes, "largest must be in [0, num_nodes]");
  require(rows_in(budget) == 1, "budget must have one entry");
  const NodeWeights of_nodes = weights_of(node_weights, num_nodes, limits.shape(0));
  const Refinement refinement = refinement_of(parts, loads, limits, 0);
  require(rows_in(halos) == refinement.num_parts, "halos must have one entry per part");
  const HaloLimit limit{data_of<uint8_t>(near),
                        table_of(table, num_nodes, refinement.num_parts),
                        bounded(halos),
                        largest,
                        price,
                        bounded(budget)};
  return with_node_type(cols.dtype(), [&](auto node) {
    using V = decltype(node);
    RowBlock<V> block = block_of<V>(degrees, cols, {}, batch_ends, first_row, num_nodes);
    block.in_degrees = in_degrees_of(in_degrees, degrees);
    const nb::gil_scoped_release release;
    return limit_halos<V>(block, of_nodes, refinement, limit, num_threads);
  });
}

void count_degrees(const InVector& ids, int64_t first, int64_t num_ids, const OutVector& degrees,
                   int num_threads) {
  const NodeRange range(first, num_ids, rows_in(degrees));
  require_apart({degrees}, {ids});
  uint32_t* to = data_of<uint32_t>(degrees);
  with_id_type(ids.dtype(), [&](auto id) {
    using I = decltype(id);
    const I* from = data_of<I>(ids);
    const nb::gil_scoped_release release;
    count_ids<I>(from, rows_in(ids), range.first, range.size, to, num_threads);
  });
}

void order_nodes(const InVector& keys, int64_t num_keys, const std::optional<InVector>& order,
                 const OutVector& ordered, int num_threads) {
  require(keys.shape(0) == ordered.shape(0) && (!order || order->shape(0) == keys.shape(0)),
          "keys, order and ordered must have one length");
  require(num_keys >= 0 && num_keys <= int64_t{1} << 40, "num_keys must be in [0, 2^40]");
  require_apart({ordered}, {keys, order});
  with_node_type(ordered.dtype(), [&](auto node) {
    using V = decltype(node);
    const V* from = data_of<V>(order);
    V* to = data_of<V>(ordered);
    const auto run = [&](auto key) {
      using K = decltype(key);
      const K* of_nodes = data_of<K>(keys);
      const nb::gil_scoped_release release;
      order_by_key<K, V>(of_nodes, rows_in(keys), num_keys, from, to, num_threads);
    };
    if (keys.dtype() == nb::dtype<uint8_t>()) {
      run(uint8_t{});
    } else if (keys.dtype() == nb::dtype<uint16_t>()) {
      run(uint16_t{});
    } else {
      with_node_type(keys.dtype(), run);
    }
  });
}

Owners owners_of(const InVector& src, const InVector& dst, const InVector& parts, int64_t num_parts,
                 int64_t first_src, int64_t num_src, int64_t first_dst, int64_t num_dst) {
  require(src.shape(0) == dst.shape(0), "src and dst must have one length");
  require(num_parts > 0 && num_parts <= kMostParts, "num_parts must be in [1, 2^16]");
  const NodeRange of_src(first_src, num_src, rows_in(parts));
  const NodeRange of_dst(first_dst, num_dst, rows_in(parts));
  const uint16_t* of_nodes = data_of<uint16_t>(parts);
  return {of_nodes, num_parts, of_src.first, of_src.size, of_dst.first, of_dst.size};
}

void count_pairs(const InVector& src, const InVector& dst, const InVector& parts, int64_t first_src,
                 int64_t num_src, int64_t first_dst, int64_t num_dst, const OutMatrix& pairs,
                 int num_threads) {
  require(pairs.shape(0) == pairs.shape(1), "pairs must be [num_parts, num_parts]");
  require_apart({pairs}, {src, dst, parts});
  const Owners owners =
      owners_of(src, dst, parts, rows_in(pairs), first_src, num_src, first_dst, num_dst);
  int64_t* to = data_of<int64_t>(pairs);
  with_id_type(src.dtype(), [&](auto id) {
    using I = decltype(id);
    const I* from = data_of<I>(src);
    const I* into = data_of<I>(dst);
    const nb::gil_scoped_release release;
    count_cut<I>(from, into, rows_in(src), owners, to, num_threads);
  });
}

void mark(const InVector& src, const InVector& dst, const InVector& parts, int64_t first_src,
          int64_t num_src, int64_t first_dst, int64_t num_dst, const InMatrix& digits,
          const OutVector& masks, int num_threads) {
  require(digits.shape(0) == digits.shape(1), "digits must be [num_parts, num_parts]");
  require(masks.shape(0) == parts.shape(0), "masks must have one entry per node");
  require_apart({masks}, {src, dst, parts, digits});
  const Owners owners =
      owners_of(src, dst, parts, rows_in(digits), first_src, num_src, first_dst, num_dst);
  const uint8_t* of_pairs = data_of<uint8_t>(digits);
  uint8_t* to = data_of<uint8_t>(masks);
  with_id_type(src.dtype(), [&](auto id) {
    using I = decltype(id);
    const I* from = data_of<I>(src);
    const I* into = data_of<I>(dst);
    const nb::gil_scoped_release release;
    mark_readers<I>(from, into, rows_in(src), owners, of_pairs, to, num_threads);
  });
}

// How many ids there are, whose bits fill these words.
int64_t ids_in(size_t num_words) { return static_cast<int64_t>(num_words) * 64; }

int64_t mark_foreign(const InVector& ids, int64_t first, int64_t last, const OutVector& bits) {
  require_apart({bits}, {ids});
  uint64_t* words = data_of<uint64_t>(bits);
  return with_node_type(ids.dtype(), [&](auto node) {
    using V = decltype(node);
    const V* from = data_of<V>(ids);
    const nb::gil_scoped_release release;
    return mark_outside<V>(from, rows_in(ids), first, last, ids_in(bits.shape(0)), words);
  });
}

int64_t rank(const InVector& bits, const OutVector& ranks) {
  require(bits.shape(0) == ranks.shape(0), "ranks must have one entry per word");
  require_apart({ranks}, {bits});
  const uint64_t* words = data_of<uint64_t>(bits);
  int64_t* to = data_of<int64_t>(ranks);
  const nb::gil_scoped_release release;
  return rank_words(words, rows_in(bits), to);
}

int64_t list_ids(const InVector& bits, int64_t first_word, int64_t last_word,
                 const OutVector& ids) {
  require(first_word >= 0 && first_word <= last_word && last_word <= rows_in(bits),
          "words must be among those of bits");
  require(rows_in(ids) / 64 >= last_word - first_word, "ids must have 64 entries per word");
  require_apart({ids}, {bits});
  const uint64_t* words = data_of<uint64_t>(bits);
  int64_t* to = data_of<int64_t>(ids);
  const nb::gil_scoped_release release;
  return list_marked(words, first_word, last_word, to);
}

void local(const InVector& ids, int64_t first, int64_t last, const InVector& bits,
           const InVector& ranks, const OutVector& local_ids) {
  require(ids.shape(0) == local_ids.shape(0), "local_ids must have one entry per id");
  require(bits.shape(0) == ranks.shape(0), "ranks must have one entry per word");
  require(0 <= first && first <= last && last <= kMostNodes, "[first, last) must be a range");
  require_apart({local_ids}, {ids, bits, ranks});
  const uint64_t* words = data_of<uint64_t>(bits);
  const int64_t* of_words = data_of<int64_t>(ranks);
  with_node_type(ids.dtype(), [&](auto node) {
    using V = decltype(node);
    const V* from = data_of<V>(ids);
    with_id_type(local_ids.dtype(), [&](auto id) {
      using I = decltype(id);
      I* to = data_of<I>(local_ids);
      const nb::gil_scoped_release release;
      find_local_ids<V, I>(from, rows_in(ids), first, last, ids_in(bits.shape(0)), words, of_words,
                           to);
    });
  });
}

void cut(const InVector& degrees, const InVector& cols, int64_t first_row, int64_t first_edge,
         const InVector& ends, int64_t part, const OutVector& records, const OutVector& counts) {
  const int64_t num_parts = rows_in(ends);
  require(num_parts > 0 && part >= 0 && part < num_parts, "part must be one of the parts");
  require(counts.shape(0) == ends.shape(0), "counts must have one entry per part");
  require(first_edge >= 0 && first_edge <= kMostNodes, "first_edge must be in [0, 2^62]");
  require_apart({records, counts}, {degrees, cols, ends});
  const uint32_t* of_rows = data_of<uint32_t>(degrees);
  const int64_t* of_parts = data_of<int64_t>(ends);
  std::byte* to = records_of(records);
  int64_t* sizes = data_of<int64_t>(counts);
  for (int64_t p = 0; p < num_parts; ++p) {
    require(of_parts[p] >= (p == 0 ? 0 : of_parts[p - 1]), "ends must ascend");
  }
  const NodeRange range(first_row, rows_in(degrees), of_parts[num_parts - 1]);
  with_node_type(cols.dtype(), [&](auto node) {
    using V = decltype(node);
    const V* columns = data_of<V>(cols);
    require(records.shape(0) / (2 * sizeof(V) + 8) >= cols.shape(0),
            "records must have room for all edges");
    const nb::gil_scoped_release release;
    require_degrees(of_rows, range.size, rows_in(cols));
    find_cut_edges<V>(of_rows, range.size, columns, range.first, first_edge, of_parts, num_parts,
                      part, to, sizes);
  });
}

}  // namespace

void bind_partition(nb::module_& m) {
  m.def("bucket_edges", &bucket, "rows"_a.noconvert(), "cols"_a.noconvert(),
        "numbers"_a.noconvert().none(), "num_nodes"_a, "first_row"_a, "num_rows"_a, "first_col"_a,
        "num_cols"_a, "values"_a.noconvert().none(), "first_value"_a, "value_bytes"_a,
        "col_bytes"_a, "drops_loops"_a, "shift"_a, "records"_a.noconvert(), "counts"_a.noconvert(),
        "num_threads"_a);
  m.def("count_rows", &count, "records"_a.noconvert(), "record_bytes"_a, "degrees"_a.noconvert());
  m.def("place_rows", &place, "records"_a.noconvert(), "places"_a.noconvert(), "begin"_a,
        "cols"_a.noconvert(), "values"_a.noconvert().none());
  m.def("merge_repeated", &merge, "degrees"_a.noconvert(), "cols"_a.noconvert(),
        "weights"_a.noconvert());
  m.def("hash_edges", &hashes, "rows"_a.noconvert(), "cols"_a.noconvert(), "first_row"_a,
        "first_col"_a, "first"_a, "num_threads"_a);
  m.def("propagate_labels", &propagate, "degrees"_a.noconvert(), "cols"_a.noconvert(),
        "weights"_a.noconvert().none(), "batch_ends"_a.noconvert(), "first_row"_a,
        "node_weights"_a.noconvert().none(), "labels"_a.noconvert(), "sizes"_a.noconvert(),
        "limits"_a.noconvert(), "favourites"_a.noconvert().none(), "num_threads"_a);
  m.def("contract", &contract_block, "degrees"_a.noconvert(), "cols"_a.noconvert(),
        "weights"_a.noconvert().none(), "first_row"_a, "clusters"_a.noconvert(),
        "rows"_a.noconvert(), "new_cols"_a.noconvert(), "new_weights"_a.noconvert(),
        "num_threads"_a);
  m.def("refine_parts", &refine, "degrees"_a.noconvert(), "cols"_a.noconvert(),
        "weights"_a.noconvert().none(), "batch_ends"_a.noconvert(), "first_row"_a,
        "node_weights"_a.noconvert().none(), "parts"_a.noconvert(), "loads"_a.noconvert(),
        "limits"_a.noconvert(), "allowed_loss"_a, "num_threads"_a);
  m.def("search_moves", &search, "indptr"_a.noconvert(), "cols"_a.noconvert(),
        "weights"_a.noconvert().none(), "node_weights"_a.noconvert().none(), "parts"_a.noconvert(),
        "loads"_a.noconvert(), "limits"_a.noconvert(), "num_free"_a, "patience"_a, "rounds"_a,
        "share"_a, "num_threads"_a);
  m.def("count_halos", &count_of_halos, "degrees"_a.noconvert(), "cols"_a.noconvert(),
        "in_degrees"_a.noconvert().none(), "first_row"_a, "parts"_a.noconvert(),
        "near"_a.noconvert(), "table"_a.noconvert(), "halos"_a.noconvert(), "num_threads"_a);
  m.def("limit_halos", &limit_of_halos, "degrees"_a.noconvert(), "cols"_a.noconvert(),
        "in_degrees"_a.noconvert().none(), "batch_ends"_a.noconvert(), "first_row"_a,
        "node_weights"_a.noconvert().none(), "parts"_a.noconvert(), "loads"_a.noconvert(),
        "limits"_a.noconvert(), "near"_a.noconvert(), "table"_a.noconvert(), "halos"_a.noconvert(),
        "largest"_a, "price"_a, "budget"_a.noconvert(), "num_threads"_a);
  m.def("count_ids", &count_degrees, "ids"_a.noconvert(), "first"_a, "num_ids"_a,
        "degrees"_a.noconvert(), "num_threads"_a);
  m.def("order_by_key", &order_nodes, "keys"_a.noconvert(), "num_keys"_a,
        "order"_a.noconvert().none(), "ordered"_a.noconvert(), "num_threads"_a);
  m.def("count_cut", &count_pairs, "src"_a.noconvert(), "dst"_a.noconvert(), "parts"_a.noconvert(),
        "first_src"_a, "num_src"_a, "first_dst"_a, "num_dst"_a, "pairs"_a.noconvert(),
        "num_threads"_a);
  m.def("mark_readers", &mark, "src"_a.noconvert(), "dst"_a.noconvert(), "parts"_a.noconvert(),
        "first_src"_a, "num_src"_a, "first_dst"_a, "num_dst"_a, "digits"_a.noconvert(),
        "masks"_a.noconvert(), "num_threads"_a);
  m.def("mark_outside", &mark_foreign, "ids"_a.noconvert(), "first"_a, "last"_a,
        "bits"_a.noconvert());
  m.def("rank_words", &rank, "bits"_a.noconvert(), "ranks"_a.noconvert());
  m.def("list_marked", &list_ids, "bits"_a.noconvert(), "first_word"_a, "last_word"_a,
        "ids"_a.noconvert());
  m.def("find_local_ids", &local, "ids"_a.noconvert(), "first"_a, "last"_a, "bits"_a.noconvert(),
        "ranks"_a.noconvert(), "local_ids"_a.noconvert());
  m.def("find_cut_edges", &cut, "degrees"_a.noconvert(), "cols"_a.noconvert(), "first_row"_a,
        "first_edge"_a, "ends"_a.noconvert(), "part"_a, "records"_a.noconvert(),
        "counts"_a.noconvert());
}

}  // namespace graphshard
