# SPDX-License-Identifier: Apache-2.0
"""A graph that every rank has whole, and the rows and edges of it that a rank computes."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm import agree
from ...comm.collectives import all_gather
from ...comm.group import GroupState
from ...fullbatch import AggregationMode
from ...graph.frame import version_of
from .._edge_index import ShardedEdgeIndex, sharded_edges
from .._numbering import NodeNumbering
from .._whole_graph import NodeLayout, SplitRows, WholeGraph

_OTHER_EDGE_SETS = 8


class ParallelEdges:
    """Edges of the whole graph, and what a rank has in their place.

    Args:
        whole: ``[2, num_edges]``.
        rows: Which rank has which edge.
        index: This rank's.
    """

    def __init__(self, whole: Tensor, rows: SplitRows, index: ShardedEdgeIndex) -> None:
        self.whole, self.rows, self.index = whole, rows, index
        self._version = version_of(whole)

    def holds(self, edges: Tensor) -> bool:
        """Whether these are its edges."""
        if self.whole is edges and self._version == version_of(edges):
            return True
        return self.whole.shape == edges.shape and torch.equal(self.whole, edges)


class ParallelGraph:
    """A whole graph, who owns what, and the edge sets that calls have brought.

    Args:
        whole: The graph.
        owners: Node type to the rank of each node.
        policy: How remote rows are fetched.
        state: The ranks.
    """

    def __init__(
        self,
        whole: WholeGraph,
        owners: Mapping[str, Tensor],
        policy: AggregationMode,
        state: GroupState,
    ) -> None:
        self.state, self._policy = state, policy
        self._layout = NodeLayout(owners, state)
        self.nodes = self._layout.rows
        self.etypes = list(whole.edges)
        device = next(iter(whole.edges.values())).device
        self._numberings = {
            ntype: NodeNumbering(split.own.numel(), split.own.to(device), state.group)
            for ntype, split in self.nodes.items()
        }
        self._edge_sets = self._split(whole.edges)
        first = self._edge_sets[self.etypes[0]]
        self._policy = replace(policy, mode=first.index.halo.mode.mode)
        self.device = first.whole.device
        self._others: list[tuple[CanonicalEType, ParallelEdges]] = []
        self._chosen: dict[tuple[int, int], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def _split(self, edges: Mapping[CanonicalEType, Tensor]) -> dict[CanonicalEType, ParallelEdges]:
        rows = {etype: self._layout.split_edges(etype, ends) for etype, ends in edges.items()}
        if self.state.world_size == 1:  # hooks and explainers of layers see edges in this order
            rows = {
                etype: SplitRows(torch.arange(ends.shape[1]), [ends.shape[1]], 0)
                for etype, ends in edges.items()
            }
        local = {
            etype: self._layout.local_edges(etype, ends, rows[etype].own)
            for etype, ends in edges.items()
        }
        device = next(iter(edges.values())).device
        made = sharded_edges(local, self._numberings, device, self._policy, self.state.group)
        for etype, index in made.items():
            index.halo.own_edges = partial(self.chosen, rows=rows[etype])
        return {etype: ParallelEdges(edges[etype], rows[etype], made[etype]) for etype in edges}

    def edge_set(self, edges: Tensor, etype: CanonicalEType) -> ParallelEdges:
        """The set of these edges; collective where they were not seen before."""
        if self._edge_sets[etype].holds(edges):
            return self._edge_sets[etype]
        for place, (other, known) in enumerate(self._others):
            if other == etype and known.holds(edges):
                self._others.insert(0, self._others.pop(place))
                return known
        for row, count in zip(edges, (etype[0], etype[2]), strict=True):
            total = self.nodes[count].total
            if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < total:
                raise ValueError(
                    f"an integer tensor [2, n] names edges, so its numbers must be nodes, in "
                    f"[0, {total}) (got {int(row.min())} to {int(row.max())})"
                )
        agree(f"{tuple(edges.shape)}, checksum {checksum(edges)}", "edges", self.state.group)
        with torch.inference_mode(False):
            made = self._split({etype: edges.clone()})[etype]
        self._others = [(etype, made), *self._others[: _OTHER_EDGE_SETS - 1]]
        return made

    def chosen(self, whole: Tensor, rows: SplitRows) -> Tensor:
        """This rank's rows; of a tensor that needs no gradient the same object again."""
        if self.state.world_size == 1 and rows.is_in_order:
            return whole
        own = rows.own.to(whole.device)
        if whole.requires_grad and torch.is_grad_enabled():
            found: Tensor = _ChosenRows.apply(whole, rows, self.state)
            return found
        key = id(whole), id(rows)
        known = self._chosen.get(key)
        if known is not None and known[0]() is whole and known[1] == version_of(whole):
            return known[2]
        with torch.inference_mode(False):  # it serves later calls, also those that train
            made = whole.detach()[own]
        self._chosen = {k: v for k, v in self._chosen.items() if v[0]() is not None}
        self._chosen[key] = weakref.ref(whole), version_of(whole), made
        return made


def joined(own: Tensor, rows: SplitRows, state: GroupState) -> Tensor:
    """The whole tensor, of which each rank has its rows; collective."""
    if state.world_size == 1:
        parts = [own]
    else:
        padded = own.new_zeros((max(rows.counts), *own.shape[1:]))
        padded[: own.shape[0]] = own
        as_bytes = padded.to(torch.uint8) if own.dtype == torch.bool else padded
        found = all_gather(state, as_bytes, "parallelize")
        parts = [part[:count] for part, count in zip(found, rows.counts, strict=True)]
    whole = own.new_empty((rows.total, *own.shape[1:]))
    for ids, part in zip(rows.of_rank, parts, strict=True):
        whole[ids.to(own.device)] = part.to(own.dtype)
    return whole


class _ChosenRows(torch.autograd.Function):
    """This rank's rows of a whole tensor; backward every rank gets all of the gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: SplitRows, state: GroupState) -> Tensor:
        ctx.rows, ctx.state = rows, state
        return whole[rows.own.to(whole.device)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Not scaled any more: what is in front of the call counts once. See `JoinedRows`.
        return joined(grad / ctx.state.world_size, ctx.rows, ctx.state), None, None


def checksum(tensor: Tensor) -> int:
    """Differs where values differ."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
