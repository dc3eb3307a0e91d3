# SPDX-License-Identifier: Apache-2.0
"""Assignment: the part of every node, by METIS, at random, or as the caller says.

[Note: how a bound is reached]
METIS takes balance as a goal. So it is asked for less than the tolerance, the result is measured,
and where a constraint is missed it is asked again: another seed and a tighter bound, then
recursive bisection. The best answer is then repaired by moving nodes (`_repair`). What is still
missed after that is reported in a warning, with the numbers.

[Note: effort]
A mesh has short boundaries, so METIS takes all its passes over them in no time, and they pay (a
sixth of the cut). In a large graph of many edges per node nearly every node lies on a boundary:
passes and first partitions then take most of the time for next to nothing (of 24.7 million edges in
4 parts, 18 s instead of 6 s, and no smaller cut), so there are fewer of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._source import GraphSource
from ._constraints import Constraint
from ._metis import Method, Objective, metis_partition
from ._repair import excess, fill_empty_parts, part_loads, repair_balance
from ._undirected import UndirectedGraph

PartMethod: TypeAlias = (
    str | Tensor | Sequence[int] | npt.NDArray[Any] | Mapping[str, Tensor | Sequence[int]]
)
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
        source: The graph.
        num_parts: Number of parts.
        part_method: Method, or the parts.
        constraints: What to balance. An assignment of the caller's is taken as it is.
        num_trainers_per_machine: Divide each part further, among so many trainers.
        objective: For METIS.
        tolerance: Largest weight of a part over the mean, for every constraint.
        seed: Of METIS or of the random numbers.
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
            f"part_method must be 'metis', 'random' or an assignment (got {part_method!r})"
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
) -> Parts:
    """Few cut edges and every constraint within ``tolerance``; see the note on the module.

    A constraint that is missed is a `BalanceWarning`. Arguments are those of `assign_nodes`.
    """
    if num_parts == 1 or graph.num_nodes <= num_parts:
        # One part, or one node for each: nothing to choose.
        alone: Parts = np.arange(graph.num_nodes, dtype=np.int64) % num_parts
        return alone
    chosen = _distinct(constraints)
    if graph.num_edges == 0:
        dealt = _deal(chosen, np.arange(graph.num_nodes), num_parts)
        return _repaired(graph, dealt, chosen, num_parts, tolerance)
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
        parts = metis_partition(
            graph,
            num_parts,
            node_weights=weights if coarse.all() else weights[:, coarse],
            tolerances=[
                1.0 + share * max(limit / mean - 1.0, 1e-3)
                for limit, mean in zip(limits[coarse], means[coarse], strict=True)
            ],
            objective=objective,
            method=method,
            seed=(seed + attempt) % 2**31,
            num_iterations=3 if hard else 10,
            num_trials=1 if hard else None,
        )
        missed = excess(part_loads(parts, weights, num_parts), limits)
        if best is None or missed < best[0]:
            best = (missed, parts)
        if missed == 0:
            break
    assert best is not None
    filled = fill_empty_parts(graph, best[1], num_parts)
    return _repaired(graph, filled, chosen, num_parts, tolerance)


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
    chosen = _distinct(constraints)
    order = np.random.default_rng(seed).permutation(num_nodes)
    parts = _deal(chosen, order, num_parts)
    edgeless = UndirectedGraph(np.zeros(num_nodes + 1, np.int64), np.zeros(0, np.int64))
    return _repaired(edgeless, parts, chosen, num_parts, tolerance)


def _deal(constraints: Sequence[Constraint], order: npt.NDArray[np.int64], num_parts: int) -> Parts:
    columns = [constraint.weights[order] for constraint in constraints]
    members = [(column > 0).astype(np.int64) for column in columns]
    heavy = [-column for column in columns if column.size and column.max() > 1]
    if members:  # the last key counts most: kind, then weight; ties keep the given order
        order = order[np.lexsort((*heavy, *members))]
    turn = np.arange(order.shape[0])
    place = turn % num_parts
    if heavy:  # every second round backwards, or the first part would get the heaviest each time
        place = np.where((turn // num_parts) % 2 == 1, num_parts - 1 - place, place)
    parts = np.empty(order.shape[0], dtype=np.int64)
    parts[order] = place
    return parts


def _table(
    constraints: Sequence[Constraint], num_nodes: int, num_parts: int, tolerance: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Weights, one column per constraint, and the limit of each."""
    weights = np.zeros((num_nodes, len(constraints)), dtype=np.int64)
    for column, constraint in enumerate(constraints):
        weights[:, column] = constraint.weights
    return weights, np.array([item.limit(num_parts, tolerance) for item in constraints])


def _repaired(
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
    _warn_if_missed(constraints, part_loads(parts, weights, num_parts), limits, tolerance)
    return parts


def _distinct(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Without those that weigh nothing, or say what another one says already."""
    chosen: list[Constraint] = []
    for constraint in constraints:
        if constraint.weights.any() and not any(
            np.array_equal(constraint.weights, other.weights) for other in chosen
        ):
            chosen.append(constraint)
    return chosen


def _warn_if_missed(
    constraints: Sequence[Constraint],
    loads: npt.NDArray[np.float64],
    limits: npt.NDArray[np.float64],
    tolerance: float,
) -> None:
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
            stacklevel=6,  # the caller of partition_graph
        )


def _own_assignment(source: GraphSource, num_parts: int, assignment: Any) -> Parts:
    if isinstance(assignment, Mapping):
        if set(assignment) != set(source.ntypes):
            raise ValueError(
                "part_method as a dict must have the parts of every node type "
                f"(got {sorted(assignment)} for the node types {source.ntypes})"
            )
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
    result: Parts = torch.cat(checked).numpy()
    return result
