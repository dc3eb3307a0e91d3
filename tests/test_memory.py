# SPDX-License-Identifier: Apache-2.0
"""Blocks of memory for large results: they are used again, and never more than were in use."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from graphshard._base.kernels import LARGE_BYTES, _load
from graphshard.ops import (
    IdTable,
    draw_neighbors,
    empty,
    empty_like,
    extension_available,
    release_memory,
)

pytestmark = pytest.mark.skipif(not extension_available(), reason="blocks are of the extension")

ROWS = (1 << 20) + 3  # of 8 float32: 32 MB and a bit


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch):
    monkeypatch.delenv("GRAPHSHARD_KEEP_MEMORY", raising=False)
    release_memory()
    yield
    release_memory()


def counts():
    return dict(zip(("used", "waiting", "peak"), _load().block_counts(), strict=True))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64],
)
def test_a_tensor_like_any_other(dtype):
    found = empty((ROWS, 8), dtype)
    assert found.shape == (ROWS, 8)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert not found._is_view()
    assert not found.requires_grad
    assert found.device.type == "cpu"
    found.fill_(3)
    assert int(found[-1, -1]) == 3
    doubled = found[:4].clone().requires_grad_() if dtype.is_floating_point else None
    if doubled is not None:
        (doubled * 2).sum().backward()
    assert empty_like(found).shape == found.shape


def test_a_block_is_used_again():
    before = counts()["used"]
    first = empty((ROWS, 8), torch.float32)
    address = first.data_ptr()
    del first
    assert counts()["used"] == before
    assert counts()["waiting"] > 0
    again = empty((ROWS - 100, 8), torch.float32)
    assert again.data_ptr() == address
    assert counts()["waiting"] == 0


def test_a_batch_is_drawn_into_the_blocks_of_the_one_before():
    num_rows, degree = 1 << 17, 8
    indptr = torch.arange(0, num_rows * degree + 1, degree)
    indices = torch.arange(num_rows * degree) % num_rows
    rows, table = torch.arange(num_rows), IdTable(num_rows)

    def draw(key):
        counts, positions, picked = draw_neighbors(indptr, rows, 5, key, rows, indices=indices)
        return counts, positions, picked, *table.renumber(rows[:0], picked)

    first = draw(3)
    assert first[1].nbytes >= LARGE_BYTES
    expected = [column.clone() for column in first]
    used = counts()["used"]
    assert used >= 3 * first[1].nbytes
    del first
    peak = counts()["peak"]
    again = draw(3)
    assert counts() == {"used": used, "waiting": peak - used, "peak": peak}
    assert all(map(torch.equal, again, expected))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="moving pages is Linux's")
def test_blocks_are_cut_and_joined():
    first, second = (empty((n << 20, 2), torch.float32).fill_(n) for n in (2, 3))
    del first, second
    before = counts()
    assert before["waiting"] == 40 << 20
    joined = empty((10 << 20,), torch.float32)
    # What was there is there still: these are the pages of both, not new ones.
    assert joined[[0, -1]].tolist() == [2, 3]
    assert counts() == {"used": 40 << 20, "waiting": 0, "peak": before["peak"]}
    joined.fill_(4)
    del joined
    pieces = [empty((5 << 19,), torch.float32) for _ in range(4)]
    for number, piece in enumerate(pieces):
        assert float(piece[0]) == 4
        piece.fill_(number)
    assert [float(piece.mean()) for piece in pieces] == [0, 1, 2, 3]
    assert counts()["peak"] == before["peak"]


def test_cut_and_joined_blocks_hold_what_is_written():
    """Tensors of random sizes come and go; each has its own memory, whatever it is made of."""
    generator = torch.Generator().manual_seed(1)
    live: list[tuple[int, torch.Tensor]] = []
    for number in range(150):
        if len(live) > 5:
            value, tensor = live.pop(int(torch.randint(len(live), (), generator=generator)))
            assert bool((tensor == value).all())
        rows = int(torch.randint(1 << 18, 1 << 20, (), generator=generator))
        live.append((number, empty((rows, 8), torch.float32).fill_(number)))
    for value, tensor in live:
        assert bool((tensor == value).all())


def test_a_view_keeps_the_block():
    whole = empty((ROWS, 8), torch.float32).fill_(1)
    view = whole[5:]
    address = whole.data_ptr()
    del whole
    assert empty((ROWS, 8), torch.float32).data_ptr() != address
    assert float(view[0, 0]) == 1


def test_what_waits_and_what_is_used_never_exceed_the_peak_of_use():
    live = []
    generator = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(200):
        if live and torch.rand((), generator=generator) < 0.5:
            live.pop(int(torch.randint(len(live), (), generator=generator)))
        else:
            rows = int(torch.randint(1 << 18, 1 << 19, (), generator=generator))
            live.append(empty((rows, 8), torch.float32))
        now = counts()
        most = max(most, now["used"])
        assert now["used"] + now["waiting"] <= most == now["peak"]
    del live
    release_memory()
    assert counts()["waiting"] == 0


def test_small_results_and_unknown_types_are_plain(monkeypatch):
    before = counts()
    empty((8, 8), torch.float32)
    empty((1 << 25,), torch.bool)
    empty((0, 8), torch.float32)
    assert counts() == before


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_KEEP_MEMORY", "0")
    before = counts()
    kept = empty((ROWS, 8), torch.float32)
    assert counts() == before
    assert kept.shape == (ROWS, 8)


def test_threads_may_end_tensors_of_others():
    tensors = [empty((1 << 18, 8), torch.float32) for _ in range(8)]
    threads = [threading.Thread(target=tensors.pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts()["used"] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on():
    kept = empty((ROWS, 8), torch.float32).fill_(2)
    child = os.fork()
    if child == 0:
        other = empty((ROWS, 8), torch.float32).fill_(1)
        os._exit(0 if float(other[0, 0]) == 1 and float(kept[0, 0]) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
