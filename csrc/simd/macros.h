// SPDX-License-Identifier: Apache-2.0
// What compilers spell differently: forced inlining, and prefetching.

#pragma once

#include <cstdint>

#if defined(_MSC_VER)
#define GRAPHSHARD_INLINE inline __forceinline
#define GRAPHSHARD_INLINE_LAMBDA
#define GRAPHSHARD_NOINLINE __declspec(noinline)
#define GRAPHSHARD_PREFETCH(address)
#define GRAPHSHARD_PREFETCH_WRITE(address)
#define GRAPHSHARD_PREFETCH_OUTER(address)
#else
#define GRAPHSHARD_NOINLINE __attribute__((noinline))
// Under AddressSanitizer nothing is inlined by force: what it adds to each access takes long to
// compile.
#if defined(__SANITIZE_ADDRESS__)
#define GRAPHSHARD_INLINE inline
#define GRAPHSHARD_INLINE_LAMBDA
#else
#define GRAPHSHARD_INLINE inline __attribute__((always_inline))
#define GRAPHSHARD_INLINE_LAMBDA __attribute__((always_inline))
#endif
// [Note: prefetch to the second level] Into the second-level cache, not the first: a core tracks
// few lines on their way to the first and many on their way to the second, so whole rows can be
// requested well ahead. On a Zen 4 this halved the time of a sum over edges.
#define GRAPHSHARD_PREFETCH(address) __builtin_prefetch(address, 0, 2)
#define GRAPHSHARD_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
// To the outer caches only: a stream of these does not hold up the computation it runs beside.
#define GRAPHSHARD_PREFETCH_OUTER(address) __builtin_prefetch(address, 0, 1)
#endif

namespace graphshard {

// Requests the lines that hold [begin, begin + bytes).
GRAPHSHARD_INLINE void prefetch_bytes(const void* begin, int64_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
  for (uintptr_t at = first & ~uintptr_t{63}; at < first + bytes; at += 64) {
    GRAPHSHARD_PREFETCH(reinterpret_cast<const void*>(at));
  }
}

// Requests values[index], where the index has not been looked at yet.
template <typename T>
GRAPHSHARD_INLINE void prefetch_entry(const T* values, int64_t index) {
  const uintptr_t offset = static_cast<uintptr_t>(index) * sizeof(T);
  GRAPHSHARD_PREFETCH(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(values) + offset));
}

// Requests kColumns values.
template <int kColumns, typename T>
GRAPHSHARD_INLINE void prefetch_values(const T* begin) {
  for (int j = 0; j < kColumns; j += 64 / sizeof(T)) GRAPHSHARD_PREFETCH(begin + j);
}

}  // namespace graphshard
