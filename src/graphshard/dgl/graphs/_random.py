# SPDX-License-Identifier: Apache-2.0
"""Graphs with edges drawn at random."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph, graph, heterograph

__all__ = ["rand_bipartite", "rand_graph", "seed"]


def rand_graph(
    num_nodes: int,
    num_edges: int,
    idtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
) -> Graph:
    """A graph whose edges are drawn from all pairs of nodes, without replacement."""
    ends = _pairs(num_nodes, num_nodes, num_edges)
    return graph(ends, num_nodes=num_nodes, idtype=idtype, device=device)


def rand_bipartite(
    utype: str,
    etype: str,
    vtype: str,
    num_src_nodes: int,
    num_dst_nodes: int,
    num_edges: int,
    idtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
) -> Graph:
    """A graph of one relation between two node types, with edges drawn without replacement."""
    ends = _pairs(num_src_nodes, num_dst_nodes, num_edges)
    counts = {utype: num_src_nodes, vtype: num_dst_nodes}
    return heterograph({(utype, etype, vtype): ends}, counts, idtype, device)


def _pairs(num_src: int, num_dst: int, count: int) -> tuple[Tensor, Tensor]:
    total = num_src * num_dst
    if not 0 <= count <= total:
        raise GraphValueError(
            f"there are {total} pairs of nodes to draw edges from (got num_edges={count})"
        )
    if 4 * count >= total:
        keys = torch.randperm(total)[:count]
    else:
        keys = torch.empty(0, dtype=torch.int64)
        while len(keys) < count:  # few are drawn twice, so few rounds are needed
            keys = torch.cat([keys, torch.randint(total, (count - len(keys),))]).unique()
        keys = keys[torch.randperm(count)]
    return keys // max(num_dst, 1), keys % max(num_dst, 1)


def choice(
    a: Tensor | int, size: int | tuple[int, ...], replace: bool = True, prob: Tensor | None = None
) -> Tensor:
    """Draw from the rows of a tensor, or from the numbers below an integer.

    Args:
        a: ``[num_rows, ...]``, or how many numbers there are.
        prob: ``[num_rows]`` weights, which need not add up to 1; equal ones by default.
    """
    population = a.shape[0] if isinstance(a, Tensor) else int(a)
    shape = (size,) if isinstance(size, int) else tuple(size)
    count = math.prod(shape)
    possible = population if prob is None else int((prob > 0).sum())
    if count > (possible if not replace or possible == 0 else count):
        raise GraphValueError(
            f"there must be as many rows of a weight above 0 as are drawn without replacement "
            f"(got {possible} rows, {count} draws); draw fewer, or give replace=True"
        )
    if prob is not None:
        drawn = torch.multinomial(prob.double(), count, replace) if count else torch.empty(0).long()
    elif replace:
        drawn = torch.randint(max(population, 1), (count,))
    else:
        drawn = torch.randperm(population)[:count]
    rows = a[drawn.to(a.device)] if isinstance(a, Tensor) else drawn
    return rows.reshape(*shape, *rows.shape[1:])


def seed(val: int) -> None:
    """Seed everything that draws at random, here and in torch: the generators of torch."""
    torch.manual_seed(val)
