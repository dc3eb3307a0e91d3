# SPDX-License-Identifier: Apache-2.0
"""read_pt: tensors from a file that ``torch.save`` wrote, without running what is in it.

::

    NAME/data.pkl    a pickle of protocol 2: dictionaries, lists, strings, numbers, tensors
    NAME/data/KEY    the bytes of one storage, not compressed
    NAME/byteorder   "little" or "big"

The pickle is not unpickled. Of its operations those are read here that such a file needs, and of
the names that it may call five, none of which is looked up: three make a dictionary, one a tensor,
and the types of storages are dtypes. All else is an error, and so is a length that the file does
not have.
"""

from __future__ import annotations

import math
import os
import sys
import zipfile
from typing import Any

import torch
from torch import Tensor

from ..._base.files import PickleMachine, open_regular
from ...errors import PartitionFormatError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DICT = ("collections OrderedDict", "__builtin__ dict", "builtins dict")
_DEFAULT_DICT = "collections defaultdict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_MOST_PICKLE_BYTES = 1 << 24
_MOST_DIMENSIONS = 64


class NameOfTorch(str):
    """A name that a pickle may call: one of the above."""

    __slots__ = ()


def read_pt(path: str | os.PathLike[str]) -> Any:
    """What a file of ``torch.save`` holds: dictionaries, lists, tuples, strings, numbers, tensors.

    Args:
        path: A file as torch has written it since release 1.6.

    Returns:
        The value, its tensors on the CPU. They own their memory, of which the file has as much.

    Raises:
        PartitionFormatError: The file is damaged, compressed, of an older release, or holds
            anything else, such as objects of classes.
        OSError: It cannot be opened.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(4) != b"PK\x03\x04":
                raise ValueError(
                    "it is no archive of torch.save; load and save it again with torch 1.6 or later"
                )
            with zipfile.ZipFile(file) as archive:
                return _Archive(archive, size).value()
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise PartitionFormatError(f"file {os.fspath(path)} cannot be read: {error}") from None
    except (IndexError, TypeError, OverflowError, RuntimeError, UnicodeDecodeError) as error:
        # What an interpreter of damaged operations meets.
        raise PartitionFormatError(
            f"file {os.fspath(path)} is damaged ({type(error).__name__}: {error})"
        ) from None


class _Archive:
    """The records of a file, checked against its size."""

    def __init__(self, archive: zipfile.ZipFile, file_size: int) -> None:
        self._archive = archive
        self._records: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                raise ValueError(f"record {info.filename!r} is compressed or encrypted")
            if info.file_size != info.compress_size or name in self._records:
                raise ValueError(f"record {info.filename!r} contradicts the directory of the file")
            self._records[name] = info
            total += info.file_size
        if total > file_size:
            raise ValueError(f"its records have {total} bytes, and the file {file_size}")
        self._storages: dict[str, Tensor] = {}

    def value(self) -> Any:
        order = self._bytes("byteorder", 16) if "byteorder" in self._records else b"little"
        if order.decode() != sys.byteorder:
            raise ValueError(f"its numbers are {order.decode()!r}-endian, unlike this machine's")
        return _TensorMachine(self._bytes("data.pkl", _MOST_PICKLE_BYTES), self).run()

    def _bytes(self, name: str, most: int) -> bytearray:
        if name not in self._records:
            raise ValueError(f"it has no record {name!r}")
        info = self._records[name]
        if info.file_size > most:
            raise ValueError(f"record {name!r} has {info.file_size} bytes, more than {most}")
        content = bytearray(info.file_size)
        with self._archive.open(info) as record:
            done = 0
            while done < len(content):
                count = record.readinto(memoryview(content)[done:])  # type: ignore[attr-defined]
                if not count:
                    raise ValueError(f"record {name!r} ends early")
                done += count
        return content

    def storage(self, reference: Any) -> Tensor:
        """The numbers that a persistent id of the pickle stands for."""
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise ValueError("it refers to something that is no storage")
        _, kind, key, _, count = reference
        prefix, _, name = kind.partition(" ") if isinstance(kind, NameOfTorch) else ("", "", "")
        if prefix != "torch" or name not in _STORAGES or not isinstance(key, str):
            raise ValueError(f"it has a storage of an unknown type ({kind!r})")
        dtype = _STORAGES[name]
        if key not in self._storages:
            content = self._bytes(f"data/{key}", sys.maxsize)
            if len(content) % dtype.itemsize:
                raise ValueError(f"storage {key} has a part of a number")
            none = torch.empty(0, dtype=dtype)
            self._storages[key] = torch.frombuffer(content, dtype=dtype) if content else none
        found = self._storages[key]
        if found.dtype != dtype or type(count) is not int or found.numel() != count:
            raise ValueError(f"storage {key} has {found.numel()} numbers, and not {count} {dtype}")
        return found


class _TensorMachine(PickleMachine):
    """Knows dictionaries, tensors and the storages that they are views of."""

    def __init__(self, program: bytearray, archive: _Archive) -> None:
        super().__init__(program)
        self._archive = archive

    def named(self, module: str, name: str) -> Any:
        found = NameOfTorch(f"{module} {name}")
        is_storage = module == "torch" and name in _STORAGES
        if not is_storage and found not in (*_DICT, _DEFAULT_DICT, _TENSOR):
            return super().named(module, name)
        return found

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if isinstance(function, NameOfTorch):
            names = [a for a in arguments if isinstance(a, NameOfTorch) and a in _DICT]
            if function == _TENSOR:
                return _tensor(arguments)
            if function in _DICT and not arguments:
                return {}
            if function == _DEFAULT_DICT and len(names) == len(arguments):
                return {}
        return super().called(function, arguments)

    def referred(self, reference: Any) -> Tensor:
        return self._archive.storage(reference)


def _tensor(arguments: tuple[Any, ...]) -> Tensor:
    """A view of a storage: of offset, size and strides that stay inside, and repeat nothing."""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Tensor):
        raise ValueError("its pickle makes a tensor of other arguments than torch does")
    storage, offset, size, strides = arguments[:4]
    if (
        not isinstance(size, tuple)
        or not isinstance(strides, tuple)
        or len(size) != len(strides)
        or len(size) > _MOST_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in (offset, *size, *strides))
    ):
        raise ValueError(f"a tensor cannot have the size {size!r} with the strides {strides!r}")
    count = math.prod(size)
    last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    if count and (count > storage.numel() or last >= storage.numel()):
        raise ValueError(
            f"a tensor of the size {size} does not fit its storage of {storage.numel()} numbers"
        )
    return storage.as_strided(size, strides, offset) if count else storage.new_empty(size)
