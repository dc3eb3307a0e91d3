# SPDX-License-Identifier: Apache-2.0
"""convert_dist_graph: full-batch computation on the graph that the servers have.

So a model that was trained on samples of a `DistGraph` runs on all nodes at once, layer by layer,
without another copy of the partition on disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import rank, world_size
from ..comm.collectives import shared_errors
from ..fullbatch import GraphShardManager, PartitionData, RelationEdges, construct_full_graph
from ..graph import EID, NID, NTYPE
from ..partition import RangePartitionBook
from ._dist_graph import DistGraph


def load_dgl_partition_data_from_graph(
    graph: Any, device: torch.device | str = "cpu"
) -> PartitionData:
    """The part of a `DistGraph` that belongs to this rank: part ``r`` to rank ``r``. Collective.

    Args:
        graph: With as many parts as there are trainers; DGL's is taken, too.

    Raises:
        ValueError: There are not as many ranks as parts; on every rank.
    """
    is_ours = isinstance(graph, DistGraph)
    book, part = graph.get_partition_book(), rank()
    book = book if is_ours else _book_of_dgl(book, part)
    with shared_errors():
        if book.num_partitions() != world_size():
            raise ValueError(
                f"a DistGraph of {book.num_partitions()} parts is converted by as many ranks (got "
                f"{world_size()}); partition it into one part for each trainer"
            )
    owned = {ntype: book.partid2nids(part, ntype) for ntype in book.ntypes}
    node_features: dict[str, Tensor] = {
        f"{ntype}/{name}": rows[ids]
        for ntype, ids in owned.items()
        for name, rows in graph.nodes[ntype].data.items()
    }
    node_features[NTYPE] = torch.cat(
        [torch.full((len(ids),), t, dtype=torch.int32) for t, ids in enumerate(owned.values())]
    )
    edge_features: dict[str, Tensor] = {}
    edges: dict[CanonicalEType, RelationEdges] = {}
    in_edges = _in_edges(graph, owned) if is_ours else _in_edges_of_dgl(graph, book)
    for etype, (src, dst, eids) in in_edges.items():
        owner = book.nid2partid(src, etype[0])
        edges[etype] = RelationEdges(
            owner.to(torch.int32),
            src - _first(book, etype[0])[owner],
            dst - int(_first(book, etype[2])[part]),
        )
        for name, rows in graph.edges[etype].data.items():
            edge_features[f"{':'.join(etype)}/{name}"] = rows[eids]
    return PartitionData(
        graph_name=graph.name if is_ours else graph.graph_name,
        rank=part,
        partition_book=book,
        node_type_names=tuple(book.ntypes),
        canonical_etypes=tuple(book.canonical_etypes),
        node_features=node_features,
        edge_features=edge_features,
        edges=edges,
        device=torch.device("cpu"),
    ).to(device)


def convert_dist_graph(dist_graph: Any, **options: Any) -> GraphShardManager:
    """The sharded graph with the nodes and edges of a `DistGraph`. Collective.

    Rows of rank ``r`` are the nodes of part ``r``, in the order of ``ndata[NID]``, by which rows of
    a `DistTensor` are read for it.

    Args:
        dist_graph: With as many parts as there are trainers; DGL's ``DistGraph`` is taken, too.
        **options: As for `construct_full_graph`.
    """
    device = dist_graph.device if isinstance(dist_graph, DistGraph) else "cpu"
    data = load_dgl_partition_data_from_graph(dist_graph, device)
    return construct_full_graph(data, **options)


def _in_edges(
    graph: DistGraph, owned: dict[str, Tensor]
) -> dict[CanonicalEType, tuple[Tensor, Tensor, Tensor]]:
    """Relation to sources, destinations and ids of the in-edges of some nodes, by id."""
    subgraph, edges = graph.in_subgraph(owned), {}
    for etype in graph.canonical_etypes:
        eids, order = torch.sort(subgraph.edges[etype].data[EID])
        src, dst = (ends.long()[order] for ends in subgraph.edges(etype=etype))
        edges[etype] = src, dst, eids
    return edges


def _in_edges_of_dgl(
    graph: Any, book: RangePartitionBook
) -> dict[CanonicalEType, tuple[Tensor, Tensor, Tensor]]:
    """The same of DGL's ``DistGraph``, from the part that it holds, in ids of each type."""
    local = graph.local_partition
    inner = local.edata["inner_edge"].bool()
    ends = (local.ndata[NID][end.long()][inner] for end in local.edges(order="eid"))
    src, dst = (book.map_to_per_ntype(ids)[1] for ids in ends)
    number, eids = book.map_to_per_etype(local.edata[EID][inner])
    edges = {}
    for relation, etype in enumerate(book.canonical_etypes):
        chosen = (number == relation).nonzero().view(-1)
        chosen = chosen[torch.sort(eids[chosen]).indices]
        edges[etype] = src[chosen], dst[chosen], eids[chosen]
    return edges


def _book_of_dgl(book: Any, part: int) -> RangePartitionBook:
    """Our partition book of a ``RangePartitionBook`` of DGL; ids are the same."""
    parts, ntypes, etypes = range(book.num_partitions()), book.ntypes, book.canonical_etypes
    node_sizes = [[len(book.partid2nids(p, ntype)) for ntype in ntypes] for p in parts]
    edge_sizes = [[len(book.partid2eids(p, etype)) for etype in etypes] for p in parts]
    return RangePartitionBook.of_sizes(part, ntypes, etypes, node_sizes, edge_sizes)


def _first(book: RangePartitionBook, ntype: str) -> Tensor:
    """Each part's first node of a type, in the ids of that type."""
    sizes = [stop - start for start, stop in book.node_map()[ntype]]
    return torch.tensor([0, *sizes[:-1]]).cumsum(0)
