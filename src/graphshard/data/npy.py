# SPDX-License-Identifier: Apache-2.0
"""NumPy's files, ``.npy`` and ``.npz``, read with nothing believed that can be checked first.

``numpy.load`` evaluates the header as Python's syntax and allocates what it says before it looks at
the file. Here the header must have the form that NumPy writes, the dtype must be one of plain
numbers, and the size that follows from both must be the file's own; else it is a ValueError that
names the file. No pickle.

An archive may grow: of each array that is read, to what its directory says, which is at most 1032
times the bytes in the file, as much as deflate can. Memory is filled only as the bytes arrive.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from .._base.files import open_regular

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
"""Major version of the format to the width of the header's length."""
_MAX_HEADER = 10_000
"""As in NumPy; a header of plain numbers has some hundred bytes."""
_MAX_DIMS = 32
_DEFLATE_RATIO = 1032

_ITEM = (
    r"'(?:descr'\s*:\s*'(?P<descr{0}>[^']*)'"
    r"|fortran_order'\s*:\s*(?P<order{0}>True|False)"
    r"|shape'\s*:\s*\((?P<shape{0}>[0-9,L\s]*)\))"
)
_HEADER = re.compile(
    r"\{\s*" + r"\s*,\s*".join(_ITEM.format(i) for i in range(3)) + r"\s*,?\s*\}\s*",
    re.ASCII,
)
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|12|16)|c(?:8|16|24|32))")
_SHAPE = re.compile(r"\s*(?:[0-9]{1,18}L?\s*,\s*)*(?:[0-9]{1,18}L?\s*)?", re.ASCII)


def read_npy(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, of bool, integers, real or complex numbers."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            return _read_array(file, size)
    except (OSError, ValueError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None


def read_npz(path: Path, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Arrays of a ``.npz`` file.

    Args:
        path: The file.
        wanted: Whether to read the array of a name.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            size = path.stat().st_size
            arrays = {}
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if wanted(name):
                    arrays[name] = _read_member(archive, info, size)
            return arrays
    except Exception as error:  # zipfile leaks whatever its parts raise on damaged bytes
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise _unreadable(path, reason) from None


def _unreadable(path: Path, reason: str) -> ValueError:
    if path.suffix == ".npz":
        what, cure = "an archive of plain arrays", "write it with numpy.savez from numeric arrays"
    else:
        what, cure = "a plain array", "write it with numpy.save from a numeric array"
    return ValueError(f"{path} cannot be read as {what} ({reason}); {cure}")


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file_size: int) -> np.ndarray:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed in a way that NumPy does not write")
    most = min(info.compress_size, file_size)
    most *= 1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE_RATIO
    if info.file_size > most:
        raise ValueError(
            f"{info.filename} is said to have {info.file_size} bytes, more than "
            f"{info.compress_size} compressed ones can hold"
        )
    with archive.open(info) as member:
        array = _read_array(member, info.file_size)
        if member.read(1):  # its end has been seen now, and with it its checksum
            raise ValueError(f"{info.filename} goes on behind its array")
    return array


def _read_array(file: IO[bytes], size: int) -> np.ndarray:
    """Read one array from a file that must end with it."""
    start = file.read(8)
    if len(start) < 8 or not start.startswith(_MAGIC) or start[6] not in _LENGTH_BYTES:
        raise ValueError("it does not begin as a .npy file")
    width = _LENGTH_BYTES[start[6]]
    length = int.from_bytes(file.read(width), "little")
    if length > min(size, _MAX_HEADER):
        raise ValueError(f"its header is said to have {length} bytes")
    dtype, is_fortran, shape = _parse(file.read(length).decode("latin-1"))
    count = math.prod(shape)
    there = size - 8 - width - length
    if count * dtype.itemsize != there:
        raise ValueError(
            f"its header says {dtype} {list(shape)}, {count * dtype.itemsize} bytes, and "
            f"{there} bytes follow"
        )
    flat = np.empty(count, dtype)
    data = flat.view(np.uint8).data if count else memoryview(b"")
    done = 0
    while done < len(data):
        received = file.readinto(data[done : done + (1 << 20)])  # type: ignore[attr-defined]
        if not received:
            raise ValueError(f"it ends after {done} of {len(data)} bytes")
        done += received
    if dtype == np.bool_ and count and flat.view(np.uint8).max() > 1:
        raise ValueError("it holds bytes that are neither true nor false")
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _parse(header: str) -> tuple[np.dtype, bool, tuple[int, ...]]:
    found = _HEADER.fullmatch(header)
    values: dict[str, str] = {}
    for name, value in found.groupdict().items() if found is not None else ():
        if value is not None:
            values[name[:-1]] = value
    if len(values) != 3:
        raise ValueError(f"its header is not what NumPy writes: {header[:100]!r}")
    if not _DTYPE.fullmatch(values["descr"]) or not _SHAPE.fullmatch(values["shape"]):
        raise ValueError(
            f"its header says dtype {values['descr'][:40]!r} and shape ({values['shape'][:80]}), "
            "and not an array of numbers"
        )
    shape = tuple(int(number) for number in re.findall("[0-9]+", values["shape"]))
    if len(shape) > _MAX_DIMS or max(shape, default=0) >= 2**48:
        raise ValueError(f"its header says the shape ({values['shape'][:80]})")
    try:
        dtype = np.dtype(values["descr"])
    except TypeError:  # such as '<f12' where the machine has no such numbers
        raise ValueError(f"this machine has no dtype {values['descr']!r}") from None
    return dtype, values["order"] == "True", shape
