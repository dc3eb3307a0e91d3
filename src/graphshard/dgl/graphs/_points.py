# SPDX-License-Identifier: Apache-2.0
"""Graphs of points: each joined to its nearest ones, or to those within a radius."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DGLWarning, GraphValueError
from ...graph import Graph, graph, remove_edges
from ._compaction import neighbor_matching as neighbor_matching

__all__ = ["knn_graph", "radius_graph", "segmented_knn_graph"]

_DISTANCES = ("euclidean", "cosine")


def knn_graph(
    x: Tensor,
    k: int,
    algorithm: str = "bruteforce-blas",
    dist: str = "euclidean",
    exclude_self: bool = False,
) -> Graph:
    """The graph in which the ``k`` nearest points of each point point to it, itself among them.

    Args:
        x: ``[num_points, dim]``, or several sets of points, ``[num_sets, num_points, dim]``.
        algorithm: Accepted so that calls written for DGL run; all compute every distance.

    Returns:
        A graph with a node per point, a batch of graphs where there are several sets. In-edges of
        a node come by its place, nearest first.
    """
    if x.numel() == 0:
        raise GraphValueError("there must be at least one point (got none)")
    sizes = [x.shape[1]] * x.shape[0] if x.dim() == 3 else [x.shape[0]]
    new = _nearest(x.reshape(-1, x.shape[-1]), k, sizes, dist, exclude_self)
    if x.dim() != 3:
        new._batch_nodes = new._batch_edges = None
    return new


def segmented_knn_graph(
    x: Tensor,
    k: int,
    segs: Sequence[int],
    algorithm: str = "bruteforce-blas",
    dist: str = "euclidean",
    exclude_self: bool = False,
) -> Graph:
    """`knn_graph` of several sets of points of different sizes, one behind another."""
    sizes = [int(size) for size in segs]
    if sum(sizes) != x.shape[0]:
        raise GraphValueError(f"segs must add up to {x.shape[0]} points (got {sum(sizes)})")
    return _nearest(x, k, sizes, dist, exclude_self)


def _nearest(x: Tensor, k: int, sizes: list[int], dist: str, exclude_self: bool) -> Graph:
    if k <= 0:
        raise GraphValueError(f"k must be positive (got {k})")
    if x.shape[0] == 0:
        raise GraphValueError("there must be at least one point (got none)")
    if dist not in _DISTANCES:
        raise GraphValueError(f"dist must be one of {_DISTANCES} (got {dist!r})")
    if dist == "cosine":
        x = torch.nn.functional.normalize(x, dim=-1)
    count = min([k + exclude_self, *sizes])
    if count < k + exclude_self:
        warnings.warn(
            f"k={k} neighbours were asked for, and a set has {min(sizes)} points; every point has "
            f"{count - exclude_self} neighbours",
            DGLWarning,
            stacklevel=3,
        )
    sources, destinations, first = [], [], 0
    for points in x.split(sizes):
        far = torch.cdist(points, points)
        if exclude_self:
            far = far.fill_diagonal_(float("-inf"))  # itself first, to be dropped
        near = far.topk(count, dim=1, largest=False).indices[:, int(exclude_self) :]
        own = torch.arange(points.shape[0], device=x.device).unsqueeze(1).expand_as(near)
        sources.append(near.reshape(-1) + first)
        destinations.append(own.reshape(-1) + first)
        first += points.shape[0]
    new = graph((torch.cat(sources), torch.cat(destinations)), num_nodes=x.shape[0])
    counts = torch.tensor(sizes, device=x.device)
    new.set_batch_num_nodes(counts)
    new.set_batch_num_edges(counts * (count - int(exclude_self)))
    return new


def farthest_point_sampler(pos: Tensor, npoints: int, start_idx: int | None = None) -> Tensor:
    """Points that are far apart: each next one is the farthest from those chosen so far.

    Args:
        pos: ``[num_sets, num_points, dim]`` sets of points.

    Returns:
        ``[num_sets, npoints]`` int64, in the order they were chosen.
    """
    num_sets, num_points, _ = pos.shape
    if start_idx is not None and not 0 <= start_idx < num_points:
        raise GraphValueError(f"start_idx must be below {num_points} (got {start_idx})")
    if npoints > num_points:
        raise GraphValueError(f"npoints must be at most {num_points} (got {npoints})")
    if start_idx is None:
        chosen = [torch.randint(num_points, (num_sets,), device=pos.device)]
    else:
        chosen = [torch.full((num_sets,), start_idx, device=pos.device)]
    sets = torch.arange(num_sets, device=pos.device)
    nearest = pos.new_full((num_sets, num_points), float("inf"))
    while len(chosen) < npoints:
        last = pos[sets, chosen[-1]].unsqueeze(1)
        nearest = torch.minimum(nearest, (pos - last).square().sum(-1))
        chosen.append(nearest.argmax(1))
    return torch.stack(chosen[:npoints], 1)


def radius_graph(
    x: Tensor,
    r: float,
    p: float = 2,
    self_loop: bool = False,
    compute_mode: str = "donot_use_mm_for_euclid_dist",
    get_distances: bool = False,
) -> Any:
    """The graph that joins points at most ``r`` apart.

    Returns:
        The graph; with ``get_distances`` a pair of it and ``[num_edges, 1]``.
    """
    if r <= 0:
        raise GraphValueError(f"r must be positive (got {r})")
    if x.shape[0] == 0:
        raise GraphValueError("there must be at least one point (got none)")
    far = torch.cdist(x, x, p=p, compute_mode=compute_mode)
    ends = (far <= r).nonzero(as_tuple=True)
    new = graph(ends, num_nodes=x.shape[0], device=x.device)
    if not self_loop:
        new = remove_edges(new, (ends[0] == ends[1]).nonzero().squeeze(1))
    if not get_distances:
        return new
    return new, far[new.edges()].unsqueeze(-1)
