# SPDX-License-Identifier: Apache-2.0
"""What an epoch on paper is made of: a network, what a rank has of a graph, how rows come to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .._base.typing import CanonicalEType
from ._tape import StepEvents


@dataclass(frozen=True, kw_only=True)
class LearntColumns:
    """What a node type has beside dense features: rows of tables, of categories and non-zeros.

    Args:
        widths: Of the rows of each column of categories.
        categories: Rows of all these tables times their widths: numbers that are learnt.
        entries: Non-zeros of a row of sparse features, in the mean.
        stored_entries: As many a row takes, which is as many as the longest has.
        converted_bytes: Of one of these, what it takes as it was read, if that is another type.
        columns: Of sparse features, which have a row of ``sparse_width`` each; 0: there are none.
    """

    widths: tuple[int, ...] = ()
    categories: float = 0.0
    entries: float = 0.0
    stored_entries: int = 0
    converted_bytes: int = 0
    columns: int = 0
    sparse_width: int = 0

    @property
    def width(self) -> int:
        """Of the rows that go into the network."""
        return sum(self.widths) + self.sparse_width

    def stored_bytes(self, itemsize: int) -> float:
        """Of a node: numbers of categories, and columns and values of non-zeros."""
        return 8.0 * len(self.widths) + self.stored_entries * (4.0 + itemsize)

    def edge_bytes(self, itemsize: int) -> float:
        """Of a node: what its non-zeros are as edges, by row and by column, with values."""
        return self.entries * (12.0 + itemsize)


@dataclass(frozen=True, kw_only=True)
class EdgeScorer:
    """What scores edges by the rows of their ends.

    Args:
        ends: Node types of the sources and of the destinations, each once.
        edge_width: Columns of the features of an edge that are read; 0 in link prediction.
        out: Columns of the scores; 0 in link prediction.
        negatives: Of link prediction, nodes that are drawn as wrong ends of each kind.
        ranks_sources: Whether sources are drawn, too.
        num_factors: Relations that have a factor for each column of a row; 0: there are none.
        num_relations: Of link prediction.
    """

    ends: tuple[tuple[str, ...], tuple[str, ...]]
    edge_width: int = 0
    out: int = 0
    negatives: int = 0
    ranks_sources: bool = False
    num_factors: int = 0
    num_relations: int = 1

    @property
    def node_types(self) -> tuple[str, ...]:
        """Of all ends, each once."""
        return tuple(dict.fromkeys((*self.ends[0], *self.ends[1])))

    @property
    def sides(self) -> tuple[int, ...]:
        """Ends that are told from wrong ones, 1 for destinations."""
        return (1, 0) if self.ranks_sources else (1,)


class OwnNetwork(Protocol):
    """A network of which nothing is known but what it is seen to take."""

    @property
    def is_layered(self) -> bool:
        """Whether an evaluation of features in files goes layer by layer."""

    def __call__(self, parts: Sequence[PartSize], *, trains: bool) -> StepEvents:
        """What a step takes whose layers run on these parts."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network and what it is trained with; fields as those of `graphshard.train.RunConfig`.

    Args:
        features: Node type to the width of its features; types without have learnt rows.
        out: Width of what the network gives to a node.
        learnt: Node type to the columns of its features that are learnt, which are the last ones.
        edges: Of a task on edges, what scores these.
        own: Of the user, whose blocks are those that were seen; work, and rows of other ranks, are
            taken to be those of ``model``.
        num_relations: Of a plain graph whose edges carry relation numbers.
        edge_features: Relation to the width of what scores of attention read of its edges.
        in_files: In full batch, features stay in files, and layers begin with products of them.
    """

    model: str
    features: Mapping[str, int]
    out: int
    hidden: int
    layers: int
    heads: int = 1
    aggregator: str = "mean"
    dropout: float = 0.0
    residual: bool = False
    norm: bool = False
    encoder: bool = False
    num_bases: int = 0
    num_relations: int = 0
    edge_features: Mapping[CanonicalEType, int] = field(default_factory=dict)
    itemsize: int = 4
    in_files: bool = False
    learnt: Mapping[str, LearntColumns] = field(default_factory=dict)
    edges: EdgeScorer | None = None
    own: OwnNetwork | None = field(default=None, compare=False)

    def dense_width(self, ntype: str) -> int:
        """Columns of features that are numbers of each node."""
        learnt = self.learnt.get(ntype)
        return self.features.get(ntype, 0) - (0 if learnt is None else learnt.width)

    @property
    def sums_rows(self) -> bool:
        """Whether layers of a plain graph sum rows, so that partial sums may travel."""
        return self.model == "gcn" or (self.model == "sage" and self.aggregator != "pool")

    def widths_read(self, nodes: Mapping[str, float], *, is_typed: bool) -> dict[str, float]:
        """Node type to what blocks read of it where an evaluation goes layer by layer.

        What goes into the first layer, or its products; features, where those are no narrower.
        """
        has_heads = self.model in ("gat", "gatv2")
        wide = self.hidden * self.heads if has_heads else self.hidden
        features = {t: float(self.features.get(t, wide)) for t in nodes}
        is_projected = is_typed or self.model == "hgt" or (self.encoder and self.model != "rgcn")
        given = dict.fromkeys(nodes, float(wide)) if is_projected else dict(features)
        if not is_typed and self.model not in ("hgt", "rgcn"):
            out = wide if self.layers > 1 else self.out
            products = (self.model == "gatv2" or self.model == "sage") + 1 + self.residual
            products -= self.model == "sage" and self.aggregator == "gcn"
            is_pool = self.model == "sage" and self.aggregator == "pool"
            for ntype, width in given.items():
                given[ntype] = width if is_pool else min(width, float(products * out))
        sizes = [
            sum(n * of[t] for t, n in nodes.items() if t in self.features)
            for of in (given, features)
        ]
        return given if sizes[0] < sizes[1] else features


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """How rows of other ranks come.

    Args:
        mode: As `graphshard.fullbatch.AggregationMode` has it, resolved.
        wire: Bytes of a number on its way.
        num_ranks: Of the group.
        between_hosts: Whether some rows go over a link.
        has_reverses: Whether each edge of a plain graph has its reverse.
    """

    mode: Literal["oneshot", "sequential"]
    rematerialize: bool = True
    prefetch: int = 1
    wire: int = 4
    num_ranks: int = 1
    between_hosts: bool = False
    has_reverses: bool = False

    def row_bytes(self, columns: float, itemsize: int, num_tensors: int = 1) -> float:
        """Of rows of some tensors on their way; each row of int8 has a scale in float32."""
        return columns * min(self.wire, itemsize) + (4 * num_tensors if self.wire == 1 else 0)


@dataclass(frozen=True, kw_only=True)
class StatesSize:
    """What travels for attention over the only relation: rows, and states of destinations.

    Args:
        rows: That come, and that are sent; likewise ``states``.
        totals: Rows that are read, rows that are sent, and states, of all ranks together.
    """

    rows: tuple[float, float]
    states: tuple[float, float]
    totals: tuple[float, float, float]


SumsByLength = tuple[float, ...]
"""Partial sums of 2, 3, 4 rows, and last of more."""


@dataclass(frozen=True, kw_only=True)
class PartSize:
    """What a rank has of a graph, or of a sampled block.

    Args:
        nodes: Node type to rows that are computed.
        sources: Node type to rows that are read and are here; those of ``nodes`` where equal.
        edges: Relation to edges into these rows.
        halo: Node type to rows of other ranks that some relation reads.
        halo_of: Relation to rows of others that it reads.
        sent: Node type to rows of this rank that others read, once for each reader.
        sent_of: The same by relation.
        fewest: Node type to rows and partial sums that come, and that are sent, where the relations
            from it are summed together; absent where rows travel.
        sums: Node type to those of ``fewest`` that are sums of several rows; absent: all are sums
            of many.
        states: The same for attention; None where rows travel alone.
        cut: Relation to edges from rows of others.
        train: Rows with a loss: nodes, or edges.
        scored: Of a task on edges, those that an evaluation scores.
        evaluated: Of link prediction, those of the largest split that is ranked.
        fetched: Of a task on edges, rows of sources that come for ``train``, and that are sent.
        has_reverses: Whether each edge of the only relation was seen to have its reverse.
    """

    nodes: Mapping[str, float]
    edges: Mapping[CanonicalEType, float]
    halo: Mapping[str, float] = field(default_factory=dict)
    halo_of: Mapping[CanonicalEType, float] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)
    sent_of: Mapping[CanonicalEType, float] = field(default_factory=dict)
    fewest: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sums: Mapping[str, tuple[SumsByLength, SumsByLength]] = field(default_factory=dict)
    states: StatesSize | None = None
    cut: Mapping[CanonicalEType, float] = field(default_factory=dict)
    train: float = 0.0
    scored: float = 0.0
    evaluated: float = 0.0
    fetched: tuple[float, float] = (0.0, 0.0)
    sources: Mapping[str, float] | None = None
    has_reverses: bool = False

    def num_sources(self, ntype: str) -> float:
        return (self.nodes if self.sources is None else self.sources).get(ntype, 0.0)
