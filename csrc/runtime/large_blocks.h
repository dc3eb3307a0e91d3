// SPDX-License-Identifier: Apache-2.0
// Large results, and the memory they live in.

#pragma once

#include <cstddef>

namespace graphshard {

// Asks for large pages behind [address, address + size), which is about to be written for the first
// time. A page that is touched first costs a trap into the kernel; for a result of 50 MB that is a
// quarter of the time of a sum over edges. A hint: where it is not understood, nothing happens.
void expect_writes(void* address, size_t size);

// [Note: large blocks] An epoch makes and frees the same large tensors again and again. malloc
// gives each back to the system as soon as it is freed, and every page of the next one is mapped
// and cleared anew, which costs several times what a pass over the tensor does. Told to keep them,
// it fits aligned blocks badly into the holes that they left, and memory grows by half. So large
// results live in blocks of their own, which are used again for results of about their size. Blocks
// that wait and blocks in use together are never more than what was in use at once before: keeping
// them raises no peak. Where no block that waits has the right size, Linux can move pages: a block
// is cut, or several become one, for a hundredth of what new pages cost.

struct Block {
  void* data;
  size_t size;
};

struct BlockCounts {
  size_t used;     // bytes of blocks in use
  size_t waiting;  // bytes of blocks that wait to be used again
  size_t peak;     // most bytes in use at once so far
};

// A block of at least `size` bytes, beginning at a page; {nullptr, 0} if there is no memory.
Block take_block(size_t size);
// Ends its use. Any thread may call it, with or without the interpreter's lock.
void return_block(const Block& block);
// Gives all blocks that wait back to the system, and forgets the peak.
void release_blocks();
BlockCounts block_counts();

}  // namespace graphshard
