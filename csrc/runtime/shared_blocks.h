// SPDX-License-Identifier: Apache-2.0
// Blocks of memory that one process writes and others on its machine read.

#pragma once

#include <cstddef>
#include <cstdint>

namespace graphshard {

// [Note: shared blocks] A block is a file without a name, in memory. It begins with a header:
//
//   token | use | left | ... | done[0] | done[1] | ...        kSharedHeader bytes in all
//
// The writer maps the whole file. Before it announces a use, it numbers the use in the
// header. A reader opens the file through /proc, where the writer's process keeps it, checks token
// and use, reads its part with read(), which leaves no pages behind in its own memory, and notes
// the use in its slot of `done`. Once all readers have, the writer may write again. So no process
// ever waits for a block, nothing is left behind by a process that is killed, and a reader that
// finds another file or another use under a number, since the writer is gone, knows that.

constexpr size_t kSharedHeader = size_t{1} << 12;
constexpr size_t kSharedReaders = kSharedHeader / sizeof(uint64_t) - 8;

// Where a reader finds a block: a process, its descriptor, and what the header must say.
struct SharedPlace {
  int process;
  int descriptor;
  uint64_t token;
  uint64_t use;
};

// Writes the token and the use into the header of a block that this process maps.
void begin_use(void* header, uint64_t token, uint64_t use);
// Whether these readers have noted the use.
bool is_read(void* header, uint64_t use, const int64_t* readers, size_t num_readers);
// Notes in the header that this process reads no more blocks.
void mark_left(void* header);

// Reads `size` bytes from `offset` (behind the header) of another process's block, and notes that
// `reader` is done with this use. Returns 0 or an error number; ESTALE for another file or use.
int read_shared(const SharedPlace& place, int reader, size_t offset, void* to, size_t size);
// Whether a process has marked the header of its block, or does not exist any more.
bool has_left(const SharedPlace& place);

}  // namespace graphshard
