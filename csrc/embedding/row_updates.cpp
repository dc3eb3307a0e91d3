// SPDX-License-Identifier: Apache-2.0
// Products are added in one rounding where torch does so, which is where the machine can.

#include "embedding/row_updates.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "runtime/parallel.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

constexpr int64_t kAhead = 8;         // rows between the one that is asked for and the one changed
constexpr int64_t kMostAhead = 4096;  // bytes of a row that are asked for ahead
constexpr int64_t kTaskBytes = 1 << 18;

template <int kBytes>
GRAPHSHARD_INLINE float product_sum(float a, float b, float c) {
#if defined(__GNUC__)
  if constexpr (kBytes > 16) return __builtin_fmaf(a, b, c);
#endif
  return a * b + c;
}

template <Rule kRule, int kBytes>
GRAPHSHARD_INLINE void update_row(const RuleNumbers& n, float* __restrict weight,
                                  float* __restrict first, float* __restrict second,
                                  const float* __restrict grad, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const float g = grad[j];
    if constexpr (kRule == Rule::kSgd) {
      weight[j] = product_sum<kBytes>(g, -n.rate, weight[j]);
    } else if constexpr (kRule == Rule::kAdagrad) {
      first[j] = product_sum<kBytes>(g, g, first[j]);
      weight[j] += -n.rate * g / (std::sqrt(first[j]) + n.eps);
    } else {
      const float mean = first[j];
      const float step = g - mean;
      const float near = product_sum<kBytes>(n.first_weight, step, mean);
      const float far = product_sum<kBytes>(n.first_weight - 1, step, g);
      first[j] = n.first_weight < 0.5F ? near : far;
      second[j] = product_sum<kBytes>(n.second_weight * g, g, second[j] * n.second_decay);
      weight[j] += -n.rate * first[j] / (std::sqrt(second[j]) + n.eps);
    }
  }
}

template <Rule kRule>
void update(const RuleNumbers& numbers, const std::vector<float*>& tables, const Ids& rows,
            const RowGroups& groups, int num_threads) {
  const int64_t width = groups.width;
  const int64_t ahead = std::min<int64_t>(width * sizeof(float), kMostAhead);
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(float) * (tables.size() + 1));
  const int64_t parts = num_parts(groups.num_groups, kTaskBytes / (row_bytes + 1) + 1, num_threads);
  run_tasks(parts, num_threads, [&](int64_t part) {
    std::vector<float> room(static_cast<size_t>(2 * width));
    dispatch<64>([&](auto bytes) GRAPHSHARD_INLINE_LAMBDA {
      const int64_t last = part_begin(groups.num_groups, part + 1, parts);
      for (int64_t g = part_begin(groups.num_groups, part, parts); g < last; ++g) {
        if (g + kAhead < last) {
          const int64_t next = rows[g + kAhead] * width;
          for (float* const table : tables) prefetch_bytes(table + next, ahead);
          prefetch_group(groups, g + kAhead);
        }
        const int64_t at = rows[g] * width;
        const auto row_of = [&](size_t table) GRAPHSHARD_INLINE_LAMBDA {
          return table < tables.size() ? tables[table] + at : nullptr;
        };
        update_row<kRule, bytes>(numbers, row_of(0), row_of(1), row_of(2),
                                 sum_of(groups, g, room.data()), width);
      }
    });
  });
}

}  // namespace

int64_t num_tables(Rule rule) { return rule == Rule::kSgd ? 1 : rule == Rule::kAdagrad ? 2 : 3; }

void update_rows(Rule rule, const RuleNumbers& numbers, const std::vector<float*>& tables,
                 int64_t num_rows, const Ids& rows, const RowGroups& groups, int num_threads) {
  int64_t before = -1;
  bool ascends = true;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    ascends &= rows[g] > before;
    before = rows[g];
  }
  if (!ascends || before >= num_rows) {
    throw std::out_of_range("rows must ascend, each once, and be rows of the tables");
  }
  if (rule == Rule::kSgd) {
    update<Rule::kSgd>(numbers, tables, rows, groups, num_threads);
  } else if (rule == Rule::kAdagrad) {
    update<Rule::kAdagrad>(numbers, tables, rows, groups, num_threads);
  } else {
    update<Rule::kAdam>(numbers, tables, rows, groups, num_threads);
  }
}

}  // namespace graphshard
