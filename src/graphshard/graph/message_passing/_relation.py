# SPDX-License-Identifier: Apache-2.0
"""Message passing over one relation whose edges and features are all in this process.

Built-in pairs go to the fused kernel `gspmm`, which materialises no per-edge features. A message
that reads its destination is computed per edge first (`gsddmm`). User-defined functions get
gathered rows. Every mix of the two works.

A user-defined message function sees all edges as one `EdgeBatch`. A reduce function sees nodes in
groups of equal in-degree, so that the messages of ``n`` nodes with ``d`` in-edges each form one
dense ``[n, d, ...]`` mailbox; along ``d`` the messages stand in ascending edge id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...function import MessageFunction, ReduceFunction
from ...ops import Adjacency, gsddmm, gspmm
from ..frame import RowsView


@dataclass(frozen=True, slots=True)
class RelationData:
    """One relation and the features that its edges can see.

    Attributes:
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

    Returns:
        Fields of ``num_edges`` rows, in edge-id order.
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

    Returns:
        Fields of ``num_dst`` rows; 0 where a destination has no in-edge.
    """
    if isinstance(reduce, ReduceFunction) and isinstance(message, MessageFunction):
        fused = _fused(data, message, reduce.op)
        if fused is not None:
            return {reduce.out_field: fused}
    messages = edge_values(data, message)
    if isinstance(reduce, ReduceFunction):
        if reduce.msg_field not in messages:
            raise KeyError(
                f"no message {reduce.msg_field!r} to reduce; the message function returned "
                f"{sorted(messages)}"
            )
        value = messages[reduce.msg_field]
        return {reduce.out_field: gspmm(data.adj, "copy_rhs", reduce.op, None, value)}
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EdgeBatch:
    """What a user-defined message function is given.

    Attributes:
        src: Features of the source nodes, one row per edge of the batch.
        dst: Features of the destination nodes, one row per edge of the batch.
        data: Features of the edges.
        canonical_etype: Their relation.
    """

    src: Mapping[str, Any]
    dst: Mapping[str, Any]
    data: Mapping[str, Any]
    _ids: Callable[[], tuple[Tensor, Tensor, Tensor]]
    _num_edges: int
    canonical_etype: CanonicalEType

    def edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """(source ids, destination ids, edge ids), each ``[batch]``."""
        return self._ids()

    def batch_size(self) -> int:
        """Number of edges."""
        return self._num_edges

    def __len__(self) -> int:
        return self._num_edges


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NodeBatch:
    """What a user-defined reduce or apply function is given.

    Attributes:
        data: Features of the nodes, one row per node of the batch.
        ntype: Their type.
    """

    data: Mapping[str, Any]
    _mailbox: Mapping[str, Any] | None
    _nodes: Tensor
    ntype: str

    @property
    def mailbox(self) -> Mapping[str, Any]:
        """Messages of the nodes, each ``[batch, degree, ...]``.

        Raises:
            RuntimeError: in an apply function, which runs after messages are gone.
        """
        if self._mailbox is None:
            raise RuntimeError(
                "there is no mailbox in a function that is applied to nodes; reduce the messages "
                "in the reduce function and read its result from nodes.data"
            )
        return self._mailbox

    def nodes(self) -> Tensor:
        """``[batch]`` node ids."""
        return self._nodes

    def batch_size(self) -> int:
        """Number of nodes."""
        return int(self._nodes.shape[0])

    def __len__(self) -> int:
        return self.batch_size()


def checked_result(result: Any, what: str) -> dict[str, Any]:
    """Return what a user-defined function returned, if it is a dictionary with string keys."""
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise GraphTypeError(
            f"a user-defined {what} function must return a dictionary from field name to tensor "
            f"(got {type(result).__name__}); for example return {{'h': ...}}"
        )
    return dict(result)


def run_apply(
    func: Callable[[NodeBatch], Any], data: Mapping[str, Any], nodes: Tensor, ntype: str
) -> dict[str, Any]:
    """Run an apply function on nodes whose features are ``data``."""
    return checked_result(func(NodeBatch(data, None, nodes, ntype)), "apply")


def run_reduce(
    func: Callable[[NodeBatch], Any],
    adj: Adjacency,
    messages: Mapping[str, Tensor],
    data: Mapping[str, Any],
    nodes: Tensor,
    ntype: str,
) -> dict[str, Tensor]:
    """Run a user-defined reduce function on all destinations of a relation.

    Nodes without in-edges are never shown to the function; their rows of the result are what the
    frame's initializer makes, or 0. Where no node has an in-edge the function is called once with
    an empty mailbox of degree 1, to learn names, shapes and dtypes.

    Args:
        messages: Each ``[num_edges, ...]`` in edge-id order.
        nodes: ``[num_dst]`` ids that the batches report.
    """
    indptr, _, eids = adj.csc()
    degrees = indptr.diff()
    rows_of: list[Tensor] = []
    results: list[dict[str, Tensor]] = []
    present = torch.unique(degrees).tolist()
    for degree in [d for d in present if d > 0] or [1]:
        rows = torch.nonzero(degrees == degree).squeeze(1)
        offsets = torch.arange(degree, dtype=indptr.dtype, device=indptr.device)
        positions = (indptr[:-1][rows].unsqueeze(1) + offsets).reshape(-1)
        edges = positions if eids is None else eids.index_select(0, positions)
        mailbox = _Mailbox(messages, edges, rows.shape[0], degree)
        batch = NodeBatch(RowsView(data, rows), mailbox, nodes[rows], ntype)
        result = checked_result(func(batch), "reduce")
        _check_group(result, results, rows.shape[0], degree)
        rows_of.append(rows)
        results.append(result)
    if len(results) == 1 and rows_of[0].shape[0] == adj.num_dst:
        return results[0]
    order = torch.cat(rows_of)
    merged = {}
    for name in results[0]:
        values = torch.cat([result[name] for result in results])
        empty = RowsView(data, None).initial(name, 0, adj.num_dst, values)
        merged[name] = empty.index_copy(0, order, values)
    return merged


class _Mailbox(RowsView):
    """Messages of one group, gathered when asked for and folded to ``[nodes, degree, ...]``."""

    __slots__ = ("_num_nodes", "_degree")

    def __init__(
        self, messages: Mapping[str, Tensor], edges: Tensor, num_nodes: int, degree: int
    ) -> None:
        super().__init__(messages, edges)
        self._num_nodes = num_nodes
        self._degree = degree

    def __getitem__(self, name: str) -> Any:
        if name not in self._source:
            raise KeyError(f"no message {name!r} in the mailbox; there are {sorted(self._source)}")
        flat = super().__getitem__(name)
        return flat.view(self._num_nodes, self._degree, *flat.shape[1:])


def _check_group(
    result: Mapping[str, Any], earlier: list[dict[str, Tensor]], num_nodes: int, degree: int
) -> None:
    if earlier and result.keys() != earlier[0].keys():
        raise GraphValueError(
            f"a reduce function must return the same fields for every group of nodes (got "
            f"{sorted(result)} for in-degree {degree}, {sorted(earlier[0])} before)"
        )
    for name, value in result.items():
        if not isinstance(value, Tensor):
            raise GraphTypeError(
                f"a reduce function must return tensors (got {value!r} for {name!r})"
            )
        if value.dim() == 0 or value.shape[0] != num_nodes:
            raise GraphValueError(
                f"a reduce function must return one row for each of the {num_nodes} nodes of its "
                f"batch (got shape {tuple(value.shape)} for {name!r}, in-degree {degree}); reduce "
                f"over dimension 1"
            )
