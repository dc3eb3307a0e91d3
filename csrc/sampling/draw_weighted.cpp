// SPDX-License-Identifier: Apache-2.0
// Draws that look at every edge of a row: by weight, and LABOR. See ops/reference.py
// for the algorithms.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "runtime/parallel.h"
#include "sampling/draw.h"
#include "sampling/random.h"
#include "simd/dispatch.h"

namespace graphshard {
namespace {

constexpr int64_t kRowsAhead = 16;
constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kEdgesAhead = 32;

// What one thread keeps from row to row.
struct Scratch {
  std::vector<int64_t> skipped;
  std::vector<int32_t> offsets;
  std::vector<double> weights;
  std::vector<double> times;
  std::vector<double> sorted_times;
  std::vector<int64_t> shares;
};

// What function() returns, compiled for vectors as this machine has them.
template <typename Function>
GRAPHSHARD_INLINE auto in_vectors(const Function& function) {
  decltype(function()) result;
  dispatch<32>([&](auto) GRAPHSHARD_INLINE_LAMBDA { result = function(); });
  return result;
}

// Calls visit(offset, position, count) for each run of edges of the row without an excluded one.
template <typename Visit>
GRAPHSHARD_INLINE void visit_runs(const DrawRow& row, const Visit& visit) {
  int64_t offset = 0;
  int64_t position = row.begin;
  for (const int64_t* skip = row.skipped.first; skip != row.skipped.last; ++skip) {
    visit(offset, position, *skip - position);
    offset += *skip - position;
    position = *skip + 1;
  }
  visit(offset, position, row.end - position);
}

struct Positive {
  int64_t count;
  double sum;
};

// Weights that are not positive and finite become 0.
GRAPHSHARD_INLINE Positive clear_others(double* weights, int64_t count) {
  int64_t num_positive = 0;
  double sum = 0;
#pragma omp simd reduction(+ : num_positive, sum)
  for (int64_t i = 0; i < count; ++i) {
    const double weight = weights[i];
    const bool positive = (weight > 0) & (weight < std::numeric_limits<double>::infinity());
    weights[i] = positive ? weight : 0.0;
    sum += weights[i];
    num_positive += positive ? 1 : 0;
  }
  return {num_positive, sum};
}

// Calls use(weights) with the type that they have.
template <typename Use>
GRAPHSHARD_INLINE void with_weights(const Weights& weights, const Use& use) {
  switch (weights.type) {
    case WeightType::kFloat:
      return use(static_cast<const float*>(weights.data));
    case WeightType::kDouble:
      return use(static_cast<const double*>(weights.data));
    case WeightType::kByte:
      return use(static_cast<const uint8_t*>(weights.data));
  }
}

// Fills scratch.weights. An id that no weight has leaves its edge undrawn.
Positive gather_weights(const DrawArguments& a, const DrawRow& row, Scratch& scratch) {
  double* weights = scratch.weights.data();
  with_weights(a.prob, [&](const auto* prob) {
    visit_runs(row, [&](int64_t offset, int64_t position, int64_t count) {
      if (!a.prob.ids) {
        std::copy_n(prob + position, count, weights + offset);
        return;
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t id = a.prob.ids[position + i];
        weights[offset + i] = id >= 0 && id < a.prob.size ? static_cast<double>(prob[id]) : 0.0;
      }
    });
  });
  return in_vectors([&]() GRAPHSHARD_INLINE_LAMBDA { return clear_others(weights, row.degree); });
}

int64_t take_positive(const DrawRow& row, Scratch& scratch) {
  int32_t* out = scratch.offsets.data();
  for (int32_t i = 0; i < row.degree; ++i) {
    *out = i;
    out += scratch.weights[i] > 0 ? 1 : 0;
  }
  return out - scratch.offsets.data();
}

// times = exponential / weight, for weights of 0 infinite and for others finite.
GRAPHSHARD_INLINE void race(const double* weights, int64_t count, double* times) {
  constexpr double kMost = std::numeric_limits<double>::max();
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const double time = exponential(times[i]) / weights[i];
    const double finite = time < kMost ? time : kMost;
    times[i] = weights[i] > 0 ? finite : std::numeric_limits<double>::infinity();
  }
}

GRAPHSHARD_INLINE int64_t count_below(const double* times, int64_t count, double limit) {
  int64_t found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < count; ++i) found += times[i] < limit ? 1 : 0;
  return found;
}

// A limit below which lie exactly `wanted` of the times, or -1 if none is found in a few steps.
// Counting has no branches to mispredict, which is what makes selection slow for short rows.
GRAPHSHARD_INLINE double find_limit(const double* times, int64_t count, int64_t wanted,
                                    double guess) {
  double low = 0;
  double high = std::numeric_limits<double>::infinity();
  double low_count = 0;
  double high_count = 0;
  double limit = guess;
  for (int step = 0; step < 16; ++step) {
    const int64_t below = count_below(times, count, limit);
    if (below == wanted) return limit;
    if (below < wanted) {
      low = limit;
      low_count = static_cast<double>(below);
    } else {
      high = limit;
      high_count = static_cast<double>(below);
    }
    if (high > std::numeric_limits<double>::max()) {
      limit = 2 * low;
    } else if (step % 4 == 3) {
      limit = low + (high - low) / 2;
    } else {  // one half more, since what is wanted is the place after that many
      const double share =
          (static_cast<double>(wanted) + 0.5 - low_count) / (high_count - low_count);
      limit = low + (high - low) * std::min(share, 0.9);
    }
  }
  return -1;
}

// fanout < the number of positive weights.
int64_t draw_race(const DrawRow& row, uint64_t state, int64_t fanout, double sum,
                  Scratch& scratch) {
  double* times = scratch.times.data();
  for (int32_t i = 0; i < row.degree; ++i) {
    times[i] = scaled_unit(word_of(state, static_cast<uint64_t>(i)));
  }
  int64_t ties = 0;
  double limit = in_vectors([&]() GRAPHSHARD_INLINE_LAMBDA {
    race(scratch.weights.data(), row.degree, times);
    return find_limit(times, row.degree, fanout, static_cast<double>(fanout) / sum);
  });
  if (limit < 0) {
    double* sorted = scratch.sorted_times.data();
    std::copy(times, times + row.degree, sorted);
    std::nth_element(sorted, sorted + (fanout - 1), sorted + row.degree);
    limit = sorted[fanout - 1];
    ties = fanout - count_below(times, row.degree, limit);
  }
  int32_t* out = scratch.offsets.data();
  for (int32_t i = 0; i < row.degree; ++i) {
    const bool tie = times[i] == limit && ties > 0;
    ties -= tie ? 1 : 0;
    *out = i;
    out += times[i] < limit || tie ? 1 : 0;
  }
  return out - scratch.offsets.data();
}

// Fills shares = ceil(w / max * 2^s) and returns their sum, which is below 2^62.
GRAPHSHARD_INLINE int64_t share_out(const double* weights, int64_t count, int64_t* shares) {
  constexpr double kMagic = 0x1p52;  // from there on the bits of a double count ones
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = weights[i] > largest ? weights[i] : largest;
  const int places =
      std::min(52, 62 - static_cast<int>(std::bit_width(static_cast<uint64_t>(count))));
  const double scale = static_cast<double>(int64_t{1} << places);
  int64_t total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    const double share = std::ceil(weights[i] / largest * scale);
    shares[i] = std::bit_cast<int64_t>(share + kMagic) - std::bit_cast<int64_t>(kMagic);
    total += shares[i];
  }
  return total;
}

// Fills scratch.shares.
int64_t share_weights(const DrawRow& row, Scratch& scratch) {
  return in_vectors([&]() GRAPHSHARD_INLINE_LAMBDA {
    return share_out(scratch.weights.data(), row.degree, scratch.shares.data());
  });
}

int64_t draw_weighted_repeated(const DrawRow& row, uint64_t state, int64_t fanout,
                               Scratch& scratch) {
  int64_t* running = scratch.shares.data();
  const int64_t total = share_weights(row, scratch);
  for (int32_t i = 1; i < row.degree; ++i) running[i] += running[i - 1];
  for (int64_t i = 0; i < fanout; ++i) {
    const double drawn = unit(word_of(state, static_cast<uint64_t>(i)));
    const int64_t target =
        std::min(static_cast<int64_t>(drawn * static_cast<double>(total)), total - 1);
    // The first that is above the target, by steps without a branch.
    const int64_t* found = running;
    for (int32_t left = row.degree; left > 1;) {
      const int32_t half = left / 2;
      found += found[half - 1] <= target ? half : 0;
      left -= half;
    }
    scratch.offsets[i] = static_cast<int32_t>(found - running);
  }
  return fanout;
}

int64_t draw_labor(const DrawArguments& a, const DrawRow& row, Scratch& scratch) {
  const uint64_t start = mix(a.key ^ kSourceDomain);
  const double degree = static_cast<double>(row.degree);
  const double fanout = static_cast<double>(a.fanout);
  int32_t* out = scratch.offsets.data();
  if (row.degree <= a.fanout) {  // all are certain: no need to look
    for (int32_t i = 0; i < row.degree; ++i) out[i] = i;
    return row.degree;
  }
  visit_runs(row, [&](int64_t offset, int64_t position, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      *out = static_cast<int32_t>(offset + i);
      out += unit(state_of(start, a.labor_ids[position + i])) * degree < fanout ? 1 : 0;
    }
  });
  return out - scratch.offsets.data();
}

// fanout < the number of positive weights.
int64_t draw_weighted_labor(const DrawArguments& a, const DrawRow& row, Scratch& scratch) {
  int64_t* shares = scratch.shares.data();
  const int64_t total = share_weights(row, scratch);
  int64_t wanted = a.fanout;
  int64_t sum = total;
  for (;;) {
    int64_t certain = 0;
    int64_t certain_sum = 0;
    for (int32_t i = 0; i < row.degree; ++i) {
      const bool is_certain = shares[i] * wanted > sum;
      certain += is_certain ? 1 : 0;
      certain_sum += is_certain ? shares[i] : 0;
    }
    if (a.fanout - certain == wanted) break;
    wanted = a.fanout - certain;
    sum = total - certain_sum;
  }
  const uint64_t start = mix(a.key ^ kSourceDomain);
  const double limit = static_cast<double>(sum);
  int32_t* out = scratch.offsets.data();
  visit_runs(row, [&](int64_t offset, int64_t position, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double number = unit(state_of(start, a.labor_ids[position + i]));
      *out = static_cast<int32_t>(offset + i);
      out += number * limit < static_cast<double>(shares[offset + i] * wanted) ? 1 : 0;
    }
  });
  return out - scratch.offsets.data();
}

// Fills scratch.offsets and returns how many there are.
int64_t draw_row(const DrawArguments& a, const DrawRow& row, uint64_t state, Scratch& scratch) {
  const size_t degree = static_cast<size_t>(row.degree);
  // One more, because a candidate is written before it is known to be kept.
  const size_t most = std::max(degree, a.replace ? static_cast<size_t>(a.fanout) : 0) + 1;
  if (scratch.offsets.size() < most) scratch.offsets.resize(most);
  if (a.prob.data == nullptr) return draw_labor(a, row, scratch);
  if (scratch.weights.size() < degree) {
    scratch.weights.resize(degree);
    scratch.shares.resize(degree);
    scratch.times.resize(degree);
    scratch.sorted_times.resize(degree);
  }
  const Positive positive = gather_weights(a, row, scratch);
  if (positive.count == 0) return 0;
  if (a.replace) return draw_weighted_repeated(row, state, a.fanout, scratch);
  if (positive.count <= a.fanout) return take_positive(row, scratch);
  if (a.fanout == 0) return 0;
  if (a.labor_ids) return draw_weighted_labor(a, row, scratch);
  return draw_race(row, state, a.fanout, positive.sum, scratch);
}

// Requests what comes first in a row, after which the processor sees where it goes.
void prefetch_edges(const DrawArguments& a, int64_t at) {
  const int64_t number = a.rows[at];
  if (number < 0 || number >= a.num_rows) return;
  const int64_t begin = a.indptr[number];
  if (begin < 0 || begin > a.num_edges) return;
  for (int64_t line = 0; line < 4; ++line) {
    if (a.prob.ids) {
      const char* ids = static_cast<const char*>(a.prob.ids.address(begin));
      GRAPHSHARD_PREFETCH_OUTER(ids + 64 * line);
    } else if (a.prob.data != nullptr) {
      with_weights(a.prob, [&](const auto* prob) {
        GRAPHSHARD_PREFETCH_OUTER(reinterpret_cast<const char*>(prob + begin) + 64 * line);
      });
    }
    if (a.labor_ids) {
      const char* ids = static_cast<const char*>(a.labor_ids.address(begin));
      GRAPHSHARD_PREFETCH_OUTER(ids + 64 * line);
    }
  }
}

// Appends to positions. Returns -1, or the first row that read_row refuses.
int64_t draw_rows(const DrawArguments& a, int64_t first, int64_t last, int64_t* counts,
                  std::vector<int64_t>& positions) {
  Scratch scratch;
  const uint64_t key_state = mix(a.key ^ kRowDomain);
  for (int64_t at = first; at < last; ++at) {
    if (at + kRowsAhead < last) prefetch_row(a, at + kRowsAhead);
    if (at + kRowsAhead / 2 < last) prefetch_edges(a, at + kRowsAhead / 2);
    DrawRow row;
    if (!read_row(a, at, scratch.skipped, row)) return at;
    const int64_t count = draw_row(a, row, state_of(key_state, a.row_ids[at]), scratch);
    const size_t before = positions.size();
    positions.resize(before + static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) positions[before + i] = row.begin + scratch.offsets[i];
    if (row.skipped.size() > 0) pass_over(row, !a.replace, count, positions.data() + before);
    counts[at] = count;
  }
  return -1;
}

}  // namespace

Draft::Draft(const DrawArguments& a, int64_t* counts, int num_threads) {
  const int64_t num_parts = graphshard::num_parts(a.num_draws, kRowsPerTask, num_threads);
  parts_.resize(static_cast<size_t>(num_parts));
  std::vector<int64_t> bad_rows(static_cast<size_t>(num_parts));
  run_tasks(num_parts, num_threads, [&](int64_t part) {
    bad_rows[part] = draw_rows(a, part_begin(a.num_draws, part, num_parts),
                               part_begin(a.num_draws, part + 1, num_parts), counts, parts_[part]);
  });
  for (int64_t part = 0; part < num_parts; ++part) {
    if (bad_rows[part] >= 0) {
      total_ = -1 - bad_rows[part];
      return;
    }
    starts_.push_back(total_);
    total_ += static_cast<int64_t>(parts_[part].size());
  }
}

template <typename I, typename J>
bool Draft::write(const Sources<J>& sources, const I* eids, I* edges, J* picked,
                  int num_threads) const {
  std::atomic<bool> all_known{true};
  run_tasks(static_cast<int64_t>(starts_.size()), num_threads, [&](int64_t part) {
    const std::vector<int64_t>& positions = parts_[part];
    const int64_t size = static_cast<int64_t>(positions.size());
    I* own_edges = edges + starts_[part];
    J* own_picked = picked + starts_[part];
    if (sources.pieces != nullptr) {
      for (int64_t i = 0; i < size; ++i) own_edges[i] = static_cast<I>(positions[i]);
      if (!look_up_pieces(0, size, *sources.pieces, own_edges, own_picked)) all_known = false;
      return;
    }
    for (int64_t i = 0; i < size; ++i) {
      const int64_t ahead = positions[std::min(i + kEdgesAhead, size - 1)];
      GRAPHSHARD_PREFETCH_OUTER(sources.ids + ahead);
      if (eids != nullptr) GRAPHSHARD_PREFETCH_OUTER(eids + ahead);
      own_edges[i] = static_cast<I>(positions[i]);
      look_up(i, i + 1, sources.ids, eids, own_edges, own_picked);
    }
  });
  return all_known;
}

template bool Draft::write(const Sources<int32_t>&, const int32_t*, int32_t*, int32_t*, int) const;
template bool Draft::write(const Sources<int64_t>&, const int32_t*, int32_t*, int64_t*, int) const;
template bool Draft::write(const Sources<int32_t>&, const int64_t*, int64_t*, int32_t*, int) const;
template bool Draft::write(const Sources<int64_t>&, const int64_t*, int64_t*, int64_t*, int) const;

}  // namespace graphshard
