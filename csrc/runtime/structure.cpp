// SPDX-License-Identifier: Apache-2.0

#include "runtime/structure.h"

#include "runtime/types.h"

namespace graphshard {
namespace {

// Not one step at a time: the loop takes as many numbers as fit in a register.
template <typename I>
GRAPHSHARD_CLONES bool never_falls(const I* numbers, int64_t count) {
  I falls = 0;
  for (int64_t i = 1; i < count; ++i) falls |= static_cast<I>(numbers[i] < numbers[i - 1]);
  return falls == 0;
}

}  // namespace

bool ascends(const int32_t* indptr, int64_t num_rows, int64_t end) {
  return indptr[0] == 0 && indptr[num_rows] == end && never_falls(indptr, num_rows + 1);
}

bool ascends(const int64_t* indptr, int64_t num_rows, int64_t end) {
  return indptr[0] == 0 && indptr[num_rows] == end && never_falls(indptr, num_rows + 1);
}

}  // namespace graphshard
