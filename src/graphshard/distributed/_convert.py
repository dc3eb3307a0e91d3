# SPDX-License-Identifier: Apache-2.0
"""convert_dist_graph: full-batch computation on the graph that the servers have.

So a model that was trained on samples of a `DistGraph` runs on all nodes at once, layer by layer,
without another copy of the partition on disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import rank, share_error, world_size
from ..fullbatch import (
    GraphShardManager,
    PartitionData,
    RelationEdges,
    construct_full_graph,
)
from ..graph import EID, NTYPE
from ._dist_graph import DistGraph


def load_dgl_partition_data_from_graph(
    graph: DistGraph, device: torch.device | str = "cpu"
) -> PartitionData:
    """The part of a `DistGraph` that belongs to this rank: part ``r`` to rank ``r``. Collective.

    Args:
        graph: With as many parts as there are trainers.
        device: Where to put the part.

    Raises:
        ValueError: There are not as many ranks as parts; on every rank.
    """
    book, part = graph.get_partition_book(), rank()
    error = None
    if book.num_partitions() != world_size():
        error = ValueError(
            f"a DistGraph of {book.num_partitions()} parts is converted by as many ranks (got "
            f"{world_size()}); partition it into one part for each trainer"
        )
    share_error(error)
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
    found = graph.in_subgraph(owned)
    for etype in book.canonical_etypes:
        order = torch.sort(found.edges[etype].data[EID]).indices
        eids = found.edges[etype].data[EID][order]
        src, dst = (ends.long()[order] for ends in found.edges(etype=etype))
        owner = book.nid2partid(src, etype[0])
        edges[etype] = RelationEdges(
            owner.to(torch.int32),
            src - _first(book, etype[0])[owner],
            dst - int(_first(book, etype[2])[part]),
        )
        for name, rows in graph.edges[etype].data.items():
            edge_features[f"{':'.join(etype)}/{name}"] = rows[eids]
    return PartitionData(
        graph_name=graph.name,
        rank=part,
        partition_book=book,
        node_type_names=tuple(book.ntypes),
        canonical_etypes=tuple(book.canonical_etypes),
        node_features=node_features,
        edge_features=edge_features,
        edges=edges,
        device=torch.device("cpu"),
    ).to(device)


def convert_dist_graph(dist_graph: DistGraph, **options: Any) -> GraphShardManager:
    """The sharded graph with the nodes and edges of a `DistGraph`. Collective.

    Rows of rank ``r`` are the nodes of part ``r``, in the order of ``ndata[NID]``, by which rows of
    a `DistTensor` are read for it.

    Args:
        dist_graph: With as many parts as there are trainers.
        **options: As for `construct_full_graph`.

    Raises:
        ValueError: As for `construct_full_graph`; on every rank.
    """
    data = load_dgl_partition_data_from_graph(dist_graph, dist_graph.device)
    return construct_full_graph(data, **options)


def _first(book: Any, ntype: str) -> Tensor:
    """Each part's first node of a type, in the ids of that type."""
    sizes = [stop - start for start, stop in book.node_map()[ntype]]
    return torch.tensor([0, *sizes[:-1]]).cumsum(0)
