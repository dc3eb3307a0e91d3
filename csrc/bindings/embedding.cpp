// SPDX-License-Identifier: Apache-2.0
// Gradients of embeddings, and the steps of their optimizers; see module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "bindings/arrays.h"
#include "embedding/row_groups.h"
#include "embedding/row_updates.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

int64_t group(const InVector& ids, const OutVector& distinct, const OutVector& starts,
              const OutVector& order) {
  require(distinct.shape(0) == ids.shape(0) && order.shape(0) == ids.shape(0) &&
              starts.shape(0) == ids.shape(0) + 1,
          "distinct and order must have one entry per id, and starts one more");
  require_apart({distinct, starts, order}, {ids});
  int64_t* starts_to = data_of<int64_t>(starts);
  int64_t* order_to = data_of<int64_t>(order);
  return with_id_type(ids.dtype(), [&](auto zero) {
    using I = decltype(zero);
    const I* from = data_of<I>(ids);
    I* to = data_of<I>(distinct);
    const nb::gil_scoped_release release;
    return group_equal(from, rows_in(ids), to, starts_to, order_to);
  });
}

// Rows of `tables`, all of them `width` columns wide and apart from what is written.
RowGroups groups_of(const std::vector<InRows>& tables, int64_t width, const InVector& order,
                    const InVector& starts) {
  require(!tables.empty(), "there must be a table of rows");
  require(starts.shape(0) > 0, "starts must not be empty");
  RowGroups groups{
      {}, 0, width, data_of<int64_t>(order), data_of<int64_t>(starts), rows_in(starts) - 1, 0, 0};
  for (const InRows& table : tables) {
    require(columns_in(table) == width && (table.stride(1) == 1 || width == 1),
            "tables of rows must have the columns that are written, side by side");
    groups.tables.push_back({data_of<float>(table), table.stride(0), groups.num_rows});
    groups.num_rows += rows_in(table);
  }
  return groups;
}

void sum(const OutRows& out, const std::vector<InRows>& tables, const InVector& order,
         const InVector& starts, int num_threads) {
  require(out.stride(1) == 1 || out.shape(1) == 1, "columns of out must be side by side");
  const RowGroups groups = groups_of(tables, columns_in(out), order, starts);
  require(rows_in(out) == groups.num_groups, "out must have a row for each group");
  require_apart({out}, {order, starts});
  for (const InRows& table : tables) require_apart({out}, {table});
  float* const to = data_of<float>(out);
  const nb::gil_scoped_release release;
  check_groups(groups, rows_in(order));
  sum_groups(to, out.stride(0), groups, num_threads);
}

void update(int rule_number, const std::vector<float>& numbers,
            const std::vector<OutMatrix>& changed, const InVector& rows,
            const std::vector<InRows>& tables, const InVector& order, const InVector& starts,
            int64_t first_inner, int64_t last_inner, int num_threads) {
  require(rule_number >= 0 && rule_number <= 2, "there are three rules");
  const Rule rule = static_cast<Rule>(rule_number);
  require(static_cast<int64_t>(changed.size()) == num_tables(rule) && numbers.size() == 5,
          "a rule must have its tables, and five numbers");
  RowGroups groups = groups_of(tables, columns_in(changed[0]), order, starts);
  groups.first_inner = first_inner;
  groups.last_inner = last_inner;
  require(rows_in(rows) == groups.num_groups, "there must be a row for each group");
  std::vector<float*> data;
  for (size_t i = 0; i < changed.size(); ++i) {
    require(
        changed[i].shape(0) == changed[0].shape(0) && changed[i].shape(1) == changed[0].shape(1),
        "tables that are changed must have one shape");
    require_apart({changed[i]}, {rows, order, starts});
    for (const InRows& table : tables) require_apart({changed[i]}, {table});
    for (size_t j = 0; j < i; ++j) require_apart({changed[i], changed[j]}, {});
    data.push_back(data_of<float>(changed[i]));
  }
  const Ids numbers_of_rows = ids_of(rows);
  const nb::gil_scoped_release release;
  check_groups(groups, rows_in(order));
  update_rows(rule, {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]}, data,
              rows_in(changed[0]), numbers_of_rows, groups, num_threads);
}

}  // namespace

void bind_embedding(nb::module_& m) {
  m.def("group_equal", group, "ids"_a.noconvert(), "distinct"_a.noconvert(), "starts"_a.noconvert(),
        "order"_a.noconvert());
  m.def("sum_groups", sum, "out"_a.noconvert(), "tables"_a.noconvert(), "order"_a.noconvert(),
        "starts"_a.noconvert(), "num_threads"_a);
  m.def("update_rows", update, "rule"_a, "numbers"_a, "changed"_a.noconvert(), "rows"_a.noconvert(),
        "tables"_a.noconvert(), "order"_a.noconvert(), "starts"_a.noconvert(), "first_inner"_a,
        "last_inner"_a, "num_threads"_a);
}

}  // namespace graphshard
