// SPDX-License-Identifier: Apache-2.0

#include "partition/node_moves.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "runtime/team.h"
#include "simd/macros.h"

namespace graphshard {
namespace {

// Columns ahead of the current one at which what is known of a node is requested from memory.
constexpr int64_t kAhead = 32;

// Moves ahead of the current one whose clusters are requested.
constexpr int64_t kMovesAhead = 16;

// Rows near boundaries that are worth waking a thread.
constexpr int64_t kNearRows = 64;

// The weights of a row's neighbours by label, in the order in which labels first appear. Few labels
// are looked through; of more, a table says where each is.
template <typename V>
class LabelWeights {
 public:
  void begin(int64_t most) {
    size_ = 0;
    if (static_cast<int64_t>(labels_.size()) < most) {
      labels_.resize(static_cast<size_t>(most));
      weights_.resize(static_cast<size_t>(most));
      places_.resize(static_cast<size_t>(most));
    }
    is_short_ = most <= kMostLookedThrough;
    if (is_short_) return;
    // As few as the row needs, in what was made for the longest row so far.
    size_t capacity = 16;
    shift_ = 60;
    while (capacity < 2 * static_cast<size_t>(most)) {
      capacity *= 2;
      --shift_;
    }
    mask_ = capacity - 1;
    if (capacity > slots_.size()) slots_.assign(capacity, kFree);
  }

  GRAPHSHARD_INLINE void add(V label, int64_t weight) {
    if (is_short_) {
      int64_t i = 0;
      while (i < size_ && labels_[i] != label) ++i;
      if (i < size_) {
        weights_[i] += weight;
      } else {
        append(label, weight);
      }
      return;
    }
    size_t slot = (static_cast<uint64_t>(label) * 0x9e3779b97f4a7c15ULL) >> shift_;
    while (slots_[slot] != kFree && labels_[slots_[slot]] != label) slot = (slot + 1) & mask_;
    if (slots_[slot] == kFree) {
      slots_[slot] = static_cast<uint32_t>(size_);
      places_[size_] = static_cast<uint32_t>(slot);
      append(label, weight);
    } else {
      weights_[slots_[slot]] += weight;
    }
  }

  void end() {
    for (int64_t i = 0; i < size_ && !is_short_; ++i) slots_[places_[i]] = kFree;
  }

  int64_t size() const { return size_; }
  V label(int64_t i) const { return labels_[i]; }
  int64_t weight(int64_t i) const { return weights_[i]; }

 private:
  static constexpr int64_t kMostLookedThrough = 12;
  static constexpr uint32_t kFree = std::numeric_limits<uint32_t>::max();

  GRAPHSHARD_INLINE void append(V label, int64_t weight) {
    labels_[size_] = label;
    weights_[size_] = weight;
    ++size_;
  }

  std::vector<uint32_t> slots_;
  std::vector<uint32_t> places_;  // of labels among the slots
  std::vector<V> labels_;
  std::vector<int64_t> weights_;
  int64_t size_ = 0;
  bool is_short_ = true;
  size_t mask_ = 0;
  int shift_ = 60;
};

template <typename V>
GRAPHSHARD_INLINE V checked_col(const RowBlock<V>& block, V col) {
  if (static_cast<uint64_t>(col) >= static_cast<uint64_t>(block.num_nodes)) [[unlikely]] {
    throw std::out_of_range("the id of a node must be below the number of nodes");
  }
  return col;
}

template <typename V>
GRAPHSHARD_INLINE int64_t weight_of(const RowBlock<V>& block, int64_t i) {
  return block.weights ? block.weights[i] : 1;
}

GRAPHSHARD_INLINE void check_below(int64_t number, int64_t end) {
  if (static_cast<uint64_t>(number) >= static_cast<uint64_t>(end)) [[unlikely]] {
    throw std::out_of_range("labels must be below the number of nodes, parts below that of parts");
  }
}

GRAPHSHARD_INLINE uint32_t weight_of(const NodeWeights& weights, int64_t node, int64_t constraint) {
  return weights.of_nodes ? weights.of_nodes[node * weights.num_constraints + constraint] : 1;
}

// Where the edges of each row of a batch begin, and those of the last end.
template <typename V>
void find_begins(const RowBlock<V>& block, int64_t first, int64_t last, int64_t begin,
                 std::vector<int64_t>& begins) {
  begins.resize(static_cast<size_t>(last - first + 1));
  begins[0] = begin;
  for (int64_t r = first; r < last; ++r)
    begins[r - first + 1] = begins[r - first] + block.degrees[r];
}

// Ranges of rows of a batch that threads take, with about equal numbers of edges and rows.
std::vector<int64_t> task_ends(const std::vector<int64_t>& begins, int num_threads) {
  const int64_t num_rows = static_cast<int64_t>(begins.size()) - 1;
  const int64_t work = begins.back() - begins.front() + num_rows;
  const int64_t tasks = num_parts(work, 1 << 11, num_threads);
  std::vector<int64_t> ends;
  int64_t row = 0;
  for (int64_t task = 1; task <= tasks; ++task) {
    const int64_t target = part_begin(work, task, tasks);
    while (row < num_rows && begins[row] - begins[0] + row < target) ++row;
    if (task == tasks) row = num_rows;
    ends.push_back(row);
  }
  return ends;
}

// Calls function(row, begin of its edges) for rows in [first, last) whose node is near. Returns
// where the edges of the last row end.
template <typename V, typename Function>
GRAPHSHARD_INLINE int64_t for_near_rows(const RowBlock<V>& block, const uint8_t* near,
                                        int64_t first, int64_t last, int64_t begin,
                                        const Function& function) {
  constexpr int64_t kSkipped = 16;
  const uint32_t* const degrees = block.degrees;
  for (int64_t r = first; r < last;) {
    const int64_t stop = std::min(r + kSkipped, last);
    if (stop - r == kSkipped) {
      const uint8_t* const some = near + block.first_row + r;
      if (std::none_of(some, some + kSkipped, [](uint8_t is_near) { return is_near; })) {
        begin = std::accumulate(degrees + r, degrees + stop, begin);
        r = stop;
        continue;
      }
    }
    for (; r < stop; ++r) {
      if (near[block.first_row + r]) function(r, begin);
      begin += degrees[r];
    }
  }
  return begin;
}

// Calls choose(state, row, begin, end) for each row of each batch, in several threads, and then
// apply(row, begin, end) one after another; rows count from the block's first. Where there is
// `near`, rows whose node is not near at the beginning of the batch are left out.
template <typename State, typename V, typename Choose, typename Apply>
void in_batches(const RowBlock<V>& block, int num_threads, const uint8_t* near,
                const Choose& choose, const Apply& apply) {
  std::vector<int64_t> begins;
  std::vector<int64_t> rows;
  std::vector<State> states;
  Team team(num_threads);
  int64_t first = 0;
  int64_t begin = 0;
  for (int64_t batch = 0; batch < block.num_batches; ++batch) {
    const int64_t last = block.batch_ends[batch];
    int64_t count = last - first;
    std::vector<int64_t> ends;
    if (near) {
      rows.clear();
      begins.clear();
      begin = for_near_rows(block, near, first, last, begin, [&](int64_t row, int64_t its_begin) {
        rows.push_back(row);
        begins.push_back(its_begin);
      });
      count = static_cast<int64_t>(rows.size());
      const int64_t tasks = num_parts(count, kNearRows, num_threads);
      for (int64_t task = 1; task <= tasks; ++task) ends.push_back(part_begin(count, task, tasks));
    } else {
      find_begins(block, first, last, begin, begins);
      begin = begins.back();
      ends = task_ends(begins, num_threads);
    }
    const auto row_of = [&](int64_t i) { return near ? rows[i] : first + i; };
    const auto end_of = [&](int64_t i) { return begins[i] + block.degrees[row_of(i)]; };
    const int64_t tasks = static_cast<int64_t>(ends.size());
    if (static_cast<int64_t>(states.size()) < tasks) states.resize(static_cast<size_t>(tasks));
    team.run(tasks, [&](int64_t task) {
      for (int64_t i = task == 0 ? 0 : ends[task - 1]; i < ends[task]; ++i) {
        choose(states[task], row_of(i), begins[i], end_of(i));
      }
    });
    for (int64_t i = 0; i < count; ++i) apply(row_of(i), begins[i], end_of(i));
    first = last;
  }
}

}  // namespace

template <typename V>
int64_t propagate_labels(const RowBlock<V>& block, const NodeWeights& weights, V* labels,
                         uint32_t* sizes, const uint32_t* limits, V* favourites, int num_threads) {
  const int64_t num_constraints = weights.num_constraints;
  const int64_t num_edges = [&] {
    int64_t sum = 0;
    for (int64_t r = 0; r < block.num_rows; ++r) sum += block.degrees[r];
    return sum;
  }();
  const auto has_room = [&](int64_t node, V label) {
    check_below(static_cast<int64_t>(label), block.num_nodes);
    for (int64_t j = 0; j < num_constraints; ++j) {
      const uint64_t weight = weight_of(weights, node, j);
      if (weight > 0 && sizes[label * num_constraints + j] + weight > limits[j]) return false;
    }
    return true;
  };
  // Which of two labels of equal weight a node takes. Taking the first would make long strips of
  // a mesh whose nodes are numbered row by row.
  const auto draw = [](int64_t node, V label) {
    uint64_t x = static_cast<uint64_t>(label) * 0x9e3779b97f4a7c15ULL ^
                 static_cast<uint64_t>(node) * 0xc2b2ae3d27d4eb4fULL;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ULL;
    return x ^ (x >> 32);
  };
  std::vector<V> chosen(static_cast<size_t>(block.num_rows));
  int64_t moved = 0;
  in_batches<LabelWeights<V>>(
      block, num_threads, nullptr,
      [&](LabelWeights<V>& of_labels, int64_t row, int64_t begin, int64_t end) {
        const int64_t node = block.first_row + row;
        const V own = labels[node];
        check_below(static_cast<int64_t>(own), block.num_nodes);
        of_labels.begin(end - begin);
        for (int64_t i = begin; i < end; ++i) {
          if (i + kAhead < num_edges)
            prefetch_entry(labels, static_cast<int64_t>(block.cols[i + kAhead]));
          of_labels.add(labels[checked_col(block, block.cols[i])], weight_of(block, i));
        }
        int64_t own_weight = 0;
        for (int64_t i = 0; i < of_labels.size(); ++i) {
          if (of_labels.label(i) == own) own_weight = of_labels.weight(i);
        }
        V best = own;
        V favourite = own;
        int64_t best_weight = own_weight;
        int64_t favourite_weight = own_weight;
        for (int64_t i = 0; i < of_labels.size(); ++i) {
          const int64_t weight = of_labels.weight(i);
          if (weight > favourite_weight) {
            favourite_weight = weight;
            favourite = of_labels.label(i);
          }
          const bool is_better =
              weight > best_weight || (weight == best_weight && best != own &&
                                       draw(node, of_labels.label(i)) > draw(node, best));
          if (is_better && has_room(node, of_labels.label(i))) {
            best_weight = weight;
            best = of_labels.label(i);
          }
        }
        of_labels.end();
        chosen[row] = best;
        if (favourites) favourites[node] = favourite;
      },
      [&](int64_t row, int64_t, int64_t) {
        const int64_t node = block.first_row + row;
        if (row + kMovesAhead < block.num_rows) {
          const int64_t next = row + kMovesAhead;
          prefetch_entry(sizes, static_cast<int64_t>(chosen[next]) * num_constraints);
          prefetch_entry(sizes, static_cast<int64_t>(labels[node + kMovesAhead]) * num_constraints);
        }
        const V own = labels[node];
        const V best = chosen[row];
        if (best == own || !has_room(node, best)) return;
        // Two nodes that chose each other would change places: the first to move finds the other.
        bool is_left = true;
        for (int64_t j = 0; j < num_constraints; ++j) {
          is_left &= sizes[best * num_constraints + j] == 0;
        }
        if (is_left) return;
        for (int64_t j = 0; j < num_constraints; ++j) {
          const uint32_t weight = weight_of(weights, node, j);
          sizes[own * num_constraints + j] -= weight;
          sizes[best * num_constraints + j] += weight;
        }
        labels[node] = best;
        ++moved;
      });
  return moved;
}

template <typename V>
int64_t contract(const RowBlock<V>& block, const V* clusters, V* rows, V* cols, uint32_t* weights,
                 int num_threads) {
  std::vector<int64_t> begins;
  find_begins(block, 0, block.num_rows, 0, begins);
  const int64_t num_edges = begins.back();
  const std::vector<int64_t> ends = task_ends(begins, num_threads);
  const int64_t tasks = static_cast<int64_t>(ends.size());
  // Each task writes from where its edges begin, and there are never more; gaps are closed after.
  std::vector<int64_t> counts(static_cast<size_t>(tasks), 0);
  run_once(tasks, num_threads, [&](int64_t task) {
    LabelWeights<V> of_labels;
    const int64_t first = task == 0 ? 0 : ends[task - 1];
    int64_t written = begins[first];
    for (int64_t r = first; r < ends[task]; ++r) {
      const V own = clusters[block.first_row + r];
      of_labels.begin(begins[r + 1] - begins[r]);
      for (int64_t i = begins[r]; i < begins[r + 1]; ++i) {
        if (i + kAhead < num_edges)
          prefetch_entry(clusters, static_cast<int64_t>(block.cols[i + kAhead]));
        const V other = clusters[checked_col(block, block.cols[i])];
        if (other != own) of_labels.add(other, weight_of(block, i));
      }
      for (int64_t i = 0; i < of_labels.size(); ++i) {
        rows[written] = own;
        cols[written] = of_labels.label(i);
        weights[written++] = static_cast<uint32_t>(
            std::min<int64_t>(of_labels.weight(i), std::numeric_limits<uint32_t>::max()));
      }
      of_labels.end();
    }
    counts[task] = written - begins[first];
  });
  int64_t total = tasks == 0 ? 0 : counts[0];
  for (int64_t task = 1; task < tasks; ++task) {
    const int64_t from = begins[ends[task - 1]];
    std::copy_n(rows + from, counts[task], rows + total);
    std::copy_n(cols + from, counts[task], cols + total);
    std::copy_n(weights + from, counts[task], weights + total);
    total += counts[task];
  }
  return total;
}

namespace {

struct PartWeights {
  std::vector<int64_t> of_parts;
  std::vector<uint16_t> touched;
  std::vector<uint8_t> is_reader;  // whether an edge of the node leads into a part
};

}  // namespace

template <typename V>
int64_t refine_parts(const RowBlock<V>& block, const NodeWeights& weights,
                     const Refinement& refinement, int num_threads) {
  const int64_t num_constraints = weights.num_constraints;
  const int64_t num_parts = refinement.num_parts;
  const int64_t num_edges = [&] {
    int64_t sum = 0;
    for (int64_t r = 0; r < block.num_rows; ++r) sum += block.degrees[r];
    return sum;
  }();
  uint16_t* const parts = refinement.parts;
  int64_t* const loads = refinement.loads;
  const auto has_room = [&](int64_t node, int64_t part) {
    for (int64_t j = 0; j < num_constraints; ++j) {
      const int64_t weight = weight_of(weights, node, j);
      if (weight > 0 && loads[part * num_constraints + j] + weight > refinement.limits[j]) {
        return false;
      }
    }
    return true;
  };
  // Whether the part is too heavy in something that the node counts for.
  const auto must_leave = [&](int64_t node, int64_t part) {
    for (int64_t j = 0; j < num_constraints; ++j) {
      if (loads[part * num_constraints + j] > refinement.limits[j] &&
          weight_of(weights, node, j) > 0) {
        return true;
      }
    }
    return false;
  };
  const auto fullness = [&](int64_t part) {
    double most = 0;
    for (int64_t j = 0; j < num_constraints; ++j) {
      most = std::max(most, static_cast<double>(loads[part * num_constraints + j]) /
                                static_cast<double>(std::max<int64_t>(refinement.limits[j], 1)));
    }
    return most;
  };
  std::vector<uint16_t> chosen(static_cast<size_t>(block.num_rows));
  int64_t moved = 0;
  in_batches<PartWeights>(
      block, num_threads, nullptr,
      [&](PartWeights& of, int64_t row, int64_t begin, int64_t end) {
        const int64_t node = block.first_row + row;
        const int64_t own = parts[node];
        check_below(own, num_parts);
        if (of.of_parts.empty()) of.of_parts.assign(static_cast<size_t>(num_parts), 0);
        for (int64_t i = begin; i < end; ++i) {
          if (i + kAhead < num_edges)
            prefetch_entry(parts, static_cast<int64_t>(block.cols[i + kAhead]));
          const uint16_t part = parts[checked_col(block, block.cols[i])];
          check_below(part, num_parts);
          if (of.of_parts[part] == 0) of.touched.push_back(part);
          of.of_parts[part] += weight_of(block, i);
        }
        const bool leaves = must_leave(node, own);
        const int64_t least = of.of_parts[own] - (leaves ? refinement.allowed_loss + 1 : 0);
        int64_t best = own;
        int64_t best_weight = least;
        for (const uint16_t part : of.touched) {
          if (part != own && of.of_parts[part] > best_weight && has_room(node, part)) {
            best = part;
            best_weight = of.of_parts[part];
          }
        }
        if (leaves && best == own && best_weight < 0) {  // to where it has no neighbours
          double emptiest = std::numeric_limits<double>::infinity();
          for (int64_t part = 0; part < num_parts; ++part) {
            if (part == own || fullness(part) >= emptiest || !has_room(node, part)) continue;
            emptiest = fullness(part);
            best = part;
          }
        }
        for (const uint16_t part : of.touched) of.of_parts[part] = 0;
        of.touched.clear();
        chosen[row] = static_cast<uint16_t>(best);
      },
      [&](int64_t row, int64_t begin, int64_t end) {
        const int64_t node = block.first_row + row;
        const int64_t own = parts[node];
        const int64_t best = chosen[row];
        if (best == own || !has_room(node, best)) return;
        // Neighbours may have moved meanwhile, such as to where the node comes from.
        int64_t gain = 0;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t part = parts[block.cols[i]];
          gain += part == best ? weight_of(block, i) : part == own ? -weight_of(block, i) : 0;
        }
        if (gain <= 0 && (gain < -refinement.allowed_loss || !must_leave(node, own))) return;
        for (int64_t j = 0; j < num_constraints; ++j) {
          const int64_t weight = weight_of(weights, node, j);
          loads[own * num_constraints + j] -= weight;
          loads[best * num_constraints + j] += weight;
        }
        parts[node] = static_cast<uint16_t>(best);
        ++moved;
      });
  return moved;
}

namespace {

GRAPHSHARD_INLINE int code_of(const uint8_t* codes, int64_t part) {
  return (codes[part >> 2] >> (2 * (part & 3))) & 3;
}

GRAPHSHARD_INLINE void set_code(uint8_t* codes, int64_t part, int code) {
  const int shift = static_cast<int>(2 * (part & 3));
  codes[part >> 2] = static_cast<uint8_t>((codes[part >> 2] & ~(3 << shift)) | (code << shift));
}

}  // namespace

// The edges of a row: those of its node's sources, and those that lead out of it.
struct RowSpan {
  int64_t begin;
  int64_t end_of_sources;
  int64_t begin_of_readers;
  int64_t end;
};

template <typename V>
GRAPHSHARD_INLINE RowSpan span_of(const RowBlock<V>& block, int64_t row, int64_t begin,
                                  int64_t end) {
  if (!block.in_degrees) return {begin, end, begin, end};
  const int64_t middle = begin + std::min<int64_t>(block.in_degrees[row], end - begin);
  return {begin, middle, middle, end};
}

template <typename V>
int64_t count_halos(const RowBlock<V>& block, const uint16_t* parts, int64_t num_parts,
                    uint8_t* near, uint8_t* table, int64_t* halos, int num_threads) {
  const int64_t bytes = halo_bytes(num_parts);
  const int64_t tasks = graphshard::num_parts(block.num_rows, 1 << 13, num_threads);
  // Where the edges of each task begin.
  std::vector<int64_t> begins{0};
  for (int64_t task = 0; task < tasks; ++task) {
    begins.push_back(std::accumulate(block.degrees + part_begin(block.num_rows, task, tasks),
                                     block.degrees + part_begin(block.num_rows, task + 1, tasks),
                                     begins.back()));
  }
  const int64_t num_edges = begins.back();
  std::vector<int64_t> counts(static_cast<size_t>(tasks * num_parts), 0);
  std::vector<int64_t> cuts(static_cast<size_t>(tasks), 0);
  run_once(tasks, num_threads, [&](int64_t task) {
    int64_t* const count = counts.data() + task * num_parts;
    int64_t cut = 0;
    const auto count_row = [&](int64_t r, int64_t begin) {
      const int64_t node = block.first_row + r;
      uint8_t* const codes = table + node * bytes;
      std::fill_n(codes, bytes, uint8_t{0});
      check_below(parts[node], num_parts);
      const RowSpan span = span_of(block, r, begin, begin + block.degrees[r]);
      bool is_near = false;
      for (int64_t i = span.begin_of_readers; i < span.end; ++i) {
        if (i + kAhead < num_edges) {
          prefetch_entry(parts, static_cast<int64_t>(block.cols[i + kAhead]));
        }
        const int64_t part = parts[checked_col(block, block.cols[i])];
        check_below(part, num_parts);
        const int code = code_of(codes, part);
        cut += part != parts[node];
        is_near |= part != parts[node];
        if (code == 0 && part != parts[node]) ++count[part];
        if (code < 2) set_code(codes, part, code + 1);
      }
      for (int64_t i = span.begin; i < span.begin_of_readers && !is_near; ++i) {
        is_near = parts[checked_col(block, block.cols[i])] != parts[node];
      }
      near[node] = is_near;
    };
    for_near_rows(block, near, part_begin(block.num_rows, task, tasks),
                  part_begin(block.num_rows, task + 1, tasks), begins[task], count_row);
    cuts[task] = cut;
  });
  for (int64_t i = 0; i < tasks * num_parts; ++i) halos[i % num_parts] += counts[i];
  return std::accumulate(cuts.begin(), cuts.end(), int64_t{0});
}

template <typename V>
int64_t limit_halos(const RowBlock<V>& block, const NodeWeights& weights,
                    const Refinement& refinement, const HaloLimit& limit, int num_threads) {
  const int64_t num_constraints = weights.num_constraints;
  const int64_t num_parts = refinement.num_parts;
  const int64_t bytes = halo_bytes(num_parts);
  const int64_t num_edges = [&] {
    int64_t sum = 0;
    for (int64_t r = 0; r < block.num_rows; ++r) sum += block.degrees[r];
    return sum;
  }();
  uint16_t* const parts = refinement.parts;
  int64_t* const halos = limit.halos;
  // In whole numbers: what moves must not depend on how a machine rounds.
  const auto price_of = [&](int64_t part) {
    constexpr int64_t kWhole = 1 << 10;
    const int64_t whole = std::max<int64_t>(limit.largest, 1);
    int64_t share = std::clamp<int64_t>(halos[part], 0, whole) * kWhole / whole;
    for (int power = 2; power <= 8; power *= 2) share = share * share / kWhole;
    return limit.price * share / kWhole;
  };
  std::vector<int64_t> prices(static_cast<size_t>(num_parts));
  for (int64_t part = 0; part < num_parts; ++part) prices[part] = price_of(part);
  const auto has_room = [&](int64_t node, int64_t part) {
    for (int64_t j = 0; j < num_constraints; ++j) {
      const int64_t weight = weight_of(weights, node, j);
      if (weight > 0 &&
          refinement.loads[part * num_constraints + j] + weight > refinement.limits[j]) {
        return false;
      }
    }
    return true;
  };
  const auto code_at = [&](int64_t i, int64_t part) {
    return code_of(limit.table + static_cast<int64_t>(block.cols[i]) * bytes, part);
  };
  const auto may_grow = [&](int64_t part, int64_t by) {
    return by <= 0 || halos[part] + by <= limit.largest;
  };
  struct Move {
    int64_t part;
    int64_t of_old;  // by how much the halo of the old part grows
    int64_t of_new;
    int64_t loss;  // by how much the cut grows
  };
  // The cheapest move of a node, to any part or to a single one; to its own if none saves anything.
  const auto best_move = [&](PartWeights& of, int64_t row, int64_t begin, int64_t end,
                             int64_t only) {
    const int64_t own = parts[block.first_row + row];
    Move best{own, 0, 0, 0};
    check_below(own, num_parts);
    if (of.of_parts.empty()) of.of_parts.assign(static_cast<size_t>(num_parts), 0);
    if (of.is_reader.empty()) of.is_reader.assign(static_cast<size_t>(num_parts), 0);
    const RowSpan span = span_of(block, row, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < num_edges) {
        prefetch_entry(parts, static_cast<int64_t>(block.cols[i + kAhead]));
      }
      const uint16_t part = parts[checked_col(block, block.cols[i])];
      check_below(part, num_parts);
      if (of.of_parts[part]++ == 0) of.touched.push_back(part);
      of.is_reader[part] |= i >= span.begin_of_readers;
    }
    const bool is_inside = of.touched.empty() || (of.touched.size() == 1 && of.touched[0] == own);
    int64_t of_old = 0;
    if (!is_inside) {
      of_old = of.is_reader[own];
      for (int64_t i = begin; i < span.end_of_sources; ++i) {
        of_old -= parts[block.cols[i]] != own && code_at(i, own) == 1;
      }
    }
    int64_t least = 0;
    for (const uint16_t part : of.touched) {
      if (is_inside || part == own || (only >= 0 && part != only) ||
          !has_room(block.first_row + row, part) || !may_grow(own, of_old)) {
        continue;
      }
      const int64_t loss = of.of_parts[own] - of.of_parts[part];
      const int64_t cost = kEdgePrice * loss + prices[own] * of_old;
      if (loss > 0 && loss > *limit.budget) continue;
      int64_t of_new = -of.is_reader[part];
      if (cost + prices[part] * of_new >= least) continue;  // at best
      for (int64_t i = begin; i < span.end_of_sources; ++i) {
        of_new += parts[block.cols[i]] != part && code_at(i, part) == 0;
      }
      const int64_t total = cost + prices[part] * of_new;
      if (total >= least || !may_grow(part, of_new)) continue;
      least = total;
      best = {part, of_old, of_new, loss};
    }
    for (const uint16_t part : of.touched) of.of_parts[part] = of.is_reader[part] = 0;
    of.touched.clear();
    return best;
  };
  std::vector<uint16_t> chosen(static_cast<size_t>(block.num_rows));
  PartWeights again;
  int64_t moved = 0;
  in_batches<PartWeights>(
      block, num_threads, limit.near,
      [&](PartWeights& of, int64_t row, int64_t begin, int64_t end) {
        chosen[row] = static_cast<uint16_t>(best_move(of, row, begin, end, -1).part);
      },
      [&](int64_t row, int64_t begin, int64_t end) {
        const int64_t node = block.first_row + row;
        const int64_t own = parts[node];
        if (chosen[row] == own) return;
        // Neighbours may have moved meanwhile.
        const Move move = best_move(again, row, begin, end, chosen[row]);
        if (move.part == own) return;
        for (int64_t j = 0; j < num_constraints; ++j) {
          const int64_t weight = weight_of(weights, node, j);
          refinement.loads[own * num_constraints + j] -= weight;
          refinement.loads[move.part * num_constraints + j] += weight;
        }
        parts[node] = static_cast<uint16_t>(move.part);
        halos[own] += move.of_old;
        halos[move.part] += move.of_new;
        for (const int64_t part : {own, move.part}) prices[part] = price_of(part);
        *limit.budget -= move.loss;
        for (int64_t i = begin; i < end; ++i) limit.near[block.cols[i]] = 1;
        const int64_t last = span_of(block, row, begin, end).end_of_sources;
        for (int64_t i = begin; i < last; ++i) {
          uint8_t* const codes = limit.table + static_cast<int64_t>(block.cols[i]) * bytes;
          if (code_of(codes, own) == 1) set_code(codes, own, 0);
          const int code = code_of(codes, move.part);
          if (code < 2) set_code(codes, move.part, code + 1);
        }
        ++moved;
      });
  return moved;
}

#define GRAPHSHARD_MOVES(V)                                                                      \
  template int64_t propagate_labels(const RowBlock<V>&, const NodeWeights&, V*, uint32_t*,       \
                                    const uint32_t*, V*, int);                                   \
  template int64_t contract(const RowBlock<V>&, const V*, V*, V*, uint32_t*, int);               \
  template int64_t refine_parts(const RowBlock<V>&, const NodeWeights&, const Refinement&, int); \
  template int64_t count_halos(const RowBlock<V>&, const uint16_t*, int64_t, uint8_t*, uint8_t*, \
                               int64_t*, int);                                                   \
  template int64_t limit_halos(const RowBlock<V>&, const NodeWeights&, const Refinement&,        \
                               const HaloLimit&, int);
GRAPHSHARD_MOVES(uint32_t)
GRAPHSHARD_MOVES(int64_t)
#undef GRAPHSHARD_MOVES

}  // namespace graphshard
