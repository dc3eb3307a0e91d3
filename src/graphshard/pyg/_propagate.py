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
    In sequential mode the call is a pass of `graphshard.fullbatch` over the shards of its edges:
    rows of one rank at a time, those of the next on their way, and the same again in the backward
    where it needs them. So it is in one-shot mode for attention, whose rows no other call of the
    layer reads: own edges are computed while all remote rows travel, and likewise in the backward.
    Otherwise one kernel sees own and fetched rows there.

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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .._base.typing import CanonicalEType
from ..comm.collectives import all_reduce_alike, keyed
from ..fullbatch.fewest_rows import FewestRows, RowsAndStates, find_fewest_rows
from ..fullbatch.reductions import CopySource, EdgeRows, Reduction, Sum, Weighted
from ..fullbatch.row_transport import (
    CollectiveTransport,
    PairwiseTransport,
    RowTransport,
    StatesTransport,
    split_of_attention,
)
from ..fullbatch.shard_pass import RandomState, ShardPass
from ..fullbatch.softmax import AttentionSum
from ..fullbatch.topology import Shard, narrow
from ..ops import Adjacency, Attention, EdgeMask, attend, gspmm, is_hooked, random_seed
from ._edge_index import DestinationIndex, ShardedEdgeIndex, SourceIndex
from ._norms import takes_statistics
from ._source_halo import EdgeSet, PieceEnd, SourceHalo

MOST_EDGES, FEWEST_EDGES = 1 << 15, 1 << 11
"""Bounds of the edges in a piece."""

Tensors: TypeAlias = Sequence[Tensor]
_MEAN_OR_SUM = {"SumAggregation": "sum", "MeanAggregation": "mean"}
_HOOKS = [
    f"_{function}_forward{when}_hooks"
    for function in ("propagate", "message", "aggregate", "edge_update")
    for when in ("_pre", "")
]
_OWN_PRODUCTS = {"SAGEConv": ("sage_conv", "lin_r"), "GraphConv": ("graph_conv", "lin_root")}
"""Layers of PyG, their modules, and the linear layer of a destination's own row."""
_PADDED = ("LSTMAggregation", "GRUAggregation", "LCMAggregation")
_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _EdgeSetTransport(PairwiseTransport):
    """Rows of the shards of edges that a layer calls with, not of all of its relation's edges.

    Every source is one of the relation's extended rows.
    """

    def __init__(self, halo: SourceHalo, edges: EdgeSet) -> None:
        super().__init__(halo.halo, halo.mode.halo_dtype, not halo.mode.rematerializes)
        self._edges = edges

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        if self.num_steps == 1:
            return (Shard(0, self._edges.adjacency, None),)
        owners = [(self.plan.rank - step) % self.num_steps for step in range(1, self.num_steps)]
        bounds = [self.plan.halo_range(owner) for owner in owners]
        return _shards(self._edges, self.halo.num_owned, bounds)


class _EdgeSetHalves(CollectiveTransport):
    """The same in two shards: edges of own rows, and those of all rows of other ranks."""

    def __init__(self, halo: SourceHalo, edges: EdgeSet) -> None:
        super().__init__(halo.halo, halo.mode.halo_dtype)
        self._edges, self.returns_rows = edges, False

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return _shards(self._edges, self.halo.num_owned, [(0, self.halo.num_halo)])

    def whole_adjacency(self, etype: CanonicalEType) -> Adjacency:
        return self._edges.adjacency


def _shards(edges: EdgeSet, num_owned: int, bounds: Sequence[tuple[int, int]]) -> tuple[Shard, ...]:
    """The own shard of some edges, and those of the halo rows within bounds, by step."""
    src, dst = edges.edge_index
    num_dst, shards = edges.adjacency.num_dst, []
    in_halo = [(num_owned + first, num_owned + last) for first, last in bounds]
    for step, (start, stop) in enumerate([(0, num_owned), *in_halo]):
        eids = ((src >= start) & (src < stop)).nonzero().view(-1)
        largest = max(stop - start, num_dst)
        rows = narrow(src[eids] - start, largest), narrow(dst[eids], largest)
        adjacency = Adjacency(*rows, stop - start, num_dst, check=False)
        ids = narrow(eids, src.numel())
        shards.append(Shard(step, adjacency, lambda ids=ids: ids))  # type: ignore[misc]
    return tuple(shards)


class _PairwiseSums(PairwiseTransport):
    """Rows and partial sums for edges that have all those between ranks of their relation."""

    def __init__(self, halo: SourceHalo, edges: EdgeSet, fewest: FewestRows) -> None:
        keeps_rows = not halo.mode.rematerializes
        super().__init__(halo.halo, halo.mode.halo_dtype, keeps_rows, fewest)
        self._source_halo, self._edges, self.edges_number = halo, edges, edges.number

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return _with_own(self._source_halo, self._edges, super()._find_shards(etype))

    def whole_adjacency(self, etype: CanonicalEType) -> Adjacency:
        return self._edges.adjacency

    def partial_edges(self) -> Tensor:
        return _place_of(self._source_halo, self._edges)[super().partial_edges().long()]


class _CollectiveSums(CollectiveTransport):
    """The same in one collective."""

    def __init__(self, halo: SourceHalo, edges: EdgeSet, fewest: FewestRows) -> None:
        super().__init__(halo.halo, halo.mode.halo_dtype, fewest)
        self._source_halo, self._edges, self.edges_number = halo, edges, edges.number

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return _with_own(self._source_halo, self._edges, super()._find_shards(etype))

    def whole_adjacency(self, etype: CanonicalEType) -> Adjacency:
        return self._edges.adjacency

    def partial_edges(self) -> Tensor:
        return _place_of(self._source_halo, self._edges)[super().partial_edges().long()]


class _AttentionStates(StatesTransport):
    """Rows and states of destinations, for edges that have all those between ranks."""

    def __init__(self, halo: SourceHalo, edges: EdgeSet, split: RowsAndStates) -> None:
        super().__init__(split, halo.mode.halo_dtype)
        self.halo = halo.halo  # of all relations from the source type, as the edges are numbered
        self._source_halo, self._edges = halo, edges
        self._partial_edges = _place_of(halo, edges)[super().partial_edges()]

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return _with_own(self._source_halo, self._edges, super()._find_shards(etype))

    def whole_adjacency(self, etype: CanonicalEType) -> Adjacency:
        return self._edges.adjacency

    def partial_edges(self) -> Tensor:
        return self._partial_edges


def _place_of(halo: SourceHalo, edges: EdgeSet) -> Tensor:
    """The place in an edge set of each edge of its relation that is between ranks."""
    place = torch.full_like(halo.edge_index[0], -1)
    place[halo.edge_index[0] >= halo.num_owned] = (
        (edges.edge_index[0] >= halo.num_owned).nonzero().view(-1)
    )
    return place


def _with_own(halo: SourceHalo, edges: EdgeSet, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Shards of a relation's edges, but the own shard has those of the edge set."""
    src, dst = edges.edge_index
    eids = (src < halo.num_owned).nonzero().view(-1)
    bound = max(halo.num_owned, halo.num_dst)
    rows = narrow(src[eids], bound), narrow(dst[eids], bound)
    adjacency = Adjacency(*rows, halo.num_owned, halo.num_dst, check=False)
    ids = narrow(eids, src.numel())

    def found_in(shard: Shard) -> Shard:
        return replace(shard, find_eids=lambda: _place_of(halo, edges)[shard.edge_ids().long()])

    return Shard(0, adjacency, lambda: ids), *(found_in(shard) for shard in shards[1:])


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of `propagate` that kernels compute.

    Args:
        sources: Tensors with a row per own source.
        others: Further tensors that the result depends on.
        compute: From own and fetched rows of the sources to the result.
        reduction: The same, to be merged shard by shard; made from own rows.
        name: Of what is computed, if it is a function of the tensors alone.
        is_only_reader: Whether no other call of the layer reads the sources.
    """

    halo: SourceHalo
    edges: EdgeSet
    sources: Sequence[Tensor]
    others: Sequence[Tensor]
    compute: Callable[[Sequence[Tensor]], Tensor]
    reduction: Callable[[], Reduction]
    name: str | None = None
    is_only_reader: bool = False

    def run(
        self, has_whole_cut: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> Tensor:
        """The result; collective.

        Args:
            has_whole_cut: Whether the edges have all those between ranks, on all ranks.
            meanwhile: Work of the layer that may be done while partial sums travel, or not at all.
        """
        if has_whole_cut and (sums := self._of_partial_sums(meanwhile)) is not None:
            return sums
        is_oneshot = self.halo.mode.mode == "oneshot"
        if is_oneshot and not self._overlaps():
            return self.compute(self.halo.extended(*self.sources))
        constants, tensors = self.halo.structure.constants, [*self.sources, *self.others]
        key = self.name, self.edges.number
        is_constant = self.name is not None and constants.is_constant(tensors)
        if is_constant:
            earlier = constants.get_copy(key, tensors)
            if earlier is not None:
                return earlier
        reduction, device = self.reduction(), self.edges.edge_index.device
        transport = self._states(reduction) if has_whole_cut and is_oneshot else None
        if transport is None:
            if self.edges.transport is None:
                kind = _EdgeSetHalves if is_oneshot else _EdgeSetTransport
                self.edges.transport = kind(self.halo, self.edges)
            transport = self.edges.transport
        reductions = [(self.halo.etype, reduction)]
        walk = ShardPass(transport.keyed(), reductions, self.halo.mode.fetched_ahead, device)
        ((result,),) = walk.run()
        if is_constant:
            constants.put_copy(key, tensors, result)
        return result

    def _states(self, reduction: Reduction) -> RowTransport | None:
        """The transport of states of destinations; None where rows travel alone."""
        if not self.halo.mode.partial_sums:
            return None
        structure, wire = self.halo.structure, self.halo.mode.halo_dtype
        halo = structure.halo([self.halo.etype])
        split = split_of_attention(halo, reduction, wire, structure.constants)
        if split is None:
            return None
        if self.edges.states is None:
            self.edges.states = _AttentionStates(self.halo, self.edges, split)
        transport: RowTransport = self.edges.states
        return transport

    def _overlaps(self) -> bool:
        """Whether own edges are computed while rows travel, in one-shot mode."""
        constants = self.halo.structure.constants
        return (
            self.is_only_reader
            and self.halo.world_size > 1
            and not any(
                constants.is_constant([own]) or self.halo.is_here(own) for own in self.sources
            )
        )

    def _of_partial_sums(self, meanwhile: Callable[[], None] | None) -> Tensor | None:
        """The result where partial sums travel; None where rows do. See [Note: fewest rows]."""
        halo, edges = self.halo, self.edges
        reduction, constants = self.reduction(), halo.structure.constants
        source = reduction.summed_source()
        if source is None or not halo.mode.partial_sums or halo.world_size == 1:
            return None
        if halo.is_here(source.tensor) or constants.is_constant([source.tensor]):
            return None
        fewest = halo.structure.halo([halo.etype]).made_once(find_fewest_rows)
        if fewest is None:
            return None
        if edges.sums is None:
            kind = _CollectiveSums if halo.mode.mode == "oneshot" else _PairwiseSums
            edges.sums = kind(halo, edges, fewest)
        transport: RowTransport | None = edges.sums
        weights = reduction.summed_weights()
        if transport is not None and weights is not None:
            transport = transport.weighted(source.tensor, weights, constants)
        if transport is None:
            return None
        device = edges.edge_index.device
        walk = ShardPass(
            transport.keyed(), [(halo.etype, reduction)], halo.mode.fetched_ahead, device
        )
        ((result,),) = walk.run(meanwhile if transport.by_collective else None)
        return result


def weighted_sum(
    halo: SourceHalo, edges: EdgeSet, rows: Tensor, weight: Tensor | None, reduce: str
) -> FusedCall:
    """Sum or mean of source rows, each times the weight of its edge, which is broadcast to it."""
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
    """Fused attention; ``make`` goes from the rows of the sources to the operands."""

    def compute(extended: Sequence[Tensor]) -> Tensor:
        return attend(edges.adjacency, make(extended))

    def reduction() -> Reduction:
        operands = make(sources)
        if operands.mask is not None:
            operands = replace(operands, mask=replace(operands.mask, keys=edges.places))
        return AttentionSum(operands)

    return FusedCall(halo, edges, sources, [], compute, reduction, is_only_reader=True)


@dataclass(frozen=True, eq=False)
class DestinationPiece:
    """Destinations ``[start, stop)`` and their in-edges.

    Args:
        edges: int64 ids of the edges.
        edge_index: int64 ``[2, num_edges]``: rows of ``sources``, and destinations from 0.
        sources: int64, the extended rows that they read, ascending.
    """

    start: int
    stop: int
    edges: Tensor
    edge_index: Tensor
    sources: Tensor


def destination_pieces(edges: EdgeSet) -> list[DestinationPiece]:
    """The edges of a set, cut by destination."""
    indptr, sources, ids = (part if part is None else part.long() for part in edges.adjacency.csc())
    assert indptr is not None
    assert sources is not None
    total, num_dst = sources.numel(), indptr.numel() - 1
    target = min(MOST_EDGES, max(FEWEST_EDGES, total // 16))
    count = max(1, -(-total // target))
    bounds = torch.arange(1, count, device=indptr.device) * total // count
    cuts = [0, *torch.searchsorted(indptr[:-1], bounds).tolist(), num_dst]
    pieces = []
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        if start == stop and num_dst:
            continue
        first, last = int(indptr[start]), int(indptr[stop])
        degrees = indptr[start : stop + 1].diff()
        numbers = torch.arange(stop - start, device=indptr.device)
        dst = torch.repeat_interleave(numbers, degrees)
        rows, src = torch.unique(sources[first:last], return_inverse=True)
        eids = torch.arange(first, last, device=indptr.device)
        eids = eids if ids is None else ids[first:last]
        pieces.append(DestinationPiece(start, stop, eids, torch.stack([src, dst]), rows))
    return pieces


@dataclass(frozen=True, eq=False)
class Aggregation:
    """What one call of `propagate` reads, and what it computes.

    Args:
        pieces: What is computed at a time.
        compute: From a piece and its rows - of sources, destinations, edges - and whole tensors to
            the results of its destinations, ``[stop - start, ...]``. It may use ``parameters`` as
            they are.
        sources: Tensors with a row per own source.
        destinations: Tensors with a row per destination.
        edges: Tensors with a row per edge.
        whole: Tensors that every piece reads whole.
        parameters: Other tensors that ``compute`` uses and that may need a gradient.
    """

    halo: SourceHalo
    pieces: Sequence[DestinationPiece]
    compute: Callable[[DestinationPiece, Tensors, Tensors, Tensors, Tensors], Tensor]
    sources: Tensors
    destinations: Tensors
    edges: Tensors
    whole: Tensors
    parameters: Tensors

    def recomputed(self) -> Tensor:
        """The result; the backward fetches and computes again. Collective."""
        groups = (self.sources, self.destinations, self.edges, self.whole, self.parameters)
        return _Recomputed.apply(self, *(tensor for rows in groups for tensor in rows))

    def split(self, tensors: Tensors) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Tensors of sources, of destinations, of edges and whole ones, from all in this order."""
        first, second = len(self.sources), len(self.sources) + len(self.destinations)
        third = second + len(self.edges)
        fourth = third + len(self.whole)
        return tensors[:first], tensors[first:second], tensors[second:third], tensors[third:fourth]

    def of_piece(self, piece: DestinationPiece, tensors: Tensors) -> list[Tensor]:
        """What a piece reads of extended sources, destinations and edges, and whole tensors."""
        extended, dst, edges, whole = self.split(tensors)
        return [
            *(rows.index_select(0, piece.sources) for rows in extended),
            *(rows[piece.start : piece.stop] for rows in dst),
            *(rows[piece.edges] for rows in edges),
            *whole,
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
        ctx.wire = keyed(a.halo.mode.halo_dtype)
        others = [rows.detach() for rows in (*a.destinations, *a.edges, *a.whole)]
        whole = [*a.halo.fetched_again(a.sources, ctx.wire), *others]
        results = []
        for piece in a.pieces:
            ctx.random.append(RandomState.capture(device))
            results.append(a.compute(piece, *a.split(a.of_piece(piece, whole))))
        return torch.cat(results) if len(results) != 1 else results[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        a: Aggregation = ctx.aggregation
        needs = ctx.needs_input_grad[1:]
        of_dst = len(a.sources)
        of_edges = of_dst + len(a.destinations)
        of_whole = of_edges + len(a.edges)
        extended = a.halo.fetched_again(a.sources, ctx.wire)
        others = [rows.detach() for rows in (*a.destinations, *a.edges, *a.whole)]
        whole = [*extended, *others]
        totals = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip([*whole, *a.parameters], needs, strict=True)
        ]
        kind, dtype, enabled = ctx.autocast
        now = RandomState.capture(grad.device)
        differentiated = [i for i, needed in enumerate(needs) if needed]
        for piece, random in zip(a.pieces, ctx.random, strict=True):
            rows = [tensor.detach() for tensor in a.of_piece(piece, whole)]
            for tensor, needed in zip(rows, needs, strict=False):
                tensor.requires_grad_(needed)
            inputs = [*rows, *a.parameters]
            random.restore(grad.device)
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled):
                result = a.compute(piece, *a.split(rows))
            if not result.requires_grad:
                continue
            gradients = torch.autograd.grad(
                result,
                [inputs[i] for i in differentiated],
                grad[piece.start : piece.stop],
                allow_unused=True,
            )
            for i, part in zip(differentiated, gradients, strict=True):
                total = totals[i]
                if part is None or total is None:
                    continue
                if i < of_dst:
                    total.index_add_(0, piece.sources, part)
                elif i < of_edges:
                    total[piece.start : piece.stop].add_(part)
                elif i < of_whole:
                    total[piece.edges] = part
                else:
                    total.add_(part)
        now.restore(grad.device)
        remote = [i for i in range(of_dst) if needs[i]]
        returned = a.halo.returned([t for i in remote if (t := totals[i]) is not None])
        for i, summed in zip(remote, returned, strict=True):
            totals[i] = summed
        return None, *totals


@contextmanager
def bound(layer: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Context in which a layer's `propagate` and `edge_updater` are those of this module.

    Layers that are hooked, explained or taken apart keep their own, as do calls that return the
    attention weights, which the other ways do not make.
    """
    own = vars(layer)
    is_plain = not layer.explain and layer.decomposed_layers == 1 and "propagate" not in own
    is_hooked = any(own.get(name) for name in _HOOKS)
    if not is_plain or is_hooked or kwargs.get("return_attention_weights") is not None:
        yield
        return
    own["propagate"] = MethodType(_propagate, layer)
    if layer.inspector.implements("edge_update"):
        own["edge_updater"] = MethodType(_edge_updater, layer)
    try:
        yield
        for name, value in list(own.items()):
            own[name] = computed(value) if isinstance(value, DeferredUpdate) else value
    finally:
        own.pop("propagate", None)
        own.pop("edge_updater", None)
        for _, linear in _OWN_PRODUCTS.values():
            own.pop(linear, None)


class _OwnProduct:
    """Takes the place of a linear layer whose product of some rows is there already."""

    def __init__(self, linear: nn.Module, rows: Tensor) -> None:
        self._linear, self._rows, self._product = linear, rows, linear(rows)

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = self._product if rows is self._rows else self._linear(rows)
        return result


def _own_product(layer: Any, kwargs: dict[str, Any]) -> Callable[[], None] | None:
    """Finds the product of own rows that PyG's layer adds to the sum; None for other layers."""
    x = kwargs.get("x")
    if not isinstance(x, tuple) or not isinstance(x[1], Tensor):
        return None
    for name, (module, attribute) in _OWN_PRODUCTS.items():
        if _defined_by(layer, "forward", f"torch_geometric.nn.conv.{module}", name):
            linear = getattr(layer, attribute, None)
            if not isinstance(linear, nn.Module) or is_hooked(linear):
                return None

            def find(linear: nn.Module = linear, attribute: str = attribute) -> None:
                vars(layer)[attribute] = _OwnProduct(linear, x[1])

            return find
    return None


class DeferredUpdate:
    """What `edge_updater` was asked for: `propagate` computes it where it is needed.

    A layer that does anything else with it computes it at once, for all edges of this rank.
    """

    def __init__(self, layer: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> None:
        self.kwargs, self._of = kwargs, (layer, edge_index, size)
        self._computed: tuple[Any] | None = None

    def is_open_for(self, layer: Any, edge_index: Any) -> bool:
        """Whether it is not computed, and will be by a `propagate` of the layer on these edges."""
        return self._computed is None and self._of[0] is layer and self._of[1] is edge_index

    def compute(self) -> Any:
        """Values per edge, as the layer's ``edge_update`` gives them; once."""
        if self._computed is None:
            layer, edge_index, size = self._of
            values = type(layer).edge_updater(layer, edge_index, size=size, **self.kwargs)
            self._computed = (values,)
        return self._computed[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.compute())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*computed(tuple(args)), **computed(kwargs or {}))


def _operator(name: str) -> Callable[..., Any]:
    def operate(update: DeferredUpdate, *others: Any) -> Any:
        return getattr(update.compute(), name)(*computed(others))

    return operate


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul"),
    *("neg", "abs", "getitem", "len", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert"),
):
    setattr(DeferredUpdate, f"__{_name}__", _operator(f"__{_name}__"))


def computed(value: Any) -> Any:
    """The value, with what was deferred in it computed."""
    if isinstance(value, DeferredUpdate):
        return value.compute()
    if type(value) in (tuple, list):
        return type(value)(computed(item) for item in value)
    if type(value) is dict:
        return {key: computed(item) for key, item in value.items()}
    return value


def _edge_updater(layer: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    if not isinstance(edge_index, ShardedEdgeIndex):
        return type(layer).edge_updater(layer, edge_index, size=size, **kwargs)
    return DeferredUpdate(layer, edge_index, size, kwargs)


def _propagate(layer: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    if not isinstance(edge_index, ShardedEdgeIndex):
        return _as_pyg(layer, edge_index, size, kwargs)
    halo = edge_index.halo
    for name, value in kwargs.items():
        if not (isinstance(value, DeferredUpdate) and value.is_open_for(layer, edge_index)):
            kwargs[name] = computed(value)
        if isinstance(value, nn.Parameter):  # a row per node, as SparseLinear has
            kwargs[name] = halo.own_rows(value)
    if _reads_tables(layer, kwargs, halo):
        return _as_pyg(layer, edge_index, size, kwargs)
    edges = halo.edge_set(edge_index.local())
    fused = _attention(layer, kwargs, halo, edges) or _weighted_sum(layer, kwargs, halo, edges)
    if fused is not None:
        return fused.run(edge_index.has_whole_cut, _own_product(layer, kwargs))
    padded = [module for module in layer.modules() if type(module).__name__ in _PADDED]
    length = halo.largest_in_degree(edges) if padded else 0
    if halo.mode.mode != "oneshot" and halo.mode.rematerializes:
        aggregation = _in_pieces(layer, kwargs, halo, edges, padded, length)
        if aggregation is not None:
            return aggregation.recomputed()
    with _of_length(padded, length):
        return _as_pyg(layer, edge_index, size, kwargs)


def _as_pyg(layer: Any, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
    return type(layer).propagate(layer, edge_index, size=size, **computed(kwargs))


def _reads_tables(layer: Any, kwargs: dict[str, Any], halo: SourceHalo) -> bool:
    """Whether a message reads a tensor with a row for each node of the whole graph."""
    updates = [value.kwargs for value in kwargs.values() if isinstance(value, DeferredUpdate)]
    dim = layer.node_dim
    for given, names in (
        (kwargs, layer._user_args),
        *((update, layer._edge_user_args) for update in updates),
    ):
        for name, value in given.items():
            is_pair = isinstance(value, tuple | list) and len(value) == 2
            src, dst = value if is_pair else (value, value)
            for rows, end, argument in (
                (src, halo.sources, f"{name}_j"),
                (dst, halo.destinations, f"{name}_i"),
            ):
                if argument in names and isinstance(rows, Tensor) and rows.dim():
                    fits = -rows.dim() <= dim < rows.dim()
                    if fits and not end.owns(rows.shape[dim]):
                        return True
    return False


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Context in which modules call a hook, with keywords, before their forward."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_length(modules: Sequence[nn.Module], length: int) -> AbstractContextManager[None]:
    """Aggregations that read a sequence per destination pad each to a length.

    PyG takes the longest of a call, and what an LSTM makes of the rest of a sequence depends on it:
    it has to be that of the whole graph.
    """

    def pad(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "max_num_elements": length}

    return _hooked(modules, pad)


def _defined_by(layer: Any, method: str, module: str, name: str) -> bool:
    """Whether a layer has a method as PyG's class of some name defines it."""
    function = getattr(type(layer), method, None)
    return (
        getattr(function, "__module__", "") == module
        and getattr(function, "__qualname__", "") == f"{name}.{method}"
    )


def _is_inherited(layer: Any, method: str) -> bool:
    return _defined_by(layer, method, "torch_geometric.nn.conv.message_passing", "MessagePassing")


def _aggregates_as_usual(layer: Any) -> bool:
    return _is_inherited(layer, "aggregate") and _is_inherited(layer, "update")


# -- fused: a sum of weighted rows -----------------------------------------------------------------


class _SourceRow:
    """The argument ``x_j`` of a message, of which only its product with a weight is wanted.

    A weight has a row for each edge, or one for all; which one is asked of the weight first, so
    that a rank with one edge does as the others.
    """

    __array_ufunc__ = None

    def __init__(self, shape: torch.Size, dtype: torch.dtype, weight: Tensor | None = None) -> None:
        self.shape, self.dtype, self.weight = shape, dtype, weight

    def __mul__(self, weight: Any) -> _SourceRow:
        fits = isinstance(weight, Tensor) and self.weight is None
        if not fits or weight.dim() != len(self.shape) or weight.shape[-1] != 1:
            raise _OtherMessageError
        if weight.shape[0] == 1:
            weight = weight.expand(self.shape[0], *weight.shape[1:])
        if weight.shape[0] != self.shape[0]:
            raise _OtherMessageError
        if not weight.is_floating_point():  # a mask, or a count
            weight = weight.to(self.dtype)
        return _SourceRow(self.shape, self.dtype, weight)

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
    if not layer.special_args.isdisjoint(names):  # it may do without them, and is given them
        return None
    rows = kwargs.get(read[0][:-2])
    rows = rows[0] if isinstance(rows, tuple | list) else rows
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        return None
    if rows.dim() < 2 or layer.node_dim % rows.dim() != 0:
        return None
    shape = torch.Size((edges.edge_index.shape[1], *rows.shape[1:]))
    arguments: dict[str, Any] = {read[0]: _SourceRow(shape, rows.dtype)}
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
            if name != "TransformerConv" and not (
                _defined_by(layer, "edge_update", path, name)
                and isinstance(kwargs["alpha"], DeferredUpdate)
            ):
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
    return layer.lin_edge(edge_attr).view(-1, layer.heads, layer.out_channels)


def _additive(
    layer: Any, kwargs: dict[str, Any], halo: SourceHalo, edges: EdgeSet
) -> FusedCall | None:
    update = kwargs["alpha"].kwargs
    of_src, of_dst = update["alpha"]
    values = kwargs["x"][0]
    if of_dst is None:
        of_dst = of_src.new_zeros(halo.num_dst, layer.heads)
    rows = _edge_rows(layer, update.get("edge_attr"))
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
    values, targets = kwargs["x"]
    rows = _edge_rows(layer, kwargs["alpha"].kwargs.get("edge_attr"))
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
    """The tensors of a call's arguments, each once: rows of sources, of destinations, of edges.

    Others are constants, or read whole where they need a gradient and are no parameters.
    """

    def __init__(self, layer: Any, num_edges: int) -> None:
        self._layer, self._num_edges = layer, num_edges
        self._parameters = {id(parameter) for parameter in layer.parameters()}
        self.sources: list[Tensor] = []
        self.destinations: list[Tensor] = []
        self.edges: list[Tensor] = []
        self.whole: list[Tensor] = []
        self.fits = True

    def of_state(self, halo: SourceHalo) -> list[tuple[nn.Module, str, int]]:
        """Attributes of modules with a row per edge on every rank, and their slots; collective.

        A layer may leave there what its messages read.
        """
        tensors = [
            (module, name, value)
            for module in self._layer.modules()
            for name, value in vars(module).items()
            if type(value) is Tensor and value.dim()
        ]
        if not tensors:
            return []
        fits = torch.tensor([int(len(value) == self._num_edges) for _, _, value in tensors])
        fits = all_reduce_alike(fits, "min", group=halo.structure.group)
        return [
            (module, name, self._slot(self.edges, value))
            for (module, name, value), is_of_edges in zip(tensors, fits.tolist(), strict=True)
            if is_of_edges
        ]

    def _slot(self, tensors: list[Tensor], tensor: Tensor) -> int:
        for number, other in enumerate(tensors):
            if other is tensor:
                return number
        tensors.append(tensor)
        return len(tensors) - 1

    def _node_slot(self, tensors: list[Tensor], tensor: Any) -> int | None:
        if not isinstance(tensor, Tensor):
            return None
        self.fits &= tensor.dim() > 0 and self._layer.node_dim % tensor.dim() == 0
        return self._slot(tensors, tensor)

    def of(self, kwargs: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Argument of `propagate` or `edge_updater` to what it is made of, for `_filled`.

        ``names`` are what the layer's functions ask for.
        """
        slots: dict[str, Any] = {}
        for name, value in kwargs.items():
            of_src, of_dst = f"{name}_j" in names, f"{name}_i" in names
            if of_src or of_dst:
                self.fits &= name not in names  # all of it, and not the rows of edges
                src, dst = value if isinstance(value, tuple | list) else (value, value)
                slots[name] = (
                    "nodes",
                    self._node_slot(self.sources, src) if of_src else None,
                    self._node_slot(self.destinations, dst) if of_dst else None,
                )
            elif isinstance(value, DeferredUpdate):
                asked = self._layer._edge_user_args
                slots[name] = ("update", self.of(value.kwargs, asked))
            elif name not in names:
                slots[name] = ("constant", None)
            elif isinstance(value, Tensor) and value.dim() and len(value) == self._num_edges:
                slots[name] = ("edges", self._slot(self.edges, value))
            elif (
                isinstance(value, Tensor)
                and value.requires_grad
                and id(value) not in self._parameters
            ):
                slots[name] = ("whole", self._slot(self.whole, value))
            else:
                slots[name] = ("constant", value)
        return slots


def _filled(
    layer: Any, slots: dict[str, Any], edge_index: Tensor, size: Any, rows: Sequence[Tensors]
) -> dict[str, Any]:
    """The arguments of a piece, from its rows of sources, destinations and edges, and the rest."""
    sources, destinations, edges, whole = rows
    arguments: dict[str, Any] = {}
    for name, (kind, content, *others) in slots.items():
        if kind == "nodes":
            (dst,) = others
            arguments[name] = (
                None if content is None else sources[content],
                None if dst is None else destinations[dst],
            )
        elif kind == "edges":
            arguments[name] = edges[content]
        elif kind == "whole":
            arguments[name] = whole[content]
        elif kind == "update":
            inner = _filled(layer, content, edge_index, size, rows)
            arguments[name] = type(layer).edge_updater(layer, edge_index, size=size, **inner)
        else:
            arguments[name] = content
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
    return {
        name
        for function in ("message", "aggregate", "update", "edge_update")
        if not _is_inherited(layer, function)
        for name in layer.inspector.get_param_names(function)
    }


def _in_pieces(
    layer: Any,
    kwargs: dict[str, Any],
    halo: SourceHalo,
    edges: EdgeSet,
    padded: Sequence[nn.Module],
    length: int,
) -> Aggregation | None:
    if not _is_inherited(layer, "update"):
        return None
    asked = _special_arguments(layer)
    if "edge_index" in asked:
        return None
    reads_numbers = bool(asked & {"index", "edge_index_i", "edge_index_j"})
    if reads_numbers and (halo.sources.is_ambiguous or halo.destinations.is_ambiguous):
        return None
    num_edges = edges.edge_index.shape[1]
    if not _aggregates_pieces(layer, kwargs, num_edges, halo):
        return None
    tensors = _Slots(layer, num_edges)
    slots = tensors.of(kwargs, layer._user_args)
    if not tensors.fits or not tensors.sources:
        return None
    state = tensors.of_state(halo)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    norms = [module for module in layer.modules() if takes_statistics(module)]

    def propagate(edge_index: Tensor, size: Any, arguments: dict[str, Any]) -> Tensor:
        with _hooked(norms, _refuse_norm), _of_length(padded, length):
            rows: Tensor = type(layer).propagate(layer, edge_index, size=size, **arguments)
        return rows

    def compute(
        piece: DestinationPiece, src: Tensors, dst: Tensors, edge: Tensors, whole: Tensors
    ) -> Tensor:
        size = (piece.sources.numel(), piece.stop - piece.start)
        edge_index = piece.edge_index
        if reads_numbers:
            edge_index = _PieceEdges.of(piece, halo, src)
        with _state_of_piece(state, edge):
            arguments = _filled(layer, slots, edge_index, size, (src, dst, edge, whole))
            if torch.is_grad_enabled() or layer in _looked_at:
                return propagate(edge_index, size, arguments)
            with torch.enable_grad():
                result = propagate(edge_index, size, arguments)
        _check_leaves(layer, result, parameters, src, dst, edge, whole)
        _looked_at.add(layer)
        return result.detach()

    if edges.pieces is None:
        edges.pieces = destination_pieces(edges)
    return Aggregation(
        halo,
        edges.pieces,
        compute,
        tensors.sources,
        tensors.destinations,
        tensors.edges,
        tensors.whole,
        parameters,
    )


@contextmanager
def _state_of_piece(state: Sequence[tuple[nn.Module, str, int]], edges: Tensors) -> Iterator[None]:
    """Attributes of modules have the rows of a piece's edges for a while."""
    before = [vars(module).get(name) for module, name, _ in state]
    for module, name, slot in state:
        vars(module)[name] = edges[slot]
    try:
        yield
    finally:
        for (module, name, _), value in zip(state, before, strict=True):
            vars(module)[name] = value


def _aggregates_pieces(
    layer: Any, kwargs: dict[str, Any], num_edges: int, halo: SourceHalo
) -> bool:
    """Whether an ``aggregate`` of a layer reads no rows of all destinations; collective if own.

    A piece has some destinations, and nothing tells which rows of a tensor it would combine with.
    """
    if _is_inherited(layer, "aggregate"):
        return True
    values = [
        kwargs.get(name)
        for name in layer.inspector.get_param_names("aggregate")
        if name not in layer.special_args and name[-2:] not in ("_i", "_j")
    ]
    others = [v for v in values if isinstance(v, Tensor | tuple | list)]
    fits = all(isinstance(v, Tensor) and v.dim() and len(v) == num_edges for v in others)
    return bool(all_reduce_alike(torch.tensor([int(fits)]), "min", group=halo.structure.group))


def _refuse_norm(module: nn.Module, args: Any, kwargs: Any) -> None:
    raise NotImplementedError(
        f"{type(module).__name__} within messages takes the statistics of all edges at once, and "
        "sequential mode computes some at a time; shard with mode='oneshot', or call eval()"
    )


def _check_leaves(layer: Any, result: Tensor, parameters: Tensors, *groups: Tensors) -> None:
    """Raise if a message uses a tensor whose gradient a recomputed piece would not find."""
    inputs = {id(t) for t in parameters} | {id(t) for rows in groups for t in rows}
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in inputs:
            raise NotImplementedError(
                f"a message of {type(layer).__name__} uses a tensor of shape {tuple(leaf.shape)} "
                "that needs a gradient and is neither an argument of propagate nor a parameter of "
                "the layer; pass it to propagate, or shard with mode='oneshot'"
            )
        todo += [following for following, _ in node.next_functions]
