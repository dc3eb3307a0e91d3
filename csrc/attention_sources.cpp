// SPDX-License-Identifier: Apache-2.0
// Gradients that belong to sources: each walks its out-edges, see [Note: backward] in attention.h.
//
// Of additive scores, the gradient of a destination's term is a number per head, which comes up on
// this walk edge by edge. Sources are cut into parts, the same for any number of threads; a part
// has numbers of its own for all destinations, which are added up in the order of the parts.

#include <memory>
#include <vector>

#include "attention.h"
#include "attention_weights.h"
#include "elementwise.h"

namespace graphshard {
namespace {

constexpr int64_t kMaxParts = 16;

// Results of one source, in the type of sums, and where its destinations' gradients go.
template <typename V>
struct RowResult {
  V* values;     // [heads * dim]
  V* src;        // dot: [heads * score_dim]
  V* src_terms;  // additive: [heads]
  V* dst_terms;  // additive: [num_dst, heads of the block]
};

// sum[j] += sum over k of weight[k, head] * leaky_relu'(joined features), times vector[j], for kSize
// columns from `first` on. kEdge: edges have features.
template <bool kEdge, int kSize, typename T>
GRAPHSHARD_INLINE void add_joint_columns(const Attention<T>& a, const wide_t<T>* fixed,
                                         const Portion<T>& portion, int64_t first,
                                         const wide_t<T>* weight, wide_t<T>* sum) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.score_dim;
  const int64_t heads = portion.heads.count();
  const V* own = fixed + first;
  V sums[kSize];
  for (int j = 0; j < kSize; ++j) sums[j] = 0;
  for (int k = 0; k < portion.count; ++k) {
    const T* row = a.dst + portion.nodes[k] * width + first;
    const T* edge = kEdge ? a.edge + portion.edges[k] * width + first : nullptr;
    const V high = weight[k * heads];
    const V low = high * a.slope;
#pragma omp simd
    for (int j = 0; j < kSize; ++j) {
      V joined = own[j] + widen(row[j]);
      if constexpr (kEdge) joined += widen(edge[j]);
      sums[j] += joined > 0 ? high : low;
    }
  }
  for (int j = 0; j < kSize; ++j) sum[first + j] += sums[j] * a.vector[first + j];
}

template <typename T>
GRAPHSHARD_INLINE void add_joint(const Attention<T>& a, const wide_t<T>* fixed,
                                 const Portion<T>& portion, const wide_t<T>* weight,
                                 wide_t<T>* sum) {
  for (int64_t h = 0; h < portion.heads.count(); ++h) {
    in_blocks<32, 16, 8, 4, 1>(a.score_dim, [&](auto size, int64_t at) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t first = (portion.heads.first + h) * a.score_dim + at;
      if (a.edge == nullptr) {
        add_joint_columns<false, size>(a, fixed, portion, first, weight + h, sum);
      } else {
        add_joint_columns<true, size>(a, fixed, portion, first, weight + h, sum);
      }
    });
  }
}

// Adds the slopes of the edges to what their nodes have in `sums`, [nodes, heads of the block].
template <typename T>
GRAPHSHARD_INLINE void add_slopes(const Portion<T>& portion, const wide_t<T>* slope,
                                  wide_t<T>* sums) {
  with_heads(portion.heads.count(), [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    for (int k = 0; k < portion.count; ++k) {
      GRAPHSHARD_PREFETCH_WRITE(sums + portion.nodes.ahead_of(k) * heads);
      wide_t<T>* to = sums + portion.nodes[k] * heads;
#pragma omp simd
      for (int h = 0; h < heads; ++h) to[h] += slope[k * heads + h];
    }
  });
}

// What a walk over out-edges reads and writes besides the row that it is at.
template <typename T>
struct Walk {
  const AttentionGradient<T>& gradient;
  const SourceGradients<T>& result;
  const wide_t<T>* packed;
};

// What scores and weights need of a source: its terms or its key, and its values.
template <typename V>
struct Fixed {
  const V* scores;
  const V* values;
};

// Takes the out-edges [begin, end) of a source into its gradients.
template <typename Kind, typename T>
GRAPHSHARD_INLINE void take_edges(const Attention<T>& a, const Walk<T>& walk,
                                  const Fixed<wide_t<T>>& fixed, int64_t begin, int64_t end,
                                  Portion<T>& portion, const EdgeWeights<wide_t<T>>& w,
                                  const RowResult<wide_t<T>>& row) {
  using V = wide_t<T>;
  const Varying<T> varying{a.dst, walk.packed, kPacked * a.heads};
  const int64_t first = portion.heads.first;
  const int64_t heads = portion.heads.count();
  for (; begin < end; begin += kPortion) {
    portion.load(a, begin, end);
    Kind::scores(a, fixed.scores, varying, portion, w.z);
    gather_statistics(a, walk.packed, portion, w);
    dot_rows(portion.rows(walk.gradient.grad, a.heads, a.dim, true), fixed.values + first * a.dim,
             w.g);
    weigh<Kind>(a, portion, w);
    if (walk.result.values != nullptr) {
      add_rows(portion.rows(walk.gradient.grad, a.heads, a.dim, false), w.weight,
               row.values + first * a.dim);
    }
    if constexpr (Kind::kScore == Score::kAdditive) {
      fold_entries(portion, w.slope, V{0}, w.folded, add<V>);
      for (int64_t h = 0; h < heads; ++h) row.src_terms[first + h] += w.folded[h];
      if (row.dst_terms != nullptr) add_slopes(portion, w.slope, row.dst_terms);
      store_edge_gradients(a, portion, w, walk.result.edge_terms, walk.result.factor);
    } else if constexpr (Kind::kScore == Score::kDot) {
      if (walk.result.src != nullptr) {
        for (int i = 0; i < portion.entries; ++i) w.slope[i] *= a.scale;
        add_rows(portion.rows(a.dst, a.heads, a.score_dim, false), w.slope,
                 row.src + first * a.score_dim);
      }
    } else if (walk.result.values != nullptr) {
      add_joint(a, fixed.scores, portion, w.slope, row.values);
    }
  }
}

// Where the gradients of a source are summed: at their place, or in a buffer if that is narrower.
template <typename Kind, typename T>
GRAPHSHARD_INLINE RowResult<wide_t<T>> row_result(const Attention<T>& a,
                                                  const SourceGradients<T>& result, int64_t row,
                                                  wide_t<T>* buffer, wide_t<T>* dst_terms) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.dim;
  const int64_t score_width = a.heads * a.score_dim;
  RowResult<V> found{buffer, buffer + width, buffer + width, dst_terms};
  if constexpr (std::is_same_v<T, V>) {
    if (result.values != nullptr) found.values = result.values + row * width;
    if (result.src != nullptr) found.src = result.src + row * score_width;
  }
  if constexpr (Kind::kScore == Score::kAdditive) {
    if (result.src_terms != nullptr) found.src_terms = result.src_terms + row * a.heads;
  }
  return found;
}

template <typename Kind, typename T>
GRAPHSHARD_INLINE void clear(const Attention<T>& a, Heads heads, const RowResult<wide_t<T>>& row) {
  for (int64_t j = heads.first * a.dim; j < heads.last * a.dim; ++j) row.values[j] = 0;
  if constexpr (Kind::kScore == Score::kAdditive) {
    for (int64_t h = heads.first; h < heads.last; ++h) row.src_terms[h] = 0;
  } else if constexpr (Kind::kScore == Score::kDot) {
    for (int64_t j = heads.first * a.score_dim; j < heads.last * a.score_dim; ++j) row.src[j] = 0;
  }
}

// Moves what was summed in a buffer to its place.
template <typename T>
GRAPHSHARD_INLINE void store(const Attention<T>& a, const SourceGradients<T>& result, int64_t row,
                             Heads heads, const RowResult<wide_t<T>>& from) {
  T* values = result.values == nullptr ? nullptr : result.values + row * a.heads * a.dim;
  if (values != nullptr && static_cast<const void*>(values) != from.values) {
    for (int64_t j = heads.first * a.dim; j < heads.last * a.dim; ++j) {
      narrow(from.values[j], values[j]);
    }
  }
  T* src = result.src == nullptr ? nullptr : result.src + row * a.heads * a.score_dim;
  if (src != nullptr && static_cast<const void*>(src) != from.src) {
    for (int64_t j = heads.first * a.score_dim; j < heads.last * a.score_dim; ++j) {
      narrow(from.src[j], src[j]);
    }
  }
}

template <typename Kind, typename T>
GRAPHSHARD_INLINE Fixed<wide_t<T>> fixed_of(const Attention<T>& a, int64_t row,
                                            wide_t<T>* buffer) {
  const int64_t width = a.heads * a.dim;
  const int64_t score_width = a.heads * a.score_dim;
  const wide_t<T>* values = widened(a.values + row * width, width, buffer);
  if constexpr (Kind::kScore == Score::kAdditive) {
    return {a.src_terms + row * a.heads, values};
  } else if constexpr (Kind::kScore == Score::kJoint) {
    return {values, values};
  } else {
    return {widened(a.src + row * score_width, score_width, buffer + width), values};
  }
}

template <typename Kind, typename T>
GRAPHSHARD_HOT_CLONES void source_span(const Attention<T>& a, const EdgeGroups& out_edges,
                                       const Walk<T>& walk, const Span& span, Heads heads,
                                       wide_t<T>* dst_terms, wide_t<T>* slice) {
  using V = wide_t<T>;
  // Results of a row, then a source's row in the type of sums.
  const int64_t half = a.heads * (a.dim + std::max<int64_t>(a.score_dim, 1));
  Workspace<V> memory(2 * half);
  WeightsMemory<V> weights_memory(heads.count());
  const EdgeWeights<V> weights = weights_memory.weights();
  Portion<T> portion(a, out_edges, heads, heads.count() * a.dim * sizeof(T));
  V* buffer = memory.take(2 * half);
  if (span.slice >= 0) {
    const RowResult<V> row{slice, slice + a.heads * a.dim, slice + a.heads * a.dim, dst_terms};
    const Fixed<V> fixed = fixed_of<Kind>(a, span.first_row, buffer + half);
    clear<Kind>(a, heads, row);
    take_edges<Kind>(a, walk, fixed, span.begin, span.end, portion, weights, row);
    return;
  }
  for (int64_t at = span.first_row; at < span.last_row; ++at) {
    const int64_t begin = out_edges.begin(at);
    const int64_t end = out_edges.begin(at + 1);
    if (Kind::kScore != Score::kAdditive && end - begin > kSliceEdges) continue;
    const RowResult<V> row = row_result<Kind>(a, walk.result, at, buffer, dst_terms);
    clear<Kind>(a, heads, row);
    if (begin < end) {
      const Fixed<V> fixed = fixed_of<Kind>(a, at, buffer + half);
      take_edges<Kind>(a, walk, fixed, begin, end, portion, weights, row);
    }
    store(a, walk.result, at, heads, row);
  }
}

// Parts of the sources with about equal numbers of edges, the same for any number of threads.
std::vector<Span> source_parts(const EdgeGroups& out_edges, int64_t num_dst) {
  const int64_t fewest_edges = std::max<int64_t>(1 << 15, num_dst);
  const int64_t parts = std::clamp<int64_t>(out_edges.num_edges / fewest_edges, 1, kMaxParts);
  const int64_t work = out_edges.num_edges + out_edges.num_rows;
  std::vector<Span> spans;
  int64_t first = 0;
  for (int64_t part = 1; part <= parts; ++part) {
    int64_t last = first;
    int64_t high = out_edges.num_rows;
    const int64_t target = part_begin(work, part, parts);
    while (last < high) {
      const int64_t middle = last + (high - last) / 2;
      if (out_edges.begin(middle) + middle < target) {
        last = middle + 1;
      } else {
        high = middle;
      }
    }
    if (part == parts) last = out_edges.num_rows;
    if (last > first) spans.push_back({first, last, 0, 0, -1});
    first = last;
  }
  return spans;
}

template <typename V>
GRAPHSHARD_CLONES void add_terms(const V* sums, int64_t begin, int64_t end, Heads heads,
                                 int64_t num_heads, V* result) {
  const int64_t heads_here = heads.count();
  if (heads_here == num_heads) {
    for (int64_t i = begin * num_heads; i < end * num_heads; ++i) result[i] += sums[i];
    return;
  }
  for (int64_t v = begin; v < end; ++v) {
    V* to = result + v * num_heads + heads.first;
    for (int64_t h = 0; h < heads_here; ++h) to[h] += sums[v * heads_here + h];
  }
}

template <typename T>
void additive(const Attention<T>& a, const EdgeGroups& out_edges, const Walk<T>& walk, int64_t step,
              int num_threads) {
  using V = wide_t<T>;
  const SourceGradients<T>& result = walk.result;
  const std::vector<Span> parts = source_parts(out_edges, a.num_dst);
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const int64_t num_tasks = num_parts * ((a.heads + step - 1) / step);
  const bool sums_terms = result.dst_terms != nullptr;
  const int64_t terms = sums_terms ? step * a.num_dst : 0;
  const int64_t wave = std::clamp<int64_t>(num_threads, 1, std::max<int64_t>(num_tasks, 1));
  const auto sums = std::make_unique_for_overwrite<V[]>(wave * terms);
  const auto heads_of = [&](int64_t task) {
    const int64_t first = task / num_parts * step;
    return Heads{first, std::min(first + step, a.heads)};
  };
  for (int64_t begin = 0; begin < num_tasks; begin += wave) {
    const int64_t end = std::min(begin + wave, num_tasks);
    run_tasks(end - begin, num_threads, [&](int64_t i) {
      V* own = sums.get() + i * terms;
      std::fill(own, own + terms, V{0});
      source_span<AdditiveScore>(a, out_edges, walk, parts[(begin + i) % num_parts],
                                 heads_of(begin + i), sums_terms ? own : nullptr,
                                 static_cast<V*>(nullptr));
    });
    if (!sums_terms) continue;
    run_tasks(wave, num_threads, [&](int64_t share) {
      for (int64_t task = begin; task < end; ++task) {
        add_terms(sums.get() + (task - begin) * terms, part_begin(a.num_dst, share, wave), part_begin(a.num_dst, share + 1, wave),
                  heads_of(task), a.heads, result.dst_terms);
      }
    });
  }
}

template <typename Kind, typename T>
void by_rows(const Attention<T>& a, const EdgeGroups& out_edges, const Walk<T>& walk, int64_t step,
             int num_threads) {
  using V = wide_t<T>;
  const Schedule schedule = fixed_schedule(out_edges, a.heads * a.dim);
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const int64_t slice_size = a.heads * (a.dim + a.score_dim);
  const auto slices = std::make_unique_for_overwrite<V[]>(schedule.num_slices * slice_size);
  run_tasks(num_spans * ((a.heads + step - 1) / step), num_threads, [&](int64_t task) {
    const Span& span = schedule.spans[task % num_spans];
    const int64_t first = task / num_spans * step;
    source_span<Kind>(a, out_edges, walk, span, Heads{first, std::min(first + step, a.heads)},
                      static_cast<V*>(nullptr),
                      slices.get() + std::max<int64_t>(span.slice, 0) * slice_size);
  });
  for (const Hub& hub : schedule.hubs) {
    V* total = slices.get() + hub.first_slice * slice_size;
    for (int64_t slice = hub.first_slice + 1; slice < hub.last_slice; ++slice) {
      const V* other = slices.get() + slice * slice_size;
      for (int64_t j = 0; j < slice_size; ++j) total[j] += other[j];
    }
    const RowResult<V> row{total, total + a.heads * a.dim, nullptr, nullptr};
    store(a, walk.result, hub.row, Heads{0, a.heads}, row);
  }
}

}  // namespace

template <typename T>
void attention_sources(const Attention<T>& attention, const EdgeGroups& out_edges,
                       const AttentionGradient<T>& gradient, const SourceGradients<T>& result,
                       int num_threads) {
  const int64_t size = kPacked * attention.heads * attention.num_dst;
  Workspace<wide_t<T>> memory(size);
  wide_t<T>* packed = memory.take(size);
  pack_statistics(attention, gradient, num_threads, packed);
  const Walk<T> walk{gradient, result, packed};
  const int64_t columns = attention.score == Score::kAdditive
                              ? attention.dim
                              : std::max(attention.dim, attention.score_dim);
  // A factor that all heads share has one gradient, which their tasks cannot add to side by side.
  const int64_t step = result.factor != nullptr
                           ? attention.heads
                           : heads_per_block(attention.num_dst, out_edges.num_edges,
                                             attention.heads, columns * sizeof(T));
  with_score(attention.score, [&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (Kind::kScore == Score::kAdditive) {
      additive(attention, out_edges, walk, step, num_threads);
    } else {
      by_rows<Kind>(attention, out_edges, walk, step, num_threads);
    }
  });
}

#define INSTANTIATE(T)                                                    \
  template void attention_sources(const Attention<T>&, const EdgeGroups&, \
                                  const AttentionGradient<T>&, const SourceGradients<T>&, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
