// SPDX-License-Identifier: Apache-2.0
// Gradients that belong to sources: each walks its out-edges, see [Note: backward] in attention.h.
//
// Of additive scores, the gradient of a destination's term is a number per head, which comes up on
// this walk edge by edge. Sources are cut into parts, the same for any number of threads; a part
// has numbers of its own for all destinations, which are added up in the order of the parts.

#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/weights.h"
#include "simd/elementwise.h"

namespace graphshard {
namespace {

constexpr int64_t kMaxParts = 16;

// sum[j] += sum over k of weight[k, head] * leaky_relu'(joined features), times vector[j], for
// kSize columns from `first` on. kEdge: edges have features.
template <bool kEdge, int kSize, typename T>
GRAPHSHARD_INLINE void add_joint_columns(const Attention<T>& a, const wide_t<T>* fixed,
                                         const Portion<T>& portion, const Piece& piece,
                                         int64_t first, const wide_t<T>* weight, wide_t<T>* sum) {
  using V = wide_t<T>;
  const int64_t width = a.heads * a.score_dim;
  const V* own = fixed + first;
  V sums[kSize];
  for (int j = 0; j < kSize; ++j) sums[j] = 0;
  for (int k = piece.first; k < piece.last; ++k) {
    const T* row = a.dst + portion.nodes[k] * width + first;
    const T* edge = kEdge ? a.edge + portion.edges[k] * width + first : nullptr;
    const V high = weight[k * a.heads];
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
                                 const Portion<T>& portion, const Piece& piece,
                                 const wide_t<T>* weight, wide_t<T>* sum) {
  for (int64_t h = 0; h < a.heads; ++h) {
    in_blocks<32, 16, 8, 4, 1>(a.score_dim, [&](auto size, int64_t at) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t first = h * a.score_dim + at;
      if (a.edge == nullptr) {
        add_joint_columns<false, size>(a, fixed, portion, piece, first, weight + h, sum);
      } else {
        add_joint_columns<true, size>(a, fixed, portion, piece, first, weight + h, sum);
      }
    });
  }
}

// Adds the slopes of the edges to what their nodes have in `sums`, [nodes, heads].
template <typename T>
GRAPHSHARD_INLINE void add_slopes(const Portion<T>& portion, const wide_t<T>* slope,
                                  wide_t<T>* sums) {
  with_heads(portion.heads, [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    for (int k = 0; k < portion.count; ++k) {
      GRAPHSHARD_PREFETCH_WRITE(sums + portion.nodes.far_ahead_of(k) * heads);
      wide_t<T>* to = sums + portion.nodes[k] * heads;
#pragma omp simd
      for (int h = 0; h < heads; ++h) to[h] += slope[k * heads + h];
    }
  });
}

// What a walk over out-edges reads and writes besides its rows.
template <typename T>
struct Walk {
  const AttentionGradient<T>& gradient;
  const SourceGradients<T>& result;
  const wide_t<T>* packed;
};

// Moves a row that was summed in a buffer to its place, if that is not where it was summed.
template <typename T>
GRAPHSHARD_INLINE void store(const wide_t<T>* from, int64_t width, T* to) {
  if (static_cast<const void*>(to) == from) return;
  for (int64_t j = 0; j < width; ++j) narrow(from[j], to[j]);
}

// One span, or slice, of sources: what is read, where sums of a row go, and the entries.
template <typename Kind, typename T>
class SourceSpan {
  using V = wide_t<T>;

 public:
  GRAPHSHARD_INLINE SourceSpan(const Attention<T>& a, const Walk<T>& walk, V* slice)
      : a_(a),
        walk_(walk),
        width_(a.heads * a.dim),
        score_width_(a.heads * a.score_dim),
        slice_(slice),
        memory_(Workspace<V>::size_of(width_ + score_width_ + a.heads) +
                Workspace<V>::size_of(score_width_)),
        weights_memory_(a.heads),
        w_(weights_memory_.weights(multiplies(a))),
        buffer_(memory_.take(width_ + score_width_ + a.heads)),
        row_buffer_(memory_.take(score_width_)) {}

  GRAPHSHARD_INLINE void take(const Portion<T>& portion, V* dst_terms) {
    weigh_values(portion);
    find_slopes<Kind>(a_, portion, w_);
    if constexpr (Kind::kScore == Score::kAdditive) {
      if (dst_terms != nullptr) add_slopes(portion, w_.slope, dst_terms);
      store_edge_gradients(a_, portion, w_, walk_.result.edge_terms, walk_.result.factor);
      for (int p = 0; p < portion.num_pieces; ++p) {
        const Piece& piece = portion.pieces[p];
        V* sum = walk_.result.src_terms == nullptr ? buffer_ + width_
                                                   : walk_.result.src_terms + piece.row * a_.heads;
        if (piece.begins) std::fill(sum, sum + a_.heads, V{0});
        fold_entries(a_.heads, piece, w_.slope, sum, add<V>);
      }
    } else if constexpr (Kind::kScore == Score::kJoint) {
      if (walk_.result.values != nullptr) add_joint_values(portion);
    } else {
      if (walk_.result.src != nullptr) add_keys(portion);
    }
  }

 private:
  // Weights and g, and what weighted gradients add to those of values: but of joint scores, to
  // which more is added when slopes are known.
  GRAPHSHARD_INLINE void weigh_values(const Portion<T>& portion) {
    const Varying<T> varying{a_.dst, walk_.packed, kPacked * a_.heads};
    for (int p = 0; p < portion.num_pieces; ++p) {
      const Piece& piece = portion.pieces[p];
      Kind::scores(a_, Kind::fixed(a_, scored(), a_.src_terms, piece.row, row_buffer_), varying,
                   portion, piece, w_.z);
    }
    gather_statistics(a_, walk_.packed, portion, w_);
    weigh<Kind>(a_, portion, w_);
    const bool adds = walk_.result.values != nullptr && Kind::kScore != Score::kJoint;
    for (int p = 0; p < portion.num_pieces; ++p) {
      const Piece& piece = portion.pieces[p];
      const T* fixed = a_.values + piece.row * width_;
      const RunRows<T> rows =
          portion.rows(piece, walk_.gradient.grad, a_.dim, true, walk_.gradient.grad_step);
      if (!adds) {
        dot_rows(rows, fixed, w_.g);
        continue;
      }
      dot_and_add_rows(rows, fixed, w_.weight, w_.g,
                       sum_of(walk_.result.values, piece, width_, slice_, buffer_));
    }
  }

  GRAPHSHARD_INLINE void add_joint_values(const Portion<T>& portion) {
    for (int p = 0; p < portion.num_pieces; ++p) {
      const Piece& piece = portion.pieces[p];
      T* out = walk_.result.values + piece.row * width_;
      RowSum<T> to = sum_of(walk_.result.values, piece, width_, slice_, buffer_);
      to.out = nullptr;  // not yet
      add_rows(portion.rows(piece, walk_.gradient.grad, a_.dim, false, walk_.gradient.grad_step),
               w_.weight, to);
      add_joint(a_, JointScore::fixed(a_, a_.values, a_.src_terms, piece.row, row_buffer_), portion,
                piece, w_.slope, to.sum);
      if (piece.ends && slice_ == nullptr) store(to.sum, width_, out);
    }
  }

  GRAPHSHARD_INLINE void add_keys(const Portion<T>& portion) {
    for (int i = 0; i < portion.entries; ++i) w_.slope[i] *= a_.scale;
    for (int p = 0; p < portion.num_pieces; ++p) {
      const Piece& piece = portion.pieces[p];
      V* slice = slice_ == nullptr ? nullptr : slice_ + width_;
      add_rows(portion.rows(piece, a_.dst, a_.score_dim, false), w_.slope,
               sum_of(walk_.result.src, piece, score_width_, slice, buffer_ + width_));
    }
  }

  // Rows that scores are made of, if they are: values or keys.
  GRAPHSHARD_INLINE const T* scored() const {
    return Kind::kScore == Score::kJoint ? a_.values : a_.src;
  }

  // Where a row of `rows` is summed: of a slice, in its own; else at its place, or in a buffer
  // until its end if rows are stored narrower than sums.
  static GRAPHSHARD_INLINE RowSum<T> sum_of(T* rows, const Piece& piece, int64_t width, V* slice,
                                            V* buffer) {
    T* row = rows + piece.row * width;
    if (slice != nullptr) return {slice, piece.begins, nullptr, nullptr};
    if constexpr (std::is_same_v<T, V>) buffer = row;
    return {buffer, piece.begins, piece.ends ? row : nullptr, nullptr};
  }

  const Attention<T>& a_;
  const Walk<T>& walk_;
  int64_t width_;
  int64_t score_width_;
  V* slice_;  // sums of the slice, null for whole rows
  Workspace<V> memory_;
  WeightsMemory<V> weights_memory_;
  EdgeWeights<V> w_;
  V* buffer_;
  V* row_buffer_;
};

template <typename Kind, typename T>
GRAPHSHARD_CLONES void source_span(const Attention<T>& a, const EdgeGroups& out_edges,
                                   const Walk<T>& walk, const Span& span, wide_t<T>* dst_terms,
                                   wide_t<T>* slice) {
  SourceSpan<Kind, T> sources(a, walk, span.slice >= 0 ? slice : nullptr);
  Portion<T> portion(a, out_edges, span, Kind::kScore != Score::kAdditive);
  while (portion.next()) sources.take(portion, dst_terms);
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
GRAPHSHARD_CLONES void add_terms(const V* sums, int64_t begin, int64_t end, V* result) {
  for (int64_t i = begin; i < end; ++i) result[i] += sums[i];
}

template <typename T>
void additive(const Attention<T>& a, const EdgeGroups& out_edges, const Walk<T>& walk,
              int num_threads) {
  using V = wide_t<T>;
  const SourceGradients<T>& result = walk.result;
  const std::vector<Span> parts = source_parts(out_edges, a.num_dst);
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const bool sums_terms = result.dst_terms != nullptr;
  const int64_t terms = sums_terms ? a.heads * a.num_dst : 0;
  const int64_t wave = std::clamp<int64_t>(num_threads, 1, std::max<int64_t>(num_parts, 1));
  const auto sums = std::make_unique_for_overwrite<V[]>(wave * terms);
  for (int64_t begin = 0; begin < num_parts; begin += wave) {
    const int64_t end = std::min(begin + wave, num_parts);
    run_tasks(end - begin, num_threads, [&](int64_t i) {
      V* own = sums.get() + i * terms;
      std::fill(own, own + terms, V{0});
      source_span<AdditiveScore>(a, out_edges, walk, parts[begin + i], sums_terms ? own : nullptr,
                                 static_cast<V*>(nullptr));
    });
    if (!sums_terms) continue;
    run_tasks(wave, num_threads, [&](int64_t share) {
      for (int64_t task = begin; task < end; ++task) {
        add_terms(sums.get() + (task - begin) * terms, part_begin(terms, share, wave),
                  part_begin(terms, share + 1, wave), result.dst_terms);
      }
    });
  }
}

template <typename Kind, typename T>
void by_rows(const Attention<T>& a, const EdgeGroups& out_edges, const Walk<T>& walk,
             int num_threads) {
  using V = wide_t<T>;
  const Schedule schedule = fixed_schedule(out_edges, a.heads * a.dim);
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const int64_t slice_size = a.heads * (a.dim + a.score_dim);
  const auto slices = std::make_unique<V[]>(schedule.num_slices * slice_size);
  run_tasks(num_spans, num_threads, [&](int64_t task) {
    const Span& span = schedule.spans[task];
    source_span<Kind>(a, out_edges, walk, span, static_cast<V*>(nullptr),
                      slices.get() + std::max<int64_t>(span.slice, 0) * slice_size);
  });
  for (const Hub& hub : schedule.hubs) {
    V* total = slices.get() + hub.first_slice * slice_size;
    for (int64_t slice = hub.first_slice + 1; slice < hub.last_slice; ++slice) {
      const V* other = slices.get() + slice * slice_size;
      for (int64_t j = 0; j < slice_size; ++j) total[j] += other[j];
    }
    const int64_t width = a.heads * a.dim;
    const int64_t score_width = a.heads * a.score_dim;
    if (walk.result.values != nullptr) {
      store(total, width, walk.result.values + hub.row * width);
    }
    if (walk.result.src != nullptr) {
      store(total + width, score_width, walk.result.src + hub.row * score_width);
    }
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
  with_score(attention.score, [&](auto kind) {
    using Kind = decltype(kind);
    if constexpr (Kind::kScore == Score::kAdditive) {
      additive(attention, out_edges, walk, num_threads);
    } else {
      by_rows<Kind>(attention, out_edges, walk, num_threads);
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
