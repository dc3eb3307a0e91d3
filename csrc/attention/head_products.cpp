// SPDX-License-Identifier: Apache-2.0

#include "attention/head_products.h"

#include <memory>

#include "runtime/parallel.h"

namespace graphshard {
namespace {

template <typename T>
GRAPHSHARD_CLONES void products_of_rows(const HeadProducts<T>& in, int64_t begin, int64_t end,
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
GRAPHSHARD_CLONES void backward_of_rows(const HeadProducts<T>& in, const T* passed,
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

}  // namespace

template <typename T>
void head_products(const HeadProducts<T>& input, wide_t<T>* first, wide_t<T>* second,
                   int num_threads) {
  const int64_t width = std::max<int64_t>(input.heads * input.dim, 1);
  const int64_t parts = num_parts(input.num_rows, 65536 / width, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    products_of_rows(input, part_begin(input.num_rows, part, parts),
                     part_begin(input.num_rows, part + 1, parts), first, second);
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
    backward_of_rows(
        input, passed, first_grad, second_grad, part_begin(input.num_rows, part, parts),
        part_begin(input.num_rows, part + 1, parts), rows_grad, sums.get() + part * size);
  });
  for (int64_t j = 0; j < size; ++j) vectors_grad[j] = 0;
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t j = 0; j < size; ++j) vectors_grad[j] += sums[part * size + j];
  }
}

#define INSTANTIATE(T)                                                                     \
  template void head_products(const HeadProducts<T>&, wide_t<T>*, wide_t<T>*, int);        \
  template void head_products_backward(const HeadProducts<T>&, const T*, const wide_t<T>*, \
                                       const wide_t<T>*, T*, wide_t<T>*, int);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
