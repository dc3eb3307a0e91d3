// SPDX-License-Identifier: Apache-2.0
// Whole rows from one table to places of another: copied, whatever they hold, or added. Null row
// numbers stand for 0, 1, 2, ...

#pragma once

#include <cstdint>

#include "runtime/csr.h"
#include "runtime/types.h"

namespace graphshard {

// Rows back to back, to read or to write.
template <typename Byte>
struct RowTable {
  Byte* data;
  int64_t num_rows;
};

// Copies row rows[i], of `row_bytes` bytes, of `table` to row places[i] of `out`, for i in [0,
// count). Places are distinct, and the tables do not overlap. Throws std::out_of_range where a row
// does not exist; other rows may have been copied then.
void copy_rows(const RowTable<char>& out, const Ids& places, const RowTable<const char>& table,
               const Ids& rows, int64_t count, int64_t row_bytes, int num_threads);

// Adds row i of `rows`, which has `width` columns, to the columns that begin at out + places[i] *
// out_stride, for i in [0, count). Places are distinct. Throws std::out_of_range, before anything
// is added, where a row does not exist.
template <typename S, typename T>
void add_rows(S* out, int64_t num_out, int64_t out_stride, const Ids& places, const T* rows,
              int64_t count, int64_t width, int num_threads);

}  // namespace graphshard
