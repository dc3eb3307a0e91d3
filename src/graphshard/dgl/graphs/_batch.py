# SPDX-License-Identifier: Apache-2.0
"""Several graphs as one graph without edges between them, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from ...errors import GraphTypeError, GraphValueError
from ...graph import Graph
from ...graph.frame import Frame
from ...graph.message_passing import frames_of
from ...graph.structure import ALL, EID, NID, is_all
from ...ops import Adjacency

__all__ = ["batch", "merge", "slice_batch", "unbatch"]


def batch(graphs: Iterable[Graph], ndata: Any = ALL, edata: Any = ALL) -> Graph:
    """One graph that holds several, one behind another: nodes and edges are numbered anew.

    Args:
        graphs: Graphs of the same node types and relations, id type and device. A
            batch may be batched again: its graphs become graphs of the new one.
        ndata: Names of the node features to carry over; all by default, None for none. Graphs
            without nodes of a type need not have its features.

    Raises:
        ValueError: no graph, or graphs whose types, id types, devices or features differ.
        TypeError: something else than a graph.

    Example:
        >>> from graphshard.graph import graph
        >>> both = batch([graph(([0], [1])), graph(([0, 1], [2, 2]))])
        >>> both.edges(), both.batch_num_nodes()
        ((tensor([0, 2, 3]), tensor([1, 4, 4])), tensor([2, 3]))
    """
    given = _alike(graphs, "batch", "graphs of a batch")
    some, schema = given[0], given[0]._schema
    columns = [[frames_of(g)[side] for g in given] for side in range(3)]
    starts = [  # per side and type, where each graph begins
        [
            list(accumulate((frame.num_rows for frame in frames), initial=0))
            for frames in zip(*side, strict=True)
        ]
        for side in columns[:2]
    ]
    relations = []
    for index in range(len(schema.canonical_etypes)):
        first_src, first_dst = starts[0][schema.src_of[index]], starts[1][schema.dst_of[index]]
        pairs = [g.relations[index].coo() for g in given]
        src = torch.cat([pair[0] + start for pair, start in zip(pairs, first_src, strict=False)])
        dst = torch.cat([pair[1] + start for pair, start in zip(pairs, first_dst, strict=False)])
        relations.append(Adjacency(src, dst, first_src[-1], first_dst[-1], check=False))
    new = object.__new__(Graph)
    sources = _joined_frames(columns[0], ndata)
    destinations = _joined_frames(columns[1], ndata) if schema.split else sources
    edges = _joined_frames(columns[2], edata)
    new._init_local(schema, relations, sources, destinations, edges, is_block=False)
    new._batch_nodes = {
        name: torch.cat([g.batch_num_nodes(name) for g in given]) for name in some.ntypes
    }
    new._batch_edges = {
        etype: torch.cat([g.batch_num_edges(etype) for g in given])
        for etype in some.canonical_etypes
    }
    return new


def _alike(graphs: Iterable[Graph], caller: str, which: str) -> list[Graph]:
    """Graphs as a list: at least one, and all of the same types, id type and device."""
    given = list(graphs)
    if not given:
        raise GraphValueError(f"{caller} needs at least one graph (got none)")
    for g in given:
        if not isinstance(g, Graph):
            raise GraphTypeError(
                f"{caller} takes graphs (got {type(g).__name__}); of a block, block_to_graph makes "
                "one"
            )
        for what in ("ntypes", "canonical_etypes", "idtype", "device"):
            expected, value = getattr(given[0], what), getattr(g, what)
            if value != expected:
                raise GraphValueError(
                    f"{which} must have the same {what} (got {expected} and {value})"
                )
    return given


def _joined_frames(per_graph: Sequence[Sequence[Frame]], names: Any) -> list[Frame]:
    """One frame per type, of the frames that each graph has for it."""
    joined = []
    for frames in zip(*per_graph, strict=True):
        some = frames[0]
        total = sum(frame.num_rows for frame in frames)
        new = Frame(total, some.device, some.what, some.default_view)
        new.initializers = some.initializers
        filled = [frame for frame in frames if frame.num_rows > 0] or list(frames)
        carried = list(filled[0]) if is_all(names) else list(names or ())
        for frame in filled:
            schemes = frame.schemes
            if is_all(names) and set(schemes) != set(carried):
                raise GraphValueError(
                    f"graphs of a batch must have the same features on {some.what} (got {carried} "
                    f"and {sorted(schemes)}); name those to carry over in ndata and edata"
                )
            for name in carried:
                if name not in schemes:
                    raise GraphValueError(
                        f"every graph of a batch must have the feature {name!r} on {some.what} "
                        f"(one has {sorted(schemes)})"
                    )
                if schemes[name] != filled[0].schemes[name]:
                    raise GraphValueError(
                        f"feature {name!r} on {some.what} must have one row shape and dtype in all "
                        f"graphs of a batch (got {filled[0].schemes[name]} and {schemes[name]})"
                    )
        for name in carried:
            new[name] = torch.cat([frame[name] for frame in filled])
        joined.append(new)
    return joined


def unbatch(g: Graph, node_split: Any = None, edge_split: Any = None) -> list[Graph]:
    """The graphs of a batch, with their features.

    Args:
        node_split: Number of nodes of each graph, where it differs from ``batch_num_nodes``; node
            type -> numbers, where there are several types.

    Raises:
        ValueError: numbers that do not add up, that are not as many for every type, or an edge
            between two graphs.
        TypeError: numbers for one of several types without its name; or a block.
    """
    if g.is_block:
        raise GraphTypeError("unbatch takes a graph (got a block)")
    nodes = _splits(node_split, g.ntypes, g.batch_num_nodes, g.num_nodes, "node_split")
    etypes = g.canonical_etypes
    edges = _splits(edge_split, etypes, g.batch_num_edges, g.num_edges, "edge_split")
    lengths = {len(sizes) for sizes in (*nodes.values(), *edges.values())}
    if len(lengths) > 1:
        raise GraphValueError(
            f"node_split and edge_split must have one number per graph for every type (got "
            f"{sorted(lengths)} numbers)"
        )
    spans = _spans(nodes), _spans(edges)
    return [_part(g, *spans, index) for index in range(lengths.pop())]


def _splits(
    given: Any, names: Sequence[Any], in_batch: Any, total: Any, what: str
) -> dict[Any, Any]:
    if given is None:
        given = {name: in_batch(name) for name in names}
    elif not isinstance(given, Mapping):
        if len(names) != 1:
            raise GraphTypeError(
                f"{what} must be a dictionary from type to numbers because there are several types "
                f"{list(names)}"
            )
        given = {names[0]: given}
    if set(given) != set(names):
        raise GraphValueError(f"{what} must have the types {list(names)} (got {list(given)})")
    splits = {name: torch.as_tensor(given[name]).tolist() for name in names}
    for name, sizes in splits.items():
        if sum(sizes) != total(name) or min(sizes, default=0) < 0:
            raise GraphValueError(
                f"{what} of {name!r} must add up to {total(name)}, with no number below 0 (got "
                f"{sizes}); after a change of the graph, call set_batch_num_nodes and "
                f"set_batch_num_edges"
            )
    return splits


def slice_batch(g: Graph, gid: int, store_ids: bool = False) -> Graph:
    """One graph of a batch."""
    if not 0 <= gid < g.batch_size:
        raise GraphValueError(f"gid must be in [0, {g.batch_size}) (got {gid})")
    nodes = _spans({ntype: g.batch_num_nodes(ntype).tolist() for ntype in g.ntypes})
    edges = _spans({etype: g.batch_num_edges(etype).tolist() for etype in g.canonical_etypes})
    new = _part(g, nodes, edges, gid)
    if store_ids:
        for ntype in g.ntypes:
            new.nodes[ntype].data[NID] = new.nodes(ntype) + nodes[ntype][gid][0]
        for etype in g.canonical_etypes:
            new.edges[etype].data[EID] = new.edges("eid", etype=etype) + edges[etype][gid][0]
    return new


_Spans: TypeAlias = dict[Any, list[tuple[int, int]]]
"""Type to where each graph of a batch begins, and how many rows it has."""


def _spans(sizes: Mapping[Any, list[int]]) -> _Spans:
    return {t: list(zip(accumulate(n, initial=0), n, strict=False)) for t, n in sizes.items()}


def _part(g: Graph, node_spans: _Spans, edge_spans: _Spans, index: int) -> Graph:
    nodes, edges = ({t: of[index] for t, of in spans.items()} for spans in (node_spans, edge_spans))
    counts = {ntype: count for ntype, (_, count) in nodes.items()}
    relations = {}
    for etype, adj in zip(g.canonical_etypes, g.relations, strict=True):
        ends = []
        for ntype, side in zip((etype[0], etype[2]), adj.coo(), strict=True):
            own_ends = side.narrow(0, *edges[etype]) - nodes[ntype][0]
            low, high = map(int, own_ends.aminmax()) if len(own_ends) else (0, -1)
            if low < 0 or high >= counts[ntype]:
                raise GraphValueError(
                    f"an edge of relation {etype} joins two graphs of the batch; the numbers of "
                    f"nodes and edges per graph do not fit the edges"
                )
            ends.append(own_ends)
        relations[etype] = Adjacency(
            ends[0], ends[1], counts[etype[0]], counts[etype[2]], check=False
        )
    new = Graph(counts, relations)
    for ntype, own in nodes.items():
        for name, value in g.nodes[ntype].data.items():
            new.nodes[ntype].data[name] = value.narrow(0, *own)
    for etype, own in edges.items():
        for name, value in g.edges[etype].data.items():
            new.edges[etype].data[name] = value.narrow(0, *own)
    return new


def merge(graphs: Sequence[Graph]) -> Graph:
    """One graph with the edges of all: a node id means the same node in each of them.

    Features come along; of nodes, those of the later graph that has the node count. Where a graph
    lacks a feature its rows get initial values.
    """
    given = _alike(graphs, "merge", "graphs to merge")
    some = given[0]
    counts = {ntype: max(g.num_nodes(ntype) for g in given) for ntype in some.ntypes}
    relations = {}
    for index, etype in enumerate(some.canonical_etypes):
        pairs = [g.relations[index].coo() for g in given]
        src, dst = (torch.cat(ends) for ends in zip(*pairs, strict=True))
        relations[etype] = Adjacency(src, dst, counts[etype[0]], counts[etype[2]], check=False)
    new = Graph(counts, relations)
    for ntype in some.ntypes:
        for g in given:
            for name, value in g.nodes[ntype].data.items():
                new.nodes[g.nodes(ntype), ntype].data[name] = value
    for index, etype in enumerate(some.canonical_etypes):
        frame = Frame(0, some.device, f"edges of relation {etype}", "edge")
        for g in given:
            own = frames_of(g)[2][index]
            frame = frame.extended(own.num_rows, {name: own[name] for name in own})
        frames_of(new)[2][index] = frame
    return new
