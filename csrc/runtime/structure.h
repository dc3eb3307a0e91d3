// SPDX-License-Identifier: Apache-2.0
// What must hold of the arrays of a structure before anything is read by them.

#pragma once

#include <cstdint>

namespace graphshard {

// Whether indptr, of num_rows + 1 entries, runs from 0 to `end` and never falls.
bool ascends(const int32_t* indptr, int64_t num_rows, int64_t end);
bool ascends(const int64_t* indptr, int64_t num_rows, int64_t end);

}  // namespace graphshard
