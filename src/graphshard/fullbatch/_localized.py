# SPDX-License-Identifier: Apache-2.0
"""LocalizedShards: a sharded graph whose halo rows are local, fetched in one exchange.

A layer made of one module per relation would exchange once per module. It localizes instead: the
inputs of all source types travel once, and the modules run on this view, whose sources are the
rank's own rows followed by the halo rows. Degrees and questions about the whole graph keep their
global answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.typing import CanonicalEType, EType, Ids
from ..comm import Pending
from ..graph import ALL, Frame, MessagePassingGraph
from ..graph.local_graph import LocalGraph
from ..graph.structure import All, Schema, is_all
from ..ops import Attention, ProductRows, empty, multiply, multiply_transposed
from .topology import Halo, ShardStructure

if TYPE_CHECKING:
    from ._graph_shard_manager import GraphShardManager


def picked(degrees: Tensor, ids: Ids | All) -> Tensor | int:
    """The degrees of some rows: all, one as an int, or those of several ids."""
    if is_all(ids):
        return degrees
    if isinstance(ids, int):
        return int(degrees[ids])
    return degrees[torch.as_tensor(ids, device=degrees.device)]


class ExtendedRows(ProductRows):
    """Own rows, and then those of the halo, which may be on their way: for products with matrices.

    A product of own rows is found first. None of the rows gets a gradient.

    Args:
        own: ``[num_owned, width]``.
        halo: Whose ``wait()`` gives ``[num_halo, width]``; collective.
        num_halo: Rows of it.
    """

    def __init__(self, own: Tensor, halo: Pending, num_halo: int) -> None:
        super().__init__(own.shape[0] + num_halo, own.shape[1], own.dtype, own.device)
        self._own, self._halo, self._num_halo = own, halo, num_halo

    def product(self, matrix: Tensor) -> Tensor:
        dtype, kind = self.dtype, self.device.type
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        result: Tensor = _ExtendedProduct.apply(
            self._own, self._halo, self._num_halo, matrix.to(dtype)
        )
        return result

    def first(self, count: int) -> Any:
        return self._own[:count] if count <= self._own.shape[0] else super().first(count)


class _ExtendedProduct(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, halo: Pending, num_halo: int, matrix: Tensor) -> Tensor:
        sizes = own.shape[0], num_halo
        result = empty((sum(sizes), matrix.shape[1]), matrix.dtype, matrix.device)
        of_own, of_halo = result.split(sizes)

        def meanwhile() -> None:
            multiply([(own.to(matrix.dtype), matrix)], out=of_own)

        (rows,) = halo.wait(meanwhile)
        multiply([(rows.to(matrix.dtype), matrix)], out=of_halo)
        ctx.save_for_backward(own, rows)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        own, rows = (part.to(grad.dtype) for part in ctx.saved_tensors)
        of_own, of_halo = grad.split([own.shape[0], rows.shape[0]])
        of_matrix = multiply_transposed(own, of_own) + multiply_transposed(rows, of_halo)
        return None, None, None, of_matrix


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
        halos: By source type, whose rows are behind the own ones.
    """

    def __init__(
        self, graph: GraphShardManager, structure: ShardStructure, halos: Mapping[str, Halo]
    ) -> None:
        schema = graph._schema
        self._structure, self._original, self._halos = structure, graph._original, halos
        frames = []
        for ntype in schema.srctypes:
            rows = structure.num_src[ntype]
            if ntype in halos:
                rows = halos[ntype].num_extended
            frames.append(Frame(rows, structure.device, f"source nodes of type {ntype!r}", "src"))
        self._init_local(
            Schema.of_block(schema.srctypes, schema.dsttypes, schema.canonical_etypes),
            [
                halos[etype[0]].adjacency(etype)
                if etype[0] in halos
                else structure.local_adjacency(etype)
                for etype in schema.canonical_etypes
            ],
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
        view._halos = self._halos
        return view

    def out_degrees(self, u: Ids | All = ALL, etype: EType | None = None) -> Any:
        """Number of out-edges, on all ranks, of each extended source row; collective at first."""
        relation = self.to_canonical_etype(etype)
        degrees = self._structure.extended_out_degrees(relation, self._halos.get(relation[0]))
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
