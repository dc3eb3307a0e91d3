// SPDX-License-Identifier: Apache-2.0
// Threads, and how edges are shared among them.
//
// [Note: repeatable sums] The order in which numbers are added must not depend on the number of
// threads. A destination is summed by one thread, edge after edge, unless it has more than
// kSliceEdges edges; then it is cut into slices of that many, always, and the slices' sums are
// added in order. So a destination of many edges does
// not keep one thread busy while the others wait.

#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "runtime/types.h"

namespace graphshard {

inline constexpr int64_t kSliceEdges = 4096;

// More than the machine can start end the process.
inline constexpr int64_t kMostThreads = 1024;

// Edge positions ahead of the current one at which rows are requested from memory.
inline constexpr int64_t kPrefetchAhead = 24;

// Calls task(i) for i in [0, num_tasks), on up to num_threads threads, in no particular order.
// What a task throws is thrown here, after the others ended.
template <typename Task>
void run_tasks(int64_t num_tasks, int num_threads, const Task& task) {
#ifdef _OPENMP
  // One thread never enters OpenMP: its thread pool does not survive a fork.
  if (num_threads > 1 && num_tasks > 1) {
    std::exception_ptr error;
    const int team = static_cast<int>(std::min<int64_t>({num_threads, num_tasks, kMostThreads}));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t i = 0; i < num_tasks; ++i) {
      try {
        task(i);
      } catch (...) {
#pragma omp critical(graphshard_run_tasks)
        error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  for (int64_t i = 0; i < num_tasks; ++i) task(i);
}

// As many equal parts as keep num_threads busy, but none with fewer than `grain` of `work` units.
inline int64_t num_parts(int64_t work, int64_t grain, int num_threads) {
  if (num_threads <= 1) return 1;
  const int64_t most = 16 * std::min<int64_t>(num_threads, kMostThreads);
  return std::clamp<int64_t>(work / std::max<int64_t>(grain, 1), 1, most);
}

// Part `part` of `parts` of [0, total) begins here.
inline int64_t part_begin(int64_t total, int64_t part, int64_t parts) {
  return total / parts * part + std::min(part, total % parts);
}

// Consecutive destinations, or one slice of the edges of a destination that has too many.
struct Span {
  int64_t first_row;
  int64_t last_row;
  int64_t begin;  // edge positions, of a slice only
  int64_t end;
  int64_t slice;  // number of the slice, -1 for whole rows
};

// A destination that is cut, with its slices [first_slice, last_slice).
struct LongRow {
  int64_t row;
  int64_t first_slice;
  int64_t last_slice;
};

struct Schedule {
  std::vector<Span> spans;
  std::vector<LongRow> long_rows;
  int64_t num_slices = 0;
};

// Cuts destinations into spans of about equal numbers of edges. Spans of whole rows may contain a
// long row: a kernel skips rows of more than kSliceEdges edges there.
template <typename Indptr>  // const I*, or Ids
Schedule make_schedule(const Indptr& indptr, int64_t num_rows, int64_t width, int num_threads) {
  Schedule schedule;
  if (num_rows == 0) return schedule;
  const int64_t num_edges = static_cast<int64_t>(indptr[num_rows]);
  const int64_t work = num_edges + num_rows;
  if (num_edges > kSliceEdges) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t begin = indptr[row];
      const int64_t end = indptr[row + 1];
      if (end - begin <= kSliceEdges) continue;
      const int64_t first = schedule.num_slices;
      for (int64_t at = begin; at < end; at += kSliceEdges) {
        schedule.spans.push_back(
            {row, row + 1, at, std::min(at + kSliceEdges, end), schedule.num_slices++});
      }
      schedule.long_rows.push_back({row, first, schedule.num_slices});
    }
  }
  const int64_t parts = num_parts(work, 16384 / std::max<int64_t>(width, 1), num_threads);
  int64_t first = 0;
  for (int64_t part = 1; part <= parts && first < num_rows; ++part) {
    const int64_t target = part_begin(work, part, parts);
    int64_t low = first;
    int64_t high = num_rows;
    while (low < high) {  // the first row before which `target` units of work lie
      const int64_t middle = low + (high - low) / 2;
      if (static_cast<int64_t>(indptr[middle]) + middle < target) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t last = part == parts ? num_rows : low;
    if (last > first) schedule.spans.push_back({first, last, 0, 0, -1});
    first = last;
  }
  return schedule;
}

}  // namespace graphshard
