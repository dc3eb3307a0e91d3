// SPDX-License-Identifier: Apache-2.0
// Rows of a table in a file, read to places of a table in memory.

#pragma once

#include <cstdint>

#include "runtime/csr.h"

namespace graphshard {

// Where the rows of a table lie in a file.
struct FileTable {
  int descriptor;
  int64_t offset;  // bytes before its first row
  int64_t num_rows;
  int64_t row_bytes;
};

// Reads row rows[i] of `table` to row places[i] of `out`, for i in [0, count), in the order of the
// file; null places stand for 0, 1, 2, ... Neighbouring rows are one read, and the system is asked
// for some thousand pages before the first of them is wanted, so that a disk has as much to do at
// once as it can. Nothing of the file is mapped. Returns 0 or an error number; EIO where the file
// ends before a row does. Throws std::out_of_range, before anything is read, where a row does not
// exist.
int read_rows(const FileTable& table, const Ids& rows, const Ids& places, int64_t count, char* out,
              int64_t num_out);

}  // namespace graphshard
