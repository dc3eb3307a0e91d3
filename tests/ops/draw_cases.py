# SPDX-License-Identifier: Apache-2.0
"""Structures to draw from: hubs, and rows of every length at which the kernel does otherwise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DEGREES = (0, 1, 2, 5, 15, 16, 63, 64, 65, 128, 256, 257, 512, 513, 1024, 1025, 3000, 100_000, 0)


class Rows(NamedTuple):
    """A compressed structure, what may come with it, and rows to draw for."""

    indptr: Tensor
    indices: Tensor
    weights: Tensor
    excluded: Tensor  # positions
    rows: Tensor


def structure(degrees: tuple[int, ...] = DEGREES, num_short: int = 60) -> Rows:
    """Rows of ``degrees``, short ones, odd weights, one edge in forty excluded; rows come twice."""
    generator = torch.Generator().manual_seed(3)
    short = torch.randint(0, 40, (num_short,), generator=generator)
    degree = torch.cat([torch.tensor(degrees, dtype=torch.int64), short])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    num_edges = int(indptr[-1])
    indices = torch.randint(0, 500, (num_edges,), generator=generator)
    weights = torch.rand(num_edges, generator=generator)
    weights[torch.rand(num_edges, generator=generator) < 0.3] = 0
    for step, odd in ((7, 1e-30), (101, -1.0), (103, float("inf")), (107, float("nan"))):
        weights[step::1009] = odd
    excluded = torch.nonzero(torch.rand(num_edges, generator=generator) < 0.025).flatten()
    num_rows = degree.shape[0]
    again = torch.randint(0, num_rows, (num_rows // 2,), generator=generator)
    return Rows(indptr, indices, weights, excluded, torch.cat([torch.arange(num_rows), again]))


def options(case: Rows, name: str) -> dict[str, Tensor | bool]:
    """The keyword arguments of a kind of draw."""
    kinds: dict[str, dict[str, Tensor | bool]] = {
        "uniform": {},
        "replace": {"replace": True},
        "weighted": {"prob": case.weights},
        "weighted64": {"prob": case.weights.double() * 1e-3},
        "weighted replace": {"prob": case.weights, "replace": True},
        "labor": {"labor_ids": case.indices},
        "weighted labor": {"labor_ids": case.indices, "prob": case.weights},
    }
    return kinds[name]


KINDS = (
    "uniform",
    "replace",
    "weighted",
    "weighted64",
    "weighted replace",
    "labor",
    "weighted labor",
)
