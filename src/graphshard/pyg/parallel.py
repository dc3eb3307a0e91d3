# SPDX-License-Identifier: Apache-2.0
"""parallelize: a model of PyG whose calls take and give whole tensors, and compute on shards.

The program around the model stays that of one process: every rank runs it on the whole data object,
and all ranks have the same outputs, losses and gradients in it. A call of the model hands each rank
the rows that it owns, and puts the ranks' results together again; backward likewise. So a gradient
with respect to a parameter is the sum of the ranks' shares of what the call did, and whatever the
program computes around it counts once.

Around a call: random states that are equal on all ranks, and differ within it; a graph that every
rank has whole, and the rows and edges of it that a rank computes; this rank's rows in place of
whole arguments, and back; and the gradients of the parameters that the call used.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._base.typing import CanonicalEType
from ..comm import agree, anchor, gather_grads, sync_params
from ..comm.collectives import all_gather, all_reduce_, all_reduce_alike, broadcast_, shared_errors
from ..comm.group import GroupState, group_state
from ..fullbatch import AggregationMode
from ..fullbatch.shard_pass import RandomState
from ..graph.convert import require
from ._edge_index import ShardedEdgeIndex, sharded_edges
from ._layers import WHOLE_EDGES, call_sharded, install
from ._norms import convert_sync_norm
from ._source_halo import NodeNumbering
from ._whole_graph import (
    Column,
    MatrixEdges,
    NodeLayout,
    OwnerMethod,
    SplitRows,
    WholeGraph,
    column_of,
    edges_of_matrix,
    find_owners,
    has_self_loops,
    is_matrix,
    names_edges,
    read_whole_graph,
)

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData


_OTHER_EDGE_SETS = 8
_MARK = "_graphshard_parallel"


def share_generators(state: GroupState) -> None:
    """Give every rank rank 0's random states, of torch, numpy and Python; collective."""
    if state.world_size == 1:
        return
    kind, keys, position, *_ = np.random.get_state()  # the old generator has a tuple
    version, numbers, _ = random.getstate()
    parts = [
        torch.get_rng_state().long(),
        torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        torch.tensor([int(position), *numbers]),
    ]
    stream = broadcast_(state, torch.cat(parts), 0, "parallelize")
    if state.rank == 0:
        return
    of_torch, of_numpy, rest = stream.split([part.numel() for part in parts])
    position, *numbers = rest.tolist()
    torch.set_rng_state(of_torch.to(torch.uint8))
    np.random.set_state((kind, of_numpy.numpy().astype(np.uint32), position, 0, 0.0))
    random.setstate((version, tuple(numbers), None))


@contextmanager
def own_draws(state: GroupState, device: torch.device, seed: int) -> Iterator[None]:
    """Random states of this rank alone; the common ones are afterwards what they were before."""
    if state.world_size == 1:
        yield
        return
    before = RandomState.capture(device)
    of_python, of_numpy = random.getstate(), np.random.get_state()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        before.restore(device)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class ParallelEdges:
    """Edges of the whole graph, which rank has which of them, and this rank's.

    ``whole`` is ``[2, num_edges]`` and copied, for the caller's may be written to; ``has_loops``
    says whether any is a self loop, on any rank.
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
    """A whole graph, who owns what, and the edge sets that calls have brought."""

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
        """
        if isinstance(value, ShardedEdgeIndex):
            return value
        if isinstance(value, Tensor):
            if not names_nodes(value):
                return value
            for edges in (*self._edge_sets.values(), *(other for _, other in self._others)):
                if edges.holds(value):
                    return edges.index
            raise NotImplementedError(
                f"a layer of a parallel model got edges of shape {tuple(value.shape)} that are "
                "neither those of the data object that parallelize was given, nor among the "
                "arguments of the call; pass them to the model"
            )
        if type(value) in (tuple, list, dict):
            return _mapped(value, self.with_own_edges)
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
        indices = sharded_edges(local, self._numberings, device, self._policy, self.state.group)
        for etype, index in indices.items():
            index.halo.own_edges = partial(self.chosen, rows=rows[etype])
        return {
            etype: ParallelEdges(ends, rows[etype], indices[etype], has_self_loops(etype, ends))
            for etype, ends in edges.items()
        }

    def edge_set(self, edges: Tensor, etype: CanonicalEType) -> ParallelEdges:
        """The set of these edges; collective where they were not seen before."""
        if self._edge_sets[etype].holds(edges):
            return self._edge_sets[etype]
        for number, (other_etype, other) in enumerate(self._others):
            if other_etype == etype and other.holds(edges):
                self._others.insert(0, self._others.pop(number))
                return other
        for row, ntype in zip(edges, (etype[0], etype[2]), strict=True):
            total = self.nodes[ntype].total
            if row.numel() and not 0 <= int(row.min()) <= int(row.max()) < total:
                raise ValueError(
                    f"an integer tensor [2, n] names edges, so its numbers must be nodes, in "
                    f"[0, {total}) (got {int(row.min())} to {int(row.max())})"
                )
        agree(f"{tuple(edges.shape)}, checksum {checksum(edges)}", "edges", self.state.group)
        with torch.inference_mode(False):
            split = self._split({etype: edges})[etype]
        self._others = [(etype, split), *self._others[: _OTHER_EDGE_SETS - 1]]
        return split

    def edges_of_matrix(self, matrix: Any, name: str, etype: CanonicalEType) -> MatrixEdges:
        """Edges and values of an ``adj_t``, a sparse matrix of torch or torch-sparse."""
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
            return _ChosenRows.apply(whole, rows, self.state)
        return Column(whole.detach()).rows(rows.own)


def joined(own: Tensor, rows: SplitRows, state: GroupState) -> Tensor:
    """The whole tensor, of which each rank has its rows; collective."""
    if state.world_size == 1:
        parts = [own]
    else:
        padded = own.new_zeros((max(rows.counts), *own.shape[1:]))
        padded[: own.shape[0]] = own
        as_bytes = padded.to(torch.uint8) if own.dtype == torch.bool else padded
        gathered = all_gather(state, as_bytes, "parallelize")
        parts = [part[:count] for part, count in zip(gathered, rows.counts, strict=True)]
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


class JoinedRows(torch.autograd.Function):
    """All rows, of which each rank has some.

    The gradient of the rows is multiplied by the number of ranks on its way into the call, because
    the gradients of parameters are averaged after it: then what the ranks computed in the call is
    summed, and what all of them computed alike outside of it counts once.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: SplitRows, gradients: SharedGradients) -> Tensor:
        ctx.rows, ctx.gradients = rows, gradients
        return joined(own, rows, gradients.state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.gradients.average_after_backward()
        own = ctx.rows.own.to(grad.device)
        return grad[own] * ctx.gradients.state.world_size, None, None


class SharedGradients:
    """Averages the gradients of a model's parameters over the ranks when a backward is done."""

    def __init__(self, model: nn.Module, state: GroupState) -> None:
        self._model, self.state, self._waits = weakref.ref(model), state, False

    def of(self, model: nn.Module) -> bool:
        """Whether it is this model's, and not that of a model it was copied from."""
        return self._model() is model

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def is_lazy(self) -> bool:
        """Whether a parameter has no shape yet."""
        return any(nn.parameter.is_lazy(p) for p in self.model.parameters())

    def average_after_backward(self) -> None:
        """Average at the end of the backward that is running, once."""
        if self.state.world_size > 1 and not self._waits:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._waits = False
        model = self._model()
        if model is None:
            return
        gather_grads(model, self.state.group)
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.requires_grad:
                parameter.grad.div_(self.state.world_size)


class RefuseReductions(TorchFunctionMode):
    """Within it, what combines the rows of all nodes or edges of this rank is an error.

    Results of a call have a row for each node, and nothing tells of such a row that a mean over
    one rank's nodes was added to it. Layers and normalisations, which know of all ranks, may.
    A tensor that has as many rows in another dimension as well is let through: nothing tells
    which are meant.

    Args:
        sizes: Numbers of nodes and edges that this rank has.
    """

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self._sizes = sizes - {1}  # which all that is broadcast has

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in _REDUCTIONS:
            combines = self._reduces(args, kwargs)
        else:
            combines = name in _SUMS_BY_INDEX and self._sums_by_index(args, kwargs)
        if combines and not _is_ours(sys._getframe(1)):
            raise NotImplementedError(
                f"{name} over the rows of a tensor within a call of a parallel model would be over "
                "the nodes or edges of one rank; compute pooled results and losses from the rows "
                "that the model gives, outside of the call, or use graphshard.pyg.shard and add "
                "up over the ranks with graphshard.comm.all_reduce"
            )
        return func(*args, **kwargs)

    def _has_rows(self, value: Any) -> bool:
        return (
            type(value) is Tensor
            and value.dim() > 0
            and value.shape[0] in self._sizes
            and self._sizes.isdisjoint(value.shape[1:])
        )

    def _reduces(self, args: Any, kwargs: Any) -> bool:
        value = args[0] if args else kwargs.get("input")
        if not self._has_rows(value) or not value.is_floating_point():
            return False
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        dims = dim if isinstance(dim, tuple | list) else (dim,)
        return any(d is None or (type(d) is int and d in (0, -value.dim())) for d in dims)

    def _sums_by_index(self, args: Any, kwargs: Any) -> bool:
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
        out, dim, index = given.get("input"), given.get("dim"), given.get("index")
        return type(out) is Tensor and self._has_rows(index) and dim in (0, -out.dim())


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a layer or a normalisation of the call runs, which combines rows of all ranks."""
    while frame is not None and frame.f_code.co_name != _PARALLEL_METHOD:
        module = frame.f_globals.get("__name__", "")
        is_ours = module.startswith("graphshard.") and module != __name__
        if is_ours and frame.f_code.co_name not in _AROUND_PYG:
            return True
        frame = frame.f_back
    return False


_PARALLEL_METHOD = "parallel_method"
_AROUND_PYG = ("call", "_checked_call")
"""Functions of this package that aggregations and pools of PyG are called by, of any rows."""
_REDUCTIONS = {
    *("sum", "mean", "prod", "max", "min", "amax", "amin", "median", "std", "var", "std_mean"),
    *("var_mean", "logsumexp", "softmax", "log_softmax", "cumsum", "nansum", "nanmean"),
}
_SUMS_BY_INDEX = {"scatter_add", "scatter_reduce", "index_add", "index_reduce"}


class ParallelCall:
    """The arguments of one call with this rank's rows in place of whole tensors.

    Args:
        function: What is called; its parameters have names.
        data: The data object that was split, of which the model may read more than it is given;
            None if it is gone.
    """

    def __init__(
        self, graph: ParallelGraph, function: Any, args: Any, kwargs: dict[str, Any], data: Any
    ) -> None:
        self._graph, self._data = graph, data
        self._sets: list[tuple[CanonicalEType, ParallelEdges]] = []
        self._inputs: list[Tensor] = []
        names = list(inspect.signature(function).parameters)[1:]
        named = [*zip(names, args, strict=False), *kwargs.items()]
        for name, value in named:
            self._find_edges(value, name, None)
        self._find_edges(data, "data", None)
        if not self._sets:
            raise ValueError(
                f"a call on a graph that spans ranks needs edges among its arguments (got "
                f"{', '.join(names) or 'none'}); pass edge_index, or the data object, to the model"
            )
        names += [""] * (len(args) - len(names))
        self.args = [self._argument(value, name) for name, value in zip(names, args, strict=False)]
        self.kwargs = {name: self._argument(value, name) for name, value in kwargs.items()}
        self._own_data: Any = None if data is None else self._of_data(data)

    @contextmanager
    def own_rows_of_data(self) -> Iterator[None]:
        """The data object has this rank's rows for a while, for models that read it themselves."""
        if self._data is None:
            yield
            return
        stores: list[tuple[Any, Any]] = [(s, s.to_dict()) for s in self._data.stores]
        for (store, _), own in zip(stores, self._own_data.stores, strict=True):
            store.update(own.to_dict())
        try:
            yield
        finally:
            for store, whole in stores:
                for name in [name for name in store.keys() if name not in whole]:  # noqa: SIM118
                    del store[name]
                store.update(whole)

    def refusing_reductions(self) -> AbstractContextManager[Any]:
        """Context in which what combines the rows of one rank is an error."""
        if self._graph.state.world_size == 1:
            return nullcontext()
        rows = [*self._graph.nodes.values(), *self._edge_rows(None)]
        return RefuseReductions({split.own.numel() for split in rows})

    def _items(self, value: Any, name: str, key: Any) -> list[tuple[Any, str, Any]]:
        """What a container has: values, their names, their types of nodes or edges."""
        if isinstance(value, tuple | list):
            return [(item, name, key) for item in value]
        if isinstance(value, Mapping):
            kinds = {*self._graph.nodes, *self._graph.etypes}
            return [
                (item, name, k) if k in kinds else (item, str(k), key) for k, item in value.items()
            ]
        if hasattr(value, "stores") and hasattr(value, "to_dict"):
            return [(item, k, store._key) for store in value.stores for k, item in store.items()]
        return []

    def _find_edges(self, value: Any, name: str, key: Any) -> None:
        if isinstance(value, ShardedEdgeIndex):
            raise ValueError(
                "a parallel model takes the whole graph, and shards it; pass the edge_index of the "
                "data object that parallelize was given"
            )
        if self._is_adjacency(value, name, key):
            etype = self._etype(key, name)
            ends, _ = self._graph.edges_of_matrix(value, name or "an argument", etype)
            self._sets.append((etype, self._graph.edge_set(ends, etype)))
        elif isinstance(value, Tensor):
            if names_nodes(value):
                etype = self._etype(key, name)
                self._sets.append((etype, self._graph.edge_set(value, etype)))
            return
        for item, inner, its_key in self._items(value, name, key):
            self._find_edges(item, inner, its_key)

    def _is_adjacency(self, value: Any, name: str, key: Any) -> bool:
        """Whether a value is a sparse adjacency matrix, and not sparse features."""
        if not is_matrix(value):
            return False
        if key in self._graph.etypes or not isinstance(value, Tensor) or value.dim() < 2:
            return True
        if "adj" in name or "edge" in name:
            return True
        is_feature = key in self._graph.nodes or name.startswith("x") or "feat" in name
        return not is_feature and value.shape[0] == value.shape[1]

    def _etype(self, key: Any, name: str) -> CanonicalEType:
        if isinstance(key, tuple) and key in self._graph.etypes:
            return key
        if len(self._graph.etypes) == 1:
            return self._graph.etypes[0]
        # As edge_label_index, which RandomLinkSplit gives one relation.
        stores = [] if self._data is None or not name else self._data.edge_stores
        having = [store._key for store in stores if name in store]
        if len(having) == 1 and having[0] in self._graph.etypes:
            return having[0]
        raise ValueError(
            f"{name or 'an argument'} names edges of an unknown relation; pass a dictionary with "
            "the relation as key, as data.edge_index_dict is, or set it on its relation of the "
            "data object, under the name that it has in the model"
        )

    def _of(self, value: Any, name: str, key: Any) -> Any:
        if self._is_adjacency(value, name, key):
            etype = self._etype(key, name)
            ends, values = self._graph.edges_of_matrix(value, name, etype)
            edges = self._graph.edge_set(ends, etype)
            if values is not None:
                values = self._chosen(values, edges.rows)
            return edges.index.as_matrix(values, has_loops=edges.has_loops)
        if isinstance(value, Tensor):
            if names_nodes(value):
                return self._graph.edge_set(value, self._etype(key, name)).index
            rows = self._rows(value, name, key)
            return value if rows is None else self._chosen(value, rows)
        if isinstance(value, tuple | list | Mapping):
            items = iter(self._items(value, name, key))
            return _mapped(value, lambda _: self._of(*next(items)))
        if hasattr(value, "stores") and hasattr(value, "to_dict"):
            return self._of_data(value)
        return value

    def _chosen(self, whole: Tensor, rows: SplitRows) -> Tensor:
        """This rank's rows; on all ranks the backward has to reach them."""
        own = self._graph.chosen(whole, rows)
        if own.requires_grad:
            self._inputs.append(own)
        return own

    def _argument(self, value: Any, name: str) -> Any:
        """What takes the place of an argument.

        Numbers of nodes that may be more than a mask, an order of nodes, are refused.
        """
        is_index = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        says_nodes = re.search(r"mask|(^|_)(idx|index|ids?|indices|nodes)$", name) is not None
        if not is_index or value.dim() != 1 or not says_nodes:
            return self._of(value, name, None)
        if self._rows(value, name, None) is not None:
            return self._of(value, name, None)
        nodes = list(self._graph.nodes.values())
        if "mask" not in name or len(nodes) > 1:
            raise NotImplementedError(
                f"{name} of shape {tuple(value.shape)} has numbers of nodes of the whole graph, "
                "of which a rank computes some; index what the model gives, or pass a mask with an "
                "entry for each node"
            )
        mask = torch.zeros(nodes[0].total, dtype=torch.bool, device=value.device)
        mask[value] = True
        return self._graph.chosen(mask, nodes[0])

    def _of_data(self, data: Any) -> Any:
        own, nodes = copy.copy(data), self._graph.nodes
        is_plain = not hasattr(data, "node_types")  # whose only store has no key
        for store in own.stores:
            ntype = next(iter(nodes)) if is_plain else store._key
            for name, value in list(store.items()):
                store[name] = self._of_store(own, store, name, value)
            if ntype in nodes and (is_plain or "num_nodes" in store):
                store.num_nodes = nodes[ntype].own.numel()
        return own

    def _of_store(self, data: Any, store: Any, name: str, value: Any) -> Any:
        """A value of a data object; lists and arrays travel with their nodes or edges, too."""
        if isinstance(value, list | tuple | np.ndarray) and not names_edges(name):
            is_plain = not hasattr(data, "node_types")
            nodes = next(iter(self._graph.nodes.values())) if is_plain else None
            nodes = self._graph.nodes.get(store._key, nodes)
            edges = next(iter(self._edge_rows(None if is_plain else store._key)), None)
            column = column_of(
                data,
                store,
                name,
                value,
                None if nodes is None else nodes.total,
                None if edges is None else edges.total,
            )
            if column is not None:
                rows = nodes if column[0] == "node" else edges
                assert rows is not None
                return column[1].rows(rows.own)
        return self._of(value, name, store._key)

    def _edge_rows(self, etype: Any) -> list[SplitRows]:
        """Rows of the edge sets that the call brings of a relation; None is all relations."""
        return [edges.rows for key, edges in self._sets if etype in (None, key)]

    def _rows(self, value: Tensor, name: str, key: Any) -> SplitRows | None:
        """How the rows of an argument are split; None for what has no row per node or edge."""
        count = value.shape[0] if value.dim() else -1
        nodes = self._graph.nodes
        if key in nodes:
            return nodes[key] if nodes[key].total == count else None
        of_edges = next((rows for rows in self._edge_rows(key) if rows.total == count), None)
        if key is not None or (of_edges is not None and "edge" in name):
            return of_edges
        of_nodes = [rows for rows in nodes.values() if rows.total == count]
        if len(of_nodes) > 1:
            raise ValueError(
                f"{name or 'an argument'} of shape {tuple(value.shape)} has as many rows as two "
                "node types; pass a dictionary with the node type as key"
            )
        return of_nodes[0] if of_nodes else of_edges

    # ------------------------------------------------------------------ results

    def gathered_state(
        self, before: Mapping[tuple[nn.Module, str], Any], gradients: SharedGradients
    ) -> dict[tuple[nn.Module, str], tuple[Tensor, Tensor]]:
        """Whole tensors where the call has set attributes of modules to this rank's rows.

        As VGAE's ``encode`` does, for a loss that is computed after it. Collective. ``before`` is
        `tensors_of` the model before the call.

        Returns:
            Module and name to the whole tensor, which is set now, and this rank's rows.
        """
        changed = [
            (attribute, value)
            for attribute, value in tensors_of(gradients.model)
            if before.get(attribute) is not value
        ]
        rows = self._fitting([(value, None) for _, value in changed])
        gathered = {}
        for ((module, name), own), split in zip(changed, rows, strict=True):
            if split is not None:
                whole = self._whole(own, split, gradients)
                setattr(module, name, whole)
                gathered[module, name] = whole, own
            elif own.requires_grad:
                raise self._not_rows(own, f"kept in {type(module).__name__}.{name}, ")
        return gathered

    def gathered(self, out: Any, gradients: SharedGradients) -> Any:
        """What the call gave, with whole tensors in place of this rank's rows; collective."""
        tensors = list(self._tensors_in(out, None))
        whole = []
        for (tensor, _), rows in zip(tensors, self._fitting(tensors), strict=True):
            if rows is None:
                raise self._not_rows(tensor, "")
            whole.append(self._whole(tensor, rows, gradients))
        return self._put(out, iter(whole)) if tensors else out

    def _fitting(self, tensors: Sequence[tuple[Tensor, Any]]) -> list[SplitRows | None]:
        """What the rows of each tensor are, on all ranks, by its type; collective."""
        if not tensors:
            return []
        choices = [self._choices(key) for _, key in tensors]
        fits = torch.tensor(
            [
                [tensor.dim() > 0 and tensor.shape[0] == rows.own.numel() for rows in some]
                + [False] * (max(map(len, choices)) - len(some))
                for (tensor, _), some in zip(tensors, choices, strict=True)
            ],
            dtype=torch.uint8,
        )
        all_reduce_(self._graph.state, fits, dist.ReduceOp.MIN, "parallelize", "agree")
        return [
            next((rows for rows, good in zip(some, fitting, strict=False) if good), None)
            for some, fitting in zip(choices, fits.bool().tolist(), strict=True)
        ]

    def _not_rows(self, tensor: Tensor, where: str) -> NotImplementedError:
        return NotImplementedError(
            f"a call of a parallel model gave a tensor of shape {tuple(tensor.shape)}, {where}"
            "without a row for each node or edge of this rank, which cannot be put "
            "together; compute pooled results and losses from the rows, outside of the "
            "call, and have the model take tensors from its arguments or from the data "
            "object that parallelize was given, because others are whole within a call"
        )

    def _choices(self, key: Any) -> list[SplitRows]:
        nodes = self._graph.nodes
        if key in nodes:
            return [nodes[key]]
        return [*([] if key else nodes.values()), *self._edge_rows(key)]

    def _whole(self, own: Tensor, rows: SplitRows, gradients: SharedGradients) -> Tensor:
        if not own.requires_grad:
            return joined(own, rows, self._graph.state)
        # A rank without nodes may not have used an input; its gradient is put together by all.
        own = anchor(own, *self._inputs) if self._inputs else own
        return JoinedRows.apply(own, rows, gradients)

    def _tensors_in(self, value: Any, key: Any) -> Iterator[tuple[Tensor, Any]]:
        """Tensors in a result, with their types of nodes or edges."""
        if isinstance(value, Tensor):
            yield value, key
        for item, _, its_key in self._items(value, "", key):
            yield from self._tensors_in(item, its_key)

    def _put(self, value: Any, whole: Iterator[Tensor]) -> Any:
        if isinstance(value, Tensor):
            return next(whole)
        if isinstance(value, tuple | list | Mapping):
            return _mapped(value, lambda item: self._put(item, whole))
        return value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A container of the same kind with other items: a tuple, named or not, a list, a mapping."""
    if isinstance(value, Mapping):
        return {key: function(item) for key, item in value.items()}
    items = [function(item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def tensors_of(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Module and name of the tensors that a model keeps as plain attributes.

    What a layer keeps is its cache, for its next call.
    """
    for module in model.modules():
        if not hasattr(module, "propagate"):
            for name, value in list(vars(module).items()):
                if type(value) is Tensor:
                    yield (module, name), value


def parallelize(
    model: nn.Module,
    data: Data | HeteroData,
    part_method: OwnerMethod = "metis",
    *,
    methods: Sequence[str] = ("forward",),
    mode: str = "auto",
    rematerialize: bool = True,
    memory_budget: int | None = None,
    row_width: int = 256,
    prefetch: int = 1,
    halo_dtype: torch.dtype | None = None,
    partial_sums: bool = True,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Have a model's calls computed by all ranks together; the program around it stays as it is.

    ``model(data.x, data.edge_index)`` takes the whole tensors of ``data`` as before, each rank
    computes the rows of its own nodes, and every rank gets those of all nodes. Losses, accuracies
    and early stopping that follow are the same on all ranks, and those of one process. After
    ``backward`` each parameter has the gradient that it has in one process, on every rank; use no
    DistributedDataParallel besides. Every rank must call, and must run the same program.

    While a call runs, ``data`` itself has this rank's rows, so that a model may read what it is not
    given, as ``forward(self)`` with ``data.x`` in it does. Among the arguments of a call, tensors
    with a row per node or per edge are known by their number of rows, any integer tensor ``[2, n]``
    names edges, so ``edge_label_index`` may be one, and so does a sparse matrix that is square and
    not called ``x``, as ``adj_t``; results must have a row per node or per edge as well. Edges are
    cut by the rank of their
    destination. Normalisations over nodes get the statistics of all ranks (`convert_sync_norm`),
    parameters and the states of the random generators become those of rank 0; draws within a call
    differ between ranks.

    Where no machine can hold the data, or the results of all nodes, use `shard`. Arguments that are
    not described here are its arguments.

    Args:
        model: Any model whose layers `shard` supports; it is changed, and returned. It may have
            been through ``torch.compile``, or go through it afterwards.
        data: The whole graph, the same on every rank; what the calls get is taken from it.
        methods: The model's methods that are computed so, as ``("encode", "decode")``. Others run
            as they are, in full on every rank.

    Returns:
        The model, or what took its place if it is a normalisation itself.

    Raises:
        ImportError: PyG is not installed (the extra ``graphshard[pyg]``).
        TypeError: On every rank, if ``data`` is no PyG data object.
        ValueError: On every rank, if ranks have different data or options, if an argument is wrong
            on any, or if the model is parallel already. A call raises it if it gets no edges.
        AttributeError: The model has no such method.
        NotImplementedError: A call gives tensors without a row per node or edge, or the model holds
            what has no exact result on shards.
        MetisError: On every rank, if METIS fails.

    Example:
        >>> import torch, graphshard
        >>> from torch_geometric.data import Data
        >>> from torch_geometric.nn import GCN
        >>> data = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> model = graphshard.pyg.parallelize(GCN(3, 8, 2, 4), data)
        >>> model(data.x, data.edge_index).shape
        torch.Size([3, 4])
    """
    require("torch_geometric.data", "graphshard[pyg]", "graphshard.pyg.parallelize")
    policy = AggregationMode(
        mode=mode,  # type: ignore[arg-type]
        rematerialize=rematerialize,
        memory_budget=memory_budget,
        row_width=row_width,
        prefetch=prefetch,
        halo_dtype=halo_dtype,
        partial_sums=partial_sums,
    )
    compiled = getattr(model, "_orig_mod", None)  # of what torch.compile returns
    result, model = model, model if compiled is None else compiled
    for name in methods:
        getattr(model, name)
    state = group_state(group)
    policy.agree(group)
    with shared_errors(state.group):
        if vars(model).get(_MARK):
            raise ValueError("the model is parallel already; call parallelize once")
        whole = read_whole_graph(data)
    checksums = "; ".join(data_checksums(whole))
    agree(
        f"{whole.fingerprint()}; {checksums}",
        "the data object (seed what makes it: splits and features that are drawn at random)",
        state.group,
    )
    install()
    graph = ParallelGraph(whole, find_owners(whole, part_method, seed, state), policy, state)
    model = convert_sync_norm(model, group)
    result = model if compiled is None else result
    share_generators(state)
    gradients = SharedGradients(model, state)
    if not gradients.is_lazy:
        sync_params(model, group)
    vars(model)[_MARK] = True
    for name in methods:
        method = _parallel_method(name, graph, gradients, weakref.ref(data))
        setattr(model, name, MethodType(method, model))
    return result


def _parallel_method(
    name: str, graph: ParallelGraph, gradients: SharedGradients, data: weakref.ref[Any]
) -> Any:
    """The method of a model's class, on shards; its caller binds it."""
    conv = require("torch_geometric.nn.conv", "graphshard[pyg]", "parallelize")
    message_passing = conv.MessagePassing
    calls = itertools.count(checksum(torch.get_rng_state()))  # equal on all ranks
    #: What calls have left in attributes of modules: the whole tensor, and this rank's rows of it.
    attributes: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}

    def parallel_method(model: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(type(model), name)
        if graph.is_computing:  # called by another such method, which has this rank's rows
            return function(model, *args, **kwargs)
        call = ParallelCall(graph, function, args, kwargs, data())
        here = gradients if gradients.of(model) else SharedGradients(model, graph.state)
        was_lazy = here.is_lazy
        seed = next(calls) * graph.state.world_size + graph.state.rank
        # New parameters are drawn as one process would draw them.
        draws = nullcontext() if was_lazy else own_draws(graph.state, graph.device, seed)
        for (module, attribute), (whole, own) in attributes.items():
            if getattr(module, attribute, None) is whole:
                setattr(module, attribute, own)
        before = dict(tensors_of(model))
        with draws, graph.computing(model), call.own_rows_of_data(), call.refusing_reductions():
            if name == "forward" and isinstance(model, message_passing):
                out = call_sharded(model, call.args, call.kwargs, function)
            else:
                out = function(model, *call.args, **call.kwargs)
        if was_lazy:
            share_generators(graph.state)
        if was_lazy and not here.is_lazy and not _are_alike(model, graph):
            sync_params(model, graph.state.group)
        attributes.update(call.gathered_state(before, here))
        return call.gathered(out, here)

    return torch.compiler.disable(parallel_method)  # it cannot look into an exchange between ranks


def _are_alike(model: nn.Module, graph: ParallelGraph) -> bool:
    """Whether all ranks have the same parameters; collective.

    Those that were drawn in a call are, unless what was drawn before them, as dropout, has a row
    per node. Then nothing is written to them, which the backward of the call could not have.
    """
    values = [checksum(value) for value in model.state_dict().values()]
    bounds = torch.tensor([*values, *(-value for value in values)])
    most = all_reduce_alike(bounds, "max", group=graph.state.group)
    return torch.equal(most[: len(values)], -most[len(values) :])


def data_checksums(whole: WholeGraph) -> Iterator[str]:
    """A line for each value of the data that can be compared between processes."""
    columns = [*whole.nodes.values(), *whole.edge_columns.values()]
    stores = [{name: column.value for name, column in of.items()} for of in columns]
    matrices = [{"adj_t": values} for values in whole.weights.values()]
    for store in [*stores, *whole.others.values(), *matrices]:
        for name, value in sorted(store.items()):
            if isinstance(value, Tensor):
                if value.layout != torch.strided:
                    value = value.to_sparse_coo().coalesce()
                    value = torch.cat([value.values().flatten(), value.indices().flatten()])
                yield f"{name} {tuple(value.shape)} {checksum(value)}"
            elif isinstance(value, list | tuple) and all(isinstance(v, str | int) for v in value):
                yield f"{name} {len(value)} {zlib.crc32(repr(value).encode())}"
