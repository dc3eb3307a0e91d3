// SPDX-License-Identifier: Apache-2.0
// Attention for Python: an object that borrows the operands, and has a method for each walk.

#include "attention/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>

#include "attention/finish.h"
#include "attention/head_products.h"
#include "bindings/arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

template <typename T>
using Output = std::optional<Matrix<T>>;

template <typename T>
auto pointer(const std::optional<T>& array) {
  return array ? array->data() : nullptr;
}

template <typename T>
struct Operands {
  using V = wide_t<T>;
  Matrix<const T> values;
  MaybeMatrix<T> src, dst, edge;
  MaybeMatrix<V> src_terms, dst_terms, edge_terms, factor;
  MaybeVector<V> vector;
  MaybeVector<int32_t> keys;
  Attention<T> attention;
};

Score parse_score(std::string_view name) {
  if (name == "additive") return Score::kAdditive;
  if (name == "joint") return Score::kJoint;
  if (name == "dot") return Score::kDot;
  throw std::invalid_argument("unknown score: " + std::string(name));
}

template <typename A>
void require_shape(const std::optional<A>& array, int64_t rows, int64_t columns, const char* rule) {
  if (!array) return;
  require(static_cast<int64_t>(array->shape(0)) == rows &&
              static_cast<int64_t>(array->shape(1)) == columns,
          rule);
}

// More would make the numbers of some edges at a time too many.
constexpr int64_t kMostHeads = 65536;
constexpr int64_t kMostColumns = int64_t{1} << 31;

template <typename T>
void check(const Operands<T>& o, int64_t num_edges) {
  const Attention<T>& a = o.attention;
  const int64_t score_width = a.heads * a.score_dim;
  require(static_cast<int64_t>(o.values.shape(1)) == a.heads * a.dim,
          "values must have heads * dim columns");
  if (a.score == Score::kAdditive) {
    require(o.src_terms && o.dst_terms, "additive scores need src_terms and dst_terms");
  } else {
    require(o.src && o.dst, "joint and dot scores need src and dst");
    require(a.score != Score::kJoint ||
                (o.vector && static_cast<int64_t>(o.vector->shape(0)) == score_width),
            "joint scores need a vector of heads * score_dim");
    require(a.score != Score::kJoint || a.score_dim == a.dim, "joint scores read the values");
  }
  require_shape(o.src, a.num_src, score_width, "src must be [num_src, heads * score_dim]");
  require_shape(o.dst, a.num_dst, score_width, "dst must be [num_dst, heads * score_dim]");
  require_shape(o.edge, num_edges, score_width, "edge must be [num_edges, heads * score_dim]");
  require_shape(o.src_terms, a.num_src, a.heads, "src_terms must be [num_src, heads]");
  require_shape(o.dst_terms, a.num_dst, a.heads, "dst_terms must be [num_dst, heads]");
  require_shape(o.edge_terms, num_edges, a.heads, "edge_terms must be [num_edges, heads]");
  require_shape(o.factor, num_edges, a.factor_width, "factor must have a row per edge");
  require(a.factor_width == 0 || a.factor_width == 1 || a.factor_width == a.heads,
          "factor must have one column or one per head");
  require(!o.keys || static_cast<int64_t>(o.keys->shape(0)) == num_edges,
          "keys must have one entry per edge");
}

template <typename I>
EdgeGroups groups_of(const Vector<const I>& indptr, const Vector<const I>& indices,
                     const MaybeVector<I>& eids, int64_t num_rows) {
  require(static_cast<int64_t>(indptr.shape(0)) == num_rows + 1,
          "indptr must have one entry more than there are rows");
  require_pointers<I>(indptr, indices.shape(0));
  require(!eids || eids->shape(0) == indices.shape(0), "eids must have num_edges entries");
  return {Ids(indptr.data()), Ids(indices.data()), eids ? Ids(eids->data()) : Ids(), num_rows,
          static_cast<int64_t>(indices.shape(0))};
}

// Rows that may lie apart.
template <typename V>
using Steps = Array<V, nb::ndim<2>, nb::device::cpu>;

template <typename V>
bool has_rows(const Steps<V>& array) {
  return array.shape(1) <= 1 || array.stride(1) == 1;
}

template <typename T>
AttentionGradient<T> gradient_of(const Attention<T>& a, const Matrix<const wide_t<T>>& peak,
                                 const Matrix<const wide_t<T>>& total,
                                 const Matrix<const wide_t<T>>& delta, const Steps<const T>& grad) {
  const auto has_shape = [&](const auto& array, int64_t columns) {
    return static_cast<int64_t>(array.shape(0)) == a.num_dst &&
           static_cast<int64_t>(array.shape(1)) == columns;
  };
  require(has_shape(peak, a.heads) && has_shape(total, a.heads) && has_shape(delta, a.heads),
          "peak, total and delta must be [num_dst, heads]");
  require(has_shape(grad, a.heads * a.dim) && has_rows(grad),
          "grad must be [num_dst, heads * dim], the numbers of a row side by side");
  return {peak.data(), total.data(), delta.data(), grad.data(), grad.stride(0)};
}

template <typename T, typename I>
void bind_walks(nb::class_<Operands<T>>& c) {
  using V = wide_t<T>;
  c.def(
      "forward",
      [](const Operands<T>& o, const Vector<const I>& indptr, const Vector<const I>& indices,
         const MaybeVector<I>& eids, const Steps<V>& peak, const Steps<V>& total,
         const std::optional<Steps<V>>& sum, const Output<T>& out, bool begin, int num_threads) {
        const Attention<T>& a = o.attention;
        const EdgeGroups edges = groups_of<I>(indptr, indices, eids, a.num_dst);
        check(o, edges.num_edges);
        require(sum.has_value() != out.has_value() && (begin || sum),
                "pass sum, or out of a state that begins here");
        require_shape(std::optional(peak), a.num_dst, a.heads, "peak must be [num_dst, heads]");
        require_shape(std::optional(total), a.num_dst, a.heads, "total must be [num_dst, heads]");
        require_shape(sum, a.num_dst, a.heads * a.dim, "sum must be [num_dst, heads * dim]");
        require_shape(out, a.num_dst, a.heads * a.dim, "out must be [num_dst, heads * dim]");
        require_apart({peak, total, sum, out}, {indptr, indices, eids, o.keys});
        require(has_rows(peak) && has_rows(total) && (!sum || has_rows(*sum)),
                "the numbers of a state's row must be side by side");
        const AttentionState<T> state{
            peak.data(),    total.data(),    sum ? sum->data() : nullptr, pointer(out), begin,
            peak.stride(0), total.stride(0), sum ? sum->stride(0) : 0};
        const nb::gil_scoped_release release;
        attention_forward(a, edges, state, num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "eids"_a.noconvert().none(),
      "peak"_a.noconvert(), "total"_a.noconvert(), "sum"_a.noconvert().none(),
      "out"_a.noconvert().none(), "begin"_a, "num_threads"_a);
  c.def(
      "sources",
      [](const Operands<T>& o, const Vector<const I>& indptr, const Vector<const I>& indices,
         const MaybeVector<I>& eids, const Matrix<const V>& peak, const Matrix<const V>& total,
         const Matrix<const V>& delta, const Steps<const T>& grad, const Output<T>& values,
         const Output<T>& src, const Output<V>& src_terms, const Output<V>& dst_terms,
         const Output<V>& edge_terms, const Output<V>& factor, int num_threads) {
        const Attention<T>& a = o.attention;
        const EdgeGroups edges = groups_of<I>(indptr, indices, eids, a.num_src);
        check(o, edges.num_edges);
        const AttentionGradient<T> gradient = gradient_of(a, peak, total, delta, grad);
        require((!edge_terms || o.edge_terms) && (!factor || o.factor),
                "what has a gradient must be there");
        require_shape(values, a.num_src, a.heads * a.dim, "the gradient of values has its shape");
        require_shape(src, a.num_src, a.heads * a.score_dim, "the gradient of src has its shape");
        require_shape(src_terms, a.num_src, a.heads, "the gradient of src_terms has its shape");
        require_shape(dst_terms, a.num_dst, a.heads, "the gradient of dst_terms has its shape");
        require_shape(edge_terms, edges.num_edges, a.heads,
                      "the gradient of edge_terms has its shape");
        require_shape(factor, edges.num_edges, a.factor_width,
                      "the gradient of factor has its shape");
        require_apart({values, src, src_terms, dst_terms, edge_terms, factor},
                      {indptr, indices, eids, o.keys});
        const SourceGradients<T> result{pointer(values),    pointer(src),        pointer(src_terms),
                                        pointer(dst_terms), pointer(edge_terms), pointer(factor)};
        const nb::gil_scoped_release release;
        attention_sources(a, edges, gradient, result, num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "eids"_a.noconvert().none(),
      "peak"_a.noconvert(), "total"_a.noconvert(), "delta"_a.noconvert(), "grad"_a.noconvert(),
      "values"_a.noconvert().none(), "src"_a.noconvert().none(), "src_terms"_a.noconvert().none(),
      "dst_terms"_a.noconvert().none(), "edge_terms"_a.noconvert().none(),
      "factor"_a.noconvert().none(), "num_threads"_a);
  c.def(
      "destinations",
      [](const Operands<T>& o, const Vector<const I>& indptr, const Vector<const I>& indices,
         const MaybeVector<I>& eids, const Matrix<const V>& peak, const Matrix<const V>& total,
         const Matrix<const V>& delta, const Steps<const T>& grad, const Output<V>& dst,
         const Output<V>& vector, const Output<T>& edge, const Output<V>& edge_terms,
         const Output<V>& factor, int num_threads) {
        const Attention<T>& a = o.attention;
        const EdgeGroups edges = groups_of<I>(indptr, indices, eids, a.num_dst);
        check(o, edges.num_edges);
        require(a.score != Score::kAdditive, "additive scores have no walk over in-edges");
        const AttentionGradient<T> gradient = gradient_of(a, peak, total, delta, grad);
        const int64_t score_width = a.heads * a.score_dim;
        require((!edge_terms || o.edge_terms) && (!factor || o.factor) && (!edge || o.edge) &&
                    (!vector || o.vector),
                "what has a gradient must be there");
        require_shape(dst, a.num_dst, score_width, "the gradient of dst has its shape");
        require_shape(vector, 1, score_width, "the gradient of vector has its shape");
        require_shape(edge, edges.num_edges, score_width, "the gradient of edge has its shape");
        require_shape(edge_terms, edges.num_edges, a.heads,
                      "the gradient of edge_terms has its shape");
        require_shape(factor, edges.num_edges, a.factor_width,
                      "the gradient of factor has its shape");
        require_apart({dst, vector, edge, edge_terms, factor}, {indptr, indices, eids, o.keys});
        const DestinationGradients<T> result{pointer(dst), pointer(vector), pointer(edge),
                                             pointer(edge_terms), pointer(factor)};
        const nb::gil_scoped_release release;
        attention_destinations(a, edges, gradient, result, num_threads);
      },
      "indptr"_a.noconvert(), "indices"_a.noconvert(), "eids"_a.noconvert().none(),
      "peak"_a.noconvert(), "total"_a.noconvert(), "delta"_a.noconvert(), "grad"_a.noconvert(),
      "dst"_a.noconvert().none(), "vector"_a.noconvert().none(), "edge"_a.noconvert().none(),
      "edge_terms"_a.noconvert().none(), "factor"_a.noconvert().none(), "num_threads"_a);
}

template <typename T>
void bind_operands(nb::module_& m, const char* name) {
  using V = wide_t<T>;
  nb::class_<Operands<T>> c(m, name);
  bind_walks<T, int32_t>(c);
  bind_walks<T, int64_t>(c);
  m.def(
      "attention",
      [](std::string_view score, int64_t num_src, int64_t num_dst, int64_t heads, int64_t dim,
         int64_t score_dim, double slope, double scale, const Matrix<const T>& values,
         const MaybeMatrix<T>& src, const MaybeMatrix<T>& dst, const MaybeMatrix<T>& edge,
         const MaybeMatrix<V>& src_terms, const MaybeMatrix<V>& dst_terms,
         const MaybeMatrix<V>& edge_terms, const MaybeVector<V>& vector,
         const MaybeMatrix<V>& factor, uint64_t threshold, uint32_t edge_seed, uint32_t head_seed,
         double kept, const MaybeVector<int32_t>& keys) {
        require(heads > 0 && heads <= kMostHeads, "there must be 1 to 65536 heads");
        require(dim >= 0 && dim <= kMostColumns && score_dim >= 0 && score_dim <= kMostColumns,
                "a head must have 0 to 2^31 columns");
        require(num_dst >= 0, "num_dst must not be negative");
        require(static_cast<int64_t>(values.shape(0)) == num_src,
                "values must have one row per source");
        require(threshold <= uint64_t{1} << 32, "threshold must be at most 2^32");
        const Attention<T> attention{parse_score(score),
                                     num_src,
                                     num_dst,
                                     heads,
                                     dim,
                                     score_dim,
                                     values.data(),
                                     pointer(src),
                                     pointer(dst),
                                     pointer(edge),
                                     pointer(src_terms),
                                     pointer(dst_terms),
                                     pointer(edge_terms),
                                     pointer(vector),
                                     static_cast<V>(slope),
                                     static_cast<V>(scale),
                                     pointer(factor),
                                     factor ? static_cast<int64_t>(factor->shape(1)) : 0,
                                     {threshold, edge_seed, head_seed, kept, pointer(keys)}};
        return Operands<T>{values,     src,    dst,    edge, src_terms, dst_terms,
                           edge_terms, factor, vector, keys, attention};
      },
      "score"_a, "num_src"_a, "num_dst"_a, "heads"_a, "dim"_a, "score_dim"_a, "slope"_a, "scale"_a,
      "values"_a.noconvert(), "src"_a.noconvert().none(), "dst"_a.noconvert().none(),
      "edge"_a.noconvert().none(), "src_terms"_a.noconvert().none(),
      "dst_terms"_a.noconvert().none(), "edge_terms"_a.noconvert().none(),
      "vector"_a.noconvert().none(), "factor"_a.noconvert().none(), "threshold"_a, "edge_seed"_a,
      "head_seed"_a, "kept"_a, "keys"_a.noconvert().none());
}

template <typename T>
AttentionFinish<T> finish_of(const Matrix<T>& out, int64_t heads,
                             const MaybeVector<wide_t<T>>& bias, bool relu) {
  const int64_t width = static_cast<int64_t>(out.shape(1));
  require(heads > 0 && width % heads == 0, "out must be [num_rows, heads * dim]");
  require(!bias || static_cast<int64_t>(bias->shape(0)) == width,
          "bias must have an entry for each column");
  return {static_cast<int64_t>(out.shape(0)), heads, width / heads, nullptr, pointer(bias), relu};
}

template <typename T>
void bind_finish(nb::module_& m) {
  using V = wide_t<T>;
  m.def(
      "attention_finish",
      [](const Matrix<T>& out, int64_t heads, const MaybeMatrix<V>& sums,
         const MaybeMatrix<V>& total, const MaybeVector<V>& bias, bool relu, int num_threads) {
        AttentionFinish<T> finish = finish_of<T>(out, heads, bias, relu);
        require_shape(sums, finish.num_rows, heads * finish.dim, "sums must be as out is");
        require_shape(total, finish.num_rows, heads, "total must be [num_rows, heads]");
        finish.total = pointer(total);
        const nb::gil_scoped_release release;
        if (sums) {
          attention_finish(finish, sums->data(), out.data(), num_threads);
        } else {
          attention_finish_again(finish, out.data(), num_threads);
        }
      },
      "out"_a.noconvert(), "heads"_a, "sums"_a.noconvert().none(), "total"_a.noconvert().none(),
      "bias"_a.noconvert().none(), "relu"_a, "num_threads"_a);
  m.def(
      "attention_delta",
      [](const Matrix<V>& delta, const Matrix<const T>& grad, const Matrix<T>& out,
         const MaybeVector<V>& bias, const Output<T>& passed, int num_threads) {
        const int64_t heads = static_cast<int64_t>(delta.shape(1));
        const AttentionFinish<T> finish = finish_of<T>(out, heads, bias, passed.has_value());
        const int64_t width = heads * finish.dim;
        require_shape(std::optional(delta), finish.num_rows, heads,
                      "delta must be [num_rows, heads]");
        require_shape(std::optional(grad), finish.num_rows, width, "grad must be as out is");
        require_shape(passed, finish.num_rows, width, "passed must be as out is");
        const nb::gil_scoped_release release;
        attention_delta(finish, grad.data(), out.data(), pointer(passed), delta.data(),
                        num_threads);
      },
      "delta"_a.noconvert(), "grad"_a.noconvert(), "out"_a.noconvert(), "bias"_a.noconvert().none(),
      "passed"_a.noconvert().none(), "num_threads"_a);
}

template <typename T>
HeadProducts<T> products_of(const Matrix<const T>& rows, const Matrix<const wide_t<T>>& vectors,
                            int64_t heads) {
  require(heads > 0 && rows.shape(1) % heads == 0 && vectors.shape(0) == 2 &&
              vectors.shape(1) == rows.shape(1),
          "vectors must be [2, heads * dim], as rows have columns");
  return {rows.data(), static_cast<int64_t>(rows.shape(0)), heads,
          static_cast<int64_t>(rows.shape(1)) / heads, vectors.data()};
}

template <typename T>
void bind_head_products(nb::module_& m) {
  using V = wide_t<T>;
  m.def(
      "head_products",
      [](const Matrix<const T>& rows, const Matrix<const V>& vectors, const Matrix<V>& first,
         const Matrix<V>& second, int num_threads) {
        const int64_t heads = static_cast<int64_t>(first.shape(1));
        const HeadProducts<T> input = products_of<T>(rows, vectors, heads);
        for (const auto* product : {&first, &second}) {
          require_shape(std::optional(*product), input.num_rows, heads,
                        "products must be [num_rows, heads]");
        }
        const nb::gil_scoped_release release;
        head_products(input, first.data(), second.data(), num_threads);
      },
      "rows"_a.noconvert(), "vectors"_a.noconvert(), "first"_a.noconvert(), "second"_a.noconvert(),
      "num_threads"_a);
  m.def(
      "head_products_backward",
      [](const Matrix<const T>& rows, const Matrix<const V>& vectors, const MaybeMatrix<T>& passed,
         const Matrix<const V>& first_grad, const Matrix<const V>& second_grad,
         const Matrix<T>& rows_grad, const Matrix<V>& vectors_grad, int num_threads) {
        const int64_t heads = static_cast<int64_t>(first_grad.shape(1));
        const HeadProducts<T> input = products_of<T>(rows, vectors, heads);
        const int64_t width = input.heads * input.dim;
        for (const auto* grad : {&first_grad, &second_grad}) {
          require_shape(std::optional(*grad), input.num_rows, heads,
                        "gradients of products must be [num_rows, heads]");
        }
        require_shape(passed, input.num_rows, width, "passed must have the shape of rows");
        require_shape(std::optional(rows_grad), input.num_rows, width,
                      "rows_grad must have the shape of rows");
        require_shape(std::optional(vectors_grad), 2, width,
                      "vectors_grad must have the shape of vectors");
        const nb::gil_scoped_release release;
        head_products_backward(input, pointer(passed), first_grad.data(), second_grad.data(),
                               rows_grad.data(), vectors_grad.data(), num_threads);
      },
      "rows"_a.noconvert(), "vectors"_a.noconvert(), "passed"_a.noconvert().none(),
      "first_grad"_a.noconvert(), "second_grad"_a.noconvert(), "rows_grad"_a.noconvert(),
      "vectors_grad"_a.noconvert(), "num_threads"_a);
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_operands<float>(m, "AttentionFloat32");
  bind_operands<double>(m, "AttentionFloat64");
  bind_operands<bfloat16>(m, "AttentionBFloat16");
  bind_finish<float>(m);
  bind_finish<double>(m);
  bind_finish<bfloat16>(m);
  bind_head_products<float>(m);
  bind_head_products<double>(m);
  bind_head_products<bfloat16>(m);
}

}  // namespace graphshard
