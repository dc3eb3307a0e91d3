# SPDX-License-Identifier: Apache-2.0
"""SharedBlocks: memory that this process writes and other processes of its machine read.

A block is a file in memory that has no name: others open it through ``/proc``, under this process's
number and its descriptor, and it goes when the last process that has it open goes, however that
ends. A block is written again only when nothing here refers to what it held and every reader has
noted that it is done; a writer that finds none such takes a new one, without waiting. Like the
blocks of `graphshard.ops.empty`, those that wait and those in use together are never more than
what was in use at once before. See csrc/runtime/shared_blocks.h.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..._base.kernels import empty, kernels_for

_STEP = 1 << 16
_CPU = torch.device("cpu")
_LINGER_SECONDS = 5.0


class SharedPeer(NamedTuple):
    """Where a rank's blocks are found: its process, its first block, its token."""

    process: int
    descriptor: int
    token: int


@dataclass(eq=False)
class _SharedBlock:
    descriptor: int
    memory: mmap.mmap
    address: int
    size: int
    use: int = 0
    readers: list[int] = field(default_factory=list)
    # What the tensors over the present contents refer to.
    contents: weakref.ref[memoryview] | None = None

    def is_held(self) -> bool:
        return self.contents is not None and self.contents() is not None


class SharedBlocks:
    """This rank's blocks for one group, and its view of its peers' blocks."""

    def __init__(self, kernels: ModuleType, rank: int) -> None:
        self.peers: list[SharedPeer] = []  # by rank; known once the ranks have told each other
        self._kernels = kernels
        self._rank = rank
        self._process = os.getpid()
        self._token = secrets.randbits(62)
        self._header: int = kernels.shared_header
        self._blocks: list[_SharedBlock] = []  # the one that was taken first in front
        self._skips: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self._num_uses = 0
        self._peak = 0
        self._is_broken = False
        self._lock = threading.Lock()
        # By its header others know that this process is the one they mean, and whether it has left.
        self._first = self._make(0)
        kernels.begin_use(self._first.memory, self._token, 0)
        # A rank that ends without shutdown_comms() leaves what others have yet to read for a while.
        self._end = self._when_it_ends(_LINGER_SECONDS)

    def _when_it_ends(self, seconds: float) -> weakref.finalize[..., SharedBlocks]:
        args = (self._kernels, self._process, self._blocks, self._first, self.peers, seconds)
        return weakref.finalize(self, _end, *args)

    @classmethod
    def make(cls, rank: int, world_size: int) -> SharedBlocks | None:
        """None where there can be none, or where the environment says so."""
        kernels = kernels_for(_CPU)
        is_wanted = os.environ.get("GRAPHSHARD_SHARED_MEMORY", "1") != "0"
        can = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
        if kernels is None or not is_wanted or not can or world_size > kernels.shared_readers:
            return None
        try:
            return cls(kernels, rank)
        except OSError:
            return None

    @property
    def me(self) -> SharedPeer:
        """Where others find this rank's blocks."""
        return SharedPeer(self._process, self._first.descriptor, self._token)

    def can_see(self, peer: SharedPeer) -> bool:
        """Whether what a rank says of itself is right, seen from here."""
        return not _has_left(self._kernels, peer)

    # -- what this rank writes -----------------------------------------------------------------

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = _CPU
    ) -> Tensor:
        """As `graphshard.ops.empty`, but others can read it once it is published."""
        size = dtype.itemsize * math.prod(shape)
        if size == 0 or torch.device(device).type != "cpu":
            return empty(shape, dtype, device)
        with self._lock:
            block = self._take(size)
            contents = memoryview(block.memory)[self._header : self._header + size]
            block.contents = weakref.ref(contents)
        # The tensor refers to the view, and the view to the map.
        return torch.frombuffer(contents, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def publish(self, payload: Tensor, readers: Sequence[int]) -> tuple[int, int]:
        """Let ranks read a contiguous tensor of the CPU, once each; it must not change any more.

        What did not come from `empty` is copied. The block is used again when all have read it.

        Returns:
            (descriptor, use), for the readers; (-1, 0) where there is nothing to read.
        """
        self._do_later()
        if not readers or payload.numel() == 0:
            return -1, 0
        block = self._find(payload)
        if block is None:
            copied = self.empty(payload.shape, payload.dtype)
            payload = copied.copy_(payload)
            block = self._find(payload)
            assert block is not None
        with self._lock:
            self._num_uses += 1
            block.use, block.readers = self._num_uses, list(readers)
            self._kernels.begin_use(block.memory, self._token, block.use)
        return block.descriptor, block.use

    def _find(self, payload: Tensor) -> _SharedBlock | None:
        """The block that begins with this tensor, if it is not published yet, or read by all."""
        place = payload.data_ptr() - self._header
        for block in self._blocks:
            if block.address == place and block.is_held() and self._is_read(block):
                return block
        return None

    def _is_read(self, block: _SharedBlock) -> bool:
        done: bool = self._kernels.is_read(block.memory, block.use, block.readers)
        return done

    def _take(self, size: int) -> _SharedBlock:
        """The smallest free block that is large enough, else the largest, which grows.

        A block keeps its pages either way: to clear and map new ones would cost three times what
        is saved.
        """
        size = -(-size // _STEP) * _STEP
        free = [b for b in self._blocks if not b.is_held() and self._is_read(b)]
        enough = [b for b in free if b.size >= size]
        best = (
            min(enough, key=lambda b: b.size)
            if enough
            else max(free, key=lambda b: b.size, default=None)
        )
        waiting = [b for b in free if b is not best]
        used = sum(b.size for b in self._blocks) - sum(b.size for b in free)
        used += size if best is None else max(size, best.size)
        self._peak = max(self._peak, used)
        while used + sum(b.size for b in waiting) > self._peak:
            self._blocks.remove(waiting[0])
            _close([waiting.pop(0)])
        if best is None:
            best = self._make(size)
        else:
            self._blocks.remove(best)
            if best.size < size:
                os.ftruncate(best.descriptor, self._header + size)
                best.memory, best.address = self._map(best.descriptor, size)
                best.size = size
        self._blocks.append(best)
        return best

    def _make(self, size: int) -> _SharedBlock:
        descriptor = os.memfd_create("graphshard", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self._header + size)
            memory, address = self._map(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return _SharedBlock(descriptor, memory, address, size)

    def _map(self, descriptor: int, size: int) -> tuple[mmap.mmap, int]:
        # All pages at once: a trap for each costs more than to clear it.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = mmap.mmap(descriptor, self._header + size, flags)
        return memory, torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

    # -- what this rank reads ------------------------------------------------------------------

    def read(self, rank: int, place: Sequence[int], into: Tensor) -> None:
        """Copy bytes of a rank's block, and note that this rank is done with them.

        ``place`` is what `publish` returned there, and the bytes before the first to read; ``into``
        is uint8 and contiguous. If it is empty nothing is read.

        Raises:
            RuntimeError: The rank is gone, or has left.
        """
        descriptor, use, offset = place
        peer = self.peers[rank]
        error = self._kernels.read_shared(
            peer.process, descriptor, peer.token, use, self._rank, offset, into
        )
        if error:
            raise RuntimeError(
                f"rank {rank} of the group has taken back the memory that it shared "
                f"({os.strerror(error)})"
            )

    def later(self, is_ready: Callable[[], bool], skip: Callable[[], None]) -> None:
        """Call ``skip`` at some time after ``is_ready`` says so."""
        self._skips.append((is_ready, skip))

    def _do_later(self) -> None:
        for _ in range(len(self._skips)):
            is_ready, skip = self._skips.popleft()
            if is_ready():
                skip()
            else:
                self._skips.append((is_ready, skip))

    # -- the end -------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Bytes of blocks in use, of blocks that wait, and the most in use at once so far."""
        with self._lock:
            free = sum(b.size for b in self._blocks if not b.is_held() and self._is_read(b))
            return sum(b.size for b in self._blocks) - free, free, self._peak

    def leave(self, seconds: float) -> list[int]:
        """Release everything once others have read what they were sent, or after some seconds.

        Returns:
            Ranks that had time to read, and did not. Those that are gone are not waited for.
        """
        if self._end.detach() is None:
            return []
        self._end = self._when_it_ends(0.0 if self._is_broken else seconds)
        late = self._end() or []
        return [] if self._is_broken else late

    def fail(self) -> None:
        """An exchange has failed: from now on no rank is expected to read what this one wrote."""
        self._is_broken = True
        if self._end.detach() is not None:
            self._end = self._when_it_ends(0.0)

    def close_inherited(self) -> None:
        """Close the inherited descriptors in a forked child."""
        if self._end.detach() is not None:
            _close([*self._blocks, self._first])
            self._blocks.clear()


def _end(
    kernels: ModuleType,
    process: int,
    blocks: list[_SharedBlock],
    first: _SharedBlock,
    peers: list[SharedPeer],
    seconds: float,
) -> list[int]:
    """Take the memory back; returns the readers that have not read all of it."""
    if os.getpid() != process:
        return []
    # First: two ranks that leave must not wait for each other.
    kernels.mark_left(first.memory)
    deadline = time.monotonic() + seconds
    late = set()
    for block in blocks:
        for reader in block.readers:
            while not kernels.is_read(block.memory, block.use, [reader]) and not _has_left(
                kernels, peers[reader]
            ):
                if time.monotonic() >= deadline:
                    late.add(reader)
                    break
                time.sleep(0.001)
    _close([*blocks, first])
    blocks.clear()
    return sorted(late)


def _has_left(kernels: ModuleType, peer: SharedPeer) -> bool:
    left: bool = kernels.has_left(peer.process, peer.descriptor, peer.token)
    return left


def _close(blocks: Sequence[_SharedBlock]) -> None:
    for block in blocks:
        os.close(block.descriptor)
        with contextlib.suppress(BufferError):  # a tensor keeps what it is in
            block.memory.close()
