# SPDX-License-Identifier: Apache-2.0
"""The two kinds of files of a partition: tensors with digests, JSON whose values are checked.

[Note: tensor files]
Safetensors, written in slices, each file carrying its own checksum. The bytes are those of the
safetensors format, so any safetensors reader opens them. Two things make a writer of our own worth
its lines: rows can be gathered slice by slice while they are written, so that a wide feature never
exists twice in memory, and the header carries the BLAKE2b digest of the whole file, so that a
reader can tell at the price of the header alone whether a file is the one that the partition's JSON
speaks of. What cannot be read, or is damaged, is a PartitionFormatError that names the file.

::

    8 bytes    length of the header, little endian
    header     JSON: name -> {dtype, shape, data_offsets}, and "__metadata__" with the digest
    data       tensors one after another, widest dtype first, then by name
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .._base.file_rows import FilePiece, RowsFile, RowsInFiles
from .._base.files import check_regular, check_text, open_regular, parse_json, writing
from .._base.typing import CanonicalEType
from ..errors import PartitionFormatError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_DIGEST_KEY = "blake2b"
_DIGEST_BYTES = 16
_NO_DIGEST = "0" * (2 * _DIGEST_BYTES)
_LARGEST = 2**62
_MOST_DIMENSIONS = 64  # as many as numpy takes
_SLICE_BYTES = 1 << 20  # which fits the cache next to a core, from gathering to the digest


class RowSource(Protocol):
    """Rows that are there only piece by piece, while they are written."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    def slices(self) -> Iterator[Tensor]:
        """The rows in order, some at a time."""


@dataclass(frozen=True)
class Rows:
    """``source[index]``, gathered when it is written.

    Args:
        source: ``[num_rows, ...]``.
        index: int64 ``[num_selected]``.
    """

    source: Tensor
    index: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.index.shape[0], *self.source.shape[1:]))

    def slices(self) -> Iterator[Tensor]:
        row_bytes = max(1, self.source[:1].numel() * self.source.element_size())
        gather = _gather(self.source.detach())
        for index in torch.split(self.index, max(1, _SLICE_BYTES // row_bytes)):
            yield gather(index)


@dataclass(frozen=True)
class PiecewiseRows:
    """``source[index]``, gathered when it is written, where ``index`` comes piece by piece.

    Args:
        source: ``[num_rows, ...]``.
        index: Makes the pieces, int64, from the first on, whenever it is called.
        count: Rows in all.
    """

    source: Tensor
    index: Callable[[], Iterator[Tensor]]
    count: int

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, *self.source.shape[1:]))

    def slices(self) -> Iterator[Tensor]:
        for piece in self.index():
            yield from Rows(self.source, piece).slices()


@dataclass(frozen=True)
class StreamedColumn:
    """Numbers that are made piece by piece, while they are written.

    Args:
        count: How many there are in all.
        pieces: Makes them, from the first on, whenever it is called.
    """

    dtype: torch.dtype
    count: int
    pieces: Callable[[], Iterator[Tensor]]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count,))

    def slices(self) -> Iterator[Tensor]:
        return self.pieces()


def _gather(source: Tensor) -> Callable[[Tensor], Tensor]:
    """What gathers rows of a tensor; in the calling thread alone, where it can.

    Others write and work meanwhile, and torch's threads wait for each other by spinning: a small
    gather can take a hundred times its time where they are more than the cores.
    """
    if source.device.type != "cpu" or source.numel() == 0:
        return lambda index: source.index_select(0, index.to(source.device))
    numbers = source.view(_WHOLE_NUMBERS[source.dtype.itemsize]).numpy()
    if not source.is_contiguous():
        return lambda index: torch.from_numpy(numbers[index.numpy()]).view(source.dtype)
    rows = numbers.reshape(numbers.shape[0], -1)
    rows = rows.view(f"V{rows[0].nbytes}")[:, 0]

    def gather(index: Tensor) -> Tensor:
        taken = rows.take(index.numpy()).view(numbers.dtype)
        return torch.from_numpy(taken).view(source.dtype).view(-1, *source.shape[1:])

    return gather


@dataclass(frozen=True)
class FileRecord:
    """What the partition's JSON remembers of a file: its size and its digest."""

    bytes: int
    blake2b: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | RowSource], *, syncs: bool = True
) -> FileRecord:
    """Write ``tensors`` to a new file and sync it to disk.

    Args:
        path: File to create; its folder must exist.
        tensors: Whole tensors, or rows to get while writing. Any device, any stride.
        syncs: False leaves that to the caller.

    Raises:
        TypeError: A dtype has no name in safetensors.
        ValueError: UTF-8 cannot hold the path, or the name of a tensor.
        OSError: The file cannot be written, such as on a full disk; names it.
    """
    check_text(str(path), "the path of a tensor file")  # safetensors opens no other
    for name, tensor in tensors.items():
        check_text(name, "the name of a tensor")
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"'{name}' must have a dtype that safetensors can hold (got {tensor.dtype}); "
                f"convert it to one of {', '.join(str(dtype) for dtype in DTYPE_NAMES)}"
            )
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header = _header({name: tensors[name] for name in names})
    digest = _new_digest()
    digest.update(header)
    with writing(path), open(path, "xb") as file:
        file.write(header)
        for name in names:
            tensor = tensors[name]
            for piece in (tensor,) if isinstance(tensor, Tensor) else tensor.slices():
                _write_bytes(file, digest, piece)
        size = file.tell()
        file.seek(header.index(_NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())
        file.flush()
        if syncs:
            os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def _header(tensors: Mapping[str, Tensor | RowSource]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {_DIGEST_KEY: _NO_DIGEST}}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + tensor.shape.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def identity_of(tensor: Tensor) -> list[Any]:
    """Dtype, shape and digest of a tensor of any device and stride."""
    digest = _new_digest()
    rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    row_bytes = max(1, rows[:1].numel() * rows.element_size())
    for piece in rows.split(max(1, _SLICE_BYTES // row_bytes)):
        if piece.numel():
            flat = piece.cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return [str(tensor.dtype), list(tensor.shape), digest.hexdigest()]


def _write_bytes(file: BinaryIO, digest: hashlib.blake2b, tensor: Tensor) -> None:
    if tensor.numel() == 0:
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data
    for start in range(0, len(data), _SLICE_BYTES):
        file.write(data[start : start + _SLICE_BYTES])
        digest.update(data[start : start + _SLICE_BYTES])


@dataclass(frozen=True)
class TensorFile:
    """A tensor file that has been opened and found to be whole, as far as its header can tell."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    blake2b: str
    bytes: int
    places: dict[str, tuple[torch.dtype, int]]
    """Of each tensor its dtype, and the bytes of the file before it."""

    @classmethod
    def open(cls, path: Path) -> TensorFile:
        """Read the header."""
        with reading_part(path, "damaged or incomplete"), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _, header = _read_header(file, size)
            metadata, shapes, places = _checked_header(header, size - 8 - len(header))
        if _DIGEST_KEY not in metadata:
            raise PartitionFormatError(
                f"file {path} carries no {_DIGEST_KEY} digest, so graphshard did not write it; "
                "partition the graph again"
            )
        places = {name: (of, 8 + len(header) + start) for name, (of, start) in places.items()}
        return cls(path, shapes, metadata[_DIGEST_KEY], size, places)

    def check_digest(self) -> None:
        """Read every byte, and compare their digest with the one that the header carries."""
        if digest_of(self.path) != self.blake2b:
            raise PartitionFormatError(
                f"file {self.path} is damaged (its checksum differs); copy the part again, or "
                "partition the graph again"
            )

    def rows(self) -> dict[str, RowsInFiles]:
        """All tensors with rows, left in the file."""
        with reading_part(self.path, "damaged or incomplete"):
            file = RowsFile(self.path)
        return {
            name: RowsInFiles(
                (FilePiece(file, start, self.shapes[name][0]),),
                dtype,
                self.shapes[name][1:],
                dtype,
            )
            for name, (dtype, start) in self.places.items()
            if self.shapes[name]
        }

    def read(self, left: Collection[str] = ()) -> dict[str, Tensor]:
        """All tensors, mapped from the file: pages are read when touched, those of bools at once.

        Writing to a tensor changes this process's copy only, never the file.

        Args:
            left: Tensors that are mapped so that they take no memory of the process's own, however
                it is limited. They must not be written to.
        """
        try:
            check_text(str(self.path), "the path of a tensor file")
        except ValueError as error:
            raise PartitionFormatError(str(error)) from None
        try:
            check_regular(self.path)
            if left:
                rows = self.rows()
                tensors = {name: rows[name].mapped(name not in left) for name in self.shapes}
            else:
                with safe_open(self.path, framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in self.shapes}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise _damaged(self.path, error) from error
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != self.shapes[name]:
                raise _damaged(self.path, f"'{name}' has changed its shape")
            # C++ may do anything with a bool of another value, such as count it several times
            if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
                raise _damaged(self.path, f"a bool of '{name}' is neither 0 nor 1")
        return tensors


def digest_of(path: Path) -> str:
    """Compute the digest of a whole tensor file, to be compared with the one it carries."""
    digest = _new_digest()
    try:
        with open_regular(path) as file:
            prefix, header = _read_header(file, os.fstat(file.fileno()).st_size)
            carried = str(parse_json(header)["__metadata__"][_DIGEST_KEY])
            digest.update(prefix + header.replace(carried.encode(), _NO_DIGEST.encode(), 1))
            while data := file.read(_SLICE_BYTES):
                digest.update(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    return digest.hexdigest()


@contextlib.contextmanager
def reading_part(path: Path, trouble: str) -> Iterator[None]:
    """What is wrong with a file of a part that is read in here is a PartitionFormatError.

    A file that can be read is then said to be in ``trouble``.
    """
    try:
        yield
    except PartitionFormatError:
        raise
    except FileNotFoundError:
        raise PartitionFormatError(
            f"file {path} is missing; copy the part again, or partition the graph again"
        ) from None
    except OSError as error:
        raise PartitionFormatError(
            f"file {path} cannot be read ({error.strerror or error}); copy the part again, or "
            "partition the graph again"
        ) from error
    except (ValueError, IndexError) as error:
        raise unusable(path, trouble, error) from None


def unusable(path: Path, trouble: str, why: object) -> PartitionFormatError:
    """The error for a file of a part that can be read, and not used."""
    return PartitionFormatError(
        f"file {path} is {trouble} ({why}); copy the part again, or partition the graph again"
    )


def _damaged(path: Path, why: object) -> PartitionFormatError:
    return unusable(path, "damaged or incomplete", why)


def _read_header(file: IO[bytes], size: int) -> tuple[bytes, bytes]:
    """The length in front of the header, and the header, of a file of ``size`` bytes."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise ValueError(f"it has {size} bytes, too few for its header")
    if length % 8:
        raise ValueError(f"its header must take a multiple of 8 bytes (got {length})")
    header = file.read(length)
    if len(header) != length:
        raise ValueError("it became shorter while it was read")
    return prefix, header


def _checked_header(
    header: bytes, data_bytes: int
) -> tuple[dict[str, str], dict[str, tuple[int, ...]], dict[str, tuple[torch.dtype, int]]]:
    """Metadata, shapes and places, after checking that the tensors fill the data without gaps."""
    entries = parse_json(header.rstrip(b" "))
    if not isinstance(entries, dict):
        raise ValueError("its header is not an object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata are not texts")
    spans = []
    shapes, places = {}, {}
    for name, entry in entries.items():
        dtype, shape, (start, stop) = _checked_entry(name, entry)
        shapes[name], places[name] = shape, (dtype, start)
        spans.append((start, stop))
        if stop - start != math.prod(shape) * dtype.itemsize or start % dtype.itemsize:
            raise ValueError(f"the shape and the place of '{name}' contradict each other")
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"its tensors leave a gap or overlap at byte {end} of the data")
        end = stop
    if end != data_bytes:
        raise ValueError(f"its tensors take {end} bytes, and it has {data_bytes} for them")
    return metadata, shapes, places


def _checked_entry(name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"its header says of '{name}' what tensors do not have")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"'{name}' has the unknown dtype {entry['dtype']!r:.40}")
    numbers = []
    for key in ("shape", "data_offsets"):
        values = entry[key]
        if not isinstance(values, list) or not all(
            type(n) is int and 0 <= n < _LARGEST for n in values
        ):
            raise ValueError(f"the {key} of '{name}' must be whole numbers")
        numbers.append(tuple(values))
    shape, offsets = numbers
    if len(offsets) != 2 or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"the shape or the place of '{name}' has too many numbers, or too few")
    return dtype, shape, (offsets[0], offsets[1])


GRAPH_FORMATS = ("coo", "csc", "csr")
"""Formats that the structure of a part may be stored in."""

PART_FILES = {
    "part_graph": "graph.safetensors",
    "node_feats": "node_feats.safetensors",
    "edge_feats": "edge_feats.safetensors",
}

_SHOWN = 60


def etype_key(etype: CanonicalEType) -> str:
    """The name of a relation in files: "src:relation:dst".

    Where a name has a colon of its own the JSON lists the triples, too: see `triples_of`.
    """
    return ":".join(etype)


def required(content: Mapping[str, Any], key: str) -> Any:
    """The value of a key."""
    if key not in content:
        raise ValueError(f"'{key}' is missing")
    return content[key]


def whole_number(value: object, name: str, least: int = 0) -> int:
    """A whole number from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise ValueError(f"{name} must be a whole number from {least} up (got {shown(value)})")
    return value


def text(value: object, name: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty (got {shown(value)})")
    return check_text(value, name)


def mapping(value: object, name: str) -> dict[str, Any]:
    """An object of JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with keys (got {shown(value)})")
    return value


def listing(value: object, name: str) -> list[Any]:
    """A list of JSON."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list (got {shown(value)})")
    return value


def only_keys(content: Mapping[str, Any], keys: Iterable[str], name: str) -> None:
    """Raise unless an object has these keys and no other."""
    for key in keys:
        required(content, key)
    strange = sorted(set(content) - set(keys))
    if strange:
        raise ValueError(f"{name} has the unknown key {strange[0][:_SHOWN]!r}")


def shown(value: object) -> str:
    """A value for a message, cut short where it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list) and len(value) > 10:
        return f"a {type(value).__name__} of {len(value)}"
    text_of_value = repr(value)
    return text_of_value if len(text_of_value) <= _SHOWN else f"{text_of_value[:_SHOWN]}..."


def save_array(path: Path, values: npt.NDArray[Any]) -> None:
    """Write an array as a file of NumPy.

    `numpy.save` writes through a buffer of C, and does not see that a disk was full when that was
    emptied.
    """
    values = np.ascontiguousarray(values)
    with writing(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        file.write(values.reshape(-1).view(np.uint8).data)
