# SPDX-License-Identifier: Apache-2.0
"""GraphStore: where a sampler finds neighbours.

A store answers one question, "which neighbours did these nodes draw", in the ids of the graph as it
is stored. Whether the answer comes from this process, from the rank that owns each node, from
shared memory or from a server is its own business; [Note: keyed draws] makes the answer the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...graph.frame import LazyRows

EdgeDir = Literal["in", "out"]


@dataclass(frozen=True, kw_only=True)
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
class NeighborRequest:
    """Nodes that draw neighbours under one relation.

    Args:
        etype: The relation.
        nodes: Integer ``[n]``, ids of the nodes at its near end: the destinations of in-edges.
        fanout: Neighbours for each, -1 for all.
        key: 64 bits that name the draw, for `graphshard.ops.draw_neighbors`; from `DrawSeed.key`.
    """

    etype: CanonicalEType
    nodes: Tensor
    fanout: int
    key: int


@dataclass(frozen=True)
class SampledNeighbors:
    """What was drawn for one request.

    Args:
        counts: int64 ``[n]``, neighbours drawn for each node.
        neighbors: ``[sum(counts)]``, ids of the nodes at the far end, grouped by node.
        eids: ``[sum(counts)]``, ids of the edges, perhaps gathered only when they are read; None
            where they were not asked for.
    """

    counts: Tensor
    neighbors: Tensor
    eids: Tensor | LazyRows | None


class GraphStore(Protocol):
    """Where neighbours come from. Samplers and loaders take one in the place of a graph.

    A class of your own needs these members and no base. Ids are of one integer dtype and count
    from 0 by node type and by relation; a plain graph has one of each. Sampling that repeats for
    any number of ranks and threads is `graphshard.ops.draw_neighbors` with the request's key.

    The loaders call `sample_neighbors` once for each layer of a batch, for all relations together,
    in a thread of their own that is batches ahead of training: it may wait for an answer from
    elsewhere, with all requests on their way at the same time.

    Example:
        >>> import torch, graphshard
        >>> from graphshard.sampling import NeighborSampler, SampledNeighbors
        >>> class Ring:
        ...     ntypes, canonical_etypes = ["node"], [("node", "next", "node")]
        ...     idtype, device, group = torch.int64, torch.device("cpu"), None
        ...     def num_nodes(self, ntype):
        ...         return 100
        ...     def num_edges(self, etype):
        ...         return 100
        ...     def sample_neighbors(self, requests, options, excluded=None):
        ...         ids = requests[0].nodes
        ...         return [SampledNeighbors(torch.ones_like(ids), (ids - 1) % 100, ids)]
        ...     def on(self, group):
        ...         return self
        >>> inputs, outputs, blocks = NeighborSampler([1, 1]).sample(Ring(), torch.tensor([7]))
        >>> inputs
        tensor([7, 6, 5])
    """

    @property
    def ntypes(self) -> Sequence[str]:
        """Node types."""

    @property
    def canonical_etypes(self) -> Sequence[CanonicalEType]:
        """Relations, as (source type, name, destination type)."""

    @property
    def idtype(self) -> torch.dtype:
        """Type of the ids that it takes and gives: int32 or int64."""

    @property
    def device(self) -> torch.device:
        """Where the ids that it takes and gives are."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that iterate together over one loader; None for a process on its own.

        They take the same number of steps. Where `sample_neighbors` is collective, it is among
        them.
        """

    def num_nodes(self, ntype: str) -> int:
        """Nodes of a type in the whole graph."""

    def num_edges(self, etype: CanonicalEType) -> int:
        """Edges of a relation in the whole graph."""

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request.

        A store that is collective says so; then every rank must pass the same relations, fanouts,
        keys and options in the same order, with any number of nodes.

        Args:
            requests: At most one per relation.
            options: How to draw.
            excluded: Relation to ids of edges that are treated as absent, for this rank.

        Raises:
            ValueError: The weights are missing or no weights.
        """

    def on(self, group: dist.ProcessGroup | None) -> GraphStore:
        """The store for one thread of a loader, over another group of the same ranks.

        A store that is not collective returns itself.
        """


_MEMBERS = "ntypes canonical_etypes idtype device group num_nodes num_edges sample_neighbors on"


def is_graph_store(value: Any) -> bool:
    """Whether a value is a `GraphStore`, by its members.

    Raises:
        TypeError: It has ``sample_neighbors`` and lacks others.
    """
    if not callable(getattr(value, "sample_neighbors", None)):
        return False
    missing = [name for name in _MEMBERS.split() if not hasattr(value, name)]
    if missing:
        raise TypeError(
            f"a GraphStore must have the members {', '.join(_MEMBERS.split())} "
            f"({type(value).__name__} lacks {', '.join(missing)}); see "
            "graphshard.sampling.GraphStore"
        )
    return True
