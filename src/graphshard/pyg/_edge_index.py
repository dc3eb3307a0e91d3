# SPDX-License-Identifier: Apache-2.0
"""ShardedEdgeIndex: PyG's ``edge_index``, of edges whose sources may be on other ranks.

A layer of PyG reads remote data in one way: it indexes a node tensor with row 0 of ``edge_index``.
Row 0 of a `ShardedEdgeIndex` is a `SourceIndex`, and indexing with that fetches the remote rows
first. The gradient returns to their owners. What adds up values *at* sources, as out-degrees do, is
the adjoint: the sums of remote rows are sent to their owners. Everything else a layer does with
``edge_index`` - compare its rows, choose or append edges - concerns local numbers, and stays with
torch.

Both are subclasses of `torch.Tensor` that work above autograd, by ``__torch_function__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._typing import CanonicalEType
from ..fullbatch import AggregationMode
from ..fullbatch.execution import HaloRowCache
from ..fullbatch.topology import LocalEdges, ShardStructure
from ._source_halo import SourceHalo


class ShardedEdgeIndex(Tensor):
    """``[2, num_edges]`` int64: source and destination of this rank's edges, in local numbers.

    Every edge is on the rank of its destination. Destinations are this rank's rows; sources are
    numbered likewise, and from ``num_owned`` on they are rows of other ranks. Made by
    `graphshard.pyg.shard`; give it to layers of PyG as it is. Every rank must run the same layers.

    ``edge_index.flip([0])`` has the edges turned round, and they move to the rank where they
    now end; values per edge do not move with them.
    """

    _raw: Tensor
    halo: SourceHalo
    #: Of the edges, where they take the place of an adjacency matrix whose values are not all 1.
    matrix_values: Tensor | None = None
    #: Whether they take the place of an adjacency matrix with self loops, on any rank.
    is_matrix_with_loops = False

    @staticmethod
    def make(raw: Tensor, halo: SourceHalo) -> ShardedEdgeIndex:
        """Edges of a relation.

        Args:
            raw: int64 ``[2, num_edges]``, extended source rows and destination rows.
            halo: The relation.
        """
        made = Tensor._make_subclass(ShardedEdgeIndex, raw)
        made._raw, made.halo = raw, halo
        return made

    def local(self) -> Tensor:
        """The same numbers as a plain tensor."""
        return self._raw

    def as_matrix(self, values: Tensor | None, *, has_loops: bool) -> ShardedEdgeIndex:
        """The same edges in place of an adjacency matrix.

        Args:
            values: ``[num_edges, ...]`` of the matrix; None where all are 1.
            has_loops: Whether it has self loops, on any rank.
        """
        if values is None and not has_loops:
            return self
        made = ShardedEdgeIndex.make(self._raw, self.halo)
        made.matrix_values, made.is_matrix_with_loops = values, has_loops
        return made

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self[0], self[1]))

    def __deepcopy__(self, memo: Any) -> ShardedEdgeIndex:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an edge_index that spans ranks belongs to this process and its group, and is not "
            "pickled; save the model alone, and shard the data again"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class SourceIndex(Tensor):
    """Sources of edges, in local numbers: row 0 of a `ShardedEdgeIndex`, or some of it."""

    _raw: Tensor
    _flat: Tensor
    halo: SourceHalo

    @staticmethod
    def make(raw: Tensor, halo: SourceHalo, flat: Tensor | None = None) -> SourceIndex:
        """Extended rows, perhaps broadcast.

        Args:
            raw: int64, extended rows.
            halo: The relation.
            flat: ``[num_edges]``: the same before it was broadcast to the shape of ``raw``.
        """
        made = Tensor._make_subclass(SourceIndex, raw)
        made._raw, made.halo, made._flat = raw, halo, raw if flat is None else flat
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


class _SourceNumbers(Tensor):
    """What was computed with local numbers of sources: to compare and to sort, not to index."""

    _raw: Tensor

    @staticmethod
    def make(raw: Tensor) -> _SourceNumbers:
        made = Tensor._make_subclass(_SourceNumbers, raw)
        made._raw = raw
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = kwargs or {}
        indexed = [*args[1:], *given.values()]
        indexed = [i for a in indexed for i in (a if isinstance(a, tuple | list) else (a,))]
        if name in _INDEXING and any(isinstance(a, _SourceNumbers) for a in indexed):
            raise NotImplementedError(
                f"{name} with numbers that were computed from the sources of edges that span ranks "
                "would read or write rows of this rank for those of others (a dense or a sparse "
                "adjacency matrix does so); use scatter or MessagePassing with edge_index itself"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*plain(args), **plain(given))
        if isinstance(result, Tensor) and result.dtype in (torch.int64, torch.int32):
            return result if "sort" in name else _SourceNumbers.make(result)
        return result


def sharded_edges(
    edges: Mapping[CanonicalEType, LocalEdges],
    owned: Mapping[str, int],
    device: torch.device,
    policy: AggregationMode,
    group: dist.ProcessGroup | None,
    ids: Mapping[str, Tensor],
    totals: Mapping[str, int] | None = None,
) -> dict[CanonicalEType, ShardedEdgeIndex]:
    """An edge index for each relation; collective.

    Args:
        edges: This rank's edges.
        owned: Node type to this rank's nodes.
        device: Where the edges live.
        policy: How remote rows are fetched.
        group: The ranks.
        ids: Node type to the numbers of this rank's nodes in the whole graph, where they are known.
        totals: Node type to nodes of all ranks, where they are known.
    """
    structure = ShardStructure(edges, owned, owned, device, group)
    sources = list(dict.fromkeys(source for source, _, _ in edges))
    halos = [structure.union_halo(ntype) for ntype in sources]
    if policy.mode == "auto":
        num_halo = sum(halo.num_halo for halo in halos if halo is not None)
        policy = replace(policy, mode=policy.resolve(num_halo, group, device))
    cache = HaloRowCache(structure, policy.halo_dtype)
    made = {}
    for etype in edges:
        source = etype[0]
        total = (totals or {}).get(source)
        halo = SourceHalo(structure, etype, policy, cache, ids.get(source), total)
        made[etype] = ShardedEdgeIndex.make(halo.edge_index, halo)
    return made


def plain(value: Any) -> Any:
    """The value with plain tensors in place of sharded ones, also in tuples and lists."""
    if isinstance(value, ShardedEdgeIndex | SourceIndex | _SourceNumbers):
        return value._raw
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value


def _dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], ShardedEdgeIndex | SourceIndex) and _is_in_place(name):
            raise _unchangeable()
        handler = _HANDLERS.get(name)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*plain(args), **plain(kwargs))
        if name.strip("_") in _ARITHMETIC and isinstance(result, Tensor):
            return _SourceNumbers.make(result)
        return result


# -- reading at sources ----------------------------------------------------------------------------


def _getitem(func: Any, tensor: Tensor, index: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex):
        if isinstance(index, tuple | list) and list(index) == [1, 0] and type(index) is list:
            return _flip(func, tensor, 0)
        found = tensor._raw[plain(index)]
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, int):
            is_source = first in (0, -2) and found.dim() == 1
            return SourceIndex.make(found, tensor.halo) if is_source else found
        if isinstance(index, tuple) and _is_all(first) and found.dim() == 2:
            return ShardedEdgeIndex.make(found, tensor.halo)
        return found
    if isinstance(tensor, SourceIndex):
        found = tensor._raw[plain(index)]
        return SourceIndex.make(found, tensor.halo) if found.dim() == 1 else found
    if isinstance(index, SourceIndex):
        return _gather(tensor, 0, index)
    places = [i for i, part in enumerate(index) if isinstance(part, SourceIndex)]
    if len(places) == 1 and all(_is_all(part) for i, part in enumerate(index) if i not in places):
        return _gather(tensor, places[0], index[places[0]])
    if places == [0]:
        halo = index[0].halo
        _check_rows(tensor, 0, halo)
        return halo.extended(tensor)[0][plain(index)]
    raise NotImplementedError(
        "sources that may be on other ranks index the first dimension of a tensor, or one with all "
        f"of the others (got {len(index)} indices); index in two steps, rows first: "
        "x[row][:, columns]"
    )


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _index_select(
    func: Any, tensor: Tensor, dim: int, index: Any, *, out: Tensor | None = None
) -> Any:
    if isinstance(tensor, ShardedEdgeIndex):
        found = tensor._raw.index_select(dim, plain(index))
        return ShardedEdgeIndex.make(found, tensor.halo) if dim in (1, -1) else found
    if isinstance(tensor, SourceIndex):
        return SourceIndex.make(tensor._raw.index_select(dim, plain(index)), tensor.halo)
    return _gather(tensor, dim, index)


def _gather(tensor: Tensor, dim: int, index: SourceIndex) -> Tensor:
    halo, dim = index.halo, dim % max(tensor.dim(), 1)
    _check_rows(tensor, dim, halo)
    if dim == 0:
        return halo.extended(tensor)[0][index._raw]
    return halo.extended(tensor.movedim(dim, 0))[0].movedim(0, dim).index_select(dim, index._raw)


def _check_rows(tensor: Tensor, dim: int, halo: SourceHalo) -> None:
    if tensor.dim() <= dim or tensor.shape[dim] != halo.num_owned:
        raise IndexError(
            f"a tensor indexed by sources needs a row for each of this rank's {halo.num_owned} "
            f"nodes of type {halo.etype[0]!r} in dimension {dim} (got shape {tuple(tensor.shape)})"
        )


def _embedding(func: Any, index: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    return _gather(weight, 0, index) if isinstance(index, SourceIndex) else NotImplemented


def _torch_gather(func: Any, tensor: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    if not isinstance(index, SourceIndex) or isinstance(tensor, SourceIndex):
        return NotImplemented
    dim = dim % max(tensor.dim(), 1)
    _check_rows(tensor, dim, index.halo)
    rows = index.halo.extended(tensor.movedim(dim, 0))[0].movedim(0, dim)
    return func(rows, dim, index._raw, **kwargs)


# -- adding up at sources --------------------------------------------------------------------------


def _scatter_add(func: Any, out: Tensor, dim: int, index: Any, src: Tensor, **kwargs: Any) -> Any:
    if not isinstance(index, SourceIndex):
        return NotImplemented
    halo, dim = index.halo, dim % max(out.dim(), 1)
    if out.shape[dim] != halo.num_owned:
        raise IndexError(
            f"values added up at sources need a row for each of this rank's {halo.num_owned} nodes "
            f"of type {halo.etype[0]!r} in dimension {dim} (got shape {tuple(out.shape)})"
        )
    shape = (*out.shape[:dim], halo.num_extended, *out.shape[dim + 1 :])
    total = src.new_zeros(shape).index_add(dim, index._flat, src)
    summed = halo.summed_at_sources(total.movedim(dim, 0)).movedim(0, dim)
    if kwargs.get("alpha", 1) != 1:
        summed = summed * kwargs["alpha"]
    return out.add_(summed) if func.__name__.endswith("_") else out + summed


def _no_order_at_sources(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.__name__
    if name.startswith("scatter_reduce") and not isinstance(args[2], SourceIndex):
        return NotImplemented
    if name.startswith("scatter") and not any(isinstance(a, SourceIndex) for a in args):
        return NotImplemented
    raise NotImplementedError(
        f"{name} of the sources of edges that span ranks has no exact result on one rank; sums at "
        "sources (scatter_add, index_add) have one, and anything at destinations"
    )


# -- choosing, appending, turning round ------------------------------------------------------------


def _cat(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    first = next(t for t in tensors if isinstance(t, ShardedEdgeIndex | SourceIndex))
    if any(isinstance(t, ShardedEdgeIndex) and t.halo is not first.halo for t in tensors):
        raise NotImplementedError(
            "edges of several relations that span ranks are numbered each in their own way and "
            "cannot be joined to one edge_index; call a layer for each, as HeteroConv does"
        )
    return type(first).make(func(plain(list(tensors)), *args, **kwargs), first.halo)


def _stack(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if len(tensors) == 2 and dim == 0 and isinstance(tensors[1], SourceIndex):
        raise _turned()
    joined = func(plain(list(tensors)), dim, **kwargs)
    if len(tensors) == 2 and dim == 0 and isinstance(tensors[0], SourceIndex):
        return ShardedEdgeIndex.make(joined, tensors[0].halo)
    return joined


def _same_shape(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """What moves or copies, and leaves the numbers what they are."""
    if not isinstance(tensor, ShardedEdgeIndex | SourceIndex):
        return NotImplemented
    found = func(tensor._raw, *plain(args), **plain(kwargs))
    if found.dtype != torch.int64 and found.dtype != torch.int32:
        return found
    return type(tensor).make(found, tensor.halo)


def _broadcast(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, SourceIndex):
        return NotImplemented
    found = func(tensor._raw, *plain(args), **plain(kwargs))
    return SourceIndex.make(found, tensor.halo, tensor._flat)


def _unbind(func: Any, tensor: Any, dim: int = 0) -> Any:
    if not isinstance(tensor, ShardedEdgeIndex) or dim not in (0, -2):
        return NotImplemented
    return _getitem(func, tensor, 0), _getitem(func, tensor, 1)


def _flip(func: Any, tensor: Any, *dims: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, ShardedEdgeIndex):
        return NotImplemented
    axes = kwargs.get("dims", dims[0] if len(dims) == 1 else dims) if dims or kwargs else (0,)
    if tuple(axes if isinstance(axes, tuple | list) else (axes,)) not in ((0,), (-2,)):
        raise _turned()
    if tensor._raw is not tensor.halo.edge_index:
        raise _turned()
    turned = tensor.halo.reversed()
    return ShardedEdgeIndex.make(turned.edge_index, turned)


def _turned() -> NotImplementedError:
    return NotImplementedError(
        "edges that span ranks are turned round as a whole, before any are added or left out, by "
        "edge_index.flip([0]); the edges then move to the rank where they end, and values per edge "
        "do not move with them"
    )


def _no_matrix(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{func.__name__} of edges that span ranks would make a matrix of local numbers; pass "
        "edge_index to the layer as it is"
    )


def _one_row_of_numbers(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex):
        raise NotImplementedError(
            f"{func.__name__} of an edge_index that spans ranks would join numbers of sources and "
            "of destinations, of which those of sources may be on other ranks; take a row first, "
            "edge_index[0] or edge_index[1]"
        )
    return _broadcast(func, tensor, *args, **kwargs)


def _refuse_turned(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex):
        raise _turned()
    return NotImplemented


def _extreme(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """The largest number of a node, from which PyG finds how many rows a node tensor has."""
    if args or kwargs or func.__name__ == "min":
        return NotImplemented
    halo = tensor.halo
    rows = halo.num_owned
    if isinstance(tensor, ShardedEdgeIndex):
        rows = max(rows, halo.num_dst)
    return torch.tensor(rows - 1, device=tensor._raw.device)


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__iadd__", "__isub__", "__imul__", "__ifloordiv__", "__imod__")
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_", "record_stream_")


def _unchangeable() -> NotImplementedError:
    return NotImplementedError(
        "the numbers of an edge_index that spans ranks cannot be changed: they name this rank's "
        "rows; choose edges with edge_index[:, mask], and in place of to_hetero_with_bases, which "
        "adds offsets to join relations, use to_hetero or HeteroConv"
    )


def _setitem(func: Any, tensor: Any, index: Any, value: Any) -> Any:
    if isinstance(tensor, ShardedEdgeIndex | SourceIndex):
        raise _unchangeable()
    if isinstance(index, SourceIndex):
        rows = index._raw  # those of self loops are this rank's own
        if rows.numel() and int(rows.max()) >= index.halo.num_owned:
            raise NotImplementedError(
                "values cannot be set at sources that are on other ranks; add them up with "
                "scatter_add or index_add"
            )
    return NotImplemented


_HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "index_select": _index_select,
    "scatter_add": _scatter_add,
    "scatter_add_": _scatter_add,
    "index_add": _scatter_add,
    "index_add_": _scatter_add,
    "scatter": _no_order_at_sources,
    "scatter_": _no_order_at_sources,
    "scatter_reduce": _no_order_at_sources,
    "scatter_reduce_": _no_order_at_sources,
    "bincount": _no_order_at_sources,
    "unique": _no_order_at_sources,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "clone": _same_shape,
    "contiguous": _same_shape,
    "detach": _same_shape,
    "to": _same_shape,
    "long": _same_shape,
    "cpu": _same_shape,
    "cuda": _same_shape,
    "view": _one_row_of_numbers,
    "flatten": _one_row_of_numbers,
    "ravel": _one_row_of_numbers,
    "embedding": _embedding,
    "gather": _torch_gather,
    "sparse_coo_tensor": _no_matrix,
    "sparse_csr_tensor": _no_matrix,
    "sparse_csc_tensor": _no_matrix,
    "sparse_compressed_tensor": _no_matrix,
    "_convert_indices_from_coo_to_csr": _no_matrix,
    "expand": _broadcast,
    "expand_as": _broadcast,
    "unsqueeze": _broadcast,
    "reshape": _one_row_of_numbers,
    "unbind": _unbind,
    "flip": _flip,
    "flipud": _flip,
    "t": _refuse_turned,
    "transpose": _refuse_turned,
    "fliplr": _refuse_turned,
    "max": _extreme,
}

# Of local numbers; the result still orders edges, but names no row.
_ARITHMETIC = {
    *("add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply"),
    *("floordiv", "floor_divide", "mod", "remainder"),
}
_INDEXING = {
    *("__getitem__", "__setitem__", "index_select", "gather", "embedding", "bincount"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    *("index_add", "index_add_", "index_put", "index_put_", "index_copy", "index_copy_"),
}
