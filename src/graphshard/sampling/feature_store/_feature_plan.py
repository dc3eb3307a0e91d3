# SPDX-License-Identifier: Apache-2.0
"""FeaturePlan: which features a loader attaches to a batch, and from which tables they come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ...graph import EID, NID, Block, Frame, MessagePassingGraph
from ...graph.message_passing import frames_of
from .._lazy_features import check_named, names_for
from .._ownership import RowKind
from ._feature_store import FeatureRequest, FeatureStore

BatchSide: TypeAlias = Literal["input", "output", "edge"]


@dataclass(frozen=True)
class _PlannedColumns:
    """Features of one kind on one side of a batch.

    Args:
        side: Sources of the first block, destinations of the last, or edges of every block.
        kind: Node type or relation.
        names: What a feature is called in the batch, to what its table is called.
    """

    side: BatchSide
    kind: RowKind
    names: Mapping[str, str]


class FeaturePlan:
    """The features of batches of one graph.

    Args:
        graph: A `Graph`, this rank's part of one, or a `GraphStore`.
        sampler: Whose ``input_node_features`` and ``output_node_features`` are taken, if it has
            them, besides the features that its ``prefetch_node_feats``, ``prefetch_labels`` and
            ``prefetch_edge_feats`` name.
        store: Has the features that are named; by default the graph has them.

    Attributes:
        tables: (node type or relation, name) to rows; empty if a store was given.

    Raises:
        TypeError: Rows that are no dense tensor, or not by type on a graph of several types; or
            rows besides a store.
        ValueError: An unknown type, another number of rows than the graph has nodes here, a
            tensor that requires a gradient, or a feature that the graph does not have.
    """

    def __init__(self, graph: Any, sampler: Any, store: FeatureStore | None = None) -> None:
        self.tables: dict[tuple[RowKind, str], Tensor] = {}
        self._columns: list[_PlannedColumns] = []
        self._graph, self._store = graph, store
        self._etypes = list(graph.canonical_etypes)
        ntypes = list(graph.ntypes)
        sides: tuple[tuple[BatchSide, str, str, list[Any]], ...] = (
            ("input", "input_node_features", "prefetch_node_feats", ntypes),
            ("output", "output_node_features", "prefetch_labels", ntypes),
            ("edge", "", "prefetch_edge_feats", self._etypes),
        )
        for side, given, named, kinds in sides:
            names = getattr(sampler, named, ())
            check_named(self._names_of, kinds, names, named)
            rows = _given_rows(graph, getattr(sampler, given, None) or {}, given)
            if rows and store is not None:
                raise TypeError(
                    f"features come from feature_store or from {given}, not from both; name those "
                    f"of the store in {named}"
                )
            for kind in kinds:
                wanted = [name for name in names_for(names, kind) if name in self._names_of(kind)]
                if store is not None:
                    if wanted:
                        columns = _PlannedColumns(
                            side, kind, dict(zip(wanted, wanted, strict=True))
                        )
                        self._columns.append(columns)
                    continue
                data = self._data_of(kind)
                self._add(side, kind, {name: data[name] for name in wanted} | rows.get(kind, {}))

    def _data_of(self, kind: RowKind) -> Mapping[str, Any]:
        """Features that the graph has itself."""
        if not isinstance(self._graph, MessagePassingGraph):  # a GraphStore
            return {}
        space = self._graph.nodes if isinstance(kind, str) else self._graph.edges
        data: Mapping[str, Any] = space[kind].data
        return data

    def _names_of(self, kind: RowKind) -> Collection[str]:
        return self._data_of(kind) if self._store is None else self._store.feature_names(kind)

    def _add(self, side: BatchSide, kind: RowKind, rows: Mapping[str, Tensor]) -> None:
        if not rows:
            return
        names = {}
        for name, table in rows.items():
            if table.requires_grad:
                table = table.detach()
            known = self.tables.get((kind, name), table)
            names[name] = name if known is table else f"{name} ({side})"  # two of one name
            self.tables[kind, names[name]] = table
        self._columns.append(_PlannedColumns(side, kind, names))

    @property
    def is_empty(self) -> bool:
        """Whether no features are attached."""
        return not self._columns

    @property
    def has_edges(self) -> bool:
        """Whether features of edges are among them, so that edge ids must be known."""
        return any(columns.side == "edge" for columns in self._columns)

    def describe(self) -> str:
        """What must be equal on all ranks."""
        return "; ".join(f"{c.side} {c.kind}: {sorted(c.names)}" for c in self._columns)

    def requests(self, blocks: Sequence[Block]) -> list[FeatureRequest]:
        """The rows that a batch needs; the same kinds and names for every batch."""
        found = []
        # Nodes of a block are distinct if seeds are; an edge may be drawn again.
        nodes_differ = all(
            len(torch.unique(ids)) == len(ids)
            for ids in (frame[NID] for frame in frames_of(blocks[-1])[1])
        )
        for columns in self._columns:
            names = tuple(columns.names.values())
            for _, frame, id_field in self._frames(columns, blocks):
                is_distinct = id_field == NID and nodes_differ
                found.append(
                    FeatureRequest(columns.kind, names, frame[id_field], distinct=is_distinct)
                )
        return found

    def attach(self, blocks: Sequence[Block], rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Put rows, as asked for by `requests`, where they belong."""
        answers = iter(rows)
        for columns in self._columns:
            for block, frame, _ in self._frames(columns, blocks):
                answer = next(answers)
                for name, key in columns.names.items():
                    frame[name] = answer[key].to(block.device)

    def _frames(
        self, columns: _PlannedColumns, blocks: Sequence[Block]
    ) -> list[tuple[Block, Frame, str]]:
        """Blocks, their frames that the columns belong to, and the field with the ids."""
        if columns.side != "edge":
            block = blocks[0 if columns.side == "input" else -1]
            types: list[Any] = block.srctypes if columns.side == "input" else block.dsttypes
            frames = frames_of(block)[0 if columns.side == "input" else 1]
            return [(block, frames[types.index(columns.kind)], NID)]
        # Along out-edges names differ, and order does not.
        number = self._etypes.index(columns.kind)
        return [(block, frames_of(block)[2][number], EID) for block in blocks]


def _given_rows(graph: Any, features: Any, what: str) -> dict[RowKind, dict[str, Tensor]]:
    """Node type to name to rows, for features that the user passed."""
    found: dict[RowKind, dict[str, Tensor]] = {}
    for name, by_type in features.items():
        if not isinstance(by_type, Mapping):
            if len(graph.ntypes) != 1:
                raise TypeError(
                    f"{what}[{name!r}] must be a dictionary from node type to rows because the "
                    f"graph has the types {list(graph.ntypes)} (got {type(by_type).__name__})"
                )
            by_type = {graph.ntypes[0]: by_type}
        for ntype, rows in by_type.items():
            _check_rows(graph, ntype, rows, f"{what}[{name!r}]")
            found.setdefault(ntype, {})[name] = rows
    return found


def _check_rows(graph: Any, ntype: str, rows: Any, what: str) -> None:
    if ntype not in graph.ntypes:
        raise ValueError(
            f"{what} names the node type {ntype!r}; the graph has {list(graph.ntypes)}"
        )
    if not isinstance(rows, Tensor):
        raise TypeError(f"{what} must be a tensor (got {type(rows).__name__}); use torch.as_tensor")
    if rows.layout != torch.strided:
        raise TypeError(f"{what} must be dense (got {rows.layout}); use .to_dense()")
    num_nodes = graph.num_nodes(ntype)
    if rows.dim() == 0 or rows.shape[0] != num_nodes:
        raise ValueError(
            f"{what} must have a row for each of the {num_nodes} nodes of type {ntype!r} that this "
            f"process holds (got shape {tuple(rows.shape)})"
        )
    if rows.requires_grad:
        raise ValueError(
            f"{what} requires a gradient, which rows that are fetched do not carry; pass .detach()"
        )
