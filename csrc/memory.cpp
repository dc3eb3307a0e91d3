// SPDX-License-Identifier: Apache-2.0

#include "memory.h"

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace graphshard {

void expect_writes([[maybe_unused]] void* address, [[maybe_unused]] size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLargePage = uintptr_t{1} << 21;
  const uintptr_t start = reinterpret_cast<uintptr_t>(address);
  const uintptr_t first = (start + kLargePage - 1) & ~(kLargePage - 1);
  const uintptr_t last = (start + size) & ~(kLargePage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace graphshard
