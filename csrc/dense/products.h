// SPDX-License-Identifier: Apache-2.0
// Products of many rows with a matrix, and of what they are gradients of.
//
// [Note: products] Dense layers multiply many rows with a small matrix. torch leaves that to MKL,
// which on processors that are not Intel's takes registers of 32 bytes: on a Zen 5 these have half
// of the speed. Here a matrix is laid out in panels of some columns once for all rows; a tile of
// the result, some rows of a panel, stays in registers while its products are added up.
//
// An entry is added up in one order, whatever rows there are beside it; a sum over rows is cut into
// slabs by its sizes alone. So nothing depends on the number of threads, and a row has the same
// product in whatever part it is.

#pragma once

#include <cstdint>
#include <vector>

namespace graphshard {

// Rows that may lie apart; entries of a row are neighbours.
struct ConstRows {
  const float* data;
  int64_t step;  // from a row to the next

  const float* operator[](int64_t row) const { return data + row * step; }
};

// rows [num_rows, inner] times matrix [inner, width], whose entries may lie anywhere.
struct DenseProduct {
  ConstRows rows;
  int64_t inner;
  const float* matrix;
  int64_t matrix_step;    // from a row to the next
  int64_t matrix_column;  // from a column to the next
};

struct RowProducts {
  std::vector<DenseProduct> products;
  int64_t num_rows;
  int64_t width;
  // Added up first; null data for zeros. A step of 0 is a bias. May be the result itself.
  ConstRows first;
  bool relu;
  float* out;  // [num_rows, width]
  int64_t out_step;
};

// out = first + the sum of the products, negative entries as zeros if `relu` says so.
void multiply_rows(const RowProducts& a, int num_threads);

// out [inner, width] = the sum over rows of the products of rows [num_rows, inner], transposed, and
// grads [num_rows, width].
struct TransposedProduct {
  ConstRows rows;
  ConstRows grads;
  int64_t num_rows;
  int64_t inner;
  int64_t width;
  float* out;  // contiguous
};
void multiply_transposed(const TransposedProduct& a, int num_threads);

// Whether these are faster here than torch's products.
bool gains_from_products();

}  // namespace graphshard
