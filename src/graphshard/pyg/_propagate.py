# SPDX-License-Identifier: Apache-2.0
"""propagate and edge_updater of a layer that is called with edges that span ranks.

For the time of the call they take the place of the layer's own. Three ways, the first that fits:

===========================  ======================================================================
fused                        the message is a source row, or a weight times it, and is summed or
                             averaged; or the layer is PyG's GATConv, GATv2Conv or TransformerConv:
                             a kernel, without a message per edge
recomputed in pieces         in sequential mode: PyG's own code on some destinations at a time,
                             computed again in the backward
as PyG does it               PyG's own code on own and fetched rows
===========================  ======================================================================

Which one is taken depends on the layer and the mode, and not on this rank's rows.

[Note: fused]
    In one-shot mode one kernel sees own and fetched rows. In sequential mode the call is a pass of
    `graphshard.fullbatch` over the shards of its edges: rows of one rank at a time, those of the
    next on their way, and the same again in the backward where it needs them.

[Note: recomputed in pieces]
    Remote rows and messages are not kept for the backward. The forward fetches the halo, computes a
    piece of the destinations at a time, and keeps own rows alone. The backward fetches again and
    computes each piece again, with its gradient. All in-edges of a destination are in one piece, so
    any aggregation is exact, also one that cannot be merged from parts of the in-edges; nothing is
    sent between pieces. At most one layer's halo is in memory, fetched from one rank after the
    other, and the messages of one piece.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .._base.typing import CanonicalEType
from ..fullbatch.execution import PairwiseTransport, RandomState, ShardPass
from ..fullbatch.reductions import CopySource, EdgeRows, Reduction, Sum, Weighted
from ..fullbatch.softmax import AttentionSum
from ..fullbatch.topology import Shard, narrow
from ..ops import Adjacency, Attention, EdgeMask, attend, gspmm, random_seed
from ._edge_index import DestinationIndex, ShardedEdgeIndex, SourceIndex
from ._norms import takes_statistics
from ._source_halo import EdgeSet, PieceEnd, SourceHalo

MOST_EDGES, FEWEST_EDGES = 1 << 15, 1 << 11
"""Bounds of the edges in a piece."""

Tensors: TypeAlias = Sequence[Tensor]
_MEAN_OR_SUM = {"SumAggregation": "sum", "MeanAggregation": "mean"}
_HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)

_PADDED = ("LSTMAggregation", "GRUAggregation", "LCMAggregation")
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _EdgeSetTransport(PairwiseTransport):
    """Rows of the shards of edges that a layer calls with, not of all of its relation's edges.

    Args:
        halo: The relation.
        edges: The edges; every source is one of the relation's extended rows.
    """

    def __init__(self, halo: SourceHalo, edges: EdgeSet) -> None:
        super().__init__(halo.halo, halo.mode.halo_dtype, not halo.mode.rematerializes)
        self._edges = edges

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        src, dst = self._edges.edge_index
        num_dst, num_owned = self._edges.adjacency.num_dst, self.halo.num_owned
        if self.num_steps == 1:
            return (Shard(0, self._edges.adjacency, None),)
        found = []
        for step in range(self.num_steps):
            start, stop = 0, num_owned
            if step:
                first, last = self.plan.halo_range((self.plan.rank - step) % self.num_steps)
                start, stop = num_owned + first, num_owned + last
            eids = ((src >= start) & (src < stop)).nonzero().view(-1)
            largest = max(stop - start, num_dst)
            rows = narrow(src[eids] - start, largest), narrow(dst[eids], largest)
            adjacency = Adjacency(*rows, stop - start, num_dst, check=False)
            kept = narrow(eids, src.numel())
            found.append(Shard(step, adjacency, lambda kept=kept: kept))  # type: ignore[misc]
        return tuple(found)


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of `propagate` that kernels compute.

    Args:
        halo: The relation.
        edges: The edges.
        sources: Tensors with a row per own source.
        others: Further tensors that the result depends on.
        compute: From own and fetched rows of the sources to the result.
        reduction: The same, to be merged shard by shard; made from own rows.
        name: Of what is computed, if it is a function of the tensors alone.
    """

    halo: SourceHalo
    edges: EdgeSet
    sources: Sequence[Tensor]
    others: Sequence[Tensor]
    compute: Callable[[Sequence[Tensor]], Tensor]
    reduction: Callable[[], Reduction]
    name: str | None = None

    def run(self) -> Tensor:
        """The result; collective."""
        if self.halo.mode.mode == "oneshot":
            return self.compute(self.halo.extended(*self.sources))
        constants, tensors = self.halo.structure.constants, [*self.sources, *self.others]
        is_constant = self.name is not None and constants.is_constant(tensors)
        if is_constant:
            known = constants.get_copy((self.name, self.edges.number), tensors)
            if known is not None:
                return known
        transport = self.edges.transport
        if transport is None:
            transport = self.edges.transport = _EdgeSetTransport(self.halo, self.edges)
        reductions = [(self.halo.etype, self.reduction())]
        device = self.edges.edge_index.device
        walk = ShardPass(transport, reductions, self.halo.mode.fetched_ahead, device)
        ((result,),) = walk.run()
        if is_constant:
            constants.put_copy((self.name, self.edges.number), tensors, result)
        return result


def weighted_sum(
    halo: SourceHalo, edges: EdgeSet, rows: Tensor, weight: Tensor | None, reduce: str
) -> FusedCall:
    """Sum or mean of source rows, each times the weight of its edge.

    Args:
        halo: The relation.
        edges: The edges.
        rows: ``[num_owned, ...]``.
        weight: ``[num_edges, ...]``, broadcast to a row; None is one.
        reduce: ``"sum"`` or ``"mean"``.
    """
    op = "copy_lhs" if weight is None else "mul"

    def compute(sources: Sequence[Tensor]) -> Tensor:
        return gspmm(edges.adjacency, op, reduce, sources[0], weight)

    def reduction() -> Reduction:
        message = CopySource(rows) if weight is None else Weighted("mul", rows, EdgeRows(weight))
        return Sum(message, edges.counts if reduce == "mean" else None)

    weights = [] if weight is None else [weight]
    return FusedCall(halo, edges, [rows], weights, compute, reduction, reduce)


def attention(
    halo: SourceHalo,
    edges: EdgeSet,
    sources: Sequence[Tensor],
    make: Callable[[Sequence[Tensor]], Attention],
) -> FusedCall:
    """Fused attention.

    Args:
        halo: The relation.
        edges: The edges.
        sources: Tensors with a row per own source.
        make: From their rows to the operands.
    """

    def compute(extended: Sequence[Tensor]) -> Tensor:
        return attend(edges.adjacency, make(extended))

    def reduction() -> Reduction:
        made = make(sources)
        if made.mask is not None:
            keys = torch.arange(edges.edge_index.shape[1], dtype=torch.int32)
            made = replace(made, mask=replace(made.mask, keys=keys.to(edges.edge_index.device)))
        return AttentionSum(made)

    return FusedCall(halo, edges, sources, [], compute, reduction)


@dataclass(frozen=True, eq=False)
class DestinationPiece:
    """Destinations ``[start, stop)`` and their in-edges.

    Args:
        start: First destination.
        stop: End of the destinations.
        edges: int64 ids of the edges.
        edge_index: int64 ``[2, num_edges]``: rows of ``sources``, and destinations from 0.
        sources: int64, the extended rows that they read, ascending.
    """

    start: int
    stop: int
    edges: Tensor
    edge_index: Tensor
    sources: Tensor


class DestinationPieces:
    """The edges of a set, cut by destination.

    Args:
        edges: The edges.
    """

    def __init__(self, edges: EdgeSet) -> None:
        self._edges = edges

    @cached_property
    def all(self) -> list[DestinationPiece]:
        indptr, sources, ids = (
            part if part is None else part.long() for part in self._edges.adjacency.csc()
        )
        assert indptr is not None
        assert sources is not None
        total, num_dst = sources.numel(), indptr.numel() - 1
        target = min(MOST_EDGES, max(FEWEST_EDGES, total // 16))
        count = max(1, -(-total // target))
        wanted = torch.arange(1, count, device=indptr.device) * total // count
        cuts = [0, *torch.searchsorted(indptr[:-1], wanted).tolist(), num_dst]
        found = []
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            if start == stop and num_dst:
                continue
            first, last = int(indptr[start]), int(indptr[stop])
            degrees = indptr[start : stop + 1].diff()
            numbers = torch.arange(stop - start, device=indptr.device)
            dst = torch.repeat_interleave(numbers, degrees)
            rows, src = torch.unique(sources[first:last], return_inverse=True)
            edges = torch.arange(first, last, device=indptr.device)
            edges = edges if ids is None else ids[first:last]
            found.append(DestinationPiece(start, stop, edges, torch.stack([src, dst]), rows))
        return found


@dataclass(frozen=True, eq=False)
class Aggregation:
    """What one call of `propagate` reads, and what it computes.

    Args:
        halo: The relation.
        pieces: What is computed at a time.
        compute: From a piece and its rows - of sources, destinations, edges - to the results of
            its destinations, ``[stop - start, ...]``. It may use ``parameters`` as they are.
        sources: Tensors with a row per own source.
        destinations: Tensors with a row per destination.
        edges: Tensors with a row per edge.
        parameters: Other tensors that ``compute`` uses and that may need a gradient.
    """

    halo: SourceHalo
    pieces: Callable[[], Sequence[DestinationPiece]]
    compute: Callable[[DestinationPiece, Tensors, Tensors, Tensors], Tensor]
    sources: Tensors
    destinations: Tensors
    edges: Tensors
    parameters: Tensors

    def recomputed(self) -> Tensor:
        """The result; the backward fetches and computes again. Collective."""
        groups = (self.sources, self.destinations, self.edges, self.parameters)
        result: Tensor = _Recomputed.apply(self, *(tensor for rows in groups for tensor in rows))
        return result

    def of_piece(
        self, piece: DestinationPiece, extended: Tensors, dst: Tensors, edges: Tensors
    ) -> list[list[Tensor]]:
        """The rows that a piece reads, of sources, destinations and edges."""
        return [
            [rows.index_select(0, piece.sources) for rows in extended],
            [rows[piece.start : piece.stop] for rows in dst],
            [rows[piece.edges] for rows in edges],
        ]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, aggregation: Aggregation, *tensors: Tensor) -> Tensor:
        a = aggregation
        ctx.aggregation, ctx.random = a, []
        device = tensors[0].device if tensors else torch.device("cpu")
        ctx.autocast = (
            device.type,
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        extended = a.halo.fetched_again(a.sources)
        results = []
        for piece in a.pieces():
            ctx.random.append(RandomState.capture(device))
            results.append(a.compute(piece, *a.of_piece(piece, extended, a.destinations, a.edges)))
        return torch.cat(results) if len(results) != 1 else results[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        a: Aggregation = ctx.aggregation
        needs = ctx.needs_input_grad[1:]
        num = len(a.sources), len(a.destinations), len(a.edges)
        extended = a.halo.fetched_again(a.sources)
        whole = [*extended, *(rows.detach() for rows in (*a.destinations, *a.edges))]
        totals = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip([*whole, *a.parameters], needs, strict=True)
        ]
        kind, dtype, enabled = ctx.autocast
        now = RandomState.capture(grad.device)
        for piece, random in zip(a.pieces(), ctx.random, strict=True):
            groups = a.of_piece(
                piece, whole[: num[0]], whole[num[0] : num[0] + num[1]], whole[num[0] + num[1] :]
            )
            rows = [tensor.detach() for group in groups for tensor in group]
            for tensor, needed in zip(rows, needs, strict=False):
                tensor.requires_grad_(needed)
            inputs = [*rows, *a.parameters]
            random.restore(grad.device)
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
                result = a.compute(
                    piece,
                    rows[: num[0]],
                    rows[num[0] : num[0] + num[1]],
                    rows[num[0] + num[1] :],
                )
            if not result.requires_grad:
                continue
            wanted = [i for i, needed in enumerate(needs) if needed]
            found = torch.autograd.grad(
                result,
                [inputs[i] for i in wanted],
                grad[piece.start : piece.stop],
                allow_unused=True,
            )
            for i, part in zip(wanted, found, strict=True):
                total = totals[i]
                if part is None or total is None:
                    continue
                if i >= sum(num):
                    total.add_(part)
                elif i < num[0]:
                    total.index_add_(0, piece.sources, part)
                elif i < num[0] + num[1]:
                    total[piece.start : piece.stop].add_(part)
                else:
                    total[piece.edges] = part
        now.restore(grad.device)
        remote = [i for i in range(num[0]) if needs[i]]
        returned = a.halo.returned([t for i in remote if (t := totals[i]) is not None])
        for i, summed in zip(remote, returned, strict=True):
            totals[i] = summed
        return None, *totals


class bound:
    """Context in which a layer's `propagate` and `edge_updater` are those of this module.

    Layers that are hooked, explained or taken apart keep their own, as do calls that return the
    attention weights, which the other ways do not make.

    Args:
        layer: A `MessagePassing`.
        kwargs: Of its call.
    """

    def __init__(self, layer: Any, kwargs: dict[str, Any]) -> None:
        self._layer = layer
        own = vars(layer)
        hooked = any(own.get(name) for name in _HOOKS)
        plain = not layer.explain and layer.decomposed_layers == 1 and "propagate" not in own
        weights = kwargs.get("return_attention_weights") is not None
        self._active = plain and not hooked and not weights

    def __enter__(self) -> None:
        if self._active:
            own = vars(self._layer)
            own["propagate"] = MethodType(_propagate, self._layer)
            if self._layer.inspector.implements("edge_update"):
                own["edge_updater"] = MethodType(_edge_updater, self._layer)

    def __exit__(self, *error: object) -> None:
        if self._active:
            vars(self._layer).pop("propagate", None)
            vars(self._layer).pop("edge_updater", None)


@dataclass(frozen=True)
class DeferredUpdate:
    """What `edge_updater` was called with; it runs where `propagate` needs its result.

    Args:
        kwargs: Its arguments, without the edges.
    """

    kwargs: dict[str, Any]


def _edge_updater(layer: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    if not isinstance(edge_index, ShardedEdgeIndex):
        return type(layer).edge_updater(layer, edge_index, size=size, **kwargs)
    return DeferredUpdate(kwargs)


def _propagate(layer: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    if isinstance(edge_index, ShardedEdgeIndex):
        halo = edge_index.halo
        for name, value in kwargs.items():
            if isinstance(value, nn.Parameter):  # a row per node, as SparseLinear has
                kwargs[name] = halo.own_rows(value)
        if _reads_tables(layer, kwargs, halo):
            return _as_pyg(layer, edge_index, size, kwargs)
        edges = halo.edge_set(edge_index.local())
        fused = _attention(layer, kwargs, halo, edges)
        if fused is None:
            fused = _weighted_sum(layer, kwargs, halo, edges)
        if fused is not None:
            return fused.run()
        padded = [module for module in layer.modules() if type(module).__name__ in _PADDED]
        length = halo.largest_in_degree(edges) if padded else 0
        if not halo.keeps_halo:
            stock = _in_pieces(layer, kwargs, halo, edges, padded, length)
            if stock is not None:
                return stock.recomputed()
        with _of_length(padded, length):
            return _as_pyg(layer, edge_index, size, kwargs)
    return _as_pyg(layer, edge_index, size, kwargs)


def _as_pyg(layer: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    for name, value in kwargs.items():
        if isinstance(value, DeferredUpdate):
            kwargs[name] = type(layer).edge_updater(layer, edge_index, **value.kwargs)
    return type(layer).propagate(layer, edge_index, size=size, **kwargs)


def _reads_tables(layer: Any, kwargs: dict[str, Any], halo: SourceHalo) -> bool:
    """Whether a message reads a tensor with a row for each node of the whole graph."""
    updates = [value.kwargs for value in kwargs.values() if isinstance(value, DeferredUpdate)]
    for given, names in (
        (kwargs, layer._user_args),
        *((u, layer._edge_user_args) for u in updates),
    ):
        for name, value in given.items():
            src, dst = (
                value if isinstance(value, tuple | list) and len(value) == 2 else (value,) * 2
            )
            for rows, end, argument in (
                (src, halo.sources, f"{name}_j"),
                (dst, halo.destinations, f"{name}_i"),
            ):
                if argument in names and isinstance(rows, Tensor) and rows.dim():
                    dim = layer.node_dim
                    fits = -rows.dim() <= dim < rows.dim()
                    if fits and not end.owns(rows.shape[dim]):
                        return True
    return False


@contextmanager
def _of_length(modules: Sequence[nn.Module], length: int) -> Iterator[None]:
    """Aggregations that read a sequence per destination pad each to a length.

    PyG takes the longest of a call, and what an LSTM makes of the rest of a sequence depends on it:
    it has to be that of the whole graph.
    """

    def pad(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "max_num_elements": length}

    hooks = [module.register_forward_pre_hook(pad, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _defined_by(layer: Any, method: str, module: str, name: str) -> bool:
    """Whether a layer has a method as PyG's class of some name defines it."""
    function = getattr(type(layer), method, None)
    return (
        getattr(function, "__module__", "") == module
        and getattr(function, "__qualname__", "") == f"{name}.{method}"
    )


def _aggregates_as_usual(layer: Any) -> bool:
    base = "torch_geometric.nn.conv.message_passing"
    return all(
        _defined_by(layer, method, base, "MessagePassing") for method in ("aggregate", "update")
    )


# -- fused: a sum of weighted rows -----------------------------------------------------------------


class _SourceRow:
    """The argument ``x_j`` of a message, of which only its product with a weight is wanted."""

    __array_ufunc__ = None

    def __init__(self, shape: torch.Size, weight: Tensor | None = None) -> None:
        self.shape, self.weight = shape, weight

    def __mul__(self, weight: Any) -> _SourceRow:
        fits = isinstance(weight, Tensor) and self.weight is None
        if not fits or weight.dim() != len(self.shape) or weight.shape[-1] != 1:
            raise _OtherMessageError
        return _SourceRow(self.shape, weight)

    __rmul__ = __mul__


class _OtherMessageError(Exception):
    """The message is more than a weighted row."""


def _weighted_sum(
    layer: Any, kwargs: dict[str, Any], halo: SourceHalo, edges: EdgeSet
) -> FusedCall | None:
    reduce = _MEAN_OR_SUM.get(type(layer.aggr_module).__name__)
    if reduce is None or not _aggregates_as_usual(layer):
        return None
    names = layer.inspector.get_param_names("message")
    read = [name for name in names if name.endswith("_j")]
    if len(read) != 1 or any(name.endswith("_i") for name in names):
        return None
    rows = kwargs.get(read[0][:-2])
    rows = rows[0] if isinstance(rows, tuple | list) else rows
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        return None
    if rows.dim() < 2 or layer.node_dim % rows.dim() != 0:
        return None
    arguments: dict[str, Any] = {read[0]: _SourceRow(rows.shape)}
    for name in names:
        if name in kwargs and name not in arguments:
            value = kwargs[name]
            if isinstance(value, DeferredUpdate):
                return None
            arguments[name] = value
    try:
        message = layer.message(**arguments)
    except Exception:  # it is no such message: PyG's own way tells what is wrong, if anything is
        return None
    if not isinstance(message, _SourceRow):
        return None
    return weighted_sum(halo, edges, rows, message.weight, reduce)


# -- fused: attention ------------------------------------------------------------------------------


def _attention(
    layer: Any, kwargs: dict[str, Any], halo: SourceHalo, edges: EdgeSet
) -> FusedCall | None:
    if not _aggregates_as_usual(layer) or type(layer.aggr_module).__name__ != "SumAggregation":
        return None
    for name, module, make in (
        ("GATConv", "gat_conv", _additive),
        ("GATv2Conv", "gatv2_conv", _joint),
        ("TransformerConv", "transformer_conv", _dot),
    ):
        path = f"torch_geometric.nn.conv.{module}"
        if _defined_by(layer, "message", path, name):
            is_gat = name != "TransformerConv"
            if is_gat and not _defined_by(layer, "edge_update", path, name):
                return None
            return make(layer, kwargs, halo, edges)
    return None


def _mask(layer: Any) -> EdgeMask | None:
    return EdgeMask(layer.dropout, random_seed()) if layer.training and layer.dropout > 0 else None


def _edge_rows(layer: Any, edge_attr: Tensor | None) -> Tensor | None:
    """``lin_edge(edge_attr)`` by head, as the layers compute it."""
    if edge_attr is None or layer.lin_edge is None:
        return None
    edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
    found: Tensor = layer.lin_edge(edge_attr).view(-1, layer.heads, layer.out_channels)
    return found


def _additive(
    layer: Any, kwargs: dict[str, Any], halo: SourceHalo, edges: EdgeSet
) -> FusedCall | None:
    update = kwargs["alpha"]
    if not isinstance(update, DeferredUpdate):
        return None
    of_src, of_dst = update.kwargs["alpha"]
    values = kwargs["x"][0]
    if of_dst is None:
        of_dst = of_src.new_zeros(halo.num_dst, layer.heads)
    rows = _edge_rows(layer, update.kwargs.get("edge_attr"))
    scores = [] if rows is None else [(rows * layer.att_edge).sum(-1)]
    mask = _mask(layer)

    def make(src: Sequence[Tensor]) -> Attention:
        score = scores[0] if scores else None
        return Attention.additive(
            src[0], src[1], of_dst, score, slope=layer.negative_slope, mask=mask
        )

    return attention(halo, edges, [values, of_src], make)


def _joint(
    layer: Any, kwargs: dict[str, Any], halo: SourceHalo, edges: EdgeSet
) -> FusedCall | None:
    update = kwargs["alpha"]
    if not isinstance(update, DeferredUpdate):
        return None
    values, targets = kwargs["x"]
    rows = _edge_rows(layer, update.kwargs.get("edge_attr"))
    vector = layer.att.view(layer.heads, layer.out_channels)
    mask = _mask(layer)

    def make(src: Sequence[Tensor]) -> Attention:
        return Attention.joint(src[0], targets, vector, rows, slope=layer.negative_slope, mask=mask)

    return attention(halo, edges, [values], make)


def _dot(layer: Any, kwargs: dict[str, Any], halo: SourceHalo, edges: EdgeSet) -> FusedCall | None:
    if kwargs.get("edge_attr") is not None or layer.lin_edge is not None:
        return None
    scale, mask = 1 / math.sqrt(layer.out_channels), _mask(layer)

    def make(src: Sequence[Tensor]) -> Attention:
        return Attention.dot(src[0], src[1], kwargs["query"], scale=scale, mask=mask)

    return attention(halo, edges, [kwargs["value"], kwargs["key"]], make)


# -- PyG's own code, in pieces ---------------------------------------------------------------------


class _Slots:
    """Where the tensors of a call's arguments go: rows of sources, of destinations, of edges.

    Args:
        layer: The layer.
        halo: The relation.
        num_edges: Edges of the call.
    """

    def __init__(self, layer: Any, halo: SourceHalo, num_edges: int) -> None:
        self._layer, self._halo, self._num_edges = layer, halo, num_edges
        self.sources: list[Tensor] = []
        self.destinations: list[Tensor] = []
        self.edges: list[Tensor] = []
        self.fits = True

    def _place(self, rows: list[Tensor], tensor: Tensor) -> int:
        for place, known in enumerate(rows):
            if known is tensor:
                return place
        rows.append(tensor)
        return len(rows) - 1

    def _node_place(self, rows: list[Tensor], tensor: Any) -> int | None:
        if not isinstance(tensor, Tensor):
            return None
        self.fits &= tensor.dim() > 0 and self._layer.node_dim % tensor.dim() == 0
        return self._place(rows, tensor)

    def of(self, kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Argument to what it is made of, for `filled`.

        Args:
            kwargs: Of `propagate` or `edge_updater`.
            names: What the layer's functions ask for.
        """
        places: dict[str, Any] = {}
        for name, value in kwargs.items():
            of_src, of_dst = f"{name}_j" in names, f"{name}_i" in names
            if of_src or of_dst:
                self.fits &= name not in names  # all of it, and not the rows of edges
                src, dst = value if isinstance(value, tuple | list) else (value, value)
                places[name] = (
                    "nodes",
                    self._node_place(self.sources, src) if of_src else None,
                    self._node_place(self.destinations, dst) if of_dst else None,
                )
            elif isinstance(value, DeferredUpdate):
                asked = self._layer._edge_user_args
                places[name] = ("update", self.of(value.kwargs, asked))
            elif name not in names:
                places[name] = ("unused",)
            elif isinstance(value, Tensor) and value.dim() and len(value) == self._num_edges:
                places[name] = ("edges", self._place(self.edges, value))
            else:
                places[name] = ("constant", value)
        return places


def _filled(
    layer: Any, places: dict[str, Any], edge_index: Tensor, size: Any, rows: Sequence[Tensors]
) -> dict[str, Any]:
    """The arguments of a piece, from its rows of sources, destinations and edges."""
    sources, destinations, edges = rows
    arguments: dict[str, Any] = {}
    for name, (kind, *where) in places.items():
        if kind == "nodes":
            src, dst = where
            arguments[name] = (
                None if src is None else sources[src],
                None if dst is None else destinations[dst],
            )
        elif kind == "edges":
            arguments[name] = edges[where[0]]
        elif kind == "update":
            inner = _filled(layer, where[0], edge_index, size, rows)
            arguments[name] = type(layer).edge_updater(layer, edge_index, size=size, **inner)
        else:
            arguments[name] = where[0] if where else None
    return arguments


class _PieceEdges(Tensor):
    """The edges of a piece, whose ends are nodes, and not rows of the piece alone."""

    _ends: tuple[Tensor, Tensor]

    @staticmethod
    def of(piece: DestinationPiece, halo: SourceHalo, sources: Tensors) -> _PieceEdges:
        made = Tensor._make_subclass(_PieceEdges, piece.edge_index)
        src, dst = piece.edge_index
        rows = torch.arange(piece.start, piece.stop, device=dst.device)
        made._ends = (
            SourceIndex.make(src, PieceEnd(halo.sources, piece.sources, sources)),
            DestinationIndex.make(dst, PieceEnd(halo.destinations, rows)),
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], int):
            return args[0]._ends[args[1]]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _special_arguments(layer: Any) -> set[str]:
    """Which of PyG's own arguments the functions of a layer ask for."""
    base = "torch_geometric.nn.conv.message_passing"
    found: set[str] = set()
    for function in ("message", "aggregate", "update", "edge_update"):
        if not _defined_by(layer, function, base, "MessagePassing"):
            found |= set(layer.inspector.get_param_names(function))
    return found


def _in_pieces(
    layer: Any,
    kwargs: dict[str, Any],
    halo: SourceHalo,
    edges: EdgeSet,
    padded: Sequence[nn.Module],
    length: int,
) -> Aggregation | None:
    base = "torch_geometric.nn.conv.message_passing"
    if not _defined_by(layer, "update", base, "MessagePassing"):
        return None
    asked = _special_arguments(layer)
    if "edge_index" in asked:
        return None
    reads_numbers = bool(asked & {"index", "edge_index_i", "edge_index_j"})
    if reads_numbers and (halo.sources.is_ambiguous or halo.destinations.is_ambiguous):
        return None
    slots = _Slots(layer, halo, edges.edge_index.shape[1])
    places = slots.of(kwargs, layer._user_args)
    if not slots.fits or not slots.sources:
        return None
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    norms = [module for module in layer.modules() if takes_statistics(module)]

    def propagate(edge_index: Tensor, size: Any, arguments: dict[str, Any]) -> Tensor:
        hooks = [module.register_forward_pre_hook(_refuse_norm) for module in norms]
        try:
            with _of_length(padded, length):
                found: Tensor = type(layer).propagate(layer, edge_index, size=size, **arguments)
            return found
        finally:
            for hook in hooks:
                hook.remove()

    def compute(piece: DestinationPiece, src: Tensors, dst: Tensors, edge: Tensors) -> Tensor:
        size = (piece.sources.numel(), piece.stop - piece.start)
        edge_index = piece.edge_index
        if reads_numbers:
            edge_index = _PieceEdges.of(piece, halo, src)
        arguments = _filled(layer, places, edge_index, size, (src, dst, edge))
        if torch.is_grad_enabled() or layer in _looked_at:
            return propagate(edge_index, size, arguments)
        with torch.enable_grad():
            found = propagate(edge_index, size, arguments)
        _check_leaves(layer, found, parameters, src, dst, edge)
        _looked_at.add(layer)
        return found.detach()

    pieces = edges.pieces
    if pieces is None:
        pieces = edges.pieces = DestinationPieces(edges)
    return Aggregation(
        halo,
        lambda: pieces.all,
        compute,
        slots.sources,
        slots.destinations,
        slots.edges,
        parameters,
    )


def _refuse_norm(module: nn.Module, args: Any) -> None:
    raise NotImplementedError(
        f"{type(module).__name__} within messages takes the statistics of all edges at once, and "
        "sequential mode computes some at a time; shard with mode='oneshot', or call eval()"
    )


def _check_leaves(layer: Any, result: Tensor, parameters: Tensors, *groups: Tensors) -> None:
    """Raise if a message uses a tensor whose gradient a recomputed piece would not find."""
    known = {id(t) for t in parameters} | {id(t) for rows in groups for t in rows}
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise NotImplementedError(
                f"a message of {type(layer).__name__} uses a tensor of shape {tuple(leaf.shape)} "
                "that needs a gradient and is neither an argument of propagate nor a parameter of "
                "the layer; pass it to propagate, or shard with mode='oneshot'"
            )
        todo += [following for following, _ in node.next_functions]
