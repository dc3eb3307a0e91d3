# SPDX-License-Identifier: Apache-2.0
"""SamplingSource: what the loaders of PyG's shape draw from, wherever the graph is.

A source joins a `graphshard.sampling.GraphStore`, which says what neighbours nodes drew, with a
`graphshard.sampling.FeatureStore`, which has their rows, and knows what PyG calls both. Stores
count nodes and edges as they lie in parts; users count them as before partitioning.
`SamplingSource.stored` and `SamplingSource.original` go from one to the other. `source_of` makes
one of PyG's data, of stores of PyG, or of a `DistGraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric import data as pyg_data
from torch_geometric.data import Data, HeteroData, remote_backend_utils

from ..._base.typing import DEFAULT_CANONICAL_ETYPE, CanonicalEType
from ...comm.collectives import all_reduce_alike, shared_errors, verify
from ...comm.group import GroupState, alone, group_state
from ...fullbatch import GraphShardManager
from ...fullbatch.topology import OriginalIds, ShardStructure
from ...graph import Frame, heterograph
from ...graph.frame import version_of
from ...graph.structure import Schema
from ...sampling import FeatureRequest, FeatureStore, GraphStore
from ...sampling.feature_store import (
    CollectiveFeatureStore,
    LocalFeatureStore,
    MappedFeatureStore,
)
from ...sampling.graph_store import LocalGraphStore, graph_store_of
from .._edge_index import ShardedEdgeIndex
from .._whole_graph import column_of, names_edges

Kind: TypeAlias = str | CanonicalEType
"""A node type, or a relation."""

ORIGINAL = "orig_id"
"""What stores call the column of ids before partitioning."""

_CHUNK = 1 << 20
_ONLY_TYPE = DEFAULT_CANONICAL_ETYPE[0]
_TO_PYG = {"feat": "x", "label": "y"}  # as `graphshard.pyg.shard` names them
_IDS = ("n_id", "e_id")
_KEPT = "_sampling_source"
"""Where a graph in parts keeps its source: the loaders of one graph share it."""

ColumnsByKind = dict[Kind, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class SamplingSource:
    """A graph to sample from.

    Args:
        graph: Where neighbours come from.
        features: Where rows come from, by the same ids; `ORIGINAL` is among the columns of all
            kinds unless ``is_whole``.
        names: Node type or relation to what PyG calls a column, to what ``features`` calls it.
        is_typed: Whether batches are ``HeteroData``.
        is_whole: Whether the graph is whole in this process, and ids are the original ones.
        state: The ranks that iterate together.
        most_steps: From this process's number of batches to the most that any rank needs.
        is_fork_safe: Whether a forked process can sample.
    """

    graph: GraphStore
    features: FeatureStore
    names: Mapping[Kind, Mapping[str, str]]
    is_typed: bool
    is_whole: bool = False
    state: GroupState = field(default_factory=alone)
    most_steps: Callable[[int], int] = int
    is_fork_safe: bool = False
    _stored: dict[Kind, Tensor] = field(default_factory=dict)
    _earliest: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def ntypes(self) -> list[str]:
        return list(self.graph.ntypes)

    @property
    def etypes(self) -> list[CanonicalEType]:
        """Relations by name: stores have them in different orders, and samples shall be alike."""
        return sorted(self.graph.canonical_etypes)

    @property
    def is_collective(self) -> bool:
        """Whether every rank must take part whenever one samples."""
        return self.state.world_size > 1

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.state.group

    def shared_errors(self) -> AbstractContextManager[None]:
        """Raises on all ranks, or trainers, what goes wrong on any; of a whole graph, here."""
        return nullcontext() if self.is_whole else shared_errors(self.group)

    def on(self, group: dist.ProcessGroup | None) -> SamplingSource:
        """The source for one thread, over another group of the same ranks."""
        graph, features = self.graph.on(group), self.features.on(group)
        return replace(self, graph=graph, features=features, state=group_state(group))

    def count(self, kind: Kind) -> int:
        """Nodes of a type, or edges of a relation, of the whole graph."""
        return self.graph.num_nodes(kind) if isinstance(kind, str) else self.graph.num_edges(kind)

    def kind(self, given: Any) -> Kind:
        """The node type or relation that PyG names; None is the only one of a plain graph."""
        if given is None or not self.is_typed:
            return self.ntypes[0]
        return tuple(given) if isinstance(given, list | tuple) else given

    # ------------------------------------------------------------------ ids

    def original(self, ids: Mapping[Kind, Tensor]) -> dict[Kind, Tensor]:
        """Ids before partitioning; collective where the source is, of the same kinds."""
        if self.is_whole:
            return dict(ids)
        requests = [FeatureRequest(kind, (ORIGINAL,), rows) for kind, rows in ids.items()]
        rows = self.features.fetch(requests)
        return {kind: row[ORIGINAL].cpu() for kind, row in zip(ids, rows, strict=True)}

    def stored(self, kind: Kind, original: Tensor) -> Tensor:
        """Ids under which the graph is stored, int64; ValueError for one that it does not have.

        The first call for a kind reads all of its ids, and is collective where the source is.
        """
        original = original.to("cpu", torch.int64)
        self.check(kind, original)
        if self.is_whole:
            return original
        return self.prepare(kind)[original].to(torch.int64)

    def check(self, kind: Kind, original: Tensor) -> None:
        """Raise ValueError unless the graph has some ids."""
        count = self.count(kind)
        if original.numel():
            low, high = (int(bound) for bound in torch.aminmax(original))
            if low < 0 or high >= count:
                ids = f"nodes of type {kind!r}" if isinstance(kind, str) else f"edges of {kind}"
                raise ValueError(
                    f"{ids} must be in [0, {count}) (got {low if low < 0 else high}); ids are "
                    "those of the graph before it was partitioned"
                )

    def prepare(self, kind: Kind) -> Tensor:
        """Where each id before partitioning is stored: integers ``[count]``; kept.

        Takes 4 bytes for each id, 8 from 2^31 ids on. Collective at first where the source is.
        """
        if kind not in self._stored:
            count = self.count(kind)
            stored = torch.empty(count, dtype=torch.int32 if count < 2**31 else torch.int64)
            for begin in range(0, count, _CHUNK):
                ids = torch.arange(begin, min(begin + _CHUNK, count))
                stored[self.original({kind: ids})[kind]] = ids.to(stored.dtype)
            self._stored[kind] = stored
        return self._stored[kind]

    # ------------------------------------------------------------------ rows

    def earliest(self, ntype: str, name: str) -> int:
        """The node with the smallest time, by its id before partitioning; kept.

        Reads all times; collective at first where the source is.
        """
        if (ntype, name) not in self._earliest:
            names, count = [name] if self.is_whole else [name, ORIGINAL], self.count(ntype)
            candidates = []
            for begin in range(0, count, _CHUNK):
                ids = torch.arange(begin, min(begin + _CHUNK, count))
                rows = [row.cpu().view(-1) for row in self.fetch([(ntype, names, ids)])[0]]
                times, originals = rows[0], ids if self.is_whole else rows[1]
                least = times.min()
                candidates.append((least.item(), int(originals[times == least].min())))
            self._earliest[ntype, name] = min(candidates, default=(0, 0))[1]
        return self._earliest[ntype, name]

    def columns(self, kind: Kind) -> list[str]:
        """What PyG calls the features of a kind."""
        return list(self.names.get(kind, {}))

    def fetch(self, columns: Sequence[tuple[Kind, Sequence[str], Tensor]]) -> list[list[Tensor]]:
        """Rows of features, by kind, PyG's names and stored ids; one exchange for all of them.

        Collective sources must be asked for the same kinds and names on all ranks.
        """
        requests = []
        for kind, names, ids in columns:
            stored = [name if name == ORIGINAL else self.names[kind][name] for name in names]
            requests.append(FeatureRequest(kind, tuple(stored), ids))
        rows = self.features.fetch(requests)
        return [
            [row[name] for name in request.names]
            for request, row in zip(requests, rows, strict=True)
        ]


def source_of(graph: Any) -> SamplingSource:
    """What the samplers draw from, see `HopSampler`; collective where the graph spans ranks.

    Raises:
        TypeError: Nothing of that.
        ValueError: A graph without edges, or whose edges are sharded in part; on all ranks.
    """
    if isinstance(graph, SamplingSource):
        return graph
    if isinstance(graph, tuple | list) and len(graph) == 2:
        features, structure = graph
        own = getattr(structure, "source", None)
        if isinstance(own, SamplingSource):
            return own
        if isinstance(features, pyg_data.FeatureStore) and isinstance(
            structure, pyg_data.GraphStore
        ):
            return _of_stores(features, structure)
    if isinstance(graph, Data | HeteroData):
        indices = _edge_indices(graph)
        sharded = [isinstance(index, ShardedEdgeIndex) for index in indices.values()]
        if not any(sharded):
            return _of_data(graph, indices)
        if all(sharded):
            return _of_sharded(graph, indices)
        raise ValueError(
            "the edges of some relations span ranks and those of others do not; pass the data as "
            "graphshard.pyg.shard gave it"
        )
    if hasattr(graph, "graph_store") and hasattr(graph, "feature_store"):
        return _of_servers(graph)
    raise TypeError(
        "a loader takes Data or HeteroData (also from graphshard.pyg.shard), a DistGraph, or a "
        f"pair of PyG's FeatureStore and GraphStore (got {type(graph).__name__}); shard the folder "
        'of a partition with graphshard.pyg.shard("parts/name.json")'
    )


def _edge_indices(data: Data | HeteroData) -> dict[CanonicalEType, Tensor]:
    stores = {DEFAULT_CANONICAL_ETYPE: data}
    if isinstance(data, HeteroData):
        stores = {etype: data[etype] for etype in data.edge_types}
    indices = {}
    for etype, store in stores.items():
        index = store.get("edge_index", None)
        if index is None:
            raise ValueError(
                f"there is no edge_index of {etype}; turn an adj_t into one with torch_geometric."
                "utils.to_edge_index first, or shard the data, which has both then"
            )
        indices[etype] = index
    if not indices:
        raise ValueError("the graph has no edge type; it needs one at least")
    return indices


# -- whole graphs ----------------------------------------------------------------------------------


def _of_data(data: Data | HeteroData, indices: Mapping[CanonicalEType, Tensor]) -> SamplingSource:
    counts = {_ONLY_TYPE: data.num_nodes}
    if isinstance(data, HeteroData):
        counts = {ntype: data[ntype].num_nodes for ntype in data.node_types}
    columns = _columns_of(data, counts, {t: index.shape[1] for t, index in indices.items()})
    return _whole(counts, indices, columns, isinstance(data, HeteroData))


def _of_stores(features: pyg_data.FeatureStore, structure: pyg_data.GraphStore) -> SamplingSource:
    """Of stores of others: edges are read once and kept, and so are columns that are sampled by."""
    given = {attr.edge_type: attr for attr in structure.get_all_edge_attrs()}
    if not given:
        raise ValueError("the graph store has no edges; put some with put_edge_index")
    is_typed = None not in given
    indices, counts = {}, {}
    for etype, attr in given.items():
        row, col, _ = structure.coo([etype]) if is_typed else structure.coo()
        if is_typed:
            row, col = row[etype], col[etype]
        key = tuple(etype) if is_typed else DEFAULT_CANONICAL_ETYPE
        indices[key] = torch.stack([row, col])
        if attr.size is not None:
            counts[key[0]], counts[key[2]] = int(attr.size[0]), int(attr.size[1])
    ntypes = list(dict.fromkeys(t for etype in indices for t in (etype[0], etype[2])))
    columns: ColumnsByKind = {}
    for attr in features.get_all_tensor_attrs():
        kind = _ONLY_TYPE if attr.group_name is None else attr.group_name
        later: Any = partial(
            features.get_tensor, group_name=attr.group_name, attr_name=attr.attr_name, index=None
        )
        columns.setdefault(kind, {})[attr.attr_name] = later
    for ntype in ntypes:
        if ntype not in counts:
            name = ntype if is_typed else None
            counts[ntype] = int(remote_backend_utils.num_nodes(features, structure, name))
    return _whole({t: counts[t] for t in ntypes}, indices, columns, is_typed)


class _ColumnTables(dict[tuple[Any, str], Tensor]):
    """Columns by kind and name; a function is called for one when it is first asked for."""

    def __getitem__(self, key: tuple[Any, str]) -> Tensor:
        column: Any = super().__getitem__(key)
        if callable(column):
            column = self[key] = torch.as_tensor(column())
        return column


def _whole(
    counts: Mapping[str, int],
    indices: Mapping[CanonicalEType, Tensor],
    columns: ColumnsByKind,
    is_typed: bool,
) -> SamplingSource:
    for ntype, count in counts.items():
        if count is None:
            raise ValueError(f"nodes of type {ntype!r} have no number; set their num_nodes")
    edges = {
        etype: tuple(index.as_subclass(Tensor).cpu().to(torch.int64))
        for etype, index in indices.items()
    }
    graph = heterograph(edges, num_nodes_dict=dict(counts))
    for kind, of_kind in columns.items():
        if isinstance(kind, str):
            continue
        for name, column in of_kind.items():
            is_number = isinstance(column, Tensor) and column.numel() == graph.num_edges(kind)
            if is_number and not column.is_complex():
                graph.edges[kind].data[name] = column.detach().cpu()
    features = LocalFeatureStore({})
    features.tables = _ColumnTables(
        {(kind, name): c for kind, of_kind in columns.items() for name, c in of_kind.items()}
    )
    names = {kind: {name: name for name in of_kind} for kind, of_kind in columns.items()}
    return SamplingSource(
        LocalGraphStore(graph), features, names, is_typed, is_whole=True, is_fork_safe=True
    )


def _columns_of(
    data: Data | HeteroData, num_nodes: Mapping[str, Any], num_edges: Mapping[CanonicalEType, int]
) -> ColumnsByKind:
    """Tensors with a row for each node of a type, or each edge of a relation."""
    columns: ColumnsByKind = {}
    counts: list[tuple[Kind, Any]] = [*num_nodes.items(), *num_edges.items()]
    if isinstance(data, HeteroData):
        for kind, count in counts:
            columns[kind] = {n: v for n, v in data[kind].items() if _is_column(n, v, count)}
        return columns
    for name in data.keys():  # noqa: SIM118
        of_kind = data.is_node_attr(name), data.is_edge_attr(name)
        for (kind, count), is_of_kind in zip(counts, of_kind, strict=True):
            if is_of_kind and _is_column(name, data[name], count):
                columns.setdefault(kind, {})[name] = data[name]
                break
    return columns


def _is_column(name: str, value: Any, count: Any) -> bool:
    if name in ("edge_index", "adj_t", *_IDS) or not isinstance(value, Tensor | np.ndarray):
        return False
    return value.ndim > 0 and value.shape[0] == count


# -- graphs that span ranks ------------------------------------------------------------------------


def _of_sharded(
    data: Data | HeteroData, indices: Mapping[CanonicalEType, Tensor]
) -> SamplingSource:
    first = next(iter(indices.values()))
    assert isinstance(first, ShardedEdgeIndex)
    structure = first.halo.structure
    is_typed = isinstance(data, HeteroData)
    columns, ids, error = _sharded_columns(data, structure, is_typed)
    # As columns that are put on a device after the graph was sharded are there and it is not.
    devices = {column.device.type for of_kind in columns.values() for column in of_kind.values()}
    verify(
        group_state(structure.group),
        "; ".join(f"{kind}: {sorted(of_kind)}" for kind, of_kind in columns.items())
        + f"; on {sorted(devices)}",
        "what columns the data has, and where",
        error,
    )
    tables = {(kind, ORIGINAL): originals for kind, originals in ids.items()}
    versions = {}
    for kind, of_kind in columns.items():
        for name, column in of_kind.items():
            tables[kind, name] = column.detach()
            versions[kind, name] = id(column), version_of(column)
    earlier: SamplingSource
    earlier, earlier_versions, _ = vars(structure).get(_KEPT, (None, None, None))
    is_same = versions == earlier_versions
    if is_same and isinstance(earlier.features, MappedFeatureStore):
        is_same = earlier.features.holds(tables)  # a write through .data has no version
    changed = torch.tensor([int(not is_same)])
    if not int(all_reduce_alike(changed, "max", group=structure.group)):
        return earlier
    manager = _manager(first, structure, columns, ids)
    features: LocalFeatureStore
    if structure.world_size == 1:
        features = LocalFeatureStore(tables)
    elif devices <= {"cpu"}:
        features = MappedFeatureStore(manager, tables)
    else:
        features = CollectiveFeatureStore.of(manager, tables)
    source = SamplingSource(
        graph_store_of(manager, "auto"),
        features,
        {kind: {name: name for name in of_kind} for kind, of_kind in columns.items()},
        is_typed,
        state=group_state(structure.group),
        most_steps=lambda n: int(all_reduce_alike(torch.tensor([n]), "max", group=structure.group)),
    )
    vars(structure)[_KEPT] = source, versions, columns  # alive, so that their ids stay theirs
    return source


def _sharded_columns(
    data: Data | HeteroData, structure: ShardStructure, is_typed: bool
) -> tuple[ColumnsByKind, dict[Kind, Tensor], Exception | None]:
    """This rank's columns, and the ids before partitioning of its nodes and edges.

    A value belongs to nodes if it has an entry for each of them on every rank: on one alone there
    may be as many edges, or classes.
    """
    edges = {etype: of.num_edges for etype, of in structure.edges.items()}
    kinds: list[Kind] = [*structure.num_src, *edges]
    ids: dict[Kind, Tensor] = {}
    columns: ColumnsByKind = {kind: {} for kind in kinds}
    error: Exception | None = None
    try:
        for kind in kinds:
            store = data[kind] if is_typed else data
            ids[kind] = store["n_id" if isinstance(kind, str) else "e_id"]
    except KeyError as missing:
        error = ValueError(
            f"the data lacks {missing}, the ids that its rows have in the whole graph; pass it as "
            "graphshard.pyg.shard gave it"
        )
    stores: dict[Any, Any] = {None: data.stores[0]}  # of plain data it is of both kinds
    if is_typed:
        stores = {kind: data[kind] for kind in kinds}
    values = [
        (kind, name, value)
        for kind, store in stores.items()
        for name, value in sorted(store.items())
        if not names_edges(name) and name not in (*_IDS, "num_nodes")
    ]
    fits = torch.zeros(len(values), 2, dtype=torch.int64)
    (first_nodes, *_), (first_edges, *_) = structure.num_src.items(), edges.items()
    for number, (kind, name, value) in enumerate(values):
        num_nodes = structure.num_src.get(kind) if is_typed else first_nodes[1]
        num_edges = edges.get(kind) if is_typed else first_edges[1]
        of_nodes = column_of(data, stores[kind], name, value, num_nodes, None)
        of_edges = column_of(data, stores[kind], name, value, None, num_edges)
        fits[number] = torch.tensor([of_nodes is not None, of_edges is not None])
    same = all_reduce_alike(torch.tensor([len(values), -len(values)]), "max", group=structure.group)
    if int(same[0]) != -int(same[1]):
        return columns, ids, error or ValueError("ranks have different columns in the data")
    fits = all_reduce_alike(fits, "min", group=structure.group)
    for (kind, name, value), (is_of_nodes, is_of_edges) in zip(values, fits.tolist(), strict=True):
        if not is_of_nodes and not is_of_edges:
            continue
        is_edge = is_of_edges and (not is_of_nodes or "edge" in name)
        kind = (first_edges[0] if is_edge else first_nodes[0]) if kind is None else kind
        try:
            columns[kind][name] = _batch_column(kind, name, value)
        except ValueError as caught:
            error = error or caught
    return columns, ids, error


def _batch_column(kind: Kind, name: str, value: Any) -> Tensor:
    """A column whose rows batches can have; ValueError for another."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        column = torch.as_tensor(value)
        # NumPy's strides of an array without entries are 0, which has no view as bytes.
        return column if column.numel() else column.new_empty(column.shape)
    came, cure = type(value).__name__, f"take it off with data.pop({name!r})"
    if isinstance(value, Tensor):
        came, cure = f"a tensor of {value.layout}", "make it dense with to_dense()"
    if isinstance(value, np.ndarray):
        came = f"an array of {value.dtype}"
    raise ValueError(
        f"batches have rows of dense tensors and of arrays of numbers ({name!r} of {kind!r} is "
        f"{came}); {cure}, and look its entries up by batch.n_id where a batch needs them"
    )


def _manager(
    first: ShardedEdgeIndex,
    structure: ShardStructure,
    columns: ColumnsByKind,
    ids: Mapping[Kind, Tensor],
) -> GraphShardManager:
    """The same graph as the stores for sampling take it."""
    ntypes, etypes, device = list(structure.num_src), list(structure.edges), structure.device
    schema = Schema.of_graph(ntypes, etypes)
    rows = {t: torch.arange(structure.num_src[t], device=device) for t in ntypes}
    frames = {
        t: Frame(count, device, f"nodes of type {t!r}", "node")
        for t, count in structure.num_src.items()
    }
    sources = [frames[t] for t in schema.srctypes]
    targets = [frames[t] for t in schema.dsttypes] if schema.split else sources
    edges = []
    for etype in etypes:
        frame = Frame(structure.edges[etype].num_edges, device, f"edges {etype}", "edge")
        for name, column in columns[etype].items():
            frame.set(name, column.to(device), "edge")
        edges.append(frame)
    return GraphShardManager(
        structure,
        schema,
        first.halo.mode,
        (sources, targets, edges),
        is_block=False,
        input_nodes={t: rows[t] for t in schema.srctypes},
        seeds={t: rows[t] for t in schema.dsttypes},
        original=OriginalIds({t: ids[t] for t in ntypes}, {t: ids[t] for t in etypes}),
    )


# -- graph servers ---------------------------------------------------------------------------------


def _of_servers(graph: Any) -> SamplingSource:
    earlier = vars(graph).get(_KEPT)
    names: dict[Kind, dict[str, str]] = {}
    kinds: list[Kind] = [*graph.ntypes, *graph.canonical_etypes]
    for kind in kinds:
        stored = [n for n in graph.feature_store.feature_names(kind) if n != ORIGINAL]
        called = {_TO_PYG.get(name, name): name for name in stored}
        names[kind] = {**called, **{name: name for name in stored if name in called}}
    if isinstance(earlier, SamplingSource) and earlier.names == names:
        return earlier
    source = vars(graph)[_KEPT] = SamplingSource(
        graph.graph_store,
        graph.feature_store,
        names,
        not graph.is_homogeneous,
        most_steps=graph.most_steps,
    )
    return source
