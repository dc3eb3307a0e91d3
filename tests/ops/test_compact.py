# SPDX-License-Identifier: Apache-2.0
"""IdTable against a dictionary, called again and again; arrays and hash tables."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from graphshard._base.kernels import extension_available, force_extension
from graphshard.ops import IdTable


def by_dictionary(first: Tensor, others: Tensor) -> tuple[list[int], list[int]]:
    number = {node: i for i, node in enumerate(first.tolist())}
    local = [number.setdefault(node, len(number)) for node in others.tolist()]
    return list(number), local


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_ids", [1000, 2**24 + 1, 2**31 - 1])
def test_against_a_dictionary(num_ids: int, dtype: torch.dtype, way: str) -> None:
    generator = torch.Generator().manual_seed(2)
    table = IdTable(num_ids)
    shapes = [(0, 0), (1, 0), (0, 7), (10, 500), (300, 20_000), (1000, 10), (5, 5), (0, 3000)]
    for num_first, num_others in shapes:
        choice = torch.randperm(1000, generator=generator) * (num_ids // 1000)
        first = choice[:num_first].to(dtype)
        others = choice[torch.randint(0, 1000, (num_others,), generator=generator)].to(dtype)
        ids, local = table.renumber(first, others)
        expected_ids, expected_local = by_dictionary(first, others)
        assert ids.dtype == local.dtype == dtype
        assert ids.tolist() == expected_ids
        assert local.tolist() == expected_local


@pytest.mark.parametrize("num_ids", [50_000, 2**40])
def test_many_distinct_ids(num_ids: int, way: str) -> None:
    """A hash table grows while it is filled."""
    others = torch.randperm(50_000, generator=torch.Generator().manual_seed(0)) * (
        num_ids // 50_000
    )
    table = IdTable(num_ids)
    for _ in range(2):
        ids, local = table.renumber(others[:3], others)
        assert torch.equal(ids, others)
        assert torch.equal(local, torch.arange(50_000))


@pytest.mark.parametrize("num_ids", [100, 2**40])
def test_a_refused_call_leaves_the_table_usable(num_ids: int, way: str) -> None:
    table = IdTable(num_ids)
    good = torch.tensor([4, 2]), torch.tensor([9, 2, 9])
    for first, others in (([7, 8, 7], [1]), ([7], [9, -1]), ([num_ids], [3])):
        with pytest.raises(ValueError):
            table.renumber(torch.tensor(first), torch.tensor(others))
        ids, local = table.renumber(*good)
        assert (ids.tolist(), local.tolist()) == ([4, 2, 9], [2, 1, 2])


def test_two_threads_may_not_share_a_table() -> None:
    if not extension_available():
        pytest.skip("plain torch keeps nothing between calls")
    table = IdTable(2_000_000)
    many = torch.arange(2_000_000).repeat(5)
    refused: list[str] = []

    def renumber(others: Tensor) -> None:
        try:
            table.renumber(others[:0], others)
        except RuntimeError as error:
            refused.append(str(error))

    with force_extension(True):
        renumber(many[:1])
        for _ in range(20):
            thread = threading.Thread(target=renumber, args=(many,))
            thread.start()
            while thread.is_alive():
                renumber(many[:0])
                time.sleep(0.0005)
            thread.join()
            if refused:
                break
        assert "one per thread" in refused[0]
        assert table.renumber(many[:2], many[:3])[1].tolist() == [0, 1, 2]
