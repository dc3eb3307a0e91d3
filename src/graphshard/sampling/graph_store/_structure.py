# SPDX-License-Identifier: Apache-2.0
"""Structure: where neighbours come from, as samplers see it.

A structure answers one question, "which neighbours did these nodes draw", in the ids of the graph
as it lies in memory. Whether the answer comes from this process, from the owner of each node or
from a map of the whole graph is its own business; [Note: keyed draws] makes the answer the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...graph import Graph
from ...graph.frame import LazyRows
from ...ops import Adjacency, draw_neighbors

EdgeDir = Literal["in", "out"]


@dataclass(frozen=True)
class DrawOptions:
    """How neighbours are drawn; the same for all requests of a batch.

    Args:
        replace: Draw with replacement.
        weights: Name of the edge feature that draws are weighted by; None for uniform draws.
        weights_are_mask: The feature says which edges may be drawn at all.
        labor: Draw as `LaborSampler` does.
        edge_dir: Follow in-edges or out-edges.
        with_eids: Whether edge ids are wanted; without them messages between ranks are half.
    """

    replace: bool = False
    weights: str | None = None
    weights_are_mask: bool = False
    labor: bool = False
    edge_dir: EdgeDir = "in"
    with_eids: bool = True


@dataclass(frozen=True)
class HopRequest:
    """Nodes that draw neighbours under one relation.

    Args:
        etype: The relation.
        rows: Integer ``[n]``, ids of the nodes at its near end: the destinations of in-edges.
        fanout: Neighbours for each, -1 for all.
        key: From `DrawSeed.key`.
    """

    etype: CanonicalEType
    rows: Tensor
    fanout: int
    key: int


@dataclass(frozen=True)
class Drawn:
    """What was drawn for one request.

    Args:
        counts: int64 ``[n]``, neighbours drawn for each row.
        neighbors: ``[sum(counts)]``, ids of the nodes at the far end, grouped by row.
        eids: ``[sum(counts)]``, ids of the edges; None where they were not asked for.
        lazy_eids: In place of ``eids``, the same to be gathered when it is read, if ever.
    """

    counts: Tensor
    neighbors: Tensor
    eids: Tensor | None
    lazy_eids: LazyRows | None = None


class Structure(Protocol):
    """A source of neighbours."""

    @property
    def ntypes(self) -> Sequence[str]: ...

    @property
    def canonical_etypes(self) -> Sequence[CanonicalEType]: ...

    @property
    def idtype(self) -> torch.dtype:
        """Type of the ids that it takes and gives."""

    @property
    def device(self) -> torch.device: ...

    def num_nodes(self, ntype: str) -> int:
        """Nodes of a type in the whole graph."""

    def num_edges(self, etype: CanonicalEType) -> int:
        """Edges of a relation in the whole graph."""

    def draw(
        self,
        requests: Sequence[HopRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[Drawn]:
        """Draw for each request.

        Where the graph spans ranks this is collective: every rank must pass the same relations,
        fanouts and keys in the same order, with any number of rows.

        Args:
            requests: At most one per relation.
            options: How to draw.
            excluded: Relation to ids of edges that are treated as absent.

        Raises:
            ValueError: The weights are missing or no weights.
        """


@dataclass(eq=False)
class RelationDraws:
    """The edges of one relation at one side, ready to draw from.

    Args:
        indptr: ``[num_rows + 1]``.
        neighbors: ``[num_edges]`` far end of the edge at each position.
        eids: ``[num_edges]`` id of the edge at each position; None where they are equal.
    """

    indptr: Tensor
    neighbors: Tensor
    eids: Tensor | None
    _position: Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, adjacency: Adjacency, edge_dir: EdgeDir) -> RelationDraws:
        """The in-edges or out-edges of an adjacency."""
        return cls(*(adjacency.csc() if edge_dir == "in" else adjacency.csr()))

    def by_position(self, edge_values: Tensor) -> Tensor:
        """Values by edge id, reordered."""
        return edge_values if self.eids is None else edge_values[self.eids]

    def positions_of(self, eids: Tensor) -> Tensor:
        """Where edges lie, ascending int64 without repetition."""
        if self.eids is None:
            return torch.unique(eids.to(torch.int64))
        if self._position is None:
            position = torch.empty_like(self.eids)
            position[self.eids.long()] = torch.arange(
                self.eids.numel(), dtype=self.eids.dtype, device=self.eids.device
            )
            self._position = position
        return torch.unique(self._position.index_select(0, eids).to(torch.int64))

    def drawn(self, counts: Tensor, positions: Tensor, picked: Tensor, with_eids: bool) -> Drawn:
        """What `draw_neighbors` gave, with the ids of the edges if they are wanted."""
        if not with_eids:
            return Drawn(counts, picked, None)
        if self.eids is None:
            return Drawn(counts, picked, positions.to(self.neighbors.dtype))
        return Drawn(counts, picked, None, LazyRows(self.eids, positions))


class LocalStructure:
    """A graph that is whole in this process.

    Args:
        graph: Its node ids are taken as the original ones.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._draws: dict[tuple[CanonicalEType, EdgeDir], RelationDraws] = {}
        self._weights: dict[tuple[CanonicalEType, str, EdgeDir], _Checked] = {}

    @classmethod
    def of(cls, graph: Graph) -> LocalStructure:
        """The structure of a graph, which is kept with the graph and so prepared only once."""
        kept = vars(graph).get("_structure")
        if not isinstance(kept, LocalStructure) or kept.graph is not graph:
            kept = vars(graph)["_structure"] = cls(graph)
        return kept

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalStructure:
        return LocalStructure(copy.deepcopy(self.graph, memo))

    @property
    def ntypes(self) -> Sequence[str]:
        return self.graph.ntypes

    @property
    def canonical_etypes(self) -> Sequence[CanonicalEType]:
        return self.graph.canonical_etypes

    @property
    def idtype(self) -> torch.dtype:
        return self.graph.idtype

    @property
    def device(self) -> torch.device:
        return self.graph.device

    def num_nodes(self, ntype: str) -> int:
        return self.graph.num_nodes(ntype)

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.graph.num_edges(etype)

    def draw(
        self,
        requests: Sequence[HopRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[Drawn]:
        return [self._draw(request, options, (excluded or {})) for request in requests]

    def _draw(
        self,
        request: HopRequest,
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
    ) -> Drawn:
        relation = self._relation(request.etype, options.edge_dir)
        absent = excluded.get(request.etype)
        counts, positions, picked = draw_neighbors(
            relation.indptr,
            request.rows,
            request.fanout,
            request.key,
            request.rows.to(torch.int64),
            indices=relation.neighbors,
            replace=options.replace,
            prob=self._weights_of(request.etype, options),
            labor_ids=relation.neighbors if options.labor else None,
            excluded=None if absent is None else relation.positions_of(absent),
        )
        return relation.drawn(counts, positions, picked, options.with_eids)

    def _relation(self, etype: CanonicalEType, edge_dir: EdgeDir) -> RelationDraws:
        key = (etype, edge_dir)
        if key not in self._draws:
            adjacency = self.graph.relations[self.graph.canonical_etypes.index(etype)]
            self._draws[key] = RelationDraws.of(adjacency, edge_dir)
        return self._draws[key]

    def _weights_of(self, etype: CanonicalEType, options: DrawOptions) -> Tensor | None:
        if options.weights is None:
            return None
        data = self.graph.edges[etype].data
        if options.weights not in data:
            raise ValueError(missing_weights(options.weights, etype, list(data)))
        values = data[options.weights]
        key = (etype, options.weights, options.edge_dir)
        cached = self._weights.get(key)
        if cached is None or cached.values is not values or cached.version != values._version:
            checked = checked_weights(values, options, etype)
            by_position = self._relation(etype, options.edge_dir).by_position(checked)
            cached = self._weights[key] = _Checked(values, values._version, by_position)
        return cached.by_position


class _Checked(NamedTuple):
    """Weights that were found good, and the state of the feature that they were made from."""

    values: Tensor
    version: int
    by_position: Tensor


def missing_weights(name: str, etype: CanonicalEType, present: Sequence[str]) -> str:
    """What to tell a user whose edges have no such feature."""
    return (
        f"sampling by {name!r} needs an edge feature of that name on relation {etype} (it has "
        f"{sorted(present)}); set g.edges[etype].data[{name!r}] to one number per edge"
    )


def checked_weights(values: Tensor, options: DrawOptions, etype: CanonicalEType) -> Tensor:
    """Weights as the sampler takes them: float32 or float64 ``[num_edges]``, none negative.

    Raises:
        ValueError: Another shape or type, a negative weight, or one that is not finite.
    """
    name = options.weights
    if values.dim() == 2 and values.shape[1] == 1:
        values = values.view(-1)
    if values.dim() != 1:
        raise ValueError(
            f"edge feature {name!r} of {etype} must have one number per edge to sample by (got "
            f"shape {tuple(values.shape)})"
        )
    if options.weights_are_mask:
        if values.dtype not in (torch.bool, torch.uint8):
            raise ValueError(
                f"edge feature {name!r} of {etype} must be bool to serve as a mask (got "
                f"{values.dtype}); pass it as prob to sample in proportion to it"
            )
        return values.to(torch.float32)
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    bad = ~(values >= 0) | torch.isinf(values)
    if bool(bad.any()):
        raise ValueError(
            f"edge feature {name!r} of {etype} must hold finite weights of 0 or more to sample by "
            f"(got {float(values[bad][0])} at edge {int(bad.nonzero()[0])})"
        )
    return values.contiguous()
