# SPDX-License-Identifier: Apache-2.0
"""What layers do with their inputs before any message is sent: split, check, scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..ops import ProductRows, is_plain, leading_rows

Widths: TypeAlias = int | tuple[int, int]
"""Width of the node features: one number, or (source, destination)."""

GraphT = TypeVar("GraphT", bound=MessagePassingGraph)

Features: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""Node features: one tensor, or (source, destination)."""


def split_widths(in_feats: Widths) -> tuple[int, int]:
    """(source width, destination width) of a layer's ``in_feats``."""
    if isinstance(in_feats, tuple):
        source, destination = in_feats
        return source, destination
    return in_feats, in_feats


def split_features(graph: MessagePassingGraph, feat: Features) -> tuple[Tensor, Tensor]:
    """(source features, destination features) of a layer's input.

    On a block, one tensor holds the source nodes, and the destination nodes are its first rows.

    Raises:
        ValueError: The pair has no destination features.
    """
    if isinstance(feat, tuple):
        source, destination = feat
        if destination is None:
            raise ValueError(
                "this layer needs features of the destination nodes too (got a pair whose second "
                "item is None); inside HeteroGraphConv, add the destination node type to inputs"
            )
        return source, destination
    return feat, leading_rows(feat, graph.num_dst_nodes()) if graph.is_block else feat


def are_leading_rows(some: Tensor, rows: Tensor) -> bool:
    """Whether ``some`` are the first of ``rows``, or all, in the same memory."""
    if some is rows:
        return True
    return (
        some.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        and some.storage_offset() == rows.storage_offset()
        and some.stride() == rows.stride()
        and some.shape[1:] == rows.shape[1:]
        and some.dtype == rows.dtype
    )


def with_remote_rows(
    graph: GraphT, feat: Features, layer: nn.Module, width: int
) -> tuple[GraphT, Features]:
    """A graph whose sources are local, and their rows, if inputs are less to send than products.

    Args:
        feat: Dropped out already.
        layer: What sources are multiplied by before they are sent.
        width: Of what would be sent of each of them.

    Returns:
        This graph and these features otherwise. See [Note: inputs travel] in `fullbatch`.
    """
    source = feat[0] if isinstance(feat, tuple) else feat
    if not isinstance(source, Tensor) or not is_plain(layer, nn.Linear) or source.dim() != 2:
        return graph, feat
    if len(graph.srctypes) != 1:
        return graph, feat
    (ntype,) = graph.srctypes
    local, rows = graph.localize({ntype: source}, instead_of=width)
    return local, (rows[ntype], feat[1]) if isinstance(feat, tuple) else rows[ntype]


def multiplies_first(source: Any, in_width: int, out_width: int) -> bool:
    """Whether rows are multiplied before they are summed, as those that are not in memory must."""
    return in_width > out_width or isinstance(source, ProductRows)


def read_once(feat: Features, layers: Sequence[nn.Linear]) -> Features:
    """The same rows; those that are not in memory are read once for the products of all layers."""
    if isinstance(feat, ProductRows) and all(is_plain(layer, nn.Linear) for layer in layers):
        return feat.with_products([layer.weight.t() for layer in layers])
    return feat


def prepare_edge_weight(graph: MessagePassingGraph, edge_weight: Any, num_dims: int) -> Any:
    """Edge weights that broadcast against node features of ``num_dims`` dimensions.

    Args:
        edge_weight: ``[num_edges]`` or ``[num_edges, ...]``; may be the deferred edge values of a
            sharded graph, of which only ``shape`` and ``unsqueeze(-1)`` are used.
        num_dims: Dimensions of the features that the weights multiply.

    Returns:
        ``[num_edges, 1, ...]`` for one-dimensional weights, else ``edge_weight`` itself.

    Raises:
        ValueError: The number of weights is not the number of edges.
    """
    if edge_weight.shape[0] != graph.num_edges():
        raise ValueError(
            f"edge_weight needs one row per edge: the graph has {graph.num_edges()} edges "
            f"(got edge_weight of shape {tuple(edge_weight.shape)})"
        )
    if len(edge_weight.shape) == 1:
        for _ in range(num_dims - 1):
            edge_weight = edge_weight.unsqueeze(-1)
    return edge_weight


def neighbour_message(graph: MessagePassingGraph, edge_weight: Any, num_dims: int) -> Any:
    """The message ``m``: ``h`` of the source, times edge weights (which are stored) if given."""
    if edge_weight is None:
        return fn.copy_u("h", "m")
    graph.edata["_edge_weight"] = prepare_edge_weight(graph, edge_weight, num_dims)
    return fn.u_mul_e("h", "_edge_weight", "m")


def degree_scale(degrees: Tensor, power: float, like: Tensor) -> Tensor:
    """``max(degree, 1) ** power``, shaped to multiply the rows of ``like``.

    The power is taken in float32 at least, because bfloat16 cannot hold degrees above 256.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    scale = degrees.clamp(min=1).to(device=like.device, dtype=dtype).pow(power).to(like.dtype)
    return scale.reshape(-1, *(1,) * (like.dim() - 1))
