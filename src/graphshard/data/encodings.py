# SPDX-License-Identifier: Apache-2.0
"""Columns of tables as features: `EncodingFit` takes statistics, `Encoding` applies them.

What becomes of a column is chosen by its Arrow type, or asked for by name:

============== ======================================================= =====================
encoding       a value becomes                                         default for
============== ======================================================= =====================
standardized   (x - mean) / standard deviation                         numbers
number         x
logarithm      sign(x) log(1 + abs(x)), standardized
bucketed       one of several columns is 1: quantiles, or given edges
boolean        0 or 1                                                  booleans
category       one of several columns is 1, at most ``one_hot_limit``  text and dictionaries
embedding      a whole number for a table of embeddings, 0: unknown    ... of more values
time           seconds, standardized; hour, weekday, month and day of  dates, times, durations
               the year as points on a circle
vector         a column for each element; ``row_normalize`` divides    lists of numbers of
               each by the sum of the row                              one length
multi-hot      a column for each word, 1 where the row has it; words   lists of text; text with
               of text stand between ``separator``                     a separator
embedding-bag  numbers from 1 of the words of a row, for a matrix of   ... of more words
               which the row is the sum
============== ======================================================= =====================

**Missing values** (nulls and NaN; in a list, a missing element) are filled: numbers, booleans,
seconds and elements with the mean, buckets, categories and circles with zeros, an embedding with
its number 0. If any row had none while statistics were taken, one more column says where: 1 if
missing. Without one, missing values of later rows are filled and counted.

**Statistics**, known categories among them, are of training rows, where these are given, unless
``statistics = "all"`` is asked for; they are taken in float64. They are a function of the rows and
their order, wherever batches are cut: rows are summed in blocks by their number, and blocks in
order (Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample
variances, 1979). Memory is bounded: one block; the distinct values, up to a limit; for quantiles
`SAMPLE_ROWS` values, which are all of them or, of more, a uniform sample drawn by row number, whose
quantiles are off by 0.05 % of the rows (a standard deviation).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops import counter_random
from . import _columns
from ._columns import PIECE_ROWS, DistinctValues, Value, family_of

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]

SAMPLE_ROWS = 2**20
ONE_HOT_LIMIT = 32
MAX_CATEGORIES = 100_000
NUM_BUCKETS = 10
TIME_PARTS = ("seconds", "hour", "weekday", "month", "day_of_year")

_BLOCK_VALUES = 65_536
_SAMPLE_DOMAIN = 0x3C6EF372FE94F82B
_NUMERIC = ("standardized", "number", "logarithm", "bucketed")
_OF_VALUES = ("category", "embedding")
_OF_WORDS = ("multi-hot", "embedding-bag")
_KINDS: dict[str, tuple[str, ...]] = {  # the first is the default
    "number": (*_NUMERIC, *_OF_VALUES, "time"),
    "boolean": ("boolean", *_OF_VALUES),
    "text": _OF_VALUES,
    "time": ("time",),
    "list": ("vector",),
    "list of text": _OF_WORDS,
    "list of integers": ("vector", *_OF_WORDS),
}
_KINDS["null"] = ("number", "standardized", "logarithm", "bucketed", "boolean")
_KINDS["null"] += (*_OF_VALUES, "time", "vector", *_OF_WORDS)
_OPTIONS: dict[str, tuple[str, ...]] = {
    "bucketed": ("buckets", "edges"),
    "category": ("one_hot_limit", "max_categories"),
    "embedding": ("max_categories",),
    "time": ("parts",),
    "vector": ("row_normalize", "standardize"),
    "multi-hot": ("separator", "one_hot_limit", "max_categories"),
    "embedding-bag": ("separator", "max_categories"),
}
KINDS = (*_NUMERIC, "boolean", *_OF_VALUES, "time", "vector", *_OF_WORDS)


@dataclass
class EncodedCounts:
    """What `Encoding.encode`, or `Labels.encode`, has met, summed over its calls.

    Args:
        rows: Number of rows.
        missing: Rows without a value, or, in a list, without some element.
        unknown: Rows, or elements of sets of classes, with a value that was not there when the
            encoding was made.
        examples: The first few such values, as they are shown.
    """

    rows: int = 0
    missing: int = 0
    unknown: int = 0
    examples: list[str] = field(default_factory=list)

    def count_unknown(self, array: pa.Array, is_unknown: NDArray[np.bool_]) -> None:
        """Note the rows of an array whose values are unknown."""
        import pyarrow as pa

        self.unknown += int(is_unknown.sum())
        is_shown = family_of(array.type) in ("text", "number", "boolean")
        if is_shown and is_unknown.any() and len(self.examples) < 3:
            for value in array.filter(pa.array(is_unknown)).slice(0, 1000).to_pylist():
                shown = _columns.shown_value(value)
                if shown not in self.examples and len(self.examples) < 3:
                    self.examples.append(shown)


def choose(field: pa.Field, separator: str | None = None) -> str:
    """The encoding of a column by its type alone.

    ``category`` may become ``embedding``, and ``multi-hot`` ``embedding-bag``, for many values.

    Raises:
        ValueError: There is none for the type.
    """
    kinds = _kinds_of(_columns.type_of_words(field.type, separator))
    if not kinds:
        raise ValueError(
            f"column '{field.name}' must hold numbers, booleans, text, times, or lists of numbers "
            f"or of text (got {field.type}); convert it, or leave it out"
        )
    is_dictionary = _columns.is_dictionary(field.type)
    if is_dictionary and "category" in kinds:
        return "category"
    return kinds[0]


def _kinds_of(kind: pa.DataType) -> tuple[str, ...]:
    """The encodings that there are for a type, that by which it goes without asking first."""
    from pyarrow import types

    family = family_of(kind)
    if family == "list":
        inner = _columns.plain_type(_columns.plain_type(kind).value_type)
        family += " of text" * (family_of(inner) == "text")
        family += " of integers" * types.is_integer(inner)
    return _KINDS.get(family, ())


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a column becomes features, with the statistics that this takes.

    Args:
        column: Its name.
        kind: One of `KINDS`.
        type: The Arrow type of the values, as text.
        has_indicator: The last column is 1 where the value is missing.
        num_rows: Rows that statistics are of.
        mean: What numbers (after the logarithm, for that kind) are filled with, one an element.
        scale: What numbers are divided by, one an element; empty: they are taken as they are.
        edges: Where buckets begin, but for the first: bucket i holds edges[i - 1] <= x < edges[i].
        values: The known categories, sorted.
        value_type: Arrow's name of their type.
        parts: Of `TIME_PARTS`, in this order.
        columns: The columns that are the elements of a vector, where it is no column of lists.
        row_normalize: The elements of a vector are divided by their sum first.
        separator: What stands between the words of text that is cut into several.
    """

    column: str
    kind: str
    type: str
    has_indicator: bool = False
    num_rows: int = 0
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    edges: tuple[float, ...] = ()
    values: tuple[Value, ...] = ()
    value_type: str = "null"
    parts: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    row_normalize: bool = False
    separator: str | None = None

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each column of the result; none for what has a table of embeddings."""
        name = self.column
        if self.kind in ("embedding", "embedding-bag"):
            return ()
        if self.kind == "logarithm":
            names = [f"log1p({name})"]
        elif self.kind == "bucketed":
            names = self._bucket_names()
        elif self.kind == "category":
            names = [f"{name} = {_columns.shown_value(value)}" for value in self.values]
        elif self.kind == "multi-hot":
            names = [f"{name} has {_columns.shown_value(value)}" for value in self.values]
        elif self.kind == "time":
            names = []
            for part in self.parts:
                words = f"{name}: {part.replace('_', ' ')}"
                is_circle = part != "seconds"
                names += [f"{words}, sine", f"{words}, cosine"] if is_circle else [words]
        elif self.kind == "vector":
            names = list(self.columns)
            names = names or [f"{name}[{element}]" for element in range(len(self.mean))]
        else:
            names = [name]
        return (*names, f"{name} is missing") if self.has_indicator else tuple(names)

    def _bucket_names(self) -> list[str]:
        name, edges = self.column, [f"{edge:.6g}" for edge in self.edges]
        if not edges:
            return [name]
        between = [f"{low} <= {name} < {high}" for low, high in itertools.pairwise(edges)]
        return [f"{name} < {edges[0]}", *between, f"{name} >= {edges[-1]}"]

    @property
    def width(self) -> int:
        """Number of columns of float32 in the result: 0 for what has a table of embeddings."""
        return len(self.names)

    @property
    def num_embeddings(self) -> int:
        """Rows that a table must have for the kinds ``embedding`` and ``embedding-bag``."""
        return len(self.values) + 1

    def longest(self, column: pa.Array | pa.ChunkedArray) -> int:
        """How many words a row of a column has at most."""
        pieces = _columns.pieces(column, separator=self.separator, name=self.column)
        lists = [piece for _, piece in pieces if family_of(piece.type) == "list"]
        return max((int(_columns.lengths_of_lists(p).max(initial=0)) for p in lists), default=0)

    def encode(
        self,
        column: pa.Array | pa.ChunkedArray,
        *,
        first_row: int = 0,
        counts: EncodedCounts | None = None,
    ) -> NDArray[Any]:
        """Features of the rows of a column.

        Args:
            first_row: The number of the first row in the whole column, for errors.
            counts: Where missing and unknown values are counted.

        Returns:
            float32 [n, width]; for an embedding int64 [n], 0 where missing or unknown; for an
            embedding bag int32 [n, longest], the numbers of the known words of a row from 1,
            ascending, and 0 behind them.

        Raises:
            ValueError: The column is of another kind than where statistics were taken, a number is
                infinite or too large for float32, or a list has another length.
        """
        counts = EncodedCounts() if counts is None else counts
        if self.kind == "embedding":
            out: NDArray[Any] = np.empty(len(column), np.int64)
        elif self.kind == "embedding-bag":
            out = np.zeros((len(column), self.longest(column)), np.int32)
        else:
            out = np.empty((len(column), self.width), np.float32)
        is_wide = self.kind in ("category", "bucketed", "multi-hot")
        num_values = PIECE_ROWS // max(self.width, 1) if is_wide else PIECE_ROWS
        num_values = max(num_values, 4 * len(self.values), 256)
        for start, piece in _columns.pieces(column, num_values, self.separator, self.column):
            rows = out[start : start + len(piece)]
            counts.rows += len(piece)
            with np.errstate(over="ignore", invalid="ignore"):
                missing = self._encode_piece(piece, rows, first_row + start, counts)
            counts.missing += int(missing.sum())
            if self.has_indicator:
                rows[:, -1] = missing
        return out

    def _encode_piece(
        self, piece: pa.Array, out: NDArray[Any], first_row: int, counts: EncodedCounts
    ) -> NDArray[np.bool_]:
        """Fill ``out``, but for the indicator; returns which rows are missing."""
        if self.kind in _OF_VALUES:
            return self._encode_values(piece, out, first_row, counts)
        if self.kind in _OF_WORDS:
            return self._encode_words(piece, out, first_row, counts)
        if self.kind == "vector":
            return self._encode_vector(piece, out, first_row)
        self._check_family(piece)
        if self.kind == "time":
            return self._encode_time(piece, out, first_row)
        values = _columns.numbers(piece)
        _columns.refuse_infinities(values, self.column, first_row)
        missing = np.isnan(values)
        if self.kind == "bucketed":
            bucket = np.searchsorted(self.edges, values, side="right")
            _one_hot(out, bucket, ~missing)
            return missing
        if self.kind == "logarithm":
            values = _signed_log1p(values)
        self._put(out[:, 0], values, 0, missing, first_row)
        return missing

    def _check_family(self, piece: pa.Array) -> None:
        family = family_of(piece.type)
        is_right = self.kind in _kinds_of(piece.type)
        if self.kind == "time" and family == "time":
            is_right = _scale_of(str(piece.type)) == _scale_of(self.type)
        if not is_right and family != "null":
            raise ValueError(
                f"column '{self.column}' must be one that can be encoded as {self.kind}, as where "
                f"its encoding was made from {self.type} (got {piece.type}); convert the column, "
                "or make new encodings"
            )

    def _put(
        self,
        out: NDArray[Any],
        values: Floats,
        element: int | slice,
        missing: NDArray[np.bool_],
        first_row: int,
    ) -> None:
        """Fill, standardize, and store numbers of [n] or [n, width]."""
        mean = np.array(self.mean)[element]
        if missing.any():
            values = np.where(missing, mean, values)
        if self.scale:
            values = (values - mean) / np.array(self.scale)[element]
        out[...] = values
        finite = np.isfinite(out)
        if not finite.all():
            place = np.unravel_index(int((~finite).argmax()), finite.shape)
            raise ValueError(
                f"column '{self.column}' must fit float32 when encoded as {self.kind} (got "
                f"{values[place]} in row {first_row + int(place[0])}, from 0); use "
                '"logarithm" or "bucketed", or a smaller unit'
            )

    def _encode_values(
        self, piece: pa.Array, out: NDArray[Any], first_row: int, counts: EncodedCounts
    ) -> NDArray[np.bool_]:
        array, outside = _columns.comparable(piece, self.value_type, self.column, first_row)
        place, missing = _columns.positions(array, self._arrow_values)
        is_unknown = (place < 0) & ~missing
        if outside is not None:
            is_unknown |= outside
            missing &= ~outside
        counts.count_unknown(piece, is_unknown)
        if self.kind == "embedding":
            np.add(place, 1, out=out)
        else:
            _one_hot(out, place, place >= 0)
        return missing

    def _encode_words(
        self, piece: pa.Array, out: NDArray[Any], first_row: int, counts: EncodedCounts
    ) -> NDArray[np.bool_]:
        self._check_family(piece)
        out[...] = 0
        if family_of(piece.type) == "null":
            return ~_columns.is_valid(piece)
        words, rows, missing = _columns.words_of_lists(piece)
        array, outside = _columns.comparable(words, self.value_type, self.column, first_row)
        place, is_null = _columns.positions(array, self._arrow_values)
        is_unknown = (place < 0) & ~is_null
        if outside is not None:
            is_unknown |= outside
        counts.count_unknown(words, is_unknown)
        rows, place = rows[place >= 0], place[place >= 0]
        if self.kind == "multi-hot":
            out[rows, place] = 1
            return missing
        keys = np.unique(rows * len(self.values) + place)  # a word once, and in order
        rows, place = np.divmod(keys, max(len(self.values), 1))
        first_of_row = np.searchsorted(rows, np.arange(len(piece)))
        out[rows, np.arange(len(rows)) - first_of_row[rows]] = place + 1
        return missing

    @functools.cached_property
    def _arrow_values(self) -> pa.Array:
        import pyarrow as pa

        return pa.array(self.values, _columns.arrow_value_type(self.value_type))

    def _encode_vector(
        self, piece: pa.Array, out: NDArray[Any], first_row: int
    ) -> NDArray[np.bool_]:
        width = len(self.mean)
        if family_of(piece.type) == "null":
            values = np.full((len(piece), width), np.nan)
        else:
            self._check_family(piece)
            _, values = _columns.rows_of_lists(piece, width, self.column, first_row)
        _columns.refuse_infinities(values, self.column, first_row)
        if self.row_normalize:
            values = _row_normalized(values)
        missing = np.isnan(values)
        self._put(out[:, :width], values, slice(None), missing, first_row)
        return missing.any(axis=1) if width else ~_columns.is_valid(piece)

    def _encode_time(self, piece: pa.Array, out: NDArray[Any], first_row: int) -> NDArray[np.bool_]:
        seconds = seconds_of(piece)
        _columns.refuse_infinities(seconds, self.column, first_row)
        missing = np.isnan(seconds)
        place = 0
        for part in self.parts:
            if part == "seconds":
                self._put(out[:, place], seconds, 0, missing, first_row)
                place += 1
                continue
            angle = 2 * np.pi * _turns(_in_zone_of(piece, self.type), part)
            for circle in (np.sin(angle), np.cos(angle)):
                out[:, place] = np.where(missing, 0.0, circle)
                place += 1
        return missing

    def as_json(self) -> dict[str, Any]:
        """Everything that `of_json` needs; floats come back exactly, as JSON writes their repr."""
        content: dict[str, Any] = {
            "column": self.column,
            "encoding": self.kind,
            "type": self.type,
            "width": self.width,
            "missing_indicator": self.has_indicator,
            "statistics_rows": self.num_rows,
        }
        for key in ("mean", "scale", "edges", "values", "parts", "columns"):
            if getattr(self, key):
                content[key] = list(getattr(self, key))
        if self.row_normalize:
            content["row_normalize"] = True
        if self.separator is not None:
            content["separator"] = self.separator
        if self.kind in (*_OF_VALUES, *_OF_WORDS):
            content["value_type"] = self.value_type
        return content

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Encoding:
        """The encoding that `as_json` has described.

        Raises:
            ValueError: Something in it cannot be.
        """
        try:
            kind, value_type = content["encoding"], content.get("value_type", "null")
            if kind not in KINDS:
                raise ValueError(f"there is no encoding {kind!r}")
            if value_type not in _columns.VALUE_TYPES:
                raise ValueError(f"there is no type of values {value_type!r}")
            encoding = cls(
                column=content["column"],
                kind=kind,
                type=content["type"],
                has_indicator=content["missing_indicator"],
                num_rows=content["statistics_rows"],
                mean=tuple(map(float, content.get("mean", ()))),
                scale=tuple(map(float, content.get("scale", ()))),
                edges=tuple(map(float, content.get("edges", ()))),
                values=_columns.checked_values(content.get("values", ()), value_type),
                value_type=value_type,
                parts=tuple(content.get("parts", ())),
                columns=tuple(content.get("columns", ())),
                row_normalize=content.get("row_normalize", False),
                separator=_columns.checked_separator(content, content["column"]),
            )
            encoding._check()
            if encoding.width != content["width"]:
                raise ValueError(f"its width is {encoding.width} and not {content['width']!r}")
        except KeyError as error:
            raise ValueError(f"an encoding must say its {error} (it does not)") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"an encoding must be as encodings are written ({error})") from None
        return encoding

    def _check(self) -> None:
        numbers = {"mean": self.mean, "scale": self.scale, "edges": self.edges}
        for name, values in numbers.items():
            if not all(map(math.isfinite, values)):
                raise ValueError(f"{name} of column '{self.column}' must be finite (got {values})")
        if min(self.scale, default=1.0) <= 0 or (self.scale and len(self.scale) != len(self.mean)):
            raise ValueError(f"scale of column '{self.column}' must be positive, one for each mean")
        if not set(self.parts) <= set(TIME_PARTS):
            raise ValueError(f"parts must be of {TIME_PARTS} (got {self.parts})")
        if self.columns and (self.kind != "vector" or len(self.columns) != len(self.mean)):
            raise ValueError(
                f"columns of '{self.column}' must be the elements of a vector, {len(self.mean)} "
                f"(got {len(self.columns)})"
            )
        if self.kind in ("standardized", "number", "logarithm", "boolean") and not self.mean:
            raise ValueError(f"the encoding of column '{self.column}' must have a mean (got none)")


class EncodingFit:
    """Statistics of a column, batch by batch, and the encoding that they make.

    Args:
        field: The name and the Arrow type of the column.
        asked: What is asked of it: ``encoding``, one of `KINDS`, and its options: ``buckets`` (a
            number) or ``edges`` (numbers between buckets), ``one_hot_limit`` and
            ``max_categories``, ``separator`` (text between words), ``parts`` of a time (of
            `TIME_PARTS`), ``row_normalize`` and ``standardize`` of a vector (true or false); and
            ``statistics``, "training" or "all".
        columns: The columns that are the elements of a vector, where it is no column of lists.

    Raises:
        ValueError: There is no such encoding, or none of this type, or an option does not fit.
    """

    def __init__(
        self,
        field: pa.Field,
        asked: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        self.column: str = field.name
        self.type = str(_columns.plain_type(field.type))
        self._columns = tuple(columns)
        if columns:
            self.type = f"{len(columns)} columns"
        options = dict(asked or {})
        self._separator = _columns.checked_separator(options, self.column)
        if self._separator is not None and family_of(field.type) not in ("text", "null"):
            raise ValueError(
                f"column '{self.column}' must be text to be cut at {self._separator!r} (got "
                f"{self.type}); leave separator out"
            )
        kind = _columns.type_of_words(field.type, self._separator)
        default = choose(field, self._separator)
        self._is_asked = options.get("encoding") is not None or self._separator is not None
        self.kind: str = options.pop("encoding", None) or default
        self._check_kind(_kinds_of(kind))
        self._read_options(options)
        self._num_rows = 0  # of all
        self._num_statistics = 0
        self._num_values = 0  # of these, those that are not missing
        self._has_missing = False
        self._width = _columns.width_of(field) if self.kind == "vector" else 1
        has_values = self.kind in (*_OF_VALUES, *_OF_WORDS)
        has_moments = not has_values and self.kind != "bucketed" and self._width is not None
        self._moments = _Moments(self._width or 0) if has_moments else None
        self._sample = _Sample() if self.kind == "bucketed" and self._edges is None else None
        if family_of(kind) == "list" and has_values:
            kind = kind.value_type
        value_type = _columns.value_type_of(kind) if has_values else "null"
        self._distinct = DistinctValues(value_type, self._max_categories)
        self._distinct_training: DistinctValues | None = None  # where these are not all rows

    def _check_kind(self, allowed: Sequence[str]) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"the encoding of column '{self.column}' must be one of {', '.join(KINDS)} (got "
                f"{self.kind!r})"
            )
        if self.kind in allowed:
            return
        if self.kind in _OF_WORDS and "category" in allowed:
            raise ValueError(
                f"the encoding {self.kind} of column '{self.column}' needs the text between words "
                f'(got none, of type {self.type}); say separator = "|" or the like'
            )
        raise ValueError(
            f"a column of type {self.type} can be encoded as {', '.join(allowed)} (got "
            f"{self.kind!r} for column '{self.column}'); use one of these, or convert the "
            "column"
        )

    def _read_options(self, options: dict[str, Any]) -> None:
        allowed = (*_OPTIONS.get(self.kind, ()), "statistics")
        if left_over := [key for key in options if key not in allowed]:
            raise ValueError(
                f"the encoding {self.kind} takes {', '.join(allowed)} (got "
                f"{_columns.first_few(left_over)} for column '{self.column}'); remove "
                "it, or choose the encoding that it belongs to"
            )
        self._of_all_rows = options.get("statistics", "training") == "all"
        if options.get("statistics", "training") not in ("training", "all"):
            raise ValueError(
                f'statistics of column \'{self.column}\' must be of "training" rows or of "all" '
                f"(got {options['statistics']!r})"
            )
        self._one_hot_limit = self._count(options, "one_hot_limit", ONE_HOT_LIMIT)
        self._max_categories = self._count(options, "max_categories", MAX_CATEGORIES)
        self._num_buckets = self._count(options, "buckets", NUM_BUCKETS)
        self._standardize = bool(options.get("standardize", False))
        self._row_normalize = bool(options.get("row_normalize", False))
        self._edges = None if options.get("edges") is None else self._checked_edges(options)
        self._parts = self._checked_parts(options.get("parts", ("seconds",)))

    def _count(self, options: Mapping[str, Any], key: str, default: int) -> int:
        count = options.get(key, default)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"{key} of column '{self.column}' must be a whole number from 1 (got {count!r})"
            )
        return count

    def _checked_edges(self, options: Mapping[str, Any]) -> tuple[float, ...]:
        if "buckets" in options:
            raise ValueError(
                f"column '{self.column}' must have buckets or edges (got both); leave out buckets"
            )
        given = options["edges"]
        is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given)
        if is_list and all(
            isinstance(edge, int | float) and not isinstance(edge, bool) for edge in given
        ):
            edges = tuple(map(float, given))
            if all(map(math.isfinite, edges)) and all(a < b for a, b in itertools.pairwise(edges)):
                return edges
        raise ValueError(
            f"edges of column '{self.column}' must be finite numbers, ascending (got {given!r}); "
            "they lie between the buckets: n edges make n + 1"
        )

    def _checked_parts(self, given: Any) -> tuple[str, ...]:
        asked = [given] if isinstance(given, str) else list(given)
        if not asked or not set(asked) <= set(TIME_PARTS):
            raise ValueError(
                f"parts of column '{self.column}' must be of {', '.join(TIME_PARTS)} (got "
                f"{given!r})"
            )
        possible: tuple[str, ...] = TIME_PARTS
        if self.type.startswith("duration"):
            possible = TIME_PARTS[:1]
        elif self.type.startswith("time32") or self.type.startswith("time64"):
            possible = TIME_PARTS[:2]
        elif self.type.startswith("date"):
            possible = (TIME_PARTS[0], *TIME_PARTS[2:])
        if not set(asked) <= set(possible):
            raise ValueError(
                f"parts of column '{self.column}' of type {self.type} must be of "
                f"{', '.join(possible)} (got {given!r})"
            )
        return tuple(part for part in TIME_PARTS if part in asked)

    def update(
        self, column: pa.Array | pa.ChunkedArray, is_training: NDArray[np.bool_] | None = None
    ) -> None:
        """Take in the next rows.

        Args:
            is_training: Which of them are training rows; None: all.

        Raises:
            ValueError: A number is infinite, or a list has another length than others.
        """
        if self._of_all_rows:
            is_training = None
        for start, piece in _columns.pieces(column, separator=self._separator, name=self.column):
            chosen = None if is_training is None else is_training[start : start + len(piece)]
            self._update_piece(piece, chosen)

    def _update_piece(self, piece: pa.Array, chosen: NDArray[np.bool_] | None) -> None:
        first_row, num_before = self._num_rows, self._num_statistics
        self._num_rows += len(piece)
        self._num_statistics += len(piece) if chosen is None else int(chosen.sum())
        if self.kind in _OF_WORDS:
            if family_of(piece.type) == "null":
                self._has_missing |= bool(len(piece))
                return
            piece, rows, missing = _columns.words_of_lists(piece)
            self._has_missing |= bool(missing.any())
            chosen = None if chosen is None else chosen[rows]
        if self.kind in (*_OF_VALUES, *_OF_WORDS):
            self._update_values(piece, chosen, first_row)
            return
        if self.kind == "vector":
            values = self._vector_rows(piece, first_row, num_before)
            self._has_missing |= bool(piece.null_count)
        elif self.kind == "time":
            values = seconds_of(piece)
        else:
            values = _columns.numbers(piece)
        _columns.refuse_infinities(values, self.column, first_row)
        if self._row_normalize:
            values = _row_normalized(values)
        self._has_missing |= bool(np.isnan(values).any())
        if chosen is not None:
            values = values[chosen]
        if self._sample is not None:
            self._sample.update(values)
        elif self.kind == "logarithm":
            values = _signed_log1p(values)
        if self._moments is not None:
            self._moments.update(values if values.ndim == 2 else values[:, None])

    def _vector_rows(self, piece: pa.Array, first_row: int, num_before: int) -> Floats:
        if family_of(piece.type) == "null":
            return np.full((len(piece), self._width or 0), np.nan)
        width, values = _columns.rows_of_lists(piece, self._width, self.column, first_row)
        if self._width is None and width is not None:
            self._width = width
            self._moments = _Moments(width)
            self._moments.skip(num_before)
        return values

    def _update_values(
        self, piece: pa.Array, chosen: NDArray[np.bool_] | None, first_row: int
    ) -> None:
        import pyarrow as pa

        value_type = self._distinct.value_type
        array, _ = _columns.comparable(piece, value_type, self.column, first_row)
        self._has_missing |= bool(array.null_count)
        self._num_values += len(array) - array.null_count
        if chosen is not None and self._distinct_training is None:
            self._distinct_training = self._distinct.copy()
        self._distinct.update(array)
        if self._distinct_training is not None:
            chosen_values = array if chosen is None else array.filter(pa.array(chosen))
            self._distinct_training.update(chosen_values)

    def refusal(self) -> str | None:
        """Why the column cannot be a feature, a sentence: it holds text, or ids; None: it can.

        Of text whose encoding is not asked for, more than `ONE_HOT_LIMIT` distinct values in
        more than half of all rows are taken for texts or ids: what would be learnt of one row says
        nothing of others.
        """
        number = len(self._distinct)
        cure = (
            "give an embedding of it (a column with a list of numbers for each row), or leave it "
            "out"
        )
        what = "words" if self.kind in _OF_WORDS else "rows"
        if self._distinct.is_over:
            return (
                f"column '{self.column}' must have at most {self._max_categories} distinct values "
                f"to be a category (got more, of type {self.type}); {cure}, or raise max_categories"
            )
        if not self._is_asked and number > self._one_hot_limit and 2 * number > self._num_values:
            return (
                f"column '{self.column}' must be a category, with values that rows share (got "
                f"{number} distinct values in {self._num_values} {what}, as texts and ids have); "
                f'{cure}, or ask for the encoding "embedding{"-bag" * (what == "words")}"'
            )
        return None

    def finish(self) -> Encoding:
        """The encoding.

        Raises:
            ValueError: No row was a training row; there are too many categories; or numbers are so
                large that their variance is no number.
        """
        if self._num_rows and not self._num_statistics:
            raise ValueError(
                f"column '{self.column}' must have training rows to take statistics from (got none "
                f"among {self._num_rows} rows); label rows or put some into the training split, or "
                "take statistics from all rows"
            )
        if reason := self.refusal():
            raise ValueError(reason)
        kind = self.kind
        values: tuple[Value, ...] = ()
        mean, scale, edges = self._statistics()
        if self.kind in (*_OF_VALUES, *_OF_WORDS):
            training = self._distinct_training
            values = (self._distinct if training is None else training).sorted()
            many = "embedding-bag" if self.kind in _OF_WORDS else "embedding"
            kind = many if len(values) > self._one_hot_limit else self.kind
        return Encoding(
            column=self.column,
            kind=kind,
            type=self.type,
            has_indicator=self._has_missing and kind not in ("embedding", "embedding-bag"),
            num_rows=self._num_statistics,
            mean=mean,
            scale=scale,
            edges=edges,
            values=values,
            value_type=self._distinct.value_type,
            parts=self._parts if kind == "time" else (),
            columns=self._columns,
            row_normalize=self._row_normalize,
            separator=self._separator,
        )

    def _statistics(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Means, scales and edges."""
        if self.kind in (*_OF_VALUES, *_OF_WORDS):
            return (), (), ()
        if self._edges is not None:
            return (), (), self._edges
        if self._sample is not None:
            return (), (), self._sample.edges(self._num_buckets)
        if self._moments is None:  # no list among all rows
            return (), (), ()
        mean, scale = self._moments.finish()
        if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
            raise ValueError(
                f"numbers of column '{self.column}' must be small enough for a variance, below "
                f'1e150 or so (got mean {mean.max()}); use "logarithm" or "bucketed", or a '
                "smaller unit"
            )
        is_scaled = self.kind in ("standardized", "logarithm", "time") or self._standardize
        return tuple(mean.tolist()), tuple(scale.tolist()) if is_scaled else (), ()


class _Moments:
    """Mean and standard deviation of each column of [n, width], the same however rows come.

    Rows are collected into blocks of a fixed number, the first ones first; each block is reduced by
    itself, in two passes over it, and joined to those before.
    """

    def __init__(self, width: int) -> None:
        self._block = np.empty((max(1, _BLOCK_VALUES // max(width, 1)), width))
        self._filled = 0
        self._count = np.zeros(width)
        self._mean = np.zeros(width)
        self._squares = np.zeros(width)  # sum of squared differences from the mean
        self._low = np.full(width, np.inf)
        self._high = np.full(width, -np.inf)

    def skip(self, num_rows: int) -> None:
        """Count rows without any value, before all others."""
        self._filled = num_rows % len(self._block)
        self._block[: self._filled] = np.nan

    def update(self, values: Floats) -> None:
        """Take in rows, NaN where missing."""
        start = 0
        while start < len(values):
            count = min(len(self._block) - self._filled, len(values) - start)
            self._block[self._filled : self._filled + count] = values[start : start + count]
            self._filled += count
            start += count
            if self._filled == len(self._block):
                self._reduce()

    def _reduce(self) -> None:
        block = self._block[: self._filled]
        self._filled = 0
        missing = np.isnan(block)
        count = len(block) - missing.sum(axis=0)
        self._low = np.fmin(self._low, np.fmin.reduce(block, axis=0))
        self._high = np.fmax(self._high, np.fmax.reduce(block, axis=0))
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.where(missing, 0.0, block).sum(axis=0) / np.maximum(count, 1)
            squares = (np.where(missing, 0.0, block - mean) ** 2).sum(axis=0)
            total = np.maximum(self._count + count, 1)
            difference = mean - self._mean
            self._mean = self._mean + difference * (count / total)
            self._squares = self._squares + squares + difference**2 * (self._count * count / total)
        self._count = self._count + count

    def finish(self) -> tuple[Floats, Floats]:
        """Means, 0 of nothing, and standard deviations, 1 where all values are equal."""
        if self._filled:
            self._reduce()
        is_constant = self._low >= self._high
        mean = np.where(is_constant, self._low, self._mean)
        mean = np.where(self._count == 0, 0.0, mean)
        scale = np.sqrt(self._squares / np.maximum(self._count, 1))
        return mean, np.where(is_constant | (self._count == 0) | (scale == 0), 1.0, scale)


class _Sample:
    """Up to `SAMPLE_ROWS` numbers of a column: those whose rows have the smallest random keys."""

    def __init__(self) -> None:
        self._values = np.empty(0)
        self._keys = np.empty(0, np.uint64)
        self._new_values: list[Floats] = []
        self._new_keys: list[NDArray[np.uint64]] = []
        self._num_new = 0
        self._num_rows = 0
        self._largest_key = np.uint64(2**64 - 1)  # with a larger one, no number is chosen

    def update(self, values: Floats) -> None:
        """Take in the numbers of the next rows, NaN where missing."""
        has_value = ~np.isnan(values)
        ids = torch.arange(self._num_rows, self._num_rows + len(values))
        self._num_rows += len(values)
        state = counter_random.key_state(0, _SAMPLE_DOMAIN)
        keys = counter_random.states(state, ids).numpy().view(np.uint64)
        is_new = has_value & (keys <= self._largest_key)
        self._new_keys.append(keys[is_new])
        self._new_values.append(values[is_new])
        self._num_new += int(is_new.sum())
        if self._num_new > SAMPLE_ROWS:
            self._choose()

    def _choose(self) -> None:
        self._values = np.concatenate([self._values, *self._new_values])
        self._keys = np.concatenate([self._keys, *self._new_keys])
        self._new_values, self._new_keys, self._num_new = [], [], 0
        if len(self._keys) > SAMPLE_ROWS:
            smallest = np.argpartition(self._keys, SAMPLE_ROWS)[:SAMPLE_ROWS]
            self._values, self._keys = self._values[smallest], self._keys[smallest]
            self._largest_key = self._keys.max()

    def edges(self, num_buckets: int) -> tuple[float, ...]:
        """Where buckets of equally many numbers meet; fewer where many numbers are equal."""
        self._choose()
        if not len(self._values):
            return ()
        ordered = np.sort(self._values)
        # quantiles between neighbours by their distance, exactly a number where one is there
        place, rest = np.divmod((len(ordered) - 1) * np.arange(1, num_buckets), num_buckets)
        lower, upper = ordered[place], ordered[np.minimum(place + 1, len(ordered) - 1)]
        share = rest / num_buckets
        between = lower * (1 - share) + upper * share
        edges = np.unique(np.where(lower == upper, lower, between))
        return tuple(edges[edges > ordered[0]].tolist())


def _scale_of(time_type: str) -> str:
    """What times of a type are counted from: nothing, midnight, or 1970."""
    for scale in ("duration", "time32", "time64"):
        if time_type.startswith(scale):
            return scale[:4]
    return "1970"


def _row_normalized(values: Floats) -> Floats:
    """Each row divided by the sum of what it has; a row of zeros as it is."""
    total = np.nansum(values, axis=1, keepdims=True)
    return values / np.where(total == 0, 1.0, total)


def _signed_log1p(values: Floats) -> Floats:
    return np.copysign(np.log1p(np.abs(values)), values)


def _one_hot(out: NDArray[Any], place: NDArray[np.int64], is_put: NDArray[np.bool_]) -> None:
    """Zeros in all of ``out``, and 1 in column ``place`` of the rows that have one."""
    out[...] = 0
    rows = np.flatnonzero(is_put)
    out[rows, place[rows]] = 1


def seconds_of(array: pa.Array) -> Floats:
    """A plain array of times as seconds, NaN where missing.

    Timestamps and dates count from 1970 (of UTC), times from midnight; numbers are seconds already.
    """
    import pyarrow as pa

    if family_of(array.type) != "time":
        return _columns.numbers(array)
    if pa.types.is_date32(array.type):
        return _columns.numbers(array.cast(pa.int32())) * 86_400.0
    if pa.types.is_time32(array.type):
        counts = array.cast(pa.int32())
    else:
        counts = array.cast(pa.int64())
    unit = "ms" if pa.types.is_date64(array.type) else array.type.unit
    return _columns.numbers(counts) / {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]


def _in_zone_of(array: pa.Array, kind: str) -> pa.Array:
    """The same times, with the hours and days of the time zone where statistics were taken.

    Times without a zone are of UTC, as in `seconds_of`.
    """
    import pyarrow as pa

    if not pa.types.is_timestamp(array.type) or not kind.startswith("timestamp"):
        return array
    zone = kind.partition("tz=")[2].rstrip("]") or None
    return array if array.type.tz == zone else array.cast(pa.timestamp(array.type.unit, zone))


def _turns(array: pa.Array, part: str) -> Floats:
    """How far around its circle a part of each time is: hour / 24, and so on."""
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    if pa.types.is_time(kind):
        return np.floor(seconds_of(array) / 3600) / 24
    if family_of(kind) == "number":
        seconds = np.floor(_columns.numbers(array))
        missing = np.isnan(seconds)
        whole = np.where(missing, 0, seconds).astype(np.int64)
        array = pa.array(whole, mask=missing).cast(pa.timestamp("s"))
    elif not pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("ms" if pa.types.is_date64(kind) else "s"))
    if part == "hour":
        return _columns.numbers(compute.hour(array)) / 24
    if part == "weekday":
        return _columns.numbers(compute.day_of_week(array)) / 7
    if part == "month":
        return (_columns.numbers(compute.month(array)) - 1) / 12
    return (_columns.numbers(compute.day_of_year(array)) - 1) / 366
