// SPDX-License-Identifier: Apache-2.0

#include "attention/finish.h"

#include <algorithm>

#include "runtime/parallel.h"

namespace graphshard {
namespace {

template <typename T>
int64_t parts_of(const AttentionFinish<T>& f, int num_threads) {
  return num_parts(f.num_rows, 65536 / std::max<int64_t>(f.heads * f.dim, 1), num_threads);
}

// `from` and `out` may be the same memory, entry by entry.
template <bool kRelu, typename T, typename S>
GRAPHSHARD_INLINE void finish_entries(const S* from, wide_t<T> scale, const wide_t<T>* bias,
                                      int64_t dim, T* out) {
  const auto finish = [&](int64_t j, wide_t<T> added) GRAPHSHARD_INLINE_LAMBDA {
    const wide_t<T> value = widen(from[j]) * scale + added;
    narrow(kRelu && value < 0 ? 0 : value, out[j]);
  };
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < dim; ++j) finish(j, 0);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < dim; ++j) finish(j, bias[j]);
  }
}

template <typename T, typename S>
GRAPHSHARD_CLONES void finish_rows(const AttentionFinish<T>& f, const S* from, int64_t begin,
                                   int64_t end, T* out) {
  using V = wide_t<T>;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < f.heads; ++h) {
      const int64_t entry = row * f.heads + h;
      const V total = f.total == nullptr ? 1 : f.total[entry];
      const V scale = total == 0 ? 0 : 1 / total;
      const V* bias = f.bias == nullptr ? nullptr : f.bias + h * f.dim;
      if (f.relu) {
        finish_entries<true>(from + entry * f.dim, scale, bias, f.dim, out + entry * f.dim);
      } else {
        finish_entries<false>(from + entry * f.dim, scale, bias, f.dim, out + entry * f.dim);
      }
    }
  }
}

template <typename T, typename S>
void run_finish(const AttentionFinish<T>& f, const S* from, T* out, int num_threads) {
  const int64_t parts = parts_of(f, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    finish_rows(f, from, part_begin(f.num_rows, part, parts),
                part_begin(f.num_rows, part + 1, parts), out);
  });
}

// <g, out - bias> of one head of one row.
template <bool kRelu, bool kBias, typename T>
GRAPHSHARD_INLINE wide_t<T> delta_of(const T* grad, const T* out, const wide_t<T>* bias,
                                     int64_t dim, T* passed) {
  using V = wide_t<T>;
  V sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < dim; ++j) {
    const V value = widen(out[j]);
    V g = widen(grad[j]);
    if (kRelu) {
      g = value <= 0 ? 0 : g;  // as torch has it, also for NaN
      narrow(g, passed[j]);
    }
    sum += g * (kBias ? value - bias[j] : value);
  }
  return sum;
}

template <bool kRelu, bool kBias, typename T>
GRAPHSHARD_INLINE void delta_entries(const AttentionFinish<T>& f, const T* grad, const T* out,
                                     int64_t begin, int64_t end, T* passed, wide_t<T>* delta) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t h = 0; h < f.heads; ++h) {
      const int64_t entry = row * f.heads + h;
      const int64_t at = entry * f.dim;
      delta[entry] =
          delta_of<kRelu, kBias>(grad + at, out + at, kBias ? f.bias + h * f.dim : nullptr, f.dim,
                                 kRelu ? passed + at : nullptr);
    }
  }
}

template <typename T>
GRAPHSHARD_CLONES void delta_rows(const AttentionFinish<T>& f, const T* grad, const T* out,
                                  int64_t begin, int64_t end, T* passed, wide_t<T>* delta) {
  if (f.relu) {
    if (f.bias == nullptr) {
      delta_entries<true, false>(f, grad, out, begin, end, passed, delta);
    } else {
      delta_entries<true, true>(f, grad, out, begin, end, passed, delta);
    }
  } else if (f.bias == nullptr) {
    delta_entries<false, false>(f, grad, out, begin, end, passed, delta);
  } else {
    delta_entries<false, true>(f, grad, out, begin, end, passed, delta);
  }
}

}  // namespace

template <typename T>
void attention_finish(const AttentionFinish<T>& finish, const wide_t<T>* from, T* out,
                      int num_threads) {
  run_finish(finish, from, out, num_threads);
}

template <typename T>
void attention_finish_again(const AttentionFinish<T>& finish, T* out, int num_threads) {
  run_finish(finish, static_cast<const T*>(out), out, num_threads);
}

template <typename T>
void attention_delta(const AttentionFinish<T>& finish, const T* grad, const T* out, T* passed,
                     wide_t<T>* delta, int num_threads) {
  const int64_t parts = parts_of(finish, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    delta_rows(finish, grad, out, part_begin(finish.num_rows, part, parts),
               part_begin(finish.num_rows, part + 1, parts), passed, delta);
  });
}

#define INSTANTIATE(T)                                                                  \
  template void attention_finish(const AttentionFinish<T>&, const wide_t<T>*, T*, int); \
  template void attention_finish_again(const AttentionFinish<T>&, T*, int);             \
  template void attention_delta(const AttentionFinish<T>&, const T*, const T*, T*, wide_t<T>*, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
