# SPDX-License-Identifier: Apache-2.0
"""Seeds as users of the loaders give them: rows, masks, ids and types of nodes; edges; labels.

Of a graph in parts they become ids before partitioning, and PyG's classes get data in the place of
the graph that only says which types there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import get_edge_label_index, get_input_nodes

from ...comm import all_reduce
from .._edge_index import ShardedEdgeIndex
from ._sources import SamplingSource
from ._stores import RemoteFeatureStore, RemoteGraphStore


def data_of_loader(data: Any, source: SamplingSource) -> Any:
    """What ``loader.data`` is."""
    if isinstance(data, Data | HeteroData | tuple | list):
        return data
    return RemoteFeatureStore(source), RemoteGraphStore(source)


def _placeholder(source: SamplingSource) -> Data | HeteroData:
    """Data that only says which types there are, for PyG's checks of seeds."""
    if not source.is_typed:
        return Data(num_nodes=source.count(source.ntypes[0]))
    data = HeteroData()
    for ntype in source.ntypes:
        data[ntype].num_nodes = source.count(ntype)
    for etype in source.etypes:
        data[etype].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def node_input(
    data: Any, source: SamplingSource, given: Any, options: dict[str, Any]
) -> tuple[Any, Any, Tensor | None]:
    """What PyG's loader takes: data, seeds by their ids before partitioning, and what they were."""
    if source.is_whole:
        return data, given, None
    if isinstance(data, Data | HeteroData):
        _check_type(source, given, data.node_types if source.is_typed else [])
        ntype, rows, input_id = get_input_nodes(data, given, options.pop("input_id", None))
        store = data[ntype] if source.is_typed else data
        _check_rows(given, rows, store.num_nodes, ntype)
        ids = store.n_id.cpu()[rows.cpu()]
    else:
        ntype, ids, input_id = _served_nodes(source, given)
    if ids.numel() == 0:
        options.pop("shuffle", None)  # torch has no order for nothing
    seeds = (ntype, ids) if source.is_typed else ids
    return _placeholder(source), seeds, input_id


def _check_type(source: SamplingSource, given: Any, types: Sequence[str]) -> None:
    if not source.is_typed:
        return
    named = (
        given if isinstance(given, str) else given[0] if isinstance(given, tuple | list) else None
    )
    if named not in types:
        raise ValueError(
            f"input_nodes must name a node type of {list(types)}, alone or as (type, nodes), "
            f"because the graph has types (got {named!r})"
        )


def _check_rows(given: Any, rows: Tensor, count: int, ntype: Any) -> None:
    mask = given[1] if isinstance(given, tuple | list) and len(given) == 2 else given
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.numel() != count:
        raise ValueError(
            f"a mask of input_nodes has an entry for each of the {count} rows that this rank has "
            f"(got {mask.numel()}); take it from the sharded data"
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ValueError(
            f"input_nodes are rows of the sharded data, in [0, {count}) on this rank (got "
            f"{int(rows.min())} to {int(rows.max())}); to start from ids of the whole graph, set a "
            "mask on the data before it is sharded, and pass the sharded mask"
        )


def _served_nodes(source: SamplingSource, given: Any) -> tuple[Any, Tensor, Tensor | None]:
    """Node type, ids before partitioning and what they stand for, of a graph on servers."""
    ntype, nodes = None, given
    if source.is_typed:
        _check_type(source, given, source.ntypes)
        ntype, nodes = (given, None) if isinstance(given, str) else given
    kind = str(source.kind(ntype))
    if nodes is None:
        return ntype, torch.arange(source.count(kind)), None
    if hasattr(nodes, "part_policy"):  # a DistTensor
        from ...distributed import node_split

        ids = source.original({kind: node_split(nodes, ntype=kind)})[kind]
        return ntype, ids, ids
    ids = torch.as_tensor(nodes)
    if ids.dtype == torch.bool:
        if ids.numel() != source.count(kind):
            raise ValueError(
                f"a mask of input_nodes has an entry for each of the {source.count(kind)} nodes "
                f"(got {ids.numel()})"
            )
        ids = ids.nonzero().view(-1)
        return ntype, ids, ids
    source.check(kind, ids)
    return ntype, ids, None


def link_input(
    data: Any, source: SamplingSource, given: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """What PyG's loader takes: data, and the ends of edges by their ids before partitioning."""
    if source.is_whole:
        return data, given
    etype, ends = None, given
    if source.is_typed:
        if not isinstance(given, tuple | list) or not given:
            raise ValueError(
                "edge_label_index must name a relation, alone or as (relation, ends), because the "
                f"graph has types (got {type(given).__name__})"
            )
        named, ends = (given, None) if isinstance(given[0], str) else given
        etype = tuple(named)
        if etype not in source.etypes:
            raise ValueError(f"edge_label_index names {etype} (the graph has {source.etypes})")
    relation = source.etypes[0] if etype is None else etype
    if isinstance(data, Data | HeteroData):
        store = data if etype is None else data[etype]
        ends = store.edge_index if ends is None else ends
        is_sharded = torch.tensor([int(isinstance(ends, ShardedEdgeIndex))])
        both = all_reduce(torch.cat([is_sharded, -is_sharded]), "max", group=source.group)
        if int(both[0]) != -int(both[1]):
            raise ValueError(
                "edge_label_index is columns of the sharded edge_index on some ranks, and ids on "
                "others; pass the same kind on all"
            )
        if isinstance(ends, ShardedEdgeIndex):
            src_ids = data.n_id if etype is None else data[etype[0]].n_id
            dst_ids = data.n_id if etype is None else data[etype[2]].n_id
            ends = torch.stack([src_ids[ends[0]], dst_ids[ends.local()[1]]]).cpu()
    elif ends is None:
        ends = torch.stack(RemoteGraphStore(source).ends(relation))
    for kind, ids in zip((relation[0], relation[2]), ends, strict=True):
        source.check(kind, ids.cpu())
    if ends.shape[1] == 0:
        options.pop("shuffle", None)  # torch has no order for nothing
    placeholder = _placeholder(source)
    _, ends = get_edge_label_index(placeholder, ends if etype is None else (etype, ends))
    return placeholder, ends if etype is None else (etype, ends)


def labels_on_all_ranks(source: SamplingSource, labels: Tensor) -> Tensor:
    """Labels of which PyG makes room for 0, the negatives, alike on all ranks."""
    if not source.is_collective:
        return labels
    least = labels.min() if labels.numel() else torch.tensor(torch.iinfo(torch.int32).max)
    smallest = all_reduce(least.view(1).double(), "min", group=source.group)
    is_shifted_here = labels.numel() > 0 and float(labels.min()) == 0
    return labels + 1 if float(smallest) == 0 and not is_shifted_here else labels
