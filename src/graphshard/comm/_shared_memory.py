# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks of one machine share: blocks for messages, and arrays that all write.

[Note: blocks]
    A block is a file in memory that has no name: others open it through ``/proc``, under this
    process's number and its descriptor, and it goes when the last process that has it open goes,
    however that ends. A block is written again only when nothing here refers to what it held and
    every reader has noted that it is done; a writer that finds none such takes a new one, without
    waiting. Like the blocks of `graphshard.ops.empty`, those that wait and those in use together
    are never more than what was in use at once before. See csrc/runtime/shared_blocks.h.

[Note: who can share]
    Names of hosts say little where ranks run in containers. So each rank writes a file that only
    it can have named, and the others look whether they see it, on the same running kernel.

[Note: files with a name]
    What ranks share is in files, since others may see those but not the process (containers with
    one /dev/shm and process numbers of their own), and users may want them elsewhere. A file has a
    name for a moment only, in which it is empty. Who makes it locks it for as long: the kernel ends
    the lock with the process, so a file without one was left behind by a process that was killed in
    that moment, and the next that looks for its hosts removes it.

[Note: arrays]
    The first rank of each host makes a file, the others map it, and before it takes any memory the
    file has lost its name: memory goes when the last process that maps it goes, however that ends.

    An array consists of consecutive slices, one per rank, in rank order. A rank writes its own
    slice. Slices of ranks on other hosts, where they are wanted, come in messages of bounded size,
    and the first rank of each host writes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import operator
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .._base.files import MappedFile, writing
from .._base.kernels import empty, kernels_for
from .address import machine_name
from .collectives import (
    all_gather,
    all_to_all,
    as_bytes,
    gather_texts,
    row_bytes,
    shared_errors,
    wait_for_all,
)
from .group import GroupState

_STEP = 1 << 16
_CPU = torch.device("cpu")
_LINGER_SECONDS = 5.0


# -- blocks ----------------------------------------------------------------------------------------


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
        start = payload.data_ptr() - self._header
        for block in self._blocks:
            if block.address == start and block.is_held() and self._is_read(block):
                return block
        return None

    def _is_read(self, block: _SharedBlock) -> bool:
        return bool(self._kernels.is_read(block.memory, block.use, block.readers))

    def _take(self, size: int) -> _SharedBlock:
        """The smallest free block that is large enough, else the largest, which grows.

        A block keeps its pages either way: to clear and map new ones would cost three times what
        is saved.
        """
        size = -(-size // _STEP) * _STEP
        free = [b for b in self._blocks if not b.is_held() and self._is_read(b)]
        by_size = operator.attrgetter("size")
        best = min((b for b in free if b.size >= size), key=by_size, default=None)
        best = best or max(free, key=by_size, default=None)
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

    def read(self, rank: int, location: Sequence[int], into: Tensor) -> None:
        """Copy bytes of a rank's block, and note that this rank is done with them.

        ``location`` is what `publish` returned there, and the bytes before the first to read;
        ``into`` is uint8 and contiguous. If it is empty nothing is read.

        Raises:
            RuntimeError: The rank is gone, or has left.
        """
        descriptor, use, offset = location
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
    return bool(kernels.has_left(*peer))


def _close(blocks: Sequence[_SharedBlock]) -> None:
    for block in blocks:
        os.close(block.descriptor)
        with contextlib.suppress(BufferError):  # a tensor keeps what it is in
            block.memory.close()


# -- who can share, and files with a name ----------------------------------------------------------

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "graphshard-"
_MAX_PATH_BYTES = 512
_ATTEMPTS = 100


@dataclass(frozen=True)
class Hosts:
    """The ranks of a group, by host."""

    rank: int  # this process
    leader: tuple[int, ...]  # for each rank the smallest rank on its host

    @property
    def leaders(self) -> list[int]:
        """One rank of each host, ascending."""
        return sorted(set(self.leader))

    @property
    def here(self) -> list[int]:
        """Ranks on this host, ascending; this one among them."""
        return [r for r, leader in enumerate(self.leader) if leader == self.leader[self.rank]]

    @property
    def is_leader(self) -> bool:
        return self.leader[self.rank] == self.rank

    @classmethod
    def find(cls, state: GroupState, directory: str | os.PathLike[str] | None = None) -> Hosts:
        """The hosts of a group; collective.

        Files can be shared in ``directory``, by default in shared memory, else where temporary
        files go. Ranks that do not see the same one count as being apart.
        """
        if state.world_size == 1:
            return cls(0, (0,))
        for folder in directories(directory):
            remove_abandoned(folder)
        folder = directories(directory)[0]
        name, written = "nothing", False
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                name = stack.enter_context(named_file(folder))[0].name
                written = True
            texts = gather_texts(state, f"{machine_name()} {name}")
            kernels, names = zip(*(text.split() for text in texts), strict=True)
            seen = [
                kernel == machine_name()
                and written
                and os.access(folder / other, os.R_OK | os.W_OK)
                for kernel, other in zip(kernels, names, strict=True)
            ]
            sees = torch.stack(all_gather(state, torch.tensor(seen, dtype=torch.uint8)))
        mutual = (sees & sees.t()).bool()
        mutual.fill_diagonal_(True)
        nearest = mutual.to(torch.int64).argmax(1).tolist()
        # Where sight is not transitive, a rank whose leader follows another one stays alone.
        leader = tuple(n if nearest[n] == n else r for r, n in enumerate(nearest))
        return cls(state.rank, leader)


def directories(directory: str | os.PathLike[str] | None) -> list[Path]:
    """Where shared files may be, the best place first."""
    if directory is not None:
        return [Path(directory)]
    folders = [_SHARED_MEMORY, Path(tempfile.gettempdir())]
    return [f for f in folders if f.is_dir() and os.access(f, os.W_OK)] or folders[1:]


def directory_with_room(directory: str | os.PathLike[str] | None, num_bytes: int) -> Path:
    """The best place that has room; OSError if none has."""
    folders = directories(directory)
    for folder in folders:
        if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
            raise OSError(f"the path of a shared file must be shorter (got {folder})")
        if shutil.disk_usage(folder).free > num_bytes:
            return folder
    rooms = ", ".join(f"{folder}: {shutil.disk_usage(folder).free}" for folder in folders)
    raise OSError(
        f"sharing memory on this host needs {num_bytes} bytes (free: {rooms}); make room, or use "
        "transport='collective' and map_features=False"
    )


@contextlib.contextmanager
def named_file(folder: Path) -> Iterator[tuple[Path, int]]:
    """A new and empty file, and a descriptor of it; it loses its name at the end at the latest.

    See [Note: files with a name]. OSError if nothing can be written there.
    """
    for _ in range(_ATTEMPTS):
        path = folder / (_PREFIX + secrets.token_hex(16))
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process was quicker, and is about to remove it
                continue
            except OSError:  # there are no locks here, so no process gets one and removes it
                pass
            if os.fstat(descriptor).st_nlink:
                yield path, descriptor
                return
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
    raise OSError(f"what this process writes to {folder} is removed at once")


def remove_abandoned(folder: Path) -> None:
    """Remove this user's files of which no living process holds the lock."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if re.fullmatch(_PREFIX + "[0-9a-f]{32}", name):
                with contextlib.suppress(OSError):
                    _remove_abandoned_file(folder / name)


def _remove_abandoned_file(path: Path) -> None:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)


# -- arrays ----------------------------------------------------------------------------------------

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
        arrays: The same on all ranks but for ``own``.
        whole: Whether every host gets every slice; else those of its own ranks, and the rest of
            the array must not be read: it takes address space, but no memory.

    Returns:
        The arrays, ``[starts[-1], *]`` each. Not to be written to.

    Raises:
        OSError: On all ranks, if some host has no room.
    """
    if state.world_size == 1:
        return [array.own for array in arrays]
    sizes = (-(-array.num_bytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    *begins, num_bytes = accumulate(sizes, initial=0)

    def stretches(ranks: Sequence[int]) -> list[tuple[int, int]]:
        """First byte and length of the slices of some ranks."""
        return [
            (begin + start, stop - start)
            for begin, array in zip(begins, arrays, strict=True)
            for start, stop in map(array.slice_bytes, ranks)
        ]

    present = range(state.world_size) if whole else hosts.here
    mapped = _map(state, hosts, num_bytes, stretches(present), directory)
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
    for start, length in stretches(written):
        mapped.use_large_pages(length, start)
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
        with shared_errors(state.group):
            if hosts.is_leader:
                folder = directory_with_room(directory, sum(length for _, length in stretches))
                path, descriptor = stack.enter_context(named_file(folder))
                with writing(path):
                    os.ftruncate(descriptor, max(num_bytes, 1))  # takes no memory
        paths = gather_texts(state, "" if path is None else str(path))
        with shared_errors(state.group):
            memory = _open(Path(paths[hosts.leader[state.rank]]), num_bytes)
        with shared_errors(state.group):
            if path is not None:
                path.unlink()
                with writing(path):
                    _allocate(descriptor, stretches)
    return memory


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
    state: GroupState, hosts: Hosts, arrays: Sequence[SharedArray], targets: Sequence[Tensor]
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
