// SPDX-License-Identifier: Apache-2.0

#include "partition/local_search.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "simd/macros.h"

namespace graphshard {
namespace {

// Nodes of more neighbours stay: after each move near one, all its edges would be looked at.
constexpr int64_t kMostDegree = 512;

// Numbers that look drawn, of a counter.
GRAPHSHARD_INLINE uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

class Search {
 public:
  Search(const GraphInMemory& graph, const NodeWeights& weights, const Refinement& refinement,
         const SearchLimits& limits)
      : graph_(graph),
        weights_(weights),
        refinement_(refinement),
        num_free_(limits.num_free),
        patience_(limits.patience),
        of_parts_(static_cast<size_t>(refinement.num_parts), 0),
        planned_(static_cast<size_t>(limits.num_free), Plan{0, 0, 0}),
        has_moved_(static_cast<size_t>(limits.num_free), 0) {}

  // Searches from all nodes on boundaries; what they gained.
  int64_t round(int64_t number) {
    std::vector<uint32_t> seeds;
    for (int64_t node = 0; node < num_free_; ++node) {
      if (degree(node) > kMostDegree) continue;
      const uint16_t own = refinement_.parts[node];
      for (int64_t i = graph_.indptr[node]; i < graph_.indptr[node + 1]; ++i) {
        if (refinement_.parts[graph_.cols[i]] != own) {
          seeds.push_back(static_cast<uint32_t>(node));
          break;
        }
      }
    }
    std::fill(has_moved_.begin(), has_moved_.end(), uint8_t{0});
    for (size_t i = seeds.size(); i > 1; --i) {
      const uint64_t drawn = mixed(static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15ULL + i);
      std::swap(seeds[i - 1], seeds[drawn % i]);
    }
    int64_t gained = 0;
    for (const uint32_t seed : seeds) {
      if (!has_moved_[seed]) gained += search(seed);
    }
    return gained;
  }

 private:
  // The best move of a node; the entry of the queue with the same version is the valid one.
  struct Plan {
    int64_t gain;
    uint32_t version;  // 0: there is none
    uint16_t part;
  };
  struct Entry {
    int64_t gain;
    uint32_t version;
    uint32_t node;
    // Of equal gains the latest comes first: a search stays where it is.
    bool operator<(const Entry& other) const {
      return gain != other.gain ? gain < other.gain : version < other.version;
    }
  };
  struct Move {
    uint32_t node;
    uint16_t from;
  };

  int64_t degree(int64_t node) const { return graph_.indptr[node + 1] - graph_.indptr[node]; }

  bool has_room(int64_t node, int64_t part) const {
    const int64_t count = weights_.num_constraints;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t weight = weights_.of_nodes ? weights_.of_nodes[node * count + j] : 1;
      if (weight > 0 && refinement_.loads[part * count + j] + weight > refinement_.limits[j]) {
        return false;
      }
    }
    return true;
  }

  void move(int64_t node, uint16_t part) {
    const int64_t count = weights_.num_constraints;
    const int64_t own = refinement_.parts[node];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t weight = weights_.of_nodes ? weights_.of_nodes[node * count + j] : 1;
      refinement_.loads[own * count + j] -= weight;
      refinement_.loads[part * count + j] += weight;
    }
    refinement_.parts[node] = part;
  }

  // Looks for the best move of a node, which becomes an entry of the queue if it is a new one.
  void plan(uint32_t node) {
    const uint16_t own = refinement_.parts[node];
    for (int64_t i = graph_.indptr[node]; i < graph_.indptr[node + 1]; ++i) {
      const uint16_t part = refinement_.parts[graph_.cols[i]];
      if (of_parts_[part] == 0) touched_.push_back(part);
      of_parts_[part] += graph_.weights ? graph_.weights[i] : 1;
    }
    int64_t best = std::numeric_limits<int64_t>::min();
    uint16_t target = own;
    for (const uint16_t part : touched_) {
      if (part != own && of_parts_[part] > best && has_room(node, part)) {
        best = of_parts_[part];
        target = part;
      }
    }
    const int64_t gain = target == own ? 0 : best - of_parts_[own];
    for (const uint16_t part : touched_) of_parts_[part] = 0;
    touched_.clear();
    Plan& planned = planned_[node];
    if (target == own) {
      planned.version = 0;
      return;
    }
    if (planned.version != 0 && planned.gain == gain && planned.part == target) return;
    planned = {gain, ++version_, target};
    reached_.push_back(node);
    queue_.push_back({gain, version_, node});
    std::push_heap(queue_.begin(), queue_.end());
  }

  // One search; what was gained.
  int64_t search(uint32_t seed) {
    moves_.clear();
    version_ = 0;
    int64_t total = 0;
    int64_t best = 0;
    size_t kept = 0;  // moves up to the best moment
    plan(seed);
    while (!queue_.empty() && static_cast<int64_t>(moves_.size() - kept) < patience_) {
      std::pop_heap(queue_.begin(), queue_.end());
      const Entry entry = queue_.back();
      queue_.pop_back();
      Plan& planned = planned_[entry.node];
      if (planned.version != entry.version) continue;
      planned.version = 0;
      if (!has_room(entry.node, planned.part)) {
        plan(entry.node);
        continue;
      }
      moves_.push_back({entry.node, refinement_.parts[entry.node]});
      has_moved_[entry.node] = 1;
      move(entry.node, planned.part);
      total += planned.gain;
      if (total > best) {
        best = total;
        kept = moves_.size();
      }
      for (int64_t i = graph_.indptr[entry.node]; i < graph_.indptr[entry.node + 1]; ++i) {
        const uint32_t other = graph_.cols[i];
        if (other < num_free_ && !has_moved_[other] && degree(other) <= kMostDegree) plan(other);
      }
    }
    while (moves_.size() > kept) {
      move(moves_.back().node, moves_.back().from);
      moves_.pop_back();
    }
    for (const uint32_t node : reached_) planned_[node].version = 0;
    reached_.clear();
    queue_.clear();
    return best;
  }

  const GraphInMemory& graph_;
  const NodeWeights& weights_;
  const Refinement& refinement_;
  const int64_t num_free_;
  const int64_t patience_;
  std::vector<int64_t> of_parts_;
  std::vector<uint16_t> touched_;
  std::vector<Plan> planned_;
  std::vector<uint8_t> has_moved_;
  std::vector<Entry> queue_;
  std::vector<uint32_t> reached_;
  std::vector<Move> moves_;
  uint32_t version_ = 0;
};

void check(const GraphInMemory& graph, const Refinement& refinement) {
  if (graph.indptr[0] != 0 || graph.indptr[graph.num_nodes] != graph.num_edges) {
    throw std::out_of_range("indptr must begin with 0 and end with the number of edges");
  }
  bool is_right = true;
  for (int64_t node = 0; node < graph.num_nodes; ++node) {
    is_right &= graph.indptr[node] <= graph.indptr[node + 1];
    is_right &= refinement.parts[node] < refinement.num_parts;
  }
  for (int64_t i = 0; i < graph.num_edges; ++i) is_right &= graph.cols[i] < graph.num_nodes;
  if (!is_right) {
    throw std::out_of_range(
        "indptr must ascend, neighbours be below the number of nodes, parts below that of parts");
  }
}

}  // namespace

int64_t search_moves(const GraphInMemory& graph, const NodeWeights& weights,
                     const Refinement& refinement, const SearchLimits& limits) {
  check(graph, refinement);
  Search search(graph, weights, refinement, limits);
  int64_t first = 0;
  int64_t total = 0;
  for (int64_t number = 0; number < limits.rounds; ++number) {
    const int64_t gained = search.round(number);
    total += gained;
    if (number == 0) first = gained;
    if (gained * limits.share <= first) break;
  }
  return total;
}

}  // namespace graphshard
