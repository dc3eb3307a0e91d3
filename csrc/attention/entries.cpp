// SPDX-License-Identifier: Apache-2.0

#include "attention/entries.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "simd/dispatch.h"
#include "simd/exp.h"

namespace graphshard {
namespace {

template <typename V>
inline constexpr int kWidest = std::min(32, kWidestRegister<V>);

GRAPHSHARD_INLINE uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Calls function(n) where n is the number of heads, known to the compiler if it is a frequent one.
template <typename V, typename Function>
GRAPHSHARD_INLINE void with_heads(int64_t heads, const Function& function) {
  if constexpr (!std::is_same_v<V, double>) {
    if (heads == 4) return function(std::integral_constant<int, 4>{});
    if (heads == 1) return function(std::integral_constant<int, 1>{});
    if (heads == 8) return function(std::integral_constant<int, 8>{});
  }
  function(static_cast<int>(heads));
}

// Calls function(k, h, entry) for each edge in [first, last) and head; the heads of an edge at once
// where their number is known.
template <typename V, typename Function>
GRAPHSHARD_INLINE void for_each_entry(int64_t num_heads, int first, int last,
                                      const Function& function) {
  with_heads<V>(num_heads, [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    for (int k = first; k < last; ++k) {
      if constexpr (std::is_same_v<decltype(heads), int>) {
        for (int h = 0; h < heads; ++h) function(k, h, k * heads + h);
      } else {
#pragma omp simd
        for (int h = 0; h < heads; ++h) function(k, h, k * heads + h);
      }
    }
  });
}

template <typename V, typename Function>
GRAPHSHARD_INLINE void for_each_entry(const Chunk& chunk, const Function& function) {
  for_each_entry<V>(chunk.heads, 0, chunk.count, function);
}

// Calls function(i) for entries [0, padded), in vectors.
template <typename Function>
GRAPHSHARD_INLINE void for_steps(const Chunk& chunk, const Function& function) {
  for (int i = 0; i < chunk.padded; i += kStep) {
#pragma omp simd
    for (int j = 0; j < kStep; ++j) function(i + j);
  }
}

// out[h] = join(... join(out[h], first entry of head h in the piece) ..., last).
template <typename V, typename Join>
GRAPHSHARD_INLINE void fold_entries(int64_t num_heads, const Piece& piece, const V* entries, V* out,
                                    const Join& join) {
  with_heads<V>(num_heads, [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    if constexpr (std::is_same_v<decltype(heads), int>) {
      for (int k = piece.first; k < piece.last; ++k) {
        for (int h = 0; h < heads; ++h) out[h] = join(out[h], entries[k * heads + h]);
      }
    } else {
      V folded[heads];
      for (int h = 0; h < heads; ++h) folded[h] = out[h];
      for (int k = piece.first; k < piece.last; ++k) {
#pragma omp simd
        for (int h = 0; h < heads; ++h) folded[h] = join(folded[h], entries[k * heads + h]);
      }
      for (int h = 0; h < heads; ++h) out[h] = folded[h];
    }
  });
}

// to[entry] = from[h] for the edges of the piece.
template <typename V>
GRAPHSHARD_INLINE void repeat(int64_t heads, const Piece& piece, const V* from, V* to) {
  for_each_entry<V>(heads, piece.first, piece.last,
                    [&](int, int h, int entry) GRAPHSHARD_INLINE_LAMBDA { to[entry] = from[h]; });
}

template <typename V>
GRAPHSHARD_INLINE V add(V a, V b) {
  return a + b;
}

template <typename V>
GRAPHSHARD_INLINE V leaky_relu(V z, V slope) {
  return z > 0 ? z : slope * z;
}

template <typename V>
GRAPHSHARD_INLINE void add_edge_terms(const AttentionTerms<V>& a, const Chunk& chunk, V* z) {
  if (a.edge_terms == nullptr) return;
  for_each_entry<V>(chunk, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    z[entry] += a.edge_terms[chunk.edges[k] * a.heads + h];
  });
}

// m of each entry, without its c; call only where there is a mask. `hashes` has room for the
// entries of a chunk and of one more edge.
template <typename V>
GRAPHSHARD_INLINE void load_mask(const AttentionTerms<V>& a, const Chunk& chunk, uint32_t* hashes,
                                 V* multiplier) {
  const EdgeMask& mask = a.mask;
  uint32_t words[kChunkEdges];
  for (int k = 0; k < chunk.count; ++k) {
    uint32_t key;
    if (mask.keys != nullptr) {
      key = static_cast<uint32_t>(mask.keys[chunk.edges[k]]);
    } else {
      const uint64_t id = static_cast<uint64_t>(chunk.edges[k]);
      key = static_cast<uint32_t>(id) ^ mixed(static_cast<uint32_t>(id >> 32));
    }
    words[k] = mixed(key + mask.edge_seed);
  }
  const uint32_t last_dropped = static_cast<uint32_t>(mask.threshold - 1);
  const V kept = static_cast<V>(mask.kept);
  for (int64_t h = 0; h < chunk.heads; ++h) {
    const uint32_t head = static_cast<uint32_t>(h);
    hashes[chunk.entries + h] = mixed(mask.head_seed + head * 0x9e3779b9u);
  }
  const uint32_t* of_head = hashes + chunk.entries;
  for_each_entry<V>(chunk, [&](int k, int h, int entry)
                               GRAPHSHARD_INLINE_LAMBDA { hashes[entry] = words[k] ^ of_head[h]; });
  for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    multiplier[i] = mixed(hashes[i]) <= last_dropped ? 0 : kept;
  });
}

// Multiplies each entry by its c.
template <typename V>
GRAPHSHARD_INLINE void multiply_by_factor(const AttentionTerms<V>& a, const Chunk& chunk,
                                          V* entries) {
  const int64_t step = a.factor_width == 1 ? 0 : 1;
  for_each_entry<V>(chunk, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    entries[entry] *= a.factor[chunk.edges[k] * a.factor_width + h * step];
  });
}

template <typename V>
GRAPHSHARD_INLINE void raise(V highest, int64_t dim, V& peak, V& total, V* sum) {
  if (!(highest > peak)) return;
  const V before = peak;
  peak = highest;
  if (before == -std::numeric_limits<V>::infinity()) return;  // nothing was summed up
  const V scale = exp_nonpositive(before - highest);
  total *= scale;
  for (int64_t j = 0; j < dim; ++j) sum[j] *= scale;
}

// Raises the peaks of a piece's row to the piece's scores, and leaves them with each entry.
template <typename V>
GRAPHSHARD_INLINE void raise_peaks(const AttentionTerms<V>& a, const Piece& piece,
                                   const RowStates<V>& states, bool begins,
                                   const ForwardEntries<V>& e) {
  constexpr V kNone = -std::numeric_limits<V>::infinity();
  V* peak = states.peak + piece.row * states.peak_step;
  V* total = states.total + piece.row * states.total_step;
  V* sum = states.sum + piece.row * states.sum_step;
  if (begins && piece.begins) {
    for (int64_t h = 0; h < a.heads; ++h) {
      peak[h] = kNone;
      total[h] = 0;
    }
  }
  V* folded = e.folded;
  for (int64_t h = 0; h < a.heads; ++h) folded[h] = kNone;
  fold_entries(a.heads, piece, e.scores, folded,
               [](V x, V y) GRAPHSHARD_INLINE_LAMBDA { return y > x ? y : x; });
  for (int64_t h = 0; h < a.heads; ++h) {
    raise(folded[h], a.dim, peak[h], total[h], sum + h * a.dim);
    // Of edges that are all ruled out by infinite terms there is no peak to compare with.
    folded[h] = peak[h] == kNone ? 0 : peak[h];
  }
  repeat(a.heads, piece, folded, e.peak);
}

template <typename V>
GRAPHSHARD_INLINE void weigh(const AttentionTerms<V>& a, const Chunk& chunk,
                             const RowStates<V>& states, bool begins, const ForwardEntries<V>& e) {
  V* scores = e.scores;
  for (int i = chunk.entries; i < chunk.padded; ++i) scores[i] = e.peak[i] = 0;
  if (a.score == Score::kAdditive) {
    for_steps(chunk,
              [&](int i) GRAPHSHARD_INLINE_LAMBDA { scores[i] = leaky_relu(scores[i], a.slope); });
  }
  for (int p = 0; p < chunk.num_pieces; ++p) raise_peaks(a, chunk.pieces[p], states, begins, e);
  for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    scores[i] = exp_nonpositive(scores[i] - e.peak[i]);
  });
  for (int p = 0; p < chunk.num_pieces; ++p) {
    const Piece& piece = chunk.pieces[p];
    fold_entries(a.heads, piece, scores, states.total + piece.row * states.total_step, add<V>);
  }
  if (a.mask.threshold != 0) {
    load_mask(a, chunk, e.hashes, e.multiplier);
    for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA { scores[i] *= e.multiplier[i]; });
  }
  if (a.factor != nullptr) multiply_by_factor(a, chunk, scores);
}

template <typename V>
GRAPHSHARD_INLINE void gather_statistics(const Chunk& chunk, const V* packed,
                                         const BackwardEntries<V>& e) {
  const int64_t heads = chunk.heads;
  for_each_entry<V>(chunk, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    const V* of = packed + chunk.nodes[k] * kPacked * heads;
    e.peak[entry] = of[heads + h];
    e.scale[entry] = of[2 * heads + h];
    e.delta[entry] = of[3 * heads + h];
  });
}

template <typename V>
GRAPHSHARD_INLINE void repeat_statistics(const Chunk& chunk, const Statistics<V>& statistics,
                                         const BackwardEntries<V>& e) {
  const int64_t heads = chunk.heads;
  for (int p = 0; p < chunk.num_pieces; ++p) {
    const Piece& piece = chunk.pieces[p];
    if (piece.first == piece.last) continue;
    const int64_t at = piece.row * heads;
    repeat(heads, piece, statistics.peak + at, e.peak);
    repeat(heads, piece, statistics.delta + at, e.delta);
    for (int64_t h = 0; h < heads; ++h) e.folded[h] = 1 / statistics.total[at + h];
    repeat(heads, piece, e.folded, e.scale);
  }
}

template <typename V>
GRAPHSHARD_INLINE void weigh(const AttentionTerms<V>& a, const Chunk& chunk,
                             const BackwardEntries<V>& e) {
  const V below = a.score == Score::kAdditive ? a.slope : V{1};  // where z is not positive
  for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    e.softmax[i] = exp_nonpositive(leaky_relu(e.z[i], below) - e.peak[i]) * e.scale[i];
  });
  if (e.weight == e.softmax) return;
  if (a.mask.threshold != 0) {
    load_mask(a, chunk, e.hashes, e.kept);
  } else {
    for (int i = 0; i < chunk.padded; ++i) e.kept[i] = 1;
  }
  for (int i = 0; i < chunk.padded; ++i) e.multiplier[i] = e.kept[i];
  if (a.factor != nullptr) multiply_by_factor(a, chunk, e.multiplier);
  for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
    e.kept[i] *= e.softmax[i];
    e.weight[i] = e.softmax[i] * e.multiplier[i];
  });
}

template <typename V>
GRAPHSHARD_INLINE void slopes(const AttentionTerms<V>& a, const Chunk& chunk,
                              const BackwardEntries<V>& e) {
  const V below = a.score == Score::kAdditive ? a.slope : V{1};
  if (e.weight == e.softmax) {
    for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
      const V slope = e.softmax[i] * (e.g[i] - e.delta[i]);
      e.slope[i] = e.z[i] > 0 ? slope : slope * below;
    });
  } else {
    for_steps(chunk, [&](int i) GRAPHSHARD_INLINE_LAMBDA {
      const V slope = e.softmax[i] * (e.multiplier[i] * e.g[i] - e.delta[i]);
      e.slope[i] = e.z[i] > 0 ? slope : slope * below;
    });
  }
}

template <typename V>
GRAPHSHARD_INLINE void store_edge_gradients(const AttentionTerms<V>& a, const Chunk& chunk,
                                            const BackwardEntries<V>& e, V* edge_terms, V* factor) {
  if (edge_terms != nullptr) {
    for_each_entry<V>(chunk, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
      edge_terms[chunk.edges[k] * a.heads + h] = e.slope[entry];
    });
  }
  if (factor == nullptr) return;
  if (a.factor_width == 1) {
    for (int k = 0; k < chunk.count; ++k) {
      V grad = 0;
      for (int64_t i = k * a.heads; i < (k + 1) * a.heads; ++i) grad += e.kept[i] * e.g[i];
      factor[chunk.edges[k]] = grad;
    }
    return;
  }
  for_each_entry<V>(chunk, [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
    factor[chunk.edges[k] * a.factor_width + h] = e.kept[entry] * e.g[entry];
  });
}

template <typename V>
GRAPHSHARD_INLINE void add_to_nodes(const Chunk& chunk, const V* slope, V* sums) {
  with_heads<V>(chunk.heads, [&](auto heads) GRAPHSHARD_INLINE_LAMBDA {
    for (int k = 0; k < chunk.count; ++k) {
      GRAPHSHARD_PREFETCH_WRITE(sums + chunk.nodes.far_ahead_of(k) * heads);
      V* to = sums + chunk.nodes[k] * heads;
#pragma omp simd
      for (int h = 0; h < heads; ++h) to[h] += slope[k * heads + h];
    }
  });
}

}  // namespace

template <typename V>
void additive_scores(const AttentionTerms<V>& a, const Chunk& chunk, const NodeTerms<V>& fixed,
                     const NodeTerms<V>& varying, V* z) {
  dispatch<kWidest<V>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    for (int k = 0; k < chunk.count; ++k) {
      GRAPHSHARD_PREFETCH(varying.data + chunk.nodes.far_ahead_of(k) * varying.step);
    }
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      const V* of_row = fixed.data + piece.row * fixed.step;
      for_each_entry<V>(chunk.heads, piece.first, piece.last,
                        [&](int k, int h, int entry) GRAPHSHARD_INLINE_LAMBDA {
                          z[entry] = of_row[h] + varying.data[chunk.nodes[k] * varying.step + h];
                        });
    }
    add_edge_terms(a, chunk, z);
  });
}

template <typename V>
void scale_scores(const AttentionTerms<V>& a, const Chunk& chunk, V* z) {
  dispatch<kWidest<V>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    for (int i = 0; i < chunk.entries; ++i) z[i] *= a.scale;
    add_edge_terms(a, chunk, z);
  });
}

template <typename V>
void weigh_forward(const AttentionTerms<V>& a, const Chunk& chunk, const RowStates<V>& states,
                   bool begins, const ForwardEntries<V>& entries) {
  dispatch<kWidest<V>>([&](auto)
                           GRAPHSHARD_INLINE_LAMBDA { weigh(a, chunk, states, begins, entries); });
}

template <typename V>
void raise_peak(V highest, int64_t dim, V& peak, V& total, V* sum) {
  raise(highest, dim, peak, total, sum);
}

template <typename V>
V exp_difference(V from, V to) {
  return exp_nonpositive(from - to);
}

template <typename V>
void pack_statistics(const AttentionTerms<V>& a, const Statistics<V>& statistics, int num_threads,
                     V* packed) {
  const int64_t parts = num_parts(a.num_dst, 4096, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t last = part_begin(a.num_dst, part + 1, parts);
    for (int64_t v = part_begin(a.num_dst, part, parts); v < last; ++v) {
      V* to = packed + v * kPacked * a.heads;
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t from = v * a.heads + h;
        to[h] = a.dst_terms == nullptr ? 0 : a.dst_terms[from];
        to[a.heads + h] = statistics.peak[from];
        to[2 * a.heads + h] = 1 / statistics.total[from];
        to[3 * a.heads + h] = statistics.delta[from];
      }
    }
  });
}

template <typename V>
void weigh_backward(const AttentionTerms<V>& a, const Chunk& chunk, const Statistics<V>& statistics,
                    const BackwardEntries<V>& entries) {
  dispatch<kWidest<V>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    if (statistics.packed != nullptr) {
      gather_statistics(chunk, statistics.packed, entries);
    } else {
      repeat_statistics(chunk, statistics, entries);
    }
    weigh(a, chunk, entries);
  });
}

template <typename V>
void find_slopes(const AttentionTerms<V>& a, const Chunk& chunk, const BackwardEntries<V>& entries,
                 V* edge_terms, V* factor) {
  dispatch<kWidest<V>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    slopes(a, chunk, entries);
    store_edge_gradients(a, chunk, entries, edge_terms, factor);
    if (a.score != Score::kDot) return;
    for (int i = 0; i < chunk.entries; ++i) entries.slope[i] *= a.scale;
  });
}

template <typename V>
void sum_slopes(const AttentionTerms<V>& a, const Chunk& chunk, const V* slope, V* node_sums,
                V* row_sums, int64_t row_step) {
  dispatch<kWidest<V>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    if (node_sums != nullptr) add_to_nodes(chunk, slope, node_sums);
    for (int p = 0; p < chunk.num_pieces; ++p) {
      const Piece& piece = chunk.pieces[p];
      V* sum = row_sums + piece.row * row_step;
      if (piece.begins) std::fill(sum, sum + a.heads, V{0});
      fold_entries(a.heads, piece, slope, sum, add<V>);
    }
  });
}

#define INSTANTIATE(V)                                                                             \
  template void additive_scores(const AttentionTerms<V>&, const Chunk&, const NodeTerms<V>&,       \
                                const NodeTerms<V>&, V*);                                          \
  template void scale_scores(const AttentionTerms<V>&, const Chunk&, V*);                          \
  template void weigh_forward(const AttentionTerms<V>&, const Chunk&, const RowStates<V>&, bool,   \
                              const ForwardEntries<V>&);                                           \
  template void raise_peak(V, int64_t, V&, V&, V*);                                                \
  template V exp_difference(V, V);                                                                 \
  template void pack_statistics(const AttentionTerms<V>&, const Statistics<V>&, int, V*);          \
  template void weigh_backward(const AttentionTerms<V>&, const Chunk&, const Statistics<V>&,       \
                               const BackwardEntries<V>&);                                         \
  template void find_slopes(const AttentionTerms<V>&, const Chunk&, const BackwardEntries<V>&, V*, \
                            V*);                                                                   \
  template void sum_slopes(const AttentionTerms<V>&, const Chunk&, const V*, V*, V*, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace graphshard
