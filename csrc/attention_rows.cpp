// SPDX-License-Identifier: Apache-2.0

#include "attention_rows.h"

#include <type_traits>

#include "elementwise.h"

namespace graphshard {
namespace {

template <typename T>
GRAPHSHARD_INLINE void prefetch_row(const RunRows<T>& run, int64_t k, int64_t bytes) {
  const char* row = reinterpret_cast<const char*>(run.ahead_of(k));
  for (int64_t at = 0; at < bytes; at += 64) GRAPHSHARD_PREFETCH(row + at);
}

template <typename T>
GRAPHSHARD_INLINE int64_t bytes_of(const HeadRows<T>& rows) {
  return rows.heads * rows.dim * static_cast<int64_t>(sizeof(T));
}

// Sums of kColumns columns of kHeads heads, in registers while the edges pass.
template <int kHeads, int kColumns, typename T>
GRAPHSHARD_INLINE void add_block(const RunRows<T>& run, bool prefetch, int64_t head, int64_t column,
                                 const wide_t<T>* weight, wide_t<T>* sum) {
  using V = wide_t<T>;
  const int64_t dim = run.rows.dim;
  const int64_t bytes = prefetch ? bytes_of(run.rows) : 0;
  const int64_t first = head * dim + column;
  V sums[kHeads * kColumns];
  for (int h = 0; h < kHeads; ++h) {
    for (int j = 0; j < kColumns; ++j) sums[h * kColumns + j] = sum[first + h * dim + j];
  }
  for (int k = 0; k < run.count; ++k) {
    prefetch_row(run, k, bytes);
    const T* row = run[k] + first;
    const V* weights = weight + k * run.rows.heads + head;
    for (int h = 0; h < kHeads; ++h) {
      const V by = weights[h];
#pragma omp simd
      for (int j = 0; j < kColumns; ++j) sums[h * kColumns + j] += by * widen(row[h * dim + j]);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int j = 0; j < kColumns; ++j) sum[first + h * dim + j] = sums[h * kColumns + j];
  }
}

template <typename T>
GRAPHSHARD_HOT_CLONES void add_clones(const RunRows<T>& run, const wide_t<T>* weight,
                                      wide_t<T>* sum) {
  bool prefetch = run.prefetch;
  in_blocks<4, 1>(run.rows.heads, [&](auto heads, int64_t head) GRAPHSHARD_INLINE_LAMBDA {
    const auto block = [&](auto columns, int64_t column) GRAPHSHARD_INLINE_LAMBDA {
      add_block<heads, columns>(run, prefetch, head, column, weight, sum);
      prefetch = false;
    };
    if constexpr (heads == 1) {
      in_blocks<128, 32, 16, 8, 4, 1>(run.rows.dim, block);
    } else {
      in_blocks<32, 16, 8, 4, 1>(run.rows.dim, block);
    }
  });
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

// Sum of term(j) over `dim` columns from `first`. Lengths are constants, so that what is left over
// after whole vectors is not summed up column by column.
template <int kDim, typename V, typename Term>
GRAPHSHARD_INLINE V sum_columns(int64_t first, int64_t dim, const Term& term) {
  if constexpr (kDim > 0) {
    V total = 0;
#pragma omp simd reduction(+ : total)
    for (int j = 0; j < kDim; ++j) total += term(first + j);
    return total;
  } else {
    V total = 0;
    in_blocks<32, 8, 1>(dim, [&](auto size, int64_t at) GRAPHSHARD_INLINE_LAMBDA {
      total += sum_columns<size, V>(first + at, size, term);
    });
    return total;
  }
}

// out[k, h] = sum over the columns j of head h of term(h * dim + j, row k, k).
template <typename T, typename Term>
GRAPHSHARD_INLINE void reduce_rows(const RunRows<T>& run, wide_t<T>* out, const Term& term) {
  using V = wide_t<T>;
  const int64_t heads = run.rows.heads;
  const int64_t dim = run.rows.dim;
  with_dim(dim, [&](auto known) GRAPHSHARD_INLINE_LAMBDA {
    bool prefetch = run.prefetch;
    in_blocks<4, 1>(heads, [&](auto block, int64_t head) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t bytes = prefetch ? bytes_of(run.rows) : 0;
      prefetch = false;
      for (int k = 0; k < run.count; ++k) {
        prefetch_row(run, k, bytes);
        const T* row = run[k];
        V totals[block];
        for (int h = 0; h < block; ++h) {
          totals[h] = sum_columns<known, V>(
              (head + h) * dim, dim,
              [&](int64_t j) GRAPHSHARD_INLINE_LAMBDA { return term(j, row, k); });
        }
        for (int h = 0; h < block; ++h) out[k * heads + head + h] = totals[h];
      }
    });
  });
}

template <typename T>
GRAPHSHARD_HOT_CLONES void dot_clones(const RunRows<T>& run, const wide_t<T>* fixed,
                                      wide_t<T>* out) {
  reduce_rows(run, out, [&](int64_t j, const T* row, int) GRAPHSHARD_INLINE_LAMBDA {
    return fixed[j] * widen(row[j]);
  });
}

template <typename T>
GRAPHSHARD_HOT_CLONES void joint_clones(const RunRows<T>& run, const EdgeRows<T>& edges,
                                        const wide_t<T>* fixed, const wide_t<T>* vector,
                                        wide_t<T> slope, wide_t<T>* out) {
  if (edges.data == nullptr) {
    reduce_rows(run, out, [&](int64_t j, const T* row, int) GRAPHSHARD_INLINE_LAMBDA {
      return vector[j] * leaky_relu(fixed[j] + widen(row[j]), slope);
    });
    return;
  }
  reduce_rows(run, out, [&](int64_t j, const T* row, int k) GRAPHSHARD_INLINE_LAMBDA {
    const T* edge = edges.data + (*edges.ids)[k] * run.rows.width;
    return vector[j] * leaky_relu(fixed[j] + widen(row[j]) + widen(edge[j]), slope);
  });
}

}  // namespace

template <typename T>
void dot_rows(const RunRows<T>& run, const wide_t<T>* fixed, wide_t<T>* out) {
  dot_clones(run, fixed, out);
}

template <typename T>
void add_rows(const RunRows<T>& run, const wide_t<T>* weight, wide_t<T>* sum) {
  add_clones(run, weight, sum);
}

template <typename T>
void joint_rows(const RunRows<T>& run, const EdgeRows<T>& edges, const wide_t<T>* fixed,
                const wide_t<T>* vector, wide_t<T> slope, wide_t<T>* out) {
  joint_clones(run, edges, fixed, vector, slope, out);
}

#define INSTANTIATE(T)                                                                  \
  template void dot_rows(const RunRows<T>&, const wide_t<T>*, wide_t<T>*);              \
  template void add_rows(const RunRows<T>&, const wide_t<T>*, wide_t<T>*);              \
  template void joint_rows(const RunRows<T>&, const EdgeRows<T>&, const wide_t<T>*,     \
                           const wide_t<T>*, wide_t<T>, wide_t<T>*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
