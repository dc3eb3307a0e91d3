# SPDX-License-Identifier: Apache-2.0
"""Multilevel partitioning of a graph whose edges are on disk; O(nodes) in memory.

Y. Akhremtsev, P. Sanders, C. Schulz, "(Semi-)External Algorithms for Graph Partitioning and
Clustering" (ALENEX 2015), https://arxiv.org/abs/1404.4887: some passes of size-constrained label
propagation over the edges make clusters; the graph of the clusters is contracted, on disk again;
and so on until a level fits in memory, where METIS divides it some times. On the way back each
level is refined by local searches where its boundaries fit in memory, see the note, and else in
passes over its edges. All in all the edges of the first level are read 7 to 24 times, always in
their order. Beside the edges, memory holds per node of a level its label or cluster (4 bytes), the
size of the cluster (4 for each constraint) and its part (2).

Left undone of the paper: an ensemble of clusterings, and iterated V-cycles.

[Note: nodes that find no cluster]
Label propagation leaves nodes alone whose neighbours' clusters are full, such as leaves around a
hub, and nodes without neighbours. As they count for little in the cut, those that want the same
cluster are put together, up to the same size; otherwise a level would hardly shrink (two-hop
matching: D. LaSalle and others, "Improving graph partitioning for modern graphs and architectures",
2015).

[Note: meshes]
Where degrees are low and even (grids, triangulations, roads, trees) no group of nodes stands out: a
cluster takes any shape, and the cut goes along the edges of clusters. So these are at most of four
nodes of their level on average, in more levels, as METIS's matching makes them. Elsewhere larger
clusters cost less and cut no more. Both draw among labels that weigh the same.

[Note: local searches]
A node moves in a pass where that lowers the cut at once; a boundary with steps in it, such as one
that clusters or METIS left across a mesh, stays as it is. Local searches get over them: P. Sanders,
C. Schulz, "Engineering multilevel graph partitioning algorithms", 2011,
https://arxiv.org/abs/1012.0006, section 4.2. They want neighbours in memory, of all nodes of a
level, or of a band along boundaries: nodes of clusters that were at most 3 steps from a boundary of
the level above, which one pass over the edges collects. What is beyond the band is one node of each
part that stays. A level whose band does not fit either, as of graphs with a large cut, is refined
in passes, as are, on any level, nodes of more than 512 neighbours, and graphs of which more than
half of the edges are cut: there searches would lower the cut by gathering what has most edges in
one part, whose halo grows with that.

[Note: which division]
METIS's divisions of the last level differ by a tenth in their cut and more in their largest halo.
The best is the one with the least product of cut and largest halo, both counted on the first level
(of clusters it is not known who reads whom); of graphs above a million ends, among the four with
the least cut.

[Note: prices of halos]
The first level is refined for the cut and for the largest halo at once, in passes. A node moves
where that saves more than it costs: 1 for an edge that is cut, and for a node in the halo of a part
a price, which rises from pass to pass, from nothing to 16 in the largest halo; in another one it is
that times the eighth power of its share of the largest. So the largest is paid for first, and those
that come near to it. No halo may pass the largest of before, nor the cut 1.02 times the smallest so
far. What is kept has the least product of cut and largest halo, as a percent of the one is worth
one of the other.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._edge_files import (
    BlockSpan,
    Degrees,
    EdgeBlock,
    EdgeCounts,
    EdgeSorter,
    Item,
    NodeArray,
    SortedEdges,
    batch_ends,
    kernels,
    map_ahead,
    node_dtype,
    read_ahead,
)
from ._metis import UndirectedGraph
from ._node_order import Order, breadth_first_order, clustered_order
from .assign import BalanceWarning, Constraint, metis_assignment, part_loads
from .checked_files import save_array

PartNumbers = npt.NDArray[np.uint16]
NodeWeights = npt.NDArray[np.uint32]

MOST_PARTS = 2**16
DEFAULT_HALO_TOLERANCE = 1.05

# See the note on halos. Every second price for graphs that are too large for METIS.
_HALO_PRICES = (0, 0, 0, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
_MOST_CUT_FOR_HALOS = 1.02

_LABEL_PASSES = 3
_REFINE_PASSES = 5
# See the note on local searches. A search ends after so many moves that gained nothing, and rounds
# of them after one that gained so small a share of what the first did.
_BAND_STEPS = 3
_SEARCH_ROUNDS, _SEARCH_PATIENCE, _SEARCH_SHARE = 10, 60, 8
# None where more of the edges are cut.
_MOST_CUT_FOR_SEARCHES = 0.5
# Passes end when at most one of so many nodes moves.
_FEW_OF = 10_000
_MOST_REPAIRS = 24
# Clusters are at most so small a share of a part that METIS can balance them.
_CLUSTERS_PER_PART = 30
# A level that METIS gets: it takes about 100 bytes an edge, both ends counted, and 200 a node.
_COARSE_NODES = 700_000
_COARSE_EDGES = 4_000_000
# What is a mesh (ends of edges of a node, on average, and the most over that), and how many average
# nodes of a level make one of its clusters at most; see the note.
_MESH_DEGREE, _MESH_SPREAD, _MESH_CLUSTER = 8, 16, 4
# A level that shrinks less than this is not worth another one.
_LEAST_SHRINKING = 0.9
# METIS counts in 32 bits.
_MOST_WEIGHT = 2**30
# So many ends of edges, and how often they are divided to take the best: it costs little.
_TRIALS = ((200_000, 16), (1_000_000, 4))
# Or so often, as long as the ends of all last levels are so large a share of those of the first.
_TRIALS_SHARE, _MOST_TRIALS = 1, 4
# So many of which are refined on all levels; or, of graphs where that takes long, have their halos
# counted.
_FINALISTS = 4
_BATCH_ROWS, _LEAST_BATCH_ROWS, _BATCHES = 1 << 14, 32, 256
_BATCH_EDGES = 1 << 19
_TAKEN_AT_ONCE = 1 << 17
# Blocks that are contracted at a time.
_MOST_CONTRACTED = 4


@dataclass(frozen=True)
class Level:
    """A graph on disk.

    Args:
        edges: Neighbours of every node, each edge from both ends; values are weights, or none.
        weights: uint32 ``[num_nodes, num_constraints]``; None where every node counts 1.
    """

    edges: SortedEdges
    weights: NodeWeights | None

    @property
    def num_nodes(self) -> int:
        return self.edges.num_rows

    @cached_property
    def _spans(self) -> list[BlockSpan]:
        """Found in the first pass: most passes over a level look at few of its nodes."""
        return []

    def blocks(self, num_threads: int) -> Iterator[tuple[EdgeBlock, EdgeCounts]]:
        """All edges, and in each block the ends of the batches that nodes move in."""
        return self.edges.read(self._all_spans(num_threads), num_threads=num_threads)

    def map_blocks(self, function: Callable[[EdgeBlock], Item], num_threads: int) -> Iterator[Item]:
        """What a function makes of each block, in their order; threads read blocks and call it."""
        spans = self._all_spans(num_threads)
        return map_ahead(lambda span: function(self.edges.block(span)[0]), spans, num_threads)

    def _all_spans(self, num_threads: int) -> Iterable[BlockSpan]:
        if self._spans:
            return self._spans
        return read_ahead(self._new_spans(), is_worth_it=num_threads > 1)

    def _new_spans(self) -> Iterator[BlockSpan]:
        spans = []
        for span in self.edges.spans(batches=self._batches):
            spans.append(span)
            yield span
        self._spans[:] = spans  # the same in whichever thread

    def _batches(self, degrees: Degrees) -> EdgeCounts:
        rows = min(max(self.num_nodes // _BATCHES, _LEAST_BATCH_ROWS), _BATCH_ROWS)
        rows = 1 << (rows.bit_length() - 1)  # a divisor of the rows that are read at once
        return batch_ends(degrees, rows, _BATCH_EDGES)


@dataclass(frozen=True)
class Multilevel:
    """What `multilevel_partition` makes.

    Args:
        parts: uint16 ``[num_nodes]``.
        places: ``[num_nodes]``: the place of each node's cluster in an order in which clusters that
            are near each other are neighbours.
        num_clusters: Places are below it.
    """

    parts: PartNumbers
    places: NodeArray
    num_clusters: int


@dataclass(frozen=True)
class _GraphInMemory:
    """All nodes of a level, or those near boundaries and one for each part, in place of its others.

    Args:
        nodes: Which nodes; None for all.
        indptr: Where their neighbours begin, which nodes in place of others have none of.
        cols: Neighbours.
        weights: Of edges; None where each weighs 1.
        num_free: How many nodes may move.
    """

    nodes: EdgeCounts | None
    indptr: EdgeCounts
    cols: NodeArray
    weights: NodeArray | None
    num_free: int


def multilevel_partition(
    level: Level,
    num_parts: int,
    constraints: Sequence[Constraint] | None,
    *,
    folder: Path,
    memory: int,
    num_threads: int,
    tolerance: float = 1.05,
    halo_tolerance: float | None = DEFAULT_HALO_TOLERANCE,
    seed: int = 0,
    coarse_nodes: int = _COARSE_NODES,
    coarse_edges: int = _COARSE_EDGES,
    progress: Callable[[str], None] = lambda _: None,
) -> Multilevel:
    """Divide a graph.

    Args:
        level: The graph; no node has an edge to itself.
        constraints: What to balance, one for each column of ``level.weights``, of which names and
            totals are used; None where every node counts 1.
        folder: An empty one for levels.
        memory: Bytes that sorting the edges of a level may take.
        tolerance: The heaviest part over the mean, under each constraint.
        halo_tolerance: The largest halo over the mean; a goal that may cost a few edges of the cut.
        coarse_nodes: A level of at most so many nodes, and
        coarse_edges: edges, counted from both ends, is given to METIS.

    Raises:
        MetisError: METIS is missing or failed.
    """
    limits = np.array(_limits(level, num_parts, constraints, tolerance), dtype=np.float64)
    levels = [level]
    is_mesh = _is_mesh(level)
    while True:
        current = levels[-1]
        is_coarse = current.num_nodes <= coarse_nodes and current.edges.num_edges <= coarse_edges
        if is_coarse or current.num_nodes <= num_parts:
            break
        depth = len(levels)
        progress(
            f"level {depth}: clustering {current.num_nodes:,} nodes, "
            f"{current.edges.num_edges:,} ends of edges"
        )
        clusters, num_clusters = _find_clusters(current, num_parts, is_mesh, num_threads)
        if num_clusters > _LEAST_SHRINKING * current.num_nodes:
            break
        save_array(folder / f"clusters-{depth}.npy", clusters)
        inside = folder / f"level-{depth}"
        inside.mkdir()
        levels.append(_contracted(current, clusters, num_clusters, inside, memory, num_threads))
        del clusters
    progress(f"dividing {levels[-1].num_nodes:,} clusters")
    is_small = level.edges.num_edges <= _TRIALS[-1][0] and halo_tolerance is not None
    candidates, wait_for_places, searches = _divide(
        *(levels, num_parts, limits, tolerance, seed, folder, num_threads),
        counts_halos=halo_tolerance is not None,
        is_small=is_small,
    )
    made: list[tuple[int, int, PartNumbers]] = []
    for parts in candidates[: _FINALISTS if is_small else 1]:
        near = None
        for depth in range(len(levels) - 1, -1, -1):
            current = levels[depth]
            if depth < len(levels) - 1:
                progress(f"level {depth + 1}: refining {current.num_nodes:,} nodes")
                clusters = np.load(folder / f"clusters-{depth + 1}.npy")
                parts = at(parts, clusters, num_threads)
                near = None if near is None else at(near, clusters, num_threads)
                del clusters
            graph = _refine(
                *(current, near, parts, num_parts, limits, num_threads),
                searches=searches,
                passes_by=depth > 0 or halo_tolerance is None,
            )
            near = None
            if depth > 0 and graph is not None and not _fits(levels[depth - 1]):
                near = _near_boundaries(graph, current.num_nodes, parts, _BAND_STEPS)
            del graph
        cut, largest = 0, 0
        if halo_tolerance is not None:
            progress("making the cut and the largest halo smaller")
            cut, largest = _limit_halos(
                level, parts, num_parts, limits, halo_tolerance, num_threads
            )
        made.append((cut, largest, parts))
    most_cut = _MOST_CUT_FOR_HALOS * min(cut for cut, _, _ in made)
    good = [item for item in made if item[0] <= most_cut]
    parts = min(good, key=lambda item: item[0] * item[1])[2]
    places = wait_for_places()
    num_clusters = len(places)
    for depth in range(len(levels) - 1, 0, -1):
        places = at(places, np.load(folder / f"clusters-{depth}.npy"), num_threads)
        if depth > 1:  # in an order of their own, which nodes of the level before go by
            order = np.empty(len(places), dtype=node_dtype(len(places)))
            keys = places.astype(node_dtype(num_clusters), copy=False)
            kernels().order_by_key(keys, num_clusters, None, order, num_threads)
            places, num_clusters = inverse(order, num_threads), len(order)
            del order, keys
    return Multilevel(parts, places, num_clusters)


def _limits(
    level: Level, num_parts: int, constraints: Sequence[Constraint] | None, tolerance: float
) -> list[float]:
    if constraints is None:
        ones = level.num_nodes / num_parts
        return [max(tolerance * ones, ones + 1, 1.0)]
    return [constraint.limit(num_parts, tolerance) for constraint in constraints]


def _totals(level: Level) -> EdgeCounts:
    if level.weights is None:
        return np.array([level.num_nodes], dtype=np.int64)
    return np.array(
        [level.weights[:, j].sum(dtype=np.int64) for j in range(level.weights.shape[1])],
        dtype=np.int64,
    )


def _is_mesh(level: Level) -> bool:
    """Whether degrees are low and even."""
    if level.edges.num_edges > _MESH_DEGREE * level.num_nodes:
        return False
    most = 0
    for first in range(0, level.num_nodes, 1 << 20):
        degrees = level.edges.degrees(first, min(first + (1 << 20), level.num_nodes))
        most = max(most, int(degrees.max(initial=0)))
    return most * level.num_nodes <= _MESH_SPREAD * level.edges.num_edges


def _find_clusters(
    level: Level, num_parts: int, is_mesh: bool, num_threads: int
) -> tuple[NodeArray, int]:
    """The cluster of each node, by label propagation; and how many there are."""
    num_nodes, dtype = level.num_nodes, node_dtype(level.num_nodes)
    most = np.maximum(_totals(level) // (num_parts * _CLUSTERS_PER_PART), 1)
    if is_mesh:
        most = np.minimum(most, _MESH_CLUSTER * _totals(level) // num_nodes + 1)
    limits = np.minimum(np.maximum(most, 2), 2**32 - 1).astype(np.uint32)
    labels = np.arange(num_nodes, dtype=dtype)
    if level.weights is None:
        sizes = np.ones((num_nodes, 1), dtype=np.uint32)
    else:
        sizes = level.weights.copy()
    favourites = None
    for number in range(_LABEL_PASSES):
        if number == _LABEL_PASSES - 1:
            favourites = np.arange(num_nodes, dtype=dtype)
        moved = 0
        for block, ends in level.blocks(num_threads):
            moved += kernels().propagate_labels(
                block.degrees,
                block.cols,
                block.values,
                ends,
                block.first_row,
                level.weights,
                labels,
                sizes,
                limits,
                favourites,
                num_threads,
            )
        if favourites is None and moved == 0:
            favourites = np.arange(num_nodes, dtype=dtype)
    assert favourites is not None
    _join_lonely(level, labels, sizes, limits, favourites)
    del sizes, favourites
    is_label = np.zeros(num_nodes, dtype=bool)
    is_label[labels] = True
    num_clusters = int(np.count_nonzero(is_label))
    numbers = np.cumsum(is_label, dtype=node_dtype(num_clusters))
    numbers -= 1
    return at(numbers, labels, num_threads), num_clusters


def _join_lonely(
    level: Level,
    labels: NodeArray,
    sizes: NodeWeights,
    limits: NodeWeights,
    favourites: NodeArray,
) -> None:
    """Put together nodes that are alone, by the cluster that they want; see the note."""
    ids = np.arange(level.num_nodes, dtype=labels.dtype)
    own = 1 if level.weights is None else level.weights
    is_lonely = (labels == ids) & (sizes == own).all(axis=1)
    # Others may have come to a node that counts for nothing.
    is_joined = np.zeros(level.num_nodes, dtype=bool)
    is_joined[labels[labels != ids]] = True
    is_lonely &= ~is_joined
    has_edges = np.zeros(level.num_nodes, dtype=bool)
    for first in range(0, level.num_nodes, 1 << 20):
        degrees = level.edges.degrees(first, min(first + (1 << 20), level.num_nodes))
        has_edges[first : first + len(degrees)] = degrees > 0
    wants = is_lonely & (favourites != ids)
    isolated = is_lonely & ~has_edges
    del ids, is_joined, has_edges
    nodes = np.flatnonzero(wants)
    nodes = nodes[np.argsort(favourites[nodes], kind="stable")]
    wish = favourites[nodes]
    begins = np.flatnonzero(np.append(True, wish[1:] != wish[:-1])) if len(nodes) else nodes
    alone = np.flatnonzero(isolated)
    for members, starts in ((nodes, begins), (alone, np.zeros(min(len(alone), 1), np.int64))):
        if not len(members):
            continue
        weights = (
            np.ones((len(members), 1), dtype=np.int64)
            if level.weights is None
            else level.weights[members].astype(np.int64)
        )
        # In each group of the same wish, a new cluster begins where the sum passes a multiple.
        sums = np.cumsum(weights, axis=0) - weights
        sums -= np.repeat(sums[starts], np.diff(np.append(starts, len(members))), axis=0)
        chunks = (sums // np.maximum(limits.astype(np.int64) // 2, 1)).max(axis=1)
        is_first = np.append(True, chunks[1:] != chunks[:-1])
        is_first[starts] = True
        heads = members[np.maximum.accumulate(np.where(is_first, np.arange(len(members)), 0))]
        labels[members] = heads.astype(labels.dtype)


def _contracted(
    level: Level,
    clusters: NodeArray,
    num_clusters: int,
    folder: Path,
    memory: int,
    num_threads: int,
) -> Level:
    """The graph of the clusters, on disk."""
    sorter = EdgeSorter(
        folder,
        num_clusters,
        level.edges.num_edges // 4,
        value_dtype=np.uint32,
        memory=memory,
        num_threads=num_threads,
    )

    def sums_of(constraint: int) -> NodeWeights:
        column = None if level.weights is None else level.weights[:, constraint]
        sums = np.bincount(clusters, weights=column, minlength=num_clusters)
        return np.minimum(sums, 2**32 - 1).astype(np.uint32)

    num_blocks = min(num_threads, _MOST_CONTRACTED)
    #: Rows, columns and weights of the edges of blocks that are sorted, for those of others.
    free: list[tuple[NodeArray, NodeArray, NodeWeights]] = []

    def contract(block: EdgeBlock) -> tuple[tuple[NodeArray, NodeArray, NodeWeights], int]:
        """The edges of a block, in arrays that are longer; and how many there are."""
        num_edges = len(block.cols)
        made: tuple[NodeArray, NodeArray, NodeWeights] | None
        try:
            made = free.pop()
        except IndexError:
            made = None
        if made is None or len(made[0]) < num_edges:
            rows, cols = (np.empty(num_edges, dtype=clusters.dtype) for _ in range(2))
            made = rows, cols, np.empty(num_edges, dtype=np.uint32)
        count = kernels().contract(
            block.degrees,
            block.cols.astype(clusters.dtype, copy=False),
            block.values,
            block.first_row,
            clusters,
            *made,
            -(-num_threads // num_blocks),
        )
        return made, count

    num_constraints = 1 if level.weights is None else level.weights.shape[1]
    with ThreadPoolExecutor(max_workers=1) as pool:
        columns = pool.map(sums_of, range(num_constraints))
        # Each of some threads contracts a block, and its edges are sorted while the next ones come.
        for made, count in level.map_blocks(contract, num_blocks):
            rows, cols, weights = made
            sorter.add(rows[:count], cols[:count], values=weights[:count])
            free.append(made)
        edges = sorter.finish(merges=True)
        return Level(edges, np.stack(list(columns), axis=1))


def _divide(
    levels: Sequence[Level],
    num_parts: int,
    limits: npt.NDArray[np.float64],
    tolerance: float,
    seed: int,
    folder: Path,
    num_threads: int,
    *,
    counts_halos: bool,
    is_small: bool,
) -> tuple[list[PartNumbers], Callable[[], NodeArray], bool]:
    """Parts of the nodes of the last level, by METIS; and an order of them.

    METIS is called by one thread. Meanwhile others refine the divisions that there are, and count
    their halos, which all do when it is done.

    Args:
        counts_halos: Whether the note on divisions holds; without it the least cut comes first.
        is_small: Whether all divisions are looked at so, and not only those with the least cuts.

    Returns:
        Parts, best first; a function that waits for the order; and whether searches help.
    """
    level = levels[-1]
    whole = _whole(level)
    graph = _undirected(whole.indptr, whole.cols, whole.weights, level.num_nodes)
    weights = level.weights
    if weights is None:
        weights = np.ones((level.num_nodes, 1), dtype=np.uint32)
    table = [
        Constraint(str(j), _scaled(weights[:, j].astype(np.int64))) for j in range(weights.shape[1])
    ]
    share = _TRIALS_SHARE * levels[0].edges.num_edges / max(level.edges.num_edges, 1)
    trials = int(min(max(share, 1), _MOST_TRIALS))
    trials = max(trials, next((count for most, count in _TRIALS if len(whole.cols) <= most), 1))
    most_cut = _MOST_CUT_FOR_SEARCHES * levels[0].edges.num_edges
    counts_early = counts_halos and trials > 1 and (is_small or trials <= _FINALISTS)
    tables: list[npt.NDArray[np.uint8]] = []
    has_table = threading.Lock()  # which is one for all threads, as it is large
    is_divided = threading.Event()  # so that METIS needs no thread any more

    def free_threads() -> int:
        return num_threads if is_divided.is_set() else max(num_threads - 1, 1)

    def product(parts: PartNumbers) -> int:
        with has_table:
            if not tables:
                tables.append(_halo_table(levels[0], num_parts))
            cut, largest = _on_first_level(
                levels, whole, parts, num_parts, folder, tables[0], free_threads
            )
        return cut * largest

    def refined(parts: PartNumbers) -> tuple[float, PartNumbers, int]:
        _refine_in_passes(level, parts, num_parts, limits, 1)
        cut = _cut(graph, parts)
        if _fits(level) and cut <= most_cut:
            _search(level, whole, parts, num_parts, limits, 1, rounds=1)
            cut = _cut(graph, parts)
        return cut, parts, product(parts) if counts_early else 0

    def places(walk: Future[Order]) -> NodeArray:
        return inverse(clustered_order(graph.matrix(), walk.result()), 1)

    # No more threads than there are: METIS's is the one that others wait for, and helps in the end.
    pool = ThreadPoolExecutor(max_workers=max(num_threads - 1, 1))
    order_pool = ThreadPoolExecutor(max_workers=1)
    divisions: list[PartNumbers] = []
    refining: list[Future[tuple[float, PartNumbers, int]]] = []
    try:
        walking = order_pool.submit(lambda: breadth_first_order(graph.matrix()))
        for trial in range(trials):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BalanceWarning)  # of a level, not of the graph
                parts = metis_assignment(
                    graph,
                    num_parts,
                    table,
                    tolerance=1 + (tolerance - 1) * 0.8,
                    seed=(seed + 7 * trial) % 2**31,
                    weigh_edges=True,
                ).astype(np.uint16)
            divisions.append(parts)
            refining.append(pool.submit(refined, parts))
            if num_threads == 1:
                refining[-1].result()
        is_divided.set()
        ordering = order_pool.submit(places, walking)
        if num_threads == 1:
            ordering.result()
        helped = {
            trial: refined(divisions[trial])
            for trial in reversed(range(trials))
            if refining[trial].cancel()
        }
        of_cut: dict[float, tuple[PartNumbers, int]] = {}
        for trial in range(trials):
            cut, parts, cost = helped.get(trial) or refining[trial].result()
            of_cut.setdefault(cut, (parts, cost))
    finally:
        pool.shutdown()
        order_pool.shutdown(wait=False)
    candidates = [of_cut[cut] for cut in sorted(of_cut)]
    if not is_small:
        candidates = candidates[:_FINALISTS]
    if counts_halos and len(candidates) > 1:
        if not counts_early:
            candidates = [(parts, product(parts)) for parts, _ in candidates]
        candidates.sort(key=lambda candidate: candidate[1])
    return [parts for parts, _ in candidates], ordering.result, min(of_cut) <= most_cut


def _on_first_level(
    levels: Sequence[Level],
    whole: _GraphInMemory,
    parts: PartNumbers,
    num_parts: int,
    folder: Path,
    table: npt.NDArray[np.uint8],
    free_threads: Callable[[], int],
) -> tuple[int, int]:
    """The cut and the largest halo that parts of the nodes of the last level make on the first."""
    near = _near_boundaries(whole, levels[-1].num_nodes, parts, 0)
    for depth in range(len(levels) - 1, 0, -1):
        clusters = np.load(folder / f"clusters-{depth}.npy")
        parts, near = (at(of_level, clusters, free_threads()) for of_level in (parts, near))
    marks = near.view(np.uint8)
    cut, halos = _count_halos(levels[0], parts, num_parts, marks, table, free_threads)
    return cut, int(halos.max())


def _undirected(
    indptr: EdgeCounts, indices: NodeArray, counts: NodeArray | None, num_nodes: int
) -> UndirectedGraph:
    """The graph as METIS takes it: ascending, no edge twice, weights within its numbers."""
    if counts is not None:  # merged when the level was made
        rows, cols = indptr.astype(np.int32), indices.astype(np.int32)
        return UndirectedGraph(rows, cols, _scaled(counts.astype(np.int64)), check=False)
    import scipy.sparse

    matrix = scipy.sparse.csr_array(
        (np.ones(len(indices), np.int64), indices.astype(np.int32), indptr.astype(np.int32)),
        shape=(num_nodes, num_nodes),
    )
    matrix.sum_duplicates()
    return UndirectedGraph(matrix.indptr, matrix.indices, _scaled(matrix.data), check=False)


def _scaled(weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Weights whose sum METIS can count; none that was not becomes zero."""
    total = int(weights.sum())
    if total <= _MOST_WEIGHT:
        return weights
    scaled = np.rint(weights * (_MOST_WEIGHT / total)).astype(np.int64)
    return np.maximum(scaled, (weights > 0).astype(np.int64))


def _cut(graph: UndirectedGraph, parts: PartNumbers) -> float:
    rows = np.repeat(parts, np.diff(graph.indptr))
    is_cut = rows != parts[graph.indices]
    assert graph.counts is not None
    return float(graph.counts[is_cut].sum())


def _refine_in_passes(
    level: Level,
    parts: PartNumbers,
    num_parts: int,
    limits: npt.NDArray[np.float64],
    num_threads: int,
) -> None:
    """Move nodes to where more of their neighbours are, within the limits; writes ``parts``."""
    loads = loads_of(parts, level.weights, num_parts).astype(np.int64)
    for _ in range(_REFINE_PASSES):
        moved = _refine_once(level, parts, loads, limits, 0, num_threads)
        if moved <= level.num_nodes // _FEW_OF:
            break
    _repair(level, parts, num_parts, limits, num_threads)


def _refine(
    level: Level,
    near: npt.NDArray[np.bool_] | None,
    parts: PartNumbers,
    num_parts: int,
    limits: npt.NDArray[np.float64],
    num_threads: int,
    *,
    searches: bool,
    passes_by: bool,
) -> _GraphInMemory | None:
    """Refine a level by searches where it fits in memory, or what is near boundaries does.

    Args:
        near: Marks of nodes near boundaries; None where that is not known.
        searches: Whether searches help at all.
        passes_by: Whether nodes move in passes over the edges, too, where no band is searched.

    Returns:
        What was searched.
    """
    _repair(level, parts, num_parts, limits, num_threads)
    graph = None
    if searches and near is not None and not _fits(level):
        graph = _band(level, near, parts, num_parts, num_threads)
    if graph is None and passes_by:
        _refine_in_passes(level, parts, num_parts, limits, num_threads)
    if searches and _fits(level):
        graph = _whole(level)
    if graph is not None:
        _search(level, graph, parts, num_parts, limits, num_threads)
    return graph


def _fits(level: Level) -> bool:
    return level.num_nodes <= _COARSE_NODES and level.edges.num_edges <= _COARSE_EDGES


def _whole(level: Level) -> _GraphInMemory:
    edges = level.edges
    indptr = np.concatenate(
        [[0], np.cumsum(edges.degrees(0, edges.num_rows), dtype=np.int64)], dtype=np.int64
    )
    weights = None if edges.value_dtype is None else edges.values(0, edges.num_edges)
    cols = edges.cols(0, edges.num_edges).astype(np.uint32, copy=False)
    return _GraphInMemory(None, indptr, cols, weights, level.num_nodes)


def _band(
    level: Level,
    near: npt.NDArray[np.bool_],
    parts: PartNumbers,
    num_parts: int,
    num_threads: int,
) -> _GraphInMemory | None:
    """The nodes that are marked; None where they are too many."""
    nodes = np.flatnonzero(near).astype(np.int64, copy=False)
    if len(nodes) > _COARSE_NODES:
        return None
    degrees = []
    for first in range(0, level.num_nodes, 1 << 20):
        last = min(first + (1 << 20), level.num_nodes)
        degrees.append(level.edges.degrees(first, last)[near[first:last]])
    counts = np.concatenate([*degrees, np.zeros(num_parts, dtype=np.uint32)])
    indptr = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)], dtype=np.int64)
    if indptr[-1] > _COARSE_EDGES:
        return None
    numbers = np.cumsum(near, dtype=np.uint32)
    numbers -= 1

    def inside(block: EdgeBlock) -> tuple[NodeArray, NodeArray | None]:
        """Neighbours and weights of the edges of the marked rows of a block."""
        rows = np.flatnonzero(near[block.first_row : block.first_row + len(block.degrees)])
        of_rows = block.degrees[rows]
        begins = np.cumsum(block.degrees, dtype=np.int64)[rows] - of_rows
        ends = np.cumsum(of_rows, dtype=np.int64)
        edges = np.repeat(begins - ends + of_rows, of_rows)
        edges += np.arange(len(edges))
        others = block.cols[edges]
        anchors = parts[others].astype(np.uint32) + np.uint32(len(nodes))
        cols = np.where(near[others], numbers[others], anchors)
        return cols, None if block.values is None else block.values[edges]

    cols, weights = [], []
    for others, values in level.map_blocks(inside, num_threads):
        cols.append(others)
        if values is not None:
            weights.append(values)
    return _GraphInMemory(
        nodes,
        indptr,
        np.concatenate([*cols, np.zeros(0, dtype=np.uint32)]),
        np.concatenate(weights) if weights else None,
        len(nodes),
    )


def _near_boundaries(
    graph: _GraphInMemory, num_nodes: int, parts: PartNumbers, steps: int
) -> npt.NDArray[np.bool_]:
    """Marks of the nodes of a level that are so many steps from one with an edge that is cut."""
    of_nodes = parts if graph.nodes is None else parts[graph.nodes]
    rows = np.repeat(
        np.arange(graph.num_free, dtype=np.uint32), np.diff(graph.indptr[: graph.num_free + 1])
    )
    is_edge = graph.cols < graph.num_free
    rows, cols = rows[is_edge], graph.cols[is_edge]
    mask = np.zeros(graph.num_free, dtype=bool)
    mask[rows[of_nodes[rows] != of_nodes[cols]]] = True
    for _ in range(steps):
        mask[rows[mask[cols]]] = True
    if graph.nodes is None:
        return mask
    marks = np.zeros(num_nodes, dtype=bool)
    marks[graph.nodes[mask]] = True
    return marks


def _search(
    level: Level,
    graph: _GraphInMemory,
    parts: PartNumbers,
    num_parts: int,
    limits: npt.NDArray[np.float64],
    num_threads: int,
    *,
    rounds: int = _SEARCH_ROUNDS,
) -> None:
    """Local searches, until they find little; writes ``parts``."""
    nodes = graph.nodes
    loads = loads_of(parts, level.weights, num_parts).astype(np.int64)
    most = np.floor(limits).astype(np.int64)
    moving, weights = parts, level.weights
    if nodes is not None:
        moving = np.concatenate([parts[nodes], np.arange(num_parts, dtype=np.uint16)])
        if weights is not None:
            none = np.zeros((num_parts, weights.shape[1]), dtype=np.uint32)
            weights = np.concatenate([weights[nodes], none])
    kernels().search_moves(
        *(graph.indptr, graph.cols, graph.weights, weights, moving, loads, most),
        *(graph.num_free, _SEARCH_PATIENCE, rounds, _SEARCH_SHARE, num_threads),
    )
    if nodes is not None:
        parts[nodes] = moving[: len(nodes)]


def _repair(
    level: Level,
    parts: PartNumbers,
    num_parts: int,
    limits: npt.NDArray[np.float64],
    num_threads: int,
) -> None:
    """What is too heavy gives nodes away at any price that it takes, the least first."""
    loads = loads_of(parts, level.weights, num_parts).astype(np.int64)
    for repair in range(_MOST_REPAIRS):
        if not (loads > np.floor(limits)).any():
            break
        moved = _refine_once(level, parts, loads, limits, 1 << repair, num_threads)
        if moved == 0 and repair > 12:
            break


def _refine_once(
    level: Level,
    parts: PartNumbers,
    loads: npt.NDArray[np.int64],
    limits: npt.NDArray[np.float64],
    allowed_loss: int,
    num_threads: int,
) -> int:
    """A pass; writes ``parts`` and ``loads``. How many nodes moved."""
    most = np.floor(limits).astype(np.int64)
    moved = 0
    for block, ends in level.blocks(num_threads):
        moved += kernels().refine_parts(
            *(block.degrees, block.cols, block.values, ends, block.first_row),
            *(level.weights, parts, loads, most, allowed_loss, num_threads),
        )
    return moved


def _halo_table(level: Level, num_parts: int) -> npt.NDArray[np.uint8]:
    return np.empty((level.num_nodes, -(-num_parts // 4)), dtype=np.uint8)


def _count_halos(
    level: Level,
    parts: PartNumbers,
    num_parts: int,
    near: npt.NDArray[np.uint8],
    table: npt.NDArray[np.uint8],
    free_threads: Callable[[], int],
) -> tuple[int, npt.NDArray[np.int64]]:
    """The cut and the halo of each part, counted at nodes that may have neighbours in another.

    Args:
        near: Which these are; written: which really do.
        table: Written: what edges these nodes have into parts.
        free_threads: How many there are now.
    """
    cut, halos = 0, np.zeros(num_parts, dtype=np.int64)
    for block, _ in level.blocks(free_threads()):
        cut += kernels().count_halos(
            *(block.degrees, block.cols, block.firsts, block.first_row),
            *(parts, near, table, halos, free_threads()),
        )
    return cut, halos


def _limit_halos(
    level: Level,
    parts: PartNumbers,
    num_parts: int,
    limits: npt.NDArray[np.float64],
    tolerance: float,
    num_threads: int,
) -> tuple[int, int]:
    """Make the cut and the largest halo smaller; writes ``parts``. Both then; see the note."""
    is_small = level.edges.num_edges <= _COARSE_EDGES
    each_edge = 1 if level.edges.is_split else 2  # counted so often
    few = level.num_nodes // _FEW_OF
    most = np.floor(limits).astype(np.int64)
    loads = loads_of(parts, level.weights, num_parts).astype(np.int64)
    near, table = np.ones(level.num_nodes, dtype=np.uint8), _halo_table(level, num_parts)
    least: int | None = None
    best: tuple[int, int, PartNumbers] | None = None
    moved = level.num_nodes
    for price in (*_HALO_PRICES[:: 1 if is_small else 2], None):
        if price == 0 and moved <= few:
            continue
        cut, halos = _count_halos(level, parts, num_parts, near, table, lambda: num_threads)
        largest = int(halos.max())
        least = cut if least is None else min(cut, least)
        most_cut = int(_MOST_CUT_FOR_HALOS * least)
        if best is None:
            best = cut, largest, parts.copy()
        elif cut <= most_cut and cut * largest < best[0] * best[1]:
            best = cut, largest, best[2]
            best[2][:] = parts
        is_even = largest <= tolerance * halos.mean()
        if price is None or cut == 0 or (is_even and moved <= few):
            break
        budget = np.array([(most_cut - cut) // each_edge])
        moved = 0
        for block, ends in level.blocks(num_threads):
            moved += kernels().limit_halos(
                *(block.degrees, block.cols, block.firsts, ends, block.first_row),
                *(level.weights, parts, loads, most, near, table, halos, largest),
                *(int(256 * price), budget, num_threads),
            )
    assert best is not None
    parts[:] = best[2]
    return best[0], best[1]


def at(values: npt.NDArray[Any], places: NodeArray, num_threads: int) -> npt.NDArray[Any]:
    """``values[places]``, by several threads."""
    made = np.empty(len(places), dtype=values.dtype)

    def take(some: slice) -> None:
        made[some] = values[places[some]]

    _in_slices(take, len(places), num_threads)
    return made


def inverse(order: NodeArray, num_threads: int) -> NodeArray:
    """Where each node is in an order of all, by several threads."""
    made = np.empty(len(order), dtype=node_dtype(len(order)))

    def put(some: slice) -> None:
        nodes = order[some]
        made[nodes] = np.arange(some.start, some.start + len(nodes), dtype=made.dtype)

    _in_slices(put, len(order), num_threads)
    return made


def _in_slices(function: Callable[[slice], None], count: int, num_threads: int) -> None:
    """Call a function of NumPy's for some items after the others, in several threads."""
    slices = [slice(i, i + _TAKEN_AT_ONCE) for i in range(0, count, _TAKEN_AT_ONCE)]
    if num_threads == 1 or len(slices) < 2:
        for some in slices:
            function(some)
    else:
        with ThreadPoolExecutor(max_workers=num_threads) as pool:
            list(pool.map(function, slices))


def as_table(constraints: Sequence[Constraint]) -> NodeWeights | None:
    """Weights of nodes by constraint, ``[num_nodes, num_constraints]``; None where all are 1."""
    if len(constraints) == 1 and bool((constraints[0].weights == 1).all()):
        return None
    table = np.empty((len(constraints[0].weights), len(constraints)), dtype=np.uint32)
    for j, constraint in enumerate(constraints):
        table[:, j] = constraint.weights
    return table


def loads_of(parts: PartNumbers, weights: NodeWeights | None, num_parts: int) -> npt.NDArray[Any]:
    """Weight of each part under each constraint."""
    if weights is None:
        return np.bincount(parts, minlength=num_parts)[:, None]
    return part_loads(parts, weights, num_parts)
