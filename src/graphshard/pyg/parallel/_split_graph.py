# SPDX-License-Identifier: Apache-2.0
"""A graph that every rank has whole, and the rows and edges of it that a rank computes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..._base.typing import CanonicalEType
from ...comm import agree
from ...comm.collectives import all_gather
from ...comm.group import GroupState
from ...fullbatch import AggregationMode
from .._edge_index import ShardedEdgeIndex, sharded_edges
from .._layers import WHOLE_EDGES
from .._numbering import NodeNumbering
from .._whole_graph import (
    Column,
    NodeLayout,
    SplitRows,
    WholeGraph,
    edges_of_matrix,
    has_self_loops,
)

_OTHER_EDGE_SETS = 8

MatrixEdges: TypeAlias = tuple[Tensor, Tensor | None]
"""``[2, num_edges]`` and the values of an adjacency matrix, None where they are all 1."""


class ParallelEdges:
    """Edges of the whole graph, and what a rank has in their place.

    Args:
        whole: ``[2, num_edges]``, of which a copy is kept: the caller's may be written to.
        rows: Which rank has which edge.
        index: This rank's.
        has_loops: Whether any is a self loop, on any rank.
    """

    def __init__(
        self, whole: Tensor, rows: SplitRows, index: ShardedEdgeIndex, has_loops: bool
    ) -> None:
        self.whole, self.rows, self.index = whole.clone(), rows, index
        self.has_loops = has_loops

    def holds(self, edges: Tensor) -> bool:
        """Whether these are its edges."""
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
        self.is_computing = False  # within a call of the model
        self._others: list[tuple[CanonicalEType, ParallelEdges]] = []

    @contextmanager
    def computing(self, model: nn.Module) -> Iterator[None]:
        """Within a call of the model, all of whose layers get this rank's edges."""
        layers = [module for module in model.modules() if hasattr(module, "propagate")]
        self.is_computing = True
        for layer in layers:
            vars(layer)[WHOLE_EDGES] = self.with_own_edges
        try:
            yield
        finally:
            self.is_computing = False
            for layer in layers:
                vars(layer).pop(WHOLE_EDGES, None)

    def with_own_edges(self, value: Any) -> Any:
        """Arguments of a layer, with this rank's edges in place of those of the whole graph.

        A call of the model puts them there; a model may still have others, which it keeps itself.

        Raises:
            NotImplementedError: Edges that no call has brought.
        """
        if isinstance(value, ShardedEdgeIndex):
            return value
        if isinstance(value, Tensor):
            if not names_nodes(value):
                return value
            others = [known for _, known in self._others]
            for known in (*self._edge_sets.values(), *others):
                if known.holds(value):
                    return known.index
            raise NotImplementedError(
                f"a layer of a parallel model got edges of shape {tuple(value.shape)} that are "
                "neither those of the data object that parallelize was given, nor among the "
                "arguments of the call; pass them to the model"
            )
        if type(value) in (tuple, list):
            return type(value)(self.with_own_edges(item) for item in value)
        if type(value) is dict:
            return {key: self.with_own_edges(item) for key, item in value.items()}
        return value

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
        return {
            etype: ParallelEdges(ends, rows[etype], made[etype], has_self_loops(etype, ends))
            for etype, ends in edges.items()
        }

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
            made = self._split({etype: edges})[etype]
        self._others = [(etype, made), *self._others[: _OTHER_EDGE_SETS - 1]]
        return made

    def edges_of_matrix(self, matrix: Any, name: str, etype: CanonicalEType) -> MatrixEdges:
        """Edges and values of an ``adj_t``.

        Args:
            matrix: A sparse matrix of torch or torch-sparse.
            name: What an error calls it.
            etype: Its relation.
        """
        size = tuple(matrix.shape if isinstance(matrix, Tensor) else matrix.sizes())[:2]
        expected = self.nodes[etype[2]].total, self.nodes[etype[0]].total
        if size != expected:
            raise ValueError(
                f"{name} is a sparse matrix, so it must have a row for each destination and a "
                f"column for each source, {expected} (got {size}); pass data.adj_t, or edge_index"
            )
        return edges_of_matrix(matrix, name)

    def chosen(self, whole: Tensor, rows: SplitRows) -> Tensor:
        """This rank's rows. Not kept: see [Note: what is kept between calls] in fullbatch."""
        if self.state.world_size == 1 and rows.is_in_order:
            return whole
        if whole.requires_grad and torch.is_grad_enabled():
            found: Tensor = _ChosenRows.apply(whole, rows, self.state)
            return found
        return Column(whole.detach()).rows(rows.own)


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


def names_nodes(value: Tensor) -> bool:
    """Whether a tensor has pairs of nodes, as edges are."""
    return value.dim() == 2 and value.shape[0] == 2 and value.dtype in (torch.int64, torch.int32)


def checksum(tensor: Tensor) -> int:
    """Differs where values differ."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
