// SPDX-License-Identifier: Apache-2.0
// What the three walks over edges have in common: portions of edges, their scores, and the mask.

#pragma once

#include <limits>
#include <type_traits>

#include "attention.h"
#include "elementwise.h"
#include "exponential.h"
#include "parallel.h"

namespace graphshard {

inline constexpr int kPortion = 64;  // edges at a time: their rows stay in the cache meanwhile
inline constexpr int kAhead = 32;    // edges ahead of the current one whose rows are requested
inline constexpr int kLanes = 8;     // arrays of a portion are filled up to a multiple of it

// The heads [first, last) that a walk is about.
struct Heads {
  int64_t first;
  int64_t last;
};

// Some consecutive edges of one row: the node at their other end, and what tells them apart.
struct Portion {
  int count;
  int padded;
  int64_t nodes[kPortion + kAhead];  // also of the edges that follow
  int64_t edges[kPortion];
  uint32_t words[kPortion];
};

GRAPHSHARD_INLINE uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

template <typename T>
GRAPHSHARD_INLINE bool reads_edges(const Attention<T>& a) {
  return a.edge != nullptr || a.edge_terms != nullptr || a.factor != nullptr ||
         a.mask.threshold != 0;
}

template <typename I>
GRAPHSHARD_INLINE void load_nodes(const I* indices, int64_t size, Portion& portion) {
  for (int64_t k = 0; k < size; ++k) portion.nodes[k] = indices[k];
}

template <typename T>
GRAPHSHARD_INLINE void load_portion(const Attention<T>& a, const EdgeGroups& edges, int64_t begin,
                                    int64_t end, Portion& portion) {
  portion.count = static_cast<int>(std::min<int64_t>(end - begin, kPortion));
  portion.padded = (portion.count + kLanes - 1) / kLanes * kLanes;
  const int64_t loaded = std::min<int64_t>(portion.count + kAhead, edges.num_edges - begin);
  if (edges.has_wide_ids) {
    load_nodes(static_cast<const int64_t*>(edges.indices) + begin, loaded, portion);
  } else {
    load_nodes(static_cast<const int32_t*>(edges.indices) + begin, loaded, portion);
  }
  for (int64_t k = loaded; k < portion.count + kAhead; ++k) {
    portion.nodes[k] = portion.nodes[loaded - 1];
  }
  if (!reads_edges(a)) return;
  for (int k = 0; k < portion.count; ++k) portion.edges[k] = edges.edge_id(begin + k);
  if (a.mask.threshold == 0) return;
  for (int k = 0; k < portion.count; ++k) {
    uint32_t key;
    if (a.mask.keys != nullptr) {
      key = static_cast<uint32_t>(a.mask.keys[portion.edges[k]]);
    } else {
      const uint64_t id = static_cast<uint64_t>(portion.edges[k]);
      key = static_cast<uint32_t>(id) ^ mixed(static_cast<uint32_t>(id >> 32));
    }
    portion.words[k] = mixed(key + a.mask.edge_seed);
  }
}

// m * c of each edge for one head; call only where there is a mask or a factor.
template <typename T>
GRAPHSHARD_INLINE void load_multipliers(const Attention<T>& a, const Portion& portion, int64_t head,
                                        bool with_factor, wide_t<T>* multiplier) {
  using V = wide_t<T>;
  const V kept = a.mask.threshold == 0 ? V{1} : static_cast<V>(a.mask.kept);
  for (int k = 0; k < portion.count; ++k) multiplier[k] = kept;
  if (a.mask.threshold != 0) {
    const uint32_t word = mixed(a.mask.head_seed + static_cast<uint32_t>(head) * 0x9e3779b9u);
    const uint64_t threshold = a.mask.threshold;
    for (int k = 0; k < portion.count; ++k) {
      if (mixed(portion.words[k] ^ word) < threshold) multiplier[k] = 0;
    }
  }
  if (with_factor && a.factor != nullptr) {
    const V* factor = a.factor + (a.factor_width == 1 ? 0 : head);
    for (int k = 0; k < portion.count; ++k) {
      multiplier[k] *= factor[portion.edges[k] * a.factor_width];
    }
  }
}

// Calls function(n) where n is `dim`, known to the compiler if it is a frequent one, else 0.
template <typename Function>
GRAPHSHARD_INLINE void with_dim(int64_t dim, const Function& function) {
  if (dim == 32) return function(std::integral_constant<int, 32>{});
  if (dim == 64) return function(std::integral_constant<int, 64>{});
  if (dim == 16) return function(std::integral_constant<int, 16>{});
  if (dim == 8) return function(std::integral_constant<int, 8>{});
  function(std::integral_constant<int, 0>{});
}

template <typename T>
GRAPHSHARD_INLINE void prefetch_columns(const T* columns, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t j = 0; j < dim; j += kLine) GRAPHSHARD_PREFETCH(columns + j);
}

// out[k] = <fixed, columns of the k-th node>.
template <typename T>
GRAPHSHARD_INLINE void dot_columns(const wide_t<T>* fixed, const T* columns, int64_t width,
                                   int64_t dim, const Portion& portion, bool prefetch,
                                   wide_t<T>* out) {
  with_dim(dim, [&](auto known) GRAPHSHARD_INLINE_LAMBDA {
    const int64_t size = known > 0 ? known : dim;
    for (int k = 0; k < portion.count; ++k) {
      if (prefetch) prefetch_columns(columns + portion.nodes[k + kAhead] * width, size);
      const T* row = columns + portion.nodes[k] * width;
      wide_t<T> total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < size; ++j) total += fixed[j] * widen(row[j]);
      out[k] = total;
    }
  });
}

// sum[j] += sum over k of weight[k] * columns of the k-th node[j].
template <typename T>
GRAPHSHARD_INLINE void add_columns(const wide_t<T>* weight, const T* columns, int64_t width,
                                   int64_t dim, const Portion& portion, bool prefetch,
                                   wide_t<T>* sum) {
  in_blocks<64, 32, 16, 8, 4, 1>(dim, [&](auto size, int64_t first) GRAPHSHARD_INLINE_LAMBDA {
    wide_t<T> sums[size];
    for (int j = 0; j < size; ++j) sums[j] = sum[first + j];
    for (int k = 0; k < portion.count; ++k) {
      const T* row = columns + portion.nodes[k] * width + first;
      if (prefetch) {
        const T* later = columns + portion.nodes[k + kAhead] * width + first;
        prefetch_columns(later, size);
      }
#pragma omp simd
      for (int j = 0; j < size; ++j) sums[j] += weight[k] * widen(row[j]);
    }
    for (int j = 0; j < size; ++j) sum[first + j] = sums[j];
  });
}

template <typename V>
GRAPHSHARD_INLINE V leaky_relu(V z, V slope) {
  return z > 0 ? z : slope * z;
}

// One end of the edges as a walk sees it: the end that varies within a row.
template <typename T>
struct Varying {
  const T* rows;           // [nodes, heads * score_dim]
  const wide_t<T>* terms;  // a number per node and head
  int64_t terms_per_node;  // distance between nodes
  int64_t terms_per_head;  // distance between heads
};

// How each kind of score is computed: z[k] for the edges of a portion, from what the fixed end of
// the edges has (a number per head, or a row) and the varying one. `z` of additive scores still
// has to go through the leaky ReLU.
struct AdditiveScore {
  static constexpr Score kScore = Score::kAdditive;
  static constexpr bool kReadsRows = false;

  template <typename T>
  static GRAPHSHARD_INLINE void scores(const Attention<T>& a, const wide_t<T>* fixed,
                                       const Varying<T>& varying, const Portion& portion,
                                       int64_t head, wide_t<T>* z) {
    const wide_t<T>* terms = varying.terms + head * varying.terms_per_head;
    for (int k = 0; k < portion.count; ++k) {
      GRAPHSHARD_PREFETCH(terms + portion.nodes[k + kAhead] * varying.terms_per_node);
      z[k] = fixed[head] + terms[portion.nodes[k] * varying.terms_per_node];
    }
    if (a.edge_terms == nullptr) return;
    for (int k = 0; k < portion.count; ++k) {
      z[k] += a.edge_terms[portion.edges[k] * a.heads + head];
    }
  }
};

struct JointScore {
  static constexpr Score kScore = Score::kJoint;
  static constexpr bool kReadsRows = true;

  template <typename T>
  static GRAPHSHARD_INLINE void scores(const Attention<T>& a, const wide_t<T>* fixed,
                                       const Varying<T>& varying, const Portion& portion,
                                       int64_t head, wide_t<T>* z) {
    using V = wide_t<T>;
    const int64_t width = a.heads * a.score_dim;
    const int64_t first = head * a.score_dim;
    with_dim(a.score_dim, [&](auto known) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t size = known > 0 ? known : a.score_dim;
      const V* own = fixed + first;
      const V* vector = a.vector + first;
      for (int k = 0; k < portion.count; ++k) {
        const T* later = varying.rows + portion.nodes[k + kAhead] * width + first;
        prefetch_columns(later, size);
        const T* row = varying.rows + portion.nodes[k] * width + first;
        V total = 0;
        if (a.edge == nullptr) {
#pragma omp simd reduction(+ : total)
          for (int64_t j = 0; j < size; ++j) {
            total += vector[j] * leaky_relu(own[j] + widen(row[j]), a.slope);
          }
        } else {
          const T* edge = a.edge + portion.edges[k] * width + first;
#pragma omp simd reduction(+ : total)
          for (int64_t j = 0; j < size; ++j) {
            const V joined = own[j] + widen(row[j]) + widen(edge[j]);
            total += vector[j] * leaky_relu(joined, a.slope);
          }
        }
        z[k] = total;
      }
    });
  }
};

struct DotScore {
  static constexpr Score kScore = Score::kDot;
  static constexpr bool kReadsRows = true;

  template <typename T>
  static GRAPHSHARD_INLINE void scores(const Attention<T>& a, const wide_t<T>* fixed,
                                       const Varying<T>& varying, const Portion& portion,
                                       int64_t head, wide_t<T>* z) {
    const int64_t first = head * a.score_dim;
    dot_columns(fixed + first, varying.rows + first, a.heads * a.score_dim, a.score_dim, portion,
                true, z);
    for (int k = 0; k < portion.count; ++k) z[k] *= a.scale;
    if (a.edge_terms == nullptr) return;
    for (int k = 0; k < portion.count; ++k) {
      z[k] += a.edge_terms[portion.edges[k] * a.heads + head];
    }
  }
};

// A row in the type of sums: itself if that is its type, else a copy in `buffer`.
template <typename T>
GRAPHSHARD_INLINE const wide_t<T>* widened(const T* row, int64_t width, wide_t<T>* buffer) {
  if constexpr (std::is_same_v<T, wide_t<T>>) {
    return row;
  } else {
    for (int64_t j = 0; j < width; ++j) buffer[j] = widen(row[j]);
    return buffer;
  }
}

template <typename Function>
void with_score(Score score, const Function& function) {
  switch (score) {
    case Score::kAdditive:
      return function(AdditiveScore{});
    case Score::kJoint:
      return function(JointScore{});
    case Score::kDot:
      return function(DotScore{});
  }
}

// Spans of rows for a walk, the same for any number of threads, so that what a walk sums per span
// is too.
inline Schedule fixed_schedule(const EdgeGroups& edges, int64_t width) {
  constexpr int kThreads = 16;
  if (edges.has_wide_ids) {
    return make_schedule(static_cast<const int64_t*>(edges.indptr), edges.num_rows, width,
                         kThreads);
  }
  return make_schedule(static_cast<const int32_t*>(edges.indptr), edges.num_rows, width, kThreads);
}

}  // namespace graphshard
