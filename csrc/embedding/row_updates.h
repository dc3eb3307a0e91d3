// SPDX-License-Identifier: Apache-2.0
// Steps of optimizers on some rows of a table: each row and its state is read and written once.

#pragma once

#include <cstdint>
#include <vector>

#include "embedding/row_groups.h"
#include "runtime/csr.h"

namespace graphshard {

enum class Rule { kSgd, kAdagrad, kAdam };

// How many tables a rule changes: the weights, and what it keeps beside them.
int64_t num_tables(Rule rule);

// The numbers of a rule.
struct RuleNumbers {
  float rate;
  float eps;
  // Of Adam: 1 minus the decay of the first moment, the decay of the second, and 1 minus that.
  float first_weight;
  float second_decay;
  float second_weight;
};

// Changes row rows[g] of each table by the sum of group g. Rows ascend, each is there once, and the
// tables, of `num_rows` rows side by side, do not overlap each other or the groups. Throws
// std::out_of_range, before anything is written, where rows do not ascend or do not exist.
void update_rows(Rule rule, const RuleNumbers& numbers, const std::vector<float*>& tables,
                 int64_t num_rows, const Ids& rows, const RowGroups& groups, int num_threads);

}  // namespace graphshard
