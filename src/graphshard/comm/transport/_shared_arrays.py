# SPDX-License-Identifier: Apache-2.0
"""SharedArrays: arrays that the ranks of a host map together, each written by many ranks.

The first rank of each host makes a file, the others map it, and before it takes any memory the file
has lost its name: memory goes when the last process that maps it goes, however that ends.

An array consists of consecutive slices, one per rank, in rank order. A rank writes its own slice.
Slices of ranks on other hosts, where they are wanted, come in messages of bounded size, and the
first rank of each host writes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..._base.files import MappedFile, writing
from ..collectives import all_to_all, gather_texts, share_error, wait_for_all
from ..group import GroupState
from ._exchange import as_bytes, row_bytes
from ._hosts import Hosts, directory_with_room, named_file

_ALIGNMENT = 64
_MESSAGE_BYTES = 1 << 25


@dataclass(frozen=True)
class SharedArray:
    """An array that is to be shared."""

    own: Tensor  # this rank's slice, [starts[rank + 1] - starts[rank], *]
    starts: Sequence[int]  # first row of each rank's slice, and the number of rows

    @property
    def num_bytes(self) -> int:
        return self.starts[-1] * row_bytes(self.own)

    def slice_bytes(self, rank: int) -> tuple[int, int]:
        """(start, stop) of a rank's slice, in bytes."""
        size = row_bytes(self.own)
        return self.starts[rank] * size, self.starts[rank + 1] * size


def share_arrays(
    state: GroupState,
    hosts: Hosts,
    arrays: Sequence[SharedArray],
    *,
    whole: bool,
    directory: str | os.PathLike[str] | None = None,
) -> list[Tensor]:
    """Put arrays into memory that the ranks of a host share; every rank must call.

    Args:
        state: The ranks.
        hosts: Where they are.
        arrays: The same on all ranks but for ``own``.
        whole: Whether every host gets every slice; else those of its own ranks, and the rest of
            the array must not be read: it takes address space, but no memory.
        directory: As for `Hosts.find`.

    Returns:
        The arrays, ``[starts[-1], *]`` each. Not to be written to.

    Raises:
        OSError: On all ranks, if some host has no room.
    """
    if state.world_size == 1:
        return [array.own for array in arrays]
    *begins, num_bytes = accumulate((_aligned(array.num_bytes) for array in arrays), initial=0)
    present = range(state.world_size) if whole else hosts.here
    stretches = [
        (begin + start, stop - start)
        for begin, array in zip(begins, arrays, strict=True)
        for start, stop in map(array.slice_bytes, present)
    ]
    mapped = _map(state, hosts, num_bytes, stretches, directory)
    memory = torch.frombuffer(mapped.buffer, dtype=torch.uint8)
    targets = [
        memory[begin : begin + array.num_bytes] for begin, array in zip(begins, arrays, strict=True)
    ]
    written = [state.rank]
    for target, array in zip(targets, arrays, strict=True):
        start, stop = array.slice_bytes(state.rank)
        target[start:stop].copy_(as_bytes(array.own.cpu()))
    if whole and len(hosts.leaders) > 1:
        _spread(state, hosts, arrays, targets)
        if hosts.is_leader:
            written += [rank for rank in range(state.world_size) if rank not in hosts.here]
    for begin, array in zip(begins, arrays, strict=True):
        for rank in written:
            start, stop = array.slice_bytes(rank)
            mapped.use_large_pages(stop - start, begin + start)
    wait_for_all(state, "shared arrays")
    return [
        target.view(array.own.dtype).view(array.starts[-1], *array.own.shape[1:])
        for target, array in zip(targets, arrays, strict=True)
    ]


def _map(
    state: GroupState,
    hosts: Hosts,
    num_bytes: int,
    stretches: Sequence[tuple[int, int]],
    directory: str | os.PathLike[str] | None,
) -> MappedFile:
    """Bytes that all ranks of this host map."""
    with contextlib.ExitStack() as stack:
        path, descriptor = None, -1
        with _shared(state):
            if hosts.is_leader:
                folder = directory_with_room(directory, sum(length for _, length in stretches))
                path, descriptor = stack.enter_context(named_file(folder))
                with writing(path):
                    os.ftruncate(descriptor, max(num_bytes, 1))  # takes no memory
        paths = gather_texts(state, "" if path is None else str(path))
        with _shared(state):
            memory = _open(Path(paths[hosts.leader[state.rank]]), num_bytes)
        with _shared(state):
            if path is not None:
                path.unlink()
                with writing(path):
                    _allocate(descriptor, stretches)
    return memory


@contextlib.contextmanager
def _shared(state: GroupState) -> Iterator[None]:
    """What one rank's block raises, all ranks raise."""
    error = None
    try:
        yield
    except (OSError, ValueError) as caught:
        error = caught
    share_error(error, state.group)


def _allocate(descriptor: int, stretches: Sequence[tuple[int, int]]) -> None:
    """Take the memory of stretches of a file now: a full disk is an error, not a signal."""
    if hasattr(os, "posix_fallocate"):
        for start, length in stretches:
            if length:
                os.posix_fallocate(descriptor, start, length)


def _open(path: Path, num_bytes: int) -> MappedFile:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return MappedFile(descriptor, max(num_bytes, 1))
    finally:
        os.close(descriptor)


def _spread(
    state: GroupState,
    hosts: Hosts,
    arrays: Sequence[SharedArray],
    targets: Sequence[Tensor],
) -> None:
    """Send every slice to the first rank of each other host, which writes it."""
    ranks = range(state.world_size)
    far = [leader for leader in hosts.leaders if leader != hosts.leader[state.rank]]
    comes = [hosts.is_leader and hosts.leader[r] != state.rank for r in ranks]
    limit = max(1, _MESSAGE_BYTES // state.world_size)
    for array, target in zip(arrays, targets, strict=True):
        slices = [target[slice(*array.slice_bytes(r))] for r in ranks]
        for begin in range(0, max(map(len, slices)), limit):
            pieces = [part[begin : begin + limit] for part in slices]
            own = pieces[state.rank]
            send = [len(own) if r in far else 0 for r in ranks]
            recv = [len(pieces[r]) if comes[r] else 0 for r in ranks]
            arrived = all_to_all(state, own.repeat(len(far)), send, recv, "shared arrays")
            for piece, part in zip(pieces, arrived.split(recv), strict=True):
                piece[: len(part)].copy_(part)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
