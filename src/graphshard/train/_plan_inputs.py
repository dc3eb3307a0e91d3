# SPDX-License-Identifier: Apache-2.0
"""What a plan is made of: a partition, a data set or plain numbers, and the configuration of a run.

Parts that are there are counted: who reads how many rows of whom follows from the edges, a part at
a time. Features are not read. Edges that training would add are counted as well; of graphs with
more than `_EXACT_EDGES` edges, whether an edge has its reverse is found from a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..data.dataset import SPLITS, NodeDataset
from ..data.task import TaskInfo, read_task
from ..fullbatch import PartitionData, load_dgl_partition_data
from ..fullbatch.fewest_rows import count_fewest_rows, saves_rows
from ..fullbatch.topology import LocalEdges, hashed_without_reverses
from ..partition.format import etype_key, read_config
from ..plan import (
    EdgeScorer,
    Exchanges,
    GraphSize,
    LearntColumns,
    Network,
    PartSize,
    Sampling,
    StatesSize,
    SumsByLength,
)
from ._categories import CategoryTables, table_width
from ._config import (
    NEED_IN_EDGES,
    FullBatchConfig,
    ResolvedConfig,
    ResolvedSampledConfig,
    RunConfig,
    SampledConfig,
    torch_dtype,
)
from ._defaults import GraphFacts, num_negatives
from ._graph_edges import is_answered
from ._own_model import ModelSchema
from ._rehearsal import Rehearsal
from ._tasks import LINK_PREDICTION
from ._training_shard import edge_columns, with_asked_task

_EXACT_EDGES = 40_000_000
_MOST_MARKS = 4_000_000_000
_NUMBER = "_N", "_E", "_N"


def network_of(config: ResolvedConfig, graph: GraphSize, kind: str) -> Network:
    """The network of a run on a graph; ``kind`` is that of the task."""
    wide = config.hidden * (config.heads if config.model in ("gat", "gatv2") else 1)
    is_on_nodes = kind.startswith("node")
    is_own = ":" in config.model
    out = graph.num_classes if is_on_nodes else wide
    return Network(
        model="sage" if is_own else config.model,
        own=_rehearsal_of(config, graph, out) if is_own else None,
        edge_features={
            etype: widths["feat"]
            for etype, widths in graph.edge_widths.items()
            if "feat" in widths and "feat" in edge_columns(config.model) and not is_own
        },
        features=graph.features,
        learnt=graph.learnt,
        edges=None if is_on_nodes else _scorer_of(config, graph),
        out=out,
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


def _rehearsal_of(config: ResolvedConfig, graph: GraphSize, out: int) -> Rehearsal:
    """What a model of the user's own is seen to take.

    Raises:
        ValueError: There is no such model, or it does not take what it is given.
    """
    ntypes = tuple(graph.nodes)
    is_typed = len(ntypes) > 1 or len(graph.edges) > 1
    ends = dict.fromkeys(t for source, _, target in graph.relations for t in (source, target))
    schema = ModelSchema(
        node_types=ntypes,
        canonical_etypes=tuple(graph.edges),
        target=tuple(ends) if ends and is_typed else graph.target,
        node_widths={t: graph.features.get(t, config.hidden) for t in ntypes},
        edge_widths={e: w for e, w in graph.edge_widths.items() if e in graph.edges},
        num_relations=graph.num_relations,
    )
    arguments = {"hidden": config.hidden, "layers": config.layers, "dropout": config.dropout}
    learnt = [t for t in ntypes if t not in graph.features or t in graph.learnt]
    return Rehearsal(
        config.model,
        schema,
        {**arguments, "out": out, **(config.model_args or {})},
        config.torch_dtype,
        learnt,
        autocast=config.autocast,
    )


def _scorer_of(config: ResolvedConfig, graph: GraphSize) -> EdgeScorer:
    """What scores the edges of a task."""
    sides = tuple(tuple(dict.fromkeys(etype[side] for etype in graph.relations)) for side in (0, 2))
    ends = sides[0], sides[1]
    if not graph.is_of_links:
        return EdgeScorer(ends=ends, edge_width=graph.scored_width, out=graph.num_classes)
    has_numbers, several = graph.num_relations > 0, len(graph.relations) > 1
    has_factors = config.predictor == "distmult" or (
        config.predictor is None and (has_numbers or several)
    )
    num_relations = graph.num_relations or len(graph.relations)
    return EdgeScorer(
        ends=ends,
        negatives=config.negatives or num_negatives(has_numbers),
        ranks_sources=has_numbers,
        num_factors=num_relations if has_factors else 0,
        num_relations=num_relations,
    )


def learnt_columns(
    counts: Sequence[int], sparse_count: int = 0, columns: Tensor | None = None
) -> LearntColumns:
    """Of a node type with categories, or with sparse features.

    Args:
        counts: Of the values of each column of categories.
        sparse_count: Of the columns of sparse features, plus 1.
        columns: Of the non-zeros of each row, counted from 1, with 0 behind the last.
    """
    widths = tuple(map(table_width, counts))
    entries, stored, converted = 0.0, 0, 0
    if columns is not None:
        stored = columns.shape[1]
        converted = 0 if columns.dtype == torch.int32 else columns.element_size()
        # A sum would take 8 bytes a number.
        entries = int(torch.count_nonzero(columns > 0)) / max(1, len(columns))
    return LearntColumns(
        widths=widths,
        categories=float(sum(c * w for c, w in zip(counts, widths, strict=True))),
        entries=entries,
        stored_entries=stored,
        converted_bytes=converted,
        columns=sparse_count,
        sparse_width=CategoryTables.widths({}, {"": sparse_count})[""] if sparse_count else 0,
    )


def facts_of(graph: GraphSize) -> GraphFacts:
    """What open settings of a run depend on, as far as sizes say it."""
    stored = graph.num_edges if graph.num_stored_edges is None else graph.num_stored_edges
    total = sum(graph.label_counts)
    shares = [count / total for count in graph.label_counts if count]
    return GraphFacts(
        num_train=int(graph.train),
        width=_dense_width(graph, graph.target),
        mean_degree=stored / max(1.0, graph.num_nodes),
        is_typed=len(graph.nodes) > 1 or len(graph.edges) > 1,
        entropy=-sum(share * math.log(share) for share in shares) if shares else None,
        has_val=graph.has_val,
        is_of_links=graph.is_of_links,
        num_relations=graph.num_relations if graph.is_of_links else 0,
    )


def _dense_width(graph: GraphSize, ntype: str) -> int:
    learnt = graph.learnt.get(ntype)
    return graph.features.get(ntype, 0) - (0 if learnt is None else learnt.width)


def exchanges_of(config: RunConfig) -> Exchanges:
    """How a run's rows travel; the mode is still to be chosen."""
    if not isinstance(config, FullBatchConfig):
        return Exchanges(mode="oneshot")
    has_reverses, _ = _wants(config, is_typed=False)
    return Exchanges(
        mode="oneshot",
        has_reverses=has_reverses,
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
    tables = [{f"{t}/{name}": x for t in graph.ntypes for name, x in graph.nodes[t].data.items()}]
    features, learnt, itemsize = _widths_of(graph.ntypes, tables)
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
        learnt=learnt,
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


def _widths_of(
    ntypes: Sequence[str], tables: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[str, int], dict[str, LearntColumns], int]:
    """Node type to the columns that a network is given, those that are learnt, bytes of a number.

    Args:
        tables: Of each part, ``type/name`` to rows of nodes.
    """
    features: dict[str, int] = {}
    learnt: dict[str, LearntColumns] = {}
    itemsize = 4
    for ntype in ntypes:
        rows = tables[0].get(f"{ntype}/feat")
        if rows is not None and rows.ndim == 2:
            features[ntype], itemsize = int(rows.shape[1]), rows.element_size()
        of_type = [
            [table[f"{ntype}/{name}"] for table in tables if f"{ntype}/{name}" in table]
            for name in ("categories", "feat_columns")
        ]
        tops = [[int(x.max()) + 1 if x.numel() else 1 for x in parts] for parts in of_type]
        counts = [
            max(int(x[:, number].max()) + 1 if len(x) else 1 for x in of_type[0])
            for number in range(of_type[0][0].shape[1] if of_type[0] else 0)
        ]
        columns = max(of_type[1], key=len, default=None)
        if counts or columns is not None:
            learnt[ntype] = learnt_columns(counts, max(tops[1], default=0), columns)
            features[ntype] = features.get(ntype, 0) + learnt[ntype].width
    return features, learnt, itemsize


@dataclass(frozen=True)
class _EdgesOfTask:
    """Of a part, which edges of each relation that a task is on have a loss or are scored.

    Args:
        held_out: Those of link prediction that carry no messages.
        reverse_of: The relation that holds their reverses.
        number: Relation numbers of all edges, where the only relation's carry them.
    """

    train: Mapping[CanonicalEType, Tensor]
    scored: Mapping[CanonicalEType, Tensor]
    held_out: Mapping[CanonicalEType, Tensor]
    evaluated: int
    reverse_of: Mapping[CanonicalEType, CanonicalEType]
    number: Tensor | None


def _edges_of_task(data: PartitionData, task: TaskInfo, is_of_links: bool) -> _EdgesOfTask:
    train, scored, held_out, sizes = {}, {}, {}, [0, 0]
    for etype in task.targets:
        key, fields = etype_key(etype), data.edge_features
        is_known = torch.ones(data.edges[etype].num_edges, dtype=torch.bool)
        label = fields.get(f"{key}/label")
        if label is not None and not is_of_links:
            is_known = ~label.isnan() if label.is_floating_point() else label >= 0
            is_known = is_known if is_known.ndim == 1 else is_known.all(1)
        masks = [
            fields[f"{key}/{split}_mask"].bool() & is_known
            if f"{key}/{split}_mask" in fields
            else torch.zeros_like(is_known)
            for split in SPLITS
        ]
        train[etype], scored[etype] = masks[0], masks[0] | masks[1] | masks[2]
        sizes = [size + int(mask.sum()) for size, mask in zip(sizes, masks[1:], strict=True)]
        if is_of_links:
            held_out[etype] = masks[1] | masks[2]
    is_plain, number = len(data.canonical_etypes) == 1, None
    if is_plain and task.targets:
        number = data.edge_features.get(f"{etype_key(task.targets[0])}/etype")
    reverse_of = {
        etype: back or etype
        for etype, back in zip(task.targets, task.reverses, strict=True)
        if back or (is_plain and number is None)  # as reverses_of of a shard
    }
    return _EdgesOfTask(train, scored, held_out, max(sizes), reverse_of, number)


def size_of_partition(path: Path, config: RunConfig) -> tuple[GraphSize, str]:
    """A partition, counted, and the kind of its task.

    Raises:
        PartitionFormatError: It is missing or damaged.
    """
    task = read_task(path)
    stored = read_config(path)
    parts = [load_dgl_partition_data(path, part) for part in range(stored.num_parts)]
    first = parts[0]
    task = with_asked_task(first, task, config)
    kind, is_of_links = task.kind, task.kind == LINK_PREDICTION
    features, learnt, itemsize = _widths_of(
        first.node_type_names, [data.node_features for data in parts]
    )
    of_task = [_edges_of_task(data, task, is_of_links) for data in parts]
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
    if (config.model == "rgcn" or is_of_links) and not relations:
        numbers = [
            int(rows.max()) + 1
            for data in parts
            for name, rows in data.edge_features.items()
            if name.endswith("/etype") and rows.numel()
        ]
        relations = max(numbers, default=0)
    sizes = _part_sizes(parts, config, train_of, of_task)
    edges: dict[CanonicalEType, float] = {}
    for size in sizes:
        for etype, count in size.edges.items():
            edges[etype] = edges.get(etype, 0) + count
    graph = GraphSize(
        name=first.graph_name,
        nodes={t: first.node_map(t).num_ids for t in first.node_type_names},
        edges=edges,
        features=features,
        learnt=learnt,
        edge_widths=_edge_widths(first),
        relations=task.targets,
        is_of_links=is_of_links,
        scored=sum(size.scored for size in sizes),
        evaluated=sum(size.evaluated for size in sizes),
        scored_width=sum(_edge_width(first, etype) for etype in task.targets),
        num_classes=classes,
        target=task.targets[0][2] if task.targets else target or first.node_type_names[0],
        train=sum(size.train for size in sizes),
        itemsize=itemsize,
        num_relations=relations,
        num_stored_edges=float(sum(e.num_edges for data in parts for e in data.edges.values())),
        label_counts=_label_counts(masked["train_mask"]),
        has_val=_has_labels(masked["val_mask"]) or task.is_on_edges,
        parts=tuple(sizes),
        disk=float(sum(f.stat().st_size for f in path.parent.rglob("*") if f.is_file())),
    )
    return graph, kind


def _edge_widths(data: PartitionData) -> dict[CanonicalEType, dict[str, int]]:
    """Relation to the width of what its edges have, by name."""
    widths: dict[CanonicalEType, dict[str, int]] = {}
    for etype in data.canonical_etypes:
        if width := _edge_width(data, etype):
            widths.setdefault(etype, {})["feat"] = width
        if f"{etype_key(etype)}/weight" in data.edge_features:
            widths.setdefault(etype, {})["weight"] = 1
    is_typed = len(data.node_type_names) > 1 or len(data.canonical_etypes) > 1
    for etype in tuple(widths):  # reverses that are added have what their edges have
        widths.setdefault(_reverse_of(etype, is_typed), widths[etype])
    return widths


def _edge_width(data: PartitionData, etype: CanonicalEType) -> int:
    """Columns of the features of an edge that a scorer is given."""
    columns = data.edge_features
    rows, numbers = (columns.get(f"{etype_key(etype)}/{name}") for name in ("feat", "categories"))
    width = 0 if rows is None or rows.ndim != 2 else int(rows.shape[1])
    if numbers is not None and numbers.numel():
        width += sum(table_width(int(top) + 1) for top in numbers.max(0).values)
    return width


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
    parts: Sequence[PartitionData],
    config: RunConfig,
    train_of: Sequence[float],
    of_task: Sequence[_EdgesOfTask],
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
    on_edges = _sizes_on_edges(first, ends, owners, of_task)
    for etype, lost in _held_out(ends, of_task).items():
        ends[etype] = [
            (src[~gone], dst[~gone]) for (src, dst), gone in zip(ends[etype], lost, strict=True)
        ]
        owners[etype] = [o[~gone] for o, gone in zip(owners[etype], lost, strict=True)]
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
    counted = _counted(first, into, train_of)
    return (
        counted
        if not of_task[0].train
        else [replace(part, **more) for part, more in zip(counted, on_edges, strict=True)]
    )


def _held_out(
    ends: Mapping[CanonicalEType, _EndsByPart], of_task: Sequence[_EdgesOfTask]
) -> dict[CanonicalEType, list[Tensor]]:
    """Relation to the edges, by part, that are evaluated, and their reverses."""
    lost = {e: [of.held_out[e].clone() for of in of_task] for e in of_task[0].held_out}
    for etype in of_task[0].held_out:
        back = of_task[0].reverse_of.get(etype)
        if back is None:
            continue
        most = 1 + max((int(x.max()) for pair in ends[back] for x in pair if x.numel()), default=0)
        numbers = [
            torch.zeros_like(src) if of.number is None else of.number.long()
            for (src, _), of in zip(ends[back], of_task, strict=True)
        ]
        count = 1 + max((int(x.max()) for x in numbers if x.numel()), default=0)

        def codes(src: Tensor, dst: Tensor, number: Tensor, most: int, count: int) -> Tensor:
            return (src * most + dst) * count + number

        of_reverses = []
        for (src, dst), of, number in zip(ends[etype], of_task, numbers, strict=True):
            chosen = of.held_out[etype]
            # Numbers of reverses are further by half of them.
            of_edges = number[chosen]
            if of.number is not None:
                of_edges = (of_edges + count // 2) % count
            of_reverses.append(codes(dst[chosen], src[chosen], of_edges, most, count))
        wanted = torch.unique(torch.cat(of_reverses))
        found = [
            torch.isin(codes(src, dst, number, most, count), wanted)
            for (src, dst), number in zip(ends[back], numbers, strict=True)
        ]
        before = lost.get(back, [torch.zeros_like(f) for f in found])
        lost[back] = [a | b for a, b in zip(before, found, strict=True)]
    return lost


def _sizes_on_edges(
    first: PartitionData,
    ends: Mapping[CanonicalEType, _EndsByPart],
    owners: Mapping[CanonicalEType, Sequence[Tensor]],
    of_task: Sequence[_EdgesOfTask],
) -> list[dict[str, Any]]:
    """Of each part the edges of the task, and the rows of sources that come and are sent."""
    lost = _held_out(ends, of_task)
    sent: list[dict] = [{} for _ in of_task]
    sizes: list[dict[str, Any]] = []
    for rank, of in enumerate(of_task):
        remote: dict[str, list[Tensor]] = {}
        train = 0
        for etype, mask in of.train.items():
            chosen = mask & ~lost[etype][rank] if etype in lost else mask
            train += int(chosen.sum())
            is_remote = chosen & (owners[etype][rank] != rank)
            remote.setdefault(etype[0], []).append(ends[etype][rank][0][is_remote])
        distinct = {t: torch.unique(torch.cat(parts)) for t, parts in remote.items()}
        for ntype, ids in distinct.items():
            _note_senders(sent, "", ids, torch.tensor(first.node_map(ntype).starts[1:]))
        sizes.append(
            {
                "train": float(train),
                "scored": float(sum(int(mask.sum()) for mask in of.scored.values())),
                "evaluated": float(of.evaluated),
                "fetched": float(sum(map(len, distinct.values()))),
            }
        )
    for size, of_rank in zip(sizes, sent, strict=True):
        size["fetched"] = size["fetched"], float(of_rank.get("", 0.0))
    return sizes


def _counted(
    first: PartitionData,
    into: Sequence[Mapping[CanonicalEType, Sequence[tuple[Tensor, Tensor, Tensor]]]],
    train_of: Sequence[float],
) -> list[PartSize]:
    num_parts, ntypes = len(into), first.node_type_names
    sent = [dict.fromkeys(ntypes, 0.0) for _ in range(num_parts)]
    sent_of: list[dict[CanonicalEType, float]] = [{} for _ in range(num_parts)]
    fewest, sums, states = _fewest_rows(first, into)
    has_reverses = _has_reverses(first, into)
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
            sums=sums[rank],
            states=states[rank],
            has_reverses=has_reverses,
            cut=cut,
            train=train_of[rank],
        )
        for rank, (halo, halo_of, cut, numbers) in enumerate(made)
    ]


def _fewest_rows(
    first: PartitionData,
    into: Sequence[Mapping[CanonicalEType, Sequence[tuple[Tensor, Tensor, Tensor]]]],
) -> tuple[
    list[dict[str, tuple[float, float]]],
    list[dict[str, tuple[SumsByLength, SumsByLength]]],
    list[StatesSize | None],
]:
    """Of each part what comes and is sent by node type where partial sums are made.

    Rows and sums; sums of several rows alone; and what is sent for attention, where there is one
    relation.
    """
    num_parts = len(into)
    found: list[dict[str, tuple[float, float]]] = [{} for _ in into]
    found_sums: list[dict[str, tuple[SumsByLength, SumsByLength]]] = [{} for _ in into]
    states: list[StatesSize | None] = [None for _ in into]
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
            read, come, sums, *of_lengths = torch.stack(counts, 1)  # [part, owner]
            if saves_rows(int(read.sum()), int(come.sum())):
                totals = float(read.sum()), float((come - sums).sum()), float(sums.sum())
                for rank in range(num_parts):
                    both, made, *by_length = (
                        (float(part[rank].sum()), float(part[:, rank].sum()))
                        for part in (come, sums, *of_lengths)
                    )
                    found[rank][ntype] = both
                    come_by_length, sent_by_length = zip(*by_length, strict=True)
                    found_sums[rank][ntype] = come_by_length, sent_by_length
                    if len(into[rank]) == 1:
                        rows = both[0] - made[0], both[1] - made[1]
                        states[rank] = StatesSize(rows=rows, states=made, totals=totals)
    return found, found_sums, states


def _has_reverses(
    first: PartitionData,
    into: Sequence[Mapping[CanonicalEType, Sequence[tuple[Tensor, Tensor, Tensor]]]],
) -> bool:
    """Whether there is one relation, of which each edge has its reverse."""
    etypes = {etype for edges in into for etype in edges}
    if len(etypes) != 1:
        return False
    (etype,) = etypes
    if etype[0] != etype[2]:
        return False
    starts = torch.tensor(first.node_map(etype[0]).starts[:-1])
    total = torch.zeros(1, dtype=torch.int64)
    for rank, edges in enumerate(into):
        if etype in edges:
            local = _local_edges(first, etype, rank, edges[etype])
            total += hashed_without_reverses(local, starts, rank)
    return not bool(total)


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
