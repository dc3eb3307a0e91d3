# SPDX-License-Identifier: Apache-2.0
"""A PyG data object that every rank has whole: what is in it, and which rank owns which rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, CanonicalEType
from ..comm.collectives import broadcast_, shared_errors
from ..comm.group import GroupState
from ..fullbatch.topology import LocalEdges
from ..graph.convert import require
from ..partition import UndirectedGraph, metis_partition
from ._edge_index import ShardedEdgeIndex

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

OwnerMethod: TypeAlias = str | Tensor | Mapping[str, Tensor]
"""``"metis"``, ``"random"``, or the rank of every node, by type where there are types."""

MatrixEdges: TypeAlias = tuple[Tensor, Tensor | None]
"""``[2, num_edges]`` and the values of an adjacency matrix, None where they are all 1."""

ONLY_TYPE = DEFAULT_CANONICAL_ETYPE[0]
"""The node type of a graph that is not typed."""


@dataclass(frozen=True)
class Column:
    """A tensor, array, list or tuple with an entry for each node or edge, in dimension ``dim``."""

    value: Any
    dim: int = 0

    def rows(self, rows: Tensor) -> Any:
        """Entries with some numbers, int64 on the CPU, in a container of the same kind."""
        value = self.value
        if isinstance(value, Tensor):
            rows = rows.to(value.device)
            if value.layout == torch.strided:
                return value.index_select(self.dim, rows)
            # Torch chooses rows of a sparse tensor in coordinates alone.
            chosen = value.to_sparse_coo().coalesce().index_select(self.dim, rows)
            if value.layout == torch.sparse_coo:
                return chosen
            return chosen.to_sparse(layout=value.layout)
        if isinstance(value, np.ndarray):
            return value.take(rows.numpy(), axis=self.dim)
        if isinstance(value, list | tuple):
            chosen = [value[row] for row in rows.tolist()]
            return chosen if isinstance(value, list) else tuple(chosen)
        return value[rows]


@dataclass(frozen=True)
class WholeGraph:
    """A PyG object, read: counts, edges and columns by type.

    Args:
        counts: Node type to the number of nodes.
        edges: Relation to ``[2, num_edges]``.
        others: Node type, relation, or None for the whole graph, to everything else.
        weights: Relation to the values of its ``adj_t``; None where they are all 1. Relations that
            have an ``edge_index`` are not in it.
    """

    counts: dict[str, int]
    edges: dict[CanonicalEType, Tensor]
    nodes: dict[str, dict[str, Column]]
    edge_columns: dict[CanonicalEType, dict[str, Column]]
    others: dict[Any, dict[str, Any]]
    weights: dict[CanonicalEType, Tensor | None] = field(default_factory=dict)
    is_typed: bool = False

    def fingerprint(self) -> str:
        """Counts, and sums that differ where edges do."""
        lines = [f"{count} nodes of {ntype!r}" for ntype, count in self.counts.items()]
        for etype, edges in self.edges.items():
            weights = torch.arange(edges.shape[1], device=edges.device) % 65521 + 1
            sums = (edges.long() * weights).sum(1).tolist()
            lines.append(f"{edges.shape[1]} edges of {etype} with checksums {sums}")
        return "; ".join(lines)


class SplitRows:
    """Rows of a whole tensor, of which every rank has some.

    ``order`` are their numbers, those of rank 0 first; ``counts`` is how many each rank has.
    """

    def __init__(self, order: Tensor, counts: Sequence[int], rank: int) -> None:
        self.counts, self.total = tuple(counts), order.numel()
        self.of_rank = order.split(list(counts))
        self.own = self.of_rank[rank]
        self.is_in_order = bool((order.diff() > 0).all())


class NodeLayout:
    """Which rank owns which node of a whole graph, and in which row.

    A rank has its nodes of each type in their order in the whole graph. ``owners`` is node type to
    the rank of each node.
    """

    def __init__(self, owners: Mapping[str, Tensor], state: GroupState) -> None:
        self._owners, self._state = dict(owners), state
        self.rows: dict[str, SplitRows] = {}
        self._row_of: dict[str, Tensor] = {}
        for ntype, owner in owners.items():
            order = torch.argsort(owner, stable=True)
            counts = torch.bincount(owner, minlength=state.world_size)
            starts = counts.cumsum(0) - counts
            rows = torch.empty_like(order)
            rows[order] = torch.arange(order.numel()) - starts[owner[order].long()]
            self._row_of[ntype] = rows
            self.rows[ntype] = SplitRows(order, counts.tolist(), state.rank)

    def split_edges(self, etype: CanonicalEType, ends: Tensor) -> SplitRows:
        """Edges by the rank of their destination; a rank has them by destination."""
        dst = ends[1].long().cpu()
        owner, row = self._owners[etype[2]][dst].long(), self._row_of[etype[2]][dst]
        order = torch.argsort(owner * (int(row.max()) + 1 if row.numel() else 1) + row, stable=True)
        counts = torch.bincount(owner, minlength=self._state.world_size)
        return SplitRows(order, counts.tolist(), self._state.rank)

    def local_edges(self, etype: CanonicalEType, ends: Tensor, chosen: Tensor) -> LocalEdges:
        """Some of the edges that end at this rank's nodes: those with the ids ``chosen``."""
        source, _, target = etype
        src, dst = ends.long().cpu()[:, chosen]
        return LocalEdges(
            self._owners[source][src].to(ends.device),
            self._row_of[source][src].to(ends.device),
            self._row_of[target][dst].to(ends.device),
            self.rows[target].own.numel(),
        )


def read_whole_graph(data: Data | HeteroData) -> WholeGraph:
    """What is in a PyG object, which must have edges, and all nodes between which they are."""
    pyg = require("torch_geometric.data", "graphshard[pyg]", "graphshard.pyg.shard")
    if isinstance(data, pyg.HeteroData):
        counts = {t: _node_count(data[t], f"node type {t!r}") for t in data.node_types}
        for etype in data.edge_types:
            for ntype in (etype[0], etype[2]):
                if ntype not in counts:
                    raise ValueError(
                        f"node type {ntype!r} of {etype} has no number of nodes; set "
                        f"data[{ntype!r}].num_nodes"
                    )
        stores = {etype: (data[etype], f"edge type {etype}") for etype in data.edge_types}
    elif isinstance(data, pyg.Data):
        counts = {ONLY_TYPE: _node_count(data, "the graph")}
        stores = {DEFAULT_CANONICAL_ETYPE: (data._store, "the graph")}
    else:
        raise TypeError(
            "shard takes PyG's Data or HeteroData, a PartitionData or the path of a partition's "
            f"JSON (got {type(data).__name__})"
        )
    if not stores:
        raise ValueError("the graph has no edge type; it needs one at least")
    edges, weights = {}, {}
    for etype, (store, owner) in stores.items():
        ends = store.get("edge_index", None)
        if ends is None and store.get("adj_t", None) is not None:
            ends, weights[etype] = edges_of_matrix(store["adj_t"], f"adj_t of {owner}")
        edges[etype] = _checked_edges(ends, owner, (counts[etype[0]], counts[etype[2]]))
    nodes: dict[str, dict[str, Column]] = {ntype: {} for ntype in counts}
    columns: dict[CanonicalEType, dict[str, Column]] = {etype: {} for etype in edges}
    others: dict[Any, dict[str, Any]] = {}
    is_typed = isinstance(data, pyg.HeteroData)
    for store in data.stores:
        kind: Any = store._key if is_typed else None
        of_nodes: Any = kind if is_typed else ONLY_TYPE
        of_edges: Any = kind if is_typed else DEFAULT_CANONICAL_ETYPE
        num_nodes = counts.get(of_nodes)
        num_edges = edges[of_edges].shape[1] if of_edges in edges else None
        # By name: the attributes of Data come in another order in each process.
        for name, value in sorted(store.items()):
            if names_edges(name) or name == "num_nodes":
                continue
            column = column_of(data, store, name, value, num_nodes, num_edges)
            if column is None:
                others.setdefault(kind, {})[name] = value
            elif column[0] == "node":
                nodes[of_nodes][name] = column[1]
            else:
                columns[of_edges][name] = column[1]
    return WholeGraph(counts, edges, nodes, columns, others, weights, is_typed)


def column_of(
    data: Any, store: Any, name: str, value: Any, num_nodes: int | None, num_edges: int | None
) -> tuple[str, Column] | None:
    """Whether a value has an entry per node or per edge, by the rules of PyG's ``subgraph``.

    Args:
        num_nodes: Nodes of the store, if it is one of nodes.
        num_edges: Edges of the store, if it is one of edges. The store of ``Data`` is of both.

    Returns:
        ``"node"`` or ``"edge"`` and the column; None if it has no such entries.
    """
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        dim, length = 0, len(value)
    elif isinstance(value, Tensor | np.ndarray) and value.ndim:
        dim = data.__cat_dim__(name, value, store)
        if not isinstance(dim, int):
            return None
        length = value.shape[dim]
    elif type(value).__name__ == "TensorFrame":
        dim, length = 0, len(value)
    else:
        return None
    kinds = [kind for kind, n in (("node", num_nodes), ("edge", num_edges)) if n == length]
    if not kinds:
        return None
    is_of_edges = len(kinds) > 1 and "edge" in name and not isinstance(value, list | tuple)
    return kinds[-1] if is_of_edges else kinds[0], Column(value, dim)


def is_matrix(value: object) -> bool:
    """Whether it is a sparse matrix of torch or torch-sparse."""
    if isinstance(value, Tensor):
        return value.layout != torch.strided
    return type(value).__name__ == "SparseTensor"


def edges_of_matrix(matrix: Any, name: str) -> MatrixEdges:
    """Edges of ``adj_t``, with a row per destination, and its values unless they are all 1.

    Returns:
        ``[2, num_edges]`` int64 by destination, then source, and ``[num_edges, ...]`` or None.
    """
    if isinstance(matrix, ShardedEdgeIndex):
        raise ValueError(f"{name} is sharded already; pass the whole data object")
    if not is_matrix(matrix):
        raise TypeError(
            f"{name} must be a sparse matrix, as torch_geometric.transforms.ToSparseTensor makes "
            f"it (got {type(matrix).__name__})"
        )
    if isinstance(matrix, Tensor):
        matrix = matrix.to_sparse_coo().coalesce()
        indices, values = matrix.indices(), matrix.values()
        dst, src = indices
    else:
        dst, src, values = matrix.coo()
    if values is not None and values.dim() == 1 and bool((values == 1).all()):
        values = None
    return torch.stack([src, dst]).long(), values


def names_edges(name: str) -> bool:
    return name == "adj_t" or "index" in name or name == "face"


def _node_count(store: Any, owner: str) -> int:
    count = store.num_nodes
    if count is None:
        raise ValueError(f"{owner} has no number of nodes; set its num_nodes")
    return int(count)


def _checked_edges(edge_index: Tensor | None, owner: str, counts: tuple[int, int]) -> Tensor:
    if isinstance(edge_index, ShardedEdgeIndex):
        raise ValueError(f"{owner} is sharded already; pass the whole data object")
    if edge_index is None:
        raise ValueError(f"{owner} has no edge_index, nor adj_t; set one of them")
    edge_index = edge_index.as_subclass(Tensor)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype.is_floating_point:
        raise ValueError(
            f"edge_index of {owner} must be integers of shape [2, num_edges] (got "
            f"{edge_index.dtype} of shape {tuple(edge_index.shape)})"
        )
    for row, name, count in zip(edge_index, ("source", "destination"), counts, strict=True):
        if row.numel() and (int(row.min()) < 0 or int(row.max()) >= count):
            wrong = row[(row < 0) | (row >= count)][0]
            raise ValueError(
                f"a {name} in edge_index of {owner} must be a node, in [0, {count}) (got "
                f"{int(wrong)}); set num_nodes if there are more"
            )
    return edge_index


def has_self_loops(etype: CanonicalEType, ends: Tensor) -> bool:
    """Whether edges of a relation within one node type have any."""
    return etype[0] == etype[2] and bool((ends[0] == ends[1]).any())


def find_owners(
    whole: WholeGraph, part_method: OwnerMethod, seed: int, state: GroupState
) -> dict[str, Tensor]:
    """The rank of every node, by type: what rank 0 says."""
    total = sum(whole.counts.values())
    owner = torch.zeros(total, dtype=torch.int32)
    with shared_errors(state.group):
        if state.rank == 0:
            owner = _assigned(whole, part_method, seed, state.world_size)
    if state.world_size > 1 and total:
        broadcast_(state, owner, 0, "shard")
    parts = owner.long().split(list(whole.counts.values()))
    return dict(zip(whole.counts, parts, strict=True))


def _assigned(whole: WholeGraph, part_method: OwnerMethod, seed: int, num_parts: int) -> Tensor:
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
            for column, (ntype, count) in enumerate(whole.counts.items()):
                weights[starts[ntype] : starts[ntype] + count, column] = 1
            weights = weights[:, weights.any(0)]
        parts = metis_partition(
            UndirectedGraph.from_edges(edges, total), num_parts, node_weights=weights, seed=seed
        )
        return torch.from_numpy(np.asarray(parts)).to(torch.int32)
    given = part_method if isinstance(part_method, Mapping) else {ONLY_TYPE: part_method}
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
