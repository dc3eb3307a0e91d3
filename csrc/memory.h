// SPDX-License-Identifier: Apache-2.0
// Large results, and the pages they live on.

#pragma once

#include <cstddef>

namespace graphshard {

// Asks for large pages behind [address, address + size), which is about to be written for the first
// time. A page that is touched first costs a trap into the kernel; for a result of 50 MB that is a
// quarter of the time of a sum over edges. A hint: where it is not understood, nothing happens.
void expect_writes(void* address, size_t size);

}  // namespace graphshard
