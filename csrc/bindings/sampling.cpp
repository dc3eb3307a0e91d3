// SPDX-License-Identifier: Apache-2.0
// Python's way to draw.h, compact.h, groups.h and rows.h; see bindings.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "bindings/arrays.h"
#include "runtime/rows.h"
#include "sampling/draw.h"
#include "sampling/id_ranges.h"
#include "sampling/id_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

// Of one of two dtypes, told apart when it is used.
using Numbers = Array<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Integers integers_of(const Numbers& array) {
  const bool wide = array.dtype() == nb::dtype<int64_t>();
  require(wide || array.dtype() == nb::dtype<int32_t>(), "ids must be int32 or int64");
  return {array.data(), wide};
}

Weights weights_of(const std::optional<Numbers>& array, size_t num_edges) {
  if (!array) return {nullptr, false};
  const bool wide = array->dtype() == nb::dtype<double>();
  require(wide || array->dtype() == nb::dtype<float>(), "weights must be float32 or float64");
  require(array->shape(0) == num_edges, "weights must have num_edges entries");
  return {array->data(), wide};
}

Exclusions exclusions_of(const MaybeVector<uint8_t>& mask, const MaybeVector<int64_t>& excluded,
                         int64_t num_edges) {
  require(num_edges >= 0, "num_edges must not be negative");
  require(!mask || static_cast<int64_t>(mask->shape(0)) == num_edges,
          "mask must have num_edges entries");
  const int64_t count = excluded ? static_cast<int64_t>(excluded->shape(0)) : 0;
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = excluded->data()[i];
    require(position > last && position < num_edges,
            "excluded positions must ascend, and be below num_edges");
    last = position;
  }
  return {mask ? mask->data() : nullptr, excluded ? excluded->data() : nullptr, count, num_edges};
}

// One draw, in two calls, because the arrays it goes into are made in between. Holds on to the
// arrays it was made of.
class Drawing {
 public:
  Drawing(const Numbers& indptr, const Numbers& rows, const Numbers& row_ids, int64_t fanout,
          uint64_t key, bool replace, const std::optional<Numbers>& prob,
          const std::optional<Numbers>& labor_ids, const MaybeVector<uint8_t>& mask,
          const MaybeVector<int64_t>& excluded, int64_t num_edges, const Vector<int64_t>& counts)
      : indptr_(indptr),
        rows_(rows),
        row_ids_(row_ids),
        prob_(prob),
        labor_ids_(labor_ids),
        mask_(mask),
        excluded_(excluded),
        counts_(counts),
        by_edge_(prob || labor_ids),
        arguments_{integers_of(indptr),
                   static_cast<int64_t>(indptr.shape(0)) - 1,
                   num_edges,
                   integers_of(rows),
                   integers_of(row_ids),
                   static_cast<int64_t>(rows.shape(0)),
                   fanout < 0 ? kNoLimit : fanout,
                   key,
                   replace && fanout >= 0,
                   weights_of(prob, static_cast<size_t>(num_edges)),
                   labor_ids ? integers_of(*labor_ids) : Integers{nullptr, false},
                   exclusions_of(mask, excluded, num_edges)} {
    const size_t edges = static_cast<size_t>(num_edges);
    require(indptr.shape(0) > 0, "indptr must not be empty");
    require(fanout <= kNoLimit, "fanout must be below 2^31");
    require(rows.shape(0) == row_ids.shape(0) && rows.shape(0) == counts.shape(0),
            "rows, row_ids and counts must have one length");
    require_apart({counts}, {indptr, rows, row_ids, prob, labor_ids, mask, excluded});
    require(!labor_ids || labor_ids->shape(0) == edges, "labor_ids must have num_edges entries");
  }

  int64_t count(int num_threads) {
    const nb::gil_scoped_release release;
    if (!by_edge_) return total_ = count_uniform(arguments_, counts_.data(), num_threads);
    draft_.emplace(arguments_, counts_.data(), num_threads);
    return total_ = draft_->total();
  }

  template <typename I, typename J>
  void write(const Vector<const J>& indices, const MaybeVector<I>& eids, const Vector<I>& edges,
             const Vector<J>& picked, int num_threads) {
    require(total_ >= 0, "count must come before write");
    const size_t total = static_cast<size_t>(total_);
    require(edges.shape(0) == total && picked.shape(0) == total,
            "edges and picked must have as many entries as were counted");
    require(static_cast<int64_t>(indices.shape(0)) == arguments_.num_edges &&
                (!eids || eids->shape(0) == indices.shape(0)),
            "indices and eids must have num_edges entries");
    require_apart({edges, picked, counts_},
                  {indices, eids, indptr_, rows_, row_ids_, mask_, excluded_});
    const I* ids = eids ? eids->data() : nullptr;
    const nb::gil_scoped_release release;
    if (draft_) {
      draft_->write(indices.data(), ids, edges.data(), picked.data(), num_threads);
    } else {
      draw_uniform(arguments_, counts_.data(), indices.data(), ids, edges.data(), picked.data(),
                   num_threads);
    }
  }

 private:
  Numbers indptr_;
  Numbers rows_;
  Numbers row_ids_;
  std::optional<Numbers> prob_;
  std::optional<Numbers> labor_ids_;
  MaybeVector<uint8_t> mask_;
  MaybeVector<int64_t> excluded_;
  Vector<int64_t> counts_;
  bool by_edge_;
  DrawArguments arguments_;
  std::optional<Draft> draft_;
  int64_t total_ = -1;
};

template <typename I, typename J>
void bind_write(nb::class_<Drawing>& drawing) {
  drawing.def("write", &Drawing::write<I, J>, "indices"_a.noconvert(), "eids"_a.noconvert().none(),
              "edges"_a.noconvert(), "picked"_a.noconvert(), "num_threads"_a);
}

void bind_drawing(nb::module_& m) {
  nb::class_<Drawing> drawing(m, "Drawing");
  drawing.def(nb::init<const Numbers&, const Numbers&, const Numbers&, int64_t, uint64_t, bool,
                       const std::optional<Numbers>&, const std::optional<Numbers>&,
                       const MaybeVector<uint8_t>&, const MaybeVector<int64_t>&, int64_t,
                       const Vector<int64_t>&>(),
              "indptr"_a.noconvert(), "rows"_a.noconvert(), "row_ids"_a.noconvert(), "fanout"_a,
              "key"_a, "replace"_a, "prob"_a.noconvert().none(), "labor_ids"_a.noconvert().none(),
              "mask"_a.noconvert().none(), "excluded"_a.noconvert().none(), "num_edges"_a,
              "counts"_a.noconvert());
  drawing.def("count", &Drawing::count, "num_threads"_a);
  bind_write<int32_t, int32_t>(drawing);
  bind_write<int32_t, int64_t>(drawing);
  bind_write<int64_t, int32_t>(drawing);
  bind_write<int64_t, int64_t>(drawing);
}

template <typename I>
void bind_renumber(nb::class_<IdTable>& table) {
  table.def(
      "renumber",
      [](IdTable& self, const Vector<const I>& first, const Vector<const I>& others,
         const Vector<I>& ids, const Vector<I>& local) {
        require(ids.shape(0) == first.shape(0) + others.shape(0),
                "ids must have room for first and others");
        require(local.shape(0) == others.shape(0), "local must have one entry per other");
        require_apart({ids, local}, {first, others});
        const nb::gil_scoped_release release;
        return self.renumber(first.data(), static_cast<int64_t>(first.shape(0)), others.data(),
                             static_cast<int64_t>(others.shape(0)), ids.data(), local.data());
      },
      "first"_a.noconvert(), "others"_a.noconvert(), "ids"_a.noconvert(), "local"_a.noconvert());
}

using Bytes = Matrix<uint8_t>;
using ReadBytes = Matrix<const uint8_t>;

RowNumbers row_numbers_of(const std::optional<Numbers>& array) {
  if (!array) return {nullptr, false};
  const Integers numbers = integers_of(*array);
  return {numbers.data, numbers.wide};
}

void bind_copy_rows(nb::module_& m) {
  m.def(
      "copy_rows",
      [](const Bytes& out, const std::optional<Numbers>& places, const ReadBytes& table,
         const std::optional<Numbers>& rows, int num_threads) {
        require(out.shape(1) == table.shape(1), "rows of out and table must have one size");
        require(!places || !rows || places->shape(0) == rows->shape(0),
                "places and rows must have one length");
        require_apart({out}, {places, table, rows});
        const size_t count = rows ? rows->shape(0) : places ? places->shape(0) : table.shape(0);
        const RowNumbers to = row_numbers_of(places);
        const RowNumbers from = row_numbers_of(rows);
        const nb::gil_scoped_release release;
        copy_rows(
            {reinterpret_cast<char*>(out.data()), static_cast<int64_t>(out.shape(0))}, to,
            {reinterpret_cast<const char*>(table.data()), static_cast<int64_t>(table.shape(0))},
            from, static_cast<int64_t>(count), static_cast<int64_t>(out.shape(1)), num_threads);
      },
      "out"_a.noconvert(), "places"_a.noconvert().none(), "table"_a.noconvert(),
      "rows"_a.noconvert().none(), "num_threads"_a);
}

template <typename S, typename T>
void bind_add_rows(nb::module_& m) {
  m.def(
      "add_rows",
      [](const Array<S, nb::ndim<2>, nb::device::cpu>& out, const Numbers& places,
         const Matrix<const T>& rows, int num_threads) {
        require(out.shape(1) == rows.shape(1) && (out.stride(1) == 1 || out.shape(1) == 1),
                "out must have the columns of rows, side by side");
        require(places.shape(0) == rows.shape(0), "places and rows must have one length");
        require_apart({out}, {places, rows});
        const RowNumbers to = row_numbers_of(places);
        const nb::gil_scoped_release release;
        add_rows(out.data(), static_cast<int64_t>(out.shape(0)), out.stride(0), to, rows.data(),
                 static_cast<int64_t>(rows.shape(0)), static_cast<int64_t>(rows.shape(1)),
                 num_threads);
      },
      "out"_a.noconvert(), "places"_a.noconvert(), "rows"_a.noconvert(), "num_threads"_a);
}

template <typename I, typename R>
void bind_groups(nb::module_& m) {
  m.def(
      "group_by_range",
      [](const Vector<const I>& ids, const Vector<const int64_t>& starts, int64_t last,
         const Vector<int64_t>& order, const Vector<R>& rows, const Vector<int64_t>& sizes) {
        const int64_t num_ranges = static_cast<int64_t>(sizes.shape(0));
        require(starts.shape(0) == sizes.shape(0) + 1, "starts must have one more than sizes");
        for (int64_t r = 0; r < num_ranges; ++r) {
          const int64_t first = starts.data()[r];
          const int64_t beyond = starts.data()[r + 1];
          require(first >= 0 && first <= beyond, "starts must ascend, and not be negative");
          require(beyond - first - 1 <= static_cast<int64_t>(std::numeric_limits<R>::max()),
                  "rows must have a type that tells those of each range apart");
        }
        require(num_ranges < 65536, "there must be less than 65536 ranges");
        require(last >= 0 && last < num_ranges, "last must be a range");
        require(order.shape(0) == ids.shape(0) && rows.shape(0) == ids.shape(0),
                "ids, order and rows must have one length");
        require_apart({order, rows, sizes}, {ids, starts});
        const nb::gil_scoped_release release;
        return group_by_range(ids.data(), static_cast<int64_t>(ids.shape(0)), starts.data(),
                              num_ranges, last, order.data(), rows.data(), sizes.data());
      },
      "ids"_a.noconvert(), "starts"_a.noconvert(), "last"_a, "order"_a.noconvert(),
      "rows"_a.noconvert(), "sizes"_a.noconvert());
  m.def(
      "ungroup",
      [](const Vector<const int64_t>& order, const Vector<const int64_t>& counts,
         const Vector<const I>& values, const Vector<int64_t>& new_counts,
         const Vector<R>& new_values) {
        require(order.shape(0) == counts.shape(0) && order.shape(0) == new_counts.shape(0),
                "order, counts and new_counts must have one length");
        require(values.shape(0) == new_values.shape(0),
                "values and new_values must have one length");
        require_apart({new_counts, new_values}, {order, counts, values});
        const nb::gil_scoped_release release;
        return ungroup(order.data(), counts.data(), static_cast<int64_t>(order.shape(0)),
                       values.data(), static_cast<int64_t>(values.shape(0)), new_counts.data(),
                       new_values.data());
      },
      "order"_a.noconvert(), "counts"_a.noconvert(), "values"_a.noconvert(),
      "new_counts"_a.noconvert(), "new_values"_a.noconvert());
}

}  // namespace

void bind_sampling(nb::module_& m) {
  bind_drawing(m);
  bind_copy_rows(m);
  bind_add_rows<float, float>(m);
  bind_add_rows<double, double>(m);
  bind_add_rows<float, bfloat16>(m);
  bind_add_rows<bfloat16, bfloat16>(m);
  bind_groups<int32_t, int32_t>(m);
  bind_groups<int32_t, int64_t>(m);
  bind_groups<int64_t, int32_t>(m);
  bind_groups<int64_t, int64_t>(m);
  nb::class_<IdTable> table(m, "IdTable");
  table.def(
      "__init__",
      [](IdTable* self, int64_t num_ids) {
        require(num_ids >= 0, "num_ids must not be negative");
        new (self) IdTable(num_ids);
      },
      "num_ids"_a);
  bind_renumber<int32_t>(table);
  bind_renumber<int64_t>(table);
}

}  // namespace graphshard
