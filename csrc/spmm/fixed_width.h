// SPDX-License-Identifier: Apache-2.0
// Sums of whole rows of the usual widths.

#pragma once

#include "runtime/parallel.h"
#include "spmm/finish.h"
#include "spmm/spmm.h"

namespace graphshard {

// Writes the results of the rows of a span that are no hubs, for messages that are rows of one
// operand; `buffer` is one row wide.
template <typename T>
using SumRows = void (*)(const SpmmArguments<T>& arguments, Op op, const Span& span,
                         SumResult result, int64_t width, wide_t<T>* buffer);

// One for rows of so many columns; null if there is none.
template <typename T>
SumRows<T> sum_rows_of_width(int64_t width);

}  // namespace graphshard
