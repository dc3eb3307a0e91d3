# SPDX-License-Identifier: Apache-2.0
"""Files of others, opened with care; own files, written whole, or mapped by several processes.

And folders that go with their process. Standard library alone, so that a process that only watches
others need not load torch.

[Note: files of others]
A named pipe in place of a file blocks the process that opens it, a device may never end, and a
folder gives an error that names no cure. Whatever is read from a partition, a checkpoint or a data
set is opened here, or checked here before a library opens it.

[Note: folders that go with their process]
Its owner holds a lock on it, which the kernel releases when the owner has ended, and processes that
inherit the descriptor have, too. A process that makes a folder first removes those without a lock.

[Note: large pages]
    Edges are drawn, and rows read, at random places of tables of gigabytes. With pages of 4 KiB
    nearly each place costs a walk through the page tables besides its own way from memory; with
    pages of 2 MiB those tables fit the caches. Private memory gets such pages where it is asked for
    before it is written (``MADV_HUGEPAGE``). For shared memory most systems leave that off, but
    from Linux 6.1 on what is there already can be moved into large pages (``MADV_COLLAPSE``), if
    addresses and offsets agree modulo their size. So a place is chosen here, which Python's
    ``mmap`` cannot do. Draws and reads then take 0.7 to 0.8 of their time, and the move takes one
    to three seconds for each GiB, once: benchmarks/large_pages.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import math
import mmap
import os
import secrets
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

PathLike = str | os.PathLike[str]


class NotRegularFileError(OSError):
    """What a path names is a pipe, a socket or a device, and not a regular file."""


def check_regular(path: PathLike) -> os.stat_result:
    """Check that a path names a regular file, directly or through a link, without opening it.

    Returns:
        What the system says of the file; ``st_size`` is its size in bytes.

    Raises:
        FileNotFoundError: There is nothing, or a link that leads to nothing.
        IsADirectoryError: It is a folder.
        NotRegularFileError: It is a pipe, a socket or a device.
        OSError: The system refuses to say, such as for a name that is too long.
    """
    try:
        status = os.stat(path)
    except ValueError as error:  # a zero byte in the name
        raise FileNotFoundError(
            errno.ENOENT, f"no file can have this name ({error})", path
        ) from None
    _check(status, path)
    return status


def open_regular(path: PathLike, mode: str = "rb") -> IO[Any]:
    """Open a regular file for reading; anything else is an error at once, never a wait.

    Args:
        mode: "rb", or "r" for text in UTF-8.

    Raises:
        ValueError: The mode is neither.
        FileNotFoundError: There is no such file.
        IsADirectoryError: It is a folder.
        NotRegularFileError: It is a pipe, a socket or a device.
        OSError: The system refuses to open it.
    """
    if mode not in ("rb", "r"):
        raise ValueError(f"mode must be 'rb' or 'r' (got {mode!r}); files are only read here")
    check_regular(path)
    # What was a file a moment ago may be a pipe now: without O_NONBLOCK opening that would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, mode, encoding="utf-8" if mode == "r" else None)
    except BaseException:
        os.close(descriptor)
        raise


def read_text_regular(path: PathLike) -> str:
    """The text of a regular file, opened by `open_regular`; a UnicodeDecodeError if not UTF-8."""
    with open_regular(path, "r") as file:
        return str(file.read())


def read_json_regular(path: PathLike) -> Any:
    """What a JSON file in UTF-8 holds; errors are those of `open_regular` and `parse_json`."""
    return parse_json(read_text_regular(path))


def parse_json(text: str | bytes) -> Any:
    """What a JSON text in UTF-8 says, if it says one thing only and in numbers that exist.

    Raises:
        ValueError: It is not JSON, or names a key twice, nests too deeply, or has a number that is
            none or has thousands of digits.
    """
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_without_repetition,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return content


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:80]} is out of range")
    return value


def _check(status: os.stat_result, path: PathLike) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(Path(path)))
    kinds = ((stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for is_kind, name in kinds if is_kind(status.st_mode)), "a device")
    raise NotRegularFileError(errno.EINVAL, f"{kind}, not a regular file", str(Path(path)))


_CURES = {
    errno.ENOSPC: "make room on that disk, or write to another",
    errno.EDQUOT: "make room within your quota, or write to another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write to another file system",
}
_CURE = "check that disk, or write to another"


@contextlib.contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Write a file in here: an `OSError` that names no file becomes one that names ``path``."""
    check_path(path)
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # of opening or renaming: it says which file
            raise
        reason = error.strerror or str(error)
        cure = _CURES.get(error.errno or 0, _CURE)
        text = f"{os.fspath(path)} cannot be written ({reason}); {cure}"
        raise (OSError(text) if error.errno is None else OSError(error.errno, text)) from error


def check_path(path: PathLike) -> None:
    """Raise ValueError if the file system cannot hold a path."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a path must be text that the file system can hold (got {os.fspath(path)!a:.200}, "
            f"whose character {error.start} is half of one); choose another"
        ) from None


def check_text(name: str, what: str) -> str:
    """Return ``name`` if UTF-8 can hold it, in which files and messages are; else a ValueError.

    A text that was read from bytes of another encoding, such as a file name in Latin-1, has halves
    of characters in it.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} must be text that UTF-8 can hold (got {name!a:.80}, whose character "
            f"{error.start} is half of one); rename it"
        ) from None
    return name


def write_json(path: Path, content: Mapping[str, Any], *, final: Path | None = None) -> None:
    """Write a new file, sync it to disk; errors name ``final``, where it will be, if given."""
    with writing(final or path), open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Wait until a file is on disk."""
    with writing(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_PREFIX = "graphshard-folder-"
_SHARED_MEMORY = "/dev/shm"


class TemporaryFolder:
    """A new folder where temporary files go; also a context manager, which gives the path.

    The lock is on the folder itself; what locks folders too, like a partition, needs one inside.

    Attributes:
        path: The folder.
        descriptor: Holds the lock; a process that inherits it keeps the folder.
    """

    def __init__(self, parent: PathLike | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else parent
        remove_abandoned(parent)
        self.descriptor = -1
        while self.descriptor < 0:
            self.path = Path(parent, _PREFIX + secrets.token_hex(8))
            # First, because Ctrl-C may come at any time.
            self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())
            self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = _held(self.path, is_new=True)
        self._close = weakref.finalize(self, _close, self.descriptor, os.getpid())
        self._close.atexit = False

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove it now."""
        self._finalizer()
        self._close()


def shared_memory_folder() -> str | None:
    """The folder of files that are memory; None if the system has none."""
    return _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None


def remove_abandoned(*parents: PathLike) -> None:
    """Remove folders of processes that were killed; by default temporary and shared-memory ones."""
    memory = shared_memory_folder()
    for parent in parents or {tempfile.gettempdir(), memory or tempfile.gettempdir()}:
        for path in Path(parent).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                descriptor = _held(path)
                if descriptor >= 0:
                    _remove(path, os.getpid())
                    os.close(descriptor)


def _held(path: Path, is_new: bool = False) -> int:
    """A descriptor that holds the lock on a folder; -1 if another process has it, or had it.

    Args:
        is_new: Whether it is this process's own; then a file system without locks does no harm.

    Raises:
        OSError: The folder is gone, not a folder, not ours, or without locks.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return -1
        except OSError:
            if not is_new:
                raise
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        os.stat(path)  # it may have been removed between the two calls
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path, process: int) -> None:
    """Remove a folder; not from a child that was forked from its owner."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def _close(descriptor: int, process: int) -> None:
    """Release the lock; a child that was forked keeps it as long as it lives."""
    if os.getpid() == process:
        os.close(descriptor)


_LARGE_PAGE = 1 << 21
_AT_ONCE = 1 << 28  # bytes; signals are handled in between
_PROT_NONE, _MAP_FIXED = 0, 0x10
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25


class MappedFile:
    """Bytes of a file, from its beginning, that this process reads and writes in place.

    Args:
        descriptor: The open file; it may be closed afterwards.
        num_bytes: 1 or more.

    Attributes:
        buffer: The bytes, for `torch.frombuffer`; they stay mapped as long as it is there.

    Raises:
        OSError: The system refuses.
        ValueError: The file is shorter: bytes behind its end would end the process.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        length = os.fstat(descriptor).st_size
        if length < num_bytes:
            raise ValueError(f"a file of {length} bytes cannot be mapped as one of {num_bytes}")
        self.buffer: Any
        self._num_bytes = num_bytes
        self._address = 0
        libc = _libc()
        if libc is None:
            self.buffer = mmap.mmap(descriptor, num_bytes)
            return
        # A place is reserved, and the file is mapped at its first address that is a multiple.
        reserved = num_bytes + _LARGE_PAGE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start = _mapped(libc, None, reserved, _PROT_NONE, private, -1)
        address = -(-start // _LARGE_PAGE) * _LARGE_PAGE
        try:
            _mapped(
                libc,
                address,
                num_bytes,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED,
                descriptor,
            )
        except OSError:
            libc.munmap(start, reserved)
            raise
        self._address = address
        self.buffer = (ctypes.c_char * num_bytes).from_address(address)
        unmap = weakref.finalize(self.buffer, libc.munmap, start, reserved)
        unmap.atexit = False  # threads may use it to the end

    def populate(self, num_bytes: int, writes: bool = False) -> None:
        """Have the system map the first pages now, many at a time; to write to, if ``writes``.

        Else each is mapped, and one of a new file cleared, as it is first touched, which takes
        several times as long. Linux has it from 5.14 on; elsewhere nothing happens.
        """
        advice = _MADV_POPULATE_WRITE if writes else _MADV_POPULATE_READ
        self._advise(advice, 0, min(num_bytes, self._num_bytes))

    def use_large_pages(self, num_bytes: int, start: int = 0) -> bool:
        """Move what the file has in memory into large pages. See [Note: large pages].

        Other processes see the same bytes at all times, and find large pages the next time they
        touch them.

        Args:
            start: The first of them. Large pages that they do not fill stay as they are.

        Returns:
            Whether all of it was moved; where there is no room, or no such pages, what is left is
            as it was.
        """
        stop = min(start + num_bytes, self._num_bytes) & -_LARGE_PAGE
        return self._advise(_MADV_COLLAPSE, -(-start // _LARGE_PAGE) * _LARGE_PAGE, stop)

    def _advise(self, advice: int, start: int, stop: int) -> bool:
        libc = _libc()
        return libc is not None and all(
            libc.madvise(self._address + begin, min(_AT_ONCE, stop - begin), advice) == 0
            for begin in range(start, stop, _AT_ONCE)
        )


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library, where it is known how to call it: on Linux of 64 bits."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
        libc.mmap.restype = pointer
        libc.munmap.argtypes = [pointer, size]
        libc.madvise.argtypes = [pointer, size, number]
        return libc
    return None


def _mapped(
    libc: ctypes.CDLL, address: int | None, size: int, protection: int, flags: int, descriptor: int
) -> int:
    address_of_map: int = libc.mmap(address, size, protection, flags, descriptor, 0) or 0
    if address_of_map in (0, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address_of_map
