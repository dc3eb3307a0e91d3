# SPDX-License-Identifier: Apache-2.0
"""Columns of Arrow tables as plain NumPy arrays: numbers, rows of lists, distinct values.

What encodings of features and of labels share. A column is an Arrow array or chunked array of any
physical form (dictionary, run-end encoded, extension, string view); it is read in pieces, so that
what is made in between stays in the cache and memory stays bounded. NaN is a missing value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_ROWS = 65_536
_VECTOR_VALUES = 2**20  # that are put side by side at once

Value = str | int | float | bool

VALUE_TYPES = ("string", "int64", "uint64", "double", "bool", "null")
"""Types, by Arrow's names, in which distinct values are compared and kept."""


def arrow_array(values: NDArray[Any]) -> Any:
    """A pyarrow array of an array."""
    import pyarrow

    return pyarrow.array(values)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values themselves: without dictionary, extension, or runs."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    return kind


def family_of(kind: pa.DataType) -> str:
    """What values of a type are: number, boolean, text, time, list, null, or other."""
    from pyarrow import types

    kind = plain_type(kind)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_temporal(kind) and not types.is_interval(kind):
        return "time"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list"
    return "null" if types.is_null(kind) else "other"


def chunks_of(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    """The arrays that a column consists of."""
    import pyarrow as pa

    return list(column.chunks) if isinstance(column, pa.ChunkedArray) else [column]


def pieces(
    column: pa.Array | pa.ChunkedArray,
    num_values: int = PIECE_ROWS,
    separator: str | None = None,
    name: str = "",
) -> Iterator[tuple[int, pa.Array]]:
    """Row of the column and plain array of each piece, in order, of about ``num_values``.

    Args:
        separator: Of text of several words, which becomes lists of them.
        name: Of the column, for errors about the separator.
    """
    first = 0
    for chunk in chunks_of(column):
        num_rows = max(1, num_values // _mean_length(chunk))
        for start in range(0, len(chunk), num_rows):
            piece = plain(chunk.slice(start, num_rows))
            yield first + start, piece if separator is None else _words(piece, separator, name)
        first += len(chunk)


def type_of_words(kind: pa.DataType, separator: str | None) -> pa.DataType:
    """The plain type of a column whose text is cut at a separator, if there is one."""
    import pyarrow as pa

    kind = plain_type(kind)
    return pa.list_(kind) if separator is not None and family_of(kind) == "text" else kind


def _words(array: pa.Array, separator: str, column: str) -> pa.Array:
    """Plain text as lists of the words between separators, without blanks around and empty ones.

    Raises:
        ValueError: It is no text.
    """
    import pyarrow as pa
    from pyarrow import compute

    if family_of(array.type) == "null":
        return array
    if family_of(array.type) != "text":
        raise ValueError(
            f"column '{column}' must be text to be cut at {separator!r} (got {array.type}); "
            "leave separator out"
        )
    lists = compute.split_pattern(array.cast(pa.large_string()), separator)
    words = compute.utf8_trim_whitespace(lists.flatten())
    is_word = compute.not_equal(words, "").to_numpy(zero_copy_only=False)
    ends = np.cumsum(np.maximum(lengths_of_lists(lists), 0))
    num_before = np.concatenate([[0], np.cumsum(is_word)])
    offsets = num_before[np.concatenate([[0], ends])].astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), words.filter(pa.array(is_word)), mask=array.is_null()
    )


SEPARATORS = ("|", ";", ",", "/", "::")


def evident_separator(values: pa.ChunkedArray, name: str) -> tuple[str, str] | None:
    """By what the text of a column is cut into words that cells share, and why; None: it is not.

    A tenth of the cells have the separator, there are at most half as many different words as there
    are different cells, and a word stands in two cells on average.
    """
    from pyarrow import compute

    if family_of(values.type) != "text":
        return None
    cells = [plain(chunk).drop_null() for chunk in chunks_of(values)]
    num_cells = sum(map(len, cells))
    different = DistinctValues("string", num_cells)
    for chunk in cells:
        different.update(comparable(chunk, "string", name, 0)[0])
    for separator in SEPARATORS:
        num_cut = sum(compute.match_substring(c, separator).true_count for c in cells)
        if 10 * num_cut < num_cells or not num_cut:
            continue
        words, num_words = DistinctValues("string", num_cells), 0
        for chunk in cells:
            of_chunk = _words(chunk, separator, name).flatten()
            num_words += len(of_chunk)
            words.update(of_chunk)
        if 2 * len(words) <= min(len(different), num_words):
            why = (
                f"{len(different):,} different cells are made of {len(words):,} words between "
                f"{separator!r}"
            )
            return separator, why
    return None


def _mean_length(chunk: pa.Array) -> int:
    """About how many values a row has, at least 1."""
    import pyarrow as pa

    if isinstance(chunk, pa.ExtensionArray):
        return _mean_length(chunk.storage)
    if isinstance(chunk, pa.FixedSizeListArray):
        return max(1, chunk.type.list_size)
    if isinstance(chunk, pa.ListArray | pa.LargeListArray) and len(chunk):
        return max(1, (chunk.offsets[-1].as_py() - chunk.offsets[0].as_py()) // len(chunk))
    return 1


def plain(array: pa.Array) -> pa.Array:
    """The values themselves, for which there are kernels in every release of pyarrow."""
    import pyarrow as pa
    from pyarrow import compute

    if isinstance(array, pa.ExtensionArray):
        return plain(array.storage)
    if pa.types.is_dictionary(array.type):
        values = plain(array.dictionary)  # first, as there is no kernel that takes all types
        return values.take(array.indices)
    if pa.types.is_run_end_encoded(array.type):
        return plain(compute.run_end_decode(array))
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    return array


def as_text(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Values as they are written."""
    import pyarrow as pa

    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        return pa.array([None if v is None else str(v) for v in column.to_pylist()], pa.string())


def numbers(array: pa.Array) -> NDArray[np.float64]:
    """A plain array of numbers, booleans or nulls as float64 [n], NaN where missing."""
    import pyarrow as pa

    if pa.types.is_float16(array.type):  # without a cast in older releases
        return array.to_numpy(zero_copy_only=False).astype(np.float64)
    return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def is_valid(array: pa.Array) -> NDArray[np.bool_]:
    """Whether each row has a value (NaN is one here)."""
    return array.is_valid().to_numpy(zero_copy_only=False)


def lengths_of_lists(array: pa.Array) -> NDArray[np.int64]:
    """The length of each list, -1 where there is none."""
    from pyarrow import compute, types

    if types.is_fixed_size_list(array.type):
        return np.where(is_valid(array), array.type.list_size, -1).astype(np.int64)
    lengths = compute.list_value_length(array)
    return compute.fill_null(lengths, -1).to_numpy(zero_copy_only=False).astype(np.int64)


def words_of_lists(
    array: pa.Array,
) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.bool_]]:
    """The elements of plain lists, the row of each, and which rows are missing or lack some."""
    lengths = lengths_of_lists(array)
    words = plain(array.flatten())
    rows = np.repeat(np.arange(len(array)), np.maximum(lengths, 0))
    missing = lengths < 0
    missing[rows[~is_valid(words)]] = True
    return words, rows, missing


def checked_separator(options: Mapping[str, Any], column: str) -> str | None:
    """What stands between the words of a column of text.

    Raises:
        ValueError: It is no text, or empty.
    """
    separator = options.get("separator")
    if separator is not None and not (isinstance(separator, str) and separator):
        raise ValueError(
            f"separator of column '{column}' must be the text between the words of a cell (got "
            f"{separator!r}); write one such as |"
        )
    return separator


def rows_of_lists(
    array: pa.Array, width: int | None, column: str, first_row: int
) -> tuple[int | None, NDArray[np.float64]]:
    """Lists of numbers of one length as float64 [n, width], NaN where missing.

    Args:
        array: Plain lists.
        width: The length that lists must have; None: that of the first list.
        column: Its name, for errors.
        first_row: The row of the column at which the array begins, for errors.

    Returns:
        The width, None if there is no list yet, and the rows.

    Raises:
        ValueError: The lengths differ, or the elements are no numbers.
    """
    inner = family_of(array.type.value_type)
    if inner not in ("number", "boolean", "null"):
        raise ValueError(
            f"the lists of column '{column}' must hold numbers, or words for the encoding "
            f"multi-hot (got {array.type}); give one column for each element, or an embedding of "
            "them as a list of numbers"
        )
    lengths = lengths_of_lists(array)
    is_list = lengths >= 0
    if width is None:
        if not is_list.any():
            return None, np.full((len(array), 0), np.nan)
        width = int(lengths[is_list][0])
        if not width:
            raise ValueError(
                f"the lists of column '{column}' must have elements (got an empty one in row "
                f"{first_row + int(is_list.argmax())}, from 0); leave the cell empty where the "
                "vector is unknown"
            )
    wrong = is_list & (lengths != width)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"the lists of column '{column}' must all have one length, {width} (got "
            f"{int(lengths[row])} in row {first_row + row}, from 0); pad or cut it, leave the "
            "cell empty where the vector is unknown, or ask for multi-hot where it lists categories"
        )
    rows = np.full((len(array), width), np.nan)
    if width:
        rows[is_list] = numbers(plain(array.flatten())).reshape(-1, width)
    return width, rows


def vectors_of(
    columns: Mapping[str, pa.ChunkedArray], names: Sequence[str], vector: str
) -> Iterator[pa.Array]:
    """Columns of numbers side by side, as lists of float64 of one length, some rows at a time.

    Args:
        names: The columns, in the order of the elements.
        vector: What is made of them, for errors.

    Raises:
        ValueError: A column holds something else.
    """
    import pyarrow as pa

    for name in names:
        if family_of(columns[name].type) not in ("number", "boolean", "null"):
            raise ValueError(
                f"the columns of '{vector}' must hold numbers, as they become one vector (got "
                f"'{name}' of {columns[name].type}); name fewer columns, or put '{name}' into "
                "ignore"
            )
    num_rows = max(1, _VECTOR_VALUES // len(names))
    for start in range(0, len(columns[names[0]]), num_rows):
        slices = [columns[name].slice(start, num_rows) for name in names]
        values = np.empty((len(slices[0]), len(names)))
        for element, part in enumerate(slices):
            values[:, element] = np.concatenate([numbers(plain(chunk)) for chunk in part.chunks])
        yield pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), len(names))


def width_of(field: pa.Field) -> int | None:
    """How many elements lists of a type have; None: that is not in the type.

    Raises:
        ValueError: None.
    """
    import pyarrow as pa

    kind = plain_type(field.type)
    if not pa.types.is_fixed_size_list(kind):
        return None
    if not kind.list_size:
        raise ValueError(
            f"the lists of column '{field.name}' must have elements (got {field.type}); leave the "
            "column out"
        )
    return int(kind.list_size)


def refuse_infinities(values: NDArray[np.float64], column: str, first_row: int) -> None:
    """Raise where a number of [n] or [n, width] is infinite.

    Raises:
        ValueError: One is.
    """
    infinite = np.isinf(values)
    if infinite.any():
        place = np.unravel_index(int(infinite.argmax()), infinite.shape)
        raise ValueError(
            f"numbers of column '{column}' must be finite (got {values[place]} in row "
            f"{first_row + int(place[0])}, from 0); leave the cell empty where the value is "
            "unknown, or put the largest sensible number"
        )


def value_type_of(kind: pa.DataType) -> str:
    """Which of `VALUE_TYPES` distinct values of a type are kept in."""
    from pyarrow import types

    kind = plain_type(kind)
    if types.is_uint64(kind):
        return "uint64"
    if types.is_integer(kind):
        return "int64"
    return {"number": "double", "boolean": "bool", "text": "string", "null": "null"}[
        family_of(kind)
    ]


def arrow_value_type(value_type: str) -> pa.DataType:
    """The Arrow type in which values are compared."""
    import pyarrow as pa

    return pa.large_string() if value_type == "string" else pa.type_for_alias(value_type)


def comparable(
    array: pa.Array, value_type: str, column: str, first_row: int
) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """A plain array in the type of distinct values, null where it is missing or not of that type.

    Numbers are compared by their value, whatever their width: 1.0 is 1.

    Returns:
        The array, and which of its rows have a value that the type cannot hold (None: no row).

    Raises:
        ValueError: Text came where numbers were, or the like, or an infinite number.
    """
    import pyarrow as pa
    from pyarrow import compute, types

    family, target = family_of(array.type), arrow_value_type(value_type)
    if family == "null":
        return pa.nulls(len(array), target), None
    if value_type == "null":  # nothing was seen, so every value is unknown
        return pa.nulls(len(array), target), is_valid(array)
    families = {"string": "text", "bool": "boolean"}
    expected = families.get(value_type, "number")
    if family != expected:
        raise ValueError(
            f"column '{column}' must hold {_SPOKEN[expected]}, as where its encoding was made (got "
            f"{array.type}); convert the column, or make new encodings"
        )
    if family != "number":
        return array if array.type.equals(target) else array.cast(target), None
    if not types.is_integer(array.type):
        values = numbers(array) + 0.0  # no -0.0
        refuse_infinities(values, column, first_row)
        missing = np.isnan(values)
        if value_type == "double":
            return pa.array(values, mask=missing), None
        low, high = (-(2.0**63), 2.0**63) if value_type == "int64" else (0.0, 2.0**64)
        outside = ~missing & ((values != np.trunc(values)) | (values < low) | (values >= high))
        absent = missing | outside
        whole = np.where(absent, 0.0, values).astype(target.to_pandas_dtype())
        return pa.array(whole, mask=absent), outside
    if value_type == "double":
        return array.cast(target, safe=False), None
    if value_type == "int64" and types.is_uint64(array.type):
        too_large = compute.greater(array, pa.scalar(2**63 - 1, pa.uint64()))
    elif value_type == "uint64" and types.is_signed_integer(array.type):
        too_large = compute.less(array, pa.scalar(0, array.type))
    else:
        return array.cast(target), None
    fitting = compute.if_else(too_large, pa.scalar(None, array.type), array).cast(target)
    return fitting, compute.fill_null(too_large, False).to_numpy(zero_copy_only=False)


_SPOKEN = {"number": "numbers", "boolean": "booleans", "text": "text"}


class DistinctValues:
    """The distinct values of a column, batch by batch, up to a number of them.

    Args:
        value_type: One of `VALUE_TYPES`.
        limit: Above this number nothing more is collected, and `is_over` says so.
    """

    def __init__(self, value_type: str, limit: int) -> None:
        import pyarrow as pa

        self.value_type = value_type
        self.limit = limit
        self.is_over = False
        self._values = pa.array([], arrow_value_type(value_type))

    def copy(self) -> DistinctValues:
        """Another one, with the values that there are now."""
        other = DistinctValues(self.value_type, self.limit)
        other._values, other.is_over = self._values, self.is_over
        return other

    def __len__(self) -> int:
        return len(self._values)

    def update(self, array: pa.Array) -> None:
        """Add the values of an array that `comparable` has made."""
        import pyarrow as pa
        from pyarrow import compute

        if self.is_over or self.value_type == "null":
            return
        new = compute.unique(array.drop_null())
        new = new.filter(compute.invert(compute.is_in(new, value_set=self._values)))
        if len(new):
            self._values = pa.concat_arrays([self._values, new])
        if len(self._values) > self.limit:
            self.is_over = True
            self._values = self._values.slice(0, self.limit)

    def sorted(self) -> tuple[Value, ...]:
        """Numbers by size, text by code points, false before true."""
        if self.value_type == "null":
            return ()
        return tuple(sorted(self._values.to_pylist()))


def positions(array: pa.Array, values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where among ``values`` the value of each row stands, -1 where nowhere; and which are null."""
    from pyarrow import compute

    found = compute.fill_null(compute.index_in(array, value_set=values), -1)
    return (
        found.to_numpy(zero_copy_only=False).astype(np.int64),
        array.is_null().to_numpy(zero_copy_only=False),
    )


def first_few(names: list[Any], count: int = 3) -> str:
    """Names in quotes for an error, with dots where there are more."""
    few = ", ".join(repr(name) for name in names[:count])
    return few + (", ..." if len(names) > count else "")


def is_dictionary(kind: pa.DataType) -> bool:
    """Whether values are kept as numbers into a dictionary."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return is_dictionary(kind.storage_type)
    return bool(pa.types.is_dictionary(kind))


def shown_value(value: Value) -> str:
    """A value as it is written in a table."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def checked_values(values: Any, value_type: str) -> tuple[Value, ...]:
    """Distinct values that come from a file.

    Raises:
        ValueError: One is not of the type, or they are not distinct.
    """
    classes = {"string": str, "double": float, "bool": bool}
    expected = classes.get(value_type, int)
    if value_type == "double":
        values = [float(value) if type(value) is int else value for value in values]
    wrong = [value for value in values if type(value) is not expected]
    if wrong or len(set(values)) != len(values) or (values and value_type == "null"):
        raise ValueError(
            f"values must be distinct and of type {value_type} (got {first_few(list(values))})"
        )
    return tuple(values)


def is_real(kind: pa.DataType) -> bool:
    """Whether values are numbers that need not be whole."""
    from pyarrow import types

    return bool(types.is_floating(kind) or types.is_decimal(kind))


def alias_of(kind: pa.DataType) -> str:
    """A name from which `arrow_type` makes the type of a value, or the nearest that has one."""
    from pyarrow import types

    if is_real(kind):
        return "float" if types.is_float32(kind) or types.is_float16(kind) else "double"
    return "string" if types.is_string_view(kind) else str(kind)


def arrow_type(alias: str) -> pa.DataType:
    """The type of a name that `alias_of` has made.

    Raises:
        ValueError: There is no such type.
    """
    import pyarrow as pa

    return pa.type_for_alias(alias)
