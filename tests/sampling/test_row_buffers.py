# SPDX-License-Identifier: Apache-2.0
"""RowBuffers: memory comes back when the last tensor over it goes, and not before. No ranks."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from graphshard.sampling.feature_store._row_buffers import RowBuffers

LARGE = 1 << 20


def test_memory_is_used_again_once_nobody_looks_at_it() -> None:
    buffers = RowBuffers()
    first = buffers.empty((LARGE // 4, 2), torch.float32)
    assert (first.shape, first.dtype) == ((LARGE // 4, 2), torch.float32)
    assert first.is_contiguous()
    address = first.data_ptr()
    view = first[10:20].t()
    del first
    second = buffers.empty((LARGE,), torch.uint8)
    assert second.data_ptr() != address
    view.fill_(7)
    assert bool((view == 7).all())
    del view
    gc.collect()
    third = buffers.empty((LARGE + 3,), torch.uint8)
    assert third.data_ptr() == address


def test_memory_that_autograd_keeps_is_not_used_again() -> None:
    buffers = RowBuffers()
    rows = buffers.empty((LARGE // 4,), torch.float32).fill_(3)
    weight = torch.ones((), requires_grad=True)
    loss = (rows * weight).sum()
    del rows
    other = buffers.empty((LARGE // 4,), torch.float32).fill_(5)
    loss.backward()
    assert weight.grad is not None
    assert float(weight.grad) == 3 * LARGE // 4
    assert float(other[0]) == 5


def test_small_tensors_and_sizes_that_do_not_fit() -> None:
    buffers = RowBuffers()
    assert buffers.empty((0, 5), torch.bool).shape == (0, 5)
    assert buffers.empty((3,), torch.bfloat16).dtype == torch.bfloat16
    small = buffers.empty((LARGE,), torch.uint8)
    address = small.data_ptr()
    del small
    assert buffers.empty((16 * LARGE,), torch.uint8).data_ptr() != address
    buffers.clear()
    assert buffers.empty((LARGE,), torch.uint8).numel() == LARGE


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.bfloat16])
def test_other_threads_may_let_go(dtype: torch.dtype) -> None:
    buffers = RowBuffers()
    tensors = [buffers.empty((LARGE,), dtype) for _ in range(20)]

    def let_go() -> None:
        while tensors:
            tensors.pop().zero_()

    thread = threading.Thread(target=let_go)
    thread.start()
    for _ in range(20):
        buffers.empty((LARGE,), dtype).zero_()
    thread.join()
    assert len(buffers._free) <= 8
