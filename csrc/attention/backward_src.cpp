// SPDX-License-Identifier: Apache-2.0
// Gradients that belong to sources: each walks its out-edges, see [Note: backward] in attention.h.
//
// Of additive scores, the gradient of a destination's term is a number per head, which comes up on
// this walk edge by edge. Sources are cut into parts, the same for any number of threads; a part
// has numbers of its own for all destinations, which are added up in the order of the parts.

#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/chunk.h"
#include "attention/entries.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

constexpr int64_t kMaxParts = 16;

// What a walk over out-edges reads and writes besides its rows.
template <typename T>
struct Walk {
  const AttentionGradient<T>& gradient;
  const SourceGradients<T>& result;
  Statistics<wide_t<T>> statistics;
};

// Moves a row that was summed in a buffer to its place, if that is not where it was summed.
template <typename T>
void store(const wide_t<T>* from, int64_t width, T* to) {
  if (static_cast<const void*>(to) != from) narrow_row(from, width, to);
}

// Where a row of `rows` is summed: of a slice, in its own; else at its place, or in a buffer until
// its end if rows are stored narrower than sums.
template <typename T>
RowSum<T> sum_of(T* rows, const Piece& piece, int64_t width, wide_t<T>* slice, wide_t<T>* buffer) {
  T* row = rows + piece.row * width;
  if (slice != nullptr) return {slice, piece.begins, nullptr, nullptr};
  if constexpr (std::is_same_v<T, wide_t<T>>) buffer = row;
  return {buffer, piece.begins, piece.ends ? row : nullptr, nullptr};
}

// One span, or slice, of sources: what is read, where sums of a row go, and the entries.
template <typename T>
class SourceSpan {
  using V = wide_t<T>;

 public:
  // `slice`: the sums of the slice, null for whole rows.
  SourceSpan(const Attention<T>& a, const Walk<T>& walk, V* slice)
      : a_(a),
        walk_(walk),
        slice_(slice),
        memory_(Workspace<V>::size_of(a.width()) + 2 * Workspace<V>::size_of(a.score_width()) +
                Workspace<V>::size_of(a.heads)),
        entries_(a.heads, a.multiplies()),
        value_sum_(memory_.take(a.width())),
        key_sum_(memory_.take(a.score_width())),
        row_buffer_(memory_.take(a.score_width())),
        term_sum_(memory_.take(a.heads)) {}

  void take(const Chunk& chunk, V* dst_terms) {
    const SourceGradients<T>& result = walk_.result;
    score(chunk);
    weigh_backward<V>(a_, chunk, walk_.statistics, entries_);
    find_products(chunk);
    find_slopes<V>(a_, chunk, entries_, result.edge_terms, result.factor);
    if (a_.score == Score::kAdditive) {
      const bool keeps = result.src_terms != nullptr;
      sum_slopes<V>(a_, chunk, entries_.slope, dst_terms, keeps ? result.src_terms : term_sum_,
                    keeps ? a_.heads : 0);
    } else if (a_.score == Score::kJoint) {
      if (result.values != nullptr) add_joint_values(chunk);
    } else {
      if (result.src != nullptr) add_keys(chunk);
    }
  }

 private:
  void score(const Chunk& chunk) {
    if (a_.score == Score::kAdditive) {
      additive_scores<V>(a_, chunk, {a_.src_terms, a_.heads},
                         {walk_.statistics.packed, kPacked * a_.heads}, entries_.z);
      return;
    }
    const T* fixed = a_.score == Score::kJoint ? a_.values : a_.src;
    for (int p = 0; p < chunk.num_pieces; ++p) {
      score_rows(a_, chunk, chunk.pieces[p], fixed, a_.dst, row_buffer_, entries_.z);
    }
    if (a_.score == Score::kDot) scale_scores<V>(a_, chunk, entries_.z);
  }

  // g, and what weighted gradients add to those of values: but of joint scores, to which more is
  // added when slopes are known.
  void find_products(const Chunk& chunk) {
    T* values = walk_.result.values;
    const bool adds = values != nullptr && a_.score != Score::kJoint;
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      const T* fixed = a_.values + piece.row * a_.width();
      const RunRows<T> rows = grad_rows(chunk, piece, true);
      if (adds) {
        dot_and_add_rows(rows, fixed, entries_.weight, entries_.g,
                         sum_of(values, piece, a_.width(), slice_, value_sum_));
      } else {
        dot_rows(rows, fixed, entries_.g);
      }
    }
  }

  void add_joint_values(const Chunk& chunk) {
    T* values = walk_.result.values;
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      RowSum<T> to = sum_of(values, piece, a_.width(), slice_, value_sum_);
      to.out = nullptr;  // not yet
      add_rows(grad_rows(chunk, piece, false), entries_.weight, to);
      const V* fixed = widened(a_.values + piece.row * a_.width(), a_.width(), row_buffer_);
      add_joint_src(chunk.rows(piece, a_.dst, a_.score_dim, false), {a_.edge, &chunk.edges}, fixed,
                    a_.vector, a_.slope, entries_.slope, to.sum);
      if (piece.ends && slice_ == nullptr)
        store(to.sum, a_.width(), values + piece.row * a_.width());
    }
  }

  void add_keys(const Chunk& chunk) {
    V* slice = slice_ == nullptr ? nullptr : slice_ + a_.width();
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      add_rows(chunk.rows(piece, a_.dst, a_.score_dim, false), entries_.slope,
               sum_of(walk_.result.src, piece, a_.score_width(), slice, key_sum_));
    }
  }

  RunRows<T> grad_rows(const Chunk& chunk, const Piece& piece, bool prefetch) const {
    return chunk.rows(piece, walk_.gradient.grad, a_.dim, prefetch, walk_.gradient.grad_step);
  }

  const Attention<T>& a_;
  const Walk<T>& walk_;
  V* slice_;
  Workspace<V> memory_;
  BackwardEntries<V> entries_;
  V* value_sum_;
  V* key_sum_;
  V* row_buffer_;
  V* term_sum_;
};

template <typename T>
void source_span(const Attention<T>& a, const Csr& out_edges, const Walk<T>& walk, const Span& span,
                 wide_t<T>* dst_terms, wide_t<T>* slice) {
  SourceSpan<T> sources(a, walk, span.slice >= 0 ? slice : nullptr);
  Chunk chunk = chunk_of(a, out_edges, span, a.score != Score::kAdditive);
  while (chunk.next()) sources.take(chunk, dst_terms);
}

// Parts of the sources with about equal numbers of edges, the same for any number of threads.
std::vector<Span> source_parts(const Csr& out_edges, int64_t num_dst) {
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
void add_terms(const V* sums, int64_t begin, int64_t end, V* result) {
  for (int64_t i = begin; i < end; ++i) result[i] += sums[i];
}

template <typename T>
void additive(const Attention<T>& a, const Csr& out_edges, const Walk<T>& walk, int num_threads) {
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
      source_span<T>(a, out_edges, walk, parts[begin + i], sums_terms ? own : nullptr, nullptr);
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

template <typename T>
void by_rows(const Attention<T>& a, const Csr& out_edges, const Walk<T>& walk, int num_threads) {
  using V = wide_t<T>;
  const int64_t width = a.width();
  const int64_t score_width = a.score_width();
  const Schedule schedule = fixed_schedule(out_edges, width);
  const int64_t num_spans = static_cast<int64_t>(schedule.spans.size());
  const int64_t slice_size = width + score_width;
  const auto slices = std::make_unique<V[]>(schedule.num_slices * slice_size);
  run_tasks(num_spans, num_threads, [&](int64_t task) {
    const Span& span = schedule.spans[task];
    source_span<T>(a, out_edges, walk, span, nullptr,
                   slices.get() + std::max<int64_t>(span.slice, 0) * slice_size);
  });
  for (const LongRow& row : schedule.long_rows) {
    V* total = slices.get() + row.first_slice * slice_size;
    for (int64_t slice = row.first_slice + 1; slice < row.last_slice; ++slice) {
      const V* other = slices.get() + slice * slice_size;
      for (int64_t j = 0; j < slice_size; ++j) total[j] += other[j];
    }
    if (walk.result.values != nullptr) {
      store(total, width, walk.result.values + row.row * width);
    }
    if (walk.result.src != nullptr) {
      store(total + width, score_width, walk.result.src + row.row * score_width);
    }
  }
}

}  // namespace

template <typename T>
void attention_sources(const Attention<T>& a, const Csr& out_edges,
                       const AttentionGradient<T>& gradient, const SourceGradients<T>& result,
                       int num_threads) {
  using V = wide_t<T>;
  const int64_t size = kPacked * a.heads * a.num_dst;
  Workspace<V> memory(size);
  V* packed = memory.take(size);
  Statistics<V> statistics{nullptr, gradient.peak, gradient.total, gradient.delta};
  pack_statistics<V>(a, statistics, num_threads, packed);
  statistics.packed = packed;
  const Walk<T> walk{gradient, result, statistics};
  if (a.score == Score::kAdditive) {
    additive(a, out_edges, walk, num_threads);
  } else {
    by_rows(a, out_edges, walk, num_threads);
  }
}

#define INSTANTIATE(T)                                                                          \
  template void attention_sources(const Attention<T>&, const Csr&, const AttentionGradient<T>&, \
                                  const SourceGradients<T>&, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
