# SPDX-License-Identifier: Apache-2.0
"""What goes into the three files of a part: tensors by name, rows that are gathered when written.

`graphshard.partition.format` says what each is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...ops import Adjacency
from .._halo import LocalPart
from .._relabel import IdArray, Relabeling
from .._source import GraphSource
from ..files import Rows
from ..format import etype_key


def graph_tensors(
    local: LocalPart, formats: tuple[str, ...], idtype: torch.dtype
) -> dict[str, Tensor | Rows]:
    """The structure of a part.

    Args:
        local: The part.
        formats: Which of "coo", "csc" and "csr" to store.
        idtype: Of local ids.
    """
    src, dst = local.src.to(idtype), local.dst.to(idtype)
    tensors: dict[str, Tensor | Rows] = {
        "node/_ID": local.node_ids,
        "node/_TYPE": local.node_types,
        "node/part_id": local.node_parts,
        "node/inner_node": _first(local.num_inner_nodes, local.num_nodes),
        "edge/_ID": local.edge_ids,
        "edge/_TYPE": local.edge_types,
        "edge/inner_edge": _first(local.num_inner_edges, local.num_edges),
    }
    adjacency = Adjacency(src, dst, local.num_nodes, local.num_nodes, check=False)
    if "coo" in formats:
        tensors |= {"coo/src": src, "coo/dst": dst}
    for name, grouped in (("csc", adjacency.csc), ("csr", adjacency.csr)):
        if name in formats:
            indptr, indices, eids = grouped()
            tensors |= {f"{name}/indptr": indptr, f"{name}/indices": indices}
            if eids is not None:
                tensors[f"{name}/eids"] = eids
    return tensors


def _first(count: int, total: int) -> Tensor:
    mask = torch.zeros(total, dtype=torch.bool)
    mask[:count] = True
    return mask


def node_tensors(
    source: GraphSource, trainers: IdArray | None, members: IdArray
) -> dict[str, Tensor | Rows]:
    """The features of the nodes of a part.

    Args:
        source: The graph.
        trainers: ``[num_nodes]``, the trainer of each node; None if machines have one.
        members: The part's nodes in their new order, by type: old homogenised ids.
    """
    tensors: dict[str, Tensor | Rows] = {}
    types = np.searchsorted(source.offsets, members, side="right") - 1
    stops = np.cumsum(np.bincount(types, minlength=len(source.ntypes))).tolist()
    start = 0
    for type_id, ntype in enumerate(source.ntypes):
        ids, start = members[start : stops[type_id]], stops[type_id]
        old_ids = torch.from_numpy(ids - source.offsets[type_id])
        for name, feature in source.node_features(type_id).items():
            tensors[f"{ntype}/{name}"] = Rows(feature, old_ids)
        tensors[f"{ntype}/orig_id"] = old_ids
        if trainers is not None:
            tensors[f"{ntype}/trainer_id"] = torch.from_numpy(trainers[ids])
    return tensors


def edge_tensors(
    relabeling: Relabeling, trainers: IdArray | None, part: int
) -> dict[str, Tensor | Rows]:
    """The features of the edges of a part.

    Args:
        relabeling: New ids.
        trainers: ``[num_nodes]``, the trainer of each node; None if machines have one.
        part: The part.
    """
    source = relabeling.source
    tensors: dict[str, Tensor | Rows] = {}
    for relation, etype in enumerate(source.canonical_etypes):
        start, stop = relabeling.edge_range(part, relation)
        old_ids = relabeling.relations[relation].old_ids[start:stop]
        key = etype_key(etype)
        for name, feature in source.edge_features(relation).items():
            tensors[f"{key}/{name}"] = Rows(feature, old_ids)
        tensors[f"{key}/orig_id"] = old_ids.to(torch.int64)
        if trainers is not None:
            _, dst = source.edges(relation)
            offset = source.offsets[source.dst_type[relation]]
            tensors[f"{key}/trainer_id"] = torch.from_numpy(trainers)[dst[old_ids].long() + offset]
    return tensors
