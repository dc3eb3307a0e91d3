// SPDX-License-Identifier: Apache-2.0

#include "sddmm.h"

#include <algorithm>

#include "elementwise.h"
#include "parallel.h"

namespace graphshard {
namespace {

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

// Where an operand's row is found: in an array of node ids, or else by the edge's id or its row in
// the compressed format.
template <typename T, typename I>
struct Operand {
  Rows<T> rows;
  const I* nodes;
  bool by_edge;

  GRAPHSHARD_INLINE const T* at(int64_t position, int64_t row, int64_t id) const {
    return rows[nodes != nullptr ? static_cast<int64_t>(nodes[position]) : by_edge ? id : row];
  }

  GRAPHSHARD_INLINE void prefetch(int64_t position) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (nodes == nullptr) return;
    const T* row = rows[nodes[position]];
    for (int64_t j = 0; j < rows.width; j += kLine) GRAPHSHARD_PREFETCH(row + j);
  }
};

template <typename T, typename I>
GRAPHSHARD_INLINE Operand<T, I> operand_of(const SddmmArguments<T, I>& a, const Rows<T>& rows,
                                           Target target) {
  const bool grouped = a.csc.indptr != nullptr;
  if (target == Target::kSrc) return {rows, grouped ? a.csc.indices : a.src, false};
  if (target == Target::kDst) return {rows, grouped ? nullptr : a.dst, false};
  return {rows, nullptr, true};
}

// The edges at positions [begin, end).
template <typename Kernel, typename T, typename I>
GRAPHSHARD_CLONES void edges(const SddmmArguments<T, I>& a, int64_t begin, int64_t end) {
  const bool grouped = a.csc.indptr != nullptr;
  const int64_t width = Kernel::width(a.loop);
  const Operand<T, I> lhs = operand_of(a, a.lhs, a.lhs_target);
  const Operand<T, I> rhs = operand_of(a, a.rhs, a.rhs_target);
  int64_t row = 0;
  if (grouped) {  // the destination to which the first position belongs
    const I* found = std::upper_bound(a.csc.indptr, a.csc.indptr + a.csc.num_rows, I(begin));
    row = found - a.csc.indptr - 1;
  }
  for (int64_t k = begin; k < end; ++k) {
    const int64_t ahead = std::min(k + kPrefetchAhead, end - 1);
    lhs.prefetch(ahead);
    rhs.prefetch(ahead);
    int64_t id = k;
    if (grouped) {
      while (k >= static_cast<int64_t>(a.csc.indptr[row + 1])) ++row;
      id = a.csc.edge_id(k);
    }
    Kernel::run(a.loop, lhs.at(k, row, id), rhs.at(k, row, id), a.out + id * width);
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
