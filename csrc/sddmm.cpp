// SPDX-License-Identifier: Apache-2.0

#include "sddmm.h"

#include <algorithm>

#include "elementwise.h"
#include "parallel.h"

namespace graphshard {
namespace {

struct Edge {
  int64_t src;
  int64_t dst;
  int64_t id;

  GRAPHSHARD_INLINE int64_t at(Target target) const {
    return target == Target::kSrc ? src : target == Target::kDst ? dst : id;
  }
};

template <typename L>
struct Elementwise {
  static GRAPHSHARD_INLINE int64_t width(const RowLoop& loop) { return loop.outer * loop.inner; }

  template <typename T>
  static GRAPHSHARD_INLINE void run(const RowLoop& loop, const T* lhs, const T* rhs, T* out) {
    for (int64_t o = 0; o < loop.outer; ++o) {
      const T* left = lhs + loop.lhs_offsets[o];
      const T* right = rhs + loop.rhs_offsets[o];
      T* to = out + o * loop.inner;
      in_blocks<16, 4, 1>(loop.inner, [&](auto size, int64_t first) GRAPHSHARD_INLINE_LAMBDA {
        L::run(loop, left + first * L::lhs_step(loop), right + first * L::rhs_step(loop), size,
               [&](int64_t j, wide_t<T> value) { narrow(value, to[first + j]); });
      });
    }
  }
};

struct Dot {
  static GRAPHSHARD_INLINE int64_t width(const RowLoop& loop) { return loop.outer; }

  template <typename T>
  static GRAPHSHARD_INLINE void run(const RowLoop& loop, const T* lhs, const T* rhs, T* out) {
    for (int64_t o = 0; o < loop.outer; ++o) {
      const T* left = lhs + loop.lhs_offsets[o];
      const T* right = rhs + loop.rhs_offsets[o];
      wide_t<T> total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < loop.inner; ++j) total += widen(left[j]) * widen(right[j]);
      narrow(total, out[o]);
    }
  }
};

// The edges at positions [begin, end).
template <typename Kernel, typename T, typename I>
GRAPHSHARD_CLONES void edges(const SddmmArguments<T, I>& a, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const bool grouped = a.csc.indptr != nullptr;
  const int64_t width = Kernel::width(a.loop);
  const I* sources = grouped ? a.csc.indices : a.src;
  int64_t row = 0;
  if (grouped) {  // the destination to which the first position belongs
    const I* found = std::upper_bound(a.csc.indptr, a.csc.indptr + a.csc.num_rows, I(begin));
    row = found - a.csc.indptr - 1;
  }
  for (int64_t k = begin; k < end; ++k) {
    if (const int64_t next = k + kPrefetchAhead; next < end) {
      if (a.lhs_target == Target::kSrc) {
        const T* ahead = a.lhs[sources[next]];
        for (int64_t j = 0; j < a.lhs.width; j += kLine) GRAPHSHARD_PREFETCH(ahead + j);
      }
      if (a.rhs_target == Target::kSrc) {
        const T* ahead = a.rhs[sources[next]];
        for (int64_t j = 0; j < a.rhs.width; j += kLine) GRAPHSHARD_PREFETCH(ahead + j);
      }
    }
    Edge edge{static_cast<int64_t>(sources[k]), 0, k};
    if (grouped) {
      while (k >= static_cast<int64_t>(a.csc.indptr[row + 1])) ++row;
      edge.dst = row;
      edge.id = a.csc.edge_id(k);
    } else {
      edge.dst = a.dst[k];
    }
    Kernel::run(a.loop, a.lhs[edge.at(a.lhs_target)], a.rhs[edge.at(a.rhs_target)],
                a.out + edge.id * width);
  }
}

template <typename Kernel, typename T, typename I>
void run(const SddmmArguments<T, I>& a, int num_threads) {
  const int64_t row_work = std::max<int64_t>(a.loop.outer * a.loop.inner, 1);
  const int64_t parts = num_parts(a.num_edges, 16384 / row_work, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    edges<Kernel>(a, part_begin(a.num_edges, part, parts),
                  part_begin(a.num_edges, part + 1, parts));
  });
}

}  // namespace

template <typename T, typename I>
void sddmm(const SddmmArguments<T, I>& arguments, Op op, int num_threads) {
  if (op == Op::kDot) return run<Dot>(arguments, num_threads);
  with_binary_loop(op, arguments.loop,
                   [&](auto loop) { run<Elementwise<decltype(loop)>>(arguments, num_threads); });
}

template void sddmm(const SddmmArguments<float, int32_t>&, Op, int);
template void sddmm(const SddmmArguments<float, int64_t>&, Op, int);
template void sddmm(const SddmmArguments<double, int32_t>&, Op, int);
template void sddmm(const SddmmArguments<double, int64_t>&, Op, int);
template void sddmm(const SddmmArguments<bfloat16, int32_t>&, Op, int);
template void sddmm(const SddmmArguments<bfloat16, int64_t>&, Op, int);

}  // namespace graphshard
