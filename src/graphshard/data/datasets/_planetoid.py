# SPDX-License-Identifier: Apache-2.0
"""read_planetoid: one of the files ``ind.<name>.<part>`` of the Planetoid splits.

They are pickles, which are programs. This reader never runs one. It knows the few instructions by
which a NumPy array, a SciPy CSR matrix, a dictionary of lists and plain numbers and strings are
written down, and builds those and nothing else: a name outside `_NAMES`, an instruction that is not
in `_PickleMachine`, an array of objects, or a length that the file does not have is an error. So
what is built is never larger than the file.
"""

from __future__ import annotations

import codecs
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from ..._regular_files import open_regular

_MAX_BYTES = 2**31
_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("scipy.sparse.csr", "csr_matrix"): "csr",
    ("scipy.sparse._csr", "csr_matrix"): "csr",
    ("copy_reg", "_reconstructor"): "object",
    ("copyreg", "_reconstructor"): "object",
    ("__builtin__", "object"): "type object",
    ("builtins", "object"): "type object",
    ("__builtin__", "list"): "type list",
    ("builtins", "list"): "type list",
    ("collections", "defaultdict"): "defaultdict",
    ("_codecs", "encode"): "encode",
}
_DTYPE = re.compile(r"[<>|=]?(?:[iu][1248]|f[248]|b1)")


class PlanetoidFormatError(ValueError):
    """A file is no Planetoid file, or is damaged."""


class _Name:
    """What a name in the file stands for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Blank:
    """An array, a dtype or a matrix, before and after its state is known."""

    def __init__(self, kind: str, code: str = "") -> None:
        self.kind, self.code = kind, code
        self.value: Any = None


_MARK = object()


def read_planetoid(path: str | Path) -> Any:
    """What a file holds: an array, a CSR matrix, or a dictionary from node to neighbours.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It holds anything else, or is damaged.
    """
    with open_regular(path) as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        if len(data) > _MAX_BYTES:
            raise PlanetoidFormatError("it is too large")
        return _finished(_PickleMachine(data).run())
    except (ValueError, TypeError, KeyError, IndexError, struct.error, OverflowError) as error:
        raise PlanetoidFormatError(
            f"{path} is not a Planetoid file that can be read ({error}); get it again"
        ) from None


class _PickleMachine:
    """The stack machine of the format, of which it knows what is needed."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def run(self) -> Any:
        while True:
            code = self._take(1)
            if code == b".":
                if len(self._stack) != 1:
                    raise ValueError("it ends with several values")
                return self._stack[0]
            self._step(code)

    def _take(self, count: int) -> bytes:
        if count < 0 or self._at + count > len(self._data):
            raise ValueError("it is cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def _line(self) -> bytes:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1]

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def _to_mark(self) -> list[Any]:
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("a mark is missing")
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    def _step(self, code: bytes) -> None:
        push = self._stack.append
        if code in _READ:
            push(self._read(code))
        elif code == b"\x80":
            if self._number("<B") > 4:
                raise ValueError("it is of a newer protocol")
        elif code == b"\x95":
            self._take(8)
        elif code == b"(":
            push(_MARK)
        elif code in b"tld":
            items = self._to_mark()
            if code == b"d":
                push(_pairs(items))
            else:
                push(tuple(items) if code == b"t" else items)
        elif code in b")]}":
            push({b")": (), b"]": [], b"}": {}}[code])
        elif code in b"\x85\x86\x87":
            items = [self._pop() for _ in range(code[0] - 0x84)]
            push(tuple(items[::-1]))
        elif code == b"0":
            self._pop()
        elif code in b"qrp\x94":
            place = self._place(code)
            self._memo[place] = self._stack[-1]
        elif code in b"hjg":
            push(self._memo[self._place(code)])
        elif code in b"ae":
            items = [self._pop()] if code == b"a" else self._to_mark()
            self._of(list).extend(items)
        elif code in b"su":
            items = [self._pop(), self._pop()][::-1] if code == b"s" else self._to_mark()
            self._of(dict).update(_pairs(items))
        elif code in b"R\x81":
            arguments, function = self._pop(), self._pop()
            if isinstance(function, _Name) and function.kind == "encode":
                push(self._encode(*arguments))
            else:
                push(_called(function, arguments))
        elif code == b"b":
            state = self._pop()
            _set_state(self._stack[-1], state)
        elif code == b"c":
            names = (self._line().decode("ascii"), self._line().decode("ascii"))
            push(_named(*names))
        elif code == b"\x93":
            name, module = self._pop(), self._pop()
            push(_named(module, name))
        else:
            raise ValueError(f"an instruction {code!r} that these files do not have")

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Bytes as Python 3 writes them; together never more than the file has."""
        self._encoded += len(text)
        if encoding != "latin1" or self._encoded > len(self._data):
            raise ValueError("bytes that are none")
        return str(text).encode("latin1")

    def _of(self, kind: type) -> Any:
        if type(self._stack[-1]) is not kind:
            raise ValueError(f"a {kind.__name__} is missing")
        return self._stack[-1]

    def _place(self, code: bytes) -> int:
        if code in b"pg":
            return int(self._line())
        if code == b"\x94":
            return len(self._memo)
        return int(self._number("<B" if code in b"qh" else "<I"))

    def _read(self, code: bytes) -> Any:
        layout = _READ[code]
        if layout is None:
            return {b"N": None, b"\x88": True, b"\x89": False}[code]
        if layout == "line":
            return self._text_number(code)
        if layout == "escaped":
            return self._line().decode("raw-unicode-escape")
        if layout == "quoted":
            text = self._line()
            if len(text) < 2 or text[:1] not in b"'\"" or text[-1:] != text[:1]:
                raise ValueError("a string without quotes")
            return codecs.escape_decode(text[1:-1])[0]
        if code == b"\x8a":
            return int.from_bytes(self._take(self._number("<B")), "little", signed=True)
        if code in b"UTCBX\x8c":
            raw = self._take(self._number(layout))
            return raw.decode("utf-8") if code in b"X\x8c" else raw
        return self._number(layout)

    def _text_number(self, code: bytes) -> Any:
        text = self._line()
        if code == b"F":
            return float(text)
        if text in (b"00", b"01"):
            return text == b"01"
        if len(text) > 32:
            raise ValueError("a number of too many digits")
        return int(text.rstrip(b"L"))


_READ: dict[bytes, str | None] = {
    b"N": None,
    b"\x88": None,
    b"\x89": None,
    b"I": "line",
    b"L": "line",
    b"F": "line",
    b"S": "quoted",
    b"V": "escaped",
    b"J": "<i",
    b"K": "<B",
    b"M": "<H",
    b"G": ">d",
    b"\x8a": "<B",
    b"U": "<B",
    b"C": "<B",
    b"\x8c": "<B",
    b"T": "<i",
    b"B": "<I",
    b"X": "<I",
}
"""Instructions that read a value: its layout, or that of its length."""


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    found = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, int | str | bytes):
            raise ValueError("a key that is no number and no string")
        found[key] = value
    return found


def _named(module: Any, name: Any) -> _Name:
    if (module, name) not in _NAMES:
        raise ValueError(f"the name {module!s:.60}.{name!s:.60} is none that these files have")
    return _Name(_NAMES[module, name])


def _called(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise ValueError("a call of what is no function")
    if function.kind == "array":
        return _Blank("array")
    if function.kind == "dtype":
        code = _text(arguments[0])
        if not _DTYPE.fullmatch(code):
            raise ValueError(f"arrays of {code!r:.20} are none that these files have")
        return _Blank("dtype", code)
    if function.kind == "csr" or (
        function.kind == "object" and isinstance(arguments[0], _Name) and arguments[0].kind == "csr"
    ):
        return _Blank("csr")
    if function.kind == "defaultdict":
        return {}
    raise ValueError(f"a call of {function.kind}")


def _set_state(blank: Any, state: Any) -> None:
    if not isinstance(blank, _Blank):
        raise ValueError("a state of what has none")
    if blank.kind == "dtype":
        order = _text(state[1])
        if order not in ("<", ">", "|", "="):
            raise ValueError("an unknown order of bytes")
        blank.code = order + blank.code.lstrip("<>|=")
    elif blank.kind == "csr":
        if not isinstance(state, dict):
            raise ValueError("a matrix without its arrays")
        blank.value = state
    else:
        _, shape, dtype, by_column, raw = state
        if not isinstance(dtype, _Blank) or dtype.kind != "dtype" or not isinstance(raw, bytes):
            raise ValueError("an array of objects")
        kind = np.dtype(dtype.code)
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError("an array of an unknown shape")
        if math.prod(shape) * kind.itemsize != len(raw):
            raise ValueError(f"an array of shape {shape} in {len(raw)} bytes")
        blank.value = np.frombuffer(raw, kind).reshape(shape, order="F" if by_column else "C")


def _finished(value: Any) -> Any:
    """An array or a matrix in the place of what stands for it, or a dictionary of lists of ids."""
    if isinstance(value, _Blank):
        return _matrix(value.value) if value.kind == "csr" else _array(value)
    if not isinstance(value, dict):
        raise ValueError(f"a value of type {type(value).__name__}")
    checked: set[int] = set()  # a list may be there for many keys
    for key, ids in value.items():
        if type(ids) is not list or type(key) is not int:
            raise ValueError("a dictionary of something else than lists")
        if id(ids) not in checked and any(type(one) is not int for one in ids):
            raise ValueError("a list of something else than ids")
        checked.add(id(ids))
    return value


def _array(blank: Any) -> Any:
    if not isinstance(blank, _Blank) or not isinstance(blank.value, np.ndarray):
        raise ValueError("an array without a state")
    return blank.value.astype(blank.value.dtype.newbyteorder("="))


def _matrix(state: Any) -> Any:
    if not isinstance(state, dict):
        raise ValueError("a matrix without a state")
    named = {_text(key): one for key, one in state.items()}
    shape = named.get("_shape", named.get("shape"))
    if not isinstance(shape, tuple) or len(shape) != 2 or any(type(n) is not int for n in shape):
        raise ValueError("a matrix without a shape")
    indptr, indices, data = (_array(named[name]) for name in ("indptr", "indices", "data"))
    if not 0 <= shape[1] < 2**31 or indptr.shape != (shape[0] + 1,):
        raise ValueError(f"a matrix of shape {shape} with {indptr.shape} rows")
    matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=shape)
    matrix.check_format(full_check=True)
    return matrix


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
