// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <type_traits>

#include "attention/rows.h"
#include "simd/dispatch.h"
#include "simd/elementwise.h"

namespace graphshard {
namespace {

template <typename T>
inline constexpr int kWidest = std::min(32, kWidestRegister<T>);

// What scores are made of, and their gradients.
template <typename T>
struct Joint {
  const RunRows<T>& run;
  const EdgeRows<T>& edges;
  const wide_t<T>* fixed;
  const wide_t<T>* vector;
  wide_t<T> slope;
  const wide_t<T>* slope_grad;
};

// Calls block(size, first column, head) for all columns of all heads.
template <typename T, typename Block>
GRAPHSHARD_INLINE void in_columns(const RunRows<T>& run, const Block& block) {
  constexpr int kMost = std::is_same_v<T, double> ? 8 : 32;
  for (int64_t h = 0; h < run.rows.heads; ++h) {
    in_blocks<kMost, std::min(kMost, 16), 8, 4, 1>(
        run.rows.dim, [&](auto size, int64_t at)
                          GRAPHSHARD_INLINE_LAMBDA { block(size, h * run.rows.dim + at, h); });
  }
}

// kEdge: edges have features.
template <bool kEdge, int kSize, typename T>
GRAPHSHARD_INLINE void add_src_columns(const Joint<T>& joint, int64_t first, int64_t head,
                                       wide_t<T>* sum) {
  using V = wide_t<T>;
  const RunRows<T>& run = joint.run;
  const V* fixed = joint.fixed + first;
  V sums[kSize];
  for (int j = 0; j < kSize; ++j) sums[j] = 0;
  for (int k = run.first; k < run.last; ++k) {
    const T* row = run[k] + first;
    const T* edge =
        kEdge ? joint.edges.data + (*joint.edges.ids)[k] * run.rows.width() + first : nullptr;
    const V high = joint.slope_grad[k * run.rows.heads + head];
    const V low = high * joint.slope;
#pragma omp simd
    for (int j = 0; j < kSize; ++j) {
      V joined = fixed[j] + widen(row[j]);
      if constexpr (kEdge) joined += widen(edge[j]);
      sums[j] += joined > 0 ? high : low;
    }
  }
  for (int j = 0; j < kSize; ++j) sum[first + j] += sums[j] * joint.vector[first + j];
}

template <bool kEdge, int kSize, typename T>
GRAPHSHARD_INLINE void add_dst_columns(const Joint<T>& joint, int64_t first, int64_t head,
                                       wide_t<T>* sum, wide_t<T>* vector_sum, T* edge_grad) {
  using V = wide_t<T>;
  const RunRows<T>& run = joint.run;
  const V* fixed = joint.fixed + first;
  const V* coefficient = joint.vector + first;
  V sums[kSize];
  V vector_sums[kSize];
  for (int j = 0; j < kSize; ++j) sums[j] = vector_sums[j] = 0;
  for (int k = run.first; k < run.last; ++k) {
    const T* row = run[k] + first;
    const int64_t edge_at = kEdge ? (*joint.edges.ids)[k] * run.rows.width() + first : 0;
    const T* edge = kEdge ? joint.edges.data + edge_at : nullptr;
    const V high = joint.slope_grad[k * run.rows.heads + head];
    const V low = high * joint.slope;
#pragma omp simd
    for (int j = 0; j < kSize; ++j) {
      V joined = fixed[j] + widen(row[j]);
      if constexpr (kEdge) joined += widen(edge[j]);
      const V passed = joined > 0 ? high : low;
      sums[j] += passed;
      vector_sums[j] += passed * joined;
    }
    if constexpr (kEdge) {
      if (edge_grad == nullptr) continue;
      T* to = edge_grad + edge_at;
      for (int j = 0; j < kSize; ++j) {
        const V joined = fixed[j] + widen(row[j]) + widen(edge[j]);
        narrow((joined > 0 ? high : low) * coefficient[j], to[j]);
      }
    }
  }
  for (int j = 0; j < kSize; ++j) {
    sum[first + j] += sums[j] * coefficient[j];
    vector_sum[first + j] += vector_sums[j];
  }
}

}  // namespace

template <typename T>
void widen_row(const T* row, int64_t width, wide_t<T>* to) {
  dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    for (int64_t j = 0; j < width; ++j) to[j] = widen(row[j]);
  });
}

template <typename T>
void narrow_row(const wide_t<T>* sums, int64_t width, T* to) {
  dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    for (int64_t j = 0; j < width; ++j) narrow(sums[j], to[j]);
  });
}

template <typename T>
void add_joint_src(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                   const wide_t<T>* vector, wide_t<T> slope, const wide_t<T>* slope_grad,
                   wide_t<T>* sum) {
  dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    const Joint<T> joint{run, edges, fixed, vector, slope, slope_grad};
    in_columns(run, [&](auto size, int64_t first, int64_t head) GRAPHSHARD_INLINE_LAMBDA {
      if (edges.data == nullptr) {
        add_src_columns<false, size>(joint, first, head, sum);
      } else {
        add_src_columns<true, size>(joint, first, head, sum);
      }
    });
  });
}

template <typename T>
void add_joint_dst(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                   const wide_t<T>* vector, wide_t<T> slope, const wide_t<T>* slope_grad,
                   wide_t<T>* sum, wide_t<T>* vector_sum, T* edge_grad) {
  dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
    const Joint<T> joint{run, edges, fixed, vector, slope, slope_grad};
    in_columns(run, [&](auto size, int64_t first, int64_t head) GRAPHSHARD_INLINE_LAMBDA {
      if (edges.data == nullptr) {
        add_dst_columns<false, size>(joint, first, head, sum, vector_sum, edge_grad);
      } else {
        add_dst_columns<true, size>(joint, first, head, sum, vector_sum, edge_grad);
      }
    });
  });
}

#define INSTANTIATE(T)                                                                    \
  template void widen_row(const T*, int64_t, wide_t<T>*);                                 \
  template void narrow_row(const wide_t<T>*, int64_t, T*);                                \
  template void add_joint_src(const RunRows<T>&, const EdgeRows<T>&, const wide_t<T>*,    \
                              const wide_t<T>*, wide_t<T>, const wide_t<T>*, wide_t<T>*); \
  template void add_joint_dst(const RunRows<T>&, const EdgeRows<T>&, const wide_t<T>*,    \
                              const wide_t<T>*, wide_t<T>, const wide_t<T>*, wide_t<T>*,  \
                              wide_t<T>*, T*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
