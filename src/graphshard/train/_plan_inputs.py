# SPDX-License-Identifier: Apache-2.0
"""What a plan is made of: a partition, a data set or plain numbers, and the configuration of a run.

Parts that are there are counted: who reads how many rows of whom follows from the edges, a part at
a time. Features are not read. Edges that training would add are counted as well; of graphs with
more than `_EXACT_EDGES` edges, whether an edge has its reverse is found from a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..data.dataset import NodeDataset
from ..data.task import read_task
from ..fullbatch import PartitionData, load_dgl_partition_data
from ..fullbatch.topology import LocalEdges, count_fewest_rows, saves_rows
from ..partition.format import etype_key, read_config
from ..plan import Exchanges, GraphSize, Network, PartSize, Sampling
from ._config import (
    NEED_IN_EDGES,
    FullBatchConfig,
    ResolvedConfig,
    ResolvedSampledConfig,
    RunConfig,
    SampledConfig,
    torch_dtype,
)
from ._defaults import GraphFacts
from ._graph_edges import is_answered
from ._tasks import LINK_PREDICTION

_EXACT_EDGES = 40_000_000
_MOST_MARKS = 4_000_000_000
_NUMBER = "_N", "_E", "_N"


def network_of(config: ResolvedConfig, graph: GraphSize, kind: str) -> Network:
    """The network of a run on a graph; ``kind`` is that of the task."""
    wide = config.hidden * (config.heads if config.model in ("gat", "gatv2") else 1)
    return Network(
        model="sage" if ":" in config.model else config.model,
        features=graph.features,
        out=graph.num_classes if kind.startswith("node") else wide,
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        aggregator=config.aggregator,
        dropout=config.dropout,
        residual=config.residual,
        norm=config.norm,
        encoder=config.encoder,
        num_bases=config.num_bases,
        num_relations=graph.num_relations,
        itemsize=config.torch_dtype.itemsize,
    )


def facts_of(graph: GraphSize) -> GraphFacts:
    """What open settings of a run depend on, as far as sizes say it."""
    stored = graph.num_edges if graph.num_stored_edges is None else graph.num_stored_edges
    total = sum(graph.label_counts)
    shares = [count / total for count in graph.label_counts if count]
    return GraphFacts(
        num_train=int(graph.train),
        width=graph.features.get(graph.target, 0),
        mean_degree=stored / max(1.0, graph.num_nodes),
        is_typed=len(graph.nodes) > 1 or len(graph.edges) > 1,
        entropy=-sum(share * math.log(share) for share in shares) if shares else None,
        has_val=graph.has_val,
    )


def exchanges_of(config: RunConfig) -> Exchanges:
    """How a run's rows travel; the mode is still to be chosen."""
    if not isinstance(config, FullBatchConfig):
        return Exchanges(mode="oneshot")
    return Exchanges(
        mode="oneshot",
        rematerialize=config.rematerialize,
        prefetch=config.prefetch,
        wire=8 if config.halo_dtype is None else torch_dtype(config.halo_dtype).itemsize,
    )


def sampling_of(config: RunConfig, resolved: ResolvedConfig) -> Sampling | None:
    """How a run draws its batches; None of full batch."""
    if not isinstance(config, SampledConfig):
        return None
    assert isinstance(resolved, ResolvedSampledConfig)
    return Sampling(
        fanouts=resolved.fanouts,
        batch_size=config.batch_size,
        prefetch=config.prefetch,
        transport=config.transport,
        map_features=config.map_features,
        cache_bytes=config.cache_bytes,
        in_files=config.memory is not None,
    )


def size_of_numbers(
    nodes: float, edges: float, features: int, classes: int, train: float | None
) -> GraphSize:
    """A plain graph of which no more than this is known.

    Raises:
        ValueError: A number makes no graph.
    """
    for name, value, least in (
        ("nodes", nodes, 1),
        ("edges", edges, 0),
        ("features", features, 0),
        ("classes", classes, 1),
    ):
        if not least <= value < 1e18:
            raise ValueError(f"{name} must be a number, at least {least} (got {value:g})")
    train = 0.1 * nodes if train is None else train
    if not 0 <= train <= nodes:
        raise ValueError(f"train must be a number of nodes, at most {nodes:g} (got {train:g})")
    return GraphSize(
        name=f"{nodes:.3g} nodes, {edges:.3g} edges",
        nodes={"_N": nodes},
        edges={_NUMBER: edges},
        features={"_N": features} if features else {},
        num_classes=classes,
        target="_N",
        train=train,
    )


def size_of_dataset(dataset: NodeDataset, config: RunConfig) -> GraphSize:
    """A data set, or tables, that have been read."""
    graph = dataset.graph
    features, itemsize = {}, 4
    for ntype in graph.ntypes:
        columns = graph.nodes[ntype].data
        if "feat" in columns:
            features[ntype] = int(columns["feat"].shape[1])
            itemsize = columns["feat"].element_size()
    target, data = dataset.target, graph.nodes[dataset.target].data
    train = float(data["train_mask"].sum())
    edges: dict[CanonicalEType, float] = {}
    ends = {}
    for etype in graph.canonical_etypes:
        ends[etype] = tuple(rows.long() for rows in graph.edges(etype=etype))
        edges[etype] = len(ends[etype][0])
    num_stored = float(sum(edges.values()))
    nodes = {t: graph.num_nodes(t) for t in graph.ntypes}
    added = _added(config, nodes, {e: [pair] for e, pair in ends.items()})
    edges |= {e: edges.get(e, 0) + count for e, count in added.items()}
    return GraphSize(
        name=dataset.name,
        nodes=nodes,
        edges=edges,
        features=features,
        num_classes=max(1, dataset.num_classes),
        num_relations=len(dataset.relation_names),
        target=target,
        train=train or 0.1 * nodes[target],
        itemsize=itemsize,
        num_stored_edges=num_stored,
        label_counts=_label_counts([(data["label"], data["train_mask"])]),
        has_val=_has_labels([(data["label"], data["val_mask"])]),
    )


def _label_counts(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[int, ...]:
    """How many rows of a mask have each class; empty of labels that are no classes.

    Args:
        rows: Labels and mask of each part.
    """
    known = [label[mask.bool()] for label, mask in rows]
    if not known or any(label.ndim != 1 or label.is_floating_point() for label in known):
        return ()
    labels = torch.cat(known).long()
    return tuple(torch.bincount(labels[labels >= 0]).tolist())


def _has_labels(rows: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether a row of a mask has a label."""
    known = [label[mask.bool()] for label, mask in rows]
    return any(bool((label >= 0).any() if label.ndim == 1 else len(label)) for label in known)


def size_of_partition(path: Path, config: RunConfig) -> tuple[GraphSize, str]:
    """A partition, counted, and the kind of its task.

    Raises:
        PartitionFormatError: It is missing or damaged.
    """
    task = read_task(path)
    stored = read_config(path)
    parts = [load_dgl_partition_data(path, part) for part in range(stored.num_parts)]
    first = parts[0]
    kind = config.task or task.kind
    features, itemsize = {}, 4
    for ntype in first.node_type_names:
        rows = first.node_features.get(f"{ntype}/feat")
        if rows is not None and rows.ndim == 2:
            features[ntype], itemsize = int(rows.shape[1]), rows.element_size()
    train_of, classes = [], task.num_classes or 1
    masked: dict[str, list[tuple[Tensor, Tensor]]] = {"train_mask": [], "val_mask": []}
    target = task.target if isinstance(task.target, str) else None
    for data in parts:
        of_part = 0.0
        fields, key = data.node_features, target
        if task.is_on_edges and task.targets:
            fields, key = data.edge_features, etype_key(task.targets[0])
        elif key is None:
            key = next((k.rpartition("/")[0] for k in fields if k.endswith("/label")), None)
        if key is not None and f"{key}/train_mask" in fields:
            of_part = float(fields[f"{key}/train_mask"].sum())
        label = fields.get(f"{key}/label")
        for name, rows_of in masked.items():
            if label is not None and f"{key}/{name}" in fields:
                rows_of.append((label, fields[f"{key}/{name}"]))
        if label is not None and task.num_classes is None and label.numel():
            is_classes = label.ndim == 1 and not label.is_floating_point()
            classes = max(classes, int(label.max()) + 1 if is_classes else label[0].numel())
        train_of.append(of_part)
        if key is not None and not task.is_on_edges:
            target = key
    relations = task.num_relations or 0
    if config.model == "rgcn" and not relations:
        numbers = [
            int(rows.max()) + 1
            for data in parts
            for name, rows in data.edge_features.items()
            if name.endswith("/etype") and rows.numel()
        ]
        relations = max(numbers, default=0)
    sizes = _part_sizes(parts, config, train_of)
    edges: dict[CanonicalEType, float] = {}
    for size in sizes:
        for etype, count in size.edges.items():
            edges[etype] = edges.get(etype, 0) + count
    graph = GraphSize(
        name=first.graph_name,
        nodes={t: first.node_map(t).num_ids for t in first.node_type_names},
        edges=edges,
        features=features,
        num_classes=classes,
        target=target or first.node_type_names[0],
        train=sum(train_of),
        itemsize=itemsize,
        num_relations=relations,
        num_stored_edges=float(sum(e.num_edges for data in parts for e in data.edges.values())),
        label_counts=_label_counts(masked["train_mask"]),
        has_val=_has_labels(masked["val_mask"]) or task.is_on_edges,
        parts=tuple(sizes),
        disk=float(sum(f.stat().st_size for f in path.parent.rglob("*") if f.is_file())),
    )
    return graph, kind if kind != LINK_PREDICTION else LINK_PREDICTION


def _wants(config: RunConfig, is_typed: bool) -> tuple[bool, bool]:
    """Whether training adds reverses, and self loops, as `load_shard` does."""
    both, loops = config.both_directions, config.self_loops
    if both is None:
        both = is_typed or config.model != "rgcn"
    if loops is None:
        loops = not is_typed and config.model in NEED_IN_EDGES
    return both, loops


def _reverse_of(etype: CanonicalEType, is_typed: bool) -> CanonicalEType:
    source, name, target = etype
    return (target, f"rev_{name}", source) if is_typed else etype


_EndsByPart = Sequence[tuple[Tensor, Tensor]]


def _lacking(ends: _EndsByPart, num_destinations: int) -> list[Tensor] | None:
    """Of edges between nodes of one type, by part, which lack their reverse; None: too many."""
    total = sum(len(src) for src, _ in ends)
    if total > _EXACT_EDGES:
        return None
    codes = torch.cat([src * num_destinations + dst for src, dst in ends])
    codes = torch.unique(codes)
    lacking = []
    for src, dst in ends:
        back = dst * num_destinations + src
        at = torch.searchsorted(codes, back).clamp(max=max(0, len(codes) - 1))
        is_there = codes[at] == back if len(codes) else torch.zeros_like(back, dtype=torch.bool)
        lacking.append(~is_there)
    return lacking


def _share_lacking(ends: _EndsByPart) -> float:
    """Share of edges without a reverse, of a sample that holds both directions or neither."""
    some = []
    modulus = sum(len(src) for src, _ in ends) // _EXACT_EDGES + 1
    for src, dst in ends:
        mixed = (torch.minimum(src, dst) * 2654435761 + torch.maximum(src, dst)) % 1_000_003
        chosen = mixed % modulus == 0
        some.append((src[chosen], dst[chosen]))
    lacking = _lacking(some, int(max((int(d.max()) if d.numel() else 0) for _, d in some)) + 1)
    assert lacking is not None
    count = sum(len(part) for part in lacking)
    return sum(int(part.sum()) for part in lacking) / count if count else 0.0


def _added(
    config: RunConfig, nodes: Mapping[str, int], ends: Mapping[CanonicalEType, _EndsByPart]
) -> dict[CanonicalEType, float]:
    """Edges that training adds to a whole graph."""
    is_typed = len(nodes) > 1 or len(ends) > 1
    both, loops = _wants(config, is_typed)
    added: dict[CanonicalEType, float] = {}
    for etype, pairs in ends.items() if both else ():
        if is_typed and is_answered(etype, tuple(ends)):
            continue
        total = sum(len(src) for src, _ in pairs)
        count = float(total)
        if etype[0] == etype[2]:
            lacking = _lacking(pairs, nodes[etype[2]])
            share = _share_lacking(pairs) if lacking is None else 0.0
            missing = (
                total * share if lacking is None else float(sum(int(p.sum()) for p in lacking))
            )
            count = missing if not is_typed else (total if missing else 0.0)
        if count:
            back = _reverse_of(etype, is_typed)
            added[back] = added.get(back, 0.0) + count
    if loops:
        ((etype, pairs),) = ends.items()
        has = sum(int((src == dst).sum()) for src, dst in pairs)
        added[etype] = added.get(etype, 0.0) + max(0, nodes[etype[0]] - has)
    return added


def _part_sizes(
    parts: Sequence[PartitionData], config: RunConfig, train_of: Sequence[float]
) -> list[PartSize]:
    """What each rank has when a run has added its edges."""
    first = parts[0]
    num_parts, ntypes = len(parts), first.node_type_names
    is_typed = len(ntypes) > 1 or len(first.canonical_etypes) > 1
    both, loops = _wants(config, is_typed)
    starts = {t: torch.tensor(first.node_map(t).starts[:-1]) for t in ntypes}
    counts = {t: first.node_map(t).num_ids for t in ntypes}
    ends: dict[CanonicalEType, list[tuple[Tensor, Tensor]]] = {}
    owners: dict[CanonicalEType, list[Tensor]] = {}
    for etype in first.canonical_etypes:
        for data in parts:
            of_type = data.edges[etype]
            owner = of_type.src_part.long()
            src = starts[etype[0]][owner] + of_type.src
            dst = int(starts[etype[2]][data.rank]) + of_type.dst.long()
            ends.setdefault(etype, []).append((src, dst))
            owners.setdefault(etype, []).append(owner)
    # By part: (source, destination, owner of the source) of all edges into it.
    into: list[dict[CanonicalEType, list[tuple[Tensor, Tensor, Tensor]]]] = []
    for rank in range(num_parts):
        into.append({e: [(*ends[e][rank], owners[e][rank])] for e in ends})
    for etype in first.canonical_etypes if both else ():
        if is_typed and is_answered(etype, tuple(first.canonical_etypes)):
            continue
        chosen = [torch.ones_like(src, dtype=torch.bool) for src, _ in ends[etype]]
        if etype[0] == etype[2]:
            lacking = _lacking(ends[etype], counts[etype[2]])
            if lacking is None:
                lacking = chosen if _share_lacking(ends[etype]) > 0.01 else None
            if lacking is None or not any(bool(part.any()) for part in lacking):
                continue
            chosen = chosen if is_typed else lacking
        back = _reverse_of(etype, is_typed)
        for rank, (src, dst) in enumerate(ends[etype]):
            src, dst, owner = (x[chosen[rank]] for x in (src, dst, owners[etype][rank]))
            here = torch.full_like(src, rank)
            for part in range(num_parts):
                of_part = owner == part
                into[part].setdefault(back, []).append((dst[of_part], src[of_part], here[of_part]))
    if loops:
        (etype,) = first.canonical_etypes
        for rank, edges in enumerate(into):
            begin, number = int(starts[etype[0]][rank]), first.node_map(etype[0]).size(rank)
            lacks = torch.ones(number, dtype=torch.bool)
            for src, dst, _ in edges[etype]:
                lacks[dst[src == dst] - begin] = False
            nodes = lacks.nonzero().view(-1) + begin
            edges[etype].append((nodes, nodes, torch.full_like(nodes, rank)))
    return _counted(first, into, train_of)


def _counted(
    first: PartitionData,
    into: Sequence[Mapping[CanonicalEType, Sequence[tuple[Tensor, Tensor, Tensor]]]],
    train_of: Sequence[float],
) -> list[PartSize]:
    num_parts, ntypes = len(into), first.node_type_names
    sent = [dict.fromkeys(ntypes, 0.0) for _ in range(num_parts)]
    sent_of: list[dict[CanonicalEType, float]] = [{} for _ in range(num_parts)]
    fewest = _fewest_rows(first, into)
    made = []
    for rank, edges in enumerate(into):
        halo, halo_of, cut, numbers = {}, {}, {}, {}
        by_type: dict[str, list[Tensor]] = {}
        starts = {t: torch.tensor(first.node_map(t).starts[1:]) for t in ntypes}
        for etype, pieces in edges.items():
            src = torch.cat([piece[0] for piece in pieces])
            owner = torch.cat([piece[2] for piece in pieces])
            numbers[etype] = float(len(src))
            remote = torch.unique(src[owner != rank])
            cut[etype] = float((owner != rank).sum())
            halo_of[etype] = float(len(remote))
            by_type.setdefault(etype[0], []).append(remote)
            _note_senders(sent_of, etype, remote, starts[etype[0]])
        for ntype, lists in by_type.items():
            remote = torch.unique(torch.cat(lists))
            halo[ntype] = float(len(remote))
            _note_senders(sent, ntype, remote, starts[ntype])
        made.append((halo, halo_of, cut, numbers))
    return [
        PartSize(
            nodes={t: float(first.node_map(t).size(rank)) for t in ntypes},
            edges=numbers,
            halo=halo,
            halo_of=halo_of,
            sent=sent[rank],
            sent_of=sent_of[rank],
            fewest=fewest[rank],
            cut=cut,
            train=train_of[rank],
        )
        for rank, (halo, halo_of, cut, numbers) in enumerate(made)
    ]


def _fewest_rows(
    first: PartitionData,
    into: Sequence[Mapping[CanonicalEType, Sequence[tuple[Tensor, Tensor, Tensor]]]],
) -> list[dict[str, tuple[float, float]]]:
    """Of each part what comes and is sent by node type where partial sums are made."""
    num_parts = len(into)
    found: list[dict[str, tuple[float, float]]] = [{} for _ in into]
    for ntype in first.node_type_names if num_parts > 1 else ():
        counts = []
        for rank, edges in enumerate(into):
            local = [
                _local_edges(first, etype, rank, pieces)
                for etype, pieces in edges.items()
                if etype[0] == ntype
            ]
            if local:
                counts.append(count_fewest_rows(local, rank, num_parts))
        if counts:
            read, come = torch.stack(counts, 1)  # [part, owner]
            if saves_rows(int(read.sum()), int(come.sum())):
                for rank in range(num_parts):
                    found[rank][ntype] = float(come[rank].sum()), float(come[:, rank].sum())
    return found


def _local_edges(
    first: PartitionData,
    etype: CanonicalEType,
    rank: int,
    pieces: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> LocalEdges:
    src, dst, owner = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    starts, ends = (torch.tensor(first.node_map(t).starts) for t in (etype[0], etype[2]))
    return LocalEdges(
        owner, src - starts[owner], dst - ends[rank], int(ends[rank + 1] - ends[rank])
    )


def _note_senders(sent: Sequence[dict], key: object, remote: Tensor, ends: Tensor) -> None:
    """Add the rows that each owner sends."""
    counts = torch.bincount(torch.searchsorted(ends, remote, right=True), minlength=len(sent))
    for owner, count in enumerate(counts.tolist()):
        sent[owner][key] = sent[owner].get(key, 0.0) + count
