# SPDX-License-Identifier: Apache-2.0
"""FeaturePlan: which features a loader attaches to a batch, and from which tables they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...graph import EID, NID, Block
from .._attach import check_named, names_for
from .._ownership import Kind
from ._features import RowRequest

Side = Literal["input", "output", "edge"]


@dataclass(frozen=True)
class _Columns:
    """Features of one kind on one side of a batch.

    Args:
        side: Sources of the first block, destinations of the last, or edges of every block.
        kind: Node type or relation.
        names: What a feature is called in the batch, to what its table is called.
    """

    side: Side
    kind: Kind
    names: Mapping[str, str]


class FeaturePlan:
    """The features of batches of one graph.

    Args:
        graph: A `Graph`, or this rank's part of one.
        sampler: Whose ``input_node_features`` and ``output_node_features`` are taken, if it has
            them, besides the features of the graph that its ``prefetch_node_feats``,
            ``prefetch_labels`` and ``prefetch_edge_feats`` name.

    Raises:
        TypeError: Rows that are no dense tensor, or not by type on a graph of several types.
        ValueError: An unknown type, another number of rows than the graph has nodes here, a
            tensor that requires a gradient, or a feature that the graph does not have.
    """

    def __init__(self, graph: Any, sampler: Any) -> None:
        self.tables: dict[tuple[Kind, str], Tensor] = {}
        self._columns: list[_Columns] = []
        self._etypes = list(graph.canonical_etypes)
        sides: tuple[tuple[Side, str, str], ...] = (
            ("input", "input_node_features", "prefetch_node_feats"),
            ("output", "output_node_features", "prefetch_labels"),
        )
        for side, given, named in sides:
            rows = _named_rows(graph, getattr(sampler, named, ()), named)
            for ntype, of_type in _given_rows(graph, getattr(sampler, given, {}), given).items():
                rows.setdefault(ntype, {}).update(of_type)
            for ntype in graph.ntypes:
                self._add(side, ntype, rows.get(ntype, {}))
        names = getattr(sampler, "prefetch_edge_feats", ())
        check_named(graph.edges, graph.canonical_etypes, names, "prefetch_edge_feats")
        for etype in graph.canonical_etypes:
            data = graph.edges[etype].data
            wanted = {name: data[name] for name in names_for(names, etype) if name in data}
            self._add("edge", etype, wanted)

    def _add(self, side: Side, kind: Kind, rows: Mapping[str, Tensor]) -> None:
        if not rows:
            return
        names = {}
        for name, table in rows.items():
            if table.requires_grad:
                table = table.detach()
            known = self.tables.get((kind, name), table)
            names[name] = name if known is table else f"{name} ({side})"  # two of one name
            self.tables[kind, names[name]] = table
        self._columns.append(_Columns(side, kind, names))

    @property
    def has_edges(self) -> bool:
        """Whether features of edges are among them, so that edge ids must be known."""
        return any(columns.side == "edge" for columns in self._columns)

    def describe(self) -> str:
        """What must be equal on all ranks."""
        return "; ".join(f"{c.side} {c.kind}: {sorted(c.names)}" for c in self._columns)

    def requests(self, blocks: Sequence[Block]) -> list[RowRequest]:
        """The rows that a batch needs; the same kinds and names for every batch."""
        found = []
        # Nodes of a block are distinct if seeds are; an edge may be drawn again.
        nodes_differ = all(
            len(torch.unique(ids)) == len(ids)
            for ids in (blocks[-1].dstnodes[t].data[NID] for t in blocks[-1].dsttypes)
        )
        for columns in self._columns:
            names = tuple(columns.names.values())
            for _, frame, id_field in self._frames(columns, blocks):
                is_distinct = id_field == NID and nodes_differ
                found.append(RowRequest(columns.kind, names, frame[id_field], is_distinct))
        return found

    def attach(self, blocks: Sequence[Block], rows: Sequence[Mapping[str, Tensor]]) -> None:
        """Put rows, as asked for by `requests`, where they belong."""
        answers = iter(rows)
        for columns in self._columns:
            for block, frame, _ in self._frames(columns, blocks):
                answer = next(answers)
                for name, key in columns.names.items():
                    frame[name] = answer[key].to(block.device)

    def _frames(self, columns: _Columns, blocks: Sequence[Block]) -> list[tuple[Block, Any, str]]:
        """Blocks, their frames that the columns belong to, and the field with the ids."""
        first, last = blocks[0], blocks[-1]
        if columns.side == "input":
            return [(first, first.srcnodes[columns.kind].data, NID)]
        if columns.side == "output":
            return [(last, last.dstnodes[columns.kind].data, NID)]
        # Along out-edges names differ, and order does not.
        number = self._etypes.index(columns.kind)
        return [(b, b.edges[b.canonical_etypes[number]].data, EID) for b in blocks]


def _named_rows(graph: Any, names: Any, what: str) -> dict[str, dict[str, Tensor]]:
    """Node type to name to rows, for features that the graph has itself."""
    check_named(graph.nodes, graph.ntypes, names, what)
    found = {}
    for ntype in graph.ntypes:
        data = graph.nodes[ntype].data
        found[ntype] = {name: data[name] for name in names_for(names, ntype) if name in data}
    return found


def _given_rows(graph: Any, features: Any, what: str) -> dict[str, dict[str, Tensor]]:
    """Node type to name to rows, for features that the user passed."""
    found: dict[str, dict[str, Tensor]] = {}
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
