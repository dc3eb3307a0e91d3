// SPDX-License-Identifier: Apache-2.0

#include "partition/local_search.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/team.h"
#include "simd/macros.h"

namespace graphshard {
namespace {

// Nodes of more neighbours stay: after each move near one, all its edges would be looked at.
constexpr int64_t kMostDegree = 512;

// Searches that begin with the same parts: at most so many, and at most one of so many that a round
// is expected to make, as two of them may do the same.
constexpr size_t kMostInBatch = 128;
constexpr size_t kBatches = 32;
constexpr size_t kFirstSearches = 8;  // whose moves are a guess
constexpr int64_t kMostPatience = 1 << 20;

// In rounds, seeds of searches, and these over nodes, from which on nodes are ordered first.
constexpr int64_t kMostRounds = 1 << 20;
constexpr int64_t kOrderedShare = 4;

constexpr size_t kLine = 128;  // bytes that cores may fetch together

// Each thread has about 20 bytes for each node.
constexpr int kMostSearchers = 16;

// Numbers that look drawn, of a counter.
GRAPHSHARD_INLINE uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

bool is_on_boundary(const GraphInMemory& graph, const uint16_t* parts, int64_t node) {
  for (int64_t i = graph.indptr[node]; i < graph.indptr[node + 1]; ++i) {
    if (parts[graph.cols[i]] != parts[node]) return true;
  }
  return false;
}

// Ascending.
std::vector<uint32_t> nodes_on_boundaries(const GraphInMemory& graph, const uint16_t* parts,
                                          int64_t num_free, Team& team) {
  const int64_t tasks = num_parts(num_free, 1 << 13, team.num_threads());
  std::vector<std::vector<uint32_t>> found(static_cast<size_t>(tasks));
  team.run(tasks, [&](int64_t task) {
    const int64_t last = part_begin(num_free, task + 1, tasks);
    for (int64_t node = part_begin(num_free, task, tasks); node < last; ++node) {
      if (is_on_boundary(graph, parts, node)) found[task].push_back(static_cast<uint32_t>(node));
    }
  });
  for (int64_t task = 1; task < tasks; ++task) {
    found[0].insert(found[0].end(), found[task].begin(), found[task].end());
  }
  return std::move(found[0]);
}

// The nodes as a walk comes by them, breadth first.
std::vector<uint32_t> walked_nodes(const GraphInMemory& graph, int64_t num_free) {
  std::vector<uint8_t> is_reached(static_cast<size_t>(num_free), 0);
  std::vector<uint32_t> nodes;
  nodes.reserve(static_cast<size_t>(graph.num_nodes));
  const auto reach = [&](uint32_t node) {
    if (node >= num_free || is_reached[node]) return;
    is_reached[node] = 1;
    nodes.push_back(node);
  };
  for (int64_t start = 0; start < num_free; ++start) {
    size_t next = nodes.size();
    reach(static_cast<uint32_t>(start));
    for (; next < nodes.size(); ++next) {
      const uint32_t node = nodes[next];
      for (int64_t i = graph.indptr[node]; i < graph.indptr[node + 1]; ++i) reach(graph.cols[i]);
    }
  }
  for (int64_t node = num_free; node < graph.num_nodes; ++node) {
    nodes.push_back(static_cast<uint32_t>(node));
  }
  return nodes;
}

// A graph with its nodes in another order, so that what is near each other is so in memory.
class OrderedGraph {
 public:
  OrderedGraph(const GraphInMemory& graph, const NodeWeights& weights, std::vector<uint32_t> nodes,
               Team& team)
      : nodes(std::move(nodes)) {
    const size_t num_nodes = static_cast<size_t>(graph.num_nodes);
    const int64_t num_constraints = weights.num_constraints;
    std::vector<uint32_t> numbers(num_nodes);
    indptr_.resize(num_nodes + 1);
    for (size_t node = 0; node < num_nodes; ++node) {
      const uint32_t old = this->nodes[node];
      numbers[old] = static_cast<uint32_t>(node);
      indptr_[node + 1] = indptr_[node] + graph.indptr[old + 1] - graph.indptr[old];
    }
    cols_.resize(static_cast<size_t>(graph.num_edges));
    if (graph.weights) weights_.resize(static_cast<size_t>(graph.num_edges));
    if (weights.of_nodes) of_nodes_.resize(num_nodes * static_cast<size_t>(num_constraints));
    const int64_t tasks = num_parts(graph.num_nodes, 1 << 14, team.num_threads());
    team.run(tasks, [&](int64_t task) {
      const int64_t last = part_begin(graph.num_nodes, task + 1, tasks);
      for (int64_t node = part_begin(graph.num_nodes, task, tasks); node < last; ++node) {
        const int64_t old = this->nodes[node];
        int64_t to = indptr_[node];
        for (int64_t i = graph.indptr[old]; i < graph.indptr[old + 1]; ++i, ++to) {
          cols_[to] = numbers[graph.cols[i]];
          if (graph.weights) weights_[to] = graph.weights[i];
        }
        for (int64_t j = 0; weights.of_nodes && j < num_constraints; ++j) {
          of_nodes_[node * num_constraints + j] = weights.of_nodes[old * num_constraints + j];
        }
      }
    });
    this->graph = {indptr_.data(), cols_.data(), graph.weights ? weights_.data() : nullptr,
                   graph.num_nodes, graph.num_edges};
    this->weights = {weights.of_nodes ? of_nodes_.data() : nullptr, num_constraints};
  }

  const std::vector<uint32_t> nodes;  // which they were
  GraphInMemory graph;
  NodeWeights weights;

 private:
  std::vector<int64_t> indptr_;
  std::vector<uint32_t> cols_;
  std::vector<uint32_t> weights_;
  std::vector<uint32_t> of_nodes_;
};

struct Move {
  uint32_t node;
  uint16_t part;  // where it goes
};

// The part of each node, and what parts weigh.
class Division {
 public:
  Division(const NodeWeights& weights, const Refinement& refinement, int64_t num_nodes)
      : loads(refinement.loads, refinement.loads + refinement.num_parts * weights.num_constraints),
        parts(refinement.parts, refinement.parts + num_nodes),
        weights_(weights),
        limits_(refinement.limits) {}

  std::vector<int64_t> loads;
  std::vector<uint16_t> parts;

  bool has_room(int64_t node, int64_t part) const {
    const int64_t count = weights_.num_constraints;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t weight = weight_of(node, j);
      if (weight > 0 && loads[part * count + j] + weight > limits_[j]) return false;
    }
    return true;
  }

  // Returns what takes it back.
  Move move(const Move& move) {
    const int64_t count = weights_.num_constraints;
    const uint16_t own = parts[move.node];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t weight = weight_of(move.node, j);
      loads[own * count + j] -= weight;
      loads[move.part * count + j] += weight;
    }
    parts[move.node] = move.part;
    return {move.node, own};
  }

 private:
  int64_t weight_of(int64_t node, int64_t constraint) const {
    return weights_.of_nodes ? weights_.of_nodes[node * weights_.num_constraints + constraint] : 1;
  }

  const NodeWeights weights_;
  const int64_t* const limits_;
};

// The moves of a search, of which the first ones, up to its best moment, are good. Threads write
// those of neighbouring searches at once: each has cache lines of its own.
struct alignas(kLine) Outcome {
  std::vector<Move> moves;
  size_t num_good = 0;
};

// Searches by one thread, each of which begins with the same parts.
class alignas(kLine) Searcher {
 public:
  Searcher(const GraphInMemory& graph, const Division& division, const std::vector<uint8_t>& stays,
           int64_t num_parts, const SearchLimits& limits)
      : division(division),
        graph_(graph),
        stays_(stays),
        num_free_(limits.num_free),
        patience_(limits.patience),
        of_parts_(static_cast<size_t>(num_parts), 0) {}

  // As it is at the beginning of each search.
  Division division;

  // Makes the moves that were made since the last time.
  void follow(const std::vector<Move>& made) {
    for (; num_followed_ < made.size(); ++num_followed_) division.move(made[num_followed_]);
  }

  void forget() { num_followed_ = 0; }

  void search(uint32_t seed, Outcome& outcome) {
    // First touched by the thread that uses it.
    if (planned_.empty()) planned_.resize(static_cast<size_t>(num_free_));
    std::vector<Move>& moves = outcome.moves;
    moves.clear();
    outcome.num_good = 0;
    back_.clear();
    queue_.clear();
    if (version_ >> 31) {
      std::fill(planned_.begin(), planned_.end(), Plan{});
      version_ = 0;
    }
    first_version_ = version_ + 1;
    int64_t total = 0;
    int64_t best = 0;
    plan(seed);
    while (!queue_.empty() && static_cast<int64_t>(moves.size() - outcome.num_good) < patience_) {
      std::pop_heap(queue_.begin(), queue_.end());
      const Entry entry = queue_.back();
      queue_.pop_back();
      Plan& planned = planned_[entry.node];
      if (planned.version != entry.version) continue;
      if (!division.has_room(entry.node, planned.part)) {
        planned.version = 0;
        plan(entry.node);
        continue;
      }
      planned.has_moved = true;
      moves.push_back({entry.node, planned.part});
      back_.push_back(division.move(moves.back()));
      total += planned.gain;
      if (total > best) {
        best = total;
        outcome.num_good = moves.size();
      }
      for (int64_t i = graph_.indptr[entry.node]; i < graph_.indptr[entry.node + 1]; ++i) {
        const uint32_t other = graph_.cols[i];
        if (other < num_free_ && !stays_[other]) plan(other);
      }
    }
    for (; !back_.empty(); back_.pop_back()) division.move(back_.back());
  }

 private:
  // The best move of a node; the entry of the queue with the same version is the valid one.
  struct Plan {
    int64_t gain = 0;
    uint32_t version = 0;  // less than the first of this search: there is none
    uint16_t part = 0;
    bool has_moved = false;  // in the search of the version
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

  // Looks for the best move of a node, which becomes an entry of the queue if it is a new one.
  void plan(uint32_t node) {
    Plan& planned = planned_[node];
    const bool has_plan = planned.version >= first_version_;
    if (has_plan && planned.has_moved) return;
    const uint16_t own = division.parts[node];
    for (int64_t i = graph_.indptr[node]; i < graph_.indptr[node + 1]; ++i) {
      const uint16_t part = division.parts[graph_.cols[i]];
      if (of_parts_[part] == 0) touched_.push_back(part);
      of_parts_[part] += graph_.weights ? graph_.weights[i] : 1;
    }
    int64_t best = std::numeric_limits<int64_t>::min();
    uint16_t target = own;
    for (const uint16_t part : touched_) {
      if (part != own && of_parts_[part] > best && division.has_room(node, part)) {
        best = of_parts_[part];
        target = part;
      }
    }
    const int64_t gain = target == own ? 0 : best - of_parts_[own];
    for (const uint16_t part : touched_) of_parts_[part] = 0;
    touched_.clear();
    if (target == own) {
      planned.version = 0;
      return;
    }
    if (has_plan && planned.gain == gain && planned.part == target) return;
    planned = {gain, ++version_, target, false};
    queue_.push_back({gain, version_, node});
    std::push_heap(queue_.begin(), queue_.end());
  }

  const GraphInMemory& graph_;
  const std::vector<uint8_t>& stays_;
  const int64_t num_free_;
  const int64_t patience_;
  std::vector<int64_t> of_parts_;
  std::vector<uint16_t> touched_;
  std::vector<Plan> planned_;
  std::vector<Entry> queue_;
  std::vector<Move> back_;
  size_t num_followed_ = 0;
  uint32_t version_ = 0;
  uint32_t first_version_ = 1;
};

class Rounds {
 public:
  Rounds(const GraphInMemory& graph, const NodeWeights& weights, const Refinement& refinement,
         const SearchLimits& limits, Team& team)
      : graph_(graph),
        limits_(limits),
        team_(team),
        division_(weights, refinement, graph.num_nodes),
        stays_(static_cast<size_t>(limits.num_free), 0) {
    searchers_.reserve(static_cast<size_t>(team.num_threads()));
    for (int thread = 0; thread < team.num_threads(); ++thread) {
      searchers_.emplace_back(graph, division_, stays_, refinement.num_parts, limits);
    }
  }

  // Rounds until they gain little; what they gained.
  int64_t run(const Refinement& refinement) {
    int64_t first = 0;
    int64_t total = 0;
    for (int64_t number = 0; number < limits_.rounds; ++number) {
      const int64_t gained = round(number);
      total += gained;
      if (number == 0) first = gained;
      if (gained * limits_.share <= first) break;
    }
    std::copy(division_.loads.begin(), division_.loads.end(), refinement.loads);
    std::copy(division_.parts.begin(), division_.parts.end(), refinement.parts);
    return total;
  }

 private:
  // Searches from all nodes on boundaries; what they gained.
  int64_t round(int64_t number) {
    const std::vector<uint32_t> seeds = drawn_seeds(number);
    std::vector<uint32_t> batch;
    // A search moves as many seeds, it is taken, as those before moved nodes; at first, many.
    size_t num_searches = kFirstSearches;
    size_t num_moves =
        kFirstSearches * static_cast<size_t>(std::min<int64_t>(limits_.patience, kMostPatience));
    int64_t gained = 0;
    for (size_t next = 0; next < seeds.size();) {
      const size_t expected = (seeds.size() - next) * num_searches / num_moves;
      const size_t most = std::clamp<size_t>(expected / kBatches, 1, kMostInBatch);
      batch.clear();
      for (; next < seeds.size() && batch.size() < most; ++next) {
        if (!stays_[seeds[next]]) batch.push_back(seeds[next]);
      }
      gained += searches(batch);
      num_searches += batch.size();
      for (size_t i = 0; i < batch.size(); ++i) num_moves += outcomes_[i].moves.size();
    }
    for (Searcher& searcher : searchers_) {
      searcher.follow(made_);
      searcher.forget();
    }
    made_.clear();
    return gained;
  }

  std::vector<uint32_t> drawn_seeds(int64_t number) {
    std::vector<uint32_t> seeds =
        nodes_on_boundaries(graph_, division_.parts.data(), limits_.num_free, team_);
    std::erase_if(seeds, [&](uint32_t node) {
      return graph_.indptr[node + 1] - graph_.indptr[node] > kMostDegree;
    });
    for (int64_t node = 0; node < limits_.num_free; ++node) {
      stays_[node] = graph_.indptr[node + 1] - graph_.indptr[node] > kMostDegree;
    }
    for (size_t i = seeds.size(); i > 1; --i) {
      const uint64_t drawn = mixed(static_cast<uint64_t>(number) * 0x9e3779b97f4a7c15ULL + i);
      std::swap(seeds[i - 1], seeds[drawn % i]);
    }
    return seeds;
  }

  // All search with the parts as they are; then what is good is made in the order of the seeds.
  int64_t searches(const std::vector<uint32_t>& seeds) {
    if (outcomes_.size() < seeds.size()) outcomes_.resize(seeds.size());
    const size_t tasks = std::min(searchers_.size(), seeds.size());
    std::atomic<size_t> next{0};
    team_.run(static_cast<int64_t>(tasks), [&](int64_t task) {
      searchers_[task].follow(made_);
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < seeds.size();) {
        searchers_[task].search(seeds[i], outcomes_[i]);
      }
    });
    int64_t gained = 0;
    for (size_t i = 0; i < seeds.size(); ++i) gained += make(outcomes_[i]);
    return gained;
  }

  // Makes the good moves of a search, up to the moment that is the best one now: searches of the
  // same batch may have moved what is near.
  int64_t make(const Outcome& outcome) {
    for (const Move& move : outcome.moves) stays_[move.node] = 1;
    int64_t total = 0;
    int64_t best = 0;
    back_.clear();
    size_t num_good = 0;
    for (size_t i = 0; i < outcome.num_good; ++i) {
      const Move& move = outcome.moves[i];
      if (!division_.has_room(move.node, move.part)) break;
      const uint16_t own = division_.parts[move.node];
      for (int64_t e = graph_.indptr[move.node]; e < graph_.indptr[move.node + 1]; ++e) {
        const uint16_t part = division_.parts[graph_.cols[e]];
        const int64_t weight = graph_.weights ? graph_.weights[e] : 1;
        total += (part == move.part ? weight : 0) - (part == own ? weight : 0);
      }
      back_.push_back(division_.move(move));
      if (total > best) {
        best = total;
        num_good = back_.size();
      }
    }
    for (; back_.size() > num_good; back_.pop_back()) division_.move(back_.back());
    made_.insert(made_.end(), outcome.moves.begin(),
                 outcome.moves.begin() + static_cast<int64_t>(num_good));
    return best;
  }

  const GraphInMemory& graph_;
  const SearchLimits& limits_;
  Team& team_;
  Division division_;
  std::vector<uint8_t> stays_;  // what has moved in this round, or has too many neighbours
  std::vector<Searcher> searchers_;
  std::vector<Outcome> outcomes_;
  std::vector<Move> made_;  // in this round
  std::vector<Move> back_;
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
                     const Refinement& refinement, const SearchLimits& limits, int num_threads) {
  check(graph, refinement);
  Team team(std::clamp(num_threads, 1, kMostSearchers));
  const int64_t num_seeds = static_cast<int64_t>(
      nodes_on_boundaries(graph, refinement.parts, limits.num_free, team).size());
  if (std::min(limits.rounds, kMostRounds) * num_seeds <= graph.num_nodes / kOrderedShare) {
    return Rounds(graph, weights, refinement, limits, team).run(refinement);
  }
  const OrderedGraph ordered(graph, weights, walked_nodes(graph, limits.num_free), team);
  std::vector<uint16_t> parts;
  parts.reserve(ordered.nodes.size());
  for (const uint32_t node : ordered.nodes) parts.push_back(refinement.parts[node]);
  Refinement of_ordered = refinement;
  of_ordered.parts = parts.data();
  Rounds rounds(ordered.graph, ordered.weights, of_ordered, limits, team);
  const int64_t gained = rounds.run(of_ordered);
  for (size_t i = 0; i < parts.size(); ++i) refinement.parts[ordered.nodes[i]] = parts[i];
  return gained;
}

}  // namespace graphshard
