// SPDX-License-Identifier: Apache-2.0
// The files bindings*.cpp alone know Python: they convert and check arguments, let go of the
// interpreter lock, and call the kernels. Arrays are borrowed for the length of a call; results go
// into arrays that the caller made. Kernels touch no Python object, so other threads may run
// meanwhile.

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
#include "runtime/csr.h"
#include "spmm/argmax.h"
#include "spmm/spmm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

// Goes up, here and in _kernel.py, when a signature below changes.
constexpr int kInterface = 11;

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
Rows<T> rows_of(const MaybeMatrix<T>& matrix) {
  if (!matrix) return {nullptr, 0};
  return {matrix->data(), static_cast<int64_t>(matrix->shape(1))};
}

template <typename I>
Csc<I> csc_of(const Vector<const I>& indptr, const I* indices, const MaybeVector<I>& eids,
              size_t num_edges) {
  require_pointers<I>(indptr, num_edges);
  require(!eids || eids->shape(0) == num_edges, "eids must have num_edges entries");
  return {indptr.data(), indices, eids ? eids->data() : nullptr,
          static_cast<int64_t>(indptr.shape(0)) - 1, static_cast<int64_t>(num_edges)};
}

RowLoop loop_of(const Vector<const int64_t>& lhs_offsets, const Vector<const int64_t>& rhs_offsets,
                int64_t inner, int64_t lhs_step, int64_t rhs_step) {
  const int64_t outer = static_cast<int64_t>(lhs_offsets.shape(0));
  require(lhs_offsets.shape(0) == rhs_offsets.shape(0), "offsets must have equal lengths");
  require(inner >= 0 && inner <= std::numeric_limits<int64_t>::max() / std::max<int64_t>(outer, 1),
          "outer * inner must not be negative, and be a number of 64 bits");
  require((lhs_step == 0 || lhs_step == 1) && (rhs_step == 0 || rhs_step == 1),
          "steps must be 0 or 1");
  return {outer, inner, lhs_offsets.data(), rhs_offsets.data(), lhs_step, rhs_step};
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

template <typename T, typename I>
void bind_spmm(nb::module_& m) {
  m.def(
      "spmm",
      [](const Matrix<T>& out, const Vector<const I>& indptr, const Vector<const I>& indices,
         const MaybeVector<I>& eids, int64_t num_src, const MaybeMatrix<T>& lhs,
         const MaybeMatrix<T>& rhs, const std::optional<Matrix<I>>& arg, std::string_view op,
         std::string_view reduce, const Vector<const int64_t>& lhs_offsets,
         const Vector<const int64_t>& rhs_offsets, int64_t inner, int64_t lhs_step,
         int64_t rhs_step, int num_threads) {
        const Op operation = parse_op(op);
        const Reduce reduction = parse_reduce(reduce);
        const SpmmArguments<T> arguments{
            Edges(csc_of<I>(indptr, indices.data(), eids, indices.shape(0))), rows_of<T>(lhs),
            rows_of<T>(rhs), loop_of(lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step),
            out.data()};
        const bool sums = reduction != Reduce::kMax && reduction != Reduce::kMin;
        require(sums || arg, "max and min need arg");
        require(operation != Op::kDot, "sums and extrema are not of dot products");
        require(lhs || operation == Op::kCopyRhs, "this operator needs lhs");
        require(rhs || operation == Op::kCopyLhs, "this operator needs rhs");
        require_apart({out, arg}, {indptr, indices, eids, lhs_offsets, rhs_offsets});
        require(!lhs || static_cast<int64_t>(lhs->shape(0)) == num_src,
                "lhs must have one row per source");
        require(!rhs || rhs->shape(0) == indices.shape(0), "rhs must have one row per edge");
        const RowLoop& loop = arguments.loop;
        const int64_t width = loop.outer * inner;
        require(static_cast<int64_t>(out.shape(1)) == width, "out must have outer * inner columns");
        require(out.shape(0) + 1 == indptr.shape(0), "out must have one row per destination");
        require(!arg || (arg->shape(0) == out.shape(0) && arg->shape(1) == out.shape(1)),
                "arg must have the shape of out");
        if (operation == Op::kCopyLhs || operation == Op::kCopyRhs) {
          require((operation == Op::kCopyLhs ? arguments.lhs : arguments.rhs).width == width,
                  "out must have the columns of what is copied");
        } else {
          require_row(loop, loop.lhs_offsets, lhs_step, arguments.lhs.width);
          require_row(loop, loop.rhs_offsets, rhs_step, arguments.rhs.width);
        }
        const nb::gil_scoped_release release;
        if (sums) {
          spmm_sum(arguments, operation, sum_result(reduction), num_threads);
        } else {
          spmm_best(arguments, WritableIds(arg->data()), operation, reduction == Reduce::kMin,
                    num_threads);
        }
      },
      "out"_a.noconvert(), "indptr"_a.noconvert(), "indices"_a.noconvert(),
      "eids"_a.noconvert().none(), "num_src"_a, "lhs"_a.noconvert().none(),
      "rhs"_a.noconvert().none(), "arg"_a.noconvert().none(), "op"_a, "reduce"_a,
      "lhs_offsets"_a.noconvert(), "rhs_offsets"_a.noconvert(), "inner"_a, "lhs_step"_a,
      "rhs_step"_a, "num_threads"_a);
}

template <typename T>
void run_sddmm(SddmmArguments<T> arguments, const Matrix<T>& out, const Matrix<const T>& lhs,
               const Matrix<const T>& rhs, std::string_view lhs_target, std::string_view rhs_target,
               std::string_view op, const RowLoop& loop, int num_threads) {
  const Op operation = parse_op(op);
  const bool is_dot = operation == Op::kDot;
  require(operation != Op::kCopyLhs && operation != Op::kCopyRhs, "copies are not computed");
  arguments.num_edges = static_cast<int64_t>(out.shape(0));
  arguments.lhs = {lhs.data(), static_cast<int64_t>(lhs.shape(1))};
  arguments.rhs = {rhs.data(), static_cast<int64_t>(rhs.shape(1))};
  arguments.lhs_target = parse_target(lhs_target);
  arguments.rhs_target = parse_target(rhs_target);
  arguments.loop = loop;
  arguments.out = out.data();
  const int64_t width = is_dot ? loop.outer : loop.outer * loop.inner;
  require(static_cast<int64_t>(out.shape(1)) == width, "out must have one column per result");
  require(is_dot ? loop.lhs_step == 1 && loop.rhs_step == 1 : true,
          "both operands of a dot product advance");
  require_row(loop, loop.lhs_offsets, loop.lhs_step, arguments.lhs.width);
  require_row(loop, loop.rhs_offsets, loop.rhs_step, arguments.rhs.width);
  const auto require_rows = [&](Target target, const Matrix<const T>& operand) {
    const int64_t rows = target == Target::kSrc   ? arguments.num_src
                         : target == Target::kDst ? arguments.num_rows
                                                  : arguments.num_edges;
    require(static_cast<int64_t>(operand.shape(0)) == rows,
            "operands must have one row per source, destination or edge");
  };
  require_rows(arguments.lhs_target, lhs);
  require_rows(arguments.rhs_target, rhs);
  const nb::gil_scoped_release release;
  sddmm(arguments, operation, num_threads);
}

template <typename T, typename I>
void bind_sddmm(nb::module_& m) {
  m.def(
      "sddmm_csc",
      [](const Matrix<T>& out, const Vector<const I>& indptr, const Vector<const I>& indices,
         const MaybeVector<I>& eids, int64_t num_src, const Matrix<const T>& lhs,
         const Matrix<const T>& rhs, std::string_view lhs_target, std::string_view rhs_target,
         std::string_view op, const Vector<const int64_t>& lhs_offsets,
         const Vector<const int64_t>& rhs_offsets, int64_t inner, int64_t lhs_step,
         int64_t rhs_step, int num_threads) {
        require_apart({out}, {indptr, indices, eids, lhs_offsets, rhs_offsets});
        require(indices.shape(0) == out.shape(0), "out must have one row per edge");
        const Csc<I> csc = csc_of<I>(indptr, indices.data(), eids, indices.shape(0));
        SddmmArguments<T> arguments{};
        arguments.indptr = Ids(csc.indptr);
        arguments.eids = Ids(csc.eids);
        arguments.src = Ids(csc.indices);
        arguments.num_rows = csc.num_rows;
        arguments.num_src = num_src;
        run_sddmm(arguments, out, lhs, rhs, lhs_target, rhs_target, op,
                  loop_of(lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step), num_threads);
      },
      "out"_a.noconvert(), "indptr"_a.noconvert(), "indices"_a.noconvert(),
      "eids"_a.noconvert().none(), "num_src"_a, "lhs"_a.noconvert(), "rhs"_a.noconvert(),
      "lhs_target"_a, "rhs_target"_a, "op"_a, "lhs_offsets"_a.noconvert(),
      "rhs_offsets"_a.noconvert(), "inner"_a, "lhs_step"_a, "rhs_step"_a, "num_threads"_a);
  m.def(
      "sddmm_coo",
      [](const Matrix<T>& out, const Vector<const I>& src, const Vector<const I>& dst,
         int64_t num_src, int64_t num_dst, const Matrix<const T>& lhs, const Matrix<const T>& rhs,
         std::string_view lhs_target, std::string_view rhs_target, std::string_view op,
         const Vector<const int64_t>& lhs_offsets, const Vector<const int64_t>& rhs_offsets,
         int64_t inner, int64_t lhs_step, int64_t rhs_step, int num_threads) {
        require_apart({out}, {src, dst, lhs_offsets, rhs_offsets});
        require(src.shape(0) == out.shape(0) && dst.shape(0) == out.shape(0),
                "out must have one row per edge");
        SddmmArguments<T> arguments{};
        arguments.src = Ids(src.data());
        arguments.dst = Ids(dst.data());
        arguments.num_rows = num_dst;
        arguments.num_src = num_src;
        run_sddmm(arguments, out, lhs, rhs, lhs_target, rhs_target, op,
                  loop_of(lhs_offsets, rhs_offsets, inner, lhs_step, rhs_step), num_threads);
      },
      "out"_a.noconvert(), "src"_a.noconvert(), "dst"_a.noconvert(), "num_src"_a, "num_dst"_a,
      "lhs"_a.noconvert(), "rhs"_a.noconvert(), "lhs_target"_a, "rhs_target"_a, "op"_a,
      "lhs_offsets"_a.noconvert(), "rhs_offsets"_a.noconvert(), "inner"_a, "lhs_step"_a,
      "rhs_step"_a, "num_threads"_a);
}

template <typename T, typename I>
void bind_edge_softmax(nb::module_& m) {
  m.def(
      "edge_softmax",
      [](const Matrix<T>& out, const Vector<const I>& indptr, const MaybeVector<I>& eids,
         const Matrix<const T>& logits, int num_threads) {
        require(logits.shape(0) == out.shape(0) && logits.shape(1) == out.shape(1),
                "out must have the shape of logits");
        require_apart({out}, {indptr, eids});
        const Csc<I> csc = csc_of<I>(indptr, nullptr, eids, out.shape(0));
        const nb::gil_scoped_release release;
        edge_softmax(csc, logits.data(), static_cast<int64_t>(out.shape(1)), out.data(),
                     num_threads);
      },
      "out"_a.noconvert(), "indptr"_a.noconvert(), "eids"_a.noconvert().none(),
      "logits"_a.noconvert(), "num_threads"_a);
  m.def(
      "edge_softmax_backward",
      [](const Matrix<T>& result, const Vector<const I>& indptr, const MaybeVector<I>& eids,
         const Matrix<const T>& out, const Matrix<const T>& grad, int num_threads) {
        require(out.shape(0) == result.shape(0) && out.shape(1) == result.shape(1) &&
                    grad.shape(0) == result.shape(0) && grad.shape(1) == result.shape(1),
                "result, out and grad must have one shape");
        require_apart({result}, {indptr, eids});
        const Csc<I> csc = csc_of<I>(indptr, nullptr, eids, out.shape(0));
        const nb::gil_scoped_release release;
        edge_softmax_backward(csc, out.data(), grad.data(), static_cast<int64_t>(out.shape(1)),
                              result.data(), num_threads);
      },
      "result"_a.noconvert(), "indptr"_a.noconvert(), "eids"_a.noconvert().none(),
      "out"_a.noconvert(), "grad"_a.noconvert(), "num_threads"_a);
}

void require_places(const Vector<const int64_t>& places, size_t width) {
  for (size_t j = 0; j < places.shape(0); ++j) {
    require(static_cast<uint64_t>(places.data()[j]) < width,
            "places must be columns of the operand");
  }
}

template <typename T, typename I>
void bind_winners_backward(nb::module_& m) {
  using V = wide_t<T>;
  m.def(
      "winners_backward",
      [](const Matrix<const T>& grad, const Matrix<const I>& arg, const Vector<const I>& src,
         size_t num_src, const MaybeMatrix<T>& lhs, const MaybeMatrix<T>& rhs,
         const Vector<const int64_t>& lhs_places, const Vector<const int64_t>& rhs_places,
         std::string_view op, const std::optional<Matrix<V>>& lhs_grad,
         const std::optional<Matrix<V>>& rhs_grad, int num_threads) {
        const size_t width = grad.shape(1);
        require(arg.shape(0) == grad.shape(0) && arg.shape(1) == width,
                "arg must have the shape of grad");
        require(lhs_places.shape(0) == width && rhs_places.shape(0) == width,
                "places must have one entry per column");
        require(!lhs_grad || lhs_grad->shape(1) == width, "lhs_grad must have grad's columns");
        for (const size_t rows :
             {lhs ? lhs->shape(0) : num_src, lhs_grad ? lhs_grad->shape(0) : num_src}) {
          require(rows == num_src, "lhs and lhs_grad must have one row per source");
        }
        for (const size_t rows :
             {rhs ? rhs->shape(0) : src.shape(0), rhs_grad ? rhs_grad->shape(0) : src.shape(0)}) {
          require(rows == src.shape(0), "rhs and rhs_grad must have one row per edge");
        }
        require_apart({lhs_grad, rhs_grad}, {arg, src, lhs_places, rhs_places});
        if (lhs) require_places(lhs_places, lhs->shape(1));
        if (rhs) require_places(rhs_places, rhs->shape(1));
        if (rhs_grad) require_places(rhs_places, rhs_grad->shape(1));
        const Op operation = parse_op(op);
        const WinnersArguments<T, I> arguments{arg.data(),
                                               grad.data(),
                                               static_cast<int64_t>(grad.shape(0)),
                                               static_cast<int64_t>(width),
                                               src.data(),
                                               src.shape(0),
                                               rows_of<T>(lhs),
                                               rows_of<T>(rhs),
                                               lhs_places.data(),
                                               rhs_places.data()};
        const nb::gil_scoped_release release;
        winners_backward(arguments, operation, lhs_grad ? lhs_grad->data() : nullptr,
                         rhs_grad ? rhs_grad->data() : nullptr,
                         rhs_grad ? static_cast<int64_t>(rhs_grad->shape(1)) : 0, num_threads);
      },
      "grad"_a.noconvert(), "arg"_a.noconvert(), "src"_a.noconvert(), "num_src"_a,
      "lhs"_a.noconvert().none(), "rhs"_a.noconvert().none(), "lhs_places"_a.noconvert(),
      "rhs_places"_a.noconvert(), "op"_a, "lhs_grad"_a.noconvert().none(),
      "rhs_grad"_a.noconvert().none(), "num_threads"_a);
}

template <typename T, typename I, typename E>
void bind_merge_best(nb::module_& m) {
  m.def(
      "merge_best",
      [](const Vector<T>& best, const Vector<E>& edge, const Vector<const T>& value,
         const Vector<const I>& arg, const std::optional<Vector<const E>>& ids, int64_t none,
         bool smallest, int num_threads) {
        const size_t size = best.shape(0);
        require(edge.shape(0) == size && value.shape(0) == size && arg.shape(0) == size,
                "best, edge, value and arg must have one length");
        require_apart({best, edge}, {arg, ids});
        const Candidates<T, I, E> candidates{value.data(), arg.data(), ids ? ids->data() : nullptr,
                                             ids ? ids->shape(0) : 0};
        const nb::gil_scoped_release release;
        merge_best(candidates, static_cast<int64_t>(size), smallest, none, best.data(), edge.data(),
                   num_threads);
      },
      "best"_a.noconvert(), "edge"_a.noconvert(), "value"_a.noconvert(), "arg"_a.noconvert(),
      "ids"_a.noconvert().none(), "none"_a, "smallest"_a, "num_threads"_a);
}

template <typename I>
void bind_group_by_key(nb::module_& m) {
  m.def(
      "group_by_key",
      [](const Vector<const I>& keys, const Vector<const I>& others, const Vector<I>& indptr,
         const Vector<I>& grouped, const std::optional<Vector<I>>& positions, int num_threads) {
        const size_t size = keys.shape(0);
        require(others.shape(0) == size && grouped.shape(0) == size &&
                    (!positions || positions->shape(0) == size),
                "keys, others, grouped and positions must have one length");
        require_apart({indptr, grouped, positions}, {keys, others});
        require(indptr.shape(0) > 0, "indptr must not be empty");
        require(size <= static_cast<size_t>(std::numeric_limits<I>::max()),
                "there must be no more edges than the type of ids can tell apart");
        const nb::gil_scoped_release release;
        group_by_key(keys.data(), others.data(), static_cast<int64_t>(size),
                     static_cast<int64_t>(indptr.shape(0)) - 1, indptr.data(), grouped.data(),
                     positions ? positions->data() : nullptr, num_threads);
      },
      "keys"_a.noconvert(), "others"_a.noconvert(), "indptr"_a.noconvert(), "grouped"_a.noconvert(),
      "positions"_a.noconvert().none(), "num_threads"_a);
}

template <typename T>
void bind_value_type(nb::module_& m) {
  bind_spmm<T, int32_t>(m);
  bind_spmm<T, int64_t>(m);
  bind_sddmm<T, int32_t>(m);
  bind_sddmm<T, int64_t>(m);
  bind_edge_softmax<T, int32_t>(m);
  bind_edge_softmax<T, int64_t>(m);
  bind_winners_backward<T, int32_t>(m);
  bind_merge_best<T, int32_t, int32_t>(m);
  bind_merge_best<T, int32_t, int64_t>(m);
  bind_merge_best<T, int64_t, int32_t>(m);
  bind_merge_best<T, int64_t, int64_t>(m);
  bind_winners_backward<T, int64_t>(m);
}

}  // namespace

bool is_negated(nb::handle source) noexcept {
  PyObject* const found = PyObject_CallMethod(source.ptr(), "is_neg", nullptr);
  if (found == nullptr) PyErr_Clear();  // no tensor
  Py_XDECREF(found);
  return found == Py_True;
}

nb::object plain_copy(nb::handle source) noexcept {
  PyObject* found = PyObject_CallMethod(source.ptr(), "resolve_neg", nullptr);
  if (found == source.ptr()) {  // nothing was put off
    Py_DECREF(found);
    found = PyObject_CallMethod(source.ptr(), "clone", nullptr);
  }
  if (found == nullptr) PyErr_Clear();
  return nb::steal(found);
}

NB_MODULE(_kernels, m) {
  m.doc() = "Sparse kernels over borrowed CPU arrays; called by graphshard.ops alone.";
  m.attr("interface") = kInterface;
  bind_value_type<float>(m);
  bind_value_type<double>(m);
  bind_value_type<bfloat16>(m);
  bind_group_by_key<int32_t>(m);
  bind_group_by_key<int64_t>(m);
  bind_memory(m);
  bind_attention(m);
  bind_sampling(m);
}

}  // namespace graphshard
