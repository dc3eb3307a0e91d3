// SPDX-License-Identifier: Apache-2.0

#include "attention/node_steps.h"

#include <algorithm>
#include <memory>

#include "runtime/parallel.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

template <typename T>
inline constexpr int kWidest = std::min(32, kWidestRegister<T>);

template <typename T>
GRAPHSHARD_INLINE void products_of_rows(const HeadProducts<T>& in, int64_t begin, int64_t end,
                                        wide_t<T>* first, wide_t<T>* second) {
  using V = wide_t<T>;
  const int64_t width = in.heads * in.dim;
  for (int64_t n = begin; n < end; ++n) {
    for (int64_t h = 0; h < in.heads; ++h) {
      const T* row = in.rows + n * width + h * in.dim;
      const V* one = in.vectors + h * in.dim;
      const V* two = one + width;
      V a = 0;
      V b = 0;
#pragma omp simd reduction(+ : a, b)
      for (int64_t j = 0; j < in.dim; ++j) {
        const V value = widen(row[j]);
        a += value * one[j];
        b += value * two[j];
      }
      first[n * in.heads + h] = a;
      second[n * in.heads + h] = b;
    }
  }
}

template <typename T>
GRAPHSHARD_INLINE void backward_of_rows(const HeadProducts<T>& in, const T* passed,
                                        const wide_t<T>* first_grad, const wide_t<T>* second_grad,
                                        int64_t begin, int64_t end, T* rows_grad,
                                        wide_t<T>* __restrict vectors_grad) {
  using V = wide_t<T>;
  const int64_t width = in.heads * in.dim;
  for (int64_t n = begin; n < end; ++n) {
    for (int64_t h = 0; h < in.heads; ++h) {
      const V a = first_grad[n * in.heads + h];
      const V b = second_grad[n * in.heads + h];
      const int64_t at = h * in.dim;
      const T* row = in.rows + n * width + at;
      T* to = rows_grad + n * width + at;
      const V* one = in.vectors + at;
      const V* two = one + width;
      V* one_grad = vectors_grad + at;
      V* two_grad = one_grad + width;
      if (passed == nullptr) {
#pragma omp simd
        for (int64_t j = 0; j < in.dim; ++j) narrow(a * one[j] + b * two[j], to[j]);
      } else {
        const T* from = passed + n * width + at;
#pragma omp simd
        for (int64_t j = 0; j < in.dim; ++j) {
          narrow(widen(from[j]) + (a * one[j] + b * two[j]), to[j]);
        }
      }
#pragma omp simd
      for (int64_t j = 0; j < in.dim; ++j) {
        const V value = widen(row[j]);
        one_grad[j] += a * value;
        two_grad[j] += b * value;
      }
    }
  }
}

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
GRAPHSHARD_INLINE void finish_rows(const AttentionFinish<T>& f, const S* from, int64_t begin,
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
    dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
      finish_rows(f, from, part_begin(f.num_rows, part, parts),
                  part_begin(f.num_rows, part + 1, parts), out);
    });
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
GRAPHSHARD_INLINE void delta_rows(const AttentionFinish<T>& f, const T* grad, const T* out,
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
void head_products(const HeadProducts<T>& input, wide_t<T>* first, wide_t<T>* second,
                   int num_threads) {
  const int64_t width = std::max<int64_t>(input.heads * input.dim, 1);
  const int64_t parts = num_parts(input.num_rows, 65536 / width, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
      products_of_rows(input, part_begin(input.num_rows, part, parts),
                       part_begin(input.num_rows, part + 1, parts), first, second);
    });
  });
}

// Parts are the same for any number of threads, so that sums over rows are too.
template <typename T>
void head_products_backward(const HeadProducts<T>& input, const T* passed,
                            const wide_t<T>* first_grad, const wide_t<T>* second_grad, T* rows_grad,
                            wide_t<T>* vectors_grad, int num_threads) {
  using V = wide_t<T>;
  constexpr int kThreads = 16;
  const int64_t size = 2 * input.heads * input.dim;
  const int64_t parts = num_parts(input.num_rows, 65536 / std::max<int64_t>(size, 1), kThreads);
  const auto sums = std::make_unique<V[]>(parts * size);
  run_tasks(parts, num_threads, [&](int64_t part) {
    dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
      backward_of_rows(
          input, passed, first_grad, second_grad, part_begin(input.num_rows, part, parts),
          part_begin(input.num_rows, part + 1, parts), rows_grad, sums.get() + part * size);
    });
  });
  for (int64_t j = 0; j < size; ++j) vectors_grad[j] = 0;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t j = 0; j < size; ++j) vectors_grad[j] += sums[part * size + j];
  }
}

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
    dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
      delta_rows(finish, grad, out, part_begin(finish.num_rows, part, parts),
                 part_begin(finish.num_rows, part + 1, parts), passed, delta);
    });
  });
}

#define INSTANTIATE(T)                                                                     \
  template void head_products(const HeadProducts<T>&, wide_t<T>*, wide_t<T>*, int);        \
  template void head_products_backward(const HeadProducts<T>&, const T*, const wide_t<T>*, \
                                       const wide_t<T>*, T*, wide_t<T>*, int);             \
  template void attention_finish(const AttentionFinish<T>&, const wide_t<T>*, T*, int);    \
  template void attention_finish_again(const AttentionFinish<T>&, T*, int);                \
  template void attention_delta(const AttentionFinish<T>&, const T*, const T*, T*, wide_t<T>*, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
