# SPDX-License-Identifier: Apache-2.0
"""MappedFile: the bytes of a file, in large pages where the system can make them."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphshard._base import files as base_files
from graphshard._base.files import MappedFile
from large_pages import LARGE_PAGE, SHARED, bytes_in_large_pages, can_move_shared_memory

NUM_BYTES = 8 * LARGE_PAGE + 5

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux")


@pytest.fixture
def descriptor() -> Iterator[int]:
    with tempfile.TemporaryFile(dir=SHARED if SHARED.is_dir() else None) as file:
        file.truncate(NUM_BYTES)
        yield file.fileno()


def tensor(memory: MappedFile) -> torch.Tensor:
    return torch.frombuffer(memory.buffer, dtype=torch.uint8)


@pytest.mark.parametrize("has_libc", [True, False])
def test_maps_are_the_file(
    descriptor: int, has_libc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_libc:
        monkeypatch.setattr(base_files, "_libc", lambda: None)
    one, other = (MappedFile(os.dup(descriptor), NUM_BYTES) for _ in range(2))
    values = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8)
    tensor(one).copy_(values)
    assert torch.equal(tensor(other), values)
    assert os.pread(descriptor, NUM_BYTES, 0) == values.numpy().tobytes()
    other.populate(NUM_BYTES)
    other.use_large_pages(NUM_BYTES)
    assert torch.equal(tensor(one), values)
    tensor(other)[-1] = values[-1] ^ 1  # both see it, after pages were moved
    assert tensor(one)[-1] == values[-1] ^ 1


@on_linux
def test_a_map_lasts_as_long_as_a_tensor_over_it(descriptor: int) -> None:
    def num_maps() -> int:
        node = os.fstat(descriptor).st_ino
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(int(line.split()[4]) == node for line in lines)

    memory = MappedFile(descriptor, NUM_BYTES)
    rows = tensor(memory)[LARGE_PAGE:]
    del memory
    gc.collect()
    rows[:] = 7
    assert num_maps() == 1
    assert int(rows.sum(dtype=torch.int64)) == 7 * (NUM_BYTES - LARGE_PAGE)
    del rows
    gc.collect()
    assert num_maps() == 0


@on_linux
def test_large_pages(descriptor: int) -> None:
    if not can_move_shared_memory():
        pytest.skip("this system makes no large pages of shared memory")
    memory, other = MappedFile(descriptor, NUM_BYTES), MappedFile(descriptor, NUM_BYTES)
    rows = tensor(memory)
    assert rows.data_ptr() % LARGE_PAGE == 0
    rows[:] = torch.arange(NUM_BYTES) % 251
    assert bytes_in_large_pages(rows.data_ptr()) == 0
    assert memory.use_large_pages(4 * LARGE_PAGE, 2 * LARGE_PAGE - 1)  # three that are filled
    assert bytes_in_large_pages(rows.data_ptr()) == 3 * LARGE_PAGE
    assert memory.use_large_pages(NUM_BYTES)
    assert bytes_in_large_pages(rows.data_ptr()) == 8 * LARGE_PAGE
    assert torch.equal(tensor(other), (torch.arange(NUM_BYTES) % 251).to(torch.uint8))
    other.populate(NUM_BYTES)
    assert bytes_in_large_pages(tensor(other).data_ptr()) == 8 * LARGE_PAGE


@on_linux
def test_memory_that_was_only_taken_is_zero_in_large_pages(descriptor: int) -> None:
    os.posix_fallocate(descriptor, 0, NUM_BYTES)
    memory = MappedFile(descriptor, NUM_BYTES)
    memory.use_large_pages(NUM_BYTES)
    assert not tensor(memory).any()


@on_linux
@pytest.mark.parametrize("writes", [True, False])
def test_populated_pages_cost_no_faults(descriptor: int, writes: bool) -> None:
    os.posix_fallocate(descriptor, 0, NUM_BYTES)
    memory = MappedFile(descriptor, NUM_BYTES)
    memory.populate(NUM_BYTES, writes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor(memory)[:: mmap.PAGESIZE].any()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < NUM_BYTES // mmap.PAGESIZE // 8


@on_linux
def test_a_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps").read_text().count("\n")
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    with path.open("rb") as read_only:
        with pytest.raises(PermissionError):
            MappedFile(read_only.fileno(), 4096)
        with pytest.raises(ValueError, match="of 4096 bytes cannot be mapped as one of 4097"):
            MappedFile(read_only.fileno(), 4097)
    # What was reserved for it is gone.
    assert abs(Path("/proc/self/maps").read_text().count("\n") - maps) < 5
