// SPDX-License-Identifier: Apache-2.0
// Draws, tables of ids, ranges of ids, and rows of tables; see module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/arrays.h"
#include "runtime/rows.h"
#include "sampling/draw.h"
#include "sampling/id_ranges.h"
#include "sampling/id_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

using MaybeVector = std::optional<InVector>;

Weights weights_of(const MaybeVector& array, const MaybeVector& ids, size_t num_edges) {
  if (!array) return {nullptr, WeightType::kFloat, 0, Ids()};
  WeightType type = WeightType::kFloat;
  if (array->dtype() == nb::dtype<double>()) {
    type = WeightType::kDouble;
  } else if (array->dtype() == nb::dtype<uint8_t>()) {
    type = WeightType::kByte;
  } else {
    require(array->dtype() == nb::dtype<float>(), "weights must be float32, float64 or uint8");
  }
  require((ids ? ids->shape(0) : array->shape(0)) == num_edges,
          "weights, or their ids, must have num_edges entries");
  return {array->data(), type, rows_in(*array), ids ? ids_of(*ids) : Ids()};
}

Exclusions exclusions_of(const MaybeVector& mask, const MaybeVector& excluded, int64_t num_edges) {
  require(num_edges >= 0, "num_edges must not be negative");
  require(!mask || rows_in(*mask) == num_edges, "mask must have num_edges entries");
  const int64_t count = excluded ? rows_in(*excluded) : 0;
  const int64_t* positions = data_of<int64_t>(excluded);
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    require(positions[i] > last && positions[i] < num_edges,
            "excluded positions must ascend, and be below num_edges");
    last = positions[i];
  }
  return {data_of<uint8_t>(mask), positions, count, num_edges};
}

// One draw, in two calls, because the arrays it goes into are made in between. Holds on to the
// arrays it was made of.
class Drawing {
 public:
  Drawing(const InVector& indptr, const InVector& rows, const InVector& row_ids, int64_t fanout,
          uint64_t key, bool replace, const MaybeVector& prob, const MaybeVector& prob_ids,
          const MaybeVector& labor_ids, const MaybeVector& mask, const MaybeVector& excluded,
          int64_t num_edges, const OutVector& counts)
      : indptr_(indptr),
        rows_(rows),
        row_ids_(row_ids),
        prob_(prob),
        prob_ids_(prob_ids),
        labor_ids_(labor_ids),
        mask_(mask),
        excluded_(excluded),
        counts_(counts),
        count_of_row_(data_of<int64_t>(counts)),
        by_edge_(prob || labor_ids),
        arguments_{ids_of(indptr),
                   rows_in(indptr) - 1,
                   num_edges,
                   ids_of(rows),
                   ids_of(row_ids),
                   rows_in(rows),
                   fanout < 0 ? kNoLimit : fanout,
                   key,
                   replace && fanout >= 0,
                   weights_of(prob, prob_ids, static_cast<size_t>(num_edges)),
                   labor_ids ? ids_of(*labor_ids) : Ids(),
                   exclusions_of(mask, excluded, num_edges)} {
    const size_t edges = static_cast<size_t>(num_edges);
    require(indptr.shape(0) > 0, "indptr must not be empty");
    require(fanout <= kNoLimit, "fanout must be below 2^31");
    require(rows.shape(0) == row_ids.shape(0) && rows.shape(0) == counts.shape(0),
            "rows, row_ids and counts must have one length");
    require_apart({counts}, {indptr, rows, row_ids, prob, prob_ids, labor_ids, mask, excluded});
    require(!labor_ids || labor_ids->shape(0) == edges, "labor_ids must have num_edges entries");
  }

  int64_t count(int num_threads) {
    const nb::gil_scoped_release release;
    if (!by_edge_) {
      bounds_.reset(new RowBounds[static_cast<size_t>(arguments_.num_draws)]);
      return total_ = count_uniform(arguments_, count_of_row_, bounds_.get(), num_threads);
    }
    draft_.emplace(arguments_, count_of_row_, num_threads);
    return total_ = draft_->total();
  }

  void write(const InVector& indices, const MaybeVector& eids, const OutVector& edges,
             const OutVector& picked, int num_threads) {
    require(
        rows_in(indices) == arguments_.num_edges && (!eids || eids->shape(0) == indices.shape(0)),
        "indices and eids must have num_edges entries");
    require_apart({edges, picked}, {indices, eids});
    require(indices.dtype() == picked.dtype(), "picked must have the type of indices");
    write_from(&indices, nullptr, eids, edges, picked, num_threads);
  }

  void write_pieces(const InVector& starts, const std::vector<InVector>& sources,
                    const std::vector<int64_t>& owns, const std::vector<int64_t>& shifts,
                    const std::vector<InVector>& others, const OutVector& edges,
                    const OutVector& picked, int num_threads) {
    const size_t count = sources.size();
    require(count > 0 && starts.shape(0) == count + 1 && owns.size() == count &&
                shifts.size() == count && others.size() == count,
            "there must be a start, sources, own, shift and others for each piece, and an end");
    const int64_t* begins = data_of<int64_t>(starts);
    require(begins[0] == 0 && begins[count] == arguments_.num_edges,
            "starts must begin with 0 and end with num_edges");
    SourcePieces pieces;
    pieces.starts.assign(begins, begins + count + 1);
    for (size_t i = 0; i < count; ++i) {
      require(begins[i + 1] - begins[i] == rows_in(sources[i]) && owns[i] >= 0,
              "a piece must have the sources between its start and the next");
      require_apart({edges, picked}, {sources[i], others[i]});
      pieces.pieces.push_back(
          {ids_of(sources[i]), owns[i], shifts[i], ids_of(others[i]), rows_in(others[i])});
    }
    write_from(nullptr, &pieces, std::nullopt, edges, picked, num_threads);
  }

 private:
  void write_from(const InVector* indices, const SourcePieces* pieces, const MaybeVector& eids,
                  const OutVector& edges, const OutVector& picked, int num_threads) {
    require(total_ >= 0, "count must come before write");
    const size_t total = static_cast<size_t>(total_);
    require(edges.shape(0) == total && picked.shape(0) == total,
            "edges and picked must have as many entries as were counted");
    require_apart({edges, picked, counts_}, {indptr_, rows_, row_ids_, mask_, excluded_});
    with_id_type(edges.dtype(), [&](auto of_edges) {
      using I = decltype(of_edges);
      with_id_type(picked.dtype(), [&](auto of_nodes) {
        using J = decltype(of_nodes);
        const Sources<J> from{indices == nullptr ? nullptr : data_of<J>(*indices), pieces};
        const I* ids = data_of<I>(eids);
        I* to = data_of<I>(edges);
        J* nodes = data_of<J>(picked);
        bool all_known = true;
        {
          const nb::gil_scoped_release release;
          all_known = draft_ ? draft_->write(from, ids, to, nodes, num_threads)
                             : draw_uniform(arguments_, count_of_row_, bounds_.get(), from, ids, to,
                                            nodes, num_threads);
        }
        require(all_known, "every source must be below own, or one of others");
      });
    });
  }

  InVector indptr_;
  InVector rows_;
  InVector row_ids_;
  MaybeVector prob_;
  MaybeVector prob_ids_;
  MaybeVector labor_ids_;
  MaybeVector mask_;
  MaybeVector excluded_;
  OutVector counts_;
  int64_t* count_of_row_;
  bool by_edge_;
  DrawArguments arguments_;
  std::unique_ptr<RowBounds[]> bounds_;
  std::optional<Draft> draft_;
  int64_t total_ = -1;
};

void bind_drawing(nb::module_& m) {
  nb::class_<Drawing> drawing(m, "Drawing");
  drawing.def(nb::init<const InVector&, const InVector&, const InVector&, int64_t, uint64_t, bool,
                       const MaybeVector&, const MaybeVector&, const MaybeVector&,
                       const MaybeVector&, const MaybeVector&, int64_t, const OutVector&>(),
              "indptr"_a.noconvert(), "rows"_a.noconvert(), "row_ids"_a.noconvert(), "fanout"_a,
              "key"_a, "replace"_a, "prob"_a.noconvert().none(), "prob_ids"_a.noconvert().none(),
              "labor_ids"_a.noconvert().none(), "mask"_a.noconvert().none(),
              "excluded"_a.noconvert().none(), "num_edges"_a, "counts"_a.noconvert());
  drawing.def("count", &Drawing::count, "num_threads"_a);
  drawing.def("write", &Drawing::write, "indices"_a.noconvert(), "eids"_a.noconvert().none(),
              "edges"_a.noconvert(), "picked"_a.noconvert(), "num_threads"_a);
  drawing.def("write_pieces", &Drawing::write_pieces, "starts"_a.noconvert(),
              "sources"_a.noconvert(), "owns"_a, "shifts"_a, "others"_a.noconvert(),
              "edges"_a.noconvert(), "picked"_a.noconvert(), "num_threads"_a);
}

int64_t renumber(IdTable& self, const InVector& first, const InVector& others, const OutVector& ids,
                 const OutVector& local) {
  require(ids.shape(0) == first.shape(0) + others.shape(0),
          "ids must have room for first and others");
  require(local.shape(0) == others.shape(0), "local must have one entry per other");
  require_apart({ids, local}, {first, others});
  return with_id_type(first.dtype(), [&](auto zero) {
    using I = decltype(zero);
    const I* from = data_of<I>(first);
    const I* more = data_of<I>(others);
    I* to = data_of<I>(ids);
    I* numbers = data_of<I>(local);
    const nb::gil_scoped_release release;
    return self.renumber(from, rows_in(first), more, rows_in(others), to, numbers);
  });
}

void copy_bytes(const OutMatrix& out, const MaybeVector& places, const InMatrix& table,
                const MaybeVector& rows, int num_threads) {
  require(out.shape(1) == table.shape(1), "rows of out and table must have one size");
  require(!places || !rows || places->shape(0) == rows->shape(0),
          "places and rows must have one length");
  require_apart({out}, {places, table, rows});
  const int64_t count = rows ? rows_in(*rows) : places ? rows_in(*places) : rows_in(table);
  const Ids to = ids_of(places);
  const Ids from = ids_of(rows);
  const RowTable<char> target{reinterpret_cast<char*>(data_of<uint8_t>(out)), rows_in(out)};
  const RowTable<const char> source{reinterpret_cast<const char*>(data_of<uint8_t>(table)),
                                    rows_in(table)};
  const nb::gil_scoped_release release;
  copy_rows(target, to, source, from, count, columns_in(out), num_threads);
}

template <typename S, typename T>
void add_typed(const OutRows& out, const Ids& places, const InMatrix& rows, int num_threads) {
  S* to = data_of<S>(out);
  const T* from = data_of<T>(rows);
  const nb::gil_scoped_release release;
  add_rows(to, rows_in(out), out.stride(0), places, from, rows_in(rows), columns_in(rows),
           num_threads);
}

// Rows of the dtype of out, or of bfloat16 to sums in float32.
void add(const OutRows& out, const InVector& places, const InMatrix& rows, int num_threads) {
  require(out.shape(1) == rows.shape(1) && (out.stride(1) == 1 || out.shape(1) == 1),
          "out must have the columns of rows, side by side");
  require(places.shape(0) == rows.shape(0), "places and rows must have one length");
  require_apart({out}, {places, rows});
  const Ids to = ids_of(places);
  if (out.dtype() == nb::dtype<float>() && rows.dtype() == nb::dtype<bfloat16>()) {
    return add_typed<float, bfloat16>(out, to, rows, num_threads);
  }
  with_value_type(rows.dtype(), [&](auto zero) {
    using T = decltype(zero);
    add_typed<T, T>(out, to, rows, num_threads);
  });
}

bool group(const InVector& ids, const InVector& starts, int64_t last, const OutVector& order,
           const OutVector& rows, const OutVector& sizes) {
  const int64_t num_ranges = rows_in(sizes);
  require(starts.shape(0) == sizes.shape(0) + 1, "starts must have one more than sizes");
  require(num_ranges < 65536, "there must be less than 65536 ranges");
  require(last >= 0 && last < num_ranges, "last must be a range");
  require(order.shape(0) == ids.shape(0) && rows.shape(0) == ids.shape(0),
          "ids, order and rows must have one length");
  require_apart({order, rows, sizes}, {ids, starts});
  const int64_t* begins = data_of<int64_t>(starts);
  int64_t* order_to = data_of<int64_t>(order);
  int64_t* sizes_to = data_of<int64_t>(sizes);
  return with_id_type(ids.dtype(), [&](auto of_ids) {
    using I = decltype(of_ids);
    return with_id_type(rows.dtype(), [&](auto of_rows) {
      using R = decltype(of_rows);
      for (int64_t r = 0; r < num_ranges; ++r) {
        require(begins[r] >= 0 && begins[r] <= begins[r + 1],
                "starts must ascend, and not be negative");
        require(
            begins[r + 1] - begins[r] - 1 <= static_cast<int64_t>(std::numeric_limits<R>::max()),
            "rows must have a type that tells those of each range apart");
      }
      const I* from = data_of<I>(ids);
      R* to = data_of<R>(rows);
      const nb::gil_scoped_release release;
      return group_by_range(from, rows_in(ids), begins, num_ranges, last, order_to, to, sizes_to);
    });
  });
}

bool put_back(const InVector& order, const InVector& counts, const InVector& values,
              const OutVector& new_counts, const OutVector& new_values) {
  require(order.shape(0) == counts.shape(0) && order.shape(0) == new_counts.shape(0),
          "order, counts and new_counts must have one length");
  require(values.shape(0) == new_values.shape(0), "values and new_values must have one length");
  require_apart({new_counts, new_values}, {order, counts, values});
  const int64_t* order_of = data_of<int64_t>(order);
  const int64_t* count_of = data_of<int64_t>(counts);
  int64_t* counts_to = data_of<int64_t>(new_counts);
  return with_id_type(values.dtype(), [&](auto of_values) {
    using V = decltype(of_values);
    return with_id_type(new_values.dtype(), [&](auto of_new) {
      using W = decltype(of_new);
      const V* from = data_of<V>(values);
      W* to = data_of<W>(new_values);
      const nb::gil_scoped_release release;
      return ungroup(order_of, count_of, rows_in(order), from, rows_in(values), counts_to, to);
    });
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  bind_drawing(m);
  m.def("copy_rows", copy_bytes, "out"_a.noconvert(), "places"_a.noconvert().none(),
        "table"_a.noconvert(), "rows"_a.noconvert().none(), "num_threads"_a);
  m.def("add_rows", add, "out"_a.noconvert(), "places"_a.noconvert(), "rows"_a.noconvert(),
        "num_threads"_a);
  m.def("group_by_range", group, "ids"_a.noconvert(), "starts"_a.noconvert(), "last"_a,
        "order"_a.noconvert(), "rows"_a.noconvert(), "sizes"_a.noconvert());
  m.def("ungroup", put_back, "order"_a.noconvert(), "counts"_a.noconvert(), "values"_a.noconvert(),
        "new_counts"_a.noconvert(), "new_values"_a.noconvert());
  nb::class_<IdTable> table(m, "IdTable");
  table.def(
      "__init__",
      [](IdTable* self, int64_t num_ids) {
        require(num_ids >= 0, "num_ids must not be negative");
        new (self) IdTable(num_ids);
      },
      "num_ids"_a);
  table.def("renumber", renumber, "first"_a.noconvert(), "others"_a.noconvert(),
            "ids"_a.noconvert(), "local"_a.noconvert());
}

}  // namespace graphshard
