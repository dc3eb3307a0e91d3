// SPDX-License-Identifier: Apache-2.0
// Sums of whole rows of the widths that layers have most.

#pragma once

#include "runtime/parallel.h"
#include "spmm/finish.h"
#include "spmm/spmm.h"

namespace graphshard {

// Writes the results of the rows of a span with at most kSliceEdges edges, for messages that are
// rows of one operand; `buffer` is one row wide.
template <typename T>
using SumRows = void (*)(const SpmmArguments<T>& arguments, Op op, const Span& span,
                         SumResult result, int64_t width, wide_t<T>* buffer);

// One for rows of so many columns; null if there is none for this type, width and machine.
template <typename T>
SumRows<T> sum_rows_of_width(int64_t width);
template <>
SumRows<float> sum_rows_of_width(int64_t width);
template <>
SumRows<double> sum_rows_of_width(int64_t width);
template <>
SumRows<bfloat16> sum_rows_of_width(int64_t width);

}  // namespace graphshard
