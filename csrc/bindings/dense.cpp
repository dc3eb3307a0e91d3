// SPDX-License-Identifier: Apache-2.0
// Products of rows and matrices; see module.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/arrays.h"
#include "dense/products.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

template <typename A>
void require_rows(const A& array) {
  require(array.stride(1) == 1 || array.shape(1) <= 1, "entries of a row must be side by side");
}

ConstRows dense_rows(const InRows& array) {
  require_rows(array);
  return {data_of<float>(array), array.stride(0)};
}

void multiply_rows_of(const OutRows& out, const std::vector<InRows>& rows,
                      const std::vector<InRows>& matrices, const std::optional<InRows>& first,
                      bool relu, int num_threads) {
  require(!rows.empty() && rows.size() == matrices.size(),
          "there must be a matrix for each array of rows, and one at least");
  require_rows(out);
  RowProducts a{{},   rows_in(out),        columns_in(out), {nullptr, 0},
                relu, data_of<float>(out), out.stride(0)};
  require(a.num_rows <= 1 || a.out_step >= a.width, "rows of out must lie apart");
  for (size_t i = 0; i < rows.size(); ++i) {
    require(rows_in(rows[i]) == a.num_rows && columns_in(rows[i]) == rows_in(matrices[i]) &&
                columns_in(matrices[i]) == a.width,
            "rows must be [rows, inner] and matrices [inner, width], where out is [rows, width]");
    require_apart({out}, {rows[i], matrices[i]});
    a.products.push_back({dense_rows(rows[i]), columns_in(rows[i]), data_of<float>(matrices[i]),
                          matrices[i].stride(0), matrices[i].stride(1)});
  }
  if (first) {
    require(
        columns_in(*first) == a.width && (rows_in(*first) == a.num_rows || rows_in(*first) == 1),
        "what is added first must be [rows, width] or [1, width]");
    a.first = dense_rows(*first);
    if (rows_in(*first) == 1) a.first.step = 0;
    const bool is_out = a.first.data == a.out && (a.first.step == a.out_step || a.num_rows == 1);
    if (!is_out) require_apart({out}, {*first});
  }
  const nb::gil_scoped_release release;
  multiply_rows(a, num_threads);
}

void multiply_transposed_of(const OutMatrix& out, const InRows& rows, const InRows& grads,
                            int num_threads) {
  require(rows_in(rows) == rows_in(grads) && columns_in(rows) == rows_in(out) &&
              columns_in(grads) == columns_in(out),
          "rows must be [rows, inner] and grads [rows, width], where out is [inner, width]");
  require_apart({out}, {rows, grads});
  const TransposedProduct a{dense_rows(rows), dense_rows(grads), rows_in(rows),
                            columns_in(rows), columns_in(grads), data_of<float>(out)};
  const nb::gil_scoped_release release;
  multiply_transposed(a, num_threads);
}

}  // namespace

void bind_dense(nb::module_& m) {
  m.def("gains_from_products", &gains_from_products);
  m.def("multiply_rows", &multiply_rows_of, "out"_a.noconvert(), "rows"_a.noconvert(),
        "matrices"_a.noconvert(), "first"_a.noconvert().none(), "relu"_a, "num_threads"_a);
  m.def("multiply_transposed", &multiply_transposed_of, "out"_a.noconvert(), "rows"_a.noconvert(),
        "grads"_a.noconvert(), "num_threads"_a);
}

}  // namespace graphshard
