# SPDX-License-Identifier: Apache-2.0
"""GraphSize: how large a graph and its parts are, counted or estimated.

[Note: halo of parts that do not exist]
    A part with ``m`` in-edges whose sources are spread evenly over ``N`` nodes reads ``(N - n) (1 -
    exp(-m / N))`` rows of others: that is a random assignment. METIS and the multilevel
    partitioner, which cut alike, leave 0.07 (nell), 0.23 (coauthor-physics), 0.30
    (amazon-computers) and 0.61 (communities by design) of that in four parts; where no partition
    says better, the middle of these is taken, and the ends are the spread. Of a partition for
    another number of ranks its own share is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .._base.typing import CanonicalEType
from ._sizes import LearntColumns, PartSize

SHARES_OF_RANDOM = 0.07, 0.26, 0.61
"""Halo of a good assignment, over that of a random one: lowest, middle, highest that was seen."""

_UNEVEN = 1.1
"""The largest part over the mean, where no partition says."""


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """A graph, as it is trained on: edges that are added for it are among its edges.

    Args:
        nodes: Node type to their number.
        edges: Relation to their number.
        features: Node type to the width of features; types without have none.
        itemsize: Bytes of a number of the features as they are stored.
        num_classes: Width of the scores.
        target: Node type that is predicted.
        train: Rows with a loss.
        parts: What each rank has of a partition; empty where there is none.
        share: Halo over that of a random assignment: lowest, expected, highest.
        disk: Bytes of the partition that there is; 0 where there is none.
        num_stored_edges: Edges before any were added for training; None: as many.
        learnt: Node type to the columns of its features that are learnt.
        edge_widths: Relation to the width of what its edges have, by name: ``weight``, ``feat``.
        relations: Of a task on edges, those that it is on; ``train`` are edges then.
        is_of_links: Whether the task is to predict links.
        scored: Edges of the task that are in a split; of which ``evaluated`` are in the larger one
            of those that are not for training.
        scored_width: Columns of their features.
        label_counts: Training rows of each class; empty where that is not known.
        has_val: Whether a validation row has a label.
    """

    name: str
    nodes: Mapping[str, float]
    edges: Mapping[CanonicalEType, float]
    features: Mapping[str, int]
    num_classes: int
    target: str
    train: float
    itemsize: int = 4
    num_relations: int = 0
    parts: tuple[PartSize, ...] = ()
    share: tuple[float, float, float] = SHARES_OF_RANDOM
    disk: float = 0.0
    num_stored_edges: float | None = None
    learnt: Mapping[str, LearntColumns] = field(default_factory=dict)
    edge_widths: Mapping[CanonicalEType, Mapping[str, int]] = field(default_factory=dict)
    relations: tuple[CanonicalEType, ...] = ()
    is_of_links: bool = False
    scored: float = 0.0
    evaluated: float = 0.0
    scored_width: int = 0
    label_counts: tuple[int, ...] = ()
    has_val: bool = True

    @property
    def num_nodes(self) -> float:
        return sum(self.nodes.values())

    @property
    def num_edges(self) -> float:
        return sum(self.edges.values())

    def with_counted_share(self) -> GraphSize:
        """The same, whose partition says how good others will be."""
        if len(self.parts) < 2:
            return self
        counted = sum(sum(part.halo.values()) for part in self.parts)
        (part,) = estimated_parts(self, len(self.parts), 1.0, 1.0)
        random = len(self.parts) * sum(part.halo.values())
        share = counted / random if random else 0.0
        return replace(self, share=(0.8 * share, share, min(1.0, 1.25 * share) or share))


def estimated_parts(
    graph: GraphSize, num_ranks: int, share: float, uneven: float = _UNEVEN
) -> tuple[PartSize, ...]:
    """Parts of a partition that does not exist: the largest, which stands for all.

    Args:
        share: Halo over that of a random assignment.
        uneven: The largest part over the mean.
    """
    if num_ranks == 1:
        return (
            PartSize(
                nodes=graph.nodes,
                edges=graph.edges,
                train=graph.train,
                scored=graph.scored,
                evaluated=graph.evaluated,
            ),
        )
    by_source: dict[str, float] = {}
    halo_of: dict[CanonicalEType, float] = {}
    for etype, count in graph.edges.items():
        by_source[etype[0]] = by_source.get(etype[0], 0.0) + count
        halo_of[etype] = _halo(graph.nodes[etype[0]], count, num_ranks, share) * uneven
    halo = {
        ntype: _halo(graph.nodes[ntype], count, num_ranks, share) * uneven
        for ntype, count in by_source.items()
    }
    fetched = 0.0
    if graph.scored:
        fetched = _halo(graph.num_nodes, graph.train, num_ranks, share) * uneven
    part = PartSize(
        nodes={t: n / num_ranks * uneven for t, n in graph.nodes.items()},
        edges={t: n / num_ranks * uneven for t, n in graph.edges.items()},
        halo=halo,
        halo_of=halo_of,
        sent=halo,
        sent_of=halo_of,
        cut={
            t: n / num_ranks * uneven * (1 - 1 / num_ranks) * share for t, n in graph.edges.items()
        },
        train=graph.train / num_ranks * uneven,
        scored=graph.scored / num_ranks * uneven,
        evaluated=graph.evaluated / num_ranks * uneven,
        fetched=(fetched, fetched),
    )
    return (part,)


def _halo(nodes: float, edges: float, num_ranks: int, share: float) -> float:
    if not nodes:
        return 0.0
    others = nodes * (1 - 1 / num_ranks)
    return share * others * -math.expm1(-edges / num_ranks / nodes)


def sampled_parts(
    graph: GraphSize, fanouts: tuple[int, ...], seeds: Mapping[str, float], batch: float
) -> tuple[tuple[PartSize, ...], float]:
    """Blocks of a step by layer, first layer first, and the edges that are drawn.

    A block's sources are its destinations and what is drawn, each once; draws are taken as even
    over all nodes of the type.

    Args:
        seeds: Node type to the destinations of the last layer.
        batch: Rows that have a loss.
    """
    layers: list[PartSize] = []
    wanted = {**dict.fromkeys(graph.nodes, 0.0), **seeds}
    drawn = 0.0
    for fanout in reversed(fanouts):
        edges = {}
        reached = dict.fromkeys(graph.nodes, 0.0)
        for etype, count in graph.edges.items():
            degree = count / max(1.0, graph.nodes[etype[2]])
            edges[etype] = wanted[etype[2]] * (degree if fanout < 0 else min(fanout, degree))
            reached[etype[0]] += edges[etype]
        sources = {
            t: n + (graph.nodes[t] - n) * -math.expm1(-reached[t] / max(1.0, graph.nodes[t]))
            for t, n in wanted.items()
        }
        drawn += sum(edges.values())
        layers.append(PartSize(nodes=wanted, sources=sources, edges=edges, train=batch))
        wanted = sources
    return tuple(reversed(layers)), drawn
