# SPDX-License-Identifier: Apache-2.0
"""Assignment: the part of every node, by METIS, at random, or as the caller says.

[Note: how a bound is reached]
METIS takes balance as a goal. So it is asked for less than the tolerance, the result is measured,
and where a constraint is missed it is asked again: another seed and a tighter bound, then
recursive bisection. The best answer is then repaired by moving nodes (`repair_balance`). What is
still missed after that is reported in a warning, with the numbers.

[Note: effort]
A mesh has short boundaries, so METIS takes all its passes over them in no time, and they pay (a
sixth of the cut). In a large graph of many edges per node nearly every node lies on a boundary:
passes and first partitions then take most of the time for next to nothing (of 24.7 million edges in
4 parts, 18 s instead of 6 s, and no smaller cut), so there are fewer of them.

[Note: repair]
METIS misses a bound by a little with many constraints, by a lot when single nodes are heavy. This
pass starts from its result. First, overfull parts give nodes to
parts that have room for everything the node weighs, best gain in cut first. Where no part has
room, pairs of nodes change places. The cost is that of the moves made, not of the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ._graph_source import GraphSource
from ._metis import IntArray, Method, Objective, UndirectedGraph, metis_partition

SPLIT_NAMES = ("train_mask", "val_mask", "valid_mask", "test_mask", "train", "val", "test")

BalanceNTypes: TypeAlias = Tensor | Sequence[int] | Mapping[str, Tensor | Sequence[int]]
Weights: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Constraint:
    """One thing to balance.

    Args:
        name: Shown in statistics and warnings.
        weights: int64 ``[num_nodes]``, in homogenised order; what each node counts for.
    """

    name: str
    weights: Weights

    @classmethod
    def of_nodes(cls, num_nodes: int) -> Constraint:
        """That parts have as many nodes, of whatever kind."""
        return cls("nodes", np.ones(num_nodes, dtype=np.int64))

    def limit(self, num_parts: int, tolerance: float) -> float:
        """The most that a part may weigh.

        That is ``tolerance`` times the mean, but never less than what the granularity of nodes
        dictates: one average node above the mean, or the heaviest node.
        """
        total = int(self.weights.sum())
        if total == 0:
            return 0.0
        mean = total / num_parts
        average = total / int(np.count_nonzero(self.weights))
        return max(tolerance * mean, mean + average, float(self.weights.max()))


def build_constraints(
    source: GraphSource,
    balance_ntypes: BalanceNTypes | None,
    balance_edges: bool,
    balance_split: bool | Iterable[str] | None,
) -> list[Constraint]:
    """The constraints that the arguments of `partition_graph` ask for."""
    classes = _classes(source, balance_ntypes)
    constraints = [
        Constraint(f"nodes{of_class}", members.astype(np.int64)) for of_class, members in classes
    ]
    if balance_edges:
        degrees = source.in_degrees().numpy()
        constraints += [
            Constraint(f"in-edges{of_class}", degrees * members) for of_class, members in classes
        ]
    constraints += [
        Constraint(name, members.astype(np.int64))
        for name, members in _split_members(source, balance_split)
    ]
    return constraints


def _classes(
    source: GraphSource, labels: BalanceNTypes | None
) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """(" of" which, membership of each node) of every class; nothing where there is just one."""
    if labels is None:
        table: dict[str, Tensor | Sequence[int]] = {}
    elif isinstance(labels, Mapping):
        table = dict(labels)
    elif len(source.ntypes) == 1:
        table = {source.ntypes[0]: labels}
    else:
        raise TypeError(
            f"balance_ntypes must be a dict from node type to labels, because the graph has the "
            f"node types {source.ntypes} (got {type(labels).__name__})"
        )
    unknown = [name for name in table if name not in source.ntypes]
    if unknown:
        raise ValueError(
            f"balance_ntypes names node types that the graph does not have (got {unknown}; the "
            f"graph has {source.ntypes})"
        )
    classes = []
    for type_id, ntype in enumerate(source.ntypes):
        if ntype not in table:
            members = _members(source, type_id, True)
            classes.append((f" of '{ntype}'" if len(source.ntypes) > 1 else "", members))
            continue
        values = _labels(table[ntype], ntype, source.node_counts[type_id])
        for label in np.unique(values).tolist():
            members = _members(source, type_id, values == label)
            owner = f"'{ntype}', " if len(source.ntypes) > 1 else ""
            classes.append((f" of {owner}class {label}", members))
    return classes


def _members(
    source: GraphSource, type_id: int, mask: npt.NDArray[np.bool_] | bool
) -> npt.NDArray[np.bool_]:
    """Membership of every node, from that of the nodes of one type; no others are members."""
    members = np.zeros(source.num_nodes, dtype=bool)
    members[source.offsets[type_id] : source.offsets[type_id + 1]] = mask
    return members


def _labels(labels: Tensor | Sequence[int], ntype: str, count: int) -> npt.NDArray[np.int64]:
    tensor = torch.as_tensor(labels).detach().cpu()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.shape != (count,):
        raise ValueError(
            f"balance_ntypes must hold one whole number per node of type '{ntype}', shape "
            f"({count},) (got {tensor.dtype} of shape {tuple(tensor.shape)})"
        )
    return tensor.to(torch.int64).numpy()


def _split_members(
    source: GraphSource, balance_split: bool | Iterable[str] | None
) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    if balance_split is None or balance_split is False:
        return []
    if isinstance(balance_split, str):
        balance_split = [balance_split]
    names = list(SPLIT_NAMES if balance_split is True else balance_split)
    members_by_mask = []
    missing = set(names)
    for type_id, ntype in enumerate(source.ntypes):
        features = source.node_features(type_id)
        for name in names:
            if name not in features:
                continue
            mask = _as_mask(features[name])
            if mask is None:
                if balance_split is True:
                    continue
                raise ValueError(
                    f"balance_split needs masks, one boolean per node (got '{name}' of type "
                    f"'{ntype}' with dtype {features[name].dtype} and shape "
                    f"{tuple(features[name].shape)})"
                )
            missing.discard(name)
            members = _members(source, type_id, mask)
            label = f"{name} of '{ntype}'" if len(source.ntypes) > 1 else name
            members_by_mask.append((label, members))
    if balance_split is not True and missing:
        raise ValueError(
            f"balance_split names node features that no node type has (got {sorted(missing)})"
        )
    if not any(bool(members.any()) for _, members in members_by_mask):
        empty = [name for name, _ in members_by_mask]
        what = f"those there are have no node: {empty}" if empty else "none"
        raise ValueError(
            "balance_split needs masks among the node features that have nodes, named "
            f"{SPLIT_NAMES} (got {what}); set them, pass the names of yours, or leave it out"
        )
    return members_by_mask


def _as_mask(feature: Tensor) -> npt.NDArray[np.bool_] | None:
    """A mask as booleans; None for anything else. 0/1 integers count, as DGL stores masks."""
    if feature.dim() != 1 or feature.is_floating_point() or feature.is_complex():
        return None
    values = feature.detach().cpu()
    if values.dtype != torch.bool and bool(((values != 0) & (values != 1)).any()):
        return None
    return (values != 0).numpy()


OwnParts: TypeAlias = (
    Tensor | Sequence[int] | npt.NDArray[Any] | Mapping[str, Tensor | Sequence[int]]
)
PartMethod: TypeAlias = str | OwnParts
Parts: TypeAlias = npt.NDArray[np.int64]

# (method, share of the tolerance that METIS is allowed), tried in turn until a bound is met.
_ATTEMPTS: tuple[tuple[Method, float], ...] = (("kway", 0.6), ("kway", 0.3), ("recursive", 0.3))

# What counts as large, in undirected edges, and as many edges per node.
_LARGE_EDGES = 4_000_000
_MANY_EDGES_PER_NODE = 6


class BalanceWarning(UserWarning):
    """No assignment within the tolerance was found; the message has what was reached."""


@dataclass(frozen=True)
class Assignment:
    """Where every node goes.

    Args:
        parts: int64 ``[num_nodes]``, in homogenised order.
        trainers: The same, counting the trainers of all machines; None if a machine has one.
        method: "metis", "random" or "custom".
    """

    parts: Parts
    trainers: Parts | None
    method: str


def assign_nodes(
    source: GraphSource,
    num_parts: int,
    part_method: PartMethod,
    constraints: Sequence[Constraint],
    *,
    num_trainers_per_machine: int = 1,
    objective: Objective = "cut",
    tolerance: float = 1.05,
    seed: int = 0,
    undirected: UndirectedGraph | None = None,
) -> Assignment:
    """Choose the part of every node; arguments and errors as for `partition_graph`.

    Args:
        constraints: What to balance. An assignment of the caller's is taken as it is.
        undirected: The graph's undirected form, if it has been built already.
    """
    if not isinstance(part_method, str):
        for name, given in (("objtype", objective != "cut"), ("seed", seed != 0)):
            if given:
                warnings.warn(
                    f"{name} has no effect on an assignment that is given as part_method; leave "
                    "it out",
                    stacklevel=3,
                )
        if num_trainers_per_machine > 1:
            raise NotImplementedError(
                "num_trainers_per_machine needs part_method 'metis' or 'random' (got an "
                "assignment); store your own 'trainer_id' as a node feature instead"
            )
        return Assignment(_own_assignment(source, num_parts, part_method), None, "custom")
    total = num_parts * num_trainers_per_machine
    if objective != "cut" and part_method != "metis" and total > 1:
        warnings.warn(
            f"objtype is what METIS minimises (got objtype={objective!r} with part_method="
            f"{part_method!r}, which ignores it); leave it out",
            stacklevel=3,
        )
    if part_method == "random":
        parts = random_assignment(
            constraints, source.num_nodes, total, tolerance=tolerance, seed=seed
        )
    elif part_method == "metis":
        if undirected is None and total > 1:
            undirected = UndirectedGraph.from_edges(source.homogenised_edges(), source.num_nodes)
        parts = (
            np.zeros(source.num_nodes, dtype=np.int64)
            if undirected is None
            else metis_assignment(
                undirected, total, constraints, objective=objective, tolerance=tolerance, seed=seed
            )
        )
    else:
        raise ValueError(
            "part_method must be 'metis', 'multilevel', 'random' or an assignment (got "
            f"{part_method!r})"
        )
    if num_trainers_per_machine == 1:
        return Assignment(parts, None, part_method)
    return Assignment(parts // num_trainers_per_machine, parts, part_method)


def metis_assignment(
    graph: UndirectedGraph,
    num_parts: int,
    constraints: Sequence[Constraint],
    *,
    objective: Objective = "cut",
    tolerance: float = 1.05,
    seed: int = 0,
    weigh_edges: bool = False,
) -> Parts:
    """Few cut edges and every constraint within ``tolerance``; see the note on the module.

    A constraint that is missed is a `BalanceWarning`. Arguments are those of `assign_nodes`, and of
    `metis_partition`.
    """
    if num_parts == 1 or graph.num_nodes <= num_parts:
        # One part, or one node for each: nothing to choose.
        return np.arange(graph.num_nodes, dtype=np.int64) % num_parts
    chosen = distinct_constraints(constraints)
    if graph.num_edges == 0:
        dealt = _deal(chosen, np.arange(graph.num_nodes), num_parts)
        return repaired(graph, dealt, chosen, num_parts, tolerance)
    weights, limits = _table(chosen, graph.num_nodes, num_parts, tolerance)
    means = weights.sum(axis=0) / num_parts
    # A constraint with less than a node per part would only mislead METIS: repaired afterwards.
    coarse = means >= 1
    if not coarse.any():
        coarse[0] = True
    hard = graph.num_edges >= max(_LARGE_EDGES, _MANY_EDGES_PER_NODE * graph.num_nodes)
    best: tuple[float, Parts] | None = None
    for attempt, (method, share) in enumerate(_ATTEMPTS):
        if method == "recursive" and objective == "vol":
            continue
        bounds = 1.0 + share * np.maximum(limits[coarse] / means[coarse] - 1.0, 1e-3)
        parts = metis_partition(
            graph,
            num_parts,
            node_weights=weights if coarse.all() else weights[:, coarse],
            tolerances=bounds.tolist(),
            objective=objective,
            method=method,
            seed=(seed + attempt) % 2**31,
            num_iterations=3 if hard else 10,
            num_trials=1 if hard else None,
            weigh_edges=weigh_edges,
        )
        missed = excess(part_loads(parts, weights, num_parts), limits)
        if best is None or missed < best[0]:
            best = (missed, parts)
        if missed == 0:
            break
    assert best is not None
    filled = fill_empty_parts(graph, best[1], num_parts)
    return repaired(graph, filled, chosen, num_parts, tolerance)


def random_assignment(
    constraints: Sequence[Constraint],
    num_nodes: int,
    num_parts: int,
    *,
    tolerance: float = 1.05,
    seed: int = 0,
) -> Parts:
    """Every part an equal share of every kind of node, drawn at random.

    Nodes that count alike under all constraints are one kind; each kind is dealt out like cards,
    those with more in-edges first, so that heavy nodes spread too. A constraint that is missed is a
    `BalanceWarning`.
    """
    chosen = distinct_constraints(constraints)
    order = np.random.default_rng(seed).permutation(num_nodes)
    parts = _deal(chosen, order, num_parts)
    edgeless = UndirectedGraph(np.zeros(num_nodes + 1, np.int64), np.zeros(0, np.int64))
    return repaired(edgeless, parts, chosen, num_parts, tolerance)


def _deal(constraints: Sequence[Constraint], order: npt.NDArray[np.int64], num_parts: int) -> Parts:
    columns = [constraint.weights[order] for constraint in constraints]
    members = [(column > 0).astype(np.int64) for column in columns]
    heavy = [-column for column in columns if column.size and column.max() > 1]
    if members:  # the last key counts most: kind, then weight; ties keep the given order
        order = order[np.lexsort((*heavy, *members))]
    turn = np.arange(order.shape[0])
    dealt_to = turn % num_parts
    if heavy:  # every second round backwards, or the first part would get the heaviest each time
        is_backwards = (turn // num_parts) % 2 == 1
        dealt_to = np.where(is_backwards, num_parts - 1 - dealt_to, dealt_to)
    parts = np.empty(order.shape[0], dtype=np.int64)
    parts[order] = dealt_to
    return parts


def _table(
    constraints: Sequence[Constraint], num_nodes: int, num_parts: int, tolerance: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Weights, one column per constraint, and the limit of each."""
    weights = np.zeros((num_nodes, len(constraints)), dtype=np.int64)
    limits = np.zeros(len(constraints))
    for column, constraint in enumerate(constraints):
        weights[:, column] = constraint.weights
        limits[column] = constraint.limit(num_parts, tolerance)
    return weights, limits


def repaired(
    graph: UndirectedGraph,
    parts: Parts,
    constraints: Sequence[Constraint],
    num_parts: int,
    tolerance: float,
) -> Parts:
    """``parts``, moved within the limits where possible; a warning where not."""
    weights, limits = _table(constraints, graph.num_nodes, num_parts, tolerance)
    if excess(part_loads(parts, weights, num_parts), limits) > 0:
        parts = repair_balance(graph, parts, weights, limits, num_parts)
    loads = part_loads(parts, weights, num_parts)
    largest, means = loads.max(axis=0), loads.mean(axis=0)
    missed = [
        f"{constraint.name}: largest part {largest[column]:.0f}, mean {means[column]:.1f}, "
        f"ratio {largest[column] / means[column]:.3f}"
        for column, constraint in enumerate(constraints)
        if largest[column] > limits[column]
    ]
    if missed:
        warnings.warn(
            f"no assignment to {loads.shape[0]} parts was found that balances everything to a "
            f"tolerance of {tolerance} ({'; '.join(missed)}); raise tolerance, or balance fewer "
            "things at once",
            BalanceWarning,
            stacklevel=5,  # the caller of partition_graph
        )
    return parts


def distinct_constraints(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Without those that weigh nothing, or say what another one says already."""
    chosen: list[Constraint] = []
    for constraint in constraints:
        if constraint.weights.any() and not any(
            np.array_equal(constraint.weights, other.weights) for other in chosen
        ):
            chosen.append(constraint)
    return chosen


def _own_assignment(source: GraphSource, num_parts: int, assignment: OwnParts) -> Parts:
    if isinstance(assignment, Mapping):
        if set(assignment) != set(source.ntypes):
            raise ValueError(
                "part_method as a dict must have the parts of every node type "
                f"(got {sorted(assignment)} for the node types {source.ntypes})"
            )
        pieces: list[Tensor | Sequence[int] | npt.NDArray[Any]]
        pieces = [assignment[ntype] for ntype in source.ntypes]
    elif len(source.ntypes) == 1:
        pieces = [assignment]
    else:
        raise TypeError(
            "part_method must be 'metis', 'random' or a dict from node type to parts, because "
            f"the graph has the node types {source.ntypes} (got {type(assignment).__name__})"
        )
    checked = []
    for ntype, count, piece in zip(source.ntypes, source.node_counts, pieces, strict=True):
        parts = torch.as_tensor(piece).detach().cpu()
        whole = not parts.is_floating_point() and parts.dtype != torch.bool
        if not (count == parts.numel() == 0) and not (whole and parts.shape == (count,)):
            raise ValueError(
                f"the assignment of type '{ntype}' must be one whole number per node, shape "
                f"({count},) (got {parts.dtype} of shape {tuple(parts.shape)})"
            )
        parts = parts.reshape(-1).to(torch.int64)
        bad = (parts < 0) | (parts >= num_parts)
        if bool(bad.any()):
            node = int(bad.nonzero()[0])
            raise ValueError(
                f"the assignment of type '{ntype}' must hold parts in [0, {num_parts}) "
                f"(got {int(parts[node])} for node {node})"
            )
        checked.append(parts)
    return torch.cat(checked).numpy()


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


@dataclass(eq=False)
class _State:
    """An assignment and its loads, kept in step."""

    graph: UndirectedGraph
    parts: Parts
    weights: IntArray
    limits: FloatArray
    num_parts: int

    def __post_init__(self) -> None:
        self.loads = part_loads(self.parts, self.weights, self.num_parts)

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
        for row in order[: int((best > np.iinfo(np.int64).min).sum())]:
            over = self.loads[part] > self.limits
            if not over.any() or failures > _MAX_FAILURES:
                break
            node = int(nodes[row])
            if not self.weights[node][over].any():
                continue
            room = self._has_room(nodes[row : row + 1])[0]
            room[part] = False
            if not room.any():
                failures += 1
                continue
            emptiness = -(self.loads / np.maximum(self.limits, 1)).max(axis=1)
            choices = np.flatnonzero(room)
            target = max(choices, key=lambda other: (links[row, other], emptiness[other]))
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
            return (np.maximum(loads - self.limits, 0) / scale).sum(axis=-1)

        after = before - over(self.loads[part]) - over(self.loads[target])
        after = after + over(self.loads[part] - give + take)
        after = after + over(self.loads[target] + give - take)
        row, partner = np.unravel_index(int(after.argmin()), after.shape)
        return (
            float(after[row, partner]),
            int(nodes[row]),
            -1 if partner == 0 else int(partners[partner - 1]),
        )
