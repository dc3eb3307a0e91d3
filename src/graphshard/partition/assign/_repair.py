# SPDX-License-Identifier: Apache-2.0
"""Balance repair: move as few nodes as possible, where the cut suffers least.

METIS takes balance as a goal and sometimes misses it, by a little with many constraints, by a lot
when single nodes are heavy. This pass starts from its result. First, overfull parts give nodes to
parts that have room for everything the node weighs, best gain in cut first. Where no part has
room, pairs of nodes change places. The cost is that of the moves made, not of the graph.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._metis import IntArray
from ._undirected import UndirectedGraph

FloatArray = npt.NDArray[np.float64]

_MAX_PASSES = 20
_MAX_SWAPS = 300
_MAX_FAILURES = 1000
_MAX_CANDIDATES = 200_000
_SAMPLE = 128


def part_loads(parts: IntArray, weights: IntArray, num_parts: int) -> FloatArray:
    """Weight of each part under each constraint: ``[num_parts, num_constraints]``."""
    columns = [
        np.bincount(parts, weights=weights[:, column], minlength=num_parts)
        for column in range(weights.shape[1])
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((num_parts, 0))


def excess(loads: FloatArray, limits: FloatArray) -> float:
    """How far all parts together are over their limits, each constraint in units of its limit."""
    return float((np.maximum(loads - limits, 0) / np.maximum(limits, 1)).sum())


def repair_balance(
    graph: UndirectedGraph,
    parts: IntArray,
    weights: IntArray,
    limits: FloatArray,
    num_parts: int,
) -> npt.NDArray[np.int64]:
    """Bring every part under its limits, or as near to that as can be found.

    Args:
        graph: The graph; decides which moves cost least.
        parts: ``[num_nodes]``, part of each node.
        weights: ``[num_nodes, num_constraints]``, not negative.
        limits: ``[num_constraints]``, the most that a part may weigh.
        num_parts: Number of parts.

    Returns:
        The new part of each node; measure it with `part_loads`.
    """
    state = _State(graph, np.array(parts, dtype=np.int64), weights, limits, num_parts)
    for _ in range(_MAX_PASSES):
        over = state.loads > limits
        if not over.any():
            break
        worst = (state.loads / np.maximum(limits, 1)).max(axis=1)
        crowded = [int(part) for part in np.argsort(-worst, kind="stable") if over[part].any()]
        if not sum(state.drain(part) for part in crowded) and not state.swap_pairs():
            break
    return state.parts


def fill_empty_parts(
    graph: UndirectedGraph, parts: IntArray, num_parts: int
) -> npt.NDArray[np.int64]:
    """Give every empty part one node, from the largest part, while that has more than one."""
    filled: npt.NDArray[np.int64] = np.array(parts, dtype=np.int64)
    for part in np.flatnonzero(np.bincount(filled, minlength=num_parts) == 0):
        sizes = np.bincount(filled, minlength=num_parts)
        donor = int(sizes.argmax())
        if sizes[donor] < 2:
            break
        members = np.flatnonzero(filled == donor)
        inside = _neighbours_per_part(graph, members, filled, num_parts)[:, donor]
        filled[members[int(inside.argmin())]] = part
    return filled


def _neighbours_per_part(
    graph: UndirectedGraph, nodes: IntArray, parts: IntArray, num_parts: int
) -> npt.NDArray[np.int64]:
    """Number of neighbours that each of ``nodes`` has in each part."""
    starts = graph.indptr[nodes].astype(np.int64)
    degrees = graph.indptr[nodes + 1].astype(np.int64) - starts
    rows = np.repeat(np.arange(nodes.shape[0]), degrees)
    first = np.cumsum(degrees) - degrees
    positions = np.arange(rows.shape[0]) + np.repeat(starts - first, degrees)
    keys = rows * num_parts + parts[graph.indices[positions]]
    counts = np.bincount(keys, minlength=nodes.shape[0] * num_parts)
    return counts.reshape(nodes.shape[0], num_parts).astype(np.int64)


def _spread(nodes: IntArray, count: int) -> IntArray:
    """At most ``count`` of ``nodes``, evenly chosen."""
    if nodes.shape[0] <= count:
        return nodes
    return nodes[np.linspace(0, nodes.shape[0] - 1, count).astype(np.int64)]


class _State:
    """An assignment and its loads, kept in step."""

    def __init__(
        self,
        graph: UndirectedGraph,
        parts: npt.NDArray[np.int64],
        weights: IntArray,
        limits: FloatArray,
        num_parts: int,
    ) -> None:
        self.graph = graph
        self.parts = parts
        self.weights = weights
        self.limits = limits
        self.num_parts = num_parts
        self.loads = part_loads(parts, weights, num_parts)

    def move(self, node: int, target: int) -> None:
        weight = self.weights[node]
        self.loads[self.parts[node]] -= weight
        self.loads[target] += weight
        self.parts[node] = target

    def drain(self, part: int) -> int:
        """Move nodes out of an overfull part; how many moved."""
        over = self.loads[part] > self.limits
        if not over.any():
            return 0
        heavy = self.weights[:, over].any(axis=1)
        nodes = _spread(np.flatnonzero((self.parts == part) & heavy), _MAX_CANDIDATES)
        links = _neighbours_per_part(self.graph, nodes, self.parts, self.num_parts)
        gain = np.where(self._has_room(nodes), links - links[:, part, None], np.iinfo(np.int64).min)
        gain[:, part] = np.iinfo(np.int64).min
        best = gain.max(axis=1)
        order = np.argsort(-best.astype(np.float64), kind="stable")
        moved = failures = 0
        for place in order[: int((best > np.iinfo(np.int64).min).sum())]:
            over = self.loads[part] > self.limits
            if not over.any() or failures > _MAX_FAILURES:
                break
            node = int(nodes[place])
            if not self.weights[node][over].any():
                continue
            room = self._has_room(nodes[place : place + 1])[0]
            room[part] = False
            if not room.any():
                failures += 1
                continue
            emptiness = -(self.loads / np.maximum(self.limits, 1)).max(axis=1)
            choices = np.flatnonzero(room)
            target = max(choices, key=lambda other: (links[place, other], emptiness[other]))
            self.move(node, int(target))
            moved += 1
        return moved

    def _has_room(self, nodes: IntArray) -> npt.NDArray[np.bool_]:
        """Which parts can take each node without passing a limit: [num_nodes, num_parts]."""
        room = np.ones((nodes.shape[0], self.num_parts), dtype=bool)
        for column in range(self.weights.shape[1]):
            weight = self.weights[nodes, column, None]
            room &= (weight == 0) | (self.loads[None, :, column] + weight <= self.limits[column])
        return room

    def swap_pairs(self) -> int:
        """Exchange nodes between an overfull part and others while that helps; how many times."""
        for count in range(_MAX_SWAPS):
            before = excess(self.loads, self.limits)
            if before == 0 or not self._swap_once(before):
                return count
        return _MAX_SWAPS

    def _swap_once(self, before: float) -> bool:
        over = np.argwhere(self.loads > self.limits)
        best: tuple[float, int, int, int] | None = None  # (excess after, node, partner, target)
        for part, column in over:
            nodes = self._sample(int(part), int(column))
            for target in range(self.num_parts):
                if target == part:
                    continue
                partners = self._sample(target, None)
                pair = self._best_pair(int(part), target, nodes, partners, before)
                if pair is not None and (best is None or pair[0] < best[0]):
                    best = (*pair, target)
        if best is None or not best[0] < before * (1 - 1e-12):
            return False
        _, node, partner, target = best
        source = int(self.parts[node])
        self.move(node, target)
        if partner >= 0:
            self.move(partner, source)
        return True

    def _sample(self, part: int, column: int | None) -> IntArray:
        """Some nodes of a part, spread over the weights that occur there."""
        inside = self.parts == part
        if column is not None:
            inside &= self.weights[:, column] > 0
        nodes = np.flatnonzero(inside)
        if nodes.shape[0] <= _SAMPLE:
            return nodes
        sortable = self.weights[nodes]
        nodes = nodes[np.lexsort(sortable.T)]
        return _spread(nodes, _SAMPLE)

    def _best_pair(
        self, part: int, target: int, nodes: IntArray, partners: IntArray, before: float
    ) -> tuple[float, int, int] | None:
        """Best (excess after, node, partner); partner -1 stands for moving the node alone."""
        if nodes.shape[0] == 0:
            return None
        give = self.weights[nodes].astype(np.float64)[:, None, :]
        take = np.concatenate([np.zeros((1, self.weights.shape[1])), self.weights[partners]])[None]
        scale = np.maximum(self.limits, 1)

        def over(loads: FloatArray) -> FloatArray:
            total: FloatArray = (np.maximum(loads - self.limits, 0) / scale).sum(axis=-1)
            return total

        after = before - over(self.loads[part]) - over(self.loads[target])
        after = after + over(self.loads[part] - give + take)
        after = after + over(self.loads[target] + give - take)
        place, partner = np.unravel_index(int(after.argmin()), after.shape)
        return (
            float(after[place, partner]),
            int(nodes[place]),
            -1 if partner == 0 else int(partners[partner - 1]),
        )
