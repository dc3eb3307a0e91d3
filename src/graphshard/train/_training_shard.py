# SPDX-License-Identifier: Apache-2.0
"""TrainingShard: one rank's part of a graph, with what a training run needs from it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._base.device import choose_device
from .._base.file_rows import RowsInFiles
from .._base.typing import CanonicalEType
from ..comm import agree, is_initialized, rank, world_size
from ..comm.collectives import reduce_floats, reduce_ints, shared_errors
from ..data.dataset import SPLITS
from ..data.task import TaskInfo, read_task, task_warnings
from ..fullbatch import (
    GraphShardManager,
    PartitionData,
    construct_full_graph,
    load_dgl_partition_data,
)
from ..fullbatch.topology import agree_on_build
from ..partition.format import etype_key
from ._categories import CategoryTables, SparseFeatures
from ._config import NEED_IN_EDGES, FullBatchConfig, ResolvedConfig, RunConfig
from ._defaults import GraphFacts
from ._edges import RaggedIds, TargetEdges
from ._graph_edges import with_both_directions, with_self_loops
from ._links import LinkFacts, edges_of_pairs, global_ends, held_out, link_facts
from ._row_files import row_folders, rows_with_dtype
from ._tasks import (
    ACCURACY,
    EDGE_CLASSIFICATION,
    EDGE_REGRESSION,
    LINK_PREDICTION,
    NODE_CLASSIFICATION,
    NODE_REGRESSION,
    Classes,
    Links,
    SeveralLabels,
    Task,
    Values,
    chosen_metrics,
)

_UNEVEN = 2 / 3  # share of the larger of two classes from which on accuracy says little
_MOST_NAMED = 3  # relations in a line
_LAST_COLUMN = 2**31 - 2  # of sparse features
_NUMBERS_AT_LEAST = 4096  # classes or relations that are believed on any graph, however small


@dataclass(frozen=True)
class TrainingShard:
    """One rank's part of a graph, with what is to be learnt of it.

    A row is a node of the target type, or one of the edges of a task on edges.

    Args:
        features: Node type to its features ``[num_owned, width]``; types without are absent. Those
            that stay in files are as they are stored, on the CPU.
        categories: Node type to ``[num_owned, k]`` int64, the numbers of what its nodes are in
            each of ``k`` columns, 0 where unknown; types without are absent.
        sparse: Node type to the non-zeros of features that are too wide to be dense; types without
            are absent.
        edge_features: Relation to the features of its edges, ``[num_edges, width]``.
        edge_weights: Relation to the weights of its edges, ``[num_edges]``.
        edge_categories: Relation to the categories of its edges, as those of nodes.
        relation: ``(etype, norm)`` of a graph whose edges carry a relation number, else None:
            ``[num_edges]`` int64 and ``[num_edges, 1]``.
        target: Node type that is predicted; of a task on edges that of the destinations, of the
            first relation.
        edges: Of a task on edges, the rows. In link prediction those of val and test are not among
            the edges of ``data``.
        links: Of link prediction, all edges there are.
        task: What the network's scores mean.
        label: By owned row: ``[n]`` int64, a class, -1 where unknown; ``[n, num_classes]`` int64 of
            0 and 1, -1 where unknown; or float64 ``[n, k]``, values, NaN where unknown.
        rows: Split to the owned rows in it that have a label.
        num_nodes: Split to its number of such rows on all ranks.
        num_all: Node type to its number of nodes on all ranks.
        device: Where the run computes.
    """

    data: PartitionData
    features: Mapping[str, Tensor]
    categories: Mapping[str, Tensor]
    edge_features: Mapping[CanonicalEType, Tensor]
    edge_weights: Mapping[CanonicalEType, Tensor]
    edge_categories: Mapping[CanonicalEType, Tensor]
    relation: tuple[Tensor, Tensor] | None
    target: str
    edges: TargetEdges | None
    links: LinkFacts | None
    task_info: TaskInfo
    task: Task
    label: Tensor
    rows: Mapping[str, Tensor]
    num_nodes: Mapping[str, int]
    num_all: Mapping[str, int]
    num_classes: int
    num_relations: int
    device: torch.device
    class_names: tuple[str, ...] = ()
    category_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    edge_category_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sparse: Mapping[str, SparseFeatures] = field(default_factory=dict)
    sparse_counts: Mapping[str, int] = field(default_factory=dict)
    facts: GraphFacts | None = None
    notes: tuple[str, ...] = ()
    num_added_edges: int = 0

    def on_device(self) -> TrainingShard:
        """The same with what a model reads on ``device``; columns of ``data`` stay on the CPU."""
        device = self.device
        if device.type == "cpu":
            return self
        relation = self.relation
        if relation is not None:
            relation = relation[0].to(device), relation[1].to(device)
        return replace(
            self,
            data=self.data.to(device, feature_device="cpu"),
            features={
                ntype: rows if f"{ntype}/feat" in self.data.in_files else rows.to(device)
                for ntype, rows in self.features.items()
            },
            categories={ntype: rows.to(device) for ntype, rows in self.categories.items()},
            sparse={ntype: rows.to(device) for ntype, rows in self.sparse.items()},
            edge_features={etype: rows.to(device) for etype, rows in self.edge_features.items()},
            edge_weights={etype: rows.to(device) for etype, rows in self.edge_weights.items()},
            edge_categories={e: rows.to(device) for e, rows in self.edge_categories.items()},
            relation=relation,
            edges=None if self.edges is None else self.edges.to(device),
            links=None if self.links is None else self.links.to(device),
            label=self.label.to(device),
            rows={split: rows.to(device) for split, rows in self.rows.items()},
        )

    @property
    def feature_widths(self) -> dict[str, int]:
        """Node type to the columns that a network is given; types without are absent."""
        widths = {ntype: rows.shape[1] for ntype, rows in self.features.items()}
        added = CategoryTables.widths(self.category_counts, self.sparse_counts)
        for ntype, width in added.items():
            widths[ntype] = widths.get(ntype, 0) + width
        return {t: widths[t] for t in self.data.node_type_names if t in widths}

    @property
    def edge_feature_widths(self) -> dict[CanonicalEType, int]:
        """Relation to the columns that a network is given; relations without are absent."""
        added = CategoryTables.widths(self.edge_category_counts)
        widths = {}
        for etype in self.data.canonical_etypes:
            feat = self.edge_features.get(etype)
            width = 0 if feat is None else feat.shape[1]
            if width := width + added.get(etype_key(etype), 0):
                widths[etype] = width
        return widths

    def edge_rows(self, model: str) -> dict[CanonicalEType, dict[str, Tensor]]:
        """Relation to what the model reads of its edges, by name; relations without are absent.

        Where there are ``categories``, the learner makes ``feat`` of both.
        """
        columns = {
            "weight": self.edge_weights,
            "feat": self.edge_features,
            "categories": self.edge_categories,
        }
        names = edge_columns(model)
        names += ("categories",) * ("feat" in names)
        rows: dict[CanonicalEType, dict[str, Tensor]] = {}
        for name in names:
            for etype, column in columns[name].items():
                rows.setdefault(etype, {})[name] = column
        if model == "rgcn" and self.relation is not None:
            (etype,) = self.data.canonical_etypes
            rows[etype] = dict(zip(("etype", "norm"), self.relation, strict=True))
        return rows

    @property
    def is_typed(self) -> bool:
        """Whether the graph has several node types or relations."""
        return len(self.data.node_type_names) > 1 or len(self.data.canonical_etypes) > 1

    @property
    def targets(self) -> str | tuple[str, ...]:
        """Node types of which a network gives rows: one, or by name those of the edges' ends."""
        if self.edges is None or not self.is_typed:
            return self.target
        return self.edges.node_types

    def out_width(self, config: ResolvedConfig) -> int:
        """Columns of what a network gives to a node: scores, or what edges are scored by."""
        if self.edges is None:
            return self.task.width
        return config.hidden * (config.heads if config.model in ("gat", "gatv2") else 1)

    @property
    def relation_names(self) -> tuple[str, ...]:
        """What relations of link prediction are called, by number."""
        if self.edges is not None and len(self.edges.relations) > 1:
            return tuple(map(etype_key, self.edges.relations))
        count = self.num_relations if self.links is None else self.links.num_relations
        return names_of_relations(self.task_info.relation_names, count)

    @property
    def original_ids(self) -> dict[str, Tensor]:
        """Node type to the ids that its owned nodes had before the graph was partitioned."""
        features = self.data.node_features
        return {t: features[f"{t}/orig_id"] for t in self.data.node_type_names}

    def graph(
        self, config: ResolvedConfig, row_width: int, data: PartitionData | None = None
    ) -> GraphShardManager:
        """The whole graph, or one with its edges in the same order; collective."""
        data = self.data if data is None else data
        graph = construct_full_graph(data, row_width=row_width, **config.graph_options())
        for rows in self.features.values():
            graph.mark_constant(rows)
        for etype, columns in self.edge_rows(config.model).items():
            for name, rows in columns.items():
                graph.mark_constant(rows)
                # One of pairs has another relation, and the edges in the same order.
                where = etype if data is self.data else graph.canonical_etypes[0]
                graph.edges[where].data[name] = rows
        return graph


def load_shard(config: ResolvedConfig) -> TrainingShard:
    """Read this rank's part, every byte of it, and check that all ranks read one partition.

    Collective. What was read is on the CPU, also for a run on GPUs.

    Raises:
        PartitionFormatError: A part or its description is missing or damaged.
        ValueError: The graph cannot be trained on with this configuration. Raised on every rank,
            as is the other.
    """
    error: Exception | None = None
    shard: TrainingShard | None = None
    try:
        shard = _read(config)
    except Exception as caught:
        error = caught
    if is_initialized():
        agree_on_build(None if shard is None else shard.data.build, error, None)
        agree(config.to_json(), "the configuration of the run")
    elif error is not None:
        raise error
    assert shard is not None
    if shard.task_info.kind == LINK_PREDICTION:
        shard = _without_held_out(shard, config)
    shard = _counted(shard, config)
    _check_model(shard, config)
    shard = _with_edges_added(shard, config)
    _check_relations(shard, config)
    _warn(shard, config)
    return _with_edges_mapped(shard, config) if isinstance(config, FullBatchConfig) else shard


def check_num_workers(config: RunConfig, num_parts: int, num_workers: int) -> None:
    """Whether there is a worker for each part."""
    if num_parts != num_workers:
        raise ValueError(
            f"{config.data} has {num_parts} parts, which need as many workers (got "
            f"{num_workers}); start {num_parts} workers, or partition into {num_workers} parts"
        )


def _read(config: ResolvedConfig) -> TrainingShard:
    """What this rank can say alone; counts are its own, or 0 where nothing is known."""
    choose_device(config.device)
    stays = config.memory_bytes is not None
    data = load_dgl_partition_data(config.data, rank(), checksums=True, leave_features=stays)
    task = read_task(config.data)
    check_num_workers(config, data.num_parts, world_size())
    task = with_asked_task(data, task, config)
    owned = []
    for etype in task.targets:
        key, count = etype_key(etype), data.partition_book.num_edges()
        if task.kind == LINK_PREDICTION:
            label = torch.ones(data.edges[etype].num_edges, dtype=torch.int64)
            is_known = label > 0
        else:
            label, is_known = _labels(data.edge_features[f"{key}/label"], key, task, "edge")
        rows = _rows_of_splits(data.edge_features, key, "edge", is_known)
        owned.append(TaskRows(etype, label, rows))
    if not task.targets:
        key = _target(data, task)
        count = data.node_map(key).num_ids
        label, is_known = _labels(data.node_features[f"{key}/label"], key, task, "node")
        rows = _rows_of_splits(data.node_features, key, "node", is_known)
        owned.append(TaskRows(key, label, rows))
    word = "edges" if task.targets else "nodes"
    for of in owned:
        if of.label.ndim == 1 and not of.label.is_floating_point():
            key = of.owner if isinstance(of.owner, str) else etype_key(of.owner)
            _check_numbers(of.label, count, f"{key}/label", word, config)
    for name, said, most in (
        ("classes", task.num_classes, count),
        ("relations", task.num_relations, data.partition_book.num_edges()),
    ):
        if said is not None and said > max(most, _NUMBERS_AT_LEAST):
            raise ValueError(
                f"{config.data} is described as having {said} {name}, more than there is on a "
                "graph of its size; partition the graph again"
            )
    return assemble(data, task, config, owned)


@dataclass(frozen=True)
class TaskRows:
    """The rows of a task that are nodes of a type, or edges of a relation.

    Args:
        label: As a `TrainingShard` has it, of all nodes or edges.
        rows: Split to which of these are in it.
    """

    owner: str | CanonicalEType
    label: Tensor
    rows: Mapping[str, Tensor]


def assemble(
    data: PartitionData,
    task_info: TaskInfo,
    config: ResolvedConfig,
    owned: Sequence[TaskRows],
    **values: Any,
) -> TrainingShard:
    """A shard of what this rank has read; counts are its own, or 0 where nothing is known.

    Args:
        owned: The rows of one node type, or of each relation of the task.
        **values: Fields that are known better.
    """
    edges, label, rows = None, owned[0].label, dict(owned[0].rows)
    edge_features = _edge_features(data, config.torch_dtype)
    edge_categories = _edge_categories(data)
    relation = _relation(data, config, task_info.kind == LINK_PREDICTION)
    if task_info.is_on_edges:
        numbers = None if relation is None else relation[0]
        edges, label, rows = _target_edges(data, edge_features, edge_categories, numbers, owned)
        if edges.feat is not None:  # those in files are as they are stored
            edges = replace(edges, feat=edges.feat.to(config.torch_dtype))
    return TrainingShard(
        **{
            "data": data,
            "features": _features(data, config.torch_dtype),
            "categories": _categories(data),
            "sparse": sparse_features(data, config.torch_dtype),
            "edge_features": edge_features,
            "edge_weights": _edge_weights(data, config.torch_dtype),
            "edge_categories": edge_categories,
            "relation": relation,
            "target": owned[0].owner if edges is None else edges.relations[0][2],
            "edges": edges,
            "links": None,
            "task_info": task_info,
            "task": Classes(0),  # until all ranks have counted
            "label": label,
            "rows": rows,
            "num_nodes": {},
            "num_all": {t: data.node_map(t).num_ids for t in data.node_type_names},
            "num_classes": task_info.num_classes or 0,
            "num_relations": task_info.num_relations or 0,
            "device": choose_device(config.device),
            "class_names": task_info.class_names,
            **values,
        }
    )


def _rows_of_splits(
    fields: Mapping[str, Tensor], key: str, word: str, is_known: Tensor
) -> dict[str, Tensor]:
    """Split to the nodes or edges in its mask that have a label."""
    rows = {}
    for split in SPLITS:
        mask = fields.get(f"{key}/{split}_mask")
        if mask is None:
            mask = torch.zeros_like(is_known)
        if mask.shape != is_known.shape:
            raise ValueError(
                f"{split}_mask must have one value per {word} (got shape {tuple(mask.shape)} for "
                f"{is_known.numel()} {word}s of type '{key}')"
            )
        if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
            other = mask[(mask != 0) & (mask != 1)][0].item()
            raise ValueError(
                f"{split}_mask must hold True or False, or 1 or 0, for each {word} (got {other}); "
                "make a mask of ids with mask[ids] = True"
            )
        rows[split] = (mask.to(torch.bool) & is_known).nonzero().view(-1)
    return rows


def with_asked_task(data: PartitionData, task: TaskInfo, config: RunConfig) -> TaskInfo:
    """The task that the partition is for, or another one that is asked for."""
    kind = config.task or task.kind
    if kind.endswith("regression") and kind != task.kind and task.class_names:
        raise ValueError(
            f"{config.data} has labels that were made classes ({', '.join(task.class_names[:5])}), "
            f"and no values, which {kind} needs; partition with --label-task regression, or task = "
            '"regression" in the label of the TOML file'
        )
    if kind.startswith("node"):
        if config.relations is not None:
            raise ValueError(
                f"relations is for tasks on edges (got relations={config.relations!r}, {kind}); "
                "leave it out"
            )
        return task if kind == task.kind else replace(task, kind=kind, target=None, reverse_of=None)
    field = "train_mask" if kind == LINK_PREDICTION else "label"
    having = [t for t in data.canonical_etypes if f"{etype_key(t)}/{field}" in data.edge_features]
    targets = list(task.targets or having)
    if config.relations is not None:
        targets = [_named(name, data.canonical_etypes) for name in config.relations.split(",")]
    lacking = [etype for etype in targets if etype not in having]
    if lacking or not targets:
        names = ", ".join(map(str, having))
        fields = "train_mask, val_mask and test_mask"
        raise ValueError(
            f"{'the target' if lacking else 'one'} relation must have the feature "
            f"'{field}', of each edge, for {kind} ("
            + (f"{len(having)} have: {names}" if having else "none has")
            + f"); set {fields if kind == LINK_PREDICTION else f'label, {fields}'} in its edata "
            "before partitioning"
        )
    known = dict(zip(task.targets, task.reverses, strict=True))
    reverses = tuple(known.get(etype) for etype in targets)
    return replace(task, kind=kind, target=tuple(targets), reverse_of=reverses)


def _named(name: str, etypes: Sequence[CanonicalEType]) -> CanonicalEType:
    """The relation that a name, or "source:name:target", stands for."""
    fitting = [etype for etype in etypes if name in (etype[1], etype_key(etype))]
    if len(fitting) != 1:
        there = ", ".join(map(etype_key, etypes[:10])) + (", ..." if len(etypes) > 10 else "")
        raise ValueError(
            f"relations must name relations of the graph, each by a name that only one has (got "
            f"{name!r}, which {len(fitting)} have; there are {there}); write source:name:target"
        )
    return fitting[0]


def _target_edges(
    data: PartitionData,
    features: Mapping[CanonicalEType, Tensor],
    categories: Mapping[CanonicalEType, Tensor],
    etype: Tensor | None,
    owned: Sequence[TaskRows],
) -> tuple[TargetEdges, Tensor, dict[str, Tensor]]:
    """The edges that are in a split, with labels and rows of these alone."""
    chosen = [torch.unique(torch.cat(list(of.rows.values()))) for of in owned]
    ends: list[tuple[Tensor, Tensor]] = []
    rows: dict[str, list[Tensor]] = {split: [] for split in owned[0].rows}
    first = 0
    relations: list[CanonicalEType] = []
    for of, places in zip(owned, chosen, strict=True):
        assert isinstance(of.owner, tuple)
        relations.append(of.owner)
        src, dst = global_ends(data, of.owner)
        ends.append((src[places], dst[places]))
        for split, of_split in of.rows.items():
            rows[split].append(first + torch.searchsorted(places, of_split))
        first += len(places)
    number = torch.cat([torch.full_like(p, n) for n, p in enumerate(chosen)])
    carried = number if etype is None or len(owned) > 1 else etype[chosen[0]]
    edges = TargetEdges(
        relations=tuple(relations),
        number=number,
        index=torch.cat(chosen),
        src=torch.cat([src for src, _ in ends]),
        dst=torch.cat([dst for _, dst in ends]),
        feat=_side_by_side([features.get(etype) for etype in relations], chosen),
        categories=_side_by_side([categories.get(etype) for etype in relations], chosen),
        etype=carried,
    )
    label = torch.cat([of.label[places] for of, places in zip(owned, chosen, strict=True)])
    return edges, label, {split: torch.cat(parts) for split, parts in rows.items()}


def _side_by_side(columns: Sequence[Tensor | None], chosen: Sequence[Tensor]) -> Tensor | None:
    """Rows of several relations, each in columns of its own, with zeros in those of others."""
    known = [rows for rows in columns if rows is not None]
    if not known:
        return None
    shape = sum(map(len, chosen)), sum(rows.shape[1] for rows in known)
    made, first, before = known[0].new_zeros(shape), 0, 0
    for rows, places in zip(columns, chosen, strict=True):
        if rows is not None:
            made[first : first + len(places), before : before + rows.shape[1]] = rows[places]
            before += rows.shape[1]
        first += len(places)
    return made


def _labels(raw: Tensor, target: str, task: TaskInfo, word: str) -> tuple[Tensor, Tensor]:
    """Labels as a `TrainingShard` has them, and which rows have one."""
    if task.kind in (NODE_REGRESSION, EDGE_REGRESSION):
        values = raw.to(torch.float64)
        values = values.unsqueeze(1) if raw.ndim == 1 else values
        if values.ndim != 2 or not values.shape[1]:
            raise ValueError(
                f"labels of {task.kind} must be a number, or a row of them, per {word} (got "
                f"{raw.dtype} of shape {tuple(raw.shape)} for '{target}')"
            )
        if bool(values.isinf().any()):
            raise ValueError(
                f"labels must be finite, or NaN where unknown (got {int(values.isinf().sum())} "
                f"infinite ones for '{target}'); replace them and partition again"
            )
        return values, ~values.isnan().any(1)
    if raw.is_floating_point() or raw.is_complex() or raw.ndim not in (1, 2):
        raise ValueError(
            f"labels must be one class number per {word}, or a row of 0 and 1 for the classes (got "
            f"{raw.dtype} of shape {tuple(raw.shape)} for '{target}'); to predict values give "
            f"task '{word} regression'"
        )
    if raw.ndim == 1 and raw.dtype != torch.bool:
        return raw.to(torch.int64), raw >= 0
    label = raw.to(torch.int64)
    if raw.ndim == 1:
        return label, torch.ones_like(raw)
    if bool(((label < -1) | (label > 1)).any()) or not label.shape[1]:
        raise ValueError(
            f"labels of several classes per {word} must be 0 or 1, or -1 where unknown (got "
            f"{int(label.max()) if label.numel() else 'no column'} for '{target}'); for one class "
            "store a vector"
        )
    return label, (label >= 0).all(1)


def _categories(data: PartitionData) -> dict[str, Tensor]:
    columns = data.node_features
    return {
        ntype: _checked_categories(columns[f"{ntype}/categories"], ntype, "node")
        for ntype in data.node_type_names
        if f"{ntype}/categories" in columns
    }


def _edge_categories(data: PartitionData) -> dict[CanonicalEType, Tensor]:
    columns, keys = data.edge_features, {e: etype_key(e) for e in data.canonical_etypes}
    return {
        etype: _checked_categories(columns[f"{key}/categories"], key, "edge")
        for etype, key in keys.items()
        if f"{key}/categories" in columns
    }


def _checked_categories(columns: Tensor, name: str, word: str) -> Tensor:
    if columns.ndim != 2 or columns.is_floating_point() or bool((columns < 0).any()):
        raise ValueError(
            f"'categories' must be whole numbers from 0 on, a row per {word} (got "
            f"{columns.dtype} of shape {tuple(columns.shape)} for '{name}')"
        )
    return columns.to(torch.int64)


def sparse_features(data: PartitionData, dtype: torch.dtype) -> dict[str, SparseFeatures]:
    """Node type to its sparse features, checked."""
    sparse = {}
    for ntype in data.node_type_names:
        columns = data.node_features.get(f"{ntype}/feat_columns")
        values = data.node_features.get(f"{ntype}/feat_values")
        if columns is None and values is None:
            continue
        if (
            columns is None
            or values is None
            or columns.ndim != 2
            or columns.shape != values.shape
            or columns.is_floating_point()
            or not _are_column_numbers(columns)
        ):
            raise ValueError(
                f"'feat_columns' and 'feat_values' of '{ntype}' must be two matrices of one shape, "
                f"whole numbers from 0 to {_LAST_COLUMN} and values (got "
                + " and ".join(
                    "none" if c is None else f"{c.dtype} {tuple(c.shape)}"
                    for c in (columns, values)
                )
                + "); load_dataset(keep_sparse=True) makes them"
            )
        rows = _finite_rows(data, values, f"{ntype}/feat_values", 2, dtype)
        sparse[ntype] = SparseFeatures(columns.to(torch.int32), rows)
    return sparse


def _are_column_numbers(columns: Tensor) -> bool:
    if not columns.numel():
        return True
    least, most = columns.aminmax()
    return int(least) >= 0 and int(most) <= _LAST_COLUMN


def _edge_features(data: PartitionData, dtype: torch.dtype) -> dict[CanonicalEType, Tensor]:
    return {
        etype: _finite_rows(data, feat, f"{etype_key(etype)}/feat", 2, dtype, data.in_files)
        for etype in data.canonical_etypes
        if (feat := data.edge_features.get(f"{etype_key(etype)}/feat")) is not None
    }


def _edge_weights(data: PartitionData, dtype: torch.dtype) -> dict[CanonicalEType, Tensor]:
    return {
        etype: _finite_rows(data, weight, f"{etype_key(etype)}/weight", 1, dtype)
        for etype in data.canonical_etypes
        if (weight := data.edge_features.get(f"{etype_key(etype)}/weight")) is not None
    }


def _finite_rows(
    data: PartitionData,
    rows: Tensor,
    name: str,
    ndim: int,
    dtype: torch.dtype,
    in_files: Mapping[str, RowsInFiles] | None = None,
) -> Tensor:
    """Features or weights of edges, checked; those that stay in a file as they are stored."""
    if ndim == 1 and rows.ndim == 2 and rows.shape[1] == 1:
        rows = rows.view(-1)
    if rows.ndim != ndim or (rows.shape[-1:] == (0,) and ndim == 2):
        what = "a matrix with at least one column" if ndim == 2 else "one number per edge"
        raise ValueError(
            f"'{name}' of part {data.rank} must be {what} (got shape {tuple(rows.shape)})"
        )
    in_file = None if in_files is None else in_files.get(name)
    converted = rows.to(dtype) if in_file is None else rows
    if not _is_finite(converted, in_file, dtype):
        converted = rows.to(dtype)
        bad = ~converted.isfinite()
        first = float(rows[bad.nonzero()[0].unbind()])
        raise ValueError(
            f"'{name}' of part {data.rank} must be finite in {dtype} (got {first}, and "
            f"{int(bad.sum())} of {bad.numel()} values that are not); replace such values and "
            "partition again"
        )
    return converted


def _target(data: PartitionData, task: TaskInfo) -> str:
    labelled = [t for t in data.node_type_names if f"{t}/label" in data.node_features]
    if task.target in labelled:
        return str(task.target)
    if len(labelled) != 1:
        candidates = f"{len(labelled)} have: {', '.join(labelled)}" if labelled else "none has"
        raise ValueError(
            "one node type must have the feature 'label', the class of each node "
            f"({candidates}); set ndata['label'], train_mask, val_mask and test_mask before "
            "partitioning; of tables, name the column by graphshard partition --label"
        )
    return labelled[0]


def _features(data: PartitionData, dtype: torch.dtype) -> dict[str, Tensor]:
    features = {}
    for ntype in data.node_type_names:
        feat = data.node_features.get(f"{ntype}/feat")
        if feat is None:
            continue
        if feat.ndim != 2 or not feat.shape[1]:
            raise ValueError(
                f"features must be a matrix with at least one column (got shape "
                f"{tuple(feat.shape)} for '{ntype}/feat'); leave 'feat' out to train embeddings"
            )
        in_file = data.in_files.get(f"{ntype}/feat")
        rows = feat.to(dtype) if in_file is None else feat
        if not _is_finite(rows, in_file, dtype):
            rows = feat.to(dtype)
            node, column = map(int, (~rows.isfinite()).nonzero()[0])
            bad = (~rows.isfinite()).any(1)
            original = int(data.node_features[f"{ntype}/orig_id"][node])
            raise ValueError(
                f"features must be finite in {dtype}, and '{ntype}/feat' of part {data.rank} is "
                f"not for {int(bad.sum())} of {bad.numel()} nodes (got "
                f"{float(feat[node, column])} for node {original}, column {column}); replace such "
                "values, for example by torch.nan_to_num, and partition again"
            )
        features[ntype] = rows
    return features


def _is_finite(rows: Tensor, in_file: RowsInFiles | None, dtype: torch.dtype) -> bool:
    """Whether all numbers are, of rows in memory or, read block by block, in a file."""
    if in_file is None:
        return all_finite([rows])
    return all(all_finite([block]) for block in in_file.as_dtype(dtype).blocks())


def _check_numbers(
    numbers: Tensor, count: int, name: str, what: str, config: ResolvedConfig
) -> None:
    """Hold the highest class or relation against the graph: a model has a row for each number."""
    most = max(count, _NUMBERS_AT_LEAST)
    if numbers.numel() and int(numbers.max()) >= most:
        raise ValueError(
            f"'{name}' in {config.data} must number what there is from 0 on, below {most} for "
            f"{count} {what} (got {int(numbers.max())}); number it without gaps and partition again"
        )


def _relation(
    data: PartitionData, config: ResolvedConfig, is_of_links: bool
) -> tuple[Tensor, Tensor] | None:
    """Relation numbers of a homogeneous graph's edges, and their `relation_norm`."""
    if len(data.canonical_etypes) != 1:
        return None
    name = f"{etype_key(data.canonical_etypes[0])}/etype"
    etype = data.edge_features.get(name)
    if etype is None:
        return None
    if etype.ndim != 1 or etype.is_floating_point():
        raise ValueError(
            f"the edge feature 'etype' must be one whole number per edge (got {etype.dtype} of "
            f"shape {tuple(etype.shape)})"
        )
    etype = etype.to(torch.int64)
    if etype.numel() and int(etype.min()) < 0:
        raise ValueError(f"the edge feature 'etype' must not be negative (got {int(etype.min())})")
    num_edges = data.partition_book.num_edges()
    _check_numbers(etype, num_edges, name, "edges", config)
    dst = data.edges[data.canonical_etypes[0]].dst
    num_relations = int(etype.max()) + 1 if etype.numel() else 1
    norm = relation_norm(dst, etype, num_relations, is_of_links)
    return etype, norm.to(config.torch_dtype)


def names_of_relations(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Of relation numbers: the names that were given, or where they do not fit the numbers."""
    if len(names) == count == len({*names}):
        return tuple(names)
    return tuple(map(str, range(count)))


def relation_norm(dst: Tensor, etype: Tensor, num_relations: int, is_of_links: bool) -> Tensor:
    """1 over the number of edges of the same relation into the same node: float64, a column.

    Of links, over the number of all edges into it: both as the paper on R-GCN has it.
    """
    if is_of_links:
        return torch.bincount(dst).to(torch.float64).reciprocal()[dst].unsqueeze(1)
    code = dst * num_relations + etype
    _, group, count = torch.unique(code, return_inverse=True, return_counts=True)
    return count.to(torch.float64).reciprocal()[group].unsqueeze(1)


def _without_held_out(shard: TrainingShard, config: ResolvedConfig) -> TrainingShard:
    """The shard for link prediction, whose val and test edges carry no messages; collective.

    Nor do their reverses, of a relation that the task names, or of a plain graph. Those are not
    trained on either.
    """
    edges = shard.edges
    assert edges is not None
    data, etype = shard.data, None
    num_relations = len(edges.relations)
    if shard.relation is not None:
        etype = shard.relation[0]
        (most,) = reduce_ints([int(etype.max()) + 1 if etype.numel() else 1], "max")
        num_relations = max(most, shard.num_relations)
    facts = link_facts(data, edges.relations, etype, num_relations)
    evaluated = torch.zeros(len(edges), dtype=torch.bool)
    for split in ("val", "test"):
        evaluated[shard.rows[split]] = True
    is_evaluated = {}
    for relation, rows in edges.by_relation():
        is_evaluated[relation] = torch.zeros(data.edges[relation].num_edges, dtype=torch.bool)
        is_evaluated[relation][edges.index[rows[evaluated[rows]]]] = True
    reverse_of = reverses_of(shard)
    for relation, back in reverse_of.items():
        if back is not None and (back[0], back[2]) != (relation[2], relation[0]):
            raise ValueError(
                f"the reverse of {relation} must go from '{relation[2]}' to '{relation[0]}' (got "
                f"{back}); partition again"
            )
    data, kept = held_out(data, is_evaluated, reverse_of, etype, num_relations)
    is_left = torch.ones(len(edges), dtype=torch.bool)
    for relation, rows in edges.by_relation():
        is_left[rows] = kept[relation][edges.index[rows]]
    changed: dict[str, Any] = {}
    for name in ("edge_features", "edge_weights", "edge_categories"):
        columns = dict(getattr(shard, name))
        for of_type, is_kept in kept.items():
            if of_type in columns:
                columns[of_type] = columns[of_type][is_kept]
        changed[name] = columns
    if etype is not None:
        left = etype[kept[edges.relations[0]]]
        dst = data.edges[edges.relations[0]].dst
        norm = relation_norm(dst, left, num_relations, True).to(config.torch_dtype)
        changed["relation"] = left, norm
    train = shard.rows["train"]
    train = train[is_left[train]]
    return replace(shard, data=data, rows={**shard.rows, "train": train}, links=facts, **changed)


def reverses_of(shard: TrainingShard) -> dict[CanonicalEType, CanonicalEType | None]:
    """Each relation of the task to the one with the reverses of its edges, if there is one."""
    task = shard.task_info
    reverse_of = dict(zip(task.targets, task.reverses, strict=True))
    if not shard.is_typed and shard.relation is None:
        return {etype: back or etype for etype, back in reverse_of.items()}
    return reverse_of


def hidden_edges(shard: TrainingShard, edges: TargetEdges) -> dict[CanonicalEType, RaggedIds]:
    """Of each of some edges those that tell that it is there; collective.

    That are all between its ends, in its relation, in the one with its reverses, and in one that
    was added for the other direction.

    Returns:
        Relation to the global ids of such edges, for each of ``edges``.
    """
    etypes = shard.data.canonical_etypes
    number = None if shard.relation is None else shard.relation[0]
    num_relations = 1 if shard.links is None else shard.links.num_relations
    num_relations = max(num_relations, shard.num_relations)
    reverses: dict[CanonicalEType, list[tuple[CanonicalEType, int]]] = {}
    for relation, back in reverses_of(shard).items():
        # A reverse that was added to a plain graph has the number of its edge.
        added = (relation[2], f"rev_{relation[1]}", relation[0]) if shard.is_typed else relation
        found = [] if back is None else [(back, num_relations // 2)]
        if added in etypes and (shard.is_typed or (shard.num_added_edges and number is not None)):
            found.append((added, 0))
        reverses[relation] = list(dict.fromkeys(found))
    return edges_of_pairs(shard.data, edges, reverses, number, num_relations)


def _counted(shard: TrainingShard, config: ResolvedConfig) -> TrainingShard:
    """The shard with the counts of all ranks, the same everywhere."""
    counts = reduce_ints([shard.rows[split].numel() for split in SPLITS])
    is_classes = shard.task_info.kind in (NODE_CLASSIFICATION, EDGE_CLASSIFICATION)
    is_multilabel = is_classes and shard.label.ndim == 2
    top_class = 0
    if is_multilabel:
        top_class = shard.label.shape[1]
    elif is_classes and shard.label.numel():
        top_class = int(shard.label.max()) + 1
    top_relation = 0
    if shard.relation is not None and shard.relation[0].numel():
        top_relation = int(shard.relation[0].max()) + 1
    num_classes, num_relations = reduce_ints([top_class, top_relation], "max")
    for name, said, counted in (
        ("classes", shard.num_classes, num_classes),
        ("relations", shard.num_relations, num_relations),
    ):
        if 0 < said < counted:
            raise ValueError(
                f"{config.data} is described as having {said} {name}, but the number {counted - 1} "
                f"occurs; partition the graph again"
            )
    num_rows = dict(zip(SPLITS, counts, strict=True))
    of_edges = {etype_key(etype): rows for etype, rows in shard.edge_categories.items()}
    tops = [
        int(rows.columns.max()) + 1 if rows.columns.numel() else 1 for rows in shard.sparse.values()
    ]
    shard = replace(
        shard,
        category_counts=_category_counts(shard.categories),
        edge_category_counts=_category_counts(of_edges),
        sparse_counts=dict(
            zip(shard.sparse, reduce_ints(tops, "max") if tops else [], strict=True)
        ),
    )
    if not is_multilabel:
        num_classes = shard.num_classes or num_classes
    counted_shard = replace(
        shard,
        facts=replace(
            _facts(shard, num_rows, num_classes if is_classes and not is_multilabel else 0),
            is_of_links=shard.links is not None,
            num_relations=shard.num_relations or num_relations if shard.relation is not None else 0,
        ),
        num_nodes=num_rows,
        num_classes=num_classes if is_classes else 0,
        num_relations=shard.num_relations or num_relations,
    )
    return replace(counted_shard, task=_task(counted_shard, config))


def _task(shard: TrainingShard, config: ResolvedConfig) -> Task:
    """What scores mean; collective."""
    kind = shard.task_info.kind
    is_values = kind in (NODE_REGRESSION, EDGE_REGRESSION)
    losses: tuple[str, ...] = ("mse", "l1") if is_values else ()
    if kind == LINK_PREDICTION:
        losses = ("softmax", "bce")
    if config.loss is not None and config.loss not in losses:
        choices = f"one of {', '.join(losses)}" if losses else "left out"
        raise ValueError(f"loss must be {choices} for {kind} (got {config.loss!r})")
    for name in ("predictor", "negatives"):
        value = getattr(config, name)
        if value is not None and kind != LINK_PREDICTION:
            raise ValueError(
                f"{name} is for {LINK_PREDICTION} (got {name}={value!r}, {kind}); leave it out"
            )
    if is_values:
        mean, deviation = _scale(shard.label[shard.rows["train"]], shard.num_nodes["train"])
        error = config.loss or "mse"
        of_values = Values.CHOICES if error == "mse" else Values.CHOICES[::-1]
        metrics = chosen_metrics(config.metrics, Values.CHOICES, of_values)
        return Values(len(mean), mean, deviation, error, metrics)
    if kind == LINK_PREDICTION:
        assert shard.links is not None
        metrics = chosen_metrics(config.metrics, Links.CHOICES, Links.CHOICES)
        return Links(shard.links.num_relations, config.loss or "softmax", metrics)
    made = SeveralLabels if shard.label.ndim == 2 else Classes
    usual: tuple[str, ...] = made.metrics
    share = None if shard.facts is None else shard.facts.largest_share
    if made is Classes and shard.num_classes == 2 and share is not None and share > _UNEVEN:
        usual = ("auroc", ACCURACY)  # who says the larger class is right as often already
    return made(shard.num_classes, chosen_metrics(config.metrics, made.CHOICES, usual))


def _scale(values: Tensor, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each column over the rows of all ranks; collective."""
    count = max(1, count)
    mean = [total / count for total in reduce_floats(values.sum(0).tolist())]
    squares = (values - torch.tensor(mean, dtype=values.dtype)).square().sum(0)
    variance = [total / count for total in reduce_floats(squares.tolist())]
    return tuple(mean), tuple(math.sqrt(value) or 1.0 for value in variance)


def _category_counts(categories: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Type to the number of values of each of its columns, on all ranks; collective."""
    tops = [
        int(column.max()) + 1 if column.numel() else 1
        for numbers in categories.values()
        for column in numbers.T
    ]
    tops = reduce_ints(tops, "max") if tops else []
    counts, start = {}, 0
    for ntype, numbers in categories.items():
        stop = start + numbers.shape[1]
        counts[ntype], start = tuple(tops[start:stop]), stop
    return counts


def _facts(shard: TrainingShard, num_rows: Mapping[str, int], num_classes: int) -> GraphFacts:
    """What defaults depend on; collective. There are no classes where ``num_classes`` is 0."""
    rows, num_train = shard.features.get(shard.target), num_rows["train"]
    numbers = [sum(edges.num_edges for edges in shard.data.edges.values())]
    if num_classes:
        labels = shard.label[shard.rows["train"]]
        numbers += torch.bincount(labels, minlength=num_classes).tolist()
    num_edges, *counts = reduce_ints(numbers)
    shares = [count / max(1, num_train) for count in counts if count]
    return GraphFacts(
        num_train=num_train,
        width=0 if rows is None else rows.shape[1],
        mean_degree=num_edges / max(1, sum(shard.num_all.values())),
        is_typed=shard.is_typed,
        entropy=-sum(share * math.log(share) for share in shares) if shares else None,
        largest_share=max(shares, default=None),
        has_val=num_rows["val"] > 0,
    )


def _with_edges_added(shard: TrainingShard, config: ResolvedConfig) -> TrainingShard:
    """The shard with self loops and the other direction, where these are wanted; collective."""
    both, loops = config.both_directions, config.self_loops
    notes: list[str] = []
    num_added = 0
    if both is None:
        both = shard.is_typed or config.model != "rgcn"
    if loops is None:
        loops = not shard.is_typed and config.model in NEED_IN_EDGES
    data = shard.data
    if both:
        data, added = with_both_directions(data)
        num_added += sum(added.values())
        if added and not shard.is_typed:
            (count,) = added.values()
            notes.append(
                f"edges go one way: added the reverse of {count:,} (--no-both-directions leaves "
                "them as they are)"
            )
        elif added:
            names = ", ".join(name for _, name, _ in list(added)[:_MOST_NAMED])
            names += ", ..." if len(added) > _MOST_NAMED else ""
            go = "1 relation goes" if len(added) == 1 else f"{len(added)} relations go"
            notes.append(
                f"{go} one way ({names}): added the reverse of each, rev_... (--no-both-directions "
                "leaves them as they are)"
            )
    if loops:
        data, count = with_self_loops(data)
        num_added += count
        if count:
            notes.append(
                f"gave {count:,} nodes a self loop, as {config.model} wants (--no-self-loops "
                "leaves them as they are)"
            )
    notes += _unread_columns(shard, config.model)
    dtype = config.torch_dtype
    data = _without_changed(data)
    features, weights = _edge_features(data, dtype), _edge_weights(data, dtype)
    categories = _edge_categories(data)
    of_edges = {etype_key(etype): rows for etype, rows in categories.items()}
    return replace(
        shard,
        data=data,
        notes=tuple(notes),
        num_added_edges=num_added,
        edge_features=features,
        edge_weights=weights,
        edge_categories=categories,
        edge_category_counts={**_category_counts(of_edges), **shard.edge_category_counts},
    )


def _with_edges_mapped(shard: TrainingShard, config: ResolvedConfig) -> TrainingShard:
    """The shard whose edges' features in files are mapped as the network reads them; collective."""
    in_files = dict(shard.data.in_files)
    features = dict(shard.edge_features)
    with shared_errors():
        for etype in features:
            rows = in_files.pop(f"{etype_key(etype)}/feat", None)
            if rows is not None:
                rows = rows_with_dtype(rows.as_dtype(config.torch_dtype), row_folders(config))
                # A model of the user's own may write to what it is given.
                features[etype] = rows.mapped(is_private=":" in config.model)
    return replace(shard, data=replace(shard.data, in_files=in_files), edge_features=features)


def _without_changed(data: PartitionData) -> PartitionData:
    """The part, which says of features alone that they are in files if they are so on all ranks.

    Where edges were added or taken out on any rank, their features are in memory on all. Collective
    where features are in files.
    """
    if not data.in_files:
        return data
    names = sorted(data.in_files)
    has_changed = []
    for name in names:
        columns = data.node_features if name in data.node_features else data.edge_features
        has_changed.append(columns[name].shape != data.in_files[name].shape)
    changed = dict(zip(names, reduce_ints(has_changed, "max"), strict=True))
    left = {name: rows for name, rows in data.in_files.items() if not changed[name]}
    return replace(data, in_files=left)


def _unread_columns(shard: TrainingShard, model: str) -> list[str]:
    """A line for each kind of numbers on edges that the model does not read."""
    read = edge_columns(model)
    lines = []
    times = any(name.endswith("/time") for name in shard.data.edge_features)
    # Of a task on edges, what predicts them reads their features, but not for links.
    is_read_there = shard.edges is not None and shard.links is None
    for what, name, has, readers in (
        ("weights", "weight", shard.edge_weights, "gcn and sage do"),
        ("features", "feat", shard.edge_feature_widths and not is_read_there, "gat and gatv2 do"),
        ("times", "time", times, "no model does"),
    ):
        if has and name not in read:
            lines.append(f"{what} of edges are there, and {model} does not read them ({readers})")
    return lines


def edge_columns(model: str) -> tuple[str, ...]:
    """Names of the edge features that a model reads where they are there; see `ModelSchema`."""
    if ":" in model:
        return ("weight", "feat")
    return {"gcn": ("weight",), "sage": ("weight",)}.get(
        model, ("feat",) if model in ("gat", "gatv2") else ()
    )


def _check_model(shard: TrainingShard, config: ResolvedConfig) -> None:
    """Whether the model fits the graph; depends on what is equal on all ranks alone."""
    if not shard.num_nodes["train"]:
        raise ValueError(
            "there is nothing to train on: no "
            + (f"node of type '{shard.target}'" if shard.edges is None else "edge of the target")
            + (" has" if shard.links is not None else " has both a label and")
            + " train_mask set"
        )
    if config.self_loops and shard.is_typed:
        raise ValueError(
            "self_loops is for graphs with one node type and one relation (got "
            f"{len(shard.data.node_type_names)} and {len(shard.data.canonical_etypes)}); leave it "
            "out: layers of typed graphs see a node's own row"
        )
    if config.both_directions and config.model == "rgcn" and not shard.is_typed:
        raise ValueError(
            "both_directions is for graphs whose edges carry no relation numbers; partition the "
            "data set with the inverse of every relation (graphshard partition --inverse)"
        )
    if config.model == "rgcn" and not shard.is_typed and shard.relation is None:
        raise ValueError(
            "rgcn needs relations: a graph with several of them, or the edge feature 'etype', one "
            "whole number per edge (got neither); use gcn, sage or gat"
        )
    num_relations = len(shard.data.canonical_etypes) if shard.is_typed else shard.num_relations
    if config.num_bases > num_relations:
        raise ValueError(
            f"num_bases must be at most the number of relations, {num_relations}, which share them "
            f"(got {config.num_bases}); 0 gives each relation a matrix of its own"
        )


def _check_relations(shard: TrainingShard, config: ResolvedConfig) -> None:
    """Whether messages reach all that is wanted; depends on what is equal on all ranks alone."""
    wanted = (shard.targets,) if isinstance(shard.targets, str) else shard.targets
    sources = {source for source, _, _ in shard.data.canonical_etypes}
    reached = {target for _, _, target in shard.data.canonical_etypes}
    if sources & reached or ":" in config.model:
        return  # in a layer every type has rows, or it is for the model to say
    for ntype in wanted:
        if ntype not in reached:
            raise ValueError(
                f"{config.model} needs a relation into each node type whose rows are wanted, and "
                f"none leads to '{ntype}'; leave out both_directions=False (--no-both-directions)"
            )


def _warn(shard: TrainingShard, config: ResolvedConfig) -> None:
    """On rank 0, say what the user can hardly have meant; collective."""
    is_one_class = isinstance(shard.task, Classes)
    num_classes = shard.num_classes if is_one_class else 0
    occurs = torch.zeros(num_classes, dtype=torch.int64)
    if is_one_class:
        occurs[shard.label[shard.label >= 0]] = 1
    pairs = list(itertools.combinations(SPLITS, 2))
    shared = [int(torch.isin(shard.rows[a], shard.rows[b]).sum()) for a, b in pairs]
    numbers = reduce_ints([*occurs.tolist(), *shared])
    texts = task_warnings(
        config.data,
        [count > 0 for count in numbers[:num_classes]],
        dict(zip(pairs, numbers[num_classes:], strict=True)),
    )
    if config.lr == 0:
        texts.append("lr is 0, with which nothing is learnt; leave it out for the model's own")
    if rank() == 0:
        for text in texts:
            warnings.warn(text, stacklevel=2)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor has an infinity or a NaN; of tensors on one device, in one transfer."""
    bounds = [torch.stack(t.detach().aminmax()) for t in tensors if t.numel()]
    return not bounds or bool(torch.stack(bounds).isfinite().all())
