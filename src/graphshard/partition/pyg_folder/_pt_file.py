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
import struct
import sys
import zipfile
from typing import Any

import torch
from torch import Tensor

from ..._regular_files import open_regular
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


class _Name(str):
    """A name that a pickle may call: one of the above."""

    __slots__ = ()


class _Mark:
    """Where the items of a tuple, list or dictionary begin on the stack."""


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
        return _Interpreter(self._bytes("data.pkl", _MOST_PICKLE_BYTES), self).run()

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
        prefix, _, name = kind.partition(" ") if isinstance(kind, _Name) else ("", "", "")
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


class _Interpreter:
    """A pickle of plain values and tensors, operation by operation."""

    def __init__(self, program: bytearray, archive: _Archive) -> None:
        self._program, self._archive, self._at = program, archive, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            operation = self._take(1)[0]
            if operation == 0x2E:  # STOP
                break
            method = _OPERATIONS.get(operation)
            if method is None:
                raise ValueError(f"its pickle has the operation {operation:#x}, which is not read")
            method(self)
        if len(self._stack) != 1:
            raise ValueError("its pickle ends in the middle of a value")
        return self._value(self._stack.pop())

    def _take(self, count: int) -> bytes:
        stop = self._at + count
        if stop > len(self._program):
            raise ValueError("its pickle ends early")
        found = bytes(self._program[self._at : stop])
        self._at = stop
        return found

    def _int(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _line(self) -> str:
        end = self._program.find(b"\n", self._at, self._at + 256)
        if end < 0:
            raise ValueError("its pickle has a name without an end")
        return self._take(end + 1 - self._at)[:-1].decode("ascii")

    def _value(self, found: Any) -> Any:
        if isinstance(found, _Mark):
            raise ValueError("its pickle ends in the middle of a value")
        return found

    def _pop(self) -> Any:
        return self._value(self._stack.pop())

    def _items(self) -> list[Any]:
        """What has been put on the stack since the last mark."""
        items: list[Any] = []
        while not isinstance(found := self._stack.pop(), _Mark):
            items.append(found)
        return items[::-1]

    # ------------------------------------------------------------------ operations

    def protocol(self) -> None:
        if self._take(1)[0] != 2:
            raise ValueError("its pickle is not of protocol 2")

    def name(self) -> None:
        name = _Name(f"{self._line()} {self._line()}")
        module, _, kind = name.partition(" ")
        is_storage = module == "torch" and kind in _STORAGES
        if not is_storage and name not in (*_DICT, _DEFAULT_DICT, _TENSOR):
            raise ValueError(f"its pickle names {name!r}, which no tensor needs")
        self._stack.append(name)

    def call(self) -> None:
        arguments, name = self._pop(), self._pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls what is no name")
        names = [a for a in arguments if isinstance(a, _Name) and a in _DICT]
        if name == _TENSOR:
            self._stack.append(_tensor(arguments))
        elif (name in _DICT and not arguments) or (
            name == _DEFAULT_DICT and len(names) == len(arguments)
        ):
            self._stack.append({})
        else:
            raise ValueError(f"its pickle calls {name!r} with arguments that it does not take")

    def persistent(self) -> None:
        self._stack.append(self._archive.storage(self._pop()))

    def put(self, count: int) -> None:
        self._memo[self._int(count)] = self._value(self._stack[-1])

    def get(self, count: int) -> None:
        self._stack.append(self._memo[self._int(count)])

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int | None) -> None:
        items = self._items() if count is None else [self._pop() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def text(self) -> None:
        self._stack.append(self._take(self._int(4)).decode("utf-8"))

    def number(self, count: int, signed: bool = False) -> None:
        self._stack.append(self._int(count, signed))

    def long(self) -> None:
        count = self._int(1)
        if count > 8:
            raise ValueError("its pickle has a number of more than 64 bits")
        self._stack.append(self._int(count, signed=True))

    def real(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise ValueError("its pickle appends to what is no list")
        self._stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict) or len(items) % 2:
            raise ValueError("its pickle sets items of what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            flat = key if type(key) is tuple else (key,)
            if not all(isinstance(part, str | int | None) for part in flat):
                raise ValueError("its pickle has a key that is no name")
            self._stack[-1][key] = value


_OPERATIONS: dict[int, Any] = {
    0x80: _Interpreter.protocol,
    ord("c"): _Interpreter.name,
    ord("R"): _Interpreter.call,
    ord("Q"): _Interpreter.persistent,
    ord("q"): lambda i: i.put(1),
    ord("r"): lambda i: i.put(4),
    ord("h"): lambda i: i.get(1),
    ord("j"): lambda i: i.get(4),
    ord("("): lambda i: i.push(_Mark()),
    ord("t"): lambda i: i.tuple_of(None),
    ord(")"): lambda i: i.tuple_of(0),
    0x85: lambda i: i.tuple_of(1),
    0x86: lambda i: i.tuple_of(2),
    0x87: lambda i: i.tuple_of(3),
    ord("X"): _Interpreter.text,
    ord("K"): lambda i: i.number(1),
    ord("M"): lambda i: i.number(2),
    ord("J"): lambda i: i.number(4, True),
    0x8A: _Interpreter.long,
    ord("G"): _Interpreter.real,
    ord("N"): lambda i: i.push(None),
    0x88: lambda i: i.push(True),
    0x89: lambda i: i.push(False),
    ord("}"): lambda i: i.push({}),
    ord("]"): lambda i: i.push([]),
    ord("a"): lambda i: i.extend([i._pop()]),
    ord("e"): lambda i: i.extend(i._items()),
    ord("s"): lambda i: i.update([i._pop(), i._pop()][::-1]),
    ord("u"): lambda i: i.update(i._items()),
}


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
