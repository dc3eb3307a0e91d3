# SPDX-License-Identifier: Apache-2.0
"""LocalizedShards: a sharded graph whose halo rows are local, fetched in one exchange.

A layer made of one module per relation would exchange once per module. It localizes instead: the
inputs of all source types travel once, and the modules run on this view, whose sources are the
rank's own rows followed by the halo rows. Degrees and questions about the whole graph keep their
global answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType, EType, Ids
from ..graph import ALL, Frame, MessagePassingGraph
from ..graph.local_graph import LocalGraph
from ..graph.structure import All, Schema, is_all
from ..ops import Attention
from .topology import ShardStructure

if TYPE_CHECKING:
    from ._graph_shard_manager import GraphShardManager


def picked(degrees: Tensor, ids: Ids | All) -> Tensor | int:
    """The degrees of some rows: all, one as an int, or those of several ids."""
    if is_all(ids):
        return degrees
    if isinstance(ids, int):
        return int(degrees[ids])
    return degrees[torch.as_tensor(ids, device=degrees.device)]


class EdgesOfAllRanks(MessagePassingGraph):
    """A graph that answers for all ranks, of which this one has a part."""

    _structure: ShardStructure

    def _etypes_of(self, etype: EType | None) -> Sequence[CanonicalEType]:
        return self.canonical_etypes if etype is None else [self.to_canonical_etype(etype)]

    def any_zero_in_degree(self, etype: EType | None = None) -> bool:
        """Whether some destination, on any rank, has no in-edge."""
        return any(self._structure.any_zero_in_degree(t) for t in self._etypes_of(etype))

    def has_edges(self, etype: EType | None = None) -> bool:
        """Whether there is an edge on any rank."""
        return any(self._structure.global_num_edges(t) for t in self._etypes_of(etype))

    def in_degrees(self, v: Ids | All = ALL, etype: EType | None = None) -> Any:
        """Number of in-edges of this rank's destination rows, ``[num_dst]`` int64."""
        return picked(self._structure.in_degrees(self.to_canonical_etype(etype)), v)


class LocalizedShards(EdgesOfAllRanks, LocalGraph):
    """All in-edges of this rank's destinations, between extended source rows and own rows.

    Args:
        graph: The sharded graph; its destination and edge features are shared.
        inputs: The source types that have extended rows.
    """

    def __init__(
        self, graph: GraphShardManager, structure: ShardStructure, inputs: Collection[str]
    ) -> None:
        schema = graph._schema
        self._structure, self._original = structure, graph._original
        frames = []
        for ntype in schema.srctypes:
            halo, rows = structure.union_halo(ntype), structure.num_src[ntype]
            if halo is not None and ntype in inputs:
                rows = halo.num_extended
            frames.append(Frame(rows, structure.device, f"source nodes of type {ntype!r}", "src"))
        self._init_local(
            Schema.of_block(schema.srctypes, schema.dsttypes, schema.canonical_etypes),
            [structure.local_adjacency(etype) for etype in schema.canonical_etypes],
            frames,
            list(graph._dst_frames),
            list(graph._edge_frames),
            is_block=True,
        )

    def _relation_view(self, relations: list[int]) -> LocalizedShards:
        if len(relations) != 1:
            raise NotImplementedError(
                f"a localized graph is sliced one relation at a time (got {len(relations)}); name "
                "the relation by its triple"
            )
        view = super()._relation_view(relations)
        view._structure, view._original = self._structure, self._original
        return view

    def out_degrees(self, u: Ids | All = ALL, etype: EType | None = None) -> Any:
        """Number of out-edges, on all ranks, of each extended source row; collective at first."""
        degrees = self._structure.extended_out_degrees(self.to_canonical_etype(etype))
        return picked(degrees, u)

    def _attend(self, relation: int, attention: Attention) -> Tensor | None:
        etype = self._schema.canonical_etypes[relation]
        return super()._attend(relation, self._original.keyed(etype, attention))

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        if norm_by != "dst":
            raise NotImplementedError(
                "a localized graph normalises over the in-edges of destinations only (got "
                f"norm_by={norm_by!r}); call edge_softmax on the sharded graph"
            )
        return super()._edge_softmax(relation, logits, norm_by)
