# SPDX-License-Identifier: Apache-2.0
"""ShardedEdgeIndex: PyG's ``edge_index``, of edges whose sources may be on other ranks.

A layer of PyG reads remote data in one way: it indexes a node tensor with row 0 of ``edge_index``.
Row 0 of a `ShardedEdgeIndex` is a `SourceIndex`, and indexing a tensor of this rank's nodes with
that fetches the remote rows first. The gradient returns to their owners. What adds up values *at*
sources, as out-degrees do, is the adjoint: the sums of remote rows are sent to their owners. Row 1
is a `DestinationIndex`, whose rows are all here.

As data, all are numbers of the whole graph (see [Note: rows and numbers]): what is compared,
computed, looked up in a table for all nodes, or turned into a list. What is computed from numbers
stays marked as such (`_Numbers`), because it must not index this rank's rows.

All are subclasses of `torch.Tensor` that work above autograd, by ``__torch_function__``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm.collectives import all_reduce_alike
from ..fullbatch import AggregationMode
from ..fullbatch.halo_rows import HaloRowCache
from ..fullbatch.topology import LocalEdges, ShardStructure
from ._source_halo import EdgeEnd, NodeNumbering, PieceEnd, SourceHalo

_Index = TypeVar("_Index", bound="NodeIndex")
_Value = TypeVar("_Value", bound="NodeValues")


def _without_storage(kind: type[_Value], raw: Tensor) -> _Value:
    """A tensor whose numbers are found by ``__torch_function__`` alone.

    What torch runs without asking it (``torch.sparse_coo_tensor``) would take rows for numbers, and
    rows of others lie outside of this rank's tensors. On the device "meta" it fails instead.
    """
    return Tensor._make_subclass(kind, torch.empty_like(raw, device="meta"))


class NodeValues(Tensor):
    """What the classes of this module share: a plain tensor of rows, or of numbers."""

    _raw: Tensor
    halo: Any

    def numbers(self) -> Tensor:
        """Numbers of the whole graph, as a plain tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self: _Value, memo: Any) -> _Value:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an edge_index that spans ranks belongs to this process and its group, and is not "
            "pickled; save the model alone, and shard the data again"
        )


class ShardedEdgeIndex(NodeValues):
    """``[2, num_edges]`` int64: source and destination of this rank's edges.

    Every edge is on the rank of its destination. Rows of node tensors that it indexes are this
    rank's, or come from their owners; its values, wherever they are read as numbers, are those of
    the whole graph. Made by `graphshard.pyg.shard`; give it to layers of PyG as it is. Every rank
    must run the same layers.

    ``edge_index.flip([0])`` has the edges turned round, and they move to the rank where they
    now end; values per edge do not move with them.
    """

    halo: SourceHalo
    #: Of the edges, where they take the place of an adjacency matrix whose values are not all 1.
    matrix_values: Tensor | None = None
    #: Whether they take the place of an adjacency matrix with self loops, on any rank.
    is_matrix_with_loops = False
    #: Whether they have all edges between ranks of the relation, in its order; alike on all ranks.
    has_whole_cut = False

    @staticmethod
    def make(raw: Tensor, halo: SourceHalo) -> ShardedEdgeIndex:
        """Edges of a relation: int64 ``[2, num_edges]``, extended source and destination rows."""
        made = _without_storage(ShardedEdgeIndex, raw)
        made._raw, made.halo = raw, halo
        made.has_whole_cut = raw is halo.edge_index
        return made

    def local(self) -> Tensor:
        """Rows instead of numbers, as a plain tensor.

        Destinations are this rank's rows; sources are numbered likewise, and from ``num_owned`` on
        they are rows of other ranks.
        """
        return self._raw

    def as_matrix(self, values: Tensor | None, *, has_loops: bool) -> ShardedEdgeIndex:
        """The same edges in place of an adjacency matrix.

        Args:
            values: ``[num_edges, ...]``; None where all are 1.
            has_loops: Whether the matrix has self loops, on any rank.
        """
        if values is None and not has_loops:
            return self
        made = ShardedEdgeIndex.make(self._raw, self.halo)
        made.matrix_values, made.is_matrix_with_loops = values, has_loops
        made.has_whole_cut = self.has_whole_cut
        return made

    def numbers(self) -> Tensor:
        ends = self.halo.sources, self.halo.destinations
        return torch.stack([end.numbers(rows) for end, rows in zip(ends, self._raw, strict=True)])

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self[0], self[1]))


class NodeIndex(NodeValues):
    """One end of edges; the subclasses say which."""

    _flat: Tensor
    _is_complete: bool
    end: EdgeEnd

    @classmethod
    def make(
        cls: type[_Index],
        raw: Tensor,
        end: EdgeEnd,
        flat: Tensor | None = None,
        *,
        is_complete: bool = False,
    ) -> _Index:
        """Rows, perhaps broadcast.

        Args:
            flat: ``[num_edges]``: the same before it was broadcast to the shape of ``raw``.
            is_complete: Whether it has all edges of the relation.
        """
        made = _without_storage(cls, raw)
        made._raw, made.end, made._is_complete = raw, end, is_complete
        made._flat = raw if flat is None else flat
        return made

    @property
    def halo(self) -> SourceHalo:
        """The relation."""
        return self.end.halo

    def like(self: _Index, raw: Tensor, flat: Tensor | None = None) -> _Index:
        """Other rows of the same end."""
        return type(self).make(raw, self.end, flat)

    def local(self) -> Tensor:
        """Rows instead of numbers, as a plain tensor."""
        return self._raw

    def numbers(self) -> Tensor:
        return self.end.numbers(self._raw)

    def located(self, tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """A tensor that this indexes, with remote rows, and the plain index of it."""
        return self.end.located(tensor, dim, self._raw, self._is_complete)


class SourceIndex(NodeIndex):
    """Sources of edges: row 0 of a `ShardedEdgeIndex`, or some of it."""


class DestinationIndex(NodeIndex):
    """Destinations of edges: row 1 of a `ShardedEdgeIndex`, or some of it."""


class _Numbers(NodeValues):
    """What was computed with numbers of nodes: data, and an index of tables alone."""

    halo: SourceHalo

    @staticmethod
    def make(raw: Tensor, halo: SourceHalo) -> _Numbers:
        made = _without_storage(_Numbers, raw)
        made._raw, made.halo = raw, halo
        return made

    def numbers(self) -> Tensor:
        return self._raw

    def located(self, tensor: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """A table that this indexes; collective."""
        size, halo = tensor.shape[dim], self.halo
        if halo.world_size > 1:
            owned = size in (halo.num_owned, halo.num_dst)
            sizes = torch.tensor([size, -size, int(owned), -int(owned)])
            most, least, _, all_owned = all_reduce_alike(
                sizes, "max", group=halo.structure.group
            ).tolist()
            if most != -least or all_owned == -1:
                raise _no_rows_by_computed_numbers("an index")
        elif not _is_in_order(halo) and size in (halo.num_owned, halo.num_dst):
            raise _no_rows_by_computed_numbers("an index")
        return tensor, self._raw


def _no_rows_by_computed_numbers(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} with numbers that were computed from the nodes of edges that span ranks would "
        "read or write rows of this rank for those of others (a dense or a sparse adjacency "
        "matrix does so); use scatter or MessagePassing with edge_index itself"
    )


def _is_in_order(halo: SourceHalo) -> bool:
    """Whether the rows of the only rank are the numbers themselves."""
    numberings = (halo.sources.numbering, halo.destinations.numbering)
    return all(
        n.ids is not None and torch.equal(n.ids, torch.arange(n.num_owned, device=n.ids.device))
        for n in numberings
    )


def sharded_edges(
    edges: Mapping[CanonicalEType, LocalEdges],
    nodes: Mapping[str, NodeNumbering],
    device: torch.device,
    policy: AggregationMode,
    group: dist.ProcessGroup | None,
) -> dict[CanonicalEType, ShardedEdgeIndex]:
    """An edge index for each relation of this rank's edges, on their device; collective."""
    owned = {ntype: numbering.num_owned for ntype, numbering in nodes.items()}
    structure = ShardStructure(edges, owned, owned, device, group)
    if policy.halo_dtype == torch.int8:
        numbers = {t: n.ids for t, n in nodes.items() if n.ids is not None}
        structure.number_rows(numbers)
    sources = list(dict.fromkeys(source for source, _, _ in edges))
    halos = {ntype: structure.union_halo(ntype) for ntype in sources}
    if policy.mode == "auto":
        num_halo = sum(halo.num_halo for halo in halos.values() if halo is not None)
        policy = replace(policy, mode=policy.resolve(num_halo, group, device))
    cache = HaloRowCache(structure, policy.halo_dtype)
    ids = {t: nodes[t].extended_ids(halo) for t, halo in halos.items() if halo is not None}
    indices = {}
    for etype in edges:
        source, _, target = etype
        halo = SourceHalo(
            structure, etype, policy, cache, nodes[source], nodes[target], ids[source]
        )
        indices[etype] = ShardedEdgeIndex.make(halo.edge_index, halo)
    return indices


def plain(value: Any) -> Any:
    """The value with plain numbers in place of sharded ones, also in tuples and lists."""
    if isinstance(value, NodeValues):
        return value.numbers()
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value


def _dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, ShardedEdgeIndex | NodeIndex):
            if name == "__get__":
                return _property(func, first)
            if name in _OF_SHAPE:
                return func(first._raw, *args[1:], **kwargs)
            if _is_in_place(name):
                raise _unchangeable()
        handler = _HANDLERS.get(name)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        halo = next((value.halo for value in node_values_in((args, kwargs))), None)
        if name in _OF_ALL_EDGES and halo is not None and halo.world_size > 1:
            raise NotImplementedError(
                f"{name} of numbers of nodes is of all edges, of which this rank has some; "
                "sum, mean, min and max are of all ranks, and anything per edge is exact"
            )
        return _marked(name, func(*plain(args), **plain(kwargs)), halo)


def node_values_in(value: object) -> Iterator[NodeValues]:
    """Values of this module among arguments, also in tuples, lists and dictionaries."""
    if isinstance(value, NodeValues):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from node_values_in(item)


def _marked(name: str, result: Any, halo: SourceHalo | None) -> Any:
    """The result of an operation, integers marked as numbers unless they are positions."""
    if halo is None or name in _NOT_NUMBERS:
        return result
    if isinstance(result, Tensor):
        is_number = result.layout == torch.strided and result.dtype in (torch.int64, torch.int32)
        return _Numbers.make(result, halo) if is_number else result
    if name in _VALUES_AND_POSITIONS and isinstance(result, tuple):
        return type(result)((_marked("", result[0], halo), *result[1:]))
    if type(result) in (tuple, list) and any(isinstance(item, Tensor) for item in result):
        return type(result)(_marked("", item, halo) for item in result)
    return result


def _property(func: Any, tensor: ShardedEdgeIndex | NodeIndex) -> Any:
    """``tensor.shape``, ``tensor.device`` and so on."""
    value = func(tensor._raw)
    if not isinstance(value, Tensor):
        return value
    name = func.__self__.__name__
    if isinstance(tensor, NodeIndex):
        return tensor.like(value)
    if name == "data":
        return ShardedEdgeIndex.make(value, tensor.halo)
    raise _turned()


# -- reading ---------------------------------------------------------------------------------------


def _getitem(func: Any, tensor: Any, index: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex):
        return _edges_at(tensor, index)
    if not any(True for _ in node_values_in(index)):
        is_end = isinstance(tensor, NodeIndex)
        return tensor.like(tensor._raw[index]) if is_end else NotImplemented
    if isinstance(tensor, NodeValues):
        return NotImplemented
    tensor, index = _located(tensor, index)
    return tensor[index]


def _edges_at(tensor: ShardedEdgeIndex, index: Any) -> Any:
    if type(index) is list and index == [1, 0]:
        return _flip(None, tensor, 0)
    halo = tensor.halo
    first = index[0] if isinstance(index, tuple) and index else index
    if _is_number(first):
        first = operator.index(first)
        rows = tensor._raw[(first, *plain(index[1:])) if isinstance(index, tuple) else first]
        is_complete = tensor._raw is halo.edge_index and not isinstance(index, tuple)
        if first in (0, -2):
            return SourceIndex.make(rows, halo.sources, is_complete=is_complete)
        return DestinationIndex.make(rows, halo.destinations, is_complete=is_complete)
    if isinstance(index, tuple) and isinstance(first, slice) and first == slice(None):
        rows = tensor._raw[plain(index)]
        if rows.dim() == 2:
            return ShardedEdgeIndex.make(rows, halo)
    return NotImplemented


def _is_number(index: Any) -> bool:
    if isinstance(index, bool | slice | tuple | list) or index is None or index is Ellipsis:
        return False
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype != torch.bool
    return hasattr(index, "__index__")


def _dimensions(tensor: Tensor, parts: Sequence[Any]) -> list[int]:
    """The dimension in which each part of an index begins."""

    def width(part: Any) -> int:
        if part is None or isinstance(part, bool):
            return 0
        is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
        return part.dim() if is_mask else 1

    rest = tensor.dim() - sum(width(part) for part in parts if part is not Ellipsis)
    widths = [rest if part is Ellipsis else width(part) for part in parts]
    return [sum(widths[:number]) for number in range(len(parts))]


def _located(tensor: Tensor, index: Any) -> tuple[Tensor, Any]:
    """A tensor and a plain index of it, from one with nodes in it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    for number, dim in enumerate(_dimensions(tensor, parts)):
        if isinstance(parts[number], NodeValues):
            tensor, parts[number] = _end_of(parts[number]).located(tensor, dim)
    return tensor, tuple(parts) if isinstance(index, tuple) else parts[0]


def _index_select(func: Any, input: Any, dim: int, index: Any, *, out: Tensor | None = None) -> Any:
    if isinstance(input, ShardedEdgeIndex):
        if dim in (1, -1):
            return ShardedEdgeIndex.make(input._raw.index_select(1, plain(index)), input.halo)
        return NotImplemented
    if isinstance(input, NodeIndex):
        return input.like(input._raw.index_select(dim, plain(index)))
    if isinstance(input, _Numbers):
        return NotImplemented
    dim = dim % max(input.dim(), 1)
    tensor, rows = _end_of(index).located(input, dim)
    selected = tensor.index_select(dim, rows)
    return selected if out is None else out.copy_(selected)


def _end_of(index: Any) -> Any:
    if isinstance(index, NodeIndex | _Numbers):
        return index
    raise _joined_ends("an index")


def _embedding(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(weight, NodeValues):
        return NotImplemented
    weight, rows = _end_of(input).located(weight, 0)
    return func(rows, weight, *args, **kwargs)


def _gather(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``gather(input, dim, index)`` and ``take_along_dim(input, indices, dim)``."""
    is_gather = func.__name__ == "gather"
    names = ("dim", "index") if is_gather else ("indices", "dim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    index, dim = given.pop(names[1] if is_gather else names[0]), given.pop("dim", None)
    if isinstance(input, NodeValues) or not isinstance(index, NodeValues) or dim is None:
        return NotImplemented
    dim = dim % max(input.dim(), 1)
    tensor, rows = _end_of(index).located(input, dim)
    return func(tensor, dim, rows, **given) if is_gather else func(tensor, rows, dim, **given)


def _take(func: Any, input: Any, index: Any) -> Any:
    if isinstance(input, NodeValues):
        return NotImplemented
    if input.dim() != 1:
        raise NotImplementedError("take with nodes of edges needs a tensor of one dimension")
    return func(*_end_of(index).located(input, 0))


def _one_hot(func: Any, tensor: Any, num_classes: int = -1) -> Any:
    """The number of classes is that of all ranks; the result has no numbers any more."""
    if num_classes == -1:
        num_classes = largest_number(tensor) + 1
    return func(plain(tensor), max(num_classes, 1))


# -- writing ---------------------------------------------------------------------------------------


def _scatter(func: Any, input: Any, dim: int, index: Any, *rest: Any, **kwargs: Any) -> Any:
    """``scatter``, ``scatter_add``, ``index_add`` and their kin."""
    if isinstance(input, NodeValues) or not isinstance(index, NodeValues):
        return NotImplemented
    name, dim = func.__name__.strip("_"), dim % max(input.dim(), 1)
    rest, kwargs = plain(rest), plain(kwargs)
    if isinstance(index, NodeIndex) and index.end.has_remote_rows:
        adds = name in ("scatter_add", "index_add")
        adds |= name == "scatter" and kwargs.get("reduce") == "add"
        if name == "scatter_reduce" and "sum" in (*rest[1:2], kwargs.get("reduce")):
            adds = kwargs.get("include_self", True)
        src = kwargs.get("source", kwargs.get("src", rest[0] if rest else None))
        if adds and isinstance(src, Tensor):
            return _added_at_sources(func, input, dim, index, src, kwargs.get("alpha", 1))
    return _written(
        func, input, dim, index, lambda out, rows: func(out, dim, rows, *rest, **kwargs)
    )


def _added_at_sources(
    func: Any, out: Tensor, dim: int, index: NodeIndex, src: Tensor, factor: float
) -> Tensor:
    end, halo = index.end, index.halo
    is_own = end.owns(out.shape[dim])
    if not is_own:
        end.check_table(out.shape, dim)
    shape = (*out.shape[:dim], halo.num_extended, *out.shape[dim + 1 :])
    if func.__name__.startswith("scatter") and not _is_broadcast(index, dim, src):
        total = src.new_zeros(shape).scatter_add(dim, index._raw, src)
    else:
        total = src.new_zeros(shape).index_add(dim, index._flat, src)
    summed = halo.summed_at_sources(total.movedim(dim, 0)).movedim(0, dim)
    if factor != 1:
        summed = summed * factor
    if not is_own:
        summed = end.assembled(summed, dim, torch.zeros_like(out))
    return out.add_(summed) if func.__name__.endswith("_") else out + summed


def _is_broadcast(index: NodeIndex, dim: int, src: Tensor) -> bool:
    """Whether an index is one row for each place of a dimension: ``index_add`` is faster."""
    raw, flat = index._raw, index._flat
    others = [d for d in range(raw.dim()) if d != dim]
    varies = any(raw.stride(d) and raw.shape[d] > 1 for d in others)
    return flat.dim() == 1 and raw.shape == src.shape and not varies


def _written(
    func: Any,
    out: Tensor,
    dim: int,
    index: Any,
    write: Callable[[Tensor, Tensor], Any],
) -> Any:
    """Write at nodes: in this rank's rows, or in a table that all ranks write together.

    ``write`` takes a tensor and plain rows of it; ``func``'s name says whether it is in place.
    """
    name = func.__name__
    if isinstance(index, _Numbers):
        if index.halo.world_size > 1 or not _is_in_order(index.halo):
            raise _no_rows_by_computed_numbers(name)
        return write(out, index._raw)
    index = _end_of(index)
    end = index.end
    if isinstance(end, PieceEnd) and (end.is_source or out.shape[dim] != end.num_rows):
        raise end.refuse(name)
    if end.has_remote_rows:
        remote = torch.tensor([int((index._raw >= end.num_rows).any())])
        if bool(all_reduce_alike(remote, "max", group=end.group)):
            raise NotImplementedError(
                f"{name} at the sources of edges that span ranks has no exact result on one rank; "
                "sums at sources (scatter_add, index_add) have one, and anything at destinations"
            )
    if end.owns(out.shape[dim]):
        return write(out, index._raw)
    if index._is_complete:
        end.check_table(out.shape, dim)
    if end.world_size == 1:
        return write(out, index.numbers())
    numbers = end.own_ids
    # Rows that the table does not have have no edges; any row stands for them.
    own = out.index_select(dim, numbers.clamp(max=max(out.shape[dim] - 1, 0)))
    written = write(own, index._raw)
    written = own if written is None else written
    table = end.assembled(written, dim, out)
    return out.copy_(table) if name.endswith("_") else table


def _setitem(func: Any, tensor: Any, index: Any, value: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex | NodeIndex):
        raise _unchangeable()
    if isinstance(tensor, _Numbers):
        return NotImplemented
    parts = list(index) if isinstance(index, tuple) else [index]
    of_nodes = [i for i, part in enumerate(parts) if isinstance(part, NodeValues)]
    if not of_nodes:
        return NotImplemented
    if len(of_nodes) > 1:
        raise _no_rows_by_computed_numbers("setting values")
    (number,) = of_nodes

    def write(out: Tensor, rows: Tensor) -> None:
        parts[number] = rows
        func(out, tuple(parts) if isinstance(index, tuple) else rows, plain(value))

    _written(func, tensor, _dimensions(tensor, parts)[number], parts[number], write)
    return None


def _index_put(func: Any, tensor: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if isinstance(tensor, NodeValues) or len(indices) != 1:
        raise _no_rows_by_computed_numbers(func.__name__)
    index = indices[0]
    if accumulate and isinstance(index, NodeIndex) and index.end.has_remote_rows:
        if not isinstance(values, Tensor) or values.shape[:1] != index._raw.shape:
            raise _no_rows_by_computed_numbers(func.__name__)
        return _added_at_sources(func, tensor, 0, index, plain(values), 1)
    return _written(
        func, tensor, 0, index, lambda out, rows: func(out, (rows,), plain(values), accumulate)
    )


def _bincount(func: Any, input: Any, weights: Any = None, minlength: int = 0) -> Any:
    if not isinstance(input, NodeIndex):
        if isinstance(input, _Numbers) and input.halo.world_size > 1:
            raise _no_rows_by_computed_numbers("bincount")
        return func(plain(input), plain(weights), minlength)
    end, weights = input.end, plain(weights)
    if end.owns(minlength, least=0):
        if not end.has_remote_rows:
            return func(input._raw, weights, minlength)
        total = func(input._raw, weights, input.halo.num_extended)
        return input.halo.summed_at_sources(total)
    length = max(minlength, largest_number(input) + 1)
    return all_reduce_alike(func(input.numbers(), weights, length), group=end.group)


# -- choosing, appending, turning round ------------------------------------------------------------


def _cat(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    tensors = list(tensors)
    edges = [t for t in tensors if isinstance(t, ShardedEdgeIndex)]
    if edges:
        if any(t.halo is not edges[0].halo for t in edges):
            raise NotImplementedError(
                "edges of several relations that span ranks are numbered each in their own way and "
                "cannot be joined to one edge_index; call a layer for each, as HeteroConv does"
            )
        if kwargs.get("axis", dim) not in (1, -1):
            return NotImplemented
        halo = edges[0].halo
        added = [t for t in tensors if not isinstance(t, ShardedEdgeIndex)]
        if added and not _are_own_loops(added, halo.sources, halo.is_square):
            raise NotImplementedError(
                "of edges that are appended to an edge_index that spans ranks nothing tells "
                "whether their numbers are rows of this rank or nodes of the whole graph, unless "
                "they are a self loop at each node; add self loops with torch_geometric.utils."
                "add_self_loops, and other edges to the whole data object, before it is sharded"
            )
        rows = torch.cat([t._raw if isinstance(t, ShardedEdgeIndex) else t for t in tensors], 1)
        return ShardedEdgeIndex.make(rows, halo)
    ends = [t for t in tensors if isinstance(t, NodeIndex)]
    is_rows = all(t.dim() == 2 and t.shape[0] == 1 for t in ends)
    if len(ends) == len(tensors) == 2 and dim == 0 and is_rows:
        return _stack(func, ends, 0)
    if not ends or any(isinstance(t, _Numbers) or t.dim() != 1 for t in tensors):
        return NotImplemented
    if any(t.end.numbering is not ends[0].end.numbering for t in ends):
        return NotImplemented
    if any(t.halo is not ends[0].halo or isinstance(t.end, PieceEnd) for t in ends):
        return NotImplemented
    added = [t for t in tensors if not isinstance(t, NodeIndex)]
    if added and not _are_own_loops([t.expand(2, -1) for t in added], ends[0].end, True):
        return NotImplemented  # numbers like the others, and no rows
    first = next((t for t in ends if isinstance(t, SourceIndex)), ends[0])
    return first.like(torch.cat([t._raw if isinstance(t, NodeIndex) else t for t in tensors]))


def _are_own_loops(added: Sequence[Tensor], end: EdgeEnd, is_square: bool) -> bool:
    """Whether appended edges are none on all ranks, or a self loop at each of a rank's rows.

    These are one at each node. Any other numbers are rows of this rank or numbers of the whole
    graph, and nothing tells which. Collective.
    """
    loops = torch.cat(plain(list(added)), 1)
    rows = torch.arange(end.num_rows, device=loops.device)
    fits = end.world_size == 1 and _is_in_order(end.halo)
    if (
        is_square
        and loops.shape[1] == end.num_rows
        and not any(isinstance(t, NodeValues) for t in added)
    ):
        fits = torch.equal(loops[0], loops[1]) and torch.equal(loops[0].sort().values, rows)
    shares = torch.tensor([int(fits), int(loops.shape[1] == 0)])
    return any(all_reduce_alike(shares, "min", group=end.group).tolist())


def _stack(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if len(tensors) != 2 or kwargs.get("axis", dim) not in (0, -2):
        return NotImplemented
    first, second = tensors
    if isinstance(second, SourceIndex):
        raise _turned()
    if not isinstance(first, NodeIndex) or not isinstance(second, DestinationIndex):
        return NotImplemented
    if first.halo is not second.halo:
        return NotImplemented
    if isinstance(first, DestinationIndex) and not first.halo.is_square:
        return NotImplemented
    return ShardedEdgeIndex.make(
        torch.stack([first._raw.view(-1), second._raw.view(-1)]), first.halo
    )


def _rearranged(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """What moves, copies or repeats, and leaves the nodes what they are."""
    copies = func.__name__ in _COPYING
    if not isinstance(tensor, NodeIndex) and not (copies and isinstance(tensor, ShardedEdgeIndex)):
        return NotImplemented
    rows = func(tensor._raw, *plain(args), **plain(kwargs))
    if rows.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if isinstance(tensor, ShardedEdgeIndex):
        made = ShardedEdgeIndex.make(rows, tensor.halo)
        made.is_matrix_with_loops = tensor.is_matrix_with_loops
        made.has_whole_cut = tensor.has_whole_cut
        if tensor.matrix_values is not None:
            made.matrix_values = tensor.matrix_values.to(rows.device)
        return made
    if not copies or rows.shape != tensor._raw.shape:
        return tensor.like(rows)
    flat = tensor._flat if tensor._flat.dim() < rows.dim() else None
    return type(tensor).make(rows, tensor.end, flat, is_complete=tensor._is_complete)


def _broadcast(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, NodeIndex):
        return NotImplemented
    return tensor.like(func(tensor._raw, *plain(args), **plain(kwargs)), tensor._flat)


def _view(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Of one end it leaves the nodes what they are; of both it would join them."""
    if isinstance(tensor, ShardedEdgeIndex):
        raise _joined_ends(func.__name__)
    if not isinstance(tensor, NodeIndex):
        return NotImplemented
    rows = func(tensor._raw, *plain(args), **plain(kwargs))
    if rows.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    is_flat = tensor._flat.numel() == rows.numel()
    return tensor.like(rows, tensor._flat if is_flat else None)


def _joined_ends(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} of an edge_index that spans ranks would join numbers of sources and "
        "of destinations, of which those of sources may be on other ranks; take a row first, "
        "edge_index[0] or edge_index[1]"
    )


def _unbind(func: Any, tensor: Any, dim: int = 0) -> Any:
    if not isinstance(tensor, ShardedEdgeIndex) or dim not in (0, -2):
        return NotImplemented
    return _edges_at(tensor, 0), _edges_at(tensor, 1)


def _flip(func: Any, tensor: Any, *dims: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, ShardedEdgeIndex):
        return NotImplemented
    axes = kwargs.get("dims", dims[0] if len(dims) == 1 else dims) if dims or kwargs else (0,)
    turns_ends = tuple(axes if isinstance(axes, tuple | list) else (axes,)) in ((0,), (-2,))
    if not turns_ends or tensor._raw is not tensor.halo.edge_index:
        raise _turned()
    turned = tensor.halo.reversed()
    return ShardedEdgeIndex.make(turned.edge_index, turned)


def _turned() -> NotImplementedError:
    return NotImplementedError(
        "edges that span ranks are turned round as a whole, before any are added or left out, by "
        "edge_index.flip([0]); the edges then move to the rank where they end, and values per edge "
        "do not move with them"
    )


def check_matrix(name: str, halo: SourceHalo) -> None:
    """Raise if edges span ranks, and a matrix of them that ``name`` makes has this rank's alone."""
    if halo.world_size > 1 or not _is_in_order(halo):
        raise NotImplementedError(
            f"{name} of edges that span ranks would make a matrix of this rank's edges alone; "
            "pass edge_index to the layer as it is"
        )


def _matrix(func: Any, *args: Any, **kwargs: Any) -> Any:
    check_matrix(func.__name__, next(node_values_in((args, kwargs))).halo)
    return func(*plain(args), **plain(kwargs))


def _to_pointers(func: Any, index: Any, size: int, **kwargs: Any) -> Any:
    """Where the in-edges of each destination begin, of edges that come by destination."""
    is_own = isinstance(index, DestinationIndex) and size == index.end.num_rows
    return func(index._raw, size, **kwargs) if is_own else _matrix(func, index, size, **kwargs)


def _refuse_turned(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex):
        raise _turned()
    return _rearranged(func, tensor, *args, **kwargs)


# -- comparing, and numbers of all edges -----------------------------------------------------------


def _compare(func: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    """Whether ends are one node, also where no number is known: rows tell that, too."""
    both = isinstance(first, NodeIndex) and isinstance(second, NodeIndex)
    if both and first.halo is second.halo and first.end.numbering is second.end.numbering:
        return func(first._raw, second._raw, **kwargs)
    return NotImplemented


def largest_number(index: Any) -> int:
    """The largest number of a node in edges or at an end, on any rank; -1 without. Collective."""
    if isinstance(index, ShardedEdgeIndex) and index._raw is index.halo.edge_index:
        ends = index.halo.sources, index.halo.destinations
        if all(end.is_numbered for end in ends):
            return max(end.largest for end in ends)
    if isinstance(index, NodeIndex) and isinstance(index.end, PieceEnd):
        raise index.end.refuse("max")
    if isinstance(index, NodeIndex) and index._is_complete and index.end.is_numbered:
        return index.end.largest
    numbers = plain(index)
    largest = numbers.max() if numbers.numel() else numbers.new_tensor(-1)
    return int(all_reduce_alike(largest.view(1).long(), "max", group=index.halo.structure.group))


def num_nodes_of(index: Any) -> int:
    """How many rows a tensor needs that these edges index; collective."""
    if isinstance(index, NodeIndex) and isinstance(index.end, PieceEnd):
        return index.end.num_rows
    return largest_number(index) + 1


def _reduce_edges(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Sum, mean, minimum and maximum over edges are those of all ranks; collective."""
    if not isinstance(tensor, NodeValues) or any(isinstance(a, Tensor) for a in args):
        return NotImplemented  # of two tensors, edge by edge
    name = func.__name__
    dim = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    is_per_edge = isinstance(tensor, ShardedEdgeIndex) or (
        isinstance(tensor, _Numbers) and tensor._raw.dim() == 2 and tensor._raw.shape[0] == 2
    )
    if is_per_edge and dim in (0, -2, (0,), [0]):
        return NotImplemented
    halo = tensor.halo
    if halo.world_size == 1:
        return NotImplemented
    if name in ("max", "min") and dim is not None:
        raise NotImplementedError(
            f"{name} of numbers of nodes along edges gives the position of an edge, which may be "
            "on another rank; leave dim out"
        )
    if isinstance(tensor, NodeIndex) and isinstance(tensor.end, PieceEnd):
        raise tensor.end.refuse(name)
    numbers, group = plain(tensor), halo.structure.group
    if name == "max" and not args and not kwargs:
        largest = largest_number(tensor)
        if largest < 0:
            raise RuntimeError("max of no edges: no rank has any")
        return numbers.new_full((), largest)
    if name in ("sum", "mean"):
        total = all_reduce_alike(torch.sum(numbers, *args, **kwargs), group=group)
        if name == "sum":
            return total
        wide = func(numbers, *args, **kwargs)  # tells what is wrong, if anything is
        each = numbers.numel() // max(total.numel(), 1)
        count = all_reduce_alike(torch.tensor(each), group=group)
        return (total / count.to(total.device)).to(wide.dtype)
    bound = torch.iinfo(numbers.dtype).max if "min" in name else torch.iinfo(numbers.dtype).min
    padded = torch.cat([numbers, numbers.new_full((*numbers.shape[:-1], 1), bound)], -1)
    extreme = func(padded, *args, **kwargs)
    return all_reduce_alike(extreme, "min" if "min" in name else "max", group=group)


class _NoneHere(int):
    """0, the size of this rank's edges; compared with 0 it is more, because other ranks have some.

    Code that leaves out what has no edges asks so, and every rank must take part in what follows.
    """

    def __new__(cls) -> _NoneHere:
        return super().__new__(cls, 0)

    def __eq__(self, other: object) -> bool:
        return other is self

    def __lt__(self, other: int) -> bool:
        return int(other) > 1

    def __le__(self, other: int) -> bool:
        return int(other) >= 1

    def __gt__(self, other: int) -> bool:
        return int(other) <= 0

    def __ge__(self, other: int) -> bool:
        return int(other) <= 1

    def __bool__(self) -> bool:
        return True

    __hash__ = int.__hash__


def _numel(func: Any, tensor: Any) -> int:
    halo, count = tensor.halo, tensor._raw.numel()
    if count or halo.world_size == 1 or not halo.structure.global_num_edges(halo.etype):
        return int(count)
    return _NoneHere()


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__iadd__", "__isub__", "__imul__", "__ifloordiv__", "__imod__")
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_", "record_stream_")


def _unchangeable() -> NotImplementedError:
    return NotImplementedError(
        "the numbers of an edge_index that spans ranks cannot be changed: they name nodes; choose "
        "edges with edge_index[:, mask], or compute with a copy, edge_index[0] + 0; in place of "
        "to_hetero_with_bases, which adds offsets to join relations, use to_hetero or HeteroConv"
    )


def _set_property(func: Any, tensor: Any, *values: Any) -> Any:
    is_gradient = getattr(getattr(func, "__self__", None), "__name__", "") == "requires_grad"
    if is_gradient and values == (False,):  # as torch.utils.checkpoint does with its arguments
        return None
    raise _unchangeable()


_COPYING = {"clone", "contiguous", "detach", "to", "long", "int", "cpu", "cuda", "type"}
_HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "index_select": _index_select,
    "embedding": _embedding,
    "embedding_bag": _embedding,
    "gather": _gather,
    "take_along_dim": _gather,
    "take": _take,
    "one_hot": _one_hot,
    "bincount": _bincount,
    "index_put": _index_put,
    "index_put_": _index_put,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("stack", "vstack", "row_stack"), _stack),
    **dict.fromkeys(_COPYING, _rearranged),
    **dict.fromkeys(
        ("repeat", "tile", "repeat_interleave", "narrow", "masked_select"), _rearranged
    ),
    **dict.fromkeys(("expand", "expand_as", "unsqueeze", "broadcast_to"), _broadcast),
    **dict.fromkeys(("view", "reshape", "flatten", "ravel", "view_as", "squeeze"), _view),
    "unbind": _unbind,
    "flip": _flip,
    "flipud": _flip,
    **dict.fromkeys(("t", "transpose", "swapaxes", "movedim", "permute", "fliplr"), _refuse_turned),
    **dict.fromkeys(("eq", "ne", "__eq__", "__ne__"), _compare),
    **dict.fromkeys(("max", "min", "amax", "amin", "sum", "mean"), _reduce_edges),
    "__set__": _set_property,
    "numel": _numel,
    "nelement": _numel,
}
for _name in (
    *("scatter", "scatter_add", "scatter_reduce"),
    *("index_add", "index_copy", "index_fill", "index_reduce"),
):
    _HANDLERS[_name] = _HANDLERS[f"{_name}_"] = _scatter
for _name in ("coo", "csr", "csc", "bsr", "bsc", "compressed"):
    _HANDLERS[f"sparse_{_name}_tensor"] = _matrix
_HANDLERS["_convert_indices_from_coo_to_csr"] = _to_pointers

_OF_SHAPE = {
    *("size", "dim", "stride", "ndimension", "storage_offset", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "__len__"),
    *("requires_grad_", "is_pinned", "is_shared", "is_inference", "__hash__", "__dir__"),
}
_OF_ALL_EDGES = {
    *("unique", "unique_consecutive", "unique_dim", "_unique2", "equal", "allclose", "prod", "all"),
    *("any", "median", "nanmedian", "mode", "std", "var", "std_mean", "var_mean", "norm"),
    *("argmax", "argmin", "kthvalue", "topk", "histc", "histogram", "quantile", "count_nonzero"),
    *("__contains__", "logsumexp", "aminmax", "cumsum", "cumprod", "cummax", "cummin"),
    *("nansum", "nanmean"),
}
_NOT_NUMBERS = {
    *("argsort", "msort_positions", "nonzero", "searchsorted", "bucketize", "count_nonzero"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like"),
    *("ones_like", "full_like", "rand_like", "randn_like", "randint_like", "argmax", "argmin"),
}
_VALUES_AND_POSITIONS = {"sort", "max", "min", "topk", "kthvalue", "mode", "cummax", "cummin"}
