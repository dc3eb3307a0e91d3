# SPDX-License-Identifier: Apache-2.0
"""QueryableGraph: questions about single nodes and edges of a graph that is whole here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphTypeError, GraphValueError
from ...ops import Adjacency
from ..structure import ALL, check_ids, id_tensor, is_all
from ._protocol import MessagePassingGraph


@dataclass
class RelationFacts:
    """Answers that cost a pass over a relation, kept once known and shared by all its views.

    Attributes:
        zero_in_degree: Whether some destination has no in-edge.
        pair_order: Keys ``source * num_dst + destination`` in ascending order, and edge ids in
            that order.
    """

    zero_in_degree: bool | None = None
    pair_order: tuple[Tensor, Tensor] | None = None


class QueryableGraph(MessagePassingGraph):
    """Layer of `LocalGraph`: questions about nodes and edges.

    Attributes:
        relations: One `Adjacency` per relation, in the order of ``canonical_etypes``.
    """

    relations: list[Adjacency]
    _facts: list[RelationFacts]

    # ------------------------------------------------------------------ degrees and edges

    def in_degrees(self, v: Any = ALL, etype: Any = None) -> Any:
        relation = self._schema.relation(etype)
        degrees = self.relations[relation].in_degrees()
        if is_all(v):
            return degrees
        return _like(degrees[self._node_ids(v, "dst", self._schema.dst_of[relation]).long()], v)

    def out_degrees(self, u: Any = ALL, etype: Any = None) -> Any:
        relation = self._schema.relation(etype)
        degrees = self.relations[relation].out_degrees()
        if is_all(u):
            return degrees
        return _like(degrees[self._node_ids(u, "src", self._schema.src_of[relation]).long()], u)

    def all_edges(self, form: str = "uv", order: str | None = "eid", etype: Any = None) -> Any:
        adj = self.relations[self._schema.relation(etype)]
        if order not in ("eid", "srcdst", None):
            raise GraphValueError(f"order must be 'eid' or 'srcdst' (got {order!r})")
        src, dst = adj.coo()
        eids = torch.arange(adj.num_edges, dtype=adj.idtype, device=adj.device)
        if order == "srcdst":
            eids = _by_source_then_destination(src, dst).to(adj.idtype)
            src, dst = src.index_select(0, eids), dst.index_select(0, eids)
        return _in_form(form, src, dst, eids)

    def in_edges(self, v: Any, form: str = "uv", etype: Any = None) -> Any:
        """In-edges of some nodes, node by node in the order given, each by ascending edge id."""
        relation = self._schema.relation(etype)
        nodes = self._node_ids(v, "dst", self._schema.dst_of[relation])
        return self._edges_in_form(relation, self._in_edge_ids(relation, nodes), form)

    def out_edges(self, u: Any, form: str = "uv", etype: Any = None) -> Any:
        """Out-edges of some nodes, node by node in the order given, each by ascending edge id."""
        relation = self._schema.relation(etype)
        nodes = self._node_ids(u, "src", self._schema.src_of[relation])
        eids = _compressed_edges(self.relations[relation].csr(), nodes)
        return self._edges_in_form(relation, eids, form)

    def predecessors(self, v: int, etype: Any = None) -> Tensor:
        """Sources of the in-edges of one node, by ascending edge id."""
        sources: Tensor = self.in_edges(_one(v, "v"), "uv", etype)[0]
        return sources

    def successors(self, v: int, etype: Any = None) -> Tensor:
        """Destinations of the out-edges of one node, by ascending edge id."""
        destinations: Tensor = self.out_edges(_one(v, "v"), "uv", etype)[1]
        return destinations

    def find_edges(self, eid: Any, etype: Any = None) -> tuple[Tensor, Tensor]:
        """(sources, destinations) of edges given by id.

        Raises:
            ValueError: an id is out of range.
        """
        relation = self._schema.relation(etype)
        eids = self._checked_eids(eid, relation)
        src, dst = self.relations[relation].coo()
        return src.index_select(0, eids), dst.index_select(0, eids)

    def has_nodes(self, vid: Any, ntype: str | None = None) -> Any:
        """Whether nodes with these ids exist; a bool for a number, else a bool tensor.

        Raises:
            ValueError: a negative id.
        """
        side, index = self._schema.node_id(ntype)
        num_nodes = self._frames(side)[index].num_rows
        ids = id_tensor(vid, "node ids", self.idtype, self.device)
        if ids.numel() and int(ids.min()) < 0:
            raise GraphValueError(f"node ids must not be negative (got {int(ids.min())})")
        return _like(ids < num_nodes, vid)

    def has_edges_between(self, u: Any, v: Any, etype: Any = None) -> Any:
        """Whether there is an edge from each ``u`` to its ``v``; one of the two may be one node.

        Returns:
            A bool for two numbers, else a bool tensor.
        """
        relation, src, dst = self._endpoints(u, v, etype)
        _, counts = self._match(relation, src, dst)
        return _like(counts > 0, u, v)

    def edge_ids(self, u: Any, v: Any, return_uv: bool = False, etype: Any = None) -> Any:
        """Ids of the edges from each ``u`` to its ``v``; one of the two may be one node.

        Args:
            u: Source node ids.
            v: Destination node ids.
            return_uv: Return all parallel edges, as (sources, destinations, ids), rather than the
                one of lowest id for each pair.
            etype: The relation, where there are several.

        Raises:
            ValueError: some pair is not joined by an edge (unless ``return_uv``).
        """
        relation, src, dst = self._endpoints(u, v, etype)
        first, counts = self._match(relation, src, dst)
        order = self._pair_order(relation)[1]
        if return_uv:
            positions = _spread(first, counts)
            eids = order[positions].to(self.idtype)
            repeat = counts.to(src.device)
            return src.repeat_interleave(repeat), dst.repeat_interleave(repeat), eids
        absent = counts == 0
        if bool(absent.any()):
            at = int(absent.nonzero()[0])
            raise GraphValueError(
                f"every pair must be joined by an edge (there is none from {int(src[at])} to "
                f"{int(dst[at])}); ask has_edges_between first"
            )
        return _like(order[first].to(self.idtype), u, v)

    @property
    def is_multigraph(self) -> bool:
        """Whether some pair of nodes is joined by several edges of one relation."""
        for relation in range(len(self.relations)):
            keys = self._pair_order(relation)[0]
            if bool((keys[1:] == keys[:-1]).any()):
                return True
        return False

    def adj_tensors(self, fmt: str, etype: Any = None) -> tuple[Tensor, ...]:
        """The arrays of one sparse format.

        Args:
            fmt: ``"coo"``: (sources, destinations). ``"csr"``: (indptr, destinations, edge ids) by
                source. ``"csc"``: (indptr, sources, edge ids) by destination. Edge ids are empty
                where the graph was made from these arrays without any: position is the id.
            etype: The relation, where there are several.

        Raises:
            ValueError: unknown format.
        """
        adj = self.relations[self._schema.relation(etype)]
        if fmt == "coo":
            return adj.coo()
        if fmt not in ("csr", "csc"):
            raise GraphValueError(f"fmt must be 'coo', 'csr' or 'csc' (got {fmt!r})")
        indptr, indices, eids = adj.csr() if fmt == "csr" else adj.csc()
        if eids is None:
            count = 0 if adj.is_given_as(fmt) else adj.num_edges
            eids = torch.arange(count, dtype=adj.idtype, device=adj.device)
        return indptr, indices, eids

    # ------------------------------------------------------------------ inside

    def _node_ids(self, ids: Any, side: str, index: int) -> Tensor:
        frame = self._frames(side)[index]
        checked = id_tensor(ids, "node ids", self.idtype, self.device)
        check_ids(checked, frame.num_rows, "a node id", frame.what)
        return checked

    def _checked_eids(self, eid: Any, relation: int) -> Tensor:
        frame = self._frames("edge")[relation]
        checked = id_tensor(eid, "edge ids", self.idtype, self.device)
        check_ids(checked, frame.num_rows, "an edge id", frame.what)
        return checked

    def _edge_ids(self, edges: Any, relation: int) -> Tensor:
        if isinstance(edges, tuple) and len(edges) == 2:
            etype = self._schema.canonical_etypes[relation]
            found: Tensor = self.edge_ids(_listed(edges[0]), _listed(edges[1]), etype=etype)
            return found
        return self._checked_eids(edges, relation)

    def _in_edge_ids(self, relation: int, nodes: Tensor) -> Tensor:
        return _compressed_edges(self.relations[relation].csc(), nodes)

    def _edges_in_form(self, relation: int, eids: Tensor, form: str) -> Any:
        src, dst = self.relations[relation].coo()
        return _in_form(form, src.index_select(0, eids), dst.index_select(0, eids), eids)

    def _endpoints(self, u: Any, v: Any, etype: Any) -> tuple[int, Tensor, Tensor]:
        relation = self._schema.relation(etype)
        src = self._node_ids(u, "src", self._schema.src_of[relation])
        dst = self._node_ids(v, "dst", self._schema.dst_of[relation])
        if src.shape != dst.shape:
            if 1 not in (src.shape[0], dst.shape[0]):
                raise GraphValueError(
                    f"u and v must have equal lengths, or one of them length 1 (got "
                    f"{src.shape[0]} and {dst.shape[0]})"
                )
            size = src.shape[0] if dst.shape[0] == 1 else dst.shape[0]
            src, dst = src.expand(size), dst.expand(size)
        return relation, src, dst

    def _pair_order(self, relation: int) -> tuple[Tensor, Tensor]:
        """Keys ``source * num_dst + destination``, ascending, and the edge ids in that order."""
        facts = self._facts[relation]
        if facts.pair_order is None:
            adj = self.relations[relation]
            src, dst = adj.coo()
            keys, ids = torch.sort(src.long() * adj.num_dst + dst.long(), stable=True)
            facts.pair_order = keys, ids
        return facts.pair_order

    def _match(self, relation: int, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        """Where each pair's edges begin in `_pair_order`, and how many there are."""
        keys = self._pair_order(relation)[0]
        wanted = src.long() * self.relations[relation].num_dst + dst.long()
        first = torch.searchsorted(keys, wanted)
        return first, torch.searchsorted(keys, wanted, right=True) - first


def _by_source_then_destination(src: Tensor, dst: Tensor) -> Tensor:
    by_dst = torch.sort(dst, stable=True).indices
    return by_dst[torch.sort(src[by_dst], stable=True).indices]


def _in_form(form: str, src: Tensor, dst: Tensor, eids: Tensor) -> Any:
    if form == "uv":
        return src, dst
    if form == "eid":
        return eids
    if form == "all":
        return src, dst, eids
    raise GraphValueError(f"form must be 'uv', 'eid' or 'all' (got {form!r})")


def _spread(first: Tensor, counts: Tensor) -> Tensor:
    """``first[i], first[i] + 1, ...``, ``counts[i]`` numbers for each i, one after another."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shift = (first - (ends - counts)).repeat_interleave(counts)
    return torch.arange(total, dtype=first.dtype, device=first.device) + shift


def _compressed_edges(compressed: tuple[Tensor, Tensor, Tensor | None], nodes: Tensor) -> Tensor:
    """Ids of the edges in the rows ``nodes`` of a compressed format."""
    indptr, _, eids = compressed
    first = indptr.index_select(0, nodes)
    positions = _spread(first, indptr[1:].index_select(0, nodes) - first).to(indptr.dtype)
    return positions if eids is None else eids.index_select(0, positions)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (
        getattr(value, "ndim", None) == 0 and not isinstance(value, Tensor)
    )


def _like(answer: Tensor, *asked: Any) -> Any:
    """A Python number where every question was one."""
    return answer.item() if all(map(_is_number, asked)) else answer


def _listed(ids: Any) -> Any:
    return [ids] if _is_number(ids) else ids


def _one(node: Any, name: str) -> Any:
    if not _is_number(node) and getattr(node, "numel", lambda: 0)() != 1:
        raise GraphTypeError(f"{name} must be one node id (got {node!r})")
    return node
