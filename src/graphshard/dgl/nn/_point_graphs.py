# SPDX-License-Identifier: Apache-2.0
"""Graphs of points as modules: the nearest points of each, or those within a radius."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...graph import Graph
from ..graphs._points import knn_graph, radius_graph, segmented_knn_graph


class KNNGraph(nn.Module):
    """`graphshard.dgl.knn_graph` with a fixed number of neighbours.

    Args:
        k: Number of neighbours.

    Example:
        >>> import torch
        >>> KNNGraph(2)(torch.rand(5, 3)).num_edges()
        10
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(
        self,
        x: Tensor,
        algorithm: str = "bruteforce-blas",
        dist: str = "euclidean",
        exclude_self: bool = False,
    ) -> Graph:
        """The graph of ``[num_points, dim]`` or ``[num_sets, num_points, dim]`` points."""
        return knn_graph(x, self.k, algorithm, dist, exclude_self)


class SegmentedKNNGraph(nn.Module):
    """`graphshard.dgl.segmented_knn_graph` with a fixed number of neighbours.

    Args:
        k: Number of neighbours.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(
        self,
        x: Tensor,
        segs: Sequence[int],
        algorithm: str = "bruteforce-blas",
        dist: str = "euclidean",
        exclude_self: bool = False,
    ) -> Graph:
        """The graph of ``[num_points, dim]`` points, in sets of the sizes ``segs``."""
        return segmented_knn_graph(x, self.k, segs, algorithm, dist, exclude_self)


class RadiusGraph(nn.Module):
    """`graphshard.dgl.radius_graph` with a fixed radius.

    Args:
        r: The radius.
        p: Which norm measures distances.
        self_loop: Whether a point is joined to itself.
        compute_mode: As for `torch.cdist`.
    """

    def __init__(
        self,
        r: float,
        p: float = 2,
        self_loop: bool = False,
        compute_mode: str = "donot_use_mm_for_euclid_dist",
    ) -> None:
        super().__init__()
        self.r, self.p = r, p
        self.self_loop, self.compute_mode = self_loop, compute_mode

    def forward(self, x: Tensor, get_distances: bool = False) -> Any:
        """The graph of ``[num_points, dim]`` points; with ``get_distances`` a pair."""
        return radius_graph(x, self.r, self.p, self.self_loop, self.compute_mode, get_distances)
