# SPDX-License-Identifier: Apache-2.0
"""read_planetoid: one of the files ``ind.<name>.<part>`` of the Planetoid splits.

They are pickles, which are programs. This reader never runs one. It knows the few instructions by
which a NumPy array, a SciPy CSR matrix, a dictionary of lists and plain numbers and strings are
written down, and builds those and nothing else: a name outside `_NAMES`, an instruction that is not
in `PickleMachine`, an array of objects, or a length that the file does not have is an error. So
what is built is never larger than the file.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..._base.files import open_regular
from ..._base.pickled import PickleMachine

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


class NameInFile:
    """What a name in the file stands for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class _Blank:
    """An array, a dtype or a matrix, before and after its state is known."""

    def __init__(self, kind: str, code: str = "") -> None:
        self.kind, self.code = kind, code
        self.value: Any = None


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
        return _finished(_PlanetoidMachine(data).run())
    except (ValueError, TypeError, KeyError, IndexError, struct.error, OverflowError) as error:
        raise PlanetoidFormatError(
            f"{path} is not a Planetoid file that can be read ({error}); get it again"
        ) from None


class _PlanetoidMachine(PickleMachine):
    """Knows arrays, CSR matrices and dictionaries of lists."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._size, self._encoded = len(data), 0

    def named(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            return super().named(module, name)
        return NameInFile(_NAMES[module, name])

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        kind = function.kind if isinstance(function, NameInFile) else ""
        if kind == "encode":
            return self._encode(*arguments)
        if kind == "array":
            return _Blank("array")
        if kind == "dtype":
            code = _text(arguments[0])
            if not _DTYPE.fullmatch(code):
                raise ValueError(f"arrays of {code!r:.20} are none that these files have")
            return _Blank("dtype", code)
        of_object = arguments[0] if kind == "object" else function
        if isinstance(of_object, NameInFile) and of_object.kind == "csr":
            return _Blank("csr")
        if kind == "defaultdict":
            return {}
        return super().called(function, arguments)

    def stated(self, value: Any, state: Any) -> None:
        _set_state(value, state)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Bytes as Python 3 writes them; together never more than the file has."""
        self._encoded += len(text)
        if encoding != "latin1" or self._encoded > self._size:
            raise ValueError("bytes that are none")
        return str(text).encode("latin1")


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
    import scipy.sparse

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
