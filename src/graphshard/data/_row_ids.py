# SPDX-License-Identifier: Apache-2.0
"""RowIds: the ids by which users name the nodes of a type, and the number of each.

[Note: ids are compared by value]
Tables of one graph are often written by different programs, so an id may be int32 here and int64
there, a string here and a dictionary there. It is the value that counts. Integers and text are two
kinds, which no table of Parquet or Arrow mixes; but a cell of CSV is of no kind. Such cells are
integers as long as every one of them is an integer as a program writes it: then text and integer
can be made of each other, and once a cell comes that is none (007, or u_12), what was read so far
becomes text, and nothing was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .._base.kernels import kernels_for, num_threads
from ._columns import arrow_array

Int64Array = NDArray[np.int64]
_CANONICAL = r"^(0|-?[1-9][0-9]*)$"
_MOST_EXACT = 2**53
_BLANK = ord(" ")
_PAIRS_AT_ONCE = 1 << 20
_NAMES = {"integer": "integers", "text": "text", "bytes": "bytes"}


class IdColumn(NamedTuple):
    """Where ids come from.

    Args:
        where: File and column, for messages.
        is_untyped: Whether the ids are cells of CSV.
    """

    where: str
    is_untyped: bool


class _Keys(NamedTuple):
    """Ids of one kind, as they are looked up: integers, or an Arrow array of large binary.

    Args:
        is_large: Whether the integers are the bits of uint64 of which some do not fit int64.
    """

    kind: str
    values: Any
    is_large: bool = False


class RowIds:
    """Numbers ids from 0 on, in the order in which they first appear.

    Args:
        ntype: The node type, for messages.
    """

    def __init__(self, ntype: str) -> None:
        self.ntype = ntype
        self._kind: str | None = None
        self._type: Any = None  # Arrow's, of the first column that has one
        self._first: IdColumn | None = None
        self._is_loose = True  # all of it was text of CSV
        self._is_large = False
        self._has_negative = False
        self._table: Any = _integer_table()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def kind(self) -> str:
        """integer, text or bytes."""
        return self._kind or "text"

    def add(self, ids: Any, column: IdColumn) -> Int64Array:
        """The number of each id; new ones get the next numbers.

        Args:
            ids: A pyarrow ``Array`` without nulls.

        Raises:
            ValueError: They are of another kind than those that are there.
        """
        return self._rows(ids, column, True, None)

    def find(self, ids: Any, column: IdColumn, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The number of each id, -1 where there is none; for the rest see `add`.

        Args:
            out: Array that is written and returned, of int64, or of int32 if that holds all
                numbers; None: a new one of int64.
        """
        found = self._rows(ids, column, False, out)
        if out is not None and found is not out:
            out[:] = found
        return found if out is None else out

    def expect(self, num_ids: int) -> None:
        """Make room for so many ids, or 16 times those there are: adding them takes less time."""
        self._table.reserve(num_ids)

    def has_text(self, text: str) -> bool:
        """Whether an id is written so."""
        import pyarrow

        if self._kind not in ("integer", "text"):
            return False
        cell = IdColumn("", True)
        return bool((self.find(pyarrow.array([text]), cell) >= 0).all())

    def arrow(self) -> Any:
        """All ids, by number, as a pyarrow array of the type in which they came."""
        import pyarrow

        if self._kind in (None, "integer"):
            keys = self._table.keys()
            if self._kind is None:
                return pyarrow.array([], pyarrow.string())
            array = pyarrow.array(keys.view(np.uint64) if self._is_large else keys)
            if self._type is not None and self._type != array.type:
                try:
                    return array.cast(self._type)
                except pyarrow.ArrowInvalid:  # ids of edges that are wider
                    return array
            return array
        keys_as_bytes: Any = self._table.keys()
        kind = self._type
        if kind is None:
            kind = pyarrow.string() if self._kind == "text" else pyarrow.binary()
        if isinstance(kind, pyarrow.BaseExtensionType):
            return kind.wrap_array(keys_as_bytes.cast(kind.storage_type))
        if pyarrow.types.is_string(kind) and keys_as_bytes.nbytes >= 2**31:
            kind = pyarrow.large_string()
        if self._kind == "text":
            keys_as_bytes = keys_as_bytes.cast(pyarrow.large_string())
        return keys_as_bytes.cast(kind)

    # ------------------------------------------------------------------ looking up

    def _rows(
        self, ids: Any, column: IdColumn, is_adding: bool, out: NDArray[Any] | None
    ) -> NDArray[Any]:
        """The number of each id, in ``out`` where it could be written at once."""
        import pyarrow

        if isinstance(ids, pyarrow.ExtensionArray):
            self._note_type(ids.type, column)
            ids = ids.storage
        if pyarrow.types.is_dictionary(ids.type):
            return self._rows_of_dictionary(ids, column, is_adding)
        if pyarrow.types.is_run_end_encoded(ids.type):
            from pyarrow import compute

            ids = compute.run_end_decode(ids)
        if not len(ids):
            return np.zeros(0, np.int64)
        self._note_type(ids.type, column)
        keys, is_none = self._keys(ids, column, is_adding)
        found: NDArray[Any]
        if is_adding:
            assert is_none is None
            found = self._table.insert(keys.values)
            return found
        found = self._table.find(keys.values, out if is_none is None else None)
        if is_none is None:
            return found
        rows = np.full(len(ids), -1, np.int64)
        rows[~is_none] = found
        return rows

    def _rows_of_dictionary(self, ids: Any, column: IdColumn, is_adding: bool) -> Int64Array:
        """Look up each value of the dictionary once; new ones in the order of the rows."""
        places = ids.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if not is_adding:
            return self.find(ids.dictionary, column)[places] if len(places) else places
        used, first = np.unique(places, return_index=True)
        order = np.argsort(first, kind="stable")
        of_value = np.full(len(ids.dictionary), -1, np.int64)
        in_order = used[order]
        of_value[in_order] = self.add(ids.dictionary.take(arrow_array(in_order)), column)
        return of_value[places]

    def _note_type(self, kind: Any, column: IdColumn) -> None:
        if self._first is None:
            self._first = column
        if self._type is None and not column.is_untyped:
            self._type = _type_to_keep(kind)

    def _keys(
        self, ids: Any, column: IdColumn, is_adding: bool
    ) -> tuple[_Keys, NDArray[np.bool_] | None]:
        """Ids in the form of this table, and which of them are left out as they cannot be in it."""
        is_none: NDArray[np.bool_] | None = None
        if column.is_untyped:
            keys, is_none = self._keys_of_cells(ids, is_adding)
        else:
            keys = _typed_keys(ids, column)
        if self._kind is None:
            self._start(keys.kind)
        if keys.kind != self._kind:
            keys = self._reconciled(keys, column)
        if not column.is_untyped:
            self._is_loose = False
        if keys.kind != "integer":
            return keys, is_none
        has_negative = (
            (is_adding or self._is_large)
            and not keys.is_large
            and bool(keys.values.min(initial=0) < 0)
        )
        clash = (keys.is_large and self._has_negative) or (has_negative and self._is_large)
        if is_adding:
            if clash and not self._is_loose:
                raise ValueError(
                    f"{column.where}: ids of '{self.ntype}' must fit int64, or uint64, all of them "
                    "(there are negative ones, and ones above 2**63 - 1); store them as text"
                )
            if clash:
                self._become_text()
                return _Keys("text", _text_of_integers(keys)), is_none
            self._is_large |= keys.is_large
            self._has_negative |= has_negative
            return keys, is_none
        if keys.is_large != self._is_large and (clash or keys.is_large):
            outside = keys.values < 0  # in one of the two readings of its bits
            if outside.any():
                whole = np.zeros(len(ids), bool) if is_none is None else is_none
                whole[np.flatnonzero(~whole)[outside]] = True
                return _Keys("integer", keys.values[~outside]), whole
        return keys, is_none

    def _keys_of_cells(self, ids: Any, is_adding: bool) -> tuple[_Keys, NDArray[np.bool_] | None]:
        if self._kind in (None, "integer"):
            keys, is_integer = _integers_of_text(ids, self._is_large)
            if is_integer is None:
                return keys, None
            if self._kind == "integer" and not is_adding:
                return keys, ~is_integer  # what is no integer is none of these ids
            if self._kind == "integer" and self._is_loose:
                self._become_text()
        return _Keys("text", _without_blanks(ids)), None

    def _reconciled(self, keys: _Keys, column: IdColumn) -> _Keys:
        """Keys of another kind than this table's, made alike without a loss; else an error."""
        if {keys.kind, self._kind} == {"integer", "text"}:
            if self._kind == "integer" and self._is_loose:
                self._become_text()
                return keys
            if self._kind == "text" and (self._is_loose or column.is_untyped):
                return _Keys("text", _text_of_integers(keys))
        assert self._first is not None
        raise ValueError(
            f"{column.where}: ids of '{self.ntype}' must be {_NAMES[self.kind]}, as in "
            f"{self._first.where} (got {_NAMES[keys.kind]}{_example(keys)}); store both alike"
        )

    def _start(self, kind: str) -> None:
        self._kind = kind
        self._table = _integer_table() if kind == "integer" else _bytes_table()

    def _become_text(self) -> None:
        keys = _Keys("integer", self._table.keys(), self._is_large)
        self._start("text")
        self._type = None
        if len(keys.values):
            self._table.insert(_text_of_integers(keys))


# ---------------------------------------------------------------------- kinds of ids


def _type_to_keep(kind: Any) -> Any:
    import pyarrow

    types = pyarrow.types
    if types.is_floating(kind) or types.is_decimal(kind):
        return None
    if types.is_string_view(kind):
        return pyarrow.string()
    if types.is_binary_view(kind):
        return pyarrow.binary()
    return kind


def _typed_keys(ids: Any, column: IdColumn) -> _Keys:
    """Ids of a table that has types."""
    import pyarrow

    types, kind = pyarrow.types, ids.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _Keys("text", _as_binary(ids))
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return _Keys("bytes", _as_binary(ids))
    if types.is_fixed_size_binary(kind):
        return _Keys("bytes", _as_binary(ids))
    if types.is_floating(kind):
        values = ids.to_numpy(zero_copy_only=False).astype(np.float64)
        bad = ~np.isfinite(values) | (values != np.trunc(values)) | (abs(values) > _MOST_EXACT)
        if bad.any():
            raise ValueError(
                f"{column.where}: ids must be whole numbers that fit {kind} exactly (got "
                f"{values[bad][0]}); store them as integers or text"
            )
        return _Keys("integer", values.astype(np.int64))
    if types.is_decimal(kind):
        for target in (pyarrow.int64(), pyarrow.uint64()):
            try:
                ids = ids.cast(target)
                break
            except pyarrow.ArrowInvalid:
                continue
        else:
            raise ValueError(
                f"{column.where}: ids must fit 64 bits (got {kind}, such as {ids[0]}); store them "
                "as text"
            )
        kind = ids.type
    if types.is_uint64(kind):
        numbers = ids.to_numpy(zero_copy_only=False)
        return _Keys("integer", numbers.view(np.int64), _is_beyond_int64(numbers))
    if types.is_integer(kind):
        return _Keys("integer", ids.to_numpy(zero_copy_only=False).astype(np.int64, copy=False))
    raise ValueError(
        f"{column.where}: ids must be text, integers, or bytes such as UUIDs (got {kind}); store "
        "them as text"
    )


def integers_of_ids(ids: Any, column: IdColumn, cure: str) -> tuple[Int64Array, bool]:
    """The integers that ids of a table with types are, and whether they are bits of uint64.

    Raises:
        ValueError: They are of another kind.
    """
    keys = _typed_keys(ids, column)
    if keys.kind != "integer":
        raise ValueError(
            f"{column.where}: node ids must be integers (got {ids.type}{_example(keys)}); {cure}"
        )
    return keys.values, keys.is_large


def of_one_type(table: RowIds, both: list[Any], columns: Sequence[IdColumn]) -> list[Any]:
    """Ids of two columns, cast to a type that holds the values of both."""
    import pyarrow

    kinds = [ids.type for ids in both]
    if kinds[0] == kinds[1]:
        return both
    candidates = kinds
    if all(map(pyarrow.types.is_integer, kinds)):
        candidates = [pyarrow.int64(), pyarrow.uint64()]
    elif any(map(pyarrow.types.is_integer, kinds)):
        is_text = any(map(pyarrow.types.is_string, kinds))
        is_text |= any(map(pyarrow.types.is_large_string, kinds))
        candidates = [] if is_text else kinds
    elif any(map(pyarrow.types.is_large_string, kinds)):
        candidates = [pyarrow.large_string()]
    for kind in candidates:
        try:
            return [ids.cast(kind) for ids in both]
        except pyarrow.ArrowException:
            continue
    for ids, column in zip(both, columns, strict=True):  # says what is wrong with them
        table.add(ids, column)
    return both


def _is_beyond_int64(numbers: NDArray[np.uint64]) -> bool:
    return bool(numbers.max(initial=0) >= np.uint64(2**63))


def _as_binary(ids: Any) -> Any:
    """An array that has offsets and bytes."""
    import pyarrow

    if pyarrow.types.is_fixed_size_binary(ids.type):
        return ids.cast(pyarrow.binary())
    if pyarrow.types.is_string_view(ids.type):
        return ids.cast(pyarrow.large_string())
    if pyarrow.types.is_binary_view(ids.type):
        return ids.cast(pyarrow.large_binary())
    return ids


def _text_of_integers(keys: _Keys) -> Any:
    import pyarrow

    if keys.kind != "integer":
        return keys.values
    values = keys.values.view(np.uint64) if keys.is_large else keys.values
    return pyarrow.array(values).cast(pyarrow.large_string())


def _integers_of_text(ids: Any, may_be_large: bool) -> tuple[_Keys, NDArray[np.bool_] | None]:
    """The integers that cells are, and which cells are some, None if all are.

    An integer is one as a program writes it, with blanks around it.

    Args:
        may_be_large: Where not all are, those of uint64 count as some, and not those of int64.
    """
    import pyarrow
    from pyarrow import compute

    kernels = _kernels()
    cells = ids = _as_binary(ids)
    if kernels is not None:
        parsed = np.empty(len(cells), np.int64)
        for has_blanks in (True, False):
            parsed_all, negative, large = kernels.parse_integers(*_strings_of(cells), parsed)
            if parsed_all and not (negative and large):
                return _Keys("integer", parsed, large), None
            if has_blanks and not parsed_all:
                cells = _without_blanks(ids)
            if cells is ids:
                break
    else:
        cells = _without_blanks(ids)
        for kind in (pyarrow.int64(), pyarrow.uint64()):
            try:
                numbers = cells.cast(kind).to_numpy(zero_copy_only=False)
            except pyarrow.ArrowInvalid:
                continue
            if _is_canonical(cells, numbers):
                is_large = kind == pyarrow.uint64()
                return _Keys("integer", numbers.view(np.int64), is_large), None
            break
    is_integer = compute.match_substring_regex(cells, _CANONICAL).to_numpy(zero_copy_only=False)
    lengths = compute.binary_length(cells).to_numpy(zero_copy_only=False)
    is_integer = is_integer & (lengths <= 20)
    low, high = (0, 2**64) if may_be_large else (-(2**63), 2**63)
    if may_be_large:
        is_negative = compute.starts_with(cells, "-").to_numpy(zero_copy_only=False)
        is_integer &= ~is_negative
    for row in np.flatnonzero(is_integer & (lengths > 18)).tolist():
        is_integer[row] = low <= int(cells[row].as_py()) < high
    kind = pyarrow.uint64() if may_be_large else pyarrow.int64()
    numbers = cells.filter(arrow_array(is_integer)).cast(kind).to_numpy(zero_copy_only=False)
    has_large = may_be_large and _is_beyond_int64(numbers)
    return _Keys("integer", numbers.view(np.int64), has_large), is_integer


def _without_blanks(ids: Any) -> Any:
    """Cells of which those that are integers have no blanks around them."""
    from pyarrow import compute

    ids = _as_binary(ids)
    if not _has_outer_blank(*_strings_of(ids)):
        return ids
    trimmed = compute.utf8_trim_whitespace(ids)
    return compute.if_else(compute.match_substring_regex(trimmed, _CANONICAL), trimmed, ids)


def _has_outer_blank(ends: NDArray[Any], data: NDArray[np.uint8]) -> bool:
    """Whether some cell begins or ends with a blank."""
    kernels = _kernels()
    if kernels is not None:
        return bool(kernels.has_outer_blank(ends, data))
    first, last = ends[:-1], ends[1:]
    filled = last > first
    first, last = first[filled], last[filled]
    return bool(((data[first] <= _BLANK) | (data[last - 1] <= _BLANK)).any())


def _is_canonical(cells: Any, numbers: NDArray[Any]) -> bool:
    """Whether cells are as long as their numbers are when written: no 007, no -0, no 0x10."""
    if not len(cells):
        return True
    width = np.int64 if str(cells.type).startswith("large") else np.int32
    _, offsets, data = cells.buffers()
    ends = np.frombuffer(offsets, width)[cells.offset : cells.offset + len(cells) + 1]
    letters = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]] if data else np.zeros(0, np.uint8)
    if letters.max(initial=0) > ord("9"):
        return False  # arrow reads 0x10
    is_negative = numbers < 0
    num_digits = len(numbers) + int(np.count_nonzero(is_negative))
    sizes = numbers
    if is_negative.any():
        # Of the smallest integer there is no negative; its bits as unsigned are right.
        sizes = np.where(is_negative, -numbers, numbers).view(np.uint64)
    power, largest = 10, int(sizes.max())
    while power <= largest:
        num_digits += int(np.count_nonzero(sizes >= sizes.dtype.type(power)))
        power *= 10
    return num_digits == int(ends[-1]) - int(ends[0])


def _example(keys: _Keys) -> str:
    if not len(keys.values):
        return ""
    value = keys.values[0]
    if keys.kind == "integer":
        return f", such as {int(value)}"
    content = value.as_py()
    if isinstance(content, bytes):
        content = content.hex()
    return f", such as {content!r:.60}"


# ---------------------------------------------------------------------- tables


def _kernels() -> Any:
    """The extension, where it is there and has tables of keys; else None."""
    kernels = kernels_for(torch.device("cpu"))
    return kernels if hasattr(getattr(kernels, "IntegerTable", None), "reserve") else None


def _integer_table() -> Any:
    kernels = _kernels()
    return _SortedIntegers() if kernels is None else _NativeIntegers(kernels)


def _bytes_table() -> Any:
    kernels = _kernels()
    return _ArrowBytes() if kernels is None else _NativeBytes(kernels)


class _NativeIntegers:
    """Integers and their numbers, in a hash table of the extension."""

    def __init__(self, kernels: Any) -> None:
        self._table = kernels.IntegerTable()

    def __len__(self) -> int:
        return int(self._table.size())

    def reserve(self, num_keys: int) -> None:
        self._table.reserve(num_keys)

    def keys(self) -> Int64Array:
        keys = np.empty(len(self), np.int64)
        self._table.copy_keys(keys)
        return keys

    def find(self, keys: Int64Array, out: NDArray[Any] | None = None) -> NDArray[Any]:
        return self._rows(keys, False, out)

    def insert(self, keys: Int64Array) -> NDArray[Any]:
        return self._rows(keys, True, None)

    def _rows(self, keys: Int64Array, inserts: bool, out: NDArray[Any] | None) -> NDArray[Any]:
        rows = np.empty(len(keys), np.int64) if out is None else out
        self._table.look_up(np.ascontiguousarray(keys), rows, inserts)
        return rows


class _NativeBytes:
    """Text or bytes and their numbers, in a hash table of the extension."""

    def __init__(self, kernels: Any) -> None:
        self._table = kernels.BytesTable()

    def __len__(self) -> int:
        return int(self._table.size())

    def reserve(self, num_keys: int) -> None:
        self._table.reserve(num_keys)

    def keys(self) -> Any:
        import pyarrow

        offsets = np.empty(len(self) + 1, np.int64)
        data = np.empty(self._table.num_bytes(), np.uint8)
        self._table.copy_keys(offsets, data)
        buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)]
        return pyarrow.Array.from_buffers(pyarrow.large_binary(), len(self), buffers)

    def find(self, keys: Any, out: NDArray[Any] | None = None) -> NDArray[Any]:
        return self._rows(keys, False, out)

    def insert(self, keys: Any) -> NDArray[Any]:
        return self._rows(keys, True, None)

    def _rows(self, keys: Any, inserts: bool, out: NDArray[Any] | None) -> NDArray[Any]:
        rows = np.empty(len(keys), np.int64) if out is None else out
        self._table.look_up(*_strings_of(keys), rows, inserts)
        return rows


def _strings_of(values: Any) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Offsets, of int32 or int64, and bytes of an Arrow array of text or bytes without nulls."""
    is_large = str(values.type).startswith("large")
    _, offsets, data = values.buffers()
    if offsets is None or not len(values):
        return np.zeros(len(values) + 1, np.int64), np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64 if is_large else np.int32)
    ends = ends[values.offset : values.offset + len(values) + 1]
    return ends, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def rows_at_once() -> int:
    """How many ids should be looked up in one call, at least, so that calls cost nothing."""
    return 1 << 20 if _kernels() is None else 1 << 15


def number_pairs(src: NDArray[Any], dst: NDArray[Any], is_ordered: bool) -> tuple[int, Int64Array]:
    """How many different pairs of ends edges have, and the number of each edge's, by first edge.

    Args:
        is_ordered: Whether an edge and its reverse are two pairs.
    """
    table, number = _integer_table(), np.empty(len(src), np.int64)
    num_dst = int(max(dst.max(initial=0), 0 if is_ordered else src.max(initial=0))) + 1
    at_once = max(len(src), 1) if _kernels() is None else _PAIRS_AT_ONCE
    for start in range(0, len(src), at_once):
        ends = slice(start, start + at_once)
        first, second = (np.asarray(end[ends], np.int64) for end in (src, dst))
        if not is_ordered:
            first, second = np.minimum(first, second), np.maximum(first, second)
        number[ends] = table.insert(first * num_dst + second)
    return len(table), number


def count_repeated(src: NDArray[Any], dst: NDArray[Any], num_src: int, num_dst: int) -> int:
    """How many edges have both ends of an earlier one.

    Args:
        src: int32 or int64, as ``dst``.
    """
    kernels = _kernels()
    if kernels is not None and num_src * num_dst < 2**63:
        return int(kernels.count_repeated(src, dst, num_src, num_dst, num_threads()))
    keys = src.astype(np.int64) * num_dst + dst
    keys.sort()
    return int(np.count_nonzero(keys[1:] == keys[:-1]))


class _SortedIntegers:
    """The same without the extension: a place for each where they are dense, else sorted arrays."""

    def __init__(self) -> None:
        self._keys = np.zeros(1024, np.int64)
        self._count = 0
        self._first = 0  # of _places
        self._places: NDArray[Any] | None = None
        self._sorted: Int64Array = np.zeros(0, np.int64)
        self._rows: Int64Array = np.zeros(0, np.int64)
        self._is_stale = True

    def __len__(self) -> int:
        return self._count

    def reserve(self, num_keys: int) -> None:
        """There is nothing to gain."""

    def keys(self) -> Int64Array:
        return self._keys[: self._count].copy()

    def find(self, keys: Int64Array, out: NDArray[Any] | None = None) -> Int64Array:
        del out  # a copy is cheap beside this
        if not self._count:
            return np.full(len(keys), -1, np.int64)
        if self._is_stale:
            self._index()
        if self._places is not None:
            shifted = keys - self._first  # wraps around where it is out of range
            # Compared as unsigned, one comparison finds both sides.
            inside = shifted.view(np.uint64) < np.uint64(len(self._places))
            if inside.all():
                return self._places[shifted].astype(np.int64)
            rows = np.full(len(keys), -1, np.int64)
            rows[inside] = self._places[shifted[inside]]
            return rows
        places = np.searchsorted(self._sorted, keys)
        places[places == len(self._sorted)] = 0
        return np.where(self._sorted[places] == keys, self._rows[places], -1)

    def insert(self, keys: Int64Array) -> Int64Array:
        rows = self.find(keys)
        is_new = rows < 0
        if not is_new.any():
            return rows
        distinct, first, place = np.unique(keys[is_new], return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(self._count, self._count + len(order))
        rows[is_new] = number[place.reshape(-1)]
        count = self._count + len(order)
        if count > len(self._keys):
            grown = np.empty(max(count, 2 * len(self._keys)), np.int64)
            grown[: self._count] = self._keys[: self._count]
            self._keys = grown
        self._keys[self._count : count] = distinct[order]
        self._count = count
        self._is_stale = True
        return rows

    def _index(self) -> None:
        keys = self._keys[: self._count]
        low, high = int(keys.min()), int(keys.max())
        self._places = None
        if high - low < 8 * self._count + (1 << 20):
            kind = np.int32 if self._count < 2**31 else np.int64
            self._first = low
            self._places = np.full(high - low + 1, -1, kind)
            self._places[keys - low] = np.arange(self._count)
        else:
            self._rows = np.argsort(keys)
            self._sorted = keys[self._rows]
        self._is_stale = False


class _ArrowBytes:
    """The same without the extension; each call costs as much as there are keys."""

    def __init__(self) -> None:
        import pyarrow

        self._keys: Any = pyarrow.array([], pyarrow.large_binary())

    def __len__(self) -> int:
        return len(self._keys)

    def reserve(self, num_keys: int) -> None:
        """There is nothing to gain."""

    def keys(self) -> Any:
        return self._keys

    def find(self, keys: Any, out: NDArray[Any] | None = None) -> Int64Array:
        import pyarrow
        from pyarrow import compute

        del out
        keys = keys.cast(pyarrow.large_binary())
        found = compute.fill_null(compute.index_in(keys, value_set=self._keys), -1)
        rows: Int64Array = found.to_numpy(zero_copy_only=False).astype(np.int64)
        return rows

    def insert(self, keys: Any) -> Int64Array:
        import pyarrow

        keys = keys.cast(pyarrow.large_binary())
        rows = self.find(keys)
        is_new = rows < 0
        if is_new.any():
            encoded = keys.filter(arrow_array(is_new)).dictionary_encode()
            rows[is_new] = len(self._keys) + encoded.indices.to_numpy(zero_copy_only=False)
            self._keys = pyarrow.concat_arrays([self._keys, encoded.dictionary])
        return rows
