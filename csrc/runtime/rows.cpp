// SPDX-License-Identifier: Apache-2.0

#include "runtime/rows.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "runtime/parallel.h"
#include "simd/dispatch.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace graphshard {
namespace {

constexpr int64_t kAhead = 32;        // rows between the one that is asked for and the one copied
constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kMostAhead = 4096;  // bytes of a row that are asked for ahead
constexpr int64_t kStream = 1 << 25;  // a result of more bytes will not be found in a cache
constexpr int64_t kTaskBytes = 1 << 18;

void check(bool in_range) {
  if (!in_range) throw std::out_of_range("a row number is outside its table");
}

GRAPHSHARD_INLINE int64_t number_of(const Ids& ids, int64_t i) { return ids ? ids[i] : i; }

#if defined(__SSE2__)
// Past the caches: the lines written to are not read first. For rows of 16-byte units.
void stream_row(char* out, const char* row, int64_t row_bytes) {
  for (int64_t at = 0; at < row_bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + at)));
  }
}

bool streams(const RowTable<char>& out, int64_t count, int64_t row_bytes) {
  return count * row_bytes >= kStream && row_bytes % kLine == 0 &&
         reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
}

void end_of_stream() { _mm_sfence(); }
#else
void stream_row(char* out, const char* row, int64_t row_bytes) {
  std::memcpy(out, row, static_cast<size_t>(row_bytes));
}

bool streams(const RowTable<char>&, int64_t, int64_t) { return false; }

void end_of_stream() {}
#endif

template <typename S, typename T>
GRAPHSHARD_INLINE void add_span(S* out, int64_t out_stride, const Ids& places, const T* rows,
                                int64_t first, int64_t last, int64_t width) {
  constexpr int64_t kColumns = kLine / static_cast<int64_t>(sizeof(S));
  for (int64_t i = first; i < last; ++i) {
    if (i + kAhead < last) {
      const int64_t next = number_of(places, i + kAhead);
      const S* address = out + next * out_stride;
      for (int64_t j = 0; j < width; j += kColumns) GRAPHSHARD_PREFETCH(address + j);
    }
    S* to = out + number_of(places, i) * out_stride;
    const T* from = rows + i * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) narrow(widen(to[j]) + widen(from[j]), to[j]);
  }
}

}  // namespace

void copy_rows(const RowTable<char>& out, const Ids& places, const RowTable<const char>& table,
               const Ids& rows, int64_t count, int64_t row_bytes, int num_threads) {
  check(bool(places) || count <= out.num_rows);
  check(bool(rows) || count <= table.num_rows);
  const bool stream = streams(out, count, row_bytes);
  const int64_t ahead = std::min(row_bytes, kMostAhead);
  const int64_t grain = std::max<int64_t>(1, kTaskBytes / std::max<int64_t>(row_bytes, 1));
  const int64_t parts = num_parts(count, grain, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    const int64_t last = part_begin(count, part + 1, parts);
    for (int64_t i = part_begin(count, part, parts); i < last; ++i) {
      if (rows && i + kAhead < last) {
        const int64_t next = rows[i + kAhead];
        check(next >= 0 && next < table.num_rows);
        const char* address = table.data + next * row_bytes;
        for (int64_t at = 0; at < ahead; at += kLine) GRAPHSHARD_PREFETCH(address + at);
        GRAPHSHARD_PREFETCH(address + ahead - 1);  // rows of a file may lie across lines
      }
      const int64_t from = number_of(rows, i);
      const int64_t to = number_of(places, i);
      check(from >= 0 && from < table.num_rows && to >= 0 && to < out.num_rows);
      char* target = out.data + to * row_bytes;
      const char* source = table.data + from * row_bytes;
      if (stream) {
        stream_row(target, source, row_bytes);
      } else {
        std::memcpy(target, source, static_cast<size_t>(row_bytes));
      }
    }
    if (stream) end_of_stream();
  });
}

template <typename S, typename T>
void add_rows(S* out, int64_t num_out, int64_t out_stride, const Ids& places, const T* rows,
              int64_t count, int64_t width, int num_threads) {
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t parts =
      num_parts(count, kTaskBytes / std::max<int64_t>(row_bytes, 1) + 1, num_threads);
  for (int64_t i = 0; i < count; ++i) {
    check(number_of(places, i) >= 0 && number_of(places, i) < num_out);
  }
  run_tasks(parts, num_threads, [&](int64_t part) {
    dispatch<kWidestRegister<T>>([&](auto) GRAPHSHARD_INLINE_LAMBDA {
      add_span(out, out_stride, places, rows, part_begin(count, part, parts),
               part_begin(count, part + 1, parts), width);
    });
  });
}

#define INSTANTIATE(S, T) \
  template void add_rows(S*, int64_t, int64_t, const Ids&, const T*, int64_t, int64_t, int);
INSTANTIATE(float, float)
INSTANTIATE(double, double)
INSTANTIATE(float, bfloat16)
INSTANTIATE(bfloat16, bfloat16)
#undef INSTANTIATE

}  // namespace graphshard
