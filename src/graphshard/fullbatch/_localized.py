# SPDX-License-Identifier: Apache-2.0
"""LocalizedShards: a sharded graph whose halo rows are local, fetched in one exchange.

A layer made of one module per relation would exchange once per module. It localizes instead: the
inputs of all source types travel once, and the modules run on this view, whose sources are the
rank's own rows followed by the halo rows. Degrees and questions about the whole graph keep their
global answers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..graph import ALL, Frame, MessagePassingGraph
from ..graph.message_passing import RelationData, edge_values, reduce_messages
from ..graph.structure import Schema, is_all
from ..ops import Attention, attend, edge_softmax
from .topology import Halo, OriginalIds, ShardStructure


class _ShardedGraph(Protocol):
    _dst_frames: list[Frame]
    _edge_frames: list[Frame]
    _schema: Schema
    _original: OriginalIds


class LocalizedShards(MessagePassingGraph):
    """All in-edges of this rank's destinations, between extended source rows and own rows.

    Args:
        graph: The sharded graph; its destination and edge features are shared.
        structure: The rank's rows and edges.
        inputs: The source types that have extended rows.
    """

    def __init__(
        self,
        graph: _ShardedGraph,
        structure: ShardStructure,
        inputs: Collection[str],
    ) -> None:
        schema = graph._schema
        self._structure, self._original = structure, graph._original
        self._halos: dict[str, Halo] = {}
        frames = []
        for ntype in schema.srctypes:
            halo = structure.union_halo(ntype)
            rows = structure.num_src[ntype]
            if halo is not None:
                self._halos[ntype] = halo
                rows = halo.num_extended if ntype in inputs else rows
            frames.append(Frame(rows, structure.device, f"source nodes of type {ntype!r}", "src"))
        block = Schema.of_block(schema.srctypes, schema.dsttypes, schema.canonical_etypes)
        self._start(block, frames, list(graph._dst_frames), list(graph._edge_frames))

    def _start(self, schema: Schema, src: list[Frame], dst: list[Frame], edge: list[Frame]) -> None:
        self._init_protocol(
            schema.srctypes,
            schema.dsttypes,
            schema.canonical_etypes,
            src,
            dst,
            edge,
            True,
            self._structure.device,
            torch.int64,
            schema=schema,
        )

    def _relation_view(self, relations: list[int]) -> LocalizedShards:
        if len(relations) != 1:
            raise NotImplementedError(
                f"a localized graph is sliced one relation at a time (got {len(relations)}); name "
                "the relation by its triple"
            )
        (relation,) = relations
        schema = self._schema
        view = object.__new__(LocalizedShards)
        view._structure, view._halos = self._structure, self._halos
        view._original = self._original
        view._start(
            schema.single(relation),
            [self._src_frames[schema.src_of[relation]]],
            [self._dst_frames[schema.dst_of[relation]]],
            [self._edge_frames[relation]],
        )
        return view

    def _asked(self, etype: Any) -> list[CanonicalEType]:
        return self.canonical_etypes if etype is None else [self.to_canonical_etype(etype)]

    def any_zero_in_degree(self, etype: Any = None) -> bool:
        """Whether some destination, on any rank, has no in-edge."""
        return any(self._structure.any_zero_in_degree(t) for t in self._asked(etype))

    def has_edges(self, etype: Any = None) -> bool:
        """Whether there is an edge on any rank."""
        return any(self._structure.global_num_edges(t) for t in self._asked(etype))

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        """Number of in-edges of this rank's destination rows."""
        degrees = self._structure.in_degrees(self.to_canonical_etype(etype))
        return degrees if is_all(v) else degrees[torch.as_tensor(v)]

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        """Number of out-edges, on all ranks, of each extended source row; collective at first."""
        canonical = self.to_canonical_etype(etype)
        degrees = self._structure.extended_out_degrees(canonical, self._halos[canonical[0]])
        return degrees if is_all(u) else degrees[torch.as_tensor(u)]

    def _data(self, relation: int) -> RelationData:
        schema = self._schema
        etype = schema.canonical_etypes[relation]
        return RelationData(
            self._halos[etype[0]].adjacency(etype),
            etype,
            self._src_frames[schema.src_of[relation]],
            self._dst_frames[schema.dst_of[relation]],
            self._edge_frames[relation],
        )

    def _reduce(self, relation: int, message_func: Any, reduce_func: Any) -> dict[str, Any]:
        return reduce_messages(self._data(relation), message_func, reduce_func)

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        return edge_values(self._data(relation), func)

    def _attend(self, relation: int, attention: Attention) -> Tensor | None:
        etype = self._schema.canonical_etypes[relation]
        return attend(self._data(relation).adj, self._original.keyed(etype, attention))

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        if norm_by != "dst":
            raise NotImplementedError(
                "a localized graph normalises over the in-edges of destinations only (got "
                f"norm_by={norm_by!r}); call edge_softmax on the sharded graph"
            )
        return edge_softmax(self._data(relation).adj, logits, "dst")
