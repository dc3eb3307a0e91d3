// SPDX-License-Identifier: Apache-2.0

#include "runtime/large_blocks.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#define GRAPHSHARD_HAS_MMAP
#endif

namespace graphshard {
namespace {

constexpr size_t kLargePage = size_t{1} << 21;
constexpr size_t kPage = size_t{1} << 12;

#ifdef GRAPHSHARD_HAS_MMAP
// Addresses that begin at a large page, for which the system may then use one.
char* reserve(size_t size, int protection) {
  const size_t total = size + kLargePage;
  void* const data = mmap(nullptr, total, protection, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  char* const start = static_cast<char*>(data);
  const size_t skipped = -reinterpret_cast<uintptr_t>(start) & (kLargePage - 1);
  if (skipped > 0) munmap(start, skipped);
  munmap(start + skipped + size, kLargePage - skipped);
  return start + skipped;
}
#endif

Block map_block(size_t size) {
#ifdef GRAPHSHARD_HAS_MMAP
  void* const data = reserve(size, PROT_READ | PROT_WRITE);
  if (data == nullptr) return {nullptr, 0};
  expect_writes(data, size);
#else
  void* data = ::operator new(size, std::align_val_t{kPage}, std::nothrow);
  if (data == nullptr) return {nullptr, 0};
#endif
  return {data, size};
}

void unmap_block(const Block& block) {
#ifdef GRAPHSHARD_HAS_MMAP
  munmap(block.data, block.size);
#else
  ::operator delete(block.data, std::align_val_t{kPage});
#endif
}

#if defined(__linux__)
#define GRAPHSHARD_CAN_JOIN
// One block of the pages of some, which are `size` bytes together and end here; {nullptr, 0}, and
// the pages gone, if the system refuses.
Block join_blocks(const std::vector<Block>& pieces, size_t size) {
  char* const start = reserve(size, PROT_NONE);
  bool moved = start != nullptr;
  char* to = start;
  for (const Block& piece : pieces) {
    // Page by page: one call must not go across what the system takes for two mappings.
    for (size_t at = 0; at < piece.size; at += kLargePage) {
      char* const from = static_cast<char*>(piece.data) + at;
      moved =
          moved && mremap(from, kLargePage, kLargePage, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
      if (!moved) munmap(from, kLargePage);
      to += kLargePage;
    }
  }
  if (moved) return {start, size};
  if (start != nullptr) munmap(start, size);
  return {nullptr, 0};
}
#endif

// Waiting blocks, the one that was freed first in front. All sizes are multiples of kLargePage.
class Pool {
 public:
  Block take(size_t size) {
    std::vector<Block> given_up;
    std::vector<Block> pieces;
    Block found{nullptr, 0};
    {
      const std::lock_guard lock(mutex_);
      found = pick(size);
#ifdef GRAPHSHARD_CAN_JOIN
      if (found.data == nullptr && counts_.waiting >= size) pieces = gather(size);
#endif
      counts_.used += found.data != nullptr ? found.size : size;
      counts_.peak = std::max(counts_.peak, counts_.used);
      while (counts_.used + counts_.waiting > counts_.peak) {
        given_up.push_back(waiting_.front());
        counts_.waiting -= waiting_.front().size;
        waiting_.erase(waiting_.begin());
      }
    }
    for (const Block& block : given_up) unmap_block(block);
    if (found.data != nullptr) return found;
#ifdef GRAPHSHARD_CAN_JOIN
    if (pieces.size() == 1) return pieces.front();
    if (!pieces.empty()) found = join_blocks(pieces, size);
    if (found.data != nullptr) return found;
#endif
    found = map_block(size);
    if (found.data == nullptr) {
      const std::lock_guard lock(mutex_);
      counts_.used -= size;
    }
    return found;
  }

  void put_back(const Block& block) {
    {
      const std::lock_guard lock(mutex_);
      counts_.used -= block.size;
      if (counts_.used + counts_.waiting + block.size <= counts_.peak) {
        waiting_.push_back(block);
        counts_.waiting += block.size;
        return;
      }
    }
    unmap_block(block);
  }

  void release() {
    std::vector<Block> given_up;
    {
      const std::lock_guard lock(mutex_);
      given_up.swap(waiting_);
      counts_.waiting = 0;
      counts_.peak = counts_.used;
    }
    for (const Block& block : given_up) unmap_block(block);
  }

  BlockCounts counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // The smallest waiting block that fits without wasting much; of equal ones the one freed last,
  // of which most may still be in the cache.
  Block pick(size_t size) {
    auto best = waiting_.end();
    for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
      const bool fits = at->size >= size && at->size - size <= size / 8;
      if (fits && (best == waiting_.end() || at->size <= best->size)) best = at;
    }
    if (best == waiting_.end()) return {nullptr, 0};
    const Block found = *best;
    waiting_.erase(best);
    counts_.waiting -= found.size;
    return found;
  }

#ifdef GRAPHSHARD_CAN_JOIN
  // Pieces of waiting blocks, `size` bytes together: of the smallest that is large enough, or of
  // those freed first.
  std::vector<Block> gather(size_t size) {
    auto whole = waiting_.end();
    for (auto at = waiting_.begin(); at != waiting_.end(); ++at) {
      if (at->size >= size && (whole == waiting_.end() || at->size < whole->size)) whole = at;
    }
    if (whole != waiting_.end()) std::rotate(waiting_.begin(), whole, whole + 1);
    std::vector<Block> pieces;
    counts_.waiting -= size;
    while (size > 0) {
      Block& first = waiting_.front();
      const size_t taken = std::min(size, first.size);
      pieces.push_back({first.data, taken});
      size -= taken;
      first = {static_cast<char*>(first.data) + taken, first.size - taken};
      if (first.size == 0) waiting_.erase(waiting_.begin());
    }
    return pieces;
  }
#endif

  std::mutex mutex_;
  std::vector<Block> waiting_;
  BlockCounts counts_{0, 0, 0};
};

// Never destroyed: tensors may outlive everything else of this library. A process that forks in
// the middle of a call of another thread has a child that can go on.
Pool& pool() {
  static Pool* const only = [] {
    Pool* const made = new Pool;
#ifdef GRAPHSHARD_HAS_MMAP
    pthread_atfork([] { pool().mutex().lock(); }, [] { pool().mutex().unlock(); },
                   [] { pool().mutex().unlock(); });
#endif
    return made;
  }();
  return *only;
}

}  // namespace

void expect_writes([[maybe_unused]] void* address, [[maybe_unused]] size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t start = reinterpret_cast<uintptr_t>(address);
  const uintptr_t first = (start + kLargePage - 1) & ~(kLargePage - 1);
  const uintptr_t last = (start + size) & ~(kLargePage - 1);
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

Block take_block(size_t size) {
  if (size == 0 || size > std::numeric_limits<size_t>::max() - kLargePage) return {nullptr, 0};
  // Sizes in steps, so that results of a few rows more or fewer share blocks.
  return pool().take((size + kLargePage - 1) & ~(kLargePage - 1));
}

void return_block(const Block& block) { pool().put_back(block); }

void release_blocks() { pool().release(); }

BlockCounts block_counts() { return pool().counts(); }

}  // namespace graphshard
