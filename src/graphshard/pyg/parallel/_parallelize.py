# SPDX-License-Identifier: Apache-2.0
"""parallelize: a model of PyG whose calls take and give whole tensors, and compute on shards.

The program around the model stays that of one process: every rank runs it on the whole data object,
and all ranks have the same outputs, losses and gradients in it. A call of the model hands each rank
the rows that it owns, and puts the ranks' results together again; backward likewise. So a gradient
with respect to a parameter is the sum of the ranks' shares of what the call did, and whatever the
program computes around it counts once.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...comm import agree, all_reduce, share_error, sync_params
from ...comm.group import group_state
from ...fullbatch import AggregationMode
from ...graph.convert import require
from .._layers import call_sharded, install
from .._norms import convert_sync_norm
from .._whole_graph import WholeGraph, find_owners, read_whole_graph
from ._call import ParallelCall, tensors_of
from ._generators import own_draws, share_generators
from ._gradients import SharedGradients
from ._split_graph import ParallelGraph, checksum

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

_MARK = "_graphshard_parallel"


def parallelize(
    model: nn.Module,
    data: Data | HeteroData,
    part_method: str | Tensor | Mapping[str, Tensor] = "metis",
    *,
    methods: Sequence[str] = ("forward",),
    mode: str = "auto",
    rematerialize: bool = True,
    memory_budget: int | None = None,
    row_width: int = 256,
    prefetch: int = 1,
    halo_dtype: torch.dtype | None = None,
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

    Where no machine can hold the data, or the results of all nodes, use `shard`.

    Args:
        model: Any model whose layers `shard` supports; it is changed, and returned. It may have
            been through ``torch.compile``, or go through it afterwards.
        data: The whole graph, the same on every rank; what the calls get is taken from it.
        part_method: See `shard`.
        methods: The model's methods that are computed so, as ``("encode", "decode")``. Others run
            as they are, in full on every rank.
        mode: See `shard`.
        rematerialize: See `shard`.
        memory_budget: See `shard`.
        row_width: See `shard`.
        prefetch: See `shard`.
        halo_dtype: See `shard`.
        seed: Of METIS and of the random assignment.
        group: The ranks; None is the default group, or this process alone.

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
    )
    compiled = getattr(model, "_orig_mod", None)  # of what torch.compile returns
    result, model = model, model if compiled is None else compiled
    for name in methods:
        getattr(model, name)
    state = group_state(group)
    policy.agree(group)
    error: Exception | None = None
    whole: WholeGraph | None = None
    try:
        if vars(model).get(_MARK):
            raise ValueError("the model is parallel already; call parallelize once")
        whole = read_whole_graph(data)
    except (TypeError, ValueError) as caught:
        error = caught
    share_error(error, state.group)
    assert whole is not None
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
    calls = itertools.count(checksum(torch.get_rng_state()))  # equal on all ranks
    #: What calls have left in attributes of modules: the whole tensor, and this rank's rows of it.
    kept: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}

    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(type(model), name)
        if graph.is_computing:  # called by another such method, which has this rank's rows
            return function(model, *args, **kwargs)
        call = ParallelCall(graph, function, args, kwargs, data())
        here = gradients if gradients.of(model) else SharedGradients(model, graph.state)
        was_lazy = here.is_lazy
        seed = next(calls) * graph.state.world_size + graph.state.rank
        # New parameters are drawn as one process would draw them.
        draws = nullcontext() if was_lazy else own_draws(graph.state, graph.device, seed)
        for (module, attribute), (whole, own) in kept.items():
            if getattr(module, attribute, None) is whole:
                setattr(module, attribute, own)
        before = dict(tensors_of(model))
        with draws, graph.computing(model), call.own_rows_of_data():
            if name == "forward" and isinstance(model, _message_passing()):
                out = call_sharded(model, call.args, call.kwargs, function)
            else:
                out = function(model, *call.args, **call.kwargs)
        if was_lazy:
            share_generators(graph.state)
        if was_lazy and not here.is_lazy and not _are_alike(model, graph):
            sync_params(model, graph.state.group)
        kept.update(call.gathered_state(before, here))
        return call.gathered(out, here)

    return torch.compiler.disable(method)  # it cannot look into an exchange between ranks


def _are_alike(model: nn.Module, graph: ParallelGraph) -> bool:
    """Whether all ranks have the same parameters; collective.

    Those that were drawn in a call are, unless what was drawn before them, as dropout, has a row
    per node. Then nothing is written to them, which the backward of the call could not have.
    """
    values = [checksum(value) for value in model.state_dict().values()]
    bounds = torch.tensor([*values, *(-value for value in values)])
    most = all_reduce(bounds, "max", group=graph.state.group)
    return torch.equal(most[: len(values)], -most[len(values) :])


def _message_passing() -> Any:
    """PyG's base of layers."""
    return require("torch_geometric.nn.conv", "graphshard[pyg]", "parallelize").MessagePassing


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
