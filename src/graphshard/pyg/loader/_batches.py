# SPDX-License-Identifier: Apache-2.0
"""Batches of PyG's shape from samples of a graph that is not whole in this process.

What PyG's ``filter_data`` is for data in memory: rows of nodes and edges are fetched, all kinds in
one exchange, and put where a model expects them. Of whole graphs PyG's own function is used.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from ._sources import ORIGINAL, Kind, SamplingSource


def batch_of(
    source: SamplingSource,
    given: Any,
    out: SamplerOutput | HeteroSamplerOutput,
    custom_cls: Any = None,
) -> Data | HeteroData:
    """The data of a sample: features, ``edge_index``, ``n_id``, ``e_id`` and counts of hops.

    Collective where the source is.

    Args:
        source: Where rows come from.
        given: What the loader was given; other attributes of data go over as they are.
        out: What a `HopSampler` gave.
        custom_cls: A class to make, in the place of ``Data`` or ``HeteroData``, where there are no
            data to start from.
    """
    is_typed = isinstance(out, HeteroSamplerOutput)
    nodes: dict[Any, Tensor] = dict(out.node) if is_typed else {source.ntypes[0]: out.node}
    edges: dict[Any, Tensor | None] = (
        dict(out.edge or {}) if is_typed else {source.etypes[0]: out.edge}
    )
    wanted: list[tuple[Kind, list[str], Tensor]] = [
        (ntype, source.columns(ntype), source.stored(ntype, ids)) for ntype, ids in nodes.items()
    ]
    for etype, eids in edges.items():
        if eids is not None:
            wanted.append((etype, [*source.columns(etype), ORIGINAL], eids))
    rows = {
        kind: columns for (kind, _, _), columns in zip(wanted, source.fetch(wanted), strict=True)
    }

    if isinstance(given, Data | HeteroData):
        data = copy.copy(given)
    else:
        data = (custom_cls or (HeteroData if is_typed else Data))()
    for ntype, ids in nodes.items():
        store = data[ntype] if is_typed else data
        for name, column in zip(source.columns(ntype), rows[ntype], strict=True):
            store[name] = column
        store.n_id = ids
        store.num_nodes = ids.numel()
    for etype in edges:
        store = data[etype] if is_typed else data
        src, dst = (out.row[etype], out.col[etype]) if is_typed else (out.row, out.col)
        before = store.get("edge_index", None)
        store.edge_index = torch.stack([src, dst])
        if before is not None:
            store.edge_index = store.edge_index.to(before.device)
        names = source.columns(etype)
        columns = rows.get(etype)
        for place, name in enumerate(names):
            store[name] = None if columns is None else columns[place]
        if columns is not None:
            store.e_id = columns[-1].cpu()
        elif "e_id" in store:
            del store["e_id"]
    return _with_counts(data, out, is_typed)


def _with_counts(data: Any, out: Any, is_typed: bool) -> Any:
    if not is_typed:
        data.batch = out.batch
        data.num_sampled_nodes = out.num_sampled_nodes
        data.num_sampled_edges = out.num_sampled_edges
        if out.orig_row is not None and out.orig_col is not None:
            data._orig_edge_index = torch.stack([out.orig_row, out.orig_col])
        return data
    data.set_value_dict("batch", out.batch)
    data.set_value_dict("num_sampled_nodes", out.num_sampled_nodes)
    data.set_value_dict("num_sampled_edges", out.num_sampled_edges)
    if out.orig_row is not None and out.orig_col is not None:
        for etype in out.orig_row:
            data[etype]._orig_edge_index = torch.stack([out.orig_row[etype], out.orig_col[etype]])
    return data


def set_node_seeds(data: Any, out: Any, input_type: Any) -> None:
    """What a batch of nodes says of its seeds."""
    store = data if input_type is None else data[input_type]
    store.input_id, store.seed_time = out.metadata
    store.batch_size = store.input_id.shape[0]


def set_link_seeds(data: Any, out: Any, input_type: Any, neg_sampling: Any) -> None:
    """What a batch of edges says of them, and of the negatives."""
    if neg_sampling is None or neg_sampling.is_binary():
        store = data if input_type is None else data[input_type]
        store.input_id, store.edge_label_index, store.edge_label, store.edge_label_time = (
            out.metadata
        )
        return
    input_id, src, dst_pos, dst_neg, seed_time = out.metadata
    if input_type is None:
        data.input_id, data.seed_time = input_id, seed_time
        data.src_index, data.dst_pos_index, data.dst_neg_index = src, dst_pos, dst_neg
        return
    data[input_type].input_id = input_id
    data[input_type[0]].src_index = src
    data[input_type[2]].dst_pos_index, data[input_type[2]].dst_neg_index = dst_pos, dst_neg
    data[input_type[0]].seed_time = data[input_type[2]].seed_time = seed_time
