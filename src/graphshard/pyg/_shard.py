# SPDX-License-Identifier: Apache-2.0
"""shard: one rank's rows of a PyG data object, with an ``edge_index`` that spans the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .._typing import DEFAULT_CANONICAL_ETYPE, CanonicalEType
from ..comm import agree, share_error
from ..comm.collectives import broadcast_
from ..comm.group import GroupState, group_state
from ..fullbatch import AggregationMode, PartitionData, load_dgl_partition_data
from ..fullbatch.execution import HaloRowCache
from ..fullbatch.topology import LocalEdges, ShardStructure, agree_on_build
from ..graph.convert import require
from ..partition import UndirectedGraph, metis_partition
from ._edge_index import ShardedEdgeIndex
from ._layers import install
from ._source_halo import SourceHalo

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

_PYG_NAMES = {"feat": "x", "label": "y"}  # as graphshard.data.from_pyg has them, the other way
_ONLY_TYPE = DEFAULT_CANONICAL_ETYPE[0]


@dataclass
class _OwnRows:
    """What one rank holds: its edges, and the columns of its own nodes and edges.

    Args:
        owned: Node type to own rows.
        edges: Relation to own edges, by destination.
        nodes: Node type to columns, each with a row per own node.
        edge_columns: Relation to columns, each with a row per own edge.
        others: Columns that belong to the whole graph.
        device: Where the edges live.
    """

    owned: dict[str, int]
    edges: dict[CanonicalEType, LocalEdges]
    nodes: dict[str, dict[str, Any]]
    edge_columns: dict[CanonicalEType, dict[str, Any]]
    device: torch.device
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def is_typed(self) -> bool:
        return list(self.edges) != [DEFAULT_CANONICAL_ETYPE]


def shard(
    data: Data | HeteroData | PartitionData | str | Path,
    part_method: str | Tensor | Mapping[str, Tensor] = "metis",
    *,
    mode: str = "auto",
    rematerialize: bool = True,
    memory_budget: int | None = None,
    row_width: int = 256,
    prefetch: int = 1,
    halo_dtype: torch.dtype | None = None,
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
    here, which come by destination. Attributes that are neither go over as they are, but for lists
    of nodes or edges other than ``edge_index``, which are left out, because their numbers are those
    of the whole graph.

    Args:
        data: The whole graph, the same on every rank; or one part of a partition folder, as
            `graphshard.load_dgl_partition_data` gives it or by the path of its JSON. From a folder,
            ``feat`` becomes ``x`` and ``label`` becomes ``y``.
        part_method: ``"metis"``, ``"random"``, or the rank of every node: an integer tensor
            ``[num_nodes]``, a dictionary of them by node type for ``HeteroData``. Rank 0's counts.
            Not used with a partition folder.
        mode: ``"oneshot"``: remote rows are kept for the backward. ``"sequential"``: nothing
            remote is kept, nor messages: the backward fetches and computes again, a piece of the
            destinations at a time. ``"auto"`` is the first if the halo fits on every rank.
        rematerialize: In sequential mode, fetch again in the backward; False keeps what was fetched
            and computed, as one-shot mode does.
        memory_budget: For ``"auto"``: bytes that one rank's halo rows may take; see
            `graphshard.construct_full_graph`.
        row_width: For ``"auto"``: columns of the widest row that will be exchanged.
        prefetch: Accepted for scripts that pass it to `graphshard.construct_full_graph`; the halo
            of a layer comes in one exchange here, so there is nothing to fetch ahead.
        halo_dtype: The dtype in which wider remote rows travel, bfloat16 or float16; None is their
            own.
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
    )
    state = group_state(group)
    policy.agree(group)
    if isinstance(data, str | Path | PartitionData):
        part = _from_folder(data, state)
    else:
        part = _from_whole(data, part_method, seed, state)
    structure = ShardStructure(part.edges, part.owned, part.owned, part.device, group)
    sources = list(dict.fromkeys(source for source, _, _ in part.edges))
    halos = [structure.union_halo(ntype) for ntype in sources]
    if policy.mode == "auto":
        num_halo = sum(halo.num_halo for halo in halos if halo is not None)
        policy = replace(policy, mode=policy.resolve(num_halo, group))
    cache = HaloRowCache(structure, policy.halo_dtype)
    install()
    indices = {}
    for etype in part.edges:
        halo = SourceHalo(structure, etype, policy, cache)
        indices[etype] = ShardedEdgeIndex.make(halo.edge_index, halo)
    return _data_of(part, indices)


def _data_of(
    part: _OwnRows, indices: Mapping[CanonicalEType, ShardedEdgeIndex]
) -> Data | HeteroData:
    pyg = require("torch_geometric.data", "graphshard[pyg]", "graphshard.pyg.shard")
    if not part.is_typed:
        data = pyg.Data(edge_index=indices[DEFAULT_CANONICAL_ETYPE])
        columns = {
            **part.others,
            **part.nodes[_ONLY_TYPE],
            **part.edge_columns[DEFAULT_CANONICAL_ETYPE],
        }
        for name, value in columns.items():
            data[name] = value
        data.num_nodes = part.owned[_ONLY_TYPE]
        return data
    data = pyg.HeteroData()
    for name, value in part.others.items():
        data[name] = value
    for ntype, count in part.owned.items():
        for name, value in part.nodes[ntype].items():
            data[ntype][name] = value
        data[ntype].num_nodes = count
    for etype, index in indices.items():
        data[etype].edge_index = index
        for name, value in part.edge_columns[etype].items():
            data[etype][name] = value
    return data


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
        (only,) = edges
        edges, owned = {DEFAULT_CANONICAL_ETYPE: edges[only]}, {_ONLY_TYPE: owned[only[0]]}
        nodes = {_ONLY_TYPE: _columns(loaded.node_features, only[0], "n_id")}
        columns = {DEFAULT_CANONICAL_ETYPE: _columns(loaded.edge_features, ":".join(only), "e_id")}
    else:
        nodes = {t: _columns(loaded.node_features, t, "n_id") for t in owned}
        columns = {t: _columns(loaded.edge_features, ":".join(t), "e_id") for t in edges}
    return _OwnRows(owned, edges, nodes, columns, loaded.device)


def _columns(features: Mapping[str, Tensor], of: str, ids: str) -> dict[str, Any]:
    names = {**_PYG_NAMES, "orig_id": ids}
    found = {}
    for key, value in features.items():
        owner, _, name = key.rpartition("/")
        if owner == of:
            found[names.get(name, name)] = value
    return found


# -- from a whole graph ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _WholeGraph:
    """A PyG object, read: counts, edges and columns by type.

    Args:
        counts: Node type to nodes.
        edges: Relation to ``[2, num_edges]``.
        nodes: Node type to columns with a row per node.
        edge_columns: Relation to columns with a row per edge.
        others: Everything else.
    """

    counts: dict[str, int]
    edges: dict[CanonicalEType, Tensor]
    nodes: dict[str, dict[str, Any]]
    edge_columns: dict[CanonicalEType, dict[str, Any]]
    others: dict[str, Any]

    def fingerprint(self) -> str:
        """Counts, and sums that differ where edges do."""
        lines = [f"{count} nodes of {ntype!r}" for ntype, count in self.counts.items()]
        for etype, edges in self.edges.items():
            weights = torch.arange(edges.shape[1], device=edges.device) % 65521 + 1
            sums = (edges.long() * weights).sum(1).tolist()
            lines.append(f"{edges.shape[1]} edges of {etype} with checksums {sums}")
        return "; ".join(lines)


def _from_whole(data: Any, part_method: Any, seed: int, state: GroupState) -> _OwnRows:
    error: Exception | None = None
    whole: _WholeGraph | None = None
    try:
        whole = _read(data)
    except (TypeError, ValueError) as caught:
        error = caught
    share_error(error, state.group)
    assert whole is not None
    agree(whole.fingerprint(), "the graph that is sharded", state.group)
    owners = _owners(whole, part_method, seed, state)
    own_rows, row_of = {}, {}
    for ntype, owner in owners.items():
        order = torch.argsort(owner, stable=True)
        starts = torch.zeros(state.world_size + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(owner, minlength=state.world_size), 0, out=starts[1:])
        rows = torch.empty_like(order)
        rows[order] = torch.arange(order.numel()) - starts[owner[order]]
        row_of[ntype] = rows
        own_rows[ntype] = order[starts[state.rank] : starts[state.rank + 1]]
    owned = {ntype: rows.numel() for ntype, rows in own_rows.items()}
    edges, columns = {}, {}
    device = next((e.device for e in whole.edges.values()), torch.device("cpu"))
    for etype, ends in whole.edges.items():
        src, dst = ends.long().cpu()
        here = (owners[etype[2]][dst] == state.rank).nonzero().view(-1)
        here = here[torch.argsort(row_of[etype[2]][dst[here]], stable=True)]
        src, dst = src[here], dst[here]
        edges[etype] = LocalEdges(
            owners[etype[0]][src].to(device),
            row_of[etype[0]][src].to(device),
            row_of[etype[2]][dst].to(device),
            owned[etype[2]],
        )
        columns[etype] = {
            name: _chosen(value, here) for name, value in whole.edge_columns[etype].items()
        } | {"e_id": here.to(device)}
    nodes = {
        ntype: {name: _chosen(value, rows) for name, value in whole.nodes[ntype].items()}
        | {"n_id": rows.to(device)}
        for ntype, rows in own_rows.items()
    }
    return _OwnRows(owned, edges, nodes, columns, device, whole.others)


def _chosen(value: Any, rows: Tensor) -> Any:
    return value[rows.to(value.device)] if isinstance(value, Tensor) else value[rows.numpy()]


def _read(data: Any) -> _WholeGraph:
    pyg = require("torch_geometric.data", "graphshard[pyg]", "graphshard.pyg.shard")
    if isinstance(data, pyg.HeteroData):
        counts = {t: _node_count(data[t], f"node type {t!r}") for t in data.node_types}
        edges = {}
        for etype in data.edge_types:
            for ntype in (etype[0], etype[2]):
                if ntype not in counts:
                    raise ValueError(
                        f"node type {ntype!r} of {etype} has no number of nodes; set "
                        f"data[{ntype!r}].num_nodes"
                    )
            sizes = counts[etype[0]], counts[etype[2]]
            edges[etype] = _checked_edges(data[etype], f"edge type {etype}", sizes)
        if not edges:
            raise ValueError("the graph has no edge type; it needs one at least")
        nodes = {t: _rows_of(data[t], counts[t]) for t in counts}
        columns = {t: _rows_of(data[t], edges[t].shape[1]) for t in edges}
        return _WholeGraph(counts, edges, nodes, columns, {})
    if isinstance(data, pyg.Data):
        count = _node_count(data, "the graph")
        ends = _checked_edges(data, "the graph", (count, count))
        names = [n for n in data.keys() if not _names_edges(n) and n != "num_nodes"]  # noqa: SIM118
        of_nodes = {n: data[n] for n in names if data.is_node_attr(n)}
        of_edges = {n: data[n] for n in names if n not in of_nodes and data.is_edge_attr(n)}
        others = {n: data[n] for n in names if n not in of_nodes and n not in of_edges}
        return _WholeGraph(
            {_ONLY_TYPE: count},
            {DEFAULT_CANONICAL_ETYPE: ends},
            {_ONLY_TYPE: of_nodes},
            {DEFAULT_CANONICAL_ETYPE: of_edges},
            others,
        )
    raise TypeError(
        "shard takes PyG's Data or HeteroData, a PartitionData or the path of a partition's JSON "
        f"(got {type(data).__name__})"
    )


def _names_edges(name: str) -> bool:
    return name == "adj_t" or "index" in name or name == "face"


def _node_count(store: Any, what: str) -> int:
    count = store.num_nodes
    if count is None:
        raise ValueError(f"{what} has no number of nodes; set its num_nodes")
    return int(count)


def _checked_edges(store: Any, what: str, counts: tuple[int, int]) -> Tensor:
    edge_index = store.get("edge_index", None) if hasattr(store, "get") else None
    if isinstance(edge_index, ShardedEdgeIndex):
        raise ValueError(f"{what} is sharded already; pass the whole data object")
    if edge_index is None:
        raise ValueError(
            f"{what} has no edge_index; turn an adj_t into one with torch_geometric.utils."
            "to_edge_index first"
        )
    edge_index = edge_index.as_subclass(Tensor)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype.is_floating_point:
        raise ValueError(
            f"edge_index of {what} must be integers of shape [2, num_edges] (got "
            f"{edge_index.dtype} of shape {tuple(edge_index.shape)})"
        )
    for row, name, count in zip(edge_index, ("source", "destination"), counts, strict=True):
        if row.numel() and (int(row.min()) < 0 or int(row.max()) >= count):
            wrong = row[(row < 0) | (row >= count)][0]
            raise ValueError(
                f"a {name} in edge_index of {what} must be a node, in [0, {count}) (got "
                f"{int(wrong)}); set num_nodes if there are more"
            )
    return edge_index


def _rows_of(store: Any, count: int) -> dict[str, Any]:
    """The columns of a store with so many rows."""
    return {
        name: value
        for name, value in store.to_dict().items()
        if not _names_edges(name)
        and isinstance(value, Tensor | np.ndarray)
        and value.ndim
        and value.shape[0] == count
    }


def _owners(
    whole: _WholeGraph, part_method: Any, seed: int, state: GroupState
) -> dict[str, Tensor]:
    """The rank of every node, by type: what rank 0 says."""
    total = sum(whole.counts.values())
    owner, error = torch.zeros(total, dtype=torch.int32), None
    if state.rank == 0:
        try:
            owner = _assigned(whole, part_method, seed, state.world_size)
        except Exception as caught:
            error = caught
    share_error(error, state.group)
    if state.world_size > 1 and total:
        broadcast_(state, owner, 0, "shard")
    parts = owner.long().split(list(whole.counts.values()))
    return dict(zip(whole.counts, parts, strict=True))


def _assigned(whole: _WholeGraph, part_method: Any, seed: int, num_parts: int) -> Tensor:
    """int32 ``[num_nodes of all types]``."""
    total = sum(whole.counts.values())
    if isinstance(part_method, str):
        if part_method not in ("metis", "random"):
            raise ValueError(
                f"part_method must be 'metis', 'random' or the rank of every node (got "
                f"{part_method!r})"
            )
        generator = torch.Generator().manual_seed(seed)
        if part_method == "random" or num_parts == 1:
            dealt = [
                (torch.randperm(count, generator=generator) % num_parts)
                for count in whole.counts.values()
            ]
            return torch.cat(dealt).to(torch.int32)
        starts, start = {}, 0
        for ntype, count in whole.counts.items():
            starts[ntype], start = start, start + count
        edges = (
            (ends[0].long().cpu() + starts[etype[0]], ends[1].long().cpu() + starts[etype[2]])
            for etype, ends in whole.edges.items()
        )
        weights = None
        if len(whole.counts) > 1:  # every type is balanced
            weights = np.zeros((total, len(whole.counts)), dtype=np.int64)
            for place, (ntype, count) in enumerate(whole.counts.items()):
                weights[starts[ntype] : starts[ntype] + count, place] = 1
            weights = weights[:, weights.any(0)]
        parts = metis_partition(
            UndirectedGraph.from_edges(edges, total), num_parts, node_weights=weights, seed=seed
        )
        return torch.from_numpy(np.asarray(parts)).to(torch.int32)
    given = part_method if isinstance(part_method, Mapping) else {_ONLY_TYPE: part_method}
    if set(given) != set(whole.counts):
        raise ValueError(
            f"part_method must have the ranks of the nodes of each type, {', '.join(whole.counts)} "
            f"(got {', '.join(map(str, given))})"
        )
    columns = []
    for ntype, count in whole.counts.items():
        ranks = torch.as_tensor(given[ntype]).cpu()
        if ranks.shape != (count,) or ranks.dtype.is_floating_point or ranks.dtype == torch.bool:
            raise ValueError(
                f"part_method must have an integer for each of the {count} nodes of type {ntype!r} "
                f"(got {ranks.dtype} of shape {tuple(ranks.shape)})"
            )
        if count and not 0 <= int(ranks.min()) <= int(ranks.max()) < num_parts:
            raise ValueError(
                f"part_method must have ranks in [0, {num_parts}) (got {int(ranks.min())} to "
                f"{int(ranks.max())})"
            )
        columns.append(ranks)
    return torch.cat(columns).to(torch.int32)
