# SPDX-License-Identifier: Apache-2.0
"""Messages without their zeros: what is sent, and that nothing is lost. 1, 2 and 3 ranks.

The oracle is NumPy, and the rows themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphshard import comm
from graphshard._base.kernels import extension_available, force_extension
from graphshard.comm import ExchangePlan, collectives, fetch_halo, halo, start_fetch, start_return
from graphshard.comm.collectives import LONG_BYTES
from graphshard.comm.nonzero_words import put_zeros, without_zeros, word_bytes
from graphshard.testing import run_ranks

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
needs_extension = pytest.mark.skipif(
    not extension_available(), reason="without the extension no zeros are left out"
)


def message_of(num_words: int, of_word: int, zeros: float, seed: int = 0) -> Tensor:
    """Bytes of words, some of which are zero."""
    rng = np.random.default_rng(seed)
    limit = np.iinfo(WORDS[of_word]).max
    words = rng.integers(1, limit, num_words, dtype=WORDS[of_word], endpoint=True)
    words[rng.random(num_words) < zeros] = 0
    return torch.from_numpy(words.view(np.uint8))


def expected_of(message: Tensor, of_word: int) -> bytes:
    words = message.numpy().view(WORDS[of_word])
    bits = np.packbits(words != 0, bitorder="little").tobytes()
    return words[words != 0].tobytes() + bits.ljust((words.size + 63) // 64 * 8, b"\0")


@needs_extension
@pytest.mark.parametrize("of_word", [1, 2, 4])
@pytest.mark.parametrize("num_words", [64, 1000, 1024, 70_001])
@pytest.mark.parametrize("zeros", [0.3, 0.5, 0.97, 1.0])
def test_words_that_are_not_zero_and_where_they_are(
    num_words: int, of_word: int, zeros: float
) -> None:
    message = message_of(num_words, of_word, zeros)
    packed = without_zeros(message, of_word)
    expected = expected_of(message, of_word)
    if packed is None:  # a bit a word weighs an eighth of it at most
        assert len(expected) > 0.85 * message.numel() or num_words == 64
        return
    assert packed.numpy().tobytes() == expected
    for native in (True, False):
        arrived = torch.full_like(message, 77)
        arrived[: packed.numel()] = packed
        with force_extension(native):
            put_zeros(arrived, packed.numel(), of_word)
        assert torch.equal(arrived, message)


@needs_extension
def test_messages_that_gain_little_are_left_as_they_are() -> None:
    for zeros in (0.0, 0.1, 0.2):
        assert without_zeros(message_of(50_000, 4, zeros), 4) is None
    # Many zeros where the sample looks, and few elsewhere.
    words = torch.ones(1024, 64, dtype=torch.int32)
    words[::4, ::3] = 0
    assert without_zeros(words.view(-1).view(torch.uint8), 4) is None
    assert without_zeros(torch.zeros(0, dtype=torch.uint8), 4) is None


def test_only_what_is_all_zero_is_left_out() -> None:
    odd = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45, -1e-45])
    rows = torch.cat([odd, torch.zeros(4000)])
    packed = without_zeros(rows.view(torch.uint8), 4)
    if packed is None:
        assert not extension_available()
        return
    arrived = torch.empty(rows.nbytes, dtype=torch.uint8)
    arrived[: packed.numel()] = packed
    put_zeros(arrived, packed.numel(), 4)
    assert torch.equal(arrived.view(torch.int32), rows.view(torch.int32))


@pytest.mark.parametrize("native", [True, False])
def test_what_no_sender_makes_is_refused(native: bool) -> None:
    if native and not extension_available():
        pytest.skip("there is no extension")
    message = message_of(1000, 4, 0.6)
    good = torch.from_numpy(np.frombuffer(expected_of(message, 4), np.uint8).copy())
    with force_extension(native):
        for change in ("size", "part", "bits", "behind the end", "long", "short"):
            arrived, size = torch.zeros_like(message), good.numel()
            arrived[:size] = good
            if change == "bits":
                arrived[size - 128] ^= 1
            elif change == "behind the end":  # 1,000 words, and 1,024 bits
                arrived[size - 1] ^= 1
            size += {"size": 4, "part": 1, "long": message.numel()}.get(change, 0)
            size = 9 if change == "short" else size
            with pytest.raises(ValueError, match="bytes came as"):
                put_zeros(arrived, size, 4)


def test_words_of_dtypes() -> None:
    for dtype, size in ((torch.float64, 4), (torch.float32, 4), (torch.bfloat16, 2)):
        assert word_bytes(torch.zeros(1, dtype=dtype)) == size
    assert word_bytes(torch.zeros(1), torch.zeros(1, dtype=torch.int8)) == 1


# -- on ranks --------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def counted(module: Any) -> list[tuple[int, int]]:
    """Sizes of long messages, and of what is sent of them, from here on."""
    sizes: list[tuple[int, int]] = []

    def recording(message: Tensor, of_word: int) -> Tensor | None:
        packed = without_zeros(message, of_word)
        sizes.append((message.numel(), (message if packed is None else packed).numel()))
        return packed

    module.without_zeros = recording
    return sizes


def rows_of(rank: int, reader: int, count: int, dtype: torch.dtype, zeros: float) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + reader)
    rows = torch.randn(count, 24, generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < zeros] = 0
    return (rows * 100).to(dtype)


def exchanges(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Slices of many sizes, some of them long; rank 1 has no extension."""
    sizes = counted(collectives)
    with force_extension(False) if rank == 1 else force_extension(extension_available()):
        for dtype in DTYPES:
            for zeros in (0.0, 0.6, 1.0):
                splits = [
                    [(10, 5000, 9001, 0)[(s + d) % 4] for d in range(world_size)]
                    for s in range(world_size)
                ]
                mine = [rows_of(rank, r, n, dtype, zeros) for r, n in enumerate(splits[rank])]
                theirs = [
                    rows_of(r, rank, splits[r][rank], dtype, zeros) for r in range(world_size)
                ]
                recv = [len(rows) for rows in theirs]
                found = comm.ragged_all_to_all(torch.cat(mine), splits[rank], recv)
                assert torch.equal(found, torch.cat(theirs))
    collectives.without_zeros = without_zeros
    return sizes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_exchanges(num_ranks: int) -> None:
    results = run_ranks(exchanges, num_ranks)
    if num_ranks == 1:
        assert results == [[]]
        return
    for rank, sizes in enumerate(results):
        assert sizes
        assert all(size >= LONG_BYTES and sent <= size for size, sent in sizes)
        is_shorter = [sent < size for size, sent in sizes]
        assert any(is_shorter) == (rank != 1 and extension_available())
        assert not all(is_shorter)


def shards(rank: int, world_size: int) -> list[tuple[int, int]]:
    """Rows of other ranks, one rank at a time and all at once, and sums that return."""
    sizes = counted(halo)
    count = 4000
    plan = ExchangePlan.build(
        [torch.arange(0 if r == rank else count - 100 * r) for r in range(world_size)], count
    )
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        own = [rows_of(r, 0, count, dtype, 0.7) for r in range(world_size)]
        for step in range(1, world_size):
            source, reader = (rank - step) % world_size, (rank + step) % world_size
            (found,) = start_fetch(plan, step, [own[rank]]).wait()
            assert torch.equal(found, own[source][: count - 100 * source])
            (back,) = start_return(plan, step, [found]).wait()
            assert torch.equal(back, own[rank][plan.send_rows(reader)])
        expected = [own[r][: count - 100 * r] for r in range(world_size) if r != rank]
        (found,) = fetch_halo([(plan, own[rank])])
        assert torch.equal(found, torch.cat(expected) if expected else own[rank][:0])
    halo.without_zeros = without_zeros
    return sizes


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_rank_at_a_time(num_ranks: int) -> None:
    for sizes in run_ranks(shards, num_ranks):
        assert len(sizes) == 3 * 2 * (num_ranks - 1)
        assert all((sent < 0.6 * size) == extension_available() for size, sent in sizes)
