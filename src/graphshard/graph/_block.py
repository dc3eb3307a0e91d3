# SPDX-License-Identifier: Apache-2.0
"""Block: one layer's worth of edges, from source nodes to separate destination nodes.

Samplers produce blocks. `to_block` follows the convention that layers rely on: the destination
nodes come first among the source nodes of the same type, so that ``features[:num_dst]`` are the
destinations' own features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..errors import GraphTypeError, GraphValueError
from ..ops import Adjacency
from ._graph import Graph
from .frame import Frame
from .local_graph import LocalGraph, check_relations, edge_frame, parts_to_send
from .structure import (
    EID,
    NID,
    Schema,
    by_first_occurrence,
    check_ids,
    checked_counts,
    id_tensor,
    least_counts,
    places_of,
    read_relations,
)
from .transforms import select_fields


class Block(LocalGraph):
    """Edges from source nodes to destination nodes, which are numbered separately.

    Args:
        num_src_nodes: Source type -> number of nodes, in the order that ``srctypes`` reports.
        num_dst_nodes: Destination type -> number of nodes, in the order of ``dsttypes``.
        relations: Relation -> its edges, in the order of ``canonical_etypes``; at least one.

    Raises:
        ValueError: as for `Graph`.
    """

    def __init__(
        self,
        num_src_nodes: Mapping[str, int],
        num_dst_nodes: Mapping[str, int],
        relations: Mapping[CanonicalEType, Adjacency],
    ) -> None:
        check_relations(num_src_nodes, num_dst_nodes, relations)
        device = next(iter(relations.values())).device
        self._init_local(
            _schema(tuple(num_src_nodes), tuple(num_dst_nodes), tuple(relations)),
            list(relations.values()),
            [
                Frame(count, device, f"source nodes of type {name!r}", "src")
                for name, count in num_src_nodes.items()
            ],
            [
                Frame(count, device, f"destination nodes of type {name!r}", "dst")
                for name, count in num_dst_nodes.items()
            ],
            [edge_frame(etype, adj) for etype, adj in relations.items()],
            is_block=True,
        )

    def __repr__(self) -> str:
        if len(self.srctypes) == len(self.dsttypes) == len(self.etypes) == 1:
            return (
                f"Block(num_src_nodes={self.num_src_nodes()}, "
                f"num_dst_nodes={self.num_dst_nodes()}, num_edges={self.num_edges()})"
            )
        sources = {name: self.num_src_nodes(name) for name in self.srctypes}
        destinations = {name: self.num_dst_nodes(name) for name in self.dsttypes}
        edges = {etype: self.num_edges(etype) for etype in self.canonical_etypes}
        return (
            f"Block(num_src_nodes={sources},\n      num_dst_nodes={destinations},\n"
            f"      num_edges={edges})"
        )


ForkingPickler.register(Block, parts_to_send)


# One schema for all blocks of the same types: samplers make thousands of them.
_schema = functools.lru_cache(maxsize=64)(Schema.of_block)


def create_block(
    data_dict: Any,
    num_src_nodes: int | Mapping[str, int] | None = None,
    num_dst_nodes: int | Mapping[str, int] | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Block:
    """Make a block from edges whose ends are numbered as sources and as destinations already.

    Args:
        data_dict: Edges of one relation, in any form that `graph` takes except a NetworkX graph;
            or (source type, name, destination type) -> edges.
        num_src_nodes: Number of source nodes; with several relations, type -> number. By default
            one more than the largest id.

    Raises:
        TypeError: as for `heterograph`.
        ValueError: as for `heterograph`.

    Example:
        >>> block = create_block(([0, 1, 2], [0, 0, 1]), num_src_nodes=4, num_dst_nodes=2)
        >>> block
        Block(num_src_nodes=4, num_dst_nodes=2, num_edges=3)
    """
    if not isinstance(data_dict, Mapping):
        data_dict = {DEFAULT_CANONICAL_ETYPE: data_dict}
        if num_src_nodes is not None and not isinstance(num_src_nodes, Mapping):
            num_src_nodes = {DEFAULT_NTYPE: num_src_nodes}
        if num_dst_nodes is not None and not isinstance(num_dst_nodes, Mapping):
            num_dst_nodes = {DEFAULT_NTYPE: num_dst_nodes}
    edges = read_relations(data_dict, idtype, device)
    kind = next(iter(edges.values())).idtype
    least_src = least_counts((src, read.min_src) for (src, _, _), read in edges.items())
    least_dst = least_counts((dst, read.min_dst) for (_, _, dst), read in edges.items())
    src_counts = checked_counts(_mapping(num_src_nodes), least_src, kind, "source nodes")
    dst_counts = checked_counts(_mapping(num_dst_nodes), least_dst, kind, "destination nodes")
    relations = {
        (src, name, dst): read.adjacency(src_counts[src], dst_counts[dst])
        for (src, name, dst), read in edges.items()
    }
    return Block(src_counts, dst_counts, relations)


def _mapping(counts: int | Mapping[str, int] | None) -> Mapping[str, int] | None:
    if counts is None or isinstance(counts, Mapping):
        return counts
    raise GraphTypeError(
        f"numbers of nodes must be dictionaries from type to number where the relations are named "
        f"(got {counts!r})"
    )


def to_block(
    g: Graph,
    dst_nodes: Any = None,
    include_dst_in_src: bool = True,
    src_nodes: Any = None,
) -> Block:
    """Turn the edges of a graph into a block, dropping nodes that no edge touches.

    Source and destination nodes get new numbers; ``srcdata[NID]``, ``dstdata[NID]`` and
    ``edata[EID]`` hold the numbers that they have in ``g``. Features are carried over. Edges keep
    their order.

    Args:
        dst_nodes: Destination nodes in the order wanted, with every node that an edge enters; a
            tensor, or type -> tensor. By default those nodes, ascending. Relations into a type
            that gets none lose their edges. Of a node that is given several times, edges enter the
            last one, as in DGL.
        include_dst_in_src: Put the destination nodes first among the source nodes of their type.
            The other sources follow in order of first appearance.
        src_nodes: Source nodes in the order wanted, with every node that an edge leaves (and, if
            ``include_dst_in_src``, the destination nodes first); by default found as above. Of a
            node that is there several times, edges leave the last of the destination nodes, or the
            first of the others.

    Raises:
        TypeError: nodes given without their type, on a graph of several types.
        ValueError: an id is out of range or missing.

    Example:
        >>> from graphshard.graph import graph
        >>> block = to_block(graph(([5, 6, 6], [1, 1, 2])), torch.tensor([2, 1]))
        >>> block.srcdata[NID], block.dstdata[NID]
        (tensor([2, 1, 5, 6]), tensor([2, 1]))
    """
    if g.is_block:
        raise GraphTypeError("to_block takes a graph, and this is a block already; use it as it is")
    given_dst = _nodes_by_type(g, dst_nodes, "dst_nodes")
    given_src = _nodes_by_type(g, src_nodes, "src_nodes")
    empty = torch.empty(0, dtype=g.idtype, device=g.device)
    left_out = {  # types that get no destination nodes, so no edges
        ntype
        for ntype in g.ntypes
        if given_dst is not None and given_dst.get(ntype, empty).shape[0] == 0
    }
    ends = [
        (empty, empty) if etype[2] in left_out else adj.coo()
        for etype, adj in zip(g.canonical_etypes, g.relations, strict=True)
    ]
    into: dict[str, list[Tensor]] = {ntype: [] for ntype in g.ntypes}
    out_of: dict[str, list[Tensor]] = {ntype: [] for ntype in g.ntypes}
    for (src_type, _, dst_type), (src, dst) in zip(g.canonical_etypes, ends, strict=True):
        out_of[src_type].append(src)
        into[dst_type].append(dst)
    dst_of, src_of, dst_map, src_map = {}, {}, {}, {}
    for ntype in g.ntypes:
        if given_dst is None:
            dst_of[ntype] = torch.unique(torch.cat([empty, *into[ntype]]))
        else:
            dst_of[ntype] = given_dst.get(ntype, empty)
        num_nodes = g.num_nodes(ntype)
        check_ids(dst_of[ntype], num_nodes, "an id in dst_nodes", f"nodes of type {ntype!r}")
        dst_map[ntype] = places_of(dst_of[ntype], num_nodes, "last")
        first = dst_of[ntype] if include_dst_in_src else empty  # where an id may be repeated
        if given_src is None:
            others = by_first_occurrence(torch.cat([empty, *out_of[ntype]]))
            if include_dst_in_src:
                others = others[dst_map[ntype].index_select(0, others) < 0]
            src_of[ntype] = torch.cat([first, others])
        else:
            src_of[ntype] = given_src.get(ntype, empty)
            if not torch.equal(src_of[ntype][: first.shape[0]], first):
                raise GraphValueError(
                    f"src_nodes of type {ntype!r} must begin with dst_nodes, because "
                    f"include_dst_in_src is set; reorder them, or pass include_dst_in_src=False"
                )
        check_ids(src_of[ntype], num_nodes, "an id in src_nodes", f"nodes of type {ntype!r}")
        src_map[ntype] = places_of(src_of[ntype], num_nodes)
        if include_dst_in_src:
            src_map[ntype] = torch.where(dst_map[ntype] >= 0, dst_map[ntype], src_map[ntype])
    relations = {}
    for etype, (src, dst) in zip(g.canonical_etypes, ends, strict=True):
        new_src = _renumbered(src, src_map[etype[0]], "src_nodes", "leaves", etype)
        new_dst = _renumbered(dst, dst_map[etype[2]], "dst_nodes", "enters", etype)
        num_src, num_dst = src_of[etype[0]].shape[0], dst_of[etype[2]].shape[0]
        relations[etype] = Adjacency(new_src, new_dst, num_src, num_dst, check=False)
    block = Block(
        {ntype: int(ids.shape[0]) for ntype, ids in src_of.items()},
        {ntype: int(ids.shape[0]) for ntype, ids in dst_of.items()},
        relations,
    )
    _carry_features(g, block, src_of, dst_of, left_out)
    return block


def _carry_features(
    g: Graph,
    block: Block,
    src_of: Mapping[str, Tensor],
    dst_of: Mapping[str, Tensor],
    left_out: set[str],
) -> None:
    for ntype in g.ntypes:
        data = g.nodes[ntype].data
        for view, ids in ((block.srcnodes, src_of[ntype]), (block.dstnodes, dst_of[ntype])):
            select_fields(data, view[ntype].data, ids)
            view[ntype].data[NID] = ids
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        target = block.edges[etype].data
        stop = 0 if etype[2] in left_out else adj.num_edges
        for name, value in g.edges[etype].data.items():
            target[name] = value if stop == adj.num_edges else value[:stop]
        target[EID] = torch.arange(stop, dtype=adj.idtype, device=adj.device)


def _nodes_by_type(g: Graph, nodes: Any, what: str) -> dict[str, Tensor] | None:
    if nodes is None:
        return None
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) > 1:
            raise GraphTypeError(
                f"{what} must be a dictionary from node type to ids because the graph has the "
                f"types {g.ntypes} (got {type(nodes).__name__})"
            )
        nodes = {g.ntypes[0]: nodes}
    unknown = [ntype for ntype in nodes if ntype not in g.ntypes]
    if unknown:
        raise GraphValueError(
            f"{what} names unknown node types {unknown}; the graph has {g.ntypes}"
        )
    return {ntype: id_tensor(ids, what, g.idtype, g.device) for ntype, ids in nodes.items()}


def _renumbered(ids: Tensor, places: Tensor, what: str, verb: str, etype: CanonicalEType) -> Tensor:
    new = places[ids.long()]
    lost = new < 0
    if bool(lost.any()):
        raise GraphValueError(
            f"{what} must hold every node that an edge {verb} (missing {int(ids[lost][0])} of "
            f"relation {etype}); add it, or leave {what} out"
        )
    return new
