# SPDX-License-Identifier: Apache-2.0
"""construct_full_graph and construct_mfgs: from partition data to graphs that layers run on.

Both are collective: every rank passes its own part, and they agree on who needs which rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.lazy_columns import LazyColumns, maker_of, tensors_there
from .._base.typing import CanonicalEType
from ..comm import ExchangePlan, fetch_halo, share_error
from ..graph import EID, NID, Frame
from ..graph.frame import LazyNumbers
from ..graph.structure import Schema
from ._graph_shard_manager import GraphShardManager
from ._partition_data import PartitionData, wrong_number_of_ranks
from .aggregation_mode import AggregationMode, ModeName
from .topology import LocalEdges, OriginalIds, ShardStructure, agree_on_build, needed_rows


def construct_full_graph(
    partition_data: PartitionData,
    mode: ModeName = "auto",
    *,
    rematerialize: bool | None = None,
    memory_budget: int | None = None,
    row_width: int = 256,
    prefetch: int | None = None,
    halo_dtype: torch.dtype | None = None,
    partial_sums: bool = True,
    group: dist.ProcessGroup | None = None,
) -> GraphShardManager:
    """The whole graph, of which this rank holds one part. Collective.

    Args:
        partition_data: This rank's part; part ``r`` goes to rank ``r``.
        group: The ranks that share the graph; None for the default group, or for no group at
            all when the graph has one part.

    The other arguments are those of `AggregationMode`.

    Returns:
        A graph with a row per owned node; ``ndata[NID]`` and ``edata[EID]`` hold global ids.

    Raises:
        ValueError: The number of parts is not the number of ranks, or a part is on the wrong
            rank, or the ranks have parts of different partitions, or chose different modes; raised
            on every rank.
    """
    policy = AggregationMode(
        mode=mode,
        rematerialize=rematerialize,
        memory_budget=memory_budget,
        row_width=row_width,
        prefetch=prefetch,
        halo_dtype=halo_dtype,
        partial_sums=partial_sums,
    )
    _check_ranks(partition_data, policy, group)
    schema = Schema.of_graph(partition_data.node_type_names, partition_data.canonical_etypes)
    owned = {t: partition_data.num_owned(t) for t in partition_data.node_type_names}
    edges = {etype: LocalEdges.of(e, owned[etype[2]]) for etype, e in partition_data.edges.items()}
    rows = {t: torch.arange(n, device=partition_data.device) for t, n in owned.items()}
    return _manager(partition_data, schema, edges, rows, rows, None, policy, group)


def construct_mfgs(
    partition_data: PartitionData,
    seed_nodes: Tensor | Mapping[str, Tensor],
    n_layers: int,
    keep_seed_nodes: bool = True,
    *,
    mode: ModeName = "auto",
    rematerialize: bool | None = None,
    memory_budget: int | None = None,
    row_width: int = 256,
    prefetch: int | None = None,
    halo_dtype: torch.dtype | None = None,
    partial_sums: bool = True,
    group: dist.ProcessGroup | None = None,
) -> list[GraphShardManager]:
    """One graph per layer, holding only what the outputs at ``seed_nodes`` depend on. Collective.

    The destinations of layer ``i`` are the sources of layer ``i + 1``, in the same order. Pass
    ``features[mfgs[0].input_nodes]`` in; rows of the output belong to ``mfgs[-1].seeds``.

    Args:
        partition_data: This rank's part.
        seed_nodes: Global ids of this rank's nodes whose outputs are wanted, distinct. On a graph
            of several node types: type to ids of that type, or one tensor of homogenised ids, which
            are rows of this rank plus ``partition_data.node_ranges[rank][0]``. Ranks may have
            different numbers of them, also none.
        keep_seed_nodes: Make every destination a source as well, and first, as layers with a self
            term expect.

    The other arguments are those of `construct_full_graph`.

    Raises:
        ValueError: Wrong seeds on some rank, or ``n_layers`` below 1, or as for
            `construct_full_graph`; raised on every rank.
    """
    if n_layers < 1:
        raise ValueError(f"n_layers must be at least 1 (got {n_layers})")
    policy = AggregationMode(
        mode=mode,
        rematerialize=rematerialize,
        memory_budget=memory_budget,
        row_width=row_width,
        prefetch=prefetch,
        halo_dtype=halo_dtype,
        partial_sums=partial_sums,
    )
    _check_ranks(partition_data, policy, group)
    error, rows = None, {}
    try:
        rows = _seed_rows(partition_data, seed_nodes)
    except (ValueError, TypeError, IndexError) as caught:
        error = caught
    share_error(error, group)
    layers = []
    for _ in range(n_layers):
        manager, rows = _layer(partition_data, rows, keep_seed_nodes, policy, group)
        layers.append(manager)
    return layers[::-1]


def _check_ranks(
    data: PartitionData, policy: AggregationMode, group: dist.ProcessGroup | None
) -> None:
    """Raise on all ranks unless each has its part of one partition, and all chose alike."""
    error = None
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    data.check_num_ranks(size)
    if data.num_parts > size:
        error = wrong_number_of_ranks(data.num_parts, size)
    elif data.rank != rank:
        error = ValueError(
            f"part r belongs to rank r (got part {data.rank} on rank {rank}); pass "
            "load_dgl_partition_data the rank of this process"
        )
    agree_on_build(data.build, error, group)
    policy.agree(group)


def _manager(
    data: PartitionData,
    schema: Schema,
    edges: Mapping[CanonicalEType, LocalEdges],
    src_rows: Mapping[str, Tensor],
    dst_rows: Mapping[str, Tensor],
    edge_ids: Mapping[CanonicalEType, Tensor] | None,
    policy: AggregationMode,
    group: dist.ProcessGroup | None,
) -> GraphShardManager:
    """A graph of owned rows of each type, and of edges of the part: which ones, or None for all."""
    num_src, num_dst = ({t: r.numel() for t, r in rows.items()} for rows in (src_rows, dst_rows))
    structure = ShardStructure(edges, num_src, num_dst, data.device, group)
    columns = (*tensors_there(data.node_features), *tensors_there(data.edge_features))
    structure.constants.mark(columns)
    if policy.mode == "auto":
        halos = [structure.union_halo(t) for t in schema.srctypes]
        num_halo = sum(halo.num_halo for halo in halos if halo is not None)
        policy = replace(policy, mode=policy.resolve(num_halo, group, structure.device))
    original = _original_ids(data)
    if edge_ids is not None:
        original = OriginalIds(
            {t: ids[src_rows[t]] for t, ids in original.nodes.items()},
            {t: ids[edge_ids[t]] for t, ids in original.edges.items()},
        )
    return GraphShardManager(
        structure,
        schema,
        policy,
        _frames(data, schema, src_rows, dst_rows, edge_ids or {}),
        is_block=edge_ids is not None,
        input_nodes={t: src_rows[t] for t in schema.srctypes},
        seeds={t: dst_rows[t] for t in schema.dsttypes},
        original=original,
        partition_book=data.partition_book,
    )


def _seed_rows(data: PartitionData, seeds: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Owned rows of the seeds per type; every node type has an entry."""
    if isinstance(seeds, Tensor):
        seeds = _by_type(data, seeds)
    unknown = set(seeds) - set(data.node_type_names)
    if unknown:
        raise ValueError(
            f"seeds name unknown node types {sorted(unknown)}; the graph has "
            f"{', '.join(data.node_type_names)}"
        )
    rows = {}
    for ntype in data.node_type_names:
        ids = seeds.get(ntype, torch.empty(0, dtype=torch.int64))
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"seeds must be node ids, int64 or int32 (got {ids.dtype} for '{ntype}'); turn a "
                "mask into ids with mask.nonzero().view(-1) plus the start of this rank's range"
            )
        if torch.unique(ids).numel() != ids.numel():
            raise ValueError(f"seeds of node type '{ntype}' must be distinct; use torch.unique")
        rows[ntype] = data.local_rows(ids, ntype)
    return rows


def _by_type(data: PartitionData, seeds: Tensor) -> dict[str, Tensor]:
    """Ids of each type, from ids of all, in the order given."""
    if len(data.node_type_names) == 1 or seeds.is_floating_point() or seeds.dtype == torch.bool:
        return {data.node_type_names[0]: seeds}
    of_type, ids = data.partition_book.map_to_per_ntype(seeds.cpu())
    return {t: ids[of_type == number] for number, t in enumerate(data.node_type_names)}


def _layer(
    data: PartitionData,
    dst_rows: Mapping[str, Tensor],
    keep_seed_nodes: bool,
    policy: AggregationMode,
    group: dist.ProcessGroup | None,
) -> tuple[GraphShardManager, dict[str, Tensor]]:
    """The graph whose destinations are ``dst_rows``, and the owned rows that feed it."""
    edges_of, edge_ids = _edges_into(data, dst_rows)
    src_rows: dict[str, Tensor] = {}
    for ntype in data.node_type_names:
        etypes = [etype for etype in data.canonical_etypes if etype[0] == ntype]
        edges = [edges_of[etype] for etype in etypes]
        first = dst_rows[ntype] if keep_seed_nodes else dst_rows[ntype][:0]
        src_rows[ntype], renumbered = _source_rows(data, ntype, edges, first, group)
        edges_of.update(zip(etypes, renumbered, strict=True))
    schema = Schema.of_block(data.node_type_names, data.node_type_names, data.canonical_etypes)
    manager = _manager(data, schema, edges_of, src_rows, dst_rows, edge_ids, policy, group)
    return manager, src_rows


def _edges_into(
    data: PartitionData, dst_rows: Mapping[str, Tensor]
) -> tuple[dict[CanonicalEType, LocalEdges], dict[CanonicalEType, Tensor]]:
    """In-edges of ``dst_rows``, destinations renumbered; and which of the part's edges they are."""
    edges_into, edge_ids = {}, {}
    for etype, edges in data.edges.items():
        rows = dst_rows[etype[2]]
        position = torch.full((data.num_owned(etype[2]),), -1, device=data.device)
        position[rows] = torch.arange(rows.numel(), device=data.device)
        chosen = (position[edges.dst] >= 0).nonzero().view(-1)
        edges_into[etype] = LocalEdges(
            edges.src_part[chosen],
            edges.src[chosen],
            position[edges.dst[chosen]].to(edges.dst.dtype),
            rows.numel(),
        )
        edge_ids[etype] = chosen
    return edges_into, edge_ids


def _source_rows(
    data: PartitionData,
    ntype: str,
    edges: list[LocalEdges],
    first: Tensor,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, list[LocalEdges]]:
    """Owned rows that anyone's ``edges`` read, ``first`` ahead; edges renumbered to positions."""
    rank, num_owned = data.rank, data.num_owned(ntype)
    needed = needed_rows(edges, rank, data.num_parts)
    plan = ExchangePlan.build(needed, num_owned, group=group, device=data.device)
    read_here = [e.src[e.src_part == rank] for e in edges]
    is_read = torch.zeros(num_owned, dtype=torch.bool, device=data.device)
    is_read[torch.cat([plan.send_index, *read_here])] = True
    is_read[first] = False
    rows = torch.cat([first, is_read.nonzero().view(-1)])
    position = torch.full((num_owned,), -1, device=data.device)
    position[rows] = torch.arange(rows.numel(), device=data.device)
    remote = fetch_halo([(plan, position)])[0]
    renumbered = []
    for e in edges:
        src = e.src.clone()
        own = e.src_part == rank
        src[own] = position[e.src[own]].to(src.dtype)
        for part, rows_of_part in enumerate(needed):
            of_part = e.src_part == part
            if part != rank and rows_of_part.numel():
                start, _ = plan.halo_range(part)
                at = torch.searchsorted(rows_of_part, e.src[of_part].to(rows_of_part.dtype))
                src[of_part] = remote[start + at].to(src.dtype)
        renumbered.append(LocalEdges(e.src_part, src, e.dst, e.num_dst))
    return rows, renumbered


def _frames(
    data: PartitionData,
    schema: Schema,
    src_rows: Mapping[str, Tensor],
    dst_rows: Mapping[str, Tensor],
    edge_ids: Mapping[CanonicalEType, Tensor],
) -> tuple[list[Frame], list[Frame], list[Frame]]:
    """Frames with the global id of every row; edges of a whole part when ``edge_ids`` is empty."""

    def node_frame(ntype: str, rows: Tensor, what: str) -> Frame:
        frame = Frame(rows.numel(), data.device, f"{what} of type {ntype!r}")
        frame[NID] = rows + data.node_map(ntype).starts[data.rank]
        return frame

    def edge_frame(etype: CanonicalEType) -> Frame:
        count = data.edges[etype].num_edges
        ids: Tensor | LazyNumbers
        if etype in edge_ids:
            ids = data.partition_book.partid2eids(data.rank, etype).to(data.device)[edge_ids[etype]]
        else:
            sizes = [stop - start for start, stop in data.partition_book.edge_map()[etype]]
            ids = LazyNumbers(sum(sizes[: data.rank]), count, data.device)
        frame = Frame(ids.shape[0], data.device, f"edges {etype}", "edge")
        frame[EID] = ids
        return frame

    what = "source nodes" if schema.split else "nodes"
    src = dst = [node_frame(t, src_rows[t], what) for t in schema.srctypes]
    if schema.split:
        dst = [node_frame(t, dst_rows[t], "destination nodes") for t in schema.dsttypes]
    return src, dst, [edge_frame(etype) for etype in schema.canonical_etypes]


def _original_ids(data: PartitionData) -> OriginalIds:
    """The ids before partitioning; global ids where the part does not know them."""
    nodes: dict[str, Callable[[], Tensor]] = {}
    edges: dict[CanonicalEType, Callable[[], Tensor]] = {}
    for ntype in data.node_type_names:
        name = f"{ntype}/orig_id"
        own = partial(data.node_map(ntype).ids_of, data.rank)
        nodes[ntype] = own if name not in data.node_features else maker_of(data.node_features, name)
    for etype in data.canonical_etypes:
        name = f"{':'.join(etype)}/orig_id"
        own = partial(data.partition_book.partid2eids, data.rank, etype)
        edges[etype] = own if name not in data.edge_features else maker_of(data.edge_features, name)

    device = data.device

    def there(make: Callable[[], Tensor]) -> Tensor:
        return make().to(device, torch.int64)

    return OriginalIds(
        LazyColumns({}, {ntype: partial(there, make) for ntype, make in nodes.items()}),
        LazyColumns({}, {etype: partial(there, make) for etype, make in edges.items()}),
    )
