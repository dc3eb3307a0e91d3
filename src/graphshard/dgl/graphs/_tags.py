# SPDX-License-Identifier: Apache-2.0
"""Graphs whose edges stand by a tag within each node, for draws that are biased by the tag."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph, edge_subgraph
from ...graph.structure import EID

__all__ = ["sort_csc_by_tag", "sort_csr_by_tag"]


def sort_csr_by_tag(
    g: Graph, tag: Tensor, tag_offset_name: str = "_TAG_OFFSET", tag_type: str = "node"
) -> Graph:
    """The graph with the out-edges of each node in the order of tags.

    Edges are numbered anew, by source and then tag, where DGL keeps their ids; features move with
    them, and ``edata[EID]`` holds the ids they had.

    Args:
        tag: Numbers from 0 up: ``[num_dst_nodes]`` of destinations, or ``[num_edges]``.
        tag_offset_name: Source feature for ``[num_src_nodes, num_tags + 1]``: where the edges of
            each tag begin among a node's out-edges.
    """
    new, offsets = _sorted(g, tag, tag_type, 0)
    new.srcdata[tag_offset_name] = offsets
    return new


def sort_csc_by_tag(
    g: Graph, tag: Tensor, tag_offset_name: str = "_TAG_OFFSET", tag_type: str = "node"
) -> Graph:
    """The graph with the in-edges of each node in the order of tags; see `sort_csr_by_tag`.

    Args:
        tag: ``[num_src_nodes]`` of sources, or ``[num_edges]``.
        tag_offset_name: Destination feature for ``[num_dst_nodes, num_tags + 1]``.
    """
    new, offsets = _sorted(g, tag, tag_type, 1)
    new.dstdata[tag_offset_name] = offsets
    return new


def _sorted(g: Graph, tag: Tensor, tag_type: str, end: int) -> tuple[Graph, Tensor]:
    """The graph by one end and then tag; and the offsets of tags, ``[num_nodes, num_tags + 1]``."""
    if len(g.canonical_etypes) != 1:
        raise GraphValueError(
            f"sorting by tag takes a graph with one relation (got {g.canonical_etypes}); slice it"
        )
    if tag_type not in ("node", "edge"):
        raise GraphValueError(f"tag_type must be 'node' or 'edge' (got {tag_type!r})")
    ends = g.edges(order="eid")
    counts = (g.num_src_nodes(), g.num_dst_nodes())
    expected = counts[1 - end] if tag_type == "node" else g.num_edges()
    if tag.shape != (expected,):
        raise GraphValueError(f"there must be {expected} tags (got shape {tuple(tag.shape)})")
    tags = tag.to(g.device).long()
    num_tags = int(tags.max()) + 1 if tags.numel() else 0
    if tag_type == "node":
        tags = tags[ends[1 - end].long()]
    keys = ends[end].long() * max(num_tags, 1) + tags
    order = torch.sort(keys, stable=True).indices.to(g.idtype)
    new = edge_subgraph(g, order, relabel_nodes=False, store_ids=False)
    new.edata[EID] = order
    sizes = torch.bincount(keys, minlength=counts[end] * num_tags).reshape(counts[end], num_tags)
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
    return new, offsets.to(g.idtype)
