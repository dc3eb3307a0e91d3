# SPDX-License-Identifier: Apache-2.0
"""shard: one rank's rows of a PyG data object, with an ``edge_index`` that spans the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, CanonicalEType
from ..comm import agree
from ..comm.collectives import shared_errors
from ..comm.group import GroupState, group_state
from ..fullbatch import AggregationMode, PartitionData, load_dgl_partition_data
from ..fullbatch.topology import LocalEdges, agree_on_build
from ..graph.convert import require
from ._edge_index import ShardedEdgeIndex, sharded_edges
from ._layers import install
from ._source_halo import NodeNumbering
from ._whole_graph import (
    ONLY_TYPE,
    NodeLayout,
    OwnerMethod,
    find_owners,
    has_self_loops,
    read_whole_graph,
)

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

_PYG_NAMES = {"feat": "x", "label": "y"}  # as graphshard.data.from_pyg has them, the other way


@dataclass
class _OwnRows:
    """What one rank holds: its edges, and the columns of its own nodes and edges.

    Args:
        owned: Node type to the number of own nodes.
        edges: Relation to own edges, by destination.
        others: Node type, relation, or None for the whole graph, to what has no such rows.
        matrices: Relation that has an ``adj_t`` and no ``edge_index`` to the values at own edges,
            None for ones, and whether it has self loops, on any rank.
    """

    owned: dict[str, int]
    edges: dict[CanonicalEType, LocalEdges]
    nodes: dict[str, dict[str, Any]]
    edge_columns: dict[CanonicalEType, dict[str, Any]]
    device: torch.device
    others: dict[Any, dict[str, Any]] = field(default_factory=dict)
    matrices: dict[CanonicalEType, tuple[Tensor | None, bool]] = field(default_factory=dict)
    is_typed: bool = False


def shard(
    data: Data | HeteroData | PartitionData | str | Path,
    part_method: OwnerMethod = "metis",
    *,
    mode: str = "auto",
    rematerialize: bool = True,
    memory_budget: int | None = None,
    row_width: int = 256,
    prefetch: int = 1,
    halo_dtype: torch.dtype | None = None,
    partial_sums: bool = True,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Data | HeteroData:
    """This rank's part of a graph, as PyG's data object; every rank must call.

    Layers and models of PyG run on the result as they are, and every rank gets the rows of its own
    nodes of what one process would compute on the whole graph: ``model(data.x, data.edge_index)``.
    Gradients of parameters are shares: add them up with `graphshard.gather_grads`, or wrap the
    model in DistributedDataParallel, which averages them.

    Node tensors keep the rows of the nodes that this rank owns, in their order in the whole graph;
    ``n_id`` has their ids. An edge lives with its destination; ``e_id`` has the ids of the edges
    here, which come by destination. Lists, tuples and NumPy arrays with an entry per node or edge
    are cut alike, and so are rows of sparse tensors. Attributes that are neither go over as they
    are, those of the whole graph and of a type; but lists of nodes or edges other than
    ``edge_index`` are left out, because their numbers are those of the whole graph. In place of an
    ``adj_t``, as ``ToSparseTensor`` makes it, comes an edge index that layers take as well, under
    both names.

    Args:
        data: The whole graph, the same on every rank; or one part of a partition folder, as
            `graphshard.load_dgl_partition_data` gives it or by the path of its JSON. From a folder,
            ``feat`` becomes ``x`` and ``label`` becomes ``y``.
        part_method: ``"metis"``, ``"random"``, or the rank of every node: an integer tensor
            ``[num_nodes]``, a dictionary of them by node type for ``HeteroData``. Rank 0's counts.
            Not used with a partition folder.
        mode: ``"oneshot"``: remote rows are kept for the backward. ``"sequential"``: nothing
            remote is kept, nor messages: rows of one rank are here at a time where a kernel sums or
            attends; other layers compute a piece of the destinations at a time, with the rows of
            all ranks, and again in the backward. ``"auto"`` is the first if the halo fits on every
            rank.
        rematerialize: In sequential mode, fetch again in the backward; False keeps what was fetched
            and computed, as one-shot mode does.
        memory_budget: For ``"auto"``: bytes that one rank's halo rows may take; see
            `graphshard.construct_full_graph`.
        row_width: For ``"auto"``: columns of the widest row that will be exchanged.
        prefetch: In sequential mode, ranks whose rows are fetched while those of another are
            computed; 0 waits for each.
        halo_dtype: The dtype in which wider remote rows travel, bfloat16, float16 or int8 (with a
            scale for each row); None is their own.
        partial_sums: Send sums of rows, or of attention states of destinations, in place of rows
            where these are fewer.
        seed: Of METIS and of the random assignment.
        group: The ranks that share the graph; None is the default group, or this process alone.

    Returns:
        ``Data`` or ``HeteroData``, whose edge indices are `ShardedEdgeIndex`.

    Raises:
        ImportError: PyG is not installed (the extra ``graphshard[pyg]``).
        TypeError: On every rank, if ``data`` is nothing of the above.
        ValueError: On every rank, if ranks have different graphs or options, or an argument is
            wrong on any.
        PartitionFormatError: The partition folder cannot be read.
        MetisError: On every rank, if METIS fails.
    """
    require("torch_geometric.data", "graphshard[pyg]", "graphshard.pyg.shard")
    policy = AggregationMode(
        mode=mode,  # type: ignore[arg-type]
        rematerialize=rematerialize,
        memory_budget=memory_budget,
        row_width=row_width,
        prefetch=prefetch,
        halo_dtype=halo_dtype,
        partial_sums=partial_sums,
    )
    state = group_state(group)
    if isinstance(data, PartitionData):
        data.check_num_ranks(state.world_size)
    policy.agree(group)
    if isinstance(data, str | Path | PartitionData):
        part = _from_folder(data, state)
    else:
        part = _from_whole(data, part_method, seed, state)
    install()
    nodes = {
        ntype: NodeNumbering(count, part.nodes[ntype].get("n_id"), group)
        for ntype, count in part.owned.items()
    }
    indices = sharded_edges(part.edges, nodes, part.device, policy, group)
    structure = next(iter(indices.values())).halo.structure
    for columns in [*part.nodes.values(), *part.edge_columns.values()]:
        structure.constants.mark(rows for rows in columns.values() if isinstance(rows, Tensor))
    return _data_of(part, indices)


def _data_of(
    part: _OwnRows, indices: Mapping[CanonicalEType, ShardedEdgeIndex]
) -> Data | HeteroData:
    pyg = require("torch_geometric.data", "graphshard[pyg]", "graphshard.pyg.shard")
    data = pyg.HeteroData() if part.is_typed else pyg.Data()
    for kind, values in part.others.items():
        _set(data if kind is None else data[kind], values)
    for ntype, count in part.owned.items():
        store = data[ntype] if part.is_typed else data
        _set(store, part.nodes[ntype])
        store.num_nodes = count
    for etype, index in indices.items():
        store = data[etype] if part.is_typed else data
        store.edge_index = index
        if etype in part.matrices:
            of_edges, has_loops = part.matrices[etype]
            store.adj_t = index.as_matrix(of_edges, has_loops=has_loops)
        _set(store, part.edge_columns[etype])
    return data


def _set(store: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        store[name] = value


# -- from a partition folder -----------------------------------------------------------------------


def _from_folder(data: str | Path | PartitionData, state: GroupState) -> _OwnRows:
    error: Exception | None = None
    loaded: PartitionData | None = None
    try:
        loaded = (
            data if isinstance(data, PartitionData) else load_dgl_partition_data(data, state.rank)
        )
        if loaded.num_parts != state.world_size or loaded.rank != state.rank:
            raise ValueError(
                f"part {loaded.rank} of {loaded.num_parts} came to rank {state.rank} of "
                f"{state.world_size}; start as many ranks as there are parts, and give each its own"
            )
    except (ValueError, OSError) as caught:
        error = caught
    agree_on_build(None if loaded is None else loaded.build, error, state.group)
    assert loaded is not None
    owned = {t: loaded.num_owned(t) for t in loaded.node_type_names}
    edges = {
        etype: LocalEdges(e.src_part, e.src, e.dst, owned[etype[2]])
        for etype, e in loaded.edges.items()
    }
    if len(edges) == 1 and len(owned) == 1:  # PyG has no name for the only type
        (etype,) = edges
        edges, owned = {DEFAULT_CANONICAL_ETYPE: edges[etype]}, {ONLY_TYPE: owned[etype[0]]}
        nodes = {ONLY_TYPE: _columns(loaded.node_features, etype[0], "n_id")}
        columns = {DEFAULT_CANONICAL_ETYPE: _columns(loaded.edge_features, ":".join(etype), "e_id")}
        return _OwnRows(owned, edges, nodes, columns, loaded.device)
    nodes = {t: _columns(loaded.node_features, t, "n_id") for t in owned}
    columns = {t: _columns(loaded.edge_features, ":".join(t), "e_id") for t in edges}
    return _OwnRows(owned, edges, nodes, columns, loaded.device, is_typed=True)


def _columns(features: Mapping[str, Tensor], of: str, ids: str) -> dict[str, Any]:
    names = {**_PYG_NAMES, "orig_id": ids}
    columns = {}
    for key, value in features.items():
        owner, _, name = key.rpartition("/")
        if owner == of:
            columns[names.get(name, name)] = value
    return columns


# -- from a whole graph ----------------------------------------------------------------------------


def _from_whole(data: Any, part_method: OwnerMethod, seed: int, state: GroupState) -> _OwnRows:
    with shared_errors(state.group):
        whole = read_whole_graph(data)
    agree(whole.fingerprint(), "the graph that is sharded", state.group)
    layout = NodeLayout(find_owners(whole, part_method, seed, state), state)
    edges, columns, matrices = {}, {}, {}
    device = next((e.device for e in whole.edges.values()), torch.device("cpu"))
    for etype, ends in whole.edges.items():
        here = layout.split_edges(etype, ends).own
        edges[etype] = layout.local_edges(etype, ends, here)
        columns[etype] = {
            name: column.rows(here) for name, column in whole.edge_columns[etype].items()
        } | {"e_id": here.to(device)}
        if etype in whole.weights:
            values = whole.weights[etype]
            values = None if values is None else values[here.to(values.device)]
            matrices[etype] = values, has_self_loops(etype, ends)
    nodes = {
        ntype: {name: column.rows(rows.own) for name, column in whole.nodes[ntype].items()}
        | {"n_id": rows.own.to(device)}
        for ntype, rows in layout.rows.items()
    }
    owned = {ntype: rows.own.numel() for ntype, rows in layout.rows.items()}
    return _OwnRows(owned, edges, nodes, columns, device, whole.others, matrices, whole.is_typed)
