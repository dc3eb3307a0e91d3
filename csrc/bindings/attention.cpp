// SPDX-License-Identifier: Apache-2.0
// Attention for Python: an object that borrows the operands, and has a method for each walk.

#include "attention/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>

#include "attention/node_steps.h"
#include "bindings/arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace graphshard {
namespace {

using MaybeIn = std::optional<InMatrix>;
using MaybeOut = std::optional<OutMatrix>;

// The operands, and numbers of which kernels get those that they compute with.
struct Operands {
  InMatrix values;
  MaybeIn src, dst, edge;
  MaybeIn src_terms, dst_terms, edge_terms, factor;
  std::optional<InVector> vector, keys;
  Score score;
  int64_t num_src, num_dst, heads, dim, score_dim;
  double slope, scale;
  EdgeMask mask;

  int64_t width() const { return heads * dim; }
  int64_t score_width() const { return heads * score_dim; }
  int64_t factor_width() const { return factor ? columns_in(*factor) : 0; }

  template <typename T>
  Attention<T> as() const {
    using V = wide_t<T>;
    return {
        {score, num_src, num_dst, heads, dim, score_dim, data_of<V>(src_terms),
         data_of<V>(dst_terms), data_of<V>(edge_terms), data_of<V>(vector), static_cast<V>(slope),
         static_cast<V>(scale), data_of<V>(factor), factor_width(), mask},
        data_of<T>(values),
        data_of<T>(src),
        data_of<T>(dst),
        data_of<T>(edge)};
  }
};

Score parse_score(std::string_view name) {
  if (name == "additive") return Score::kAdditive;
  if (name == "joint") return Score::kJoint;
  if (name == "dot") return Score::kDot;
  throw std::invalid_argument("unknown score: " + std::string(name));
}

template <typename A>
void require_shape(const A& array, int64_t rows, int64_t columns, const char* rule) {
  require(rows_in(array) == rows && columns_in(array) == columns, rule);
}
template <typename A>
void require_shape(const std::optional<A>& array, int64_t rows, int64_t columns, const char* rule) {
  if (array) require_shape(*array, rows, columns, rule);
}

// More would make the entries of a chunk of edges too many.
constexpr int64_t kMostHeads = 65536;
constexpr int64_t kMostColumns = int64_t{1} << 31;

void check(const Operands& o, int64_t num_edges) {
  require(columns_in(o.values) == o.width(), "values must have heads * dim columns");
  if (o.score == Score::kAdditive) {
    require(o.src_terms && o.dst_terms, "additive scores need src_terms and dst_terms");
  } else {
    require(o.src && o.dst, "joint and dot scores need src and dst");
    require(o.score != Score::kJoint || (o.vector && rows_in(*o.vector) == o.score_width()),
            "joint scores need a vector of heads * score_dim");
    require(o.score != Score::kJoint || o.score_dim == o.dim, "joint scores read the values");
  }
  require_shape(o.src, o.num_src, o.score_width(), "src must be [num_src, heads * score_dim]");
  require_shape(o.dst, o.num_dst, o.score_width(), "dst must be [num_dst, heads * score_dim]");
  require_shape(o.edge, num_edges, o.score_width(), "edge must be [num_edges, heads * score_dim]");
  require_shape(o.src_terms, o.num_src, o.heads, "src_terms must be [num_src, heads]");
  require_shape(o.dst_terms, o.num_dst, o.heads, "dst_terms must be [num_dst, heads]");
  require_shape(o.edge_terms, num_edges, o.heads, "edge_terms must be [num_edges, heads]");
  require_shape(o.factor, num_edges, o.factor_width(), "factor must have a row per edge");
  require(o.factor_width() == 0 || o.factor_width() == 1 || o.factor_width() == o.heads,
          "factor must have one column or one per head");
  require(!o.keys || rows_in(*o.keys) == num_edges, "keys must have one entry per edge");
}

Csr edges_of(const InVector& indptr, const InVector& indices, const std::optional<InVector>& eids,
             int64_t num_rows) {
  require(rows_in(indptr) == num_rows + 1, "indptr must have one entry more than there are rows");
  return csr_of(indptr, ids_of(indices), eids, indices.shape(0));
}

template <typename A>
bool has_rows(const A& array) {
  return array.shape(1) <= 1 || array.stride(1) == 1;
}

void forward(const Operands& o, const InVector& indptr, const InVector& indices,
             const std::optional<InVector>& eids, const OutRows& peak, const OutRows& total,
             const std::optional<OutRows>& sum, const MaybeOut& out, bool begin, int num_threads) {
  const Csr edges = edges_of(indptr, indices, eids, o.num_dst);
  check(o, edges.num_edges);
  require(sum.has_value() != out.has_value() && (begin || sum),
          "pass sum, or out of a state that begins here");
  require_shape(peak, o.num_dst, o.heads, "peak must be [num_dst, heads]");
  require_shape(total, o.num_dst, o.heads, "total must be [num_dst, heads]");
  require_shape(sum, o.num_dst, o.width(), "sum must be [num_dst, heads * dim]");
  require_shape(out, o.num_dst, o.width(), "out must be [num_dst, heads * dim]");
  require_apart({peak, total, sum, out}, {indptr, indices, eids, o.keys});
  require(has_rows(peak) && has_rows(total) && (!sum || has_rows(*sum)),
          "the numbers of a state's row must be side by side");
  with_value_type(o.values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    const Attention<T> attention = o.as<T>();
    const AttentionState<T> state{
        data_of<V>(peak), data_of<V>(total), data_of<V>(sum),         data_of<T>(out), begin,
        peak.stride(0),   total.stride(0),   sum ? sum->stride(0) : 0};
    const nb::gil_scoped_release release;
    attention_forward(attention, edges, state, num_threads);
  });
}

// What the gradients of both walks are computed from.
struct Given {
  const InMatrix& peak;
  const InMatrix& total;
  const InMatrix& delta;
  const InRows& grad;
};

void check(const Operands& o, const Given& given) {
  for (const InMatrix* array : {&given.peak, &given.total, &given.delta}) {
    require_shape(*array, o.num_dst, o.heads, "peak, total and delta must be [num_dst, heads]");
  }
  require_shape(given.grad, o.num_dst, o.width(), "grad must be [num_dst, heads * dim]");
  require(has_rows(given.grad), "the numbers of a row of grad must be side by side");
}

template <typename T>
AttentionGradient<T> gradient_of(const Given& given) {
  using V = wide_t<T>;
  return {data_of<V>(given.peak), data_of<V>(given.total), data_of<V>(given.delta),
          data_of<T>(given.grad), given.grad.stride(0)};
}

void sources(const Operands& o, const InVector& indptr, const InVector& indices,
             const std::optional<InVector>& eids, const InMatrix& peak, const InMatrix& total,
             const InMatrix& delta, const InRows& grad, const MaybeOut& values, const MaybeOut& src,
             const MaybeOut& src_terms, const MaybeOut& dst_terms, const MaybeOut& edge_terms,
             const MaybeOut& factor, int num_threads) {
  const Csr edges = edges_of(indptr, indices, eids, o.num_src);
  check(o, edges.num_edges);
  const Given given{peak, total, delta, grad};
  check(o, given);
  require((!edge_terms || o.edge_terms) && (!factor || o.factor),
          "what has a gradient must be there");
  require_shape(values, o.num_src, o.width(), "the gradient of values has its shape");
  require_shape(src, o.num_src, o.score_width(), "the gradient of src has its shape");
  require_shape(src_terms, o.num_src, o.heads, "the gradient of src_terms has its shape");
  require_shape(dst_terms, o.num_dst, o.heads, "the gradient of dst_terms has its shape");
  require_shape(edge_terms, edges.num_edges, o.heads, "the gradient of edge_terms has its shape");
  require_shape(factor, edges.num_edges, o.factor_width(), "the gradient of factor has its shape");
  require_apart({values, src, src_terms, dst_terms, edge_terms, factor},
                {indptr, indices, eids, o.keys});
  with_value_type(o.values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    const Attention<T> attention = o.as<T>();
    const AttentionGradient<T> gradient = gradient_of<T>(given);
    const SourceGradients<T> result{data_of<T>(values),     data_of<T>(src),
                                    data_of<V>(src_terms),  data_of<V>(dst_terms),
                                    data_of<V>(edge_terms), data_of<V>(factor)};
    const nb::gil_scoped_release release;
    attention_sources(attention, edges, gradient, result, num_threads);
  });
}

void destinations(const Operands& o, const InVector& indptr, const InVector& indices,
                  const std::optional<InVector>& eids, const InMatrix& peak, const InMatrix& total,
                  const InMatrix& delta, const InRows& grad, const MaybeOut& dst,
                  const MaybeOut& vector, const MaybeOut& edge, const MaybeOut& edge_terms,
                  const MaybeOut& factor, int num_threads) {
  const Csr edges = edges_of(indptr, indices, eids, o.num_dst);
  check(o, edges.num_edges);
  require(o.score != Score::kAdditive, "additive scores have no walk over in-edges");
  const Given given{peak, total, delta, grad};
  check(o, given);
  require((!edge_terms || o.edge_terms) && (!factor || o.factor) && (!edge || o.edge) &&
              (!vector || o.vector),
          "what has a gradient must be there");
  require_shape(dst, o.num_dst, o.score_width(), "the gradient of dst has its shape");
  require_shape(vector, 1, o.score_width(), "the gradient of vector has its shape");
  require_shape(edge, edges.num_edges, o.score_width(), "the gradient of edge has its shape");
  require_shape(edge_terms, edges.num_edges, o.heads, "the gradient of edge_terms has its shape");
  require_shape(factor, edges.num_edges, o.factor_width(), "the gradient of factor has its shape");
  require_apart({dst, vector, edge, edge_terms, factor}, {indptr, indices, eids, o.keys});
  with_value_type(o.values.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    const Attention<T> attention = o.as<T>();
    const AttentionGradient<T> gradient = gradient_of<T>(given);
    const DestinationGradients<T> result{data_of<V>(dst), data_of<V>(vector), data_of<T>(edge),
                                         data_of<V>(edge_terms), data_of<V>(factor)};
    const nb::gil_scoped_release release;
    attention_destinations(attention, edges, gradient, result, num_threads);
  });
}

Operands operands(std::string_view score, int64_t num_src, int64_t num_dst, int64_t heads,
                  int64_t dim, int64_t score_dim, double slope, double scale,
                  const InMatrix& values, const MaybeIn& src, const MaybeIn& dst,
                  const MaybeIn& edge, const MaybeIn& src_terms, const MaybeIn& dst_terms,
                  const MaybeIn& edge_terms, const std::optional<InVector>& vector,
                  const MaybeIn& factor, uint64_t threshold, uint32_t edge_seed, uint32_t head_seed,
                  double kept, const std::optional<InVector>& keys) {
  require(heads > 0 && heads <= kMostHeads, "there must be 1 to 65536 heads");
  require(dim >= 0 && dim <= kMostColumns && score_dim >= 0 && score_dim <= kMostColumns,
          "a head must have 0 to 2^31 columns");
  require(num_dst >= 0, "num_dst must not be negative");
  require(rows_in(values) == num_src, "values must have one row per source");
  require(threshold <= uint64_t{1} << 32, "threshold must be at most 2^32");
  const EdgeMask mask{threshold, edge_seed, head_seed, kept, data_of<int32_t>(keys)};
  Operands found{values,
                 src,
                 dst,
                 edge,
                 src_terms,
                 dst_terms,
                 edge_terms,
                 factor,
                 vector,
                 keys,
                 parse_score(score),
                 num_src,
                 num_dst,
                 heads,
                 dim,
                 score_dim,
                 slope,
                 scale,
                 mask};
  // Refuses arrays of other dtypes here, where they are given.
  with_value_type(values.dtype(), [&](auto zero) { found.as<decltype(zero)>(); });
  return found;
}

void bind_operands(nb::module_& m) {
  nb::class_<Operands> c(m, "AttentionOperands");
  c.def("forward", forward, "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "eids"_a.noconvert().none(), "peak"_a.noconvert(), "total"_a.noconvert(),
        "sum"_a.noconvert().none(), "out"_a.noconvert().none(), "begin"_a, "num_threads"_a);
  c.def("sources", sources, "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "eids"_a.noconvert().none(), "peak"_a.noconvert(), "total"_a.noconvert(),
        "delta"_a.noconvert(), "grad"_a.noconvert(), "values"_a.noconvert().none(),
        "src"_a.noconvert().none(), "src_terms"_a.noconvert().none(),
        "dst_terms"_a.noconvert().none(), "edge_terms"_a.noconvert().none(),
        "factor"_a.noconvert().none(), "num_threads"_a);
  c.def("destinations", destinations, "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "eids"_a.noconvert().none(), "peak"_a.noconvert(), "total"_a.noconvert(),
        "delta"_a.noconvert(), "grad"_a.noconvert(), "dst"_a.noconvert().none(),
        "vector"_a.noconvert().none(), "edge"_a.noconvert().none(),
        "edge_terms"_a.noconvert().none(), "factor"_a.noconvert().none(), "num_threads"_a);
  m.def("attention", operands, "score"_a, "num_src"_a, "num_dst"_a, "heads"_a, "dim"_a,
        "score_dim"_a, "slope"_a, "scale"_a, "values"_a.noconvert(), "src"_a.noconvert().none(),
        "dst"_a.noconvert().none(), "edge"_a.noconvert().none(), "src_terms"_a.noconvert().none(),
        "dst_terms"_a.noconvert().none(), "edge_terms"_a.noconvert().none(),
        "vector"_a.noconvert().none(), "factor"_a.noconvert().none(), "threshold"_a, "edge_seed"_a,
        "head_seed"_a, "kept"_a, "keys"_a.noconvert().none());
}

// Of [num_rows, heads * dim], and of what follows it.
template <typename T>
AttentionFinish<T> finish_of(const OutMatrix& out, int64_t heads,
                             const std::optional<InVector>& bias, bool relu) {
  const int64_t width = columns_in(out);
  require(heads > 0 && width % heads == 0, "out must be [num_rows, heads * dim]");
  require(!bias || rows_in(*bias) == width, "bias must have an entry for each column");
  return {rows_in(out), heads, width / heads, nullptr, data_of<wide_t<T>>(bias), relu};
}

void finish(const OutMatrix& out, int64_t heads, const MaybeIn& sums, const MaybeIn& total,
            const std::optional<InVector>& bias, bool relu, int num_threads) {
  with_value_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    AttentionFinish<T> finish = finish_of<T>(out, heads, bias, relu);
    require_shape(sums, finish.num_rows, heads * finish.dim, "sums must be as out is");
    require_shape(total, finish.num_rows, heads, "total must be [num_rows, heads]");
    finish.total = data_of<V>(total);
    const V* from = data_of<V>(sums);
    T* to = data_of<T>(out);
    const nb::gil_scoped_release release;
    if (sums) {
      attention_finish(finish, from, to, num_threads);
    } else {
      attention_finish_again(finish, to, num_threads);
    }
  });
}

void delta(const OutMatrix& delta, const InMatrix& grad, const OutMatrix& out,
           const std::optional<InVector>& bias, const MaybeOut& passed, int num_threads) {
  const int64_t heads = columns_in(delta);
  with_value_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionFinish<T> finish = finish_of<T>(out, heads, bias, passed.has_value());
    const int64_t width = heads * finish.dim;
    require_shape(delta, finish.num_rows, heads, "delta must be [num_rows, heads]");
    require_shape(grad, finish.num_rows, width, "grad must be as out is");
    require_shape(passed, finish.num_rows, width, "passed must be as out is");
    const T* from = data_of<T>(grad);
    const T* of = data_of<T>(out);
    T* through = data_of<T>(passed);
    wide_t<T>* to = data_of<wide_t<T>>(delta);
    const nb::gil_scoped_release release;
    attention_delta(finish, from, of, through, to, num_threads);
  });
}

template <typename T>
HeadProducts<T> products_of(const InMatrix& rows, const InMatrix& vectors, int64_t heads) {
  require(heads > 0 && rows.shape(1) % heads == 0 && vectors.shape(0) == 2 &&
              vectors.shape(1) == rows.shape(1),
          "vectors must be [2, heads * dim], as rows have columns");
  return {data_of<T>(rows), rows_in(rows), heads, columns_in(rows) / heads,
          data_of<wide_t<T>>(vectors)};
}

void products(const InMatrix& rows, const InMatrix& vectors, const OutMatrix& first,
              const OutMatrix& second, int num_threads) {
  with_value_type(rows.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    const int64_t heads = columns_in(first);
    const HeadProducts<T> input = products_of<T>(rows, vectors, heads);
    for (const OutMatrix* product : {&first, &second}) {
      require_shape(*product, input.num_rows, heads, "products must be [num_rows, heads]");
    }
    V* one = data_of<V>(first);
    V* two = data_of<V>(second);
    const nb::gil_scoped_release release;
    head_products(input, one, two, num_threads);
  });
}

void products_backward(const InMatrix& rows, const InMatrix& vectors, const MaybeIn& passed,
                       const InMatrix& first_grad, const InMatrix& second_grad,
                       const OutMatrix& rows_grad, const OutMatrix& vectors_grad, int num_threads) {
  with_value_type(rows.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using V = wide_t<T>;
    const int64_t heads = columns_in(first_grad);
    const HeadProducts<T> input = products_of<T>(rows, vectors, heads);
    const int64_t width = input.heads * input.dim;
    for (const InMatrix* grad : {&first_grad, &second_grad}) {
      require_shape(*grad, input.num_rows, heads,
                    "gradients of products must be [num_rows, heads]");
    }
    require_shape(passed, input.num_rows, width, "passed must have the shape of rows");
    require_shape(rows_grad, input.num_rows, width, "rows_grad must have the shape of rows");
    require_shape(vectors_grad, 2, width, "vectors_grad must have the shape of vectors");
    const T* from = data_of<T>(passed);
    const V* one = data_of<V>(first_grad);
    const V* two = data_of<V>(second_grad);
    T* to = data_of<T>(rows_grad);
    V* of_vectors = data_of<V>(vectors_grad);
    const nb::gil_scoped_release release;
    head_products_backward(input, from, one, two, to, of_vectors, num_threads);
  });
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_operands(m);
  m.def("attention_finish", finish, "out"_a.noconvert(), "heads"_a, "sums"_a.noconvert().none(),
        "total"_a.noconvert().none(), "bias"_a.noconvert().none(), "relu"_a, "num_threads"_a);
  m.def("attention_delta", delta, "delta"_a.noconvert(), "grad"_a.noconvert(), "out"_a.noconvert(),
        "bias"_a.noconvert().none(), "passed"_a.noconvert().none(), "num_threads"_a);
  m.def("head_products", products, "rows"_a.noconvert(), "vectors"_a.noconvert(),
        "first"_a.noconvert(), "second"_a.noconvert(), "num_threads"_a);
  m.def("head_products_backward", products_backward, "rows"_a.noconvert(), "vectors"_a.noconvert(),
        "passed"_a.noconvert().none(), "first_grad"_a.noconvert(), "second_grad"_a.noconvert(),
        "rows_grad"_a.noconvert(), "vectors_grad"_a.noconvert(), "num_threads"_a);
}

}  // namespace graphshard
