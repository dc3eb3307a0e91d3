// SPDX-License-Identifier: Apache-2.0
// Edges are taken a chunk at a time: first the numbers of the rows that they read, which is all
// that depends on the format of the graph and the target of an operand; then the rows.

#include "edge/sddmm.h"

#include <algorithm>
#include <memory>

#include "runtime/parallel.h"
#include "simd/dispatch.h"
#include "simd/elementwise.h"

namespace graphshard {
namespace {

constexpr int64_t kEdgesPerChunk = 256;
constexpr int64_t kValuesPerBlock = 512;
constexpr int64_t kFillStep = 16;     // values of a destination are laid out so many at a time
constexpr int64_t kNarrowBytes = 32;  // rows of less are read without prefetching

template <typename T>
inline constexpr int kWidest = std::min(32, kWidestRegister<T>);

// An operand, and where the row of each position is found: in an array of ids, by the position
// itself (null ids), or by the destination in an array where each one's positions begin.
template <typename T>
struct Operand {
  Rows<T> rows;
  Ids ids;
  Ids indptr;
  const int64_t* offsets;
  int64_t step;

  GRAPHSHARD_INLINE void prefetch(int64_t position, int64_t end) const {
    if (ids && rows.width * static_cast<int64_t>(sizeof(T)) >= kNarrowBytes) {
      const int64_t ahead = std::min(position + kPrefetchAhead, end - 1);
      prefetch_bytes(rows[ids[ahead]], rows.width * sizeof(T));
    }
  }
};

template <typename T>
Operand<T> operand_of(const SddmmArguments<T>& a, bool left) {
  const Target target = left ? a.lhs_target : a.rhs_target;
  Operand<T> operand{left ? a.lhs : a.rhs, a.edges.eids, Ids(),
                     left ? a.loop.lhs_offsets : a.loop.rhs_offsets,
                     left ? a.loop.lhs_step : a.loop.rhs_step};
  if (target == Target::kSrc) operand.ids = a.edges.src;
  if (target == Target::kDst) operand.ids = a.edges.dst;
  if (target == Target::kDst && a.edges.indptr) operand.indptr = a.edges.indptr;  // and null ids
  return operand;
}

// Calls write(count, row) for each run of the positions [begin, end) that lie in one row; `row` is
// that of the position before `begin`, and becomes that of the last.
template <typename Write>
GRAPHSHARD_INLINE void for_each_run(Ids indptr, int64_t begin, int64_t end, int64_t& row,
                                    const Write& write) {
  for (int64_t k = begin; k < end;) {
    int64_t stop = indptr[row + 1];
    while (stop <= k) stop = indptr[++row + 1];
    stop = std::min(stop, end);
    write(stop - k, row);
    k = stop;
  }
}

// Writes the row of each position in [begin, end); `row` is that of the position before.
template <typename T>
GRAPHSHARD_INLINE void number_rows(const Operand<T>& operand, int64_t begin, int64_t end,
                                   int64_t& row, int64_t* numbers) {
  if (operand.ids) {
    for (int64_t k = begin; k < end; ++k) *numbers++ = operand.ids[k];
  } else if (operand.indptr) {
    for_each_run(operand.indptr, begin, end, row, [&](int64_t count, int64_t number) {
      numbers = std::fill_n(numbers, count, number);
    });
  } else {
    for (int64_t k = begin; k < end; ++k) *numbers++ = k;
  }
}

// Likewise, the rows themselves, of kWidth values. `to` has room for kFillStep values more, so that
// short runs of equal rows take one step, whatever their length.
template <int kWidth, typename T>
GRAPHSHARD_INLINE void read_rows(const Operand<T>& operand, int64_t begin, int64_t end,
                                 int64_t& row, wide_t<T>* to) {
  const T* data = operand.rows.data;
  const auto append = [&](const T* from) GRAPHSHARD_INLINE_LAMBDA {
    for (int j = 0; j < kWidth; ++j) to[j] = widen(from[j]);
    to += kWidth;
  };
  if (const int64_t* ids = operand.ids.wide(); ids != nullptr) {
    for (int64_t k = begin; k < end; ++k) append(data + ids[k] * kWidth);
  } else if (const int32_t* ids = operand.ids.narrow(); ids != nullptr) {
    for (int64_t k = begin; k < end; ++k) append(data + int64_t{ids[k]} * kWidth);
  } else if (operand.indptr) {
    for_each_run(operand.indptr, begin, end, row, [&](int64_t count, int64_t number) {
      wide_t<T> step[kFillStep];
      for (int j = 0; j < kFillStep; ++j) step[j] = widen(data[number * kWidth + j % kWidth]);
      for (int64_t i = 0; i < count * kWidth; i += kFillStep) {
        for (int j = 0; j < kFillStep; ++j) to[i + j] = step[j];
      }
      to += count * kWidth;
    });
  } else {
    for (int64_t j = begin * kWidth; j < end * kWidth; ++j) *to++ = widen(data[j]);
  }
}

// The last of `num_rows` rows that begins at `position` or before.
int64_t row_at(Ids indptr, int64_t num_rows, int64_t position) {
  int64_t low = 0;
  for (int64_t high = num_rows; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    (indptr[middle] <= position ? low : high) = middle;
  }
  return low;
}

// Lays the rows with these numbers side by side, as wide as a row of the result.
template <int kWidth, typename T>
GRAPHSHARD_INLINE void lay_out(const Rows<T>& rows, const int64_t* numbers, int64_t count,
                               wide_t<T>* to) {
  const int64_t width = kWidth > 0 ? kWidth : rows.width;
  for (int64_t i = 0; i < count; ++i, to += width) {
    const T* from = rows[numbers[i]];
    for (int64_t j = 0; j < width; ++j) to[j] = widen(from[j]);
  }
}

template <typename T>
GRAPHSHARD_INLINE void lay_out(const Operand<T>& operand, const RowLoop& loop,
                               const int64_t* numbers, int64_t count, wide_t<T>* to) {
  const Rows<T>& rows = operand.rows;
  if (loop.outer == 1 && operand.step == 1) {
    if (rows.width == 1) return lay_out<1>(rows, numbers, count, to);
    if (rows.width == 4) return lay_out<4>(rows, numbers, count, to);
    if (rows.width == 8) return lay_out<8>(rows, numbers, count, to);
    return lay_out<0>(rows, numbers, count, to);
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t o = 0; o < loop.outer; ++o, to += loop.inner) {
      const T* from = rows[numbers[i]] + operand.offsets[o];
      if (operand.step == 1) {
        for (int64_t j = 0; j < loop.inner; ++j) to[j] = widen(from[j]);
      } else {
        for (int64_t j = 0; j < loop.inner; ++j) to[j] = widen(from[0]);
      }
    }
  }
}

// Writes lhs op rhs, element by element.
template <typename T>
GRAPHSHARD_INLINE void combine_all(Op op, const wide_t<T>* lhs, const wide_t<T>* rhs, int64_t size,
                                   T* out) {
  switch (op) {
    case Op::kAdd:
      for (int64_t j = 0; j < size; ++j) narrow(lhs[j] + rhs[j], out[j]);
      break;
    case Op::kSub:
      for (int64_t j = 0; j < size; ++j) narrow(lhs[j] - rhs[j], out[j]);
      break;
    case Op::kMul:
      for (int64_t j = 0; j < size; ++j) narrow(lhs[j] * rhs[j], out[j]);
      break;
    default:
      for (int64_t j = 0; j < size; ++j) narrow(lhs[j] / rhs[j], out[j]);
  }
}

// Everything that a chunk of edges needs to know.
template <typename T>
struct Chunk {
  const SddmmArguments<T>& a;
  const Operand<T>& lhs;
  const Operand<T>& rhs;
  int64_t begin;
  int64_t end;
  const int64_t* lhs_numbers;
  const int64_t* rhs_numbers;

  GRAPHSHARD_INLINE int64_t edge_id(int64_t position) const {
    return a.edges.eids ? a.edges.eids[position] : position;
  }
};

template <typename T>
GRAPHSHARD_INLINE void elementwise(const Chunk<T>& chunk, Op op, wide_t<T>* left, wide_t<T>* right,
                                   T* block) {
  const RowLoop& loop = chunk.a.loop;
  const int64_t width = loop.outer * loop.inner;
  const int64_t step = std::max<int64_t>(kValuesPerBlock / std::max<int64_t>(width, 1), 1);
  for (int64_t first = chunk.begin; first < chunk.end; first += step) {
    const int64_t last = std::min(first + step, chunk.end);
    for (int64_t k = first; k < last; ++k) {
      chunk.lhs.prefetch(k, chunk.a.edges.num_edges);
      chunk.rhs.prefetch(k, chunk.a.edges.num_edges);
    }
    const int64_t count = last - first;
    lay_out(chunk.lhs, loop, chunk.lhs_numbers + (first - chunk.begin), count, left);
    lay_out(chunk.rhs, loop, chunk.rhs_numbers + (first - chunk.begin), count, right);
    if (!chunk.a.edges.eids) {
      combine_all(op, left, right, count * width, chunk.a.out + first * width);
      continue;
    }
    combine_all(op, left, right, count * width, block);
    for (int64_t k = first; k < last; ++k) {
      std::copy_n(block + (k - first) * width, width, chunk.a.out + chunk.edge_id(k) * width);
    }
  }
}

template <typename T>
GRAPHSHARD_INLINE void dot(const Chunk<T>& chunk) {
  const RowLoop& loop = chunk.a.loop;
  for (int64_t k = chunk.begin; k < chunk.end; ++k) {
    chunk.lhs.prefetch(k, chunk.a.edges.num_edges);
    chunk.rhs.prefetch(k, chunk.a.edges.num_edges);
    const T* lhs = chunk.lhs.rows[chunk.lhs_numbers[k - chunk.begin]];
    const T* rhs = chunk.rhs.rows[chunk.rhs_numbers[k - chunk.begin]];
    T* out = chunk.a.out + chunk.edge_id(k) * loop.outer;
    for (int64_t o = 0; o < loop.outer; ++o) {
      const T* left = lhs + loop.lhs_offsets[o];
      const T* right = rhs + loop.rhs_offsets[o];
      wide_t<T> total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < loop.inner; ++j) total += widen(left[j]) * widen(right[j]);
      narrow(total, out[o]);
    }
  }
}

// Operands and result have rows of kWidth values: too short to be worth numbering them.
template <int kWidth, typename T>
GRAPHSHARD_INLINE void run_narrow(const SddmmArguments<T>& a, Op op, const Operand<T>& lhs,
                                  const Operand<T>& rhs, int64_t begin, int64_t end, int64_t row) {
  wide_t<T> left[kValuesPerBlock + kFillStep];
  wide_t<T> right[kValuesPerBlock + kFillStep];
  T result[kValuesPerBlock];
  int64_t rhs_row = row;
  for (int64_t first = begin; first < end; first += kValuesPerBlock / kWidth) {
    const int64_t last = std::min(first + kValuesPerBlock / kWidth, end);
    read_rows<kWidth>(lhs, first, last, row, left);
    read_rows<kWidth>(rhs, first, last, rhs_row, right);
    const int64_t size = (last - first) * kWidth;
    combine_all(op, left, right, size, a.edges.eids ? result : a.out + first * kWidth);
    if (!a.edges.eids) continue;
    for (int64_t k = first; k < last; ++k) {
      std::copy_n(result + (k - first) * kWidth, kWidth, a.out + a.edges.eids[k] * kWidth);
    }
  }
}

template <typename T>
void run_part(const SddmmArguments<T>& a, Op op, int64_t begin, int64_t end) {
  if (begin == end) return;
  const Operand<T> lhs = operand_of(a, true);
  const Operand<T> rhs = operand_of(a, false);
  int64_t lhs_row = a.edges.indptr ? row_at(a.edges.indptr, a.edges.num_rows, begin) : 0;
  int64_t rhs_row = lhs_row;
  const int64_t width = a.loop.outer * a.loop.inner;
  if (op != Op::kDot && lhs.rows.width == width && rhs.rows.width == width) {
    const auto run = [&](auto known) {
      dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
        run_narrow<known>(a, op, lhs, rhs, begin, end, lhs_row);
      });
    };
    if (width == 1) return run(std::integral_constant<int, 1>{});
    if (width == 4) return run(std::integral_constant<int, 4>{});
    if (width == 8) return run(std::integral_constant<int, 8>{});
  }
  const int64_t block = std::max(kValuesPerBlock, width);
  const auto left = std::make_unique_for_overwrite<wide_t<T>[]>(block);
  const auto right = std::make_unique_for_overwrite<wide_t<T>[]>(block);
  const auto result = std::make_unique_for_overwrite<T[]>(block);
  int64_t lhs_numbers[kEdgesPerChunk];
  int64_t rhs_numbers[kEdgesPerChunk];
  for (int64_t first = begin; first < end; first += kEdgesPerChunk) {
    const int64_t last = std::min(first + kEdgesPerChunk, end);
    number_rows(lhs, first, last, lhs_row, lhs_numbers);
    number_rows(rhs, first, last, rhs_row, rhs_numbers);
    const Chunk<T> chunk{a, lhs, rhs, first, last, lhs_numbers, rhs_numbers};
    if (op == Op::kDot) {
      dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA { dot(chunk); });
    } else {
      dispatch<kWidest<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
        elementwise(chunk, op, left.get(), right.get(), result.get());
      });
    }
  }
}

}  // namespace

template <typename T>
void sddmm(const SddmmArguments<T>& a, Op op, int num_threads) {
  const int64_t row_work = std::max<int64_t>(a.loop.outer * a.loop.inner, 1);
  const int64_t parts = num_parts(a.edges.num_edges, 16384 / row_work, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    run_part(a, op, part_begin(a.edges.num_edges, part, parts),
             part_begin(a.edges.num_edges, part + 1, parts));
  });
}

template void sddmm(const SddmmArguments<float>&, Op, int);
template void sddmm(const SddmmArguments<double>&, Op, int);
template void sddmm(const SddmmArguments<bfloat16>&, Op, int);

}  // namespace graphshard
