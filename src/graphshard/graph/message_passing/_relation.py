# SPDX-License-Identifier: Apache-2.0
"""Message passing over one relation whose edges and features are all in this process.

Built-in pairs go to the fused kernel `gspmm`, which materialises no per-edge features. A message
that reads its destination is computed per edge first (`gsddmm`). User-defined functions get
gathered rows. Every mix of the two works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...function import MessageFunction, ReduceFunction
from ...ops import Adjacency, gsddmm, gspmm
from ..frame import RowsView
from ._udf import EdgeBatch, checked_result, run_reduce


@dataclass(frozen=True, slots=True)
class RelationData:
    """One relation and the features that its edges can see.

    Attributes:
        adj: The edges.
        etype: Their relation.
        src: Source features, each ``[adj.num_src, ...]``.
        dst: Destination features, each ``[adj.num_dst, ...]``.
        edge: Edge features, each ``[adj.num_edges, ...]``, in edge-id order.
        dst_ids: Ids of destinations that user functions see; None for 0, 1, ...
        edge_ids: Ids of edges that user functions see, as (u, v, e); None for their own.
    """

    adj: Adjacency
    etype: CanonicalEType
    src: Mapping[str, Any]
    dst: Mapping[str, Any]
    edge: Mapping[str, Any]
    dst_ids: Tensor | None = None
    edge_ids: tuple[Tensor, Tensor, Tensor] | None = None

    def operand(self, target: str, field: str) -> Any:
        """The column ``field`` on side ``u``, ``v`` or ``e``."""
        if target == "u":
            return self.src[field]
        return self.dst[field] if target == "v" else self.edge[field]

    def ids_of_edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """(source, destination, edge) ids of all edges."""
        if self.edge_ids is not None:
            return self.edge_ids
        adj = self.adj
        eids = torch.arange(adj.num_edges, dtype=adj.idtype, device=adj.device)
        return (*adj.coo(), eids)


def edge_values(data: RelationData, func: Any) -> dict[str, Any]:
    """New edge fields: what ``func`` gives for each edge.

    Args:
        data: The relation.
        func: A `MessageFunction`, or a callable from `EdgeBatch` to a dictionary.

    Returns:
        Fields of ``num_edges`` rows, in edge-id order.

    Raises:
        KeyError: a field is missing.
        TypeError: a user-defined function returns no dictionary.
    """
    adj = data.adj
    if not isinstance(func, MessageFunction):
        src, dst = adj.coo()
        batch = EdgeBatch(
            RowsView(data.src, src),
            RowsView(data.dst, dst),
            RowsView(data.edge, None),
            data.ids_of_edges,
            adj.num_edges,
            data.etype,
        )
        return checked_result(func(batch), "message")
    lhs = data.operand(func.lhs_target, func.lhs_field)
    if func.rhs_target is None or func.rhs_field is None:
        if func.lhs_target == "e":
            return {func.out_field: lhs}
        return {func.out_field: gsddmm(adj, "copy_lhs", lhs, None, func.lhs_target)}
    rhs = data.operand(func.rhs_target, func.rhs_field)
    return {func.out_field: gsddmm(adj, func.op, lhs, rhs, func.lhs_target, func.rhs_target)}


def reduce_messages(data: RelationData, message: Any, reduce: Any) -> dict[str, Any]:
    """New destination fields: messages along all edges, reduced where they meet.

    Args:
        data: The relation.
        message: A `MessageFunction`, or a callable from `EdgeBatch` to a dictionary.
        reduce: A `ReduceFunction`, or a callable from `NodeBatch` to a dictionary.

    Returns:
        Fields of ``num_dst`` rows; 0 where a destination has no in-edge.

    Raises:
        KeyError: a field, or the message that ``reduce`` reads, is missing.
        TypeError: a user-defined function returns no dictionary.
    """
    if isinstance(reduce, ReduceFunction):
        if isinstance(message, MessageFunction):
            fused = _fused(data, message, reduce.op)
            if fused is not None:
                return {reduce.out_field: fused}
        messages = edge_values(data, message)
        if reduce.msg_field not in messages:
            raise KeyError(
                f"no message {reduce.msg_field!r} to reduce; the message function returned "
                f"{sorted(messages)}"
            )
        value = messages[reduce.msg_field]
        return {reduce.out_field: gspmm(data.adj, "copy_rhs", reduce.op, None, value)}
    messages = edge_values(data, message)
    nodes = data.dst_ids
    if nodes is None:
        nodes = torch.arange(data.adj.num_dst, dtype=data.adj.idtype, device=data.adj.device)
    return run_reduce(reduce, data.adj, messages, data.dst, nodes, data.etype[2])


def _fused(data: RelationData, message: MessageFunction, reduce_op: str) -> Tensor | None:
    """Run a built-in pair as one kernel, or return None where it needs per-edge values first."""
    adj = data.adj
    lhs_target, rhs_target = message.lhs_target, message.rhs_target
    if rhs_target is None or message.rhs_field is None:
        if lhs_target == "v":
            return None
        value = data.operand(lhs_target, message.lhs_field)
        if lhs_target == "u":
            return gspmm(adj, "copy_lhs", reduce_op, value, None)
        return gspmm(adj, "copy_rhs", reduce_op, None, value)
    op = message.op
    if op == "dot":
        return None
    if lhs_target == "u" and rhs_target == "e":
        lhs, rhs = data.src[message.lhs_field], data.edge[message.rhs_field]
        return gspmm(adj, op, reduce_op, lhs, rhs)
    if lhs_target == "e" and rhs_target == "u" and op != "div":
        edge, src = data.edge[message.lhs_field], data.src[message.rhs_field]
        if op == "sub":  # e - u == (-u) + e, to the last bit
            return gspmm(adj, "add", reduce_op, -src, edge)
        return gspmm(adj, op, reduce_op, src, edge)
    return None
