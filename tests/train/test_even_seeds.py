# SPDX-License-Identifier: Apache-2.0
"""Seeds are shared evenly, whatever the ranks had. 1 to 4 ranks."""

from __future__ import annotations

import pytest
import torch

from graphshard.testing import run_ranks
from graphshard.train._run import shared_evenly

SIZES = [[5], [3, 3], [9, 0], [0, 0], [1, 0], [0, 7, 2], [10, 1, 1], [1, 2, 3, 0], [0, 0, 0, 11]]


def share(rank: int, world_size: int, sizes: list[int]) -> tuple[list[int], list[int]]:
    first = sum(sizes[:rank])
    ids = torch.arange(first, first + sizes[rank])
    return ids.tolist(), shared_evenly(ids).tolist()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_shares(sizes: list[int]) -> None:
    results = run_ranks(share, len(sizes), sizes)
    lengths = [len(after) for _, after in results]
    assert max(lengths) - min(lengths) <= 1
    assert sorted(i for _, after in results for i in after) == list(range(sum(sizes)))
    moved = sum(len(set(before) - set(after)) for before, after in results)
    fewest, larger = divmod(sum(sizes), len(sizes))
    targets = sorted([fewest + 1] * larger + [fewest] * (len(sizes) - larger))
    assert moved == sum(max(0, n - t) for n, t in zip(sorted(sizes), targets, strict=True))
    for before, after in results:
        kept = [i for i in after if i in set(before)]
        assert kept == before[: len(kept)] == after[: len(kept)]
