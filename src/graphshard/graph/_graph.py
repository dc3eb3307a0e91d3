# SPDX-License-Identifier: Apache-2.0
"""Graph: nodes, edges and their features, whole in this process; of one type or of many."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..errors import GraphTypeError, GraphValueError
from ..ops import Adjacency
from .frame import Frame
from .local_graph import LocalGraph, check_relations, edge_frame, parts_to_send
from .structure import Schema, check_count, checked_counts, least_counts, read_edges, read_relations


class Graph(LocalGraph):
    """A graph that is whole in this process; made by `graph` or `heterograph`.

    Features come and go in ``ndata``, ``edata`` and their kin. Edges and nodes are added and taken
    away in place by ``add_nodes``, ``add_edges``, ``remove_nodes`` and ``remove_edges``; every
    other method that changes them returns a new graph. Parallel edges, self loops, nodes without
    edges and empty graphs are all legal.

    Args:
        num_nodes: Node type -> number of nodes, in the order that ``ntypes`` reports. Without
            ``relations``, edges in any form that `graph` takes; none by default.
        relations: Relation -> its edges, in the order that ``canonical_etypes`` reports; at least
            one, all of one idtype and device.
        readonly: Accepted so that calls written for DGL run; has no effect.

    Raises:
        ValueError: no relation, an unknown node type, counts that differ from ``num_nodes``, or
            several idtypes or devices.
    """

    def __init__(
        self,
        num_nodes: Any = None,
        relations: Mapping[CanonicalEType, Adjacency] | None = None,
        *,
        readonly: bool | None = None,
    ) -> None:
        if relations is None:
            self._become(graph([] if num_nodes is None else num_nodes))
            return
        check_relations(num_nodes, num_nodes, relations)
        schema = Schema.of_graph(list(num_nodes), list(relations))
        device = next(iter(relations.values())).device
        frames = {n: Frame(num_nodes[n], device, f"nodes of type {n!r}") for n in schema.ntypes}
        src_frames = [frames[name] for name in schema.srctypes]
        dst_frames = [frames[name] for name in schema.dsttypes] if schema.split else src_frames
        edge_frames = [edge_frame(etype, adj) for etype, adj in relations.items()]
        self._init_local(
            schema, list(relations.values()), src_frames, dst_frames, edge_frames, is_block=False
        )

    def _share_frames(self, g: Graph) -> None:
        """Take the features of ``g``, which has all types of this graph: the very same frames."""
        schema, places = self._schema, map(g._schema.node_id, self._schema.ntypes)
        frames = {n: g._frames(side)[i] for n, (side, i) in zip(schema.ntypes, places, strict=True)}
        self._src_frames = self._dst_frames = [frames[name] for name in schema.srctypes]
        if schema.split:
            self._dst_frames = [frames[name] for name in schema.dsttypes]
        self._edge_frames = [g._edge_frames[g.get_etype_id(t)] for t in schema.canonical_etypes]

    def __repr__(self) -> str:
        if self.is_homogeneous:
            return (
                f"Graph(num_nodes={self.num_nodes()}, num_edges={self.num_edges()},\n"
                f"      ndata_schemes={self.node_attr_schemes()}\n"
                f"      edata_schemes={self.edge_attr_schemes()})"
            )
        nodes = {name: self.num_nodes(name) for name in self.ntypes}
        edges = {etype: self.num_edges(etype) for etype in self.canonical_etypes}
        # As NetworkX lists the edges of `metagraph`: by source, then by destination.
        metagraph = [(source, destination, name) for source, name, destination in edges]
        ntypes = list(dict.fromkeys(ntype for triple in metagraph for ntype in triple[:2]))
        pairs = list(dict.fromkeys(triple[:2] for triple in metagraph))
        metagraph.sort(key=lambda triple: (ntypes.index(triple[0]), pairs.index(triple[:2])))
        return f"Graph(num_nodes={nodes},\n      num_edges={edges},\n      metagraph={metagraph})"


ForkingPickler.register(Graph, parts_to_send)


def graph(
    data: Any,
    num_nodes: int | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    row_sorted: bool = False,
    col_sorted: bool = False,
) -> Graph:
    """Make a graph of one node type and one relation.

    Args:
        data: The edges: ``(sources, destinations)`` in tensors, arrays or lists; a list of pairs;
            ``("coo", (sources, destinations))``; ``("csr", (indptr, indices, edge ids))`` by
            source or ``("csc", ...)`` by destination, with an empty list of edge ids where they
            are 0, 1, ...; a SciPy sparse matrix; or a NetworkX graph. An edge's id is its place.
        num_nodes: Number of nodes; by default one more than the largest id.
        idtype: torch.int32 or torch.int64; by default that of the given tensors, else int64.
        device: Where the graph lives; by default where the given tensors are, else the CPU.
        row_sorted: Accepted so that calls written for DGL run: that edges are sorted by source.
            Sorted edges are recognised.
        col_sorted: The same for destinations.

    Returns:
        The graph, without features.

    Raises:
        TypeError: an unknown form of ``data``, or ids that are not integers.
        ValueError: ids that are negative or not below ``num_nodes``, arrays that do not fit
            together, mixed dtypes or devices.

    Example:
        >>> g = graph(([0, 1, 2], [1, 2, 2]))
        >>> g.num_nodes(), g.num_edges()
        (3, 3)
        >>> g.in_degrees()
        tensor([0, 1, 2])
    """
    if isinstance(data, LocalGraph):
        raise GraphTypeError("data is a graph already; use it as it is, or its .clone()")
    if hasattr(data, "is_multigraph") and hasattr(data, "adj") and hasattr(data, "nodes"):
        from .convert import from_networkx

        g = from_networkx(data, idtype=idtype or torch.int64, device=device)
        if num_nodes is not None and num_nodes != g.num_nodes():
            raise GraphValueError(
                f"num_nodes must be left out, or be the NetworkX graph's {g.num_nodes()} (got "
                f"{num_nodes})"
            )
        return g
    edges = read_edges(data, idtype, device)
    least = max(edges.min_src, edges.min_dst)
    if num_nodes is not None:
        least = check_count(num_nodes, least, edges.idtype, "nodes")
    adj = edges.adjacency(least, least)
    return Graph({DEFAULT_NTYPE: least}, {DEFAULT_CANONICAL_ETYPE: adj})


def heterograph(
    data_dict: Mapping[CanonicalEType, Any],
    num_nodes_dict: Mapping[str, int] | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Make a graph of several node types or relations.

    Node types and relations are put in sorted order, so that equal sets of names give equal order.

    Args:
        data_dict: (source type, name, destination type) -> edges, in any form that `graph` takes
            except a NetworkX graph.
        num_nodes_dict: Node type -> number of nodes, for every type; it may name types without
            edges. By default one more than the largest id that a type has in any relation.

    Returns:
        The graph, without features.

    Raises:
        TypeError: as for `graph`; or keys that are not triples of names.
        ValueError: as for `graph`; or names with ``/``, ``:`` or ``~``, or no relation.

    Example:
        >>> g = heterograph({
        ...     ("user", "follows", "user"): ([0, 1], [1, 2]),
        ...     ("user", "plays", "game"): ([0, 2], [0, 0]),
        ... })
        >>> g.ntypes, g.num_nodes("user"), g["plays"].num_edges()
        (['game', 'user'], 3, 2)
    """
    edges = read_relations(data_dict, idtype, device)
    least = least_counts(
        pair
        for (src, _, dst), read in edges.items()
        for pair in ((src, read.min_src), (dst, read.min_dst))
    )
    kind = next(iter(edges.values())).idtype
    counts = checked_counts(num_nodes_dict, least, kind, "nodes")
    relations = {
        (src, name, dst): read.adjacency(counts[src], counts[dst])
        for (src, name, dst), read in edges.items()
    }
    return Graph(counts, relations)
