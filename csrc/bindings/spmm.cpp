// SPDX-License-Identifier: Apache-2.0
// Sums and extrema over in-edges, values per edge, and the sort into Csr; see module.cpp.

#include "spmm/spmm.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/arrays.h"
#include "edge/edge_softmax.h"
#include "edge/sddmm.h"
#include "spmm/argmax.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

template <typename E, size_t kSize>
E parse(std::string_view name, const std::array<std::pair<std::string_view, E>, kSize>& known) {
  for (const auto& [key, value] : known) {
    if (key == name) return value;
  }
  throw std::invalid_argument("unknown name: " + std::string(name));
}

Op parse_op(std::string_view name) {
  return parse<Op, 7>(name, {{{"add", Op::kAdd},
                              {"sub", Op::kSub},
                              {"mul", Op::kMul},
                              {"div", Op::kDiv},
                              {"dot", Op::kDot},
                              {"copy_lhs", Op::kCopyLhs},
                              {"copy_rhs", Op::kCopyRhs}}});
}

// "add" is the sum, added to what is there.
Reduce parse_reduce(std::string_view name) {
  return parse<Reduce, 5>(name, {{{"sum", Reduce::kSum},
                                  {"add", Reduce::kAdd},
                                  {"mean", Reduce::kMean},
                                  {"max", Reduce::kMax},
                                  {"min", Reduce::kMin}}});
}

SumResult sum_result(Reduce reduce) {
  if (reduce == Reduce::kAdd) return SumResult::kAdded;
  return reduce == Reduce::kMean ? SumResult::kMean : SumResult::kSum;
}

Target parse_target(std::string_view name) {
  return parse<Target, 3>(name, {{{"u", Target::kSrc}, {"v", Target::kDst}, {"e", Target::kEdge}}});
}

template <typename T>
Rows<T> rows_of(const std::optional<InMatrix>& matrix) {
  if (!matrix) return {nullptr, 0};
  return {data_of<T>(*matrix), columns_in(*matrix)};
}

int64_t width_of(const std::optional<InMatrix>& matrix) { return matrix ? columns_in(*matrix) : 0; }

RowLoop loop_of(const InVector& lhs_offsets, const InVector& rhs_offsets, int64_t inner,
                int64_t lhs_step, int64_t rhs_step) {
  const int64_t outer = static_cast<int64_t>(lhs_offsets.shape(0));
  require(lhs_offsets.shape(0) == rhs_offsets.shape(0), "offsets must have equal lengths");
  require(inner >= 0 && inner <= std::numeric_limits<int64_t>::max() / std::max<int64_t>(outer, 1),
          "outer * inner must not be negative, and be a number of 64 bits");
  require((lhs_step == 0 || lhs_step == 1) && (rhs_step == 0 || rhs_step == 1),
          "steps must be 0 or 1");
  return {outer,    inner,   data_of<int64_t>(lhs_offsets), data_of<int64_t>(rhs_offsets),
          lhs_step, rhs_step};
}

// Whatever `loop` reads of an operand's row is in a row of `width` elements.
void require_row(const RowLoop& loop, const int64_t* offsets, int64_t step, int64_t width) {
  const char* rule = "what a row loop reads must be in the rows of the operand";
  const int64_t read = step == 1 ? loop.inner : std::min<int64_t>(loop.inner, 1);
  // A loop that goes straight through reads whole rows, whatever their width is.
  require(loop.outer != 1 || step == 0 || width == loop.inner, rule);
  for (int64_t outer = 0; outer < loop.outer; ++outer) {
    require(offsets[outer] >= 0 && offsets[outer] <= width - read, rule);
  }
}

void spmm(const OutMatrix& out, const InVector& indptr, const InVector& indices,
          const std::optional<InVector>& eids, int64_t num_src, const std::optional<InMatrix>& lhs,
          const std::optional<InMatrix>& rhs, const std::optional<OutMatrix>& arg,
          std::string_view op, std::string_view reduce, const InVector& lhs_offsets,
          const InVector& rhs_offsets, int64_t inner, int64_t lhs_step, int64_t rhs_step,
          int num_threads) {
  const Op operation = parse_op(op);
  const Reduce reduction = parse_reduce(reduce);
  const Csr edges = csr_of(indptr, ids_of(indices), eids, indices.shape(0));
  const RowLoop loop = loop_of(lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step);
  const bool sums = reduction != Reduce::kMax && reduction != Reduce::kMin;
  require(sums || arg, "max and min need arg");
  require(operation != Op::kDot, "sums and extrema are not of dot products");
  require(lhs || operation == Op::kCopyRhs, "this operator needs lhs");
  require(rhs || operation == Op::kCopyLhs, "this operator needs rhs");
  require_apart({out, arg}, {indptr, indices, eids, lhs_offsets, rhs_offsets});
  require(!lhs || rows_in(*lhs) == num_src, "lhs must have one row per source");
  require(!rhs || rows_in(*rhs) == edges.num_edges, "rhs must have one row per edge");
  const int64_t width = loop.outer * inner;
  require(columns_in(out) == width, "out must have outer * inner columns");
  require(rows_in(out) == edges.num_rows, "out must have one row per destination");
  require(!arg || (arg->shape(0) == out.shape(0) && arg->shape(1) == out.shape(1)),
          "arg must have the shape of out");
  if (operation == Op::kCopyLhs || operation == Op::kCopyRhs) {
    require(width_of(operation == Op::kCopyLhs ? lhs : rhs) == width,
            "out must have the columns of what is copied");
  } else {
    require_row(loop, loop.lhs_offsets, lhs_step, width_of(lhs));
    require_row(loop, loop.rhs_offsets, rhs_step, width_of(rhs));
  }
  const WritableIds arg_ids = arg ? writable_ids_of(*arg) : WritableIds();
  with_value_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const SpmmArguments<T> arguments{edges, rows_of<T>(lhs), rows_of<T>(rhs), loop,
                                     data_of<T>(out)};
    const nb::gil_scoped_release release;
    if (sums) {
      spmm_sum(arguments, operation, sum_result(reduction), num_threads);
    } else {
      spmm_extremum(arguments, arg_ids, operation, reduction == Reduce::kMin, num_threads);
    }
  });
}

// What the two forms of edges share.
struct SddmmCall {
  const OutMatrix& out;
  const InMatrix& lhs;
  const InMatrix& rhs;
  std::string_view lhs_target;
  std::string_view rhs_target;
  std::string_view op;
  RowLoop loop;
  int num_threads;
};

void run_sddmm(const SddmmCall& call, const SddmmEdges& edges) {
  const Op operation = parse_op(call.op);
  const bool is_dot = operation == Op::kDot;
  require(operation != Op::kCopyLhs && operation != Op::kCopyRhs, "copies are not computed");
  const RowLoop& loop = call.loop;
  const Target lhs_target = parse_target(call.lhs_target);
  const Target rhs_target = parse_target(call.rhs_target);
  const int64_t width = is_dot ? loop.outer : loop.outer * loop.inner;
  require(columns_in(call.out) == width, "out must have one column per result");
  require(is_dot ? loop.lhs_step == 1 && loop.rhs_step == 1 : true,
          "both operands of a dot product advance");
  require_row(loop, loop.lhs_offsets, loop.lhs_step, columns_in(call.lhs));
  require_row(loop, loop.rhs_offsets, loop.rhs_step, columns_in(call.rhs));
  const auto require_rows = [&](Target target, const InMatrix& operand) {
    const int64_t rows = target == Target::kSrc   ? edges.num_src
                         : target == Target::kDst ? edges.num_rows
                                                  : edges.num_edges;
    require(rows_in(operand) == rows, "operands must have one row per source, destination or edge");
  };
  require_rows(lhs_target, call.lhs);
  require_rows(rhs_target, call.rhs);
  with_value_type(call.out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const SddmmArguments<T> arguments{edges,
                                      {data_of<T>(call.lhs), columns_in(call.lhs)},
                                      {data_of<T>(call.rhs), columns_in(call.rhs)},
                                      lhs_target,
                                      rhs_target,
                                      loop,
                                      data_of<T>(call.out)};
    const nb::gil_scoped_release release;
    sddmm(arguments, operation, call.num_threads);
  });
}

void sddmm_csc(const OutMatrix& out, const InVector& indptr, const InVector& indices,
               const std::optional<InVector>& eids, int64_t num_src, const InMatrix& lhs,
               const InMatrix& rhs, std::string_view lhs_target, std::string_view rhs_target,
               std::string_view op, const InVector& lhs_offsets, const InVector& rhs_offsets,
               int64_t inner, int64_t lhs_step, int64_t rhs_step, int num_threads) {
  require_apart({out}, {indptr, indices, eids, lhs_offsets, rhs_offsets});
  require(indices.shape(0) == out.shape(0), "out must have one row per edge");
  const Csr csr = csr_of(indptr, ids_of(indices), eids, indices.shape(0));
  run_sddmm({out, lhs, rhs, lhs_target, rhs_target, op,
             loop_of(lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step), num_threads},
            {csr.indptr, csr.eids, csr.indices, Ids(), csr.num_rows, num_src, csr.num_edges});
}

void sddmm_coo(const OutMatrix& out, const InVector& src, const InVector& dst, int64_t num_src,
               int64_t num_dst, const InMatrix& lhs, const InMatrix& rhs,
               std::string_view lhs_target, std::string_view rhs_target, std::string_view op,
               const InVector& lhs_offsets, const InVector& rhs_offsets, int64_t inner,
               int64_t lhs_step, int64_t rhs_step, int num_threads) {
  require_apart({out}, {src, dst, lhs_offsets, rhs_offsets});
  require(src.shape(0) == out.shape(0) && dst.shape(0) == out.shape(0),
          "out must have one row per edge");
  run_sddmm({out, lhs, rhs, lhs_target, rhs_target, op,
             loop_of(lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step), num_threads},
            {Ids(), Ids(), ids_of(src), ids_of(dst), num_dst, num_src, rows_in(out)});
}

template <typename A, typename B>
bool same_shape(const A& a, const B& b) {
  return a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1);
}

void softmax(const OutMatrix& out, const InVector& indptr, const std::optional<InVector>& eids,
             const InMatrix& logits, int num_threads) {
  require(same_shape(logits, out), "out must have the shape of logits");
  require_apart({out}, {indptr, eids});
  const Csr csr = csr_of(indptr, Ids(), eids, out.shape(0));
  with_value_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* from = data_of<T>(logits);
    T* to = data_of<T>(out);
    const nb::gil_scoped_release release;
    edge_softmax(csr, from, columns_in(out), to, num_threads);
  });
}

void softmax_backward(const OutMatrix& result, const InVector& indptr,
                      const std::optional<InVector>& eids, const InMatrix& out,
                      const InMatrix& grad, int num_threads) {
  require(same_shape(out, result) && same_shape(grad, result),
          "result, out and grad must have one shape");
  require_apart({result}, {indptr, eids});
  const Csr csr = csr_of(indptr, Ids(), eids, out.shape(0));
  with_value_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* of = data_of<T>(out);
    const T* from = data_of<T>(grad);
    T* to = data_of<T>(result);
    const nb::gil_scoped_release release;
    edge_softmax_backward(csr, of, from, columns_in(out), to, num_threads);
  });
}

void require_places(const InVector& places, size_t width) {
  const int64_t* entries = data_of<int64_t>(places);
  for (size_t j = 0; j < places.shape(0); ++j) {
    require(static_cast<uint64_t>(entries[j]) < width, "places must be columns of the operand");
  }
}

void gradients_by_argmax(const InMatrix& grad, const InMatrix& arg, const InVector& src,
                         size_t num_src, const std::optional<InMatrix>& lhs,
                         const std::optional<InMatrix>& rhs, const InVector& lhs_places,
                         const InVector& rhs_places, std::string_view op,
                         const std::optional<OutMatrix>& lhs_grad,
                         const std::optional<OutMatrix>& rhs_grad, int num_threads) {
  const size_t width = grad.shape(1);
  require(same_shape(arg, grad), "arg must have the shape of grad");
  require(arg.dtype() == src.dtype(), "arg must have the dtype of src");
  require(lhs_places.shape(0) == width && rhs_places.shape(0) == width,
          "places must have one entry per column");
  require(!lhs_grad || lhs_grad->shape(1) == width, "lhs_grad must have grad's columns");
  require((!lhs || lhs->shape(0) == num_src) && (!lhs_grad || lhs_grad->shape(0) == num_src),
          "lhs and lhs_grad must have one row per source");
  const size_t num_edges = src.shape(0);
  require((!rhs || rhs->shape(0) == num_edges) && (!rhs_grad || rhs_grad->shape(0) == num_edges),
          "rhs and rhs_grad must have one row per edge");
  require_apart({lhs_grad, rhs_grad}, {arg, src, lhs_places, rhs_places});
  if (lhs) require_places(lhs_places, lhs->shape(1));
  if (rhs) require_places(rhs_places, rhs->shape(1));
  if (rhs_grad) require_places(rhs_places, rhs_grad->shape(1));
  const Op operation = parse_op(op);
  with_value_type(grad.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    const ArgmaxArguments<T> arguments{ids_of(arg),
                                       data_of<T>(grad),
                                       rows_in(grad),
                                       static_cast<int64_t>(width),
                                       ids_of(src),
                                       num_edges,
                                       rows_of<T>(lhs),
                                       rows_of<T>(rhs),
                                       data_of<int64_t>(lhs_places),
                                       data_of<int64_t>(rhs_places)};
    V* lhs_to = data_of<V>(lhs_grad);
    V* rhs_to = data_of<V>(rhs_grad);
    const int64_t rhs_width = rhs_grad ? columns_in(*rhs_grad) : 0;
    const nb::gil_scoped_release release;
    argmax_backward(arguments, operation, lhs_to, rhs_to, rhs_width, num_threads);
  });
}

void merge(const OutVector& best, const OutVector& edge, const InVector& value, const InVector& arg,
           const std::optional<InVector>& ids, int64_t none, bool smallest, int num_threads) {
  const size_t size = best.shape(0);
  require(edge.shape(0) == size && value.shape(0) == size && arg.shape(0) == size,
          "best, edge, value and arg must have one length");
  require(!ids || ids->dtype() == edge.dtype(), "ids must have the dtype of edge");
  require_apart({best, edge}, {arg, ids});
  const WritableIds edges = writable_ids_of(edge);
  with_value_type(best.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const Candidates<T> candidates{data_of<T>(value), ids_of(arg), ids_of(ids),
                                   ids ? ids->shape(0) : 0};
    T* to = data_of<T>(best);
    const nb::gil_scoped_release release;
    merge_best(candidates, static_cast<int64_t>(size), smallest, none, to, edges, num_threads);
  });
}

void group(const InVector& keys, const InVector& others, const OutVector& indptr,
           const OutVector& grouped, const std::optional<OutVector>& positions, int num_threads) {
  const size_t size = keys.shape(0);
  require(others.shape(0) == size && grouped.shape(0) == size &&
              (!positions || positions->shape(0) == size),
          "keys, others, grouped and positions must have one length");
  require_apart({indptr, grouped, positions}, {keys, others});
  require(indptr.shape(0) > 0, "indptr must not be empty");
  with_id_type(keys.dtype(), [&](auto zero) {
    using I = decltype(zero);
    require(size <= static_cast<size_t>(std::numeric_limits<I>::max()),
            "there must be no more edges than the type of ids can tell apart");
    const I* from = data_of<I>(keys);
    const I* with = data_of<I>(others);
    I* begins = data_of<I>(indptr);
    I* to = data_of<I>(grouped);
    I* places = data_of<I>(positions);
    const nb::gil_scoped_release release;
    group_by_key(from, with, static_cast<int64_t>(size), rows_in(indptr) - 1, begins, to, places,
                 num_threads);
  });
}

}  // namespace

void bind_spmm(nb::module_& m) {
  m.def("spmm", spmm, "out"_a.noconvert(), "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "eids"_a.noconvert().none(), "num_src"_a, "lhs"_a.noconvert().none(),
        "rhs"_a.noconvert().none(), "arg"_a.noconvert().none(), "op"_a, "reduce"_a,
        "lhs_offsets"_a.noconvert(), "rhs_offsets"_a.noconvert(), "inner"_a, "lhs_step"_a,
        "rhs_step"_a, "num_threads"_a);
  m.def("sddmm_csc", sddmm_csc, "out"_a.noconvert(), "indptr"_a.noconvert(),
        "indices"_a.noconvert(), "eids"_a.noconvert().none(), "num_src"_a, "lhs"_a.noconvert(),
        "rhs"_a.noconvert(), "lhs_target"_a, "rhs_target"_a, "op"_a, "lhs_offsets"_a.noconvert(),
        "rhs_offsets"_a.noconvert(), "inner"_a, "lhs_step"_a, "rhs_step"_a, "num_threads"_a);
  m.def("sddmm_coo", sddmm_coo, "out"_a.noconvert(), "src"_a.noconvert(), "dst"_a.noconvert(),
        "num_src"_a, "num_dst"_a, "lhs"_a.noconvert(), "rhs"_a.noconvert(), "lhs_target"_a,
        "rhs_target"_a, "op"_a, "lhs_offsets"_a.noconvert(), "rhs_offsets"_a.noconvert(), "inner"_a,
        "lhs_step"_a, "rhs_step"_a, "num_threads"_a);
  m.def("edge_softmax", softmax, "out"_a.noconvert(), "indptr"_a.noconvert(),
        "eids"_a.noconvert().none(), "logits"_a.noconvert(), "num_threads"_a);
  m.def("edge_softmax_backward", softmax_backward, "result"_a.noconvert(), "indptr"_a.noconvert(),
        "eids"_a.noconvert().none(), "out"_a.noconvert(), "grad"_a.noconvert(), "num_threads"_a);
  m.def("argmax_backward", gradients_by_argmax, "grad"_a.noconvert(), "arg"_a.noconvert(),
        "src"_a.noconvert(), "num_src"_a, "lhs"_a.noconvert().none(), "rhs"_a.noconvert().none(),
        "lhs_places"_a.noconvert(), "rhs_places"_a.noconvert(), "op"_a,
        "lhs_grad"_a.noconvert().none(), "rhs_grad"_a.noconvert().none(), "num_threads"_a);
  m.def("merge_best", merge, "best"_a.noconvert(), "edge"_a.noconvert(), "value"_a.noconvert(),
        "arg"_a.noconvert(), "ids"_a.noconvert().none(), "none"_a, "smallest"_a, "num_threads"_a);
  m.def("group_by_key", group, "keys"_a.noconvert(), "others"_a.noconvert(), "indptr"_a.noconvert(),
        "grouped"_a.noconvert(), "positions"_a.noconvert().none(), "num_threads"_a);
}

}  // namespace graphshard
