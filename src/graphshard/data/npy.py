# SPDX-License-Identifier: Apache-2.0
"""NumPy's files, ``.npy`` and ``.npz``, read with nothing believed that can be checked first.

``numpy.load`` evaluates the header as Python's syntax and allocates what it says before it looks at
the file. Here the header must have the form that NumPy writes, the dtype must be one of plain
numbers, and the size that follows from both must be the file's own; else it is a ValueError that
names the file. No pickle.

An archive may grow: of each array that is read, to what its directory says, which is at most 1032
times the bytes in the file, as much as deflate can. Memory is filled only as the bytes arrive.

[Note: features]
Features are a dense ``feat.npy``, or a ``feat.npz`` that holds a CSR matrix as the plain arrays
``data``, ``indices``, ``indptr`` and ``shape``; ``scipy.sparse.save_npz`` writes such files.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from .._base.files import open_regular, writing
from ._array_graph import Arrays

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
    r"\{\s*" + r"\s*,\s*".join(_ITEM.format(i) for i in range(3)) + r"\s*,?\s*\}\s*", re.ASCII
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


def map_npy(path: Path) -> np.ndarray:
    """The same, mapped where it can be: pages are read when they are touched."""
    try:
        with open_regular(path) as file:
            dtype, is_fortran, shape = _read_header(file, path.stat().st_size)
            start = file.tell()
    except (OSError, ValueError) as error:
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    is_plain = dtype.isnative and dtype.kind != "b" and dtype.itemsize <= 8
    is_plain = is_plain and (len(shape) < 2 or not is_fortran)
    if not is_plain or not math.prod(shape):
        return read_npy(path)
    return np.memmap(path, dtype, "r", start, shape)


def read_npz(
    path: Path, is_read: Callable[[str], bool], new_path: Callable[[], Path] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of a ``.npz`` file of whose names ``is_read`` is true.

    Args:
        new_path: Where each is to be unpacked, and then mapped; None: they are read into memory.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            size = path.stat().st_size
            arrays = {}
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if not is_read(name):
                    continue
                _check_member(info, size)
                with archive.open(info) as member:
                    if new_path is None:
                        arrays[name] = _read_array(member, info.file_size)
                        if member.read(1):  # its end has been seen now, and with it its checksum
                            raise ValueError(f"{info.filename} goes on behind its array")
                        continue
                    unpacked = new_path()
                    with writing(unpacked), open(unpacked, "wb") as out:
                        shutil.copyfileobj(member, out, 1 << 20)
                arrays[name] = map_npy(unpacked)
            return arrays
    except Exception as error:  # zipfile leaks whatever its parts raise on damaged bytes
        if new_path is not None and isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise _unreadable(path, reason) from None


def _unreadable(path: Path, reason: str) -> ValueError:
    if path.suffix == ".npz":
        what, cure = "an archive of plain arrays", "write it with numpy.savez from numeric arrays"
    else:
        what, cure = "a plain array", "write it with numpy.save from a numeric array"
    return ValueError(f"{path} cannot be read as {what} ({reason}); {cure}")


def _check_member(info: zipfile.ZipInfo, file_size: int) -> None:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed in a way that NumPy does not write")
    most = min(info.compress_size, file_size)
    most *= 1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE_RATIO
    if info.file_size > most:
        raise ValueError(
            f"{info.filename} is said to have {info.file_size} bytes, more than "
            f"{info.compress_size} compressed ones can hold"
        )


def _read_header(file: IO[bytes], size: int) -> tuple[np.dtype, bool, tuple[int, ...]]:
    """Read what is said of an array, with which a file must end: its dtype, order and shape."""
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
    return dtype, is_fortran, shape


def _read_array(file: IO[bytes], size: int) -> np.ndarray:
    """Read one array from a file that must end with it."""
    dtype, is_fortran, shape = _read_header(file, size)
    count = math.prod(shape)
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
    match = _HEADER.fullmatch(header)
    groups = {} if match is None else match.groupdict()
    values = {name[:-1]: value for name, value in groups.items() if value is not None}
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


_KINDS = {"i": "integers", "f": "real numbers", "b": "bool"}
_ALLOWED = {"i": "iu", "f": "fiu", "b": "b"}
_CSR = {"data": "f", "indices": "i", "indptr": "i", "shape": "i"}
"""The arrays of a CSR matrix and their kinds."""


@dataclass(frozen=True)
class SparseRows:
    """A matrix of which only the non-zeros are stored, row by row (CSR).

    Args:
        data: [num_nonzeros] values.
        indices: [num_nonzeros] column of each value.
        indptr: [num_rows + 1] where each row begins and ends.
        shape: (num_rows, num_columns).
    """

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    shape: tuple[int, int]

    def rows(self, first: int, last: int) -> SparseRows:
        """Some rows, in memory of their own."""
        last = min(last, self.shape[0])
        ends = self.indptr[first : last + 1]
        inside = slice(int(ends[0]), int(ends[-1]))
        shape = last - first, self.shape[1]
        return SparseRows(
            np.array(self.data[inside]), np.array(self.indices[inside]), ends - ends[0], shape
        )


def read_array(path: Path, ndim: int, kind: str, *, is_mapped: bool = False) -> np.ndarray:
    """Read one ``.npy`` file of ``ndim`` dimensions.

    Args:
        kind: ``'i'`` integers (returned as int64), ``'f'`` real numbers, ``'b'`` bool.
        is_mapped: Map it instead; then it has the dtype that the file has, for `plain_numbers`.
    """
    array = map_npy(path) if is_mapped else read_npy(path)
    if array.ndim != ndim or array.dtype.kind not in _ALLOWED[kind]:
        raise ValueError(
            f"{path} must hold {_KINDS[kind]} in {ndim} dimension(s) (got {array.dtype} "
            f"{array.shape})"
        )
    if isinstance(array, np.memmap):
        return array
    return plain_numbers(path, array, kind)


def plain_numbers(path: Path, array: np.ndarray, kind: str) -> np.ndarray:
    """An array in this machine's order of bytes and in a dtype that torch has.

    Args:
        path: Where it is from, for errors.
        array: Integers, real numbers or bool.
        kind: As for `read_array`.
    """
    if kind == "i":
        if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"{path} must hold integers below 2^63 (got {array.max()})")
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.dtype.itemsize == 8 and array.size and array.max() > 2**53:
            raise ValueError(
                f"{path} must hold real numbers, among which integers beyond 2^53 become others "
                f"(got {array.max()}); store them divided, or as float64"
            )
        return array.astype(np.float64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def read_features(folder: Path, stem: str, arrays: Arrays) -> np.ndarray | SparseRows | None:
    """Read ``{stem}.npy`` (dense) or ``{stem}.npz`` (CSR) of a folder; None if there is neither.

    Args:
        arrays: If they are on disk, what is dense is mapped, see `read_array`, and so are values
            and columns of what is sparse, which are unpacked there.
    """
    is_mapped = arrays.folder is not None
    if is_there(folder / f"{stem}.npy"):
        return read_array(folder / f"{stem}.npy", 2, "f", is_mapped=is_mapped)
    path = folder / f"{stem}.npz"
    if not is_there(path):
        return None
    archive = read_npz(path, _CSR.__contains__, arrays.new_path if is_mapped else None)
    if missing := [name for name in _CSR if name not in archive]:
        raise ValueError(
            f"{path} must hold the arrays {list(_CSR)} of a CSR matrix (missing: {missing}); "
            "scipy.sparse.save_npz writes them"
        )
    for name, kind in _CSR.items():
        allowed = _ALLOWED[kind] + ("b" if name == "data" else "")
        if archive[name].ndim != 1 or archive[name].dtype.kind not in allowed:
            raise ValueError(
                f"{path} is no CSR matrix: {name} must hold {_KINDS[kind]} in one dimension (got "
                f"{archive[name].dtype} {archive[name].shape})"
            )
    data = plain_numbers(path, archive["data"], "f")
    indices = archive["indices"]
    if not (isinstance(indices, np.memmap) and indices.dtype in (np.int32, np.int64)):
        indices = plain_numbers(path, indices, "i")
    indptr, shape = (np.array(plain_numbers(path, archive[n], "i")) for n in ("indptr", "shape"))
    if shape.shape != (2,) or indptr.shape != (shape[0] + 1,) or data.shape != indices.shape:
        raise ValueError(
            f"{path} is no CSR matrix: shape {shape.tolist()}, {indptr.shape[0]} row pointers, "
            f"{data.shape[0]} values, {indices.shape[0]} columns"
        )
    ascending = bool((indptr[1:] >= indptr[:-1]).all())
    if not ascending or indptr[0] != 0 or indptr[-1] != len(data):
        raise ValueError(f"{path} is no CSR matrix: indptr must ascend from 0 to {len(data)}")
    largest, below = arrays.largest(indices, -1), arrays.first_below(indices, 0)
    if shape[1] < 0 or below is not None or largest >= shape[1]:
        got = f"{largest if below is None else indices[below]}" if indices.size else "none"
        raise ValueError(f"{path} is no CSR matrix: columns must be in [0, {shape[1]}) (got {got})")
    return SparseRows(data, indices, indptr, (int(shape[0]), int(shape[1])))


def is_there(path: Path) -> bool:
    """Whether there is anything of this name; that it is a file is checked when it is opened.

    A pipe, a folder or a broken link in place of a file is damage, and no absent file.
    """
    return os.path.lexists(path)


def feature_dtype(folder: Path, features: np.ndarray | SparseRows) -> torch.dtype:
    """The narrowest dtype from float32 up that holds every number of a file as it is.

    That is NumPy's rule: integers of up to 16 bits fit float32, longer ones take float64; real
    numbers keep their dtype, also where it is narrower.

    Raises:
        ValueError: An integer beyond 2^53, which no real number stands for exactly.
    """
    data = features if isinstance(features, np.ndarray) else features.data
    if data.dtype.kind == "f":
        return torch.from_numpy(np.empty(0, data.dtype)).dtype
    is_wide = data.dtype.itemsize == 8 and data.size
    if is_wide and max(abs(int(data.min())), int(data.max())) > 2**53:
        raise ValueError(
            f"{folder}: features are real numbers, and integers beyond 2^53 become others among "
            f"them (got {data.min()} to {data.max()}); pass dtype to have them rounded, or keep "
            "ids elsewhere"
        )
    wide = np.promote_types(data.dtype, np.float32)
    return torch.float32 if wide == np.float32 else torch.float64


def dense_features(
    features: np.ndarray | SparseRows, dtype: torch.dtype, row_normalize: bool
) -> Tensor:
    """[num_rows, num_columns] tensor of a feature matrix.

    Args:
        dtype: Floating point dtype to store.
        row_normalize: Divide each row by its sum; rows that sum to 0 stay as they are.
    """
    if isinstance(features, np.ndarray):
        values = torch.from_numpy(
            features.astype(np.float64 if row_normalize else features.dtype, copy=False)
        )
        if row_normalize:
            values = values * _inverse(values.sum(1)).unsqueeze(1)
        return values.to(dtype)
    counts = torch.from_numpy(np.diff(features.indptr).astype(np.int64))
    rows = torch.repeat_interleave(torch.arange(features.shape[0]), counts)
    values = torch.from_numpy(features.data)
    if row_normalize:
        values = values.double()
        sums = torch.zeros(features.shape[0], dtype=torch.float64).index_add_(0, rows, values)
        values = values * _inverse(sums)[rows]
    columns = torch.from_numpy(features.indices.astype(np.int64))
    dense = torch.zeros(features.shape, dtype=dtype)
    return dense.index_put_((rows, columns), values.to(dtype), accumulate=True)


def most_in_a_row(features: SparseRows) -> int:
    """Non-zeros of the fullest row, at least 1."""
    return max(1, int(np.diff(features.indptr).max(initial=0)))


def padded_features(
    features: SparseRows, dtype: torch.dtype, row_normalize: bool, num_places: int
) -> tuple[Tensor, Tensor]:
    """The non-zeros of each row side by side, in so many places.

    Returns:
        Columns, int32 ``[num_rows, num_places]``, counted from 1, and 0 behind a row's last; and
        values ``[num_rows, num_places]``, 0 there.
    """
    counts = torch.from_numpy(np.diff(features.indptr).astype(np.int64))
    rows = torch.repeat_interleave(torch.arange(features.shape[0]), counts)
    values = torch.from_numpy(features.data).double()
    if row_normalize:
        sums = torch.zeros(features.shape[0], dtype=torch.float64).index_add_(0, rows, values)
        values = values * _inverse(sums)[rows]
    places = (
        torch.arange(rows.numel()) - torch.from_numpy(features.indptr[:-1].astype(np.int64))[rows]
    )
    shape = features.shape[0], num_places
    columns = torch.zeros(shape, dtype=torch.int32)
    columns[rows, places] = torch.from_numpy(features.indices.astype(np.int32)) + 1
    padded = torch.zeros(shape, dtype=dtype)
    padded[rows, places] = values.to(dtype)
    return columns, padded


def _inverse(sums: Tensor) -> Tensor:
    return torch.where(sums == 0, 1.0, 1.0 / torch.where(sums == 0, 1.0, sums))
