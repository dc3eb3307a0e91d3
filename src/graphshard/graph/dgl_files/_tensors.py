# SPDX-License-Identifier: Apache-2.0
"""What DGL's files are made of, and files of named tensors (``dgl.data.utils.save_tensors``).

::

    text      u64 bytes, UTF-8
    list      u64 entries, the entries
    tensor    u64 0xDD5E40F096B4A13F, u64 0
              i32 device type (1, the CPU), i32 device number (0), i32 dimensions
              u8 kind (0 int, 1 unsigned, 2 float, 4 bfloat), u8 bits, u16 1
              i64 of each dimension, i64 bytes, the data in C order
    tensors   u64 0xDD5A9FBE3FA2443F, u64 tensors, u64 tensors, and for each of them a text and the
              tensor: a whole file

All is little endian, without gaps. A reader first walks through a file and notes where its tensors
are; every length is held against the bytes that are left before anything is read or allocated.
Tensors are read when they are asked for, each straight into its memory. So says DGL's
``src/graph/serialize/tensor_serialize.cc``.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, TypeVar

import torch
from torch import Tensor

from ..._base.files import NotRegularFileError, check_path, check_text, open_regular, writing
from ..._base.typing import TensorDict

TENSOR = 0xDD5E40F096B4A13F

_CPU = 1
_LARGEST = 2**62
_MOST_DIMENSIONS = 32
_SLICE_BYTES = 1 << 24
_KINDS: dict[tuple[int, int], torch.dtype] = {
    (0, 8): torch.int8,
    (0, 16): torch.int16,
    (0, 32): torch.int32,
    (0, 64): torch.int64,
    (1, 8): torch.uint8,
    (2, 16): torch.float16,
    (2, 32): torch.float32,
    (2, 64): torch.float64,
    (4, 16): torch.bfloat16,
}
_CODES = {dtype: code for code, dtype in _KINDS.items()}
_LEAST_NAMED_BYTES = 8 + 16 + 12 + 4 + 8
"""Of a tensor with a name: lengths and the head of the tensor."""

_Listed = TypeVar("_Listed")


def dgl_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype under which DGL's files hold one; a bool is a byte there."""
    if dtype == torch.bool:
        return torch.uint8
    if dtype not in _CODES:
        dtypes = ", ".join(str(each) for each in _CODES)
        raise TypeError(
            f"DGL's files cannot hold {dtype}; convert the tensor to bool or one of {dtypes}"
        )
    return dtype


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[BinaryReader]:
    """Open one of DGL's files; what is wrong with it is a ValueError that names it."""
    path = Path(path)
    try:
        opened = open_regular(path)
    except (IsADirectoryError, NotRegularFileError) as error:
        raise ValueError(f"{path} must be a regular file ({error.strerror})") from None
    with opened as file:
        reader = BinaryReader(path, file, os.fstat(file.fileno()).st_size)
        try:
            yield reader
        except DamagedFileError as error:
            raise ValueError(
                f"{path} is damaged, or no such file of DGL's ({error}, near byte "
                f"{reader.offset}); write it again"
            ) from None


class DamagedFileError(ValueError):
    """What a file says that it cannot mean; `reading` adds its name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that is open."""

    reader: BinaryReader
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self._read_into(tensor, 0)
        return tensor

    def slices(self) -> Iterator[Tensor]:
        """Its rows in order, some at a time."""
        if len(self.shape) == 0 or self.num_bytes == 0:
            yield self.read()
            return
        row_bytes = self.num_bytes // self.shape[0]
        step = max(1, _SLICE_BYTES // row_bytes)
        for start in range(0, self.shape[0], step):
            rows = min(step, self.shape[0] - start)
            piece = torch.empty((rows, *self.shape[1:]), dtype=self.dtype)
            self._read_into(piece, start * row_bytes)
            yield piece

    def _read_into(self, target: Tensor, skipped: int) -> None:
        if target.numel():
            data = target.view(-1).view(torch.uint8).numpy().data
            self.reader.read_into(data, self.offset + skipped)


class BinaryReader:
    """Reads one file from its beginning to its end."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self.path, self.size, self.offset = path, size, 0
        self._file = file

    @property
    def left(self) -> int:
        """Bytes after the offset, where it reads next."""
        return self.size - self.offset

    def go_to(self, offset: int) -> None:
        """Read on from an offset."""
        if not 0 <= offset <= self.size:
            raise DamagedFileError(f"it has {self.size} bytes and none at {offset}")
        self._file.seek(offset)
        self.offset = offset

    def read_into(self, data: memoryview, offset: int) -> None:
        """Fill memory from an offset on; the reader's own offset stays."""
        self._file.seek(offset)
        filled = 0
        while filled < len(data):
            count = self._file.readinto(data[filled : filled + _SLICE_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise DamagedFileError("it became shorter while it was read")
            filled += count
        self._file.seek(self.offset)

    def raw(self, count: int) -> bytes:
        """The next bytes."""
        if count > self.left:
            raise DamagedFileError(f"{count} bytes are expected and {self.left} are left")
        data = self._file.read(count)
        if len(data) != count:
            raise DamagedFileError("it became shorter while it was read")
        self.offset += count
        return data

    def u8(self) -> int:
        return self.raw(1)[0]

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "little")

    def i64(self) -> int:
        return int.from_bytes(self.raw(8), "little", signed=True)

    def count(self, what: str, least_bytes: int) -> int:
        """How many entries follow, of so many bytes at least."""
        entries = self.u64()
        if entries * least_bytes > self.left:
            raise DamagedFileError(f"{entries} {what} do not fit into the {self.left} bytes left")
        return entries

    def size_of(self, what: str) -> int:
        """A count of things that need not be in the file."""
        size = self.i64()
        if not 0 <= size <= _LARGEST:
            raise DamagedFileError(f"{size} is no number of {what}")
        return size

    def magic(self, expected: int, what: str) -> None:
        """The number that something begins with."""
        number = self.u64()
        if number != expected:
            raise DamagedFileError(f"{what} begins with {expected:#x} and not with {number:#x}")

    def text(self) -> str:
        data = self.raw(self.u64())
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise DamagedFileError("a name is not UTF-8") from None

    def listing(self, what: str, least_bytes: int, read: Callable[[], _Listed]) -> list[_Listed]:
        """A list whose entries take so many bytes at least."""
        return [read() for _ in range(self.count(what, least_bytes))]

    def tensor(self) -> StoredTensor:
        """A tensor, whose data are skipped."""
        self.magic(TENSOR, "a tensor")
        if self.u64() != 0:
            raise DamagedFileError("a tensor has a second number other than 0")
        device, number, num_dims = struct.unpack("<iii", self.raw(12))
        if (device, number) != (_CPU, 0):
            raise DamagedFileError(f"a tensor is of device {device}:{number} and not of the CPU")
        if not 0 <= num_dims <= _MOST_DIMENSIONS:
            raise DamagedFileError(f"a tensor has {num_dims} dimensions")
        kind, bits, width = struct.unpack("<BBH", self.raw(4))
        dtype = _KINDS.get((kind, bits))
        if dtype is None or width != 1:
            raise DamagedFileError(
                f"a tensor is of the unknown kind {kind} with {bits} bits and width {width}"
            )
        shape = [self.size_of("rows or columns") for _ in range(num_dims)]
        expected, num_bytes = math.prod(shape) * dtype.itemsize, self.i64()
        if num_bytes != expected or math.prod(max(1, n) for n in shape) > _LARGEST:
            raise DamagedFileError(f"a tensor of shape {shape} and {dtype} has {num_bytes} bytes")
        if num_bytes > self.left:
            raise DamagedFileError(f"a tensor has {num_bytes} bytes, and {self.left} are left")
        start = self.offset
        self.go_to(start + num_bytes)
        return StoredTensor(self, dtype, torch.Size(shape), start)

    def named_tensors(self) -> dict[str, StoredTensor]:
        """A list of tensors with names."""
        tensors: dict[str, StoredTensor] = {}
        for _ in range(self.count("tensors", _LEAST_NAMED_BYTES)):
            name = self.text()
            if name in tensors:
                raise DamagedFileError(f"it has two tensors {name!r:.80}")
            tensors[name] = self.tensor()
        return tensors


class BinaryWriter:
    """Writes one file from its beginning to its end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0

    def raw(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.offset += len(data)

    def u8(self, *values: int) -> None:
        self.raw(bytes(values))

    def u64(self, *values: int) -> None:
        self.raw(struct.pack(f"<{len(values)}Q", *values))

    def i64(self, *values: int) -> None:
        self.raw(struct.pack(f"<{len(values)}q", *values))

    def text(self, value: str) -> None:
        data = value.encode()
        self.u64(len(data))
        self.raw(data)

    def tensor(self, dtype: torch.dtype, shape: Iterable[int], pieces: Iterable[Tensor]) -> None:
        """A tensor whose rows come in pieces; bools are written as bytes."""
        stored, sizes = dgl_dtype(dtype), list(shape)
        self.u64(TENSOR, 0)
        self.raw(struct.pack("<iiiBBH", _CPU, 0, len(sizes), *_CODES[stored], 1))
        num_bytes = math.prod(sizes) * stored.itemsize
        self.i64(*sizes, num_bytes)
        end = self.offset + num_bytes
        for piece in pieces:
            self._data(piece.to(stored))
        assert self.offset == end, "the pieces are the rows"

    def whole_tensor(self, tensor: Tensor) -> None:
        self.tensor(tensor.dtype, tensor.shape, (tensor,))

    def named_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """A list of tensors with names."""
        self.u64(len(tensors))
        for name, tensor in tensors.items():
            self.text(name)
            self.whole_tensor(tensor)

    def _data(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        flat = tensor.detach().cpu().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy().data
        for start in range(0, len(data), _SLICE_BYTES):
            self.raw(data[start : start + _SLICE_BYTES])


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[BinaryWriter]:
    """Write a file: under another name until it is whole, so that half of one is never found."""
    check_path(path)
    final = Path(path)
    if final.is_dir():
        raise ValueError(f"{final} must be a file to write to (it is a folder)")
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.with_name(f".{final.name[:100]}-{secrets.token_hex(8)}")
    try:
        with writing(final), open(staged, "xb") as file:
            yield BinaryWriter(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, final)
    except BaseException:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise


TENSORS = 0xDD5A9FBE3FA2443F

TensorPieces = Mapping[str, tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]]]


def save_tensors(filename: str | os.PathLike[str], tensor_dict: Mapping[str, Tensor]) -> bool:
    """Write named tensors as ``dgl.data.utils.save_tensors`` does, without DGL.

    Args:
        filename: File to write; one that is there is replaced, its folder is made if need be.
        tensor_dict: Name to tensor, on any device. DGL's files know no bool: it becomes uint8.

    Returns:
        True, as DGL's function does.

    Raises:
        TypeError: A name is no text, a value no tensor, or of a dtype that DGL's files cannot hold.
        ValueError: ``filename`` is a folder.
        OSError: The file cannot be written, such as on a full disk; names it.

    Example:
        >>> save_tensors("rows.dgl", {"x": torch.ones(2, 3)})
        True
        >>> load_tensors("rows.dgl")["x"].shape
        torch.Size([2, 3])
    """
    check_tensors(tensor_dict, "tensor_dict")
    write_tensor_file(
        filename,
        {name: (t.dtype, tuple(t.shape), (t,)) for name, t in tensor_dict.items()},
    )
    return True


def load_tensors(filename: str | os.PathLike[str], return_dgl_ndarray: bool = False) -> TensorDict:
    """Read a file that ``save_tensors``, DGL's or ours, wrote; without DGL.

    Args:
        return_dgl_ndarray: Must be false: there are no DGL arrays without DGL.

    Returns:
        Name to tensor, in the order of the file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or no such file.
        NotImplementedError: ``return_dgl_ndarray`` is true.
    """
    if return_dgl_ndarray:
        raise NotImplementedError("return_dgl_ndarray=True needs DGL; leave it out for tensors")
    with reading(filename) as reader:
        return {name: stored.read() for name, stored in open_tensors(reader).items()}


def open_tensors(reader: BinaryReader) -> dict[str, StoredTensor]:
    """The tensors of an open file, after a walk through all of it."""
    reader.magic(TENSORS, "a file of tensors")
    num_tensors = reader.u64()
    tensors = reader.named_tensors()
    if len(tensors) != num_tensors:
        raise DamagedFileError(f"it says {num_tensors} tensors and then {len(tensors)}")
    if reader.left:
        raise DamagedFileError(f"{reader.left} bytes follow its tensors")
    return tensors


def write_tensor_file(filename: str | os.PathLike[str], tensors: TensorPieces) -> None:
    """Write tensors whose rows come in pieces."""
    with new_file(filename) as writer:
        writer.u64(TENSORS, len(tensors), len(tensors))
        for name, (dtype, shape, pieces) in tensors.items():
            writer.text(name)
            writer.tensor(dtype, shape, pieces)


def check_tensors(tensors: object, what: str) -> None:
    """Raise unless they are named tensors that DGL's files can hold."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"{what} must be a dict of tensors (got {type(tensors).__name__})")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the keys of {what} must be texts (got {name!r:.80})")
        check_text(name, f"a name in {what}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(
                f"{what}[{name!r}] must be a dense tensor (got {type(tensor).__name__})"
            )
        dgl_dtype(tensor.dtype)
